//! What a system and its devices can be told and that is not a size: drawn from one number, and spelled out from then on,
//! so that a script holds the values and not a number whose meaning may change.

use super::Mode;
use super::policy::Policy;
use crate::disk::Zeroing;
use bcached_env::rng::Rng;

/// How devices behave, and what their superblocks say at first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceTuning {
    /// On the cache device a durable write is a write and a flush.
    pub cache_fua_flushes: bool,
    /// On backing devices.
    pub backing_fua_flushes: bool,
    /// Middle latency of the cache device; which of the devices is the slower one decides much.
    pub cache_latency_us: u64,
    /// Of the backing devices.
    pub backing_latency_us: u64,
    /// The cache discards buckets that it has emptied.
    pub discard: bool,
    /// By how much longer the cache takes to read a whole bucket, as a node is, of some buckets. So a walk lasts.
    pub node_read_us: u64,
    /// Backing devices carry out discards, now and then.
    pub backing_discard: bool,
    /// What backing devices make of being told to zero a range, by its place in [`Zeroing::ALL`].
    pub backing_zeroing: u64,
    /// Where volume 0 begins in the round of [`DeviceTuning::first_mode`], 0 to 5.
    pub first_mode: u64,
    /// Which clean bucket is given up first: the oldest use, the oldest data, or any.
    pub replacement: u64,
}

/// Options of a cache set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetTuning {
    /// Memory for nodes, in MiB; 0: as little as goes.
    pub node_budget_mib: u64,
    /// See `bcached_engine::Options`, here and below. In milliseconds.
    pub journal_delay_ms: u64,
    /// In milliseconds.
    pub leaf_delay_ms: u64,
    /// In milliseconds.
    pub parked_delay_ms: u64,
    /// Pieces.
    pub parked_max: u64,
    /// In milliseconds.
    pub writeback_delay_ms: u64,
    /// In sectors of 512 bytes.
    pub writeback_batch_sectors: u64,
    /// Whether dirty data is written back at all.
    pub writeback_running: bool,
    /// In percent.
    pub writeback_percent: u64,
    /// One sector in so many of a dirty bucket may be for its summary.
    pub summary_share: u64,
    /// In percent.
    pub cutoff_cache_add: u64,
    /// In percent.
    pub cutoff_writeback: u64,
    /// What its volumes begin with.
    pub policy: Policy,
}

/// All of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// Of the devices.
    pub devices: DeviceTuning,
    /// Of the set.
    pub set: SetTuning,
}

impl DeviceTuning {
    /// What bits 40 and up of `number` say: the mode in the lowest of them.
    #[must_use]
    pub const fn draw(number: u64) -> Self {
        Self {
            cache_fua_flushes: number >> 48 & 1 == 1,
            backing_fua_flushes: number >> 49 & 1 == 1,
            cache_latency_us: [20, 20, 4, 2000][(number >> 50 & 3) as usize],
            backing_latency_us: [500, 500, 20, 5000][(number >> 52 & 3) as usize],
            discard: number.is_multiple_of(3),
            backing_discard: number >> 54 & 1 == 1,
            backing_zeroing: number >> 57 & 3,
            first_mode: (number >> 40) % 6,
            node_read_us: [0, 0, 1000, 8000][(number >> 55 & 3) as usize],
            replacement: 0,
        }
    }

    /// What backing devices make of being told to zero a range.
    #[must_use]
    pub const fn backing_zeroing(&self) -> Zeroing {
        Zeroing::ALL[(self.backing_zeroing & 3) as usize]
    }

    /// A volume's mode when it is made: write-through, write-around, four times write-back, and so on.
    #[must_use]
    pub const fn first_mode(&self, volume: u64) -> Mode {
        match self.first_mode.wrapping_add(volume) % 6 {
            0 => Mode::Writethrough,
            1 => Mode::Writearound,
            _ => Mode::Writeback,
        }
    }
}

/// Where nothing else is said. Buckets here are small.
pub const SUMMARY_SHARE: u64 = 16;
/// The engine's own.
pub const CUTOFF_CACHE_ADD: u64 = 95;
/// The engine's own.
pub const CUTOFF_WRITEBACK: u64 = 90;

/// With batches of write-back of so many sectors nothing is a stream, and a slow cache is not congested: two more kinds of set, without
/// more to draw.
pub const WITHOUT_STREAMS: u64 = 8192;

impl SetTuning {
    /// Some runs have little memory for nodes, impatient journals and eager write-back, and others none of it.
    fn draw(number: u64) -> Self {
        let mut rng = Rng::new(number);
        let mut pick = |choices: [u64; 4]| choices[usize::try_from(rng.below(4)).expect("below four")];
        let drawn = Self {
            node_budget_mib: pick([0, 1, 8, 128]),
            journal_delay_ms: pick([1, 10, 100, 100]),
            leaf_delay_ms: pick([5, 50, 500, 30_000]),
            parked_delay_ms: pick([2, 20, 200, 5000]),
            writeback_delay_ms: pick([1, 10, 100, 5000]),
            writeback_batch_sectors: pick([8, 64, 512, WITHOUT_STREAMS]),
            writeback_running: pick([0, 1, 1, 1]) == 1,
            writeback_percent: pick([0, 0, 1, 10]),
            parked_max: pick([2, 16, 1024, 1024]),
            summary_share: SUMMARY_SHARE,
            cutoff_cache_add: CUTOFF_CACHE_ADD,
            cutoff_writeback: CUTOFF_WRITEBACK,
            policy: Policy::plain(false),
        };
        Self { policy: Policy::plain(drawn.has_parity()), ..drawn }
    }

    /// A quarter of the sets lies on arrays with parity, where nothing else is said.
    #[must_use]
    pub const fn has_parity(&self) -> bool {
        self.parked_max == 16
    }

    /// The same, but work in the background neither rests nor waits long, and everything that is read is cached.
    #[must_use]
    pub fn hurried(self) -> Self {
        let is_plain = self.policy == Policy::plain(self.has_parity());
        Self {
            writeback_running: true,
            writeback_delay_ms: 10,
            writeback_percent: if is_plain { 0 } else { self.writeback_percent },
            writeback_batch_sectors: WITHOUT_STREAMS,
            parked_delay_ms: 10,
            policy: self.policy.hurried(),
            ..self
        }
    }
}

impl Tuning {
    /// What follows from `number`.
    #[must_use]
    pub fn draw(number: u64) -> Self {
        Self { devices: DeviceTuning::draw(number), set: SetTuning::draw(number) }
    }

    /// The same with policies that follow from `number`.
    #[must_use]
    pub fn with_policies(mut self, number: u64) -> Self {
        let mut rng = Rng::new(number);
        let mut pick = |choices: [u64; 4]| choices[usize::try_from(rng.below(4)).expect("below four")];
        self.devices.replacement = pick([0, 0, 1, 2]);
        self.set.summary_share = pick([0, 1, SUMMARY_SHARE, 64]);
        self.set.cutoff_cache_add = pick([CUTOFF_CACHE_ADD, CUTOFF_CACHE_ADD, 60, 20]);
        self.set.cutoff_writeback = pick([CUTOFF_WRITEBACK, CUTOFF_WRITEBACK, 50, 20]);
        self.set.policy = self.set.policy.draw(&mut rng);
        self
    }
}
