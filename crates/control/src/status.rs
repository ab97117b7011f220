//! The status that the daemon reports: the body of `/v1/status`, `bcached.status` version 1. Within
//! a version, fields are only added; a field whose value is not known is absent.

mod dirty;
mod text;

use super::hardware::DeviceName;
use super::jobs::JobReport;
use super::statistics::{CacheStatistics, VolumeStatistics};
use crate::names::{self, KnownNames};
use crate::sizes::human;
pub use dirty::DirtyData;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Everything that is served, and what is not served and why.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// `starting`, `ready` or `stopping`.
    pub state: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Time since the start.
    pub uptime_seconds: u64,
    /// The addresses on which NBD is served.
    pub nbd: Vec<String>,
    /// Cache sets.
    pub caches: Vec<CacheStatus>,
    /// Caches that are configured but not to be served, as after a release; absent if there are
    /// none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<String>,
    /// Volumes, including those that are not served.
    pub volumes: Vec<VolumeStatus>,
    /// Connected clients.
    pub clients: Vec<ClientStatus>,
    /// Running jobs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobReport>,
    /// State of the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<LogStatus>,
    /// Resources that the daemon needs and that have been removed, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// State of the log. Lines are dropped if its reader is too slow, because nothing waits for the
/// log.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LogStatus {
    /// Lines since the start that were dropped or could not be written.
    pub lines_lost: u64,
    /// For how long the reader has accepted nothing; absent if it keeps up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck_seconds: Option<u64>,
}

/// A cache set.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Its configured or derived name.
    pub name: String,
    /// The device, as configured.
    pub device: String,
    /// `waiting`, `opening`, `open`, `stopped` or `failed`.
    pub state: String,
    /// Why it is not open, or why it stopped writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The method of I/O.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io: Option<String>,
    /// Progress of an opening.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opening: Option<OpeningProgress>,
    /// Volumes that are not served and have dirty data in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<UnservedVolume>,
    /// B-tree nodes that could not be read when last tried: the first few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableNode>,
    /// The counters of an open set.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub counts: Option<CacheCounts>,
    /// Its device as the system names it, for control files.
    #[serde(skip)]
    pub hardware: Option<DeviceName>,
}

/// Progress of an opening that reads the whole tree.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OpeningProgress {
    /// B-tree nodes read so far. Their total number is not known before the end.
    pub nodes_read: u64,
    /// The approximate part of the tree that this is, in percent, estimated from its shape.
    pub tree_percent: u64,
}

/// A clause for people.
impl fmt::Display for OpeningProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nodes_read, self.tree_percent) {
            (0, _) => write!(f, "reading the journal and the generations of the buckets"),
            (nodes, 100) => write!(f, "all {nodes} btree nodes read, replaying the journal"),
            (nodes, percent) => write!(f, "{nodes} btree nodes read, about {percent}% of the tree"),
        }
    }
}

/// The counters of an open set.
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
    /// Size of the buckets that hold cached data, dirty or clean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_bytes: Option<u64>,
    pub buckets_free: u64,
    pub buckets_metadata: u64,
    /// Kept free for the next start, so that it need not read the whole index first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets_reserved: Option<u64>,
    /// How much of the index has been read since the start. Before it is 100, numbers of buckets
    /// and dirty data cover that part only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub walked_percent: Option<u64>,
    #[serde(flatten)]
    pub dirty: DirtyData,
    /// The part of the dirty data that belongs to no volume in the set's table. Absent if it is not
    /// known: before the index has been read completely, or if part of it is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ownerless_dirty_bytes: Option<u64>,
    pub tree_depth: u64,
    pub nodes: u64,
    pub node_bytes: u64,
    pub node_bytes_max: u64,
    pub node_budget_bytes: u64,
    /// Memory of the bucket table; absent in the status of an older daemon.
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
    /// Streams of at least this length bypass the cache device because it is slow; 0 if it is not
    /// congested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congested_bytes: Option<u64>,
    /// The device has failed as often as `io_error_limit` permits: nothing is added, and its dirty
    /// data is written back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failing: Option<bool>,
    /// Whether freed buckets are discarded: `on`, `off`, `unsupported` (by the device) or `failed`
    /// (one discard has failed).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<String>,
    /// Amount discarded since the set was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discarded_bytes: Option<u64>,
    #[serde(flatten)]
    pub numbers: Option<CacheStatistics>,
}

/// Requests that bypassed a cache. Reads among them are not included in other hits and misses.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct BypassCounts {
    pub bypass_hits: u64,
    pub bypass_misses: u64,
    pub bypassed_requests: u64,
    /// The same by reason.
    pub bypassed: BTreeMap<String, BypassReasonCounts>,
}

/// Requests that bypassed a cache for one reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct BypassReasonCounts {
    pub requests: u64,
    pub bytes: u64,
}

/// The counters of a served volume.
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
    /// Describes how much bypassed the cache, and why, the largest reason first.
    fn bypassed(&self) -> Option<String> {
        let mut reasons: Vec<_> = self.bypass.bypassed.iter().filter(|(_, one)| one.requests > 0).collect();
        reasons.sort_by_key(|(_, one)| Reverse(one.bytes));
        let reasons: Vec<_> =
            reasons.into_iter().map(|(reason, one)| format!("{reason} {}", human(one.bytes))).collect();
        let text = || format!("{} bypassed ({})", human(self.bypassed_bytes), reasons.join(", "));
        (!reasons.is_empty()).then(text)
    }
}

/// A volume that is not served, and has dirty data or lives in the cache only.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct UnservedVolume {
    pub uuid: String,
    pub label: String,
    #[serde(flatten)]
    pub dirty: DirtyData,
    /// Its size, if it lives in the cache only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash_size_bytes: Option<u64>,
}

impl UnservedVolume {
    /// Describes how much of a volume that lives in the cache only is in use.
    fn used(&self) -> String {
        match (self.dirty.dirty_bytes, self.dirty.dirty_bytes_at_least) {
            (Some(all), _) => human(all),
            (None, Some(least)) => format!("at least {}", human(least)),
            (None, None) => "an unknown part".to_owned(),
        }
    }

    /// Names the volume, for a sentence.
    #[must_use]
    pub fn name(&self) -> String {
        if self.label.is_empty() { self.uuid.clone() } else { format!("{} ({})", self.label, self.uuid) }
    }
}

/// A B-tree node that cannot be read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UnreadableNode {
    /// Its bucket on the cache device.
    pub bucket: u64,
    /// Its first sector on the cache device.
    pub sector: u64,
    /// 0 for a leaf.
    pub level: u8,
    /// The whole error in a sentence.
    pub reason: String,
    /// The ranges of served volumes that the node indexes, as far as is known.
    pub covers: Vec<VolumeRange>,
}

/// A range of a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct VolumeRange {
    pub volume: String,
    pub start_bytes: u64,
    pub length_bytes: u64,
}

/// A volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its name, which is also its NBD export.
    pub name: String,
    /// Its name in the kernel's control files: `bcacheN`, by the `number` of its section, else by
    /// its position in the configuration or on the command line.
    #[serde(default)]
    pub kernel_name: String,
    /// `waiting`, `attaching`, `served`, `degraded` (served, but not fully), `failed`, `stopped`
    /// (by command) or `releasing`.
    pub state: String,
    /// Why it is not served or not served fully, and what still works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// State in the superblock of the backing device when it was last read, for a volume that is
    /// not served; served ones have `backing_state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superblock_state: Option<String>,
    /// Its backing device as configured; absent for a volume that lives in the cache only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Name of its cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// Its exports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<ExportStatus>,
    /// Properties of a served volume.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub facts: Option<VolumeProperties>,
    /// Its backing device as the system names it, and the start of its data there, in sectors; for
    /// control files.
    #[serde(skip)]
    pub hardware: Option<(DeviceName, u64)>,
}

/// An export of a volume through one front end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExportStatus {
    /// `nbd`, `ublk`, `vhost-user`, `fuse` or `dev`.
    pub way: String,
    /// The driver of the block device of `dev`: `ublk`, `nbd` or `loop`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// How a ublk device transfers data: `zero copy` or `user copy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<String>,
    /// The link `/dev/bcacheN` to the block device, if the volume's section has that `number`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// The link that is missing, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_link: Option<String>,
    /// A socket, an address, a device or a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// Why the volume is not available through this front end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ExportStatus {
    /// Returns the path of the block device, with its driver; `None` if this export is not a block
    /// device, or is absent.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        let place = self.place.as_ref().filter(|_| matches!(self.way.as_str(), "ublk" | "dev"))?;
        Some(match self.by.as_deref() {
            Some("nbd") => format!("{place} (kernel nbd)"),
            Some("loop") => format!("{place} (FUSE + loop)"),
            _ => place.clone(),
        })
    }

    /// Describes the location for people: the block device, or the file or socket in words. `None`
    /// if it is absent, or is NBD, where each address serves all volumes.
    #[must_use]
    pub fn told_place(&self) -> Option<String> {
        match self.way.as_str() {
            "fuse" => self.place.as_ref().map(|place| format!("file {place}")),
            "vhost-user" => self.place.as_ref().map(|place| format!("socket {place}")),
            _ => self.device(),
        }
    }

    /// Describes, in a sentence, why the volume is not available through this front end.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.reason.as_ref().map(|why| format!("it is not available through {}: {why}", self.way))
    }
}

/// Properties of a served volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct VolumeProperties {
    pub uuid: String,
    pub label: String,
    /// The engine does not answer at present: these are the properties from when the volume was
    /// taken into service.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outdated: bool,
    /// It has a cache, through which it is read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<bool>,
    /// It lives in its cache only: its dirty data is all its data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flash_only: bool,
    pub size_bytes: u64,
    pub block_bytes: u64,
    pub cache_mode: String,
    /// The state in the backing superblock; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_state: Option<String>,
    #[serde(flatten)]
    pub dirty: DirtyData,
    /// State of its write-back; absent without a backing device, or while the volume is not cached.
    #[serde(flatten)]
    pub writeback: Option<WritebackStatus>,
    #[serde(flatten)]
    pub counts: Option<VolumeCounts>,
    #[serde(flatten)]
    pub numbers: Option<VolumeStatistics>,
}

/// State of the write-back of a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct WritebackStatus {
    pub dirty_target_bytes: u64,
    /// Upper bound for the age of the dirty data; absent if there is none, or if the age is not
    /// known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_dirty_seconds: Option<u64>,
    /// Some of the data was dirty at the last start, and its age is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty_age_unknown: bool,
    /// Dirty data that could not be written back when last tried; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwritable: Option<FailedWriteback>,
    /// False: dirty data stays in the cache until a command writes it back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_running: Option<bool>,
    /// Absent: as fast as the devices permit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writeback_rate_bytes: Option<u64>,
    /// Stripe length; absent if the backing device has no stripes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_bytes: Option<u64>,
    /// Writing part of a stripe is expensive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial_stripes_expensive: bool,
}

/// Dirty data that could not be written back, and the first range of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailedWriteback {
    /// Number of ranges, at most 256; beyond that, neighbours are merged, including what lies
    /// between them.
    pub ranges: u64,
    /// Their total length.
    pub bytes: u64,
    /// Start of the first range.
    pub start_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// The error that occurred there.
    pub error: String,
    /// Number of tries of the first range.
    pub tries: u32,
    /// Time until it is retried.
    pub retry_seconds: u64,
}

/// A connected client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process or address.
    pub peer: String,
    /// The volume, once chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// It has written data.
    pub writing: bool,
    /// It may only read: it came by a read-only socket or address, or it was told so when it chose
    /// the volume. NBD clients only.
    #[serde(default)]
    pub read_only: bool,
    /// It is connected by TCP with TLS.
    #[serde(default)]
    pub tls: bool,
    /// Its front end: `nbd`, `ublk`, `vhost-user`, `fuse` or `dev`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way: Option<String>,
}

impl Status {
    /// Returns whether every cache is open and sound, every volume is served, and nothing that the
    /// daemon needs has been removed.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.warnings.is_empty()
            && self.caches.iter().all(|cache| cache.state == "open" && cache.reason.is_none())
            && self.caches.iter().all(|cache| cache.ownerless_dirty_bytes() == 0)
            && self.volumes.iter().all(|volume| volume.state == "served")
    }

    /// Returns the volume called `name`, as [`names::resolve`] finds it.
    ///
    /// # Errors
    /// The names of all volumes that could be meant; empty if there are none.
    pub fn volume(self, name: &str) -> Result<VolumeStatus, Vec<String>> {
        let known: Vec<_> = self.volumes.iter().map(VolumeStatus::known).collect();
        names::resolve(name, &known)
            .map(|index| self.volumes[index].clone())
            .map_err(|meant| meant.into_iter().map(|index| self.volumes[index].name.clone()).collect())
    }

    /// Reduces the status to what concerns the volume or cache called `name`: the volume and its
    /// cache, or the cache and its volumes. [`names::resolve`] finds them.
    ///
    /// # Errors
    /// The names of all that could be meant; empty if there are none.
    pub fn only(mut self, name: &str) -> Result<Self, Vec<String>> {
        let released = std::mem::take(&mut self.released);
        let known: Vec<_> = self.volumes.iter().map(VolumeStatus::known).collect();
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
        let known: Vec<_> = self.caches.iter().map(CacheStatus::known).collect();
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

impl CacheStatus {
    /// Returns the bytes of dirty data that belong to no volume in the set's table, as far as is
    /// known.
    #[must_use]
    pub fn ownerless_dirty_bytes(&self) -> u64 {
        self.counts.as_ref().and_then(|counts| counts.ownerless_dirty_bytes).unwrap_or_default()
    }

    /// Returns the names by which it can be called.
    fn known(&self) -> KnownNames {
        KnownNames {
            name: self.name.clone(),
            uuid: self.counts.as_ref().map(|counts| counts.set_uuid.clone()),
            path: Some(self.device.clone()),
            ..KnownNames::default()
        }
    }
}

impl VolumeStatus {
    /// Returns the names by which it can be called.
    fn known(&self) -> KnownNames {
        let facts = self.facts.as_ref();
        KnownNames {
            name: self.name.clone(),
            kernel_name: Some(self.kernel_name.clone()).filter(|name| !name.is_empty()),
            label: facts.map(|facts| facts.label.clone()).filter(|label| !label.is_empty()),
            uuid: facts.map(|facts| facts.uuid.clone()),
            path: self.backing.clone(),
            ..KnownNames::default()
        }
    }
}
