//! Volumes: a backing device with its state in the cache, or a flash-only volume.
//!
//! | file | contents |
//! |---|---|
//! | `add`, `remove` | a backing device comes to an open set, and leaves it |
//! | `attach`, `detach` | a served volume gets a cache, and gives it up |
//! | `attachment_record` | which device and which slot of the table belong together |
//! | `slots`, `forget` | inodes: assigned, found again, given up |
//! | `record` | the superblock of the backing device: *clean*, *dirty*, *stale* |
//! | `backing_flushes` | which writes a flush has proven durable, and which may be lost |
//! | `reconnect`, `resume` | a device that came back, a set that is opened again |
//! | `flash`, `flash_size`, `resize`, `zeroings` | flash-only volumes, other sizes |
//! | `label` | the name in the superblock |

pub mod add;
pub mod attach;
pub(crate) mod attachment_record;
pub mod backing_flushes;
pub mod detach;
pub mod flash;
pub mod flash_size;
pub mod forget;
pub mod label;
pub mod reconnect;
pub mod record;
pub mod remove;
pub mod resize;
pub mod resume;
pub mod slots;
pub mod zeroings;

use crate::error::Error;
use crate::latency::Latencies;
use crate::options::VolumeOptions;
use crate::policy::Streams;
use crate::request::ranges::RangeTable;
use crate::sorted_map::SortedMap;
use crate::stats::VolumeStats;
use crate::writeback::contention::ClientActivity;
use crate::writeback::dirty_age::DirtyAge;
use crate::writeback::failed_extents::{FailedExtents, UnwritableData};
use crate::writeback::pace::Pace;
use crate::writeback::rate::RateInfo;
use crate::writeback::stall_reason::WritebackError;
use crate::writeback::stripes::StripeCursor;
use alloc::boxed::Box;
use alloc::vec::Vec;
use backing_flushes::BackingFlushes;
use bcached_env::{Disk, DiskHealth, Time, sync::Semaphore};
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Inode, Label, Uuid};
use zeroings::{ZeroingInfo, Zeroings};

/// Identifies a volume within a running set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct VolumeId(pub u32);

/// The backing device of a volume.
pub struct Backing {
    /// The device.
    pub disk: Disk,
    /// Its superblock, as last made durable.
    pub superblock: BackingSuperblock,
    /// A write of the superblock has failed. It may have reached the device, so the device may
    /// differ from [`Backing::superblock`]. Nothing relies on the superblock until a write has
    /// succeeded.
    pub in_doubt: bool,
    /// Superblocks whose writes have failed since the last durable one: the device may hold any of
    /// them.
    pub attempted: Vec<BackingSuperblock>,
    /// Tracks which writes to the device are durable.
    pub flushes: BackingFlushes,
    /// Serialises changes of the superblock.
    pub record_lock: Semaphore,
}

/// One volume.
pub struct Volume {
    /// Inode of its keys; `None`: not attached, all requests are served without the cache.
    pub inode: Option<Inode>,
    /// The backing device; `None`: flash-only.
    pub backing: Option<Backing>,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label.
    pub label: Label,
    /// Size in sectors.
    pub sectors: u64,
    /// First sector of the data in the key space and on the backing device.
    pub data_offset: u64,
    /// End of the cacheable range: the last whole block. Key space.
    pub cacheable_end: u64,
    /// Cache mode.
    pub mode: CacheMode,
    /// Number of mode changes that have begun.
    pub mode_changes: u64,
    /// The tunables.
    pub options: VolumeOptions,
    /// The sequential streams among its requests.
    pub streams: Streams,
    /// Counters.
    pub stats: VolumeStats,
    /// Latencies of its requests.
    pub latencies: Latencies,
    /// Requests in flight, by range.
    pub ranges: RangeTable,
    /// Zeroing requests in flight.
    pub zeroings: Zeroings,
    /// Newest journal entry that made a hole: a bypassed write waits for it.
    pub last_hole: u64,
    /// Where the next pass of write-back begins. Key space.
    pub writeback_from: u64,
    /// Where write-back is among full stripes, those that are dirty throughout.
    pub stripes: StripeCursor,
    /// Why dirty data cannot be written back, if the reason is not specific to an extent.
    pub writeback_trouble: Option<WritebackError>,
    /// The extents that write-back failed to write.
    pub failed_extents: FailedExtents,
    /// How clients use the backing device.
    pub client_activity: ClientActivity,
    /// Write-back has met errors, and has made no progress or has only failed extents left.
    pub stands_still: bool,
    /// Why the backing device cannot be marked clean, if so.
    pub marking_trouble: Option<Box<Error>>,
    /// Number of background users of the volume: its tasks, fills, and long operations that a
    /// caller requested.
    pub hands: u64,
    /// Requests in flight.
    pub requests: u64,
    /// Number of those that change something.
    pub changes: u64,
    /// Incremented when a task begins to wait for all earlier changes; see
    /// [`crate::writeback::urgent`].
    pub round: u64,
    /// Changes in flight that began before this round.
    pub earlier_changes: u64,
    /// Requests in flight that began before the volume got its current inode or size.
    pub earlier_requests: u64,
    /// How often its inode or its size has changed.
    pub attachment: u64,
    /// Whether it is being attached, detached, resized or removed.
    pub lifecycle: Lifecycle,
    /// Number of flows that are about to make this volume independent of the cache: no dirty key
    /// may be created meanwhile.
    pub leaving: u64,
    /// The pace of write-back.
    pub pace: Pace,
    /// Held by the task that writes the volume's dirty data back, and declares that there is none.
    pub writeback_lock: Semaphore,
    /// Its backing device said *clean* when it was added, and that was credible: unless the device
    /// is an older copy, nothing was dirty.
    pub must_be_clean: bool,
    /// The walk has found dirty data nevertheless: the backing device is an older copy of itself.
    /// Nothing is written back to it.
    pub is_outdated: bool,
    /// *Dirty* is durable on the superblock, and no change of that is under way: dirty keys may be
    /// created.
    pub dirty_marked: bool,
}

/// Whether a volume is being attached to the cache, detached from it, resized or removed. Meanwhile
/// nothing new enters the cache, unless the volume is waiting, shrinking, or flash-only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifecycle {
    /// No change is under way.
    Steady,
    /// It is to be detached when the tree has been walked: before that, the amount of its dirty
    /// data is unknown.
    Waiting,
    /// Its dirty data is being written back, so that it can be served without the cache.
    Detaching,
    /// It is getting an inode, or has got one, and requests in flight do not know it.
    Attaching,
    /// It is growing, and requests in flight do not know it.
    Growing,
    /// It is shrinking: what the cache holds behind its new end is being dropped.
    Shrinking,
    /// It is about to be removed from the set, or its device is being exchanged: no new request
    /// begins.
    Leaving,
}

impl Lifecycle {
    /// Returns true if nothing new enters the cache meanwhile, for a volume with a backing device.
    #[must_use]
    pub const fn keeps_out(self) -> bool {
        !matches!(self, Self::Steady | Self::Waiting | Self::Shrinking)
    }
}

impl Volume {
    /// Creates a volume without a size, of which only the identity is known yet.
    #[must_use]
    pub fn new(inode: Option<Inode>, uuid: Uuid, label: Label, options: VolumeOptions) -> Self {
        Self {
            inode,
            backing: None,
            uuid,
            label,
            sectors: 0,
            data_offset: 0,
            cacheable_end: 0,
            mode: CacheMode::Writethrough,
            mode_changes: 0,
            options,
            streams: Streams::default(),
            stats: VolumeStats::default(),
            latencies: Latencies::default(),
            ranges: RangeTable::default(),
            zeroings: Zeroings::default(),
            last_hole: 0,
            writeback_from: 0,
            stripes: StripeCursor::default(),
            writeback_trouble: None,
            failed_extents: FailedExtents::default(),
            client_activity: ClientActivity::default(),
            stands_still: false,
            marking_trouble: None,
            hands: 0,
            requests: 0,
            changes: 0,
            round: 0,
            earlier_changes: 0,
            earlier_requests: 0,
            attachment: 0,
            lifecycle: Lifecycle::Steady,
            leaving: 0,
            pace: Pace::default(),
            writeback_lock: Semaphore::new(1),
            must_be_clean: false,
            is_outdated: false,
            dirty_marked: false,
        }
    }

    /// Returns true if the volume uses the cache under `inode`, and is not about to leave it.
    #[must_use]
    pub fn may_cache(&self, inode: Option<Inode>) -> bool {
        inode.is_some() && self.inode == inode && self.leaving == 0
    }

    /// Begins a change of the mode, and returns its number.
    pub const fn begin_mode_change(&mut self) -> u64 {
        self.mode_changes += 1;
        self.mode_changes
    }

    /// Records that data is about to become dirty. Returns true if nothing was dirty: then
    /// write-back starts at the beginning of the volume.
    pub fn begins_dirty(&mut self, now: Time) -> bool {
        let is_first = self.dirty_marked && self.pace.age.dirtied(now);
        if is_first {
            self.writeback_from = self.data_offset;
            self.pace.rest_until(now);
        }
        is_first
    }

    /// Returns true if nothing new enters the cache: misses are not filled, and writes bypass the
    /// cache.
    #[must_use]
    pub fn is_bypassed(&self) -> bool {
        self.backing.is_some() && self.lifecycle.keeps_out()
    }

    /// Returns true if its dirty data is being written back to its backing device, sooner or later.
    #[must_use]
    pub fn is_written_back(&self) -> bool {
        self.backing.is_some() && self.options.writeback_running && !self.stands_still
    }

    /// Upper bound for the age of its dirty data; `None`: nothing is dirty.
    #[must_use]
    pub fn oldest_dirty(&self, now: Time) -> Option<DirtyAge> {
        self.pace.age.oldest(now).max(self.failed_extents.oldest(now))
    }

    /// Records that nothing is dirty any more, and nothing is about to become dirty.
    pub fn is_rid_of_dirty(&mut self) {
        self.pace.age.cleaned();
        self.failed_extents.clear();
        (self.writeback_trouble, self.stands_still) = (None, false);
    }

    /// State on the backing superblock, as last made durable; `None` for a flash-only volume.
    #[must_use]
    pub fn state(&self) -> Option<BackingState> {
        self.backing.as_ref().map(|backing| backing.superblock.state())
    }
}

/// The volumes of a set.
#[derive(Default)]
pub struct Volumes {
    table: SortedMap<VolumeId, Box<Volume>>,
    next: u32,
}

impl Volumes {
    /// Adds a volume under the number `wanted`, or under the next unused one.
    pub fn add(&mut self, wanted: Option<VolumeId>, volume: Volume) -> VolumeId {
        let id = wanted.unwrap_or(VolumeId(self.next));
        self.number_from(VolumeId(id.0 + 1));
        // Each volume has a number of its own.
        self.table.insert(id, Box::new(volume));
        id
    }

    /// The next number that no volume has had.
    #[must_use]
    pub const fn next(&self) -> VolumeId {
        VolumeId(self.next)
    }

    /// Reserves the numbers below `next` for volumes that ask for one of them.
    pub fn number_from(&mut self, next: VolumeId) {
        self.next = self.next.max(next.0);
    }

    /// Returns a volume.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<&Volume> {
        self.table.get(id).map(|volume| &**volume)
    }

    /// Returns a volume for changes.
    pub fn get_mut(&mut self, id: VolumeId) -> Option<&mut Volume> {
        self.table.get_mut(id).map(|volume| &mut **volume)
    }

    /// Removes and returns one volume.
    pub fn remove(&mut self, id: VolumeId) -> Option<Volume> {
        self.table.remove(id).map(|volume| *volume)
    }

    /// Iterates over all volumes.
    pub fn iter(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        self.table.iter().map(|(id, volume)| (*id, &**volume))
    }
}

/// Public information about a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeInfo {
    /// Its identifier within this set.
    pub id: VolumeId,
    /// Inode of its keys on the cache device; `None`: not attached.
    pub inode: Option<Inode>,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label.
    pub label: Label,
    /// Size in sectors.
    pub sectors: u64,
    /// Block size of its cache set, in sectors: only requests that are multiples of it can be
    /// cached.
    pub block_sectors: u64,
    /// Block size in its backing device's superblock, in sectors: no cache with larger blocks can
    /// serve it.
    pub backing_block_sectors: Option<u64>,
    /// It has no backing device.
    pub flash_only: bool,
    /// It is served through the cache.
    pub attached: bool,
    /// Whether it is being attached, detached, resized or removed.
    pub lifecycle: Lifecycle,
    /// Cache mode.
    pub mode: CacheMode,
    /// The tunables.
    pub options: VolumeOptions,
    /// State on the backing superblock.
    pub state: Option<BackingState>,
    /// Dirty data, in sectors.
    pub dirty_sectors: u64,
    /// The count of dirty data is complete; if not, the tree has not been walked so far since the
    /// set was opened.
    pub is_counted: bool,
    /// Dirty data that it may have, in sectors, before the write-back rate rises.
    pub dirty_target_sectors: u64,
    /// Length of its stripes in sectors, if it has any.
    pub stripe_sectors: Option<u64>,
    /// Partial stripe writes are expensive.
    pub partial_stripes_expensive: bool,
    /// Number of full stripes, those that are dirty throughout, as far as counted; `None`: they are
    /// not counted.
    pub full_stripes: Option<u64>,
    /// Upper bound for the age of its dirty data; `None`: nothing is dirty.
    pub oldest_dirty: Option<DirtyAge>,
    /// The rate at which it is written back.
    pub writeback_rate: RateInfo,
    /// Counters since it was added.
    pub stats: VolumeStats,
    /// Why dirty data is stuck in the cache, if some is.
    pub writeback_trouble: Option<WritebackError>,
    /// Dirty data that could not be written back at the last try.
    pub unwritable: UnwritableData,
    /// Why the backing device cannot be marked clean although nothing is dirty.
    pub marking_trouble: Option<Box<Error>>,
    /// Health of the backing device; `None` without one.
    pub backing_health: Option<DiskHealth>,
    /// The zeroing that has been in progress for longest.
    pub zeroing: Option<ZeroingInfo>,
}

impl VolumeInfo {
    /// Its logical block in sectors, as the kernel's bcache shows it: that of its own superblock,
    /// or that of its set if it has no backing device. It stays the same wherever the volume is
    /// attached.
    #[must_use]
    pub fn logical_block_sectors(&self) -> u64 {
        self.backing_block_sectors.unwrap_or(self.block_sectors)
    }
}

impl VolumeInfo {
    /// Returns true if its dirty data is fully counted, or its superblock says that there is none.
    #[must_use]
    pub fn is_dirty_known(&self) -> bool {
        self.is_counted || (self.dirty_sectors == 0 && self.state == Some(BackingState::Clean))
    }

    /// Returns true if it has dirty data in the cache, or may have: not all is counted, and its
    /// superblock does not say *clean*.
    #[must_use]
    pub fn may_be_dirty(&self) -> bool {
        self.dirty_sectors > 0 || (!self.is_counted && self.state != Some(BackingState::Clean))
    }
}
