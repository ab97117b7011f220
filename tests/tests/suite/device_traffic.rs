//! The traffic that each cache mode causes on the devices, to the byte, for one request of 4 KiB at
//! a time.
//!
//! The engine runs on simulated devices whose operations are counted. Data goes to the cache
//! without FUA and metadata with it, so the two can be distinguished; only data is checked.
//! Write-back does not run meanwhile: each count ends a few virtual milliseconds after the reply.

use std::cell::RefCell;
use std::rc::Rc;

use bcached_sim::disk::{OpKind, ZeroSupport};
use bcached_sim::driver::OpView;
use bcached_sim::scenario::ScenarioRig;
use bcached_sim::system::engine::Engine;
use bcached_sim::system::tuning::DeviceTuning;
use bcached_sim::system::{Geometry, Mode, Tuning};
use bcached_sim::workload::Step;
use bcached_tests::failure::{Failure, Outcome};

/// Size of a request, in sectors.
const SECTORS: u64 = 8;
/// The sector where a backing device's data starts.
const DATA_START: u64 = 16;
/// A sector on the cache device behind the superblock, at or before the start of the first bucket.
const CACHE_START: u64 = 16;
/// Time after a reply, in milliseconds: long enough for what follows it (a fill), too short for a
/// timer of the engine.
const AFTER_MS: u64 = 2;

/// Bytes of data on each device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Traffic {
    cache_read: u64,
    cache_written: u64,
    backing_read: u64,
    backing_written: u64,
    /// What the backing device was asked to zero.
    backing_zeroed: u64,
}

const NOTHING: Traffic =
    Traffic { cache_read: 0, cache_written: 0, backing_read: 0, backing_written: 0, backing_zeroed: 0 };
/// Size of a request, in bytes.
const BYTES: u64 = SECTORS * 512;
const HIT: Traffic = Traffic { cache_read: BYTES, ..NOTHING };
const MISS: Traffic = Traffic { backing_read: BYTES, cache_written: BYTES, ..NOTHING };
const UNCACHED: Traffic = Traffic { backing_read: BYTES, ..NOTHING };
const TO_BACKING: Traffic = Traffic { backing_written: BYTES, ..NOTHING };
const TO_CACHE: Traffic = Traffic { cache_written: BYTES, ..NOTHING };
const ZEROED: Traffic = Traffic { backing_zeroed: BYTES, ..NOTHING };
const TO_BOTH: Traffic = Traffic { cache_written: BYTES, backing_written: BYTES, ..NOTHING };

impl Traffic {
    /// Counts an operation when it is submitted.
    fn count(&mut self, operation: &OpView) {
        if operation.completed {
            return;
        }
        let bytes = (operation.sectors.end - operation.sectors.start) * 512;
        match (operation.disk.0, operation.kind) {
            (0, OpKind::Read) => self.cache_read += bytes,
            // Writes before this sector go to the superblock, where a change of mode also writes a
            // policy.
            (0, OpKind::Write) if !operation.fua && operation.sectors.start >= CACHE_START => {
                self.cache_written += bytes;
            }
            (1, OpKind::Read) => self.backing_read += bytes,
            // Writes before this sector go to the superblock, which is rewritten when the first
            // data becomes dirty.
            (1, OpKind::Write) if operation.sectors.start >= DATA_START => self.backing_written += bytes,
            (1, OpKind::Zero) => self.backing_zeroed += bytes,
            _ => {}
        }
    }
}

/// A running set with one volume in `mode`, and the traffic counted.
struct Counted {
    stage: ScenarioRig,
    traffic: Rc<RefCell<Traffic>>,
}

impl Counted {
    fn start(mode: Mode) -> Outcome<Self> {
        Self::start_on(mode, |_| {})
    }

    /// Like `start`, on devices that `tell` configures.
    fn start_on(mode: Mode, tell: impl FnOnce(&mut DeviceTuning)) -> Outcome<Self> {
        let mut tuning = Tuning::draw(2 << 40);
        tell(&mut tuning.devices);
        let geometry = Geometry {
            block_sectors: 8,
            set_block_sectors: 8,
            bucket_sectors: 128,
            buckets: 600,
            volumes: vec![1 << 16],
            lodgers: Vec::new(),
            torn_sectors: 8,
            backing_volatile: true,
            cache_volatile: true,
            note_records: 100,
            tuning,
        };
        let mut stage = ScenarioRig::new(Rc::new(Engine), geometry, 1);
        stage.start().map_err(|fault| Failure::new(format!("{fault:?}")))?;
        let traffic = Rc::new(RefCell::new(NOTHING));
        let counter = Rc::clone(&traffic);
        stage.rig().world.borrow_mut().set_trap(Box::new(move |operation| {
            counter.borrow_mut().count(operation);
            false
        }));
        let mut counted = Self { stage, traffic };
        counted.cost(Step::Mode { volume: 0, mode })?;
        Ok(counted)
    }

    /// Returns the traffic that one step causes.
    fn cost(&mut self, step: Step) -> Outcome<Traffic> {
        self.traffic.replace(NOTHING);
        self.stage.ask(step).map_err(|fault| Failure::new(format!("{fault:?}")))?;
        self.stage.ask(Step::Pause(AFTER_MS)).map_err(|fault| Failure::new(format!("{fault:?}")))?;
        Ok(*self.traffic.borrow())
    }

    /// Writes the n-th place.
    fn write(&mut self, place: u64) -> Outcome<Traffic> {
        self.cost(Step::Write { volume: 0, sectors: sectors(place), fua: false })
    }

    /// Reads the n-th place.
    fn read(&mut self, place: u64) -> Outcome<Traffic> {
        self.cost(Step::Read { volume: 0, sectors: sectors(place) })
    }

    fn mode(&mut self, mode: Mode) -> Outcome<Traffic> {
        self.cost(Step::Mode { volume: 0, mode })
    }

    fn flush(&mut self) -> Outcome<Traffic> {
        self.cost(Step::Flush { volume: 0 })
    }
}

/// The operations that discard or zero the n-th place.
fn voids(place: u64) -> [Step; 3] {
    let zero = |may_unmap| Step::Zero { volume: 0, sectors: sectors(place), fua: false, may_unmap };
    [Step::Discard { volume: 0, sectors: sectors(place) }, zero(true), zero(false)]
}

/// Returns the sectors of the n-th place. Places lie far apart, so that no request continues
/// another.
fn sectors(place: u64) -> std::ops::Range<u64> {
    place * 512..place * 512 + SECTORS
}

/// Checks the traffic of each mode. The columns are: a write, a read of what was written, the first
/// and the second read of another place, a write over it, and a read after that.
#[test]
fn each_mode_moves_what_it_must_and_no_byte_more() -> Outcome {
    let table = [
        (Mode::Writethrough, [TO_BOTH, HIT, MISS, HIT, TO_BOTH, HIT]),
        (Mode::Writeback, [TO_CACHE, HIT, MISS, HIT, TO_CACHE, HIT]),
        (Mode::Writearound, [TO_BACKING, MISS, MISS, HIT, TO_BACKING, MISS]),
        (Mode::None, [TO_BACKING, UNCACHED, UNCACHED, UNCACHED, TO_BACKING, UNCACHED]),
    ];
    for (mode, wanted) in table {
        // Whether the data was flushed does not affect where it is read from.
        for flushed in [false, true] {
            let mut set = Counted::start(mode)?;
            let written = set.write(1)?;
            let flush = if flushed { set.flush()? } else { NOTHING };
            let found = [written, set.read(1)?, set.read(2)?, set.read(2)?, set.write(2)?, set.read(2)?];
            assert_eq!((flush, found), (NOTHING, wanted), "{mode:?}, flushed {flushed}");
        }
    }
    Ok(())
}

/// A change of the mode moves no data and drops none.
#[test]
fn what_is_cached_is_served_from_the_cache_in_every_mode() -> Outcome {
    for before in [Mode::Writethrough, Mode::Writeback] {
        let mut set = Counted::start(before)?;
        set.write(1)?;
        for mode in [Mode::None, Mode::Writearound, Mode::Writethrough, Mode::Writeback] {
            assert_eq!(set.mode(mode)?, NOTHING, "{before:?} to {mode:?}");
            assert_eq!(set.read(1)?, HIT, "{before:?} to {mode:?}");
        }
    }
    Ok(())
}

/// A discard writes nothing. Neither does a zeroing, in any mode, if the backing device can zero
/// ranges. Zeroes are written as data to the cache where the zeroing may not unmap and the cache
/// holds dirty data, and as data to the backing device where that cannot zero.
#[test]
fn what_is_given_up_or_zeroed_is_written_to_no_device() -> Outcome {
    // For each previous state (absent, clean, dirty): a discard, a zeroing that may unmap, a
    // zeroing that may not.
    let zeroed = [[NOTHING, ZEROED, ZEROED], [NOTHING, ZEROED, ZEROED], [NOTHING, ZEROED, TO_CACHE]];
    let written = [
        [NOTHING, TO_BACKING, TO_BACKING],
        [NOTHING, TO_BACKING, TO_BACKING],
        [NOTHING, TO_BACKING, TO_CACHE],
    ];
    for (zeroing, wanted) in [(ZeroSupport::WithUnmap, zeroed), (ZeroSupport::Unsupported, written)] {
        for mode in [Mode::Writethrough, Mode::Writeback, Mode::Writearound, Mode::None] {
            for discard in [false, true] {
                let mut set = Counted::start_on(Mode::Writethrough, |devices| {
                    devices.backing_discard = discard;
                    devices.backing_zeroing = zeroing as u64;
                })?;
                (10..13).try_for_each(|place| set.write(place).map(drop))?;
                set.flush()?;
                set.mode(Mode::Writeback)?;
                (20..23).try_for_each(|place| set.write(place).map(drop))?;
                set.flush()?;
                set.mode(mode)?;
                for (first, wanted) in [0, 10, 20].into_iter().zip(wanted) {
                    let mut found = [NOTHING; 3];
                    for (number, place) in (0..3).zip(first..) {
                        let step = voids(place).into_iter().nth(number).expect("three");
                        found[number] = set.cost(step)?;
                    }
                    assert_eq!(
                        found, wanted,
                        "{zeroing:?}, {mode:?}, discards {discard}, places from {first}"
                    );
                    (first..first + 3).try_for_each(|place| set.read(place).map(drop))?;
                }
            }
        }
    }
    Ok(())
}
