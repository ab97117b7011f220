//! The kernel's control files, a table for each kind of directory: name, what is to be read, what can be written. The mode follows
//! from that. A file that the kernel has and that means nothing here says what is so here, and takes nothing else.

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
    /// What it says.
    pub read: Read,
    /// What it takes.
    pub write: Write,
}

/// What a file says.
#[derive(Clone, Copy, Debug)]
pub enum Read {
    /// It can only be written.
    Never,
    /// Something of a set, to the end of the line.
    Set(fn(&Set<'_>) -> String),
    /// Something of a volume, likewise.
    Member(fn(&Member<'_>) -> String),
    /// Something of what is counted, likewise.
    Counted(fn(&Counted) -> String),
    /// The value of an option.
    Option(Scope, &'static str),
    /// How old the data in the buckets is, which every bucket is looked at for.
    Ages,
    /// Always that, and no more than that: not even the end of a line.
    Bare(fn(&Set<'_>) -> String),
}

/// What a file takes.
#[derive(Clone, Copy, Debug)]
pub enum Write {
    /// It can only be read.
    Never,
    /// Another value of an option.
    Option(Scope, &'static str),
    /// A value of this kind, but none than the one that it has: for this reason.
    Fixed(Kind, &'static str),
    /// Something is to be done.
    Deed(Deed),
    /// Nothing, for this reason.
    Refused(&'static str),
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deed {
    /// The volume goes to the set whose UUID is written.
    Attach,
    /// It leaves its set.
    Detach,
    /// It is not served before the next start.
    Stop,
    /// It is to run, which it does.
    Run,
    /// What is counted of the volume, the set or the cache device begins anew in these files.
    ClearStats,
    /// A volume of that size is made that lives in the cache alone.
    CreateFlash,
    /// Such a volume gets that size.
    Resize,
}

/// A set that is open.
#[derive(Clone, Copy)]
pub struct Set<'a> {
    /// What it is.
    pub cache: &'a Cache,
    /// What it counts.
    pub counts: &'a CacheCounts,
    /// The rest of that.
    pub numbers: &'a CacheNumbers,
    /// What of it does not count any more.
    pub cleared: Written,
}

/// Bytes written to a cache device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Data.
    pub data: u64,
    /// All else.
    pub metadata: u64,
    /// Nodes of the btree among that.
    pub btree: u64,
}

impl Written {
    /// What a set counts.
    #[must_use]
    pub fn of(counts: &CacheCounts, numbers: &CacheNumbers) -> Self {
        Self {
            data: numbers.written_of(true),
            metadata: numbers.written_of(false),
            btree: counts.btree_written_bytes,
        }
    }

    /// What has come since; all of it, if it counts from the beginning again.
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
    /// What it is.
    pub volume: &'a Volume,
    /// The same while it is served.
    pub facts: &'a VolumeFacts,
    /// What it counts.
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

    /// An option of the same name.
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
