//! The engine under test: unchanged, on simulated devices. This file only translates.
//!
//! The options are those of the geometry's tuning. What is a stream follows from the batches of write-back, so that nothing more
//! has to be drawn: with small ones some requests are already longer than the cut-off, with the largest none ever is.

use super::berth::Berth;
use super::policy::Knob;
use super::seat::{Seat, gone};
use super::tuning::{SetTuning, WITHOUT_STREAMS};
use super::{
    Geometry, Lost, Mode, Refusal, Reply, Request, Return, Running, Soon, Standing, System, Told, VolumeShape,
};
use super::{asking, lodger, lost, older, returned, tables, work};
use crate::disk::Device;
use crate::growth;
use crate::note::MemoryNote;
use bcached_check::{ReadAt, Severity};
use bcached_engine::{BucketCount, CacheSet, Cancel, Options, Phases, Settings, VolumeId, VolumeOptions};
use bcached_env::rng::Rng;
use bcached_env::{DiskId, Env};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, Replacement, SECTOR_BYTES,
    Uuid,
};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Where the data of a backing device starts: what the usual tools choose.
pub(super) const DATA_START: u64 = 16;

/// A cache set of the real engine.
pub struct Engine;

/// Findings of the checker that a report shows.
const FINDINGS_SHOWN: usize = 4;

/// A device that nobody uses, as the checker reads it.
pub struct Image<'a>(pub &'a Device);

impl ReadAt for Image<'_> {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        // The checker may ask for a part of the last sector.
        let sectors = (buffer.len() as u64).div_ceil(SECTOR_BYTES);
        if sector.checked_add(sectors).is_none_or(|end| end > self.0.model.sectors) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut whole =
            vec![0; usize::try_from(sectors * SECTOR_BYTES).expect("just less than a sector more")];
        // What a device cannot read at present is judged all the same.
        self.0.view().read(sector, &mut whole);
        buffer.copy_from_slice(&whole[..buffer.len()]);
        Ok(())
    }

    fn sectors(&self) -> u64 {
        self.0.model.sectors
    }
}

struct Open {
    berth: Rc<Berth>,
    seats: Vec<Rc<Seat>>,
    shapes: Vec<VolumeShape>,
}

impl Open {
    /// Does something with a volume as soon as it is served.
    fn with<T: 'static>(
        &self,
        volume: u32,
        ask: impl FnOnce(&CacheSet, VolumeId) -> Soon<Result<T, Refusal>> + 'static,
    ) -> Soon<Result<T, Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            let (id, set) = seat.id().await.zip(berth.set()).ok_or_else(gone)?;
            // Who lets go of a set waits for those who hold it.
            let asked = ask(&set, id);
            drop(set);
            asked.await
        })
    }

    /// Likewise something long, which [`Running::cancel`] gives up.
    fn long<T: 'static>(
        &self,
        volume: u32,
        ask: impl FnOnce(&CacheSet, VolumeId, Cancel) -> Soon<Result<T, Refusal>> + 'static,
    ) -> Soon<Result<T, Refusal>> {
        let cancel = self.seats[volume as usize].cancel();
        self.with(volume, |set, id| ask(set, id, cancel))
    }
}

/// Bytes that make a stream, for each sector of a batch of write-back: 32 KiB to 2 MiB.
const CUTOFF_BYTES_A_SECTOR: u64 = 4096;

/// The options of a run.
fn options(geometry: &Geometry) -> Options {
    let SetTuning {
        node_budget_mib,
        journal_delay_ms,
        leaf_delay_ms,
        parked_delay_ms,
        parked_max,
        writeback_delay_ms,
        writeback_batch_sectors,
        writeback_running,
        writeback_percent,
        summary_share,
        cutoff_cache_add,
        cutoff_writeback,
        policy,
    } = geometry.tuning.set;
    // With these buckets a node takes a whole one.
    let least = bcached_engine::node_budget_min(u64::from(geometry.bucket_sectors), 0);
    let small = |count: u64| usize::try_from(count).expect("small");
    let defaults = Options::default();
    let (sequential_cutoff, congested) = match writeback_batch_sectors {
        WITHOUT_STREAMS.. => (0, (Duration::ZERO, Duration::ZERO)),
        sectors => (
            sectors * CUTOFF_BYTES_A_SECTOR,
            (defaults.congested_read_threshold, defaults.congested_write_threshold),
        ),
    };
    let mut volume = VolumeOptions {
        sequential_cutoff,
        writeback_delay: Duration::from_millis(writeback_delay_ms),
        writeback_running,
        writeback_percent,
        ..VolumeOptions::default()
    };
    policy.tell(&mut volume);
    Options {
        // A cache that has failed a few times takes nothing more, and little would be seen of it.
        io_error_limit: if writeback_percent == 0 { defaults.io_error_limit } else { u64::MAX },
        congested_read_threshold: congested.0,
        congested_write_threshold: congested.1,
        node_budget_bytes: (small(node_budget_mib) << 20).max(least),
        reserve: Some(reserve(geometry)),
        summary_share,
        cutoff_cache_add,
        cutoff_writeback,
        // It would hide that a rate does not suffice.
        idle_max_writeback_rate: writeback_percent != 10,
        journal_delay: Duration::from_millis(journal_delay_ms),
        leaf_delay: Duration::from_millis(leaf_delay_ms),
        replay_keys: replay_keys(leaf_delay_ms, parked_delay_ms),
        replay_beside: replay_beside(parked_delay_ms),
        replay_rest: replay_rest(parked_delay_ms),
        parked_delay: Duration::from_millis(parked_delay_ms),
        parked_max: small(parked_max),
        writeback_batch_sectors,
        zero_batch_sectors: zero_batch_sectors(writeback_delay_ms),
        volume,
        ..defaults
    }
}

/// Sectors that are made zero at once: so few that most zeroings have pieces, or some, or none. (Not drawn, either.)
const fn zero_batch_sectors(writeback_delay_ms: u64) -> u64 {
    match writeback_delay_ms {
        ..=1 => 64,
        2..=10 => 1024,
        11..=100 => 1 << 14,
        _ => 1 << 19,
    }
}

/// Keys of the journal that a start puts in order at once: few, so that there are several such stretches, or all. (Not drawn, so that a
/// seed draws the workload that it has always drawn.)
const fn replay_keys(leaf_delay_ms: u64, parked_delay_ms: u64) -> usize {
    match leaf_delay_ms {
        ..=5 if parked_delay_ms > 20 => 3,
        ..=50 => 64,
        51..=500 => 7,
        _ => 1 << 18,
    }
}

/// Keys of the journal from which on a start serves requests before they are in the tree: any, some, or more than there are. (Not drawn
/// either.)
const fn replay_beside(parked_delay_ms: u64) -> usize {
    match parked_delay_ms {
        ..=20 => 1,
        21..=200 => 16,
        _ => 1024,
    }
}

/// How long such a start takes for that: long, so that requests come in between, or as long as it takes. (Not drawn either.)
const fn replay_rest(parked_delay_ms: u64) -> Duration {
    match parked_delay_ms {
        ..=2 => Duration::from_millis(50),
        3..=20 => Duration::from_millis(2),
        _ => Duration::ZERO,
    }
}

/// Buckets kept for the next start: none, or enough for one start before the tree has been walked, or for two. (Not drawn, so
/// that a seed draws the workload that it has always drawn.)
const fn reserve(geometry: &Geometry) -> u64 {
    match (geometry.buckets, geometry.buckets % 4) {
        // A set that has grown.
        (growth::BUCKETS, _) => 120,
        (growth::COPSE_BUCKETS, _) => 96,
        (_, 0) => 0,
        (_, 1) => 48,
        _ => 80,
    }
}

/// A mode in the engine's words.
#[must_use]
pub const fn mode(mode: Mode) -> CacheMode {
    match mode {
        Mode::Writethrough => CacheMode::Writethrough,
        Mode::Writeback => CacheMode::Writeback,
        Mode::Writearound => CacheMode::Writearound,
        Mode::None => CacheMode::None,
    }
}

/// A policy of replacement in the engine's words.
const fn replacement(number: u64) -> Replacement {
    match number {
        0 => Replacement::Lru,
        1 => Replacement::Fifo,
        _ => Replacement::Random,
    }
}

fn uuid(rng: &mut Rng) -> Uuid {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&rng.nonzero().to_le_bytes());
    bytes[8..].copy_from_slice(&rng.nonzero().to_le_bytes());
    Uuid(bytes)
}

impl System for Engine {
    fn name(&self) -> &'static str {
        "engine"
    }

    fn flushes_alone(&self) -> bool {
        true
    }

    fn make(&self, geometry: &Geometry, seed: u64) -> Vec<Device> {
        let mut rng = Rng::new(seed);
        let set_uuid = uuid(&mut rng);
        let sixteen = |sectors: u32| u16::try_from(sectors).expect("blocks and buckets are small");
        let (block_sectors, bucket_sectors) =
            (sixteen(geometry.set_block_sectors), sixteen(geometry.bucket_sectors));
        let mut cache = geometry.cache_device();
        let superblock = CacheSuperblock::format(CacheFormat {
            uuid: uuid(&mut rng),
            set_uuid,
            device_sectors: cache.model.sectors,
            block_sectors,
            bucket_sectors,
            discard: geometry.tuning.devices.discard,
            replacement: replacement(geometry.tuning.devices.replacement),
        });
        cache.place(SUPERBLOCK_SECTOR, &superblock.expect("a geometry that can be run").seal()[..]);
        let mut devices = vec![cache];
        for index in 0..geometry.volumes.len() {
            let volume = u32::try_from(index).expect("few volumes");
            let mut backing = geometry.backing_device(volume, DATA_START);
            let superblock = BackingSuperblock::format(BackingFormat {
                uuid: uuid(&mut rng),
                set_uuid,
                block_sectors,
                bucket_sectors,
                data_offset: None,
                cache_mode: mode(geometry.tuning.devices.first_mode(u64::from(volume))),
                device_sectors: backing.model.sectors,
            });
            backing.place(SUPERBLOCK_SECTOR, &superblock.expect("a geometry that can be run").seal()[..]);
            devices.push(backing);
        }
        devices
    }

    fn damage_table(&self, devices: &mut [Device], seed: u64) -> bool {
        tables::damage(devices, seed)
    }

    fn finds_damage(&self, devices: &[Device]) -> bool {
        let images: Vec<Image<'_>> = devices.iter().map(Image).collect();
        let backings: Vec<&dyn ReadAt> = images[1..].iter().map(|image| image as &dyn ReadAt).collect();
        !bcached_check::check(&images[0], &backings, bcached_check::Options::default())
            .report
            .findings
            .is_empty()
    }

    fn tells_older(&self, now: &[Device], copy: &Device, which: usize) -> bool {
        older::is_told(now, copy, which)
    }

    /// The offline checker, which shares nothing with the engine but the meaning of bytes. Even after a crash a clean copy
    /// must equal its backing device: its key enters the tree only when that is durable. And a backing device that says that
    /// nothing is dirty is served by whoever has it at hand, whatever the cache holds.
    fn inspect(&self, devices: &[Device], counted: Option<&[BucketCount]>) -> Vec<String> {
        let images: Vec<Image<'_>> = devices.iter().map(Image).collect();
        let backings: Vec<&dyn ReadAt> = images[1..].iter().map(|image| image as &dyn ReadAt).collect();
        let options = bcached_check::Options { compare_clean: true, ..Default::default() };
        let checked = bcached_check::check(&images[0], &backings, options);
        let report = &checked.report;
        let miscounted = counted.map(|counted| miscounted(counted, &checked.buckets)).unwrap_or_default();
        let to_replay = report.journal.map_or(0, |journal| journal.keys_to_replay);
        let unfinished = (counted.is_some() && to_replay > 0)
            .then(|| format!("{to_replay} keys are left to replay after an orderly stop"));
        let broken = report.findings.iter().filter(|damage| damage.severity >= Severity::Error);
        let hidden = report.volumes.iter().filter(|volume| volume.dirty_sectors > 0 && volume.claims_clean);
        let hidden =
            hidden.map(|volume| format!("volume {} has dirty data and does not say so", volume.inode));
        broken
            .map(ToString::to_string)
            .chain(hidden)
            .chain(miscounted)
            .chain(unfinished)
            .take(FINDINGS_SHOWN)
            .collect()
    }

    fn open(
        &self,
        env: Env,
        geometry: &Geometry,
        note: MemoryNote,
        phases: Arc<Phases>,
    ) -> Soon<Result<Rc<dyn Running>, Refusal>> {
        let options = Options { phases, ..options(geometry) };
        let count = u32::try_from(geometry.volumes.len()).expect("few volumes");
        let (unit_sectors, lodgers) = (geometry.block_sectors, count..geometry.count());
        Box::pin(async move {
            let world = env.clone();
            let open = Box::new(move || -> Soon<_> {
                let (note, options) = (Box::new(note.clone()), options.clone());
                Box::pin(CacheSet::open(world.clone(), DiskId(0), note, options))
            });
            let berth = Berth::open(env, open).await.map_err(Refusal::from_error)?;
            let set = berth.set().expect("it has been opened");
            let mut volumes = Vec::new();
            for volume in 0..count {
                volumes.push(set.add_backing(DiskId(1 + volume), None).await.map_err(Refusal::from_error)?);
            }
            let infos = set.volumes();
            let shape = |id: &VolumeId| {
                let info = infos.iter().find(|info| info.id == *id)?;
                Some(VolumeShape { sectors: info.sectors, unit_sectors })
            };
            let shapes = volumes.iter().filter_map(shape).collect();
            let of_lodger = |volume| Seat::of_lodger(lodger::find(&set, volume).map(|info| info.id));
            let seats = volumes.into_iter().map(Seat::of).chain(lodgers.map(of_lodger)).collect();
            Ok(Rc::new(Open { berth, seats, shapes }) as Rc<dyn Running>)
        })
    }
}

/// Where the engine's counts and the checker's differ, and what is both free and referenced.
fn miscounted(counted: &[BucketCount], recounted: &[bcached_check::Bucket]) -> Vec<String> {
    let differs = |(index, (engine, checker)): (usize, (&BucketCount, &bcached_check::Bucket))| {
        let (live, dirty) = (checker.live_sectors, checker.dirty_sectors);
        let agree = (engine.live, engine.dirty) == (live, dirty);
        let shared = engine.free && checker.usage != bcached_check::Use::Free;
        (!agree || shared).then(|| {
            let usage = checker.usage;
            format!(
                "bucket {index}: {engine:?}, but {live} sectors are live, {dirty} of them dirty ({usage:?})"
            )
        })
    };
    assert_eq!(counted.len(), recounted.len(), "the engine and the checker know of the same buckets");
    counted.iter().zip(recounted).enumerate().filter_map(differs).collect()
}

/// Changes the mode of a volume of an engine; and the cache's replacement policy with it, so that its superblock is written while it
/// is used.
#[must_use]
pub fn set_mode(set: &CacheSet, id: VolumeId, wanted: Mode) -> Soon<Result<(), Refusal>> {
    let set = set.clone();
    let replacement = match wanted {
        Mode::Writethrough => Replacement::Fifo,
        Mode::Writearound => Replacement::Random,
        Mode::Writeback | Mode::None => Replacement::Lru,
    };
    let settings = Settings { replacement: Some(replacement), ..Settings::default() };
    Box::pin(async move {
        let changed = set.set_cache_mode(id, mode(wanted)).await;
        // Nobody waits for that.
        let _ = set.keep_settings(settings).await;
        changed.map_err(Refusal::from_error)
    })
}

/// Stops an engine.
#[must_use]
pub fn stop(set: &CacheSet) -> Soon<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { set.stop().await.map_err(Refusal::from_error) })
}

impl Running for Open {
    fn volumes(&self) -> Vec<VolumeShape> {
        self.shapes.clone()
    }

    fn lodger(&self, volume: u32) -> Option<u64> {
        lodger::find(&self.berth.set()?, volume).map(|info| info.sectors)
    }

    fn standing(&self, volume: u32) -> Standing {
        let seat = &self.seats[volume as usize];
        if seat.is_lodger() {
            return Standing::CacheAlone;
        }
        let (Some(id), Some(set)) = (seat.served_as(), self.berth.set()) else { return Standing::Detached };
        match set.cache_mode(id) {
            Some(CacheMode::Writethrough) => Standing::Cached(Mode::Writethrough),
            Some(CacheMode::Writeback) => Standing::Cached(Mode::Writeback),
            Some(CacheMode::Writearound) => Standing::Cached(Mode::Writearound),
            Some(CacheMode::None) => Standing::Cached(Mode::None),
            None => Standing::Detached,
        }
    }

    fn create(&self, volume: u32, sectors: u64) -> Soon<Result<bool, Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            let _nobody = seat.id().await;
            let set = berth.set().ok_or_else(gone)?;
            lodger::create(&set, &seat, volume, sectors).await
        })
    }

    fn delete(&self, volume: u32) -> Soon<Result<bool, Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            let (_, set) = seat.id().await.zip(berth.set()).ok_or_else(gone)?;
            lodger::delete(&set, &seat).await
        })
    }

    fn serve(&self, volume: u32, request: Request) -> Soon<Reply> {
        self.serve_and_tell(volume, request, Box::new(|_| ()))
    }

    fn serve_and_tell(&self, volume: u32, request: Request, told: Told) -> Soon<Reply> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            match seat.id().await.zip(berth.set()) {
                Some((id, set)) => asking::serve(&set, id, request, told).await,
                None => {
                    let reply = Reply { result: Err(gone()), buffer: None };
                    told(&reply);
                    reply
                }
            }
        })
    }

    fn keep_note(&self) -> Soon<bool> {
        let berth = Rc::clone(&self.berth);
        Box::pin(async move {
            match berth.set() {
                Some(set) => set.keep_note().await.is_ok(),
                None => false,
            }
        })
    }

    fn set_mode(&self, volume: u32, wanted: Mode) -> Soon<Result<(), Refusal>> {
        self.with(volume, move |set, id| set_mode(set, id, wanted))
    }

    fn turn(&self, volume: u32, knob: Knob, value: u64) -> Soon<Result<(), Refusal>> {
        self.with(volume, move |set, id| {
            let turned = set.change_volume_options(id, |options| knob.turn(options, value));
            Box::pin(async move { turned.map_err(Refusal::from_error) })
        })
    }

    fn detach(&self, volume: u32) -> Soon<Result<(), Refusal>> {
        self.long(volume, work::detach)
    }

    fn attach(&self, volume: u32) -> Soon<Result<(), Refusal>> {
        self.long(volume, work::attach)
    }

    fn clean(&self, volume: u32) -> Soon<Result<(), Refusal>> {
        self.long(volume, work::clean)
    }

    fn cancel(&self, volume: u32) {
        if let Some(set) = self.berth.set() {
            set.cancel(&self.seats[volume as usize].cancelled());
        }
    }

    fn readd(&self, volume: u32) -> Soon<Result<bool, Refusal>> {
        let (berth, seats, volume) = (Rc::clone(&self.berth), self.seats.clone(), volume as usize);
        Box::pin(async move {
            if berth.revive(&seats).await? {
                return Ok(false);
            }
            let Some(set) = berth.set() else { return Ok(false) };
            seats[volume].readd(&set).await
        })
    }

    fn shrink(&self, volume: u32, sectors: u64) -> Soon<Result<bool, Refusal>> {
        let is_lodger = self.seats[volume as usize].is_lodger();
        self.long(volume, move |set, id, cancel| work::shrink(set, id, cancel, (sectors, is_lodger)))
    }

    fn grow(&self, volume: u32, sectors: u64) -> Soon<Result<bool, Refusal>> {
        self.long(volume, move |set, id, cancel| work::grow(set, id, cancel, sectors))
    }

    fn begin_forget(&self, volume: u32) -> Soon<Result<Option<Lost>, Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            // Who lets go of a set waits for those who hold it: nobody does who waits for a seat.
            match seat.id().await.and_then(|_| berth.set()) {
                Some(set) => lost::begin(&set, &seat).await,
                None => Ok(None),
            }
        })
    }

    fn exchange(&self, device: &mut Device) {
        lost::exchange(device);
    }

    fn forget(&self, volume: u32, lost: Lost) -> Soon<Result<(), Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            let set = berth.set().expect("nobody opens it again while a volume is away");
            lost::end(&set, &seat, lost).await
        })
    }

    fn can_return(&self, volume: u32) -> bool {
        let seat = &self.seats[volume as usize];
        self.berth.set().is_some_and(|set| set.failure().is_none()) && seat.served_as().is_some()
    }

    fn take_back(&self, volume: u32, disk: DiskId) -> Soon<Result<Return, Refusal>> {
        let (berth, seat) = (Rc::clone(&self.berth), Rc::clone(&self.seats[volume as usize]));
        Box::pin(async move {
            match seat.id().await {
                Some(id) => returned::take_back(&berth, &seat, id, disk).await,
                None => Ok(Return::NotNow),
            }
        })
    }

    fn assert_invariants(&self) {
        if let Some(set) = self.berth.set() {
            set.assert_invariants();
        }
    }

    fn counted(&self) -> Option<Vec<BucketCount>> {
        self.berth.set().and_then(|set| set.counted())
    }

    fn written_bytes(&self) -> Option<u64> {
        self.berth.written_bytes()
    }

    fn dirty_sectors(&self) -> u64 {
        let volumes = self.berth.set().map(|set| set.volumes()).unwrap_or_default();
        volumes.iter().filter(|volume| !volume.flash_only).map(|volume| volume.dirty_sectors).sum()
    }

    fn caches(&self) -> bool {
        true
    }

    /// Of a volume that is gone a stop promises nothing.
    fn stop(&self) -> Soon<Result<(), Refusal>> {
        let (berth, seats) = (Rc::clone(&self.berth), self.seats.clone());
        Box::pin(async move {
            stop(&berth.set().ok_or_else(gone)?).await?;
            if seats.iter().any(|seat| seat.is_gone()) { Err(gone()) } else { Ok(()) }
        })
    }
}
