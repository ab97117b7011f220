//! The tables of the kernel's control files, one for each kind of directory: name, what a read
//! returns, what a write does. The mode follows from that. A file of the kernel that has no meaning
//! here returns what is true here, and accepts no other value.

mod of_backing;
mod of_cache;
mod of_set;
mod of_stats;

pub use of_backing::{BACKING, FLASH};
pub use of_cache::CACHE;
pub use of_set::{INTERNAL, SET, TOP};
pub use of_stats::STATS;

use bcached_config::options::Scope;
use bcached_config::options::value::ValueKind;
use bcached_control::statistics::{CacheStatistics, RequestCounts, VolumeStatistics};
use bcached_control::status::{CacheCounts, CacheStatus, VolumeProperties, VolumeStatus};

/// A file.
#[derive(Debug)]
pub struct File {
    /// Its name.
    pub name: &'static str,
    /// What a read returns.
    pub read: FileRead,
    /// What a write does.
    pub write: FileWrite,
}

/// What a read returns.
#[derive(Clone, Copy, Debug)]
pub enum FileRead {
    /// The file can only be written.
    Never,
    /// A value of a set, up to the end of the line.
    Set(fn(&SetView<'_>) -> String),
    /// A value of a volume, likewise.
    Volume(fn(&VolumeView<'_>) -> String),
    /// A value of the statistics, likewise.
    Counted(fn(&RequestCounts) -> String),
    /// The value of an option.
    Option(Scope, &'static str),
    /// How old the data in the buckets is, which needs a scan of all buckets.
    Ages,
    /// This text only, without an added line end.
    Bare(fn(&SetView<'_>) -> String),
}

/// What a write does.
#[derive(Clone, Copy, Debug)]
pub enum FileWrite {
    /// The file can only be read.
    Never,
    /// Sets an option.
    Option(Scope, &'static str),
    /// Accepts a value of this kind only if it is the present one; otherwise it is refused for this
    /// reason.
    Fixed(ValueKind, &'static str),
    /// Carries out an action.
    Action(FileAction),
    /// Refuses any value, for this reason.
    Refused(&'static str),
}

/// An action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileAction {
    /// Attaches the volume to the set whose UUID is written.
    Attach,
    /// Detaches the volume from its set.
    Detach,
    /// Stops serving the volume until the next start.
    Stop,
    /// Runs the volume, which already runs.
    Run,
    /// Resets the statistics of the volume, the set or the cache device, in these files.
    ClearStats,
    /// Makes a flash-only volume of this size.
    CreateFlash,
    /// Resizes such a volume.
    Resize,
}

/// An open set.
#[derive(Clone, Copy)]
pub struct SetView<'a> {
    /// The cache.
    pub cache: &'a CacheStatus,
    /// Its counters.
    pub counts: &'a CacheCounts,
    /// The rest of them.
    pub numbers: &'a CacheStatistics,
    /// The part of them that was cleared.
    pub cleared: WrittenBytes,
}

/// Bytes written to a cache device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    /// Data.
    pub data: u64,
    /// All else.
    pub metadata: u64,
    /// The B-tree nodes among the metadata.
    pub btree: u64,
}

impl WrittenBytes {
    /// The counters of a set.
    #[must_use]
    pub fn of(counts: &CacheCounts, numbers: &CacheStatistics) -> Self {
        Self {
            data: numbers.written_of(true),
            metadata: numbers.written_of(false),
            btree: counts.btree_written_bytes,
        }
    }

    /// Returns what was written since the clearing; all of it if the counters have started anew.
    #[must_use]
    pub const fn since(self, cleared: Self) -> Self {
        if self.data < cleared.data || self.metadata < cleared.metadata || self.btree < cleared.btree {
            return self;
        }
        Self {
            data: self.data - cleared.data,
            metadata: self.metadata - cleared.metadata,
            btree: self.btree - cleared.btree,
        }
    }
}

/// A volume that is served.
#[derive(Clone, Copy)]
pub struct VolumeView<'a> {
    /// The volume.
    pub volume: &'a VolumeStatus,
    /// What is known of it while it is served.
    pub facts: &'a VolumeProperties,
    /// Its counters.
    pub numbers: &'a VolumeStatistics,
}

impl File {
    /// Its permissions.
    #[must_use]
    pub const fn mode(&self) -> u16 {
        let read = if matches!(self.read, FileRead::Never) { 0 } else { 0o444 };
        let write = if matches!(self.write, FileWrite::Never) { 0 } else { 0o200 };
        read | write
    }

    const fn of_set(name: &'static str, read: fn(&SetView<'_>) -> String) -> Self {
        Self { name, read: FileRead::Set(read), write: FileWrite::Never }
    }

    const fn of_member(name: &'static str, read: fn(&VolumeView<'_>) -> String) -> Self {
        Self { name, read: FileRead::Volume(read), write: FileWrite::Never }
    }

    /// A file for the option of the same name.
    const fn option(scope: Scope, name: &'static str) -> Self {
        Self { name, read: FileRead::Option(scope, name), write: FileWrite::Option(scope, name) }
    }

    const fn deed(name: &'static str, deed: FileAction) -> Self {
        Self { name, read: FileRead::Never, write: FileWrite::Action(deed) }
    }

    const fn refused(name: &'static str, why: &'static str) -> Self {
        Self { name, read: FileRead::Never, write: FileWrite::Refused(why) }
    }
}
