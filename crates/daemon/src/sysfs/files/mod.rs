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
use bcached_config::options::value::Kind;
use bcached_control::statistics::{CacheNumbers, Counted, VolumeNumbers};
use bcached_control::status::{Cache, CacheCounts, Volume, VolumeFacts};

/// A file.
#[derive(Debug)]
pub struct File {
    /// Its name.
    pub name: &'static str,
    /// What a read returns.
    pub read: Read,
    /// What a write does.
    pub write: Write,
}

/// What a read returns.
#[derive(Clone, Copy, Debug)]
pub enum Read {
    /// The file can only be written.
    Never,
    /// A value of a set, up to the end of the line.
    Set(fn(&Set<'_>) -> String),
    /// A value of a volume, likewise.
    Member(fn(&Member<'_>) -> String),
    /// A value of the statistics, likewise.
    Counted(fn(&Counted) -> String),
    /// The value of an option.
    Option(Scope, &'static str),
    /// How old the data in the buckets is, which needs a scan of all buckets.
    Ages,
    /// This text only, without an added line end.
    Bare(fn(&Set<'_>) -> String),
}

/// What a write does.
#[derive(Clone, Copy, Debug)]
pub enum Write {
    /// The file can only be read.
    Never,
    /// Sets an option.
    Option(Scope, &'static str),
    /// Accepts a value of this kind only if it is the present one; otherwise it is refused for this
    /// reason.
    Fixed(Kind, &'static str),
    /// Carries out an action.
    Deed(Deed),
    /// Refuses any value, for this reason.
    Refused(&'static str),
}

/// An action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deed {
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
pub struct Set<'a> {
    /// The cache.
    pub cache: &'a Cache,
    /// Its counters.
    pub counts: &'a CacheCounts,
    /// The rest of them.
    pub numbers: &'a CacheNumbers,
    /// The part of them that was cleared.
    pub cleared: Written,
}

/// Bytes written to a cache device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Data.
    pub data: u64,
    /// All else.
    pub metadata: u64,
    /// The B-tree nodes among the metadata.
    pub btree: u64,
}

impl Written {
    /// The counters of a set.
    #[must_use]
    pub fn of(counts: &CacheCounts, numbers: &CacheNumbers) -> Self {
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
pub struct Member<'a> {
    /// The volume.
    pub volume: &'a Volume,
    /// What is known of it while it is served.
    pub facts: &'a VolumeFacts,
    /// Its counters.
    pub numbers: &'a VolumeNumbers,
}

impl File {
    /// Its permissions.
    #[must_use]
    pub const fn mode(&self) -> u16 {
        let read = if matches!(self.read, Read::Never) { 0 } else { 0o444 };
        let write = if matches!(self.write, Write::Never) { 0 } else { 0o200 };
        read | write
    }

    const fn of_set(name: &'static str, read: fn(&Set<'_>) -> String) -> Self {
        Self { name, read: Read::Set(read), write: Write::Never }
    }

    const fn of_member(name: &'static str, read: fn(&Member<'_>) -> String) -> Self {
        Self { name, read: Read::Member(read), write: Write::Never }
    }

    /// A file for the option of the same name.
    const fn option(scope: Scope, name: &'static str) -> Self {
        Self { name, read: Read::Option(scope, name), write: Write::Option(scope, name) }
    }

    const fn deed(name: &'static str, deed: Deed) -> Self {
        Self { name, read: Read::Never, write: Write::Deed(deed) }
    }

    const fn refused(name: &'static str, why: &'static str) -> Self {
        Self { name, read: Read::Never, write: Write::Refused(why) }
    }
}
