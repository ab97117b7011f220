//! What the daemon says about itself: the body of `/v1/status`, `bcached.status` version 1. Within a version, fields
//! are only added; what is not known is absent.

mod dirty;
mod text;

use super::hardware::Hardware;
use super::jobs::Job;
use super::statistics::{CacheNumbers, VolumeNumbers};
use crate::names::{self, Known};
use crate::sizes::human;
pub use dirty::Dirty;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Everything that is served, or is not and why.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// `starting`, `ready` or `stopping`.
    pub state: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Since its start.
    pub uptime_seconds: u64,
    /// Where NBD is served.
    pub nbd: Vec<String>,
    /// Cache sets.
    pub caches: Vec<Cache>,
    /// Caches that are configured and not to be served, as after a release; absent: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<String>,
    /// Volumes, those that are not served included.
    pub volumes: Vec<Volume>,
    /// Connected clients.
    pub clients: Vec<Client>,
    /// Long work that goes on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<Job>,
    /// How the log is doing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<Log>,
    /// What somebody has taken away that the daemon needs, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// How the log is doing: lines are dropped where its reader is too slow, because nothing waits for that.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Log {
    /// Lines that were dropped since the start, or could not be written.
    pub lines_lost: u64,
    /// Its reader has taken nothing for so long; absent: it reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck_seconds: Option<u64>,
}

/// A cache set.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cache {
    /// Its name here.
    pub name: String,
    /// As configured.
    pub device: String,
    /// `waiting`, `opening`, `open`, `stopped` or `failed`.
    pub state: String,
    /// Why it is not open, or why it stopped writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How I/O is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<String>,
    /// How far an opening is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opening: Option<Progress>,
    /// Dirty data in it of volumes that are not served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<Unserved>,
    /// Btree nodes that could not be read when they were last tried: the first few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableNode>,
    /// What an open set counts.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub counts: Option<CacheCounts>,
    /// Its device as the system knows it, for control files.
    #[serde(skip)]
    pub hardware: Option<Hardware>,
}

/// How far an opening is that reads the whole tree.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// B-tree nodes read until now. How many there are is not known before the end.
    pub nodes_read: u64,
    /// About how much of the tree that is, in percent, estimated from its shape.
    pub tree_percent: u64,
}

/// A clause for people.
impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nodes_read, self.tree_percent) {
            (0, _) => write!(f, "reading the journal and the generations of the buckets"),
            (nodes, 100) => write!(f, "all {nodes} btree nodes read, replaying the journal"),
            (nodes, percent) => write!(f, "{nodes} btree nodes read, about {percent}% of the tree"),
        }
    }
}

/// The numbers of an open set.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct CacheCounts {
    pub set_uuid: String,
    pub block_bytes: u64,
    pub bucket_bytes: u64,
    #[serde(default)]
    pub cache_replacement_policy: String,
    pub buckets: u64,
    pub buckets_available: u64,
    /// The buckets that hold cached data, dirty or clean, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_bytes: Option<u64>,
    pub buckets_free: u64,
    pub buckets_metadata: u64,
    /// Kept free for the next start, so that it need not read the whole index first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets_reserved: Option<u64>,
    /// How much of the index has been read since the start; before it is 100, numbers of buckets and dirty data are of that part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walked_percent: Option<u64>,
    #[serde(flatten)]
    pub dirty: Dirty,
    /// Of these, dirty data of no volume that the set's table names. Absent where that is not known: before the index has
    /// been read to its end, or if some of it is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownerless_dirty_bytes: Option<u64>,
    pub tree_depth: u64,
    pub nodes: u64,
    pub node_bytes: u64,
    pub node_bytes_max: u64,
    pub node_budget_bytes: u64,
    /// Memory of the table of buckets. (A daemon of an earlier version does not say.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_table_bytes: Option<u64>,
    pub journal_sequence: u64,
    pub hits: u64,
    pub misses: u64,
    pub hit_bytes: u64,
    pub miss_bytes: u64,
    pub bypassed_bytes: u64,
    pub write_bytes: u64,
    pub data_written_bytes: u64,
    pub moved_bytes: u64,
    pub btree_written_bytes: u64,
    pub journal_written_bytes: u64,
    pub prio_written_bytes: u64,
    pub journal_entries: u64,
    pub journal_waits: u64,
    pub btree_rewrites: u64,
    pub gc_passes: u64,
    pub written_back_bytes: u64,
    pub fill_races: u64,
    pub read_retries: u64,
    #[serde(default)]
    pub node_read_failures: u64,
    #[serde(flatten)]
    pub bypass: Option<BypassCounts>,
    /// Streams of so many bytes and more go past the cache device because it is slow; 0: it is not congested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congested_bytes: Option<u64>,
    /// Its device has failed as often as `io_error_limit` says: nothing is added, and what is dirty leaves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failing: Option<bool>,
    /// Whether freed buckets are discarded: `on`, `off`, `unsupported` (by its device) or `failed` (one has).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<String>,
    /// What has been discarded since the set was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discarded_bytes: Option<u64>,
    #[serde(flatten)]
    pub numbers: Option<CacheNumbers>,
}

/// What was not added to a cache. Reads among it are not counted as hits or misses otherwise.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct BypassCounts {
    pub bypass_hits: u64,
    pub bypass_misses: u64,
    pub bypassed_requests: u64,
    /// The same by reason.
    pub bypassed: BTreeMap<String, Bypassed>,
}

/// Requests that were not added to a cache, for one reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Bypassed {
    pub requests: u64,
    pub bytes: u64,
}

/// The numbers of a served volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct VolumeCounts {
    pub hits: u64,
    pub misses: u64,
    pub miss_collisions: u64,
    pub bypassed_bytes: u64,
    #[serde(flatten)]
    pub bypass: BypassCounts,
}

impl VolumeCounts {
    /// How much was not added to the cache, and why: the most first.
    fn bypassed(&self) -> Option<String> {
        let mut reasons: Vec<_> = self.bypass.bypassed.iter().filter(|(_, one)| one.requests > 0).collect();
        reasons.sort_by_key(|(_, one)| Reverse(one.bytes));
        let reasons: Vec<_> =
            reasons.into_iter().map(|(reason, one)| format!("{reason} {}", human(one.bytes))).collect();
        let text = || format!("{} bypassed ({})", human(self.bypassed_bytes), reasons.join(", "));
        (!reasons.is_empty()).then(text)
    }
}

/// A volume that is not served, and has dirty data or lives in the cache alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Unserved {
    pub uuid: String,
    pub label: String,
    #[serde(flatten)]
    pub dirty: Dirty,
    /// It lives in the cache alone, and is so large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_size_bytes: Option<u64>,
}

impl Unserved {
    /// How much of it is used, of one that lives in the cache alone.
    fn used(&self) -> String {
        match (self.dirty.dirty_bytes, self.dirty.dirty_bytes_at_least) {
            (Some(all), _) => human(all),
            (None, Some(least)) => format!("at least {}", human(least)),
            (None, None) => "an unknown part".to_owned(),
        }
    }

    /// The volume in a sentence.
    #[must_use]
    pub fn name(&self) -> String {
        if self.label.is_empty() { self.uuid.clone() } else { format!("{} ({})", self.label, self.uuid) }
    }
}

/// A btree node that cannot be read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnreadableNode {
    /// Its bucket on the cache device.
    pub bucket: u64,
    /// Its first sector there.
    pub sector: u64,
    /// 0 for a leaf.
    pub level: u8,
    /// All of it in a sentence.
    pub reason: String,
    /// What of the served volumes it is the index of, as far as is known.
    pub covers: Vec<Covered>,
}

/// A range of a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Covered {
    pub volume: String,
    pub start_bytes: u64,
    pub length_bytes: u64,
}

/// A volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Volume {
    /// Its name, which is also its NBD export.
    pub name: String,
    /// What the kernel's control files call it: `bcacheN`, by the `number` of its section, else its place in the configuration or on the command line.
    #[serde(default)]
    pub kernel_name: String,
    /// `waiting`, `attaching`, `served`, `degraded` (served, but not as it should be), `failed`, `stopped` (by command) or `releasing`.
    pub state: String,
    /// Why it is not served as it should be, and what works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What the superblock of its backing device said when it was looked at last, of one that is not served; served ones have
    /// `backing_state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superblock_state: Option<String>,
    /// Its backing device as configured; absent for a volume that lives on the cache alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Name of its cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// The ways to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Exported>,
    /// What a served volume is.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub facts: Option<VolumeFacts>,
    /// Its backing device as the system knows it, and where its data begins there, in sectors; for control files.
    #[serde(skip)]
    pub hardware: Option<(Hardware, u64)>,
}

/// A way to a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Exported {
    /// `nbd`, `ublk`, `vhost-user`, `fuse` or `dev`.
    pub way: String,
    /// What the block device of `dev` is made of: `ublk`, `nbd` or `loop`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// How the data of a ublk device comes and goes: `zero copy` or `user copy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<String>,
    /// `/dev/bcacheN`, which leads to the block device, if the volume's section asks for that `number`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// Which link of these there is not, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_link: Option<String>,
    /// A socket, an address, a device or a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// Why it cannot be had that way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Exported {
    /// The block device that it is, and what that is made of; `None`: it is none, or is not there.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        let place = self.place.as_ref().filter(|_| matches!(self.way.as_str(), "ublk" | "dev"))?;
        Some(match self.by.as_deref() {
            Some("nbd") => format!("{place} (kernel nbd)"),
            Some("loop") => format!("{place} (FUSE + loop)"),
            _ => place.clone(),
        })
    }

    /// Where it is, for people: the block device, or the file or socket in words. `None`: it is not there, or by NBD, of which each place has
    /// all volumes.
    #[must_use]
    pub fn told_place(&self) -> Option<String> {
        match self.way.as_str() {
            "fuse" => self.place.as_ref().map(|place| format!("file {place}")),
            "vhost-user" => self.place.as_ref().map(|place| format!("socket {place}")),
            _ => self.device(),
        }
    }

    /// Why it cannot be had that way, in a sentence.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.reason.as_ref().map(|why| format!("it is not to be had by {}: {why}", self.way))
    }
}

/// A served volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct VolumeFacts {
    pub uuid: String,
    pub label: String,
    /// Its engine does not answer at present: this is what it was when it was taken up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outdated: bool,
    /// It has a cache: what is read and written goes through that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<bool>,
    /// It lives in its cache alone: what is dirty of it is what it holds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flash_only: bool,
    pub size_bytes: u64,
    pub block_bytes: u64,
    pub cache_mode: String,
    /// The word of the backing superblock; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<String>,
    #[serde(flatten)]
    pub dirty: Dirty,
    /// How its dirty data is written back; absent without a backing device, or while it is not cached.
    #[serde(flatten)]
    pub writeback: Option<Writeback>,
    #[serde(flatten)]
    pub counts: Option<VolumeCounts>,
    #[serde(flatten)]
    pub numbers: Option<VolumeNumbers>,
}

/// How the dirty data of a volume is written back.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Writeback {
    pub dirty_target_bytes: u64,
    /// No data has been dirty for longer; absent if nothing is, or if nobody knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_dirty_seconds: Option<u64>,
    /// Some of it was dirty at the last start, and nobody knows since when.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty_age_unknown: bool,
    /// Dirty data that could not be written back when it was last tried; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwritable: Option<Unwritable>,
    /// False: what is dirty stays until somebody asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_running: Option<bool>,
    /// Absent: as fast as the devices go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_rate_bytes: Option<u64>,
    /// Length of its stripes; absent: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_bytes: Option<u64>,
    /// Stripes that are written in parts are expensive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial_stripes_expensive: bool,
}

/// Dirty data that could not be written back, and the first range of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Unwritable {
    /// In so many ranges. There are 256 at most: beyond that neighbours count as one, with what lies between them.
    pub ranges: u64,
    /// They are so long.
    pub bytes: u64,
    /// Where the first begins.
    pub start_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
    /// What was met there.
    pub error: String,
    /// It was tried so often,
    pub tries: u32,
    /// and will be again after so long.
    pub retry_seconds: u64,
}

/// A connected client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Client {
    /// Process or address.
    pub peer: String,
    /// The volume, once chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// It has written.
    pub writing: bool,
    /// It may only look: the place where it has come is for that, or it was told so when it chose the volume. Of NBD clients.
    #[serde(default)]
    pub read_only: bool,
    /// It has come by TCP, in TLS.
    #[serde(default)]
    pub tls: bool,
    /// By which front end: `nbd`, `ublk`, `vhost-user`, `fuse` or `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way: Option<String>,
}

impl Status {
    /// Every cache is open and sound, every volume is served, and nothing was taken away.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.warnings.is_empty()
            && self.caches.iter().all(|cache| cache.state == "open" && cache.reason.is_none())
            && self.caches.iter().all(|cache| cache.ownerless_dirty_bytes() == 0)
            && self.volumes.iter().all(|volume| volume.state == "served")
    }

    /// The volume that is called so: [`names::resolve`].
    ///
    /// # Errors
    /// The names of all that could be meant; none if nothing is called so.
    pub fn volume(self, name: &str) -> Result<Volume, Vec<String>> {
        let known: Vec<_> = self.volumes.iter().map(Volume::known).collect();
        names::resolve(name, &known)
            .map(|index| self.volumes[index].clone())
            .map_err(|meant| meant.into_iter().map(|index| self.volumes[index].name.clone()).collect())
    }

    /// Only what concerns the volume or cache called `name`: the volume and its cache, or the cache and its volumes. What a
    /// volume is called by: [`names::resolve`].
    ///
    /// # Errors
    /// The names of all that could be meant; none if nothing is called so.
    pub fn only(mut self, name: &str) -> Result<Self, Vec<String>> {
        let released = std::mem::take(&mut self.released);
        let known: Vec<_> = self.volumes.iter().map(Volume::known).collect();
        let meant = match names::resolve(name, &known) {
            Ok(index) => vec![index],
            Err(candidates) => candidates,
        };
        if meant.len() > 1 {
            return Err(meant.into_iter().map(|index| self.volumes[index].name.clone()).collect());
        }
        if let Some(volume) = meant.first().map(|index| self.volumes[*index].clone()) {
            self.caches.retain(|cache| Some(&cache.name) == volume.cache.as_ref());
            self.clients.retain(|client| client.volume.as_ref() == Some(&volume.name));
            self.jobs.retain(|job| job.volume == volume.name);
            self.volumes = vec![volume];
            return Ok(self);
        }
        let known: Vec<_> = self.caches.iter().map(Cache::known).collect();
        let cache = match names::resolve(name, &known) {
            Ok(index) => self.caches[index].clone(),
            Err(none) if none.is_empty() && released.iter().any(|released| released == name) => {
                (self.caches, self.volumes, self.clients) = (Vec::new(), Vec::new(), Vec::new());
                self.jobs.retain(|job| job.volume == name);
                self.released = vec![name.to_owned()];
                return Ok(self);
            }
            Err(several) => {
                return Err(several.into_iter().map(|index| self.caches[index].name.clone()).collect());
            }
        };
        self.volumes.retain(|volume| volume.cache.as_ref() == Some(&cache.name));
        let left: Vec<_> = self.volumes.iter().map(|volume| volume.name.clone()).collect();
        self.clients.retain(|client| client.volume.as_ref().is_some_and(|name| left.contains(name)));
        self.jobs.retain(|job| left.contains(&job.volume));
        self.caches = vec![cache];
        Ok(self)
    }
}

impl Cache {
    /// Bytes of dirty data that belong to no volume of its table, as far as it is known.
    #[must_use]
    pub fn ownerless_dirty_bytes(&self) -> u64 {
        self.counts.as_ref().and_then(|counts| counts.ownerless_dirty_bytes).unwrap_or_default()
    }

    /// What it can be called by.
    fn known(&self) -> Known {
        Known {
            name: self.name.clone(),
            uuid: self.counts.as_ref().map(|counts| counts.set_uuid.clone()),
            path: Some(self.device.clone()),
            ..Known::default()
        }
    }
}

impl Volume {
    /// What it can be called by.
    fn known(&self) -> Known {
        let facts = self.facts.as_ref();
        Known {
            name: self.name.clone(),
            kernel_name: Some(self.kernel_name.clone()).filter(|name| !name.is_empty()),
            label: facts.map(|facts| facts.label.clone()).filter(|label| !label.is_empty()),
            uuid: facts.map(|facts| facts.uuid.clone()),
            path: self.backing.clone(),
            ..Known::default()
        }
    }
}
