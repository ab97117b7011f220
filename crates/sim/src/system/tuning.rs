//! Settings of a system and its devices that are not sizes. They are drawn from one number and
//! stored as values, because the meaning of that number may change and a script must not.

use super::Mode;
use super::policy::VolumePolicy;
use crate::disk::ZeroSupport;
use bcached_env::rng::Rng;

/// How devices behave, and what their superblocks contain at first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceTuning {
    /// On the cache device a write with FUA is a write and a flush.
    pub cache_fua_flushes: bool,
    /// Likewise on the backing devices.
    pub backing_fua_flushes: bool,
    /// Nominal latency of the cache device; much depends on which device is slower.
    pub cache_latency_us: u64,
    /// Nominal latency of the backing devices.
    pub backing_latency_us: u64,
    /// The cache discards buckets that it has emptied.
    pub discard: bool,
    /// Additional time that the cache takes to read certain whole buckets, as nodes are read. It
    /// makes a walk take time.
    pub node_read_us: u64,
    /// Backing devices carry out discards, some of the time.
    pub backing_discard: bool,
    /// How backing devices respond to zeroing requests, as an index into [`ZeroSupport::ALL`].
    pub backing_zeroing: u64,
    /// The starting index of volume 0 in the cycle of [`DeviceTuning::first_mode`], 0 to 5.
    pub first_mode: u64,
    /// Which clean bucket is evicted first: the least recently used, the oldest data, or any.
    pub replacement: u64,
}

/// Options of a cache set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetTuning {
    /// Memory for nodes, in MiB; 0 means the minimum.
    pub node_budget_mib: u64,
    /// See `bcached_engine::Options` for this and the following. In milliseconds.
    pub journal_delay_ms: u64,
    /// In milliseconds.
    pub leaf_delay_ms: u64,
    /// In milliseconds.
    pub parked_delay_ms: u64,
    /// Number of pieces.
    pub parked_max: u64,
    /// In milliseconds.
    pub writeback_delay_ms: u64,
    /// In sectors of 512 bytes.
    pub writeback_batch_sectors: u64,
    /// Whether dirty data is written back at all.
    pub writeback_running: bool,
    /// In percent.
    pub writeback_percent: u64,
    /// At most one sector in this many of a dirty bucket holds its summary.
    pub summary_share: u64,
    /// In percent.
    pub cutoff_cache_add: u64,
    /// In percent.
    pub cutoff_writeback: u64,
    /// The initial policy of its volumes.
    pub policy: VolumePolicy,
}

/// All settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// Settings of the devices.
    pub devices: DeviceTuning,
    /// Settings of the set.
    pub set: SetTuning,
}

impl DeviceTuning {
    /// Draws the settings from bits 40 and up of `number`; the first mode is in the lowest of them.
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

    /// Returns how backing devices respond to zeroing requests.
    #[must_use]
    pub const fn backing_zeroing(&self) -> ZeroSupport {
        ZeroSupport::ALL[(self.backing_zeroing & 3) as usize]
    }

    /// Returns the initial mode of a volume: writethrough, writearound, then four times writeback,
    /// repeating.
    #[must_use]
    pub const fn first_mode(&self, volume: u64) -> Mode {
        match self.first_mode.wrapping_add(volume) % 6 {
            0 => Mode::Writethrough,
            1 => Mode::Writearound,
            _ => Mode::Writeback,
        }
    }
}

/// Default value. Buckets here are small.
pub const SUMMARY_SHARE: u64 = 16;
/// The engine's default.
pub const CUTOFF_CACHE_ADD: u64 = 95;
/// The engine's default.
pub const CUTOFF_WRITEBACK: u64 = 90;

/// With write-back batches of this many sectors, nothing is a stream and a slow cache is not
/// congested. This gives two more kinds of set without another draw.
pub const WITHOUT_STREAMS: u64 = 8192;

impl SetTuning {
    /// Draws the settings: some runs have little memory for nodes, short journal delays and eager
    /// write-back, and others none of these.
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
            policy: VolumePolicy::plain(false),
        };
        Self { policy: VolumePolicy::plain(drawn.has_parity()), ..drawn }
    }

    /// Returns whether the set lies on arrays with parity, where nothing else is specified: a
    /// quarter of the sets do.
    #[must_use]
    pub const fn has_parity(&self) -> bool {
        self.parked_max == 16
    }

    /// Returns the same settings, but background work neither rests nor waits long, and everything
    /// that is read is cached.
    #[must_use]
    pub fn hurried(self) -> Self {
        let is_plain = self.policy == VolumePolicy::plain(self.has_parity());
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
    /// Draws all settings from `number`.
    #[must_use]
    pub fn draw(number: u64) -> Self {
        Self { devices: DeviceTuning::draw(number), set: SetTuning::draw(number) }
    }

    /// Returns the same settings with policies drawn from `number`.
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
