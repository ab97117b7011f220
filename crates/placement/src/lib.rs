//! Placement: which cache set serves a volume, whether it is served without a cache, or what it
//! waits for.
//!
//! Everything here is a pure function of what is known at a moment: the configuration, the states
//! of the caches, and the superblock of the volume's backing device. There is no I/O, no clock and
//! no text. The supervisor gathers the facts, carries out the decision and puts it into words; the
//! tests of this crate draw facts and events at random against a model of devices and sets.
//!
//! What the decisions keep:
//!
//! - A volume whose newest data may be in a cache is never served without that cache.
//! - A volume is given to the set that its superblock names, or to another one only if its
//!   superblock says that no set holds anything valid of it.
//! - A volume that is waited for is waiting for something that can still happen, and the decision
//!   says for what.
#![forbid(unsafe_code)]
#![no_std]

mod decide;

use bcached_format::{BackingState, Uuid};
use core::time::Duration;

/// Everything that is known of the caches.
#[derive(Clone, Copy, Debug)]
pub struct Caches<'a> {
    /// All of them, in the order of the configuration. A decision names one by its index.
    pub all: &'a [Cache<'a>],
    /// The devices were named on a command line and are needed now: no volume is served without its
    /// cache, and a reason that may pass is as good as final.
    pub is_strict: bool,
}

/// A cache.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// Its name; `None` until its device has been read.
    pub name: Option<&'a str>,
    /// What it is to volumes.
    pub role: Role<'a>,
    /// How far it has come.
    pub state: State,
    /// The set on its device, once read.
    pub last_set: Option<Uuid>,
}

/// What a cache is to volumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role<'a> {
    /// A cache that stays.
    Permanent,
    /// The former device of the cache of this name, which its volumes are to leave.
    FormerOf(&'a str),
    /// No cache: the engine that serves volumes without one.
    Bypass,
}

/// How far a cache has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Its device cannot be opened yet; it is tried again.
    Waiting(CacheFault),
    /// Its set is being recovered; why an earlier attempt failed, if one did.
    Opening(Uuid, Option<CacheFault>),
    /// It serves this set.
    Open(Uuid),
    /// It is being stopped, or was.
    Closed,
    /// It is not ours any more.
    Released,
    /// It will not be opened again by itself.
    Failed(CacheFault),
}

/// What keeps a cache from being opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheFault {
    /// Its device is missing, does not answer, or answers with errors.
    Missing,
    /// Its metadata is damaged.
    Damaged,
    /// The device carries no bcache superblock.
    NotBcache,
    /// Anything that passes by itself or that an administrator decides: the device is in use,
    /// memory is short, it has not been looked for yet.
    Other,
}

impl CacheFault {
    /// Whether the volumes of such a cache may be served without it. A device that another program
    /// uses may be free again at any time, so it does not count.
    #[must_use]
    pub const fn is_missing(self) -> bool {
        matches!(self, Self::Missing | Self::Damaged)
    }
}

/// The cache that the configuration names for a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheSelector<'a> {
    /// None is named: the only one, or the one that the superblock names.
    Any,
    /// The volume is to have no cache.
    NoCache,
    /// The one of this name.
    Named(&'a str),
}

/// A volume that is not served.
#[derive(Clone, Copy, Debug)]
pub struct Volume<'a> {
    /// Its cache by configuration.
    pub wanted: CacheSelector<'a>,
    /// How long a missing cache is waited for.
    pub wait: Duration,
    /// Since when its cache is known to be missing, on the clock of `now`.
    pub lacks_since: Option<Duration>,
}

/// What the superblock of a backing device says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// Whether a set holds something of the volume.
    pub state: BackingState,
    /// Which.
    pub set: Uuid,
}

impl Superblock {
    /// Whether the set holds valid data of the volume.
    const fn is_held(&self) -> bool {
        matches!(self.state, BackingState::Clean | BackingState::Dirty)
    }
}

/// What is known without reading the volume's backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precheck {
    /// The superblock decides: [`Caches::decide`].
    ReadSuperblock,
    /// Its cache is being opened.
    Wait,
    /// Its cache has failed for good, and the volume with it.
    Refuse(usize),
    /// Its cache is being stopped: nothing happens to the volume.
    Ignore,
}

/// A decision about a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// What is done.
    pub verdict: Verdict,
    /// Since when its cache has been missing, from now on: the next value of
    /// [`Volume::lacks_since`].
    pub lacks_since: Option<Duration>,
    /// The set that the superblock names is one that cannot be reached now.
    pub misses_set: bool,
}

/// What is done with a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// This cache serves it. `adopts`: another set has nothing valid of it any more, so it becomes
    /// this one's with an empty cache.
    Serve {
        /// Index of the cache.
        cache: usize,
        /// See above.
        adopts: bool,
    },
    /// It is served without a cache. If one is missing that it should have: why.
    Without(Option<Reason>),
    /// It is tried again.
    Wait(Reason),
    /// It is not served.
    Refuse(Reason),
}

impl Verdict {
    /// Why, unless a cache serves the volume or it is to have none.
    #[must_use]
    pub const fn why(&self) -> Option<Reason> {
        match self {
            Self::Serve { .. } | Self::Without(None) => None,
            Self::Without(Some(why)) | Self::Wait(why) | Self::Refuse(why) => Some(*why),
        }
    }
}

/// Why a volume waits, is refused, or goes without its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Its cache is being opened.
    Opening,
    /// This cache, which its section names, is in trouble.
    NamedCache(usize),
    /// This cache is in trouble, and may be the volume's.
    PossibleCache(usize),
    /// This cache, which was last seen with the volume's set, has failed.
    FailedCache(usize),
    /// It may be on the former device of its cache, which is not open.
    FormerDevice,
    /// None of the caches has its set.
    NoCache,
}

/// A volume that is served without its cache.
#[derive(Clone, Copy, Debug)]
pub struct BypassedVolume<'a> {
    /// Its cache by configuration.
    pub wanted: CacheSelector<'a>,
    /// The set that its superblock named when its cache was found missing.
    pub set: Uuid,
}
