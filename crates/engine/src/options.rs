//! Options of a set and its volumes, under the kernel's names where the kernel has them.

use crate::error::Error;
use crate::open_progress::OpenProgress;
use crate::phases::Phases;
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::sync::Arc;
use bcached_format::{CacheMode, ReplacementPolicy};
use core::time::Duration;

/// Options of a cache set. Those marked *fixed at open* are read once, when the set is opened. All
/// others can be changed while it runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for B-tree nodes, in bytes: a hard limit. Less than [`crate::node_budget_min`] is
    /// refused. To change it later, use [`crate::CacheSet::set_node_budget`].
    pub node_budget_bytes: usize,
    /// Buckets kept free for the next start, so that it need not wait for the walk of the tree; 0:
    /// none. `None`: a number that suits the size of the device. Fixed at open.
    pub reserve: Option<u64>,
    /// A bucket filled with dirty data ends in a summary of it, with which it can be emptied faster
    /// later, if the summary takes at most one sector in so many; 0: no bucket has a summary. Fixed
    /// at open.
    pub summary_share: u64,
    /// How long keys wait in the open journal entry when no client asks for durability
    /// (`journal_delay_ms`).
    pub journal_delay: Duration,
    /// How long keys wait in a leaf before it is written, if nothing else causes it to be written.
    pub leaf_delay: Duration,
    /// Maximum number of journal keys that a start sorts by position at once; at least one. Each
    /// takes about 120 bytes during the sort.
    pub replay_keys: usize,
    /// With at least so many keys in its journal, a start serves requests before the last batch of
    /// them is in the tree.
    pub replay_beside: usize,
    /// Pause of the task that puts these keys into the tree before it reads the next leaves, as
    /// long as there is room in the journal and the set is not being stopped.
    pub replay_rest: Duration,
    /// Nothing is added to the cache while this percentage of its buckets, or more, is not
    /// available without writing dirty data back.
    pub cutoff_cache_add: u64,
    /// The same for writes that would stay in the cache as dirty data: from this percentage on they
    /// go to both devices.
    pub cutoff_writeback: u64,
    /// The same for durable writes, which are slow anywhere else. If less than `cutoff_writeback`,
    /// that applies.
    pub cutoff_writeback_sync: u64,
    /// Reads of cached data that take longer make the cache device count as congested; zero: reads
    /// do not count.
    pub congested_read_threshold: Duration,
    /// The same for writes.
    pub congested_write_threshold: Duration,
    /// Once so many operations on the cache device have failed, nothing is added to the cache any
    /// more, and dirty data is written back as fast as possible; 0 has the same effect as 1.
    pub io_error_limit: u64,
    /// Number of operations on the cache device in which half of the counted failures are
    /// forgotten; 0: none are.
    pub io_error_halflife: u64,
    /// How long clean data may wait for a flush of the backing device before the engine flushes it
    /// itself.
    pub parked_delay: Duration,
    /// Number of parked pieces of one volume above which its backing device is flushed at once.
    pub parked_max: usize,
    /// Maximum number of sectors of dirty data of one volume that write-back reads at once.
    pub writeback_batch_sectors: u64,
    /// Maximum number of sectors of a backing device zeroed at once, where that needs no data
    /// transfer. Where zeroes are written, it is 1/32 of that. Other requests for the range are
    /// served in between.
    pub zero_batch_sectors: u64,
    /// Whether empty buckets are discarded on the cache device; `None`: as its superblock says.
    pub discard: Option<bool>,
    /// Which clean bucket is evicted first; `None`: as the superblock says.
    pub replacement: Option<ReplacementPolicy>,
    /// When no request has arrived for 30 s, dirty data is written back as fast as the devices
    /// allow.
    pub idle_max_writeback_rate: bool,
    /// The initial options of a volume.
    pub volume: VolumeOptions,
    /// Counters of the progress of an opening. Clones of these options share them: use them for one
    /// opening only. Fixed at open.
    pub opening: Arc<OpenProgress>,
    /// Counters of the phases that the set is in. Clones of these options share them. Fixed at
    /// open.
    pub phases: Arc<Phases>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node_budget_bytes: 128 << 20,
            reserve: None,
            summary_share: 64,
            journal_delay: Duration::from_millis(100),
            leaf_delay: Duration::from_secs(30),
            replay_keys: 1 << 18,
            replay_beside: 1024,
            replay_rest: Duration::ZERO,
            cutoff_cache_add: 95,
            cutoff_writeback: 90,
            cutoff_writeback_sync: 95,
            congested_read_threshold: Duration::from_micros(2000),
            congested_write_threshold: Duration::from_micros(20_000),
            io_error_limit: 8,
            io_error_halflife: 0,
            parked_delay: Duration::from_secs(5),
            parked_max: 1024,
            writeback_batch_sectors: 8192,
            zero_batch_sectors: 1 << 19,
            discard: None,
            replacement: None,
            idle_max_writeback_rate: true,
            volume: VolumeOptions::default(),
            opening: Arc::default(),
            phases: Arc::default(),
        }
    }
}

impl Options {
    pub(crate) const fn tracks_congestion(&self) -> bool {
        !(self.congested_read_threshold.is_zero() && self.congested_write_threshold.is_zero())
    }
}

/// Options of a volume, for as long as it is served. All can be changed while it is served. The
/// program that sets them must store values that are to survive a restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeOptions {
    /// Streams of at least so many bytes, and requests of clients that produce such streams, are
    /// not added to the cache; 0: no limit.
    pub sequential_cutoff: u64,
    /// Whether write-back runs at all.
    pub writeback_running: bool,
    /// Percentage of the cache that may be dirty, for all volumes together; 0: write back without a
    /// rate limit.
    pub writeback_percent: u64,
    /// How long write-back rests after it has passed through the whole volume.
    pub writeback_delay: Duration,
    /// Interval at which the rate is recomputed.
    pub writeback_rate_update: Duration,
    /// Proportional term: so many sectors above the target increase the rate by one sector per
    /// second.
    pub writeback_rate_p_term_inverse: u64,
    /// Integral term: the same for the error accumulated over time, in sector seconds.
    pub writeback_rate_i_term_inverse: u64,
    /// Sectors per second for each percent of used buckets above 50, if dirty data is fragmented.
    pub writeback_rate_fp_term_low: u64,
    /// The same above 57 percent.
    pub writeback_rate_fp_term_mid: u64,
    /// The same above 64 percent.
    pub writeback_rate_fp_term_high: u64,
    /// Whether fragmented dirty data is written back faster when the cache fills.
    pub writeback_consider_fragment: bool,
    /// The minimum rate, in sectors per second.
    pub writeback_rate_minimum: u64,
    /// The maximum rate, in sectors per second; `None`: what the devices allow. Not in the kernel.
    pub writeback_rate_maximum: Option<u64>,
    /// Data that has been dirty for longer is written back regardless of the rate. Not in the
    /// kernel.
    pub max_dirty_age: Option<Duration>,
    /// Quiet hours: only data that must be is written back now. Not in the kernel.
    pub writeback_quiet: bool,
    /// Write-back slows down while its writes to the backing device, or requests of clients to it,
    /// take longer than this. Not in the kernel.
    pub writeback_latency: Option<Duration>,
    /// Write-back does not wake a disk that no client has used for so long, unless it must. Not in
    /// the kernel.
    pub spindown_after: Option<Duration>,
    /// Stripe size of the backing device, in bytes; 0: it has no stripes; `None`: as the device
    /// reports. Read-only in the kernel.
    pub stripe_size: Option<u64>,
    /// Whether partial-stripe writes are expensive, as on RAID 5 and 6; `None`: as the device
    /// reports. Read-only in the kernel.
    pub partial_stripes_expensive: Option<bool>,
    /// What happens to requests that need the cache, because of dirty data, while it is not
    /// available. The set only stores this for the program that serves its volumes. Not in the
    /// kernel.
    pub on_cache_error: ErrorPolicy,
    /// The same for requests that need the backing device while it is gone. Not in the kernel.
    pub on_backing_error: ErrorPolicy,
    /// How long such requests wait at most, in either case. Not in the kernel.
    pub freeze_timeout: Duration,
}

/// What happens to requests while a device that they need has failed: the cache that has dirty
/// data, or the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorPolicy {
    /// They wait for the device, up to a limit in number and time.
    Freeze,
    /// Changes are refused as on a read-only volume. What can be read still is.
    ReadOnly,
    /// They fail.
    Fail,
}

impl ErrorPolicy {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Freeze, Self::ReadOnly, Self::Fail];

    /// The name of the variant.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Freeze => "freeze",
            Self::ReadOnly => "read-only",
            Self::Fail => "fail",
        }
    }
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            sequential_cutoff: 4 << 20,
            writeback_running: true,
            writeback_percent: 10,
            writeback_delay: Duration::from_secs(30),
            writeback_rate_update: Duration::from_secs(5),
            writeback_rate_p_term_inverse: 40,
            writeback_rate_i_term_inverse: 10_000,
            writeback_rate_fp_term_low: 1,
            writeback_rate_fp_term_mid: 10,
            writeback_rate_fp_term_high: 1000,
            writeback_consider_fragment: true,
            writeback_rate_minimum: 8,
            writeback_rate_maximum: None,
            max_dirty_age: None,
            writeback_quiet: false,
            writeback_latency: None,
            spindown_after: None,
            stripe_size: None,
            partial_stripes_expensive: None,
            on_cache_error: ErrorPolicy::Freeze,
            on_backing_error: ErrorPolicy::Freeze,
            freeze_timeout: Duration::from_secs(120),
        }
    }
}

impl CacheSet {
    /// The options in force.
    #[must_use]
    pub fn options(&self) -> Options {
        self.with(|s| s.options.clone())
    }

    /// Changes options of the set. Those fixed at open keep the values they had then.
    pub fn change_options(&self, change: impl FnOnce(&mut Options)) {
        self.with(|s| {
            let discard = s.options.discard;
            change(&mut s.options);
            if s.options.discard != discard {
                // The option was set again, so try again.
                s.discards.refusal = None;
            }
        });
        self.settings_change();
        self.wake_all();
    }

    /// The options of a volume; `None`: there is no such volume.
    #[must_use]
    pub fn volume_options(&self, id: VolumeId) -> Option<VolumeOptions> {
        self.with(|s| s.volumes.get(id).map(|volume| volume.options))
    }

    /// Changes options of a volume. Operations in progress end under the old ones.
    ///
    /// # Errors
    /// [`Error::NoVolume`].
    pub fn change_volume_options(
        &self,
        id: VolumeId,
        change: impl FnOnce(&mut VolumeOptions),
    ) -> Result<(), Error> {
        self.with(|s| s.volumes.get_mut(id).map(|volume| change(&mut volume.options)))
            .ok_or(Error::NoVolume)?;
        self.signals().writeback_work.notify_all();
        Ok(())
    }

    /// Sets the rate at which dirty data of a volume is written back, in sectors per second, until
    /// its controller next recomputes it. Write-back that is exempt from the rate limit stays so,
    /// and the maximum rate still applies.
    ///
    /// # Errors
    /// [`Error::NoVolume`].
    pub fn set_writeback_rate(&self, id: VolumeId, rate: u64) -> Result<(), Error> {
        self.with(|s| {
            let now = s.now;
            let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
            volume.pace.rate.say(now, &volume.options, rate);
            Ok(())
        })?;
        self.signals().writeback_work.notify_all();
        Ok(())
    }

    /// Changes a volume's cache mode until it is next served: the superblock keeps the old mode.
    /// Requests in flight end under the old mode. The kernel may later find the same on-disk state
    /// as after any change of mode: a state and a mode, each of which it accepts as it is.
    ///
    /// # Errors
    /// [`Error::NoVolume`].
    pub fn set_cache_mode_for_now(&self, id: VolumeId, mode: CacheMode) -> Result<(), Error> {
        self.with(|s| {
            let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
            volume.begin_mode_change();
            volume.mode = mode;
            Ok(())
        })
    }
}
