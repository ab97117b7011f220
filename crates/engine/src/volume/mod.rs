//! Volumes: a backing device with its state in the cache, or a flash-only volume.

pub mod attach;
pub(crate) mod attachment;
pub mod detach;
pub mod epoch;
pub mod flash;
pub mod flash_size;
pub mod forget;
pub mod label;
pub mod reattach;
pub mod record;
pub mod remove;
pub mod resize;
pub mod resume;
pub mod returned;
pub mod slots;
pub mod zeroings;

use crate::error::Error;
use crate::latency::Latencies;
use crate::options::VolumeOptions;
use crate::policy::Streams;
use crate::request::ranges::Ranges;
use crate::sorted_map::Sorted;
use crate::stats::VolumeStats;
use crate::writeback::contention::Company;
use crate::writeback::dirty_age::DirtyAge;
use crate::writeback::failed_extents::{Places, Unwritable};
use crate::writeback::pace::Pace;
use crate::writeback::rate::RateInfo;
use crate::writeback::stall_reason::WritebackTrouble;
use crate::writeback::stripes::Cursor;
use alloc::boxed::Box;
use alloc::vec::Vec;
use bcached_env::{Disk, DiskHealth, Time, sync::Semaphore};
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Inode, Label, Uuid};
use epoch::Epoch;
use zeroings::{ZeroingInfo, Zeroings};

/// Names a volume of a running set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct VolumeId(pub u32);

/// The device under a volume.
pub struct Backing {
    /// The device.
    pub disk: Disk,
    /// Its superblock as it was last durable.
    pub superblock: BackingSuperblock,
    /// A write of the superblock has failed: it may have landed, so the device may say something else than
    /// [`Backing::superblock`]. Nothing relies on what it says until a write has succeeded.
    pub in_doubt: bool,
    /// Those whose writes have failed since one was last durable: it may say any of them.
    pub attempted: Vec<BackingSuperblock>,
    /// What of its writes is durable.
    pub epoch: Epoch,
    /// One change of the superblock at a time.
    pub record_lock: Semaphore,
}

/// One volume.
pub struct Volume {
    /// Number of its keys; `None`: not attached, everything passes by.
    pub inode: Option<Inode>,
    /// The device under it; `None`: flash-only.
    pub backing: Option<Backing>,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label.
    pub label: Label,
    /// Size in sectors.
    pub sectors: u64,
    /// First sector of the data in the key space and on the backing device.
    pub data_offset: u64,
    /// End of what can be cached: the last whole block. Key space.
    pub cacheable_end: u64,
    /// Cache mode.
    pub mode: CacheMode,
    /// How often the mode has been changed, or was about to be.
    pub mode_changes: u64,
    /// The knobs.
    pub options: VolumeOptions,
    /// Who streams.
    pub streams: Streams,
    /// Counters.
    pub stats: VolumeStats,
    /// How long its requests took.
    pub latencies: Latencies,
    /// What is in flight, by range.
    pub ranges: Ranges,
    /// Zeroings in flight.
    pub zeroings: Zeroings,
    /// Newest journal entry that made a hole: a bypassed write waits for it.
    pub last_hole: u64,
    /// Where the next pass of write-back begins. Key space.
    pub writeback_from: u64,
    /// Where it is among stripes that are dirty throughout.
    pub stripes: Cursor,
    /// Why dirty data cannot be written back, if that has nothing to do with its place.
    pub writeback_trouble: Option<WritebackTrouble>,
    /// Where it cannot.
    pub places: Places,
    /// Who else uses the backing device.
    pub company: Company,
    /// Write-back has met trouble and nothing else.
    pub stands_still: bool,
    /// Why the backing device cannot be marked clean, if that is so.
    pub marking_trouble: Option<Box<Error>>,
    /// Whoever works on the volume beside its requests: its tasks, fills, what somebody has asked for.
    pub hands: u64,
    /// Requests in flight.
    pub requests: u64,
    /// Those of them that change something.
    pub changes: u64,
    /// Counts what somebody waits for all changes before; see [`crate::writeback::urgent`].
    pub round: u64,
    /// Changes in flight that began before this round.
    pub earlier_changes: u64,
    /// Requests in flight that began before it was attached under the number, or had the size, that it has now.
    pub earlier_requests: u64,
    /// How often its number or its size has changed.
    pub attachment: u64,
    /// Whether it is on its way to or from the cache.
    pub course: Course,
    /// Flows that are about to make this volume independent of the cache: no dirty key may be made meanwhile.
    pub leaving: u64,
    /// The pace of write-back.
    pub pace: Pace,
    /// Who holds it writes the volume's dirty data back, and says that there is none.
    pub writeback_lock: Semaphore,
    /// Its backing device said *clean* when it came, and could have been believed: if it was the newest, nothing was dirty.
    pub must_be_clean: bool,
    /// The walk has found something dirty all the same: the backing device is an older copy of itself. Nothing is written back to it.
    pub is_outdated: bool,
    /// *Dirty* is durable on the superblock and nobody is about to change that: dirty keys may be made.
    pub dirty_marked: bool,
}

/// Whether a volume is on its way to or from the cache, or to another size. While it is, nothing new enters the cache, unless it
/// waits, becomes smaller, or lives in the cache alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Course {
    /// It stays where it is.
    Steady,
    /// It is to be detached when the tree has been walked: how much of it is dirty is not known before.
    Waiting,
    /// Its dirty data is being written back, so that it can be served without the cache.
    Detaching,
    /// It gets a number, or has one and requests are in flight that do not know it.
    Attaching,
    /// It becomes larger, and requests are in flight that do not know it.
    Growing,
    /// It becomes smaller: what the cache holds behind its new end is given up.
    Shrinking,
    /// The set is about to know nothing of it any more: no request begins.
    Leaving,
}

impl Course {
    /// Nothing new enters the cache meanwhile, of a volume that has a backing device.
    #[must_use]
    pub const fn keeps_out(self) -> bool {
        !matches!(self, Self::Steady | Self::Waiting | Self::Shrinking)
    }
}

impl Volume {
    /// A volume without a size, of which nothing is known yet but who it is.
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
            ranges: Ranges::default(),
            zeroings: Zeroings::default(),
            last_hole: 0,
            writeback_from: 0,
            stripes: Cursor::default(),
            writeback_trouble: None,
            places: Places::default(),
            company: Company::default(),
            stands_still: false,
            marking_trouble: None,
            hands: 0,
            requests: 0,
            changes: 0,
            round: 0,
            earlier_changes: 0,
            earlier_requests: 0,
            attachment: 0,
            course: Course::Steady,
            leaving: 0,
            pace: Pace::default(),
            writeback_lock: Semaphore::new(1),
            must_be_clean: false,
            is_outdated: false,
            dirty_marked: false,
        }
    }

    /// The volume uses the cache under the number `inode`, and is not about to leave it.
    #[must_use]
    pub fn may_cache(&self, inode: Option<Inode>) -> bool {
        inode.is_some() && self.inode == inode && self.leaving == 0
    }

    /// The mode is about to change; which change that is.
    pub const fn begin_mode_change(&mut self) -> u64 {
        self.mode_changes += 1;
        self.mode_changes
    }

    /// Something is about to become dirty. True if nothing was: write-back begins, from the start of the volume.
    pub fn begins_dirty(&mut self, now: Time) -> bool {
        let is_first = self.dirty_marked && self.pace.age.dirtied(now);
        if is_first {
            self.writeback_from = self.data_offset;
            self.pace.rest_until(now);
        }
        is_first
    }

    /// Nothing new enters the cache, whoever asks: what misses is not filled, and writes go past it.
    #[must_use]
    pub fn is_bypassed(&self) -> bool {
        self.backing.is_some() && self.course.keeps_out()
    }

    /// Its dirty data is on its way to its backing device, sooner or later.
    #[must_use]
    pub fn is_written_back(&self) -> bool {
        self.backing.is_some() && self.options.writeback_running && !self.stands_still
    }

    /// No data has been dirty for longer; `None`: nothing is dirty.
    #[must_use]
    pub fn oldest_dirty(&self, now: Time) -> Option<DirtyAge> {
        self.pace.age.oldest(now).max(self.places.oldest(now))
    }

    /// Nothing is dirty any more, and nothing is about to become so.
    pub fn is_rid_of_dirty(&mut self) {
        self.pace.age.cleaned();
        self.places.clear();
        (self.writeback_trouble, self.stands_still) = (None, false);
    }

    /// State on the backing superblock, as it was last durable; a flash-only volume has none.
    #[must_use]
    pub fn state(&self) -> Option<BackingState> {
        self.backing.as_ref().map(|backing| backing.superblock.state())
    }
}

/// The volumes of a set.
#[derive(Default)]
pub struct Volumes {
    table: Sorted<VolumeId, Box<Volume>>,
    next: u32,
}

impl Volumes {
    /// Adds one, under the number `wanted` or the next that nobody has had.
    pub fn add(&mut self, wanted: Option<VolumeId>, volume: Volume) -> VolumeId {
        let id = wanted.unwrap_or(VolumeId(self.next));
        self.number_from(VolumeId(id.0 + 1));
        // A volume has a number of its own.
        self.table.insert(id, Box::new(volume));
        id
    }

    /// The next that nobody has had.
    #[must_use]
    pub const fn next(&self) -> VolumeId {
        VolumeId(self.next)
    }

    /// Numbers below `next` are not given to anybody who does not ask for one.
    pub fn number_from(&mut self, next: VolumeId) {
        self.next = self.next.max(next.0);
    }

    /// One volume.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<&Volume> {
        self.table.get(id).map(|volume| &**volume)
    }

    /// One volume, to change.
    pub fn get_mut(&mut self, id: VolumeId) -> Option<&mut Volume> {
        self.table.get_mut(id).map(|volume| &mut **volume)
    }

    /// Takes one out.
    pub fn remove(&mut self, id: VolumeId) -> Option<Volume> {
        self.table.remove(id).map(|volume| *volume)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        self.table.iter().map(|(id, volume)| (*id, &**volume))
    }
}

/// What others may know of a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeInfo {
    /// Its name in this set.
    pub id: VolumeId,
    /// Number of its keys on the cache device; `None`: it is not attached.
    pub inode: Option<Inode>,
    /// Its UUID.
    pub uuid: Uuid,
    /// Its label.
    pub label: Label,
    /// Size in sectors.
    pub sectors: u64,
    /// Block size of its cache set, in sectors: what requests must be multiples of to be cached.
    pub block_sectors: u64,
    /// Block size of its backing device's superblock, in sectors: no cache of larger blocks can serve it.
    pub backing_block_sectors: Option<u64>,
    /// No backing device.
    pub flash_only: bool,
    /// Served through the cache.
    pub attached: bool,
    /// Whether it is on its way to or from the cache.
    pub course: Course,
    /// Cache mode.
    pub mode: CacheMode,
    /// The knobs.
    pub options: VolumeOptions,
    /// State on the backing superblock.
    pub state: Option<BackingState>,
    /// Dirty data, in sectors.
    pub dirty_sectors: u64,
    /// Those are all; if not, the tree has not been walked so far since the set was opened.
    pub is_counted: bool,
    /// Dirty data that it may have, in sectors, before write-back grows faster.
    pub dirty_target_sectors: u64,
    /// Length of its stripes in sectors, if it has any.
    pub stripe_sectors: Option<u64>,
    /// Stripes that are written in parts are expensive.
    pub partial_stripes_expensive: bool,
    /// Stripes that are dirty throughout, as far as they are counted; `None`: nobody counts them.
    pub full_stripes: Option<u64>,
    /// No data has been dirty for longer; `None`: nothing is dirty.
    pub oldest_dirty: Option<DirtyAge>,
    /// How fast it is written back.
    pub writeback_rate: RateInfo,
    /// Counters since it was added.
    pub stats: VolumeStats,
    /// Why dirty data stands still in the cache, if some does.
    pub writeback_trouble: Option<WritebackTrouble>,
    /// Dirty data that could not be written back when it was last tried.
    pub unwritable: Unwritable,
    /// Nothing is dirty, and the backing device cannot be told: why.
    pub marking_trouble: Option<Box<Error>>,
    /// How the backing device has fared; `None` without one.
    pub backing_health: Option<DiskHealth>,
    /// The zeroing that has been under way for longest.
    pub zeroing: Option<ZeroingInfo>,
}

impl VolumeInfo {
    /// Its logical block, in sectors, as the kernel's bcache shows it: that of its own superblock, or of its set if it has no
    /// backing device. It stays the same wherever the volume is attached.
    #[must_use]
    pub fn logical_block_sectors(&self) -> u64 {
        self.backing_block_sectors.unwrap_or(self.block_sectors)
    }
}

impl VolumeInfo {
    /// Whether its dirty data is all counted, or its superblock denies that there is any.
    #[must_use]
    pub fn is_dirty_known(&self) -> bool {
        self.is_counted || (self.dirty_sectors == 0 && self.state == Some(BackingState::Clean))
    }

    /// Whether some of it is dirty in the cache, or may be: it has not all been counted, and its superblock does not deny it.
    #[must_use]
    pub fn may_be_dirty(&self) -> bool {
        self.dirty_sectors > 0 || (!self.is_counted && self.state != Some(BackingState::Clean))
    }
}
