//! Runs the unchanged engine, and the host of its set, on simulated devices: how devices are made,
//! with which options a set is opened, and what the checker finds.
//!
//! The options are those of the geometry's tuning. The threshold of a stream follows from the batch
//! size of write-back, so that nothing more has to be drawn. With small batches some requests
//! already exceed the cut-off; with the largest none does.

use super::open::HostedSet;
use super::tuning::{SetTuning, WITHOUT_STREAMS};
use super::{BoxFuture, Geometry, Mode, ProcessContext, Refusal, RunningSystem, System};
use super::{hosting, older, tables};
use crate::disk::Device;
use crate::growth;
use bcached_check::{ReadAt, Severity};
use bcached_engine::{BucketCount, Options, VolumeOptions};
use bcached_env::rng::Rng;
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, ReplacementPolicy,
    SECTOR_BYTES, Uuid,
};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Where the data of a backing device starts: the default of the usual tools.
pub(super) const DATA_START: u64 = 16;

/// A cache set of the real engine.
pub struct Engine;

/// Number of checker findings that a report shows.
const FINDINGS_SHOWN: usize = 4;

/// A device that is not in use, as the checker reads it.
pub struct DeviceImage<'a>(pub &'a Device);

impl ReadAt for DeviceImage<'_> {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        // The checker may ask for part of the last sector.
        let sectors = (buffer.len() as u64).div_ceil(SECTOR_BYTES);
        if sector.checked_add(sectors).is_none_or(|end| end > self.0.model.sectors) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut whole =
            vec![0; usize::try_from(sectors * SECTOR_BYTES).expect("just less than a sector more")];
        // Content that a device cannot read at present is judged all the same.
        self.0.view().read(sector, &mut whole);
        buffer.copy_from_slice(&whole[..buffer.len()]);
        Ok(())
    }

    fn sectors(&self) -> u64 {
        self.0.model.sectors
    }
}

/// Bytes that make a stream, for each sector of a write-back batch: 32 KiB to 2 MiB.
const CUTOFF_BYTES_A_SECTOR: u64 = 4096;

/// Returns the options of a run.
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
    // With these buckets, a node takes a whole one.
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
    hosting::tell(geometry, &mut volume);
    Options {
        // A cache that reaches the error limit takes no more data, and the run would test little of
        // it.
        io_error_limit: if writeback_percent == 0 { defaults.io_error_limit } else { u64::MAX },
        congested_read_threshold: congested.0,
        congested_write_threshold: congested.1,
        node_budget_bytes: (small(node_budget_mib) << 20).max(least),
        reserve: Some(reserve(geometry)),
        summary_share,
        cutoff_cache_add,
        cutoff_writeback,
        // It would hide that a rate is too low.
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

/// Returns the number of sectors that are zeroed at once: with few, most zeroings have several
/// pieces; with more, some or none have. (Not drawn, either.)
const fn zero_batch_sectors(writeback_delay_ms: u64) -> u64 {
    match writeback_delay_ms {
        ..=1 => 64,
        2..=10 => 1024,
        11..=100 => 1 << 14,
        _ => 1 << 19,
    }
}

/// Returns how many journal keys a start sorts at once: few, so that there are several such
/// stretches, or all. (Not drawn, so that a seed keeps drawing the same workload.)
const fn replay_keys(leaf_delay_ms: u64, parked_delay_ms: u64) -> usize {
    match leaf_delay_ms {
        ..=5 if parked_delay_ms > 20 => 3,
        ..=50 => 64,
        51..=500 => 7,
        _ => 1 << 18,
    }
}

/// Returns from how many journal keys on a start serves requests before the keys are in the tree:
/// any, some, or more than there are. (Not drawn either.)
const fn replay_beside(parked_delay_ms: u64) -> usize {
    match parked_delay_ms {
        ..=20 => 1,
        21..=200 => 16,
        _ => 1024,
    }
}

/// Returns how long such a start pauses before it reads the next leaves: long, so that requests
/// come in between, or not at all. (Not drawn either.)
const fn replay_rest(parked_delay_ms: u64) -> Duration {
    match parked_delay_ms {
        ..=2 => Duration::from_millis(50),
        3..=20 => Duration::from_millis(2),
        _ => Duration::ZERO,
    }
}

/// Returns how many buckets are reserved for the next start: none, enough for one start before the
/// tree has been walked, or enough for two. (Not drawn, so that a seed keeps drawing the same
/// workload.)
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

/// Converts a mode to the engine's type.
#[must_use]
pub const fn mode(mode: Mode) -> CacheMode {
    match mode {
        Mode::Writethrough => CacheMode::Writethrough,
        Mode::Writeback => CacheMode::Writeback,
        Mode::Writearound => CacheMode::Writearound,
        Mode::None => CacheMode::None,
    }
}

/// Converts a replacement policy to the engine's type.
const fn replacement(number: u64) -> ReplacementPolicy {
    match number {
        0 => ReplacementPolicy::Lru,
        1 => ReplacementPolicy::Fifo,
        _ => ReplacementPolicy::Random,
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
        let images: Vec<DeviceImage<'_>> = devices.iter().map(DeviceImage).collect();
        let backings: Vec<&dyn ReadAt> = images[1..].iter().map(|image| image as &dyn ReadAt).collect();
        !bcached_check::check(&images[0], &backings, bcached_check::Options::default())
            .report
            .findings
            .is_empty()
    }

    fn tells_older(&self, now: &[Device], copy: &Device, which: usize) -> bool {
        older::is_told(now, copy, which)
    }

    /// Runs the offline checker, which shares nothing with the engine but the meaning of bytes.
    /// Even after a crash a clean copy must equal its backing device, because its key enters the
    /// tree only when that data is durable. A backing device that reports no dirty data may be
    /// served without the cache, whatever the cache holds.
    fn inspect(&self, devices: &[Device], counted: Option<&[BucketCount]>) -> Vec<String> {
        let images: Vec<DeviceImage<'_>> = devices.iter().map(DeviceImage).collect();
        let backings: Vec<&dyn ReadAt> = images[1..].iter().map(|image| image as &dyn ReadAt).collect();
        let options = bcached_check::Options { compare_clean: true, ..Default::default() };
        let checked = bcached_check::check(&images[0], &backings, options);
        let report = &checked.report;
        let miscounted = counted.map(|counted| miscounted(counted, &checked.buckets)).unwrap_or_default();
        let to_replay = report.journal.map_or(0, |journal| journal.keys_to_replay);
        let unfinished = (counted.is_some() && to_replay > 0)
            .then(|| format!("{to_replay} keys remain to be replayed after an orderly stop"));
        let broken = report.findings.iter().filter(|damage| damage.severity >= Severity::Error);
        let hidden = report.volumes.iter().filter(|volume| volume.dirty_sectors > 0 && volume.claims_clean);
        let hidden =
            hidden.map(|volume| format!("volume {} has dirty data, but is marked clean", volume.inode));
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
        process: ProcessContext,
        geometry: &Geometry,
    ) -> BoxFuture<Result<Rc<dyn RunningSystem>, Refusal>> {
        let options = Options { phases: Arc::clone(&process.phases), ..options(geometry) };
        let geometry = geometry.clone();
        Box::pin(async move {
            let open = HostedSet::open(&process, &geometry, options).await.map_err(Refusal::from_error)?;
            Ok(Rc::new(open) as Rc<dyn RunningSystem>)
        })
    }
}

/// Lists the differences between the engine's and the checker's counts, and buckets that are both
/// free and referenced.
fn miscounted(counted: &[BucketCount], recounted: &[bcached_check::Bucket]) -> Vec<String> {
    let differs = |(index, (engine, checker)): (usize, (&BucketCount, &bcached_check::Bucket))| {
        let (live, dirty) = (checker.live_sectors, checker.dirty_sectors);
        let agree = (engine.live, engine.dirty) == (live, dirty);
        let shared = engine.free && checker.usage != bcached_check::BucketUse::Free;
        (!agree || shared).then(|| {
            let usage = checker.usage;
            format!(
                "bucket {index}: {engine:?}, but {live} sectors are live, {dirty} of them dirty ({usage:?})"
            )
        })
    };
    assert_eq!(counted.len(), recounted.len(), "the engine and the checker count the same buckets");
    counted.iter().zip(recounted).enumerate().filter_map(differs).collect()
}
