//! The knobs, under the kernel's names where the kernel has them.

use crate::error::Error;
use crate::open_progress::Opening;
use crate::phases::Phases;
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::sync::Arc;
use bcached_format::{CacheMode, Replacement};
use core::time::Duration;

/// Options of a cache set. What says so is taken once, when the set is opened; all others can be changed while it runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for B-tree nodes, in bytes: a hard limit. Less than [`crate::node_budget_min`] is refused. To change it
    /// later: [`crate::CacheSet::set_node_budget`].
    pub node_budget_bytes: usize,
    /// Buckets kept free for the next start, so that it need not wait for the walk of the tree; 0: none. `None`: as many as fit the
    /// size of the device. Taken once.
    pub reserve: Option<u64>,
    /// A bucket that was filled with dirty data ends in a summary of it, by which it is emptied sooner one day, where that takes no
    /// more than one sector in so many; 0: nowhere. Taken once.
    pub summary_share: u64,
    /// How long keys wait in the open journal entry when nobody asks for durability (`journal_delay_ms`).
    pub journal_delay: Duration,
    /// How long keys wait in a leaf before it is written for no other reason.
    pub leaf_delay: Duration,
    /// Most keys of the journal that a start puts in the order of their places at once; at least one. Each takes about 120 bytes meanwhile.
    pub replay_keys: usize,
    /// With at least so many keys in its journal a start serves requests before the last stretch of them is in the tree.
    pub replay_beside: usize,
    /// How long the task that puts these there rests before it reads the next leaves, if there is room in the journal and nobody stops the
    /// set.
    pub replay_rest: Duration,
    /// Nothing is added to the cache while this share of its buckets, in percent, or more cannot be had without writing
    /// dirty data back.
    pub cutoff_cache_add: u64,
    /// The same of writes that are to stay in the cache, dirty: from here on they go to both devices.
    pub cutoff_writeback: u64,
    /// The same of durable writes, which are slow anywhere else; less than the one before means as much as that.
    pub cutoff_writeback_sync: u64,
    /// Reads of cached data that take longer make the cache device look congested; zero: none do.
    pub congested_read_threshold: Duration,
    /// The same of writes.
    pub congested_write_threshold: Duration,
    /// Once so many operations on the cache device have failed, nothing is added to the cache any more, and what is dirty is
    /// written back as fast as it goes; 0 means the first one.
    pub io_error_limit: u64,
    /// Operations on the cache device in which half of the counted failures are forgotten; 0: none are.
    pub io_error_halflife: u64,
    /// How long clean data may wait for the backing device's flush before we flush it ourselves.
    pub parked_delay: Duration,
    /// Parked pieces of one volume beyond which its backing device is flushed at once.
    pub parked_max: usize,
    /// Most sectors of dirty data of one volume read at once by write-back.
    pub writeback_batch_sectors: u64,
    /// Most sectors of a backing device that are made zero at once, where that takes no transfer; where zeroes are written it is a
    /// 32nd of that. Other requests of the range have their turn in between.
    pub zero_batch_sectors: u64,
    /// Buckets are discarded on the cache device when they hold nothing any more; `None`: if its superblock says so.
    pub discard: Option<bool>,
    /// Which clean bucket is given up first; `None`: what the superblock says.
    pub replacement: Option<Replacement>,
    /// When nobody has asked for anything for 30 s, dirty data is written back as fast as the devices go.
    pub idle_max_writeback_rate: bool,
    /// What a volume begins with.
    pub volume: VolumeOptions,
    /// Where an opening counts how far it is. Clones of these options share it: one opening each. Taken once.
    pub opening: Arc<Opening>,
    /// Where the set counts what it is in the middle of. Clones of these options share it. Taken once.
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

/// Options of a volume, for as long as it is served. All of them can be changed while it is; whoever wants a value kept over a
/// restart keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeOptions {
    /// Streams of at least so many bytes, and the requests of who makes such, are not added to the cache; 0 adds any.
    pub sequential_cutoff: u64,
    /// Write-back runs at all.
    pub writeback_running: bool,
    /// Share of the cache that may be dirty, in percent, of all volumes together; 0 writes back without a limit of rate.
    pub writeback_percent: u64,
    /// How long write-back rests after it has come past the whole volume.
    pub writeback_delay: Duration,
    /// How often the rate is set anew.
    pub writeback_rate_update: Duration,
    /// The rate, in sectors a second, grows by one for so many sectors above the target.
    pub writeback_rate_p_term_inverse: u64,
    /// The same of what has added up over time, in sector seconds.
    pub writeback_rate_i_term_inverse: u64,
    /// Sectors a second for each percent of used buckets above 50, where dirty data lies scattered.
    pub writeback_rate_fp_term_low: u64,
    /// The same above 57.
    pub writeback_rate_fp_term_mid: u64,
    /// The same above 64.
    pub writeback_rate_fp_term_high: u64,
    /// Whether scattered dirty data is written back faster when the cache fills.
    pub writeback_consider_fragment: bool,
    /// The least rate, in sectors a second.
    pub writeback_rate_minimum: u64,
    /// The greatest rate that is gone to, in sectors a second; `None`: what the devices allow. Not of the kernel.
    pub writeback_rate_maximum: Option<u64>,
    /// Data that has been dirty for longer is written back whatever the rate. Not of the kernel.
    pub max_dirty_age: Option<Duration>,
    /// Nothing is written back now that need not be: it is one of the quiet hours. Not of the kernel.
    pub writeback_quiet: bool,
    /// Write-back slows down while its writes to the backing device, or what clients ask of it, take longer than this. Not of the
    /// kernel.
    pub writeback_latency: Option<Duration>,
    /// Write-back wakes no disk that no client has used for so long, unless it must. Not of the kernel.
    pub spindown_after: Option<Duration>,
    /// Length of the backing device's stripes, in bytes; 0: it has none; `None`: what it says. The kernel's can only be read.
    pub stripe_size: Option<u64>,
    /// Writes of parts of them are expensive, as on RAID 5 and 6; `None`: if the device says so. The kernel's can only be read.
    pub partial_stripes_expensive: Option<bool>,
    /// What becomes of requests that need the cache, because of dirty data, and cannot have it. The set only keeps this for whoever
    /// serves its volumes. Not of the kernel.
    pub on_cache_error: OnError,
    /// The same of requests that need the backing device while that is gone. Not of the kernel.
    pub on_backing_error: OnError,
    /// How long they wait at most, for either. Not of the kernel.
    pub freeze_timeout: Duration,
}

/// What becomes of requests while a device that they need fails: the cache that has dirty data, or the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnError {
    /// They wait for the device, so many and so long.
    Freeze,
    /// Changes are refused as if the volume could be read only; what can be read is.
    ReadOnly,
    /// They fail.
    Fail,
}

impl OnError {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Freeze, Self::ReadOnly, Self::Fail];

    /// What it is called.
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
            on_cache_error: OnError::Freeze,
            on_backing_error: OnError::Freeze,
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

    /// Changes options of the set; those that are taken once stay as they were taken.
    pub fn change_options(&self, change: impl FnOnce(&mut Options)) {
        self.with(|s| {
            let discard = s.options.discard;
            change(&mut s.options);
            if s.options.discard != discard {
                // Who says so anew wants it to be tried again.
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

    /// Changes options of a volume; what is under way ends under the old ones.
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

    /// Says how fast, in sectors a second, dirty data of a volume leaves until its controller says it anew. Who may hurry does, and a
    /// ceiling holds.
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

    /// Changes a volume's cache mode until it is served anew: the superblock keeps the other. Requests in flight end under
    /// the old one. What the kernel finds is what a change of mode leaves behind anyway: a state and a mode, each of which
    /// it takes as it stands.
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
