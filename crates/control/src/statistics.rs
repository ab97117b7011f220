//! The part of the status that is statistics. Units stand in the names; what is not known, or would be of nothing, is absent.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Requests, in total and of late, under the kernel's names.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Windows {
    /// Since it is served.
    pub total: Counted,
    /// In about the last five minutes: what is five minutes old counts half.
    pub five_minute: Counted,
    /// In about the last hour.
    pub hour: Counted,
    /// In about the last day.
    pub day: Counted,
}

/// Requests. What was bypassed is not among hits and misses.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct Counted {
    pub hits: u64,
    pub misses: u64,
    /// Rounded down; absent without reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_percent: Option<u64>,
    pub bypass_hits: u64,
    pub bypass_misses: u64,
    pub miss_collisions: u64,
    pub bypassed_bytes: u64,
}

/// How long requests took that went one way.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// How many, since the volume is served.
    pub requests: u64,
    /// Their mean.
    pub mean_us: u64,
    /// Half of them took no longer. This and the next three are up to an eighth too much.
    pub p50_us: u64,
    /// Nine of ten.
    pub p90_us: u64,
    /// 99 of a hundred.
    pub p99_us: u64,
    /// 999 of a thousand.
    pub p999_us: u64,
    /// The longest.
    pub max_us: u64,
    /// The histogram, for metrics: how many took at most [`WITHIN_POWERS`] microseconds.
    #[serde(skip)]
    pub within: Vec<u64>,
    /// How long all of them took together, for metrics.
    #[serde(skip)]
    pub total_seconds: f64,
}

/// The bounds of [`Latency::within`]: powers of two of a microsecond, 16 us to 16.8 s.
pub const WITHIN_POWERS: [u32; 11] = [4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24];

/// Work of the set's own that is done now and then.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Times {
    /// How often.
    pub count: u64,
    /// How long it takes of late.
    pub average_us: u64,
    /// How long it is of late from one to the next.
    pub between_us: u64,
    /// The longest.
    pub max_us: u64,
    /// How long ago the last ended; absent: there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_us: Option<u64>,
}

/// Statistics of a set beside those that stand in the status by themselves.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct CacheNumbers {
    /// Also in [`super::status::CacheCounts`], by kind.
    pub windows: Windows,
    /// All bytes written to the cache device, as it counts them itself.
    pub written_bytes: u64,
    /// The same by cause.
    pub written_by_cause_bytes: BTreeMap<String, u64>,
    /// What cannot be had without writing dirty data back is not available.
    pub cache_available_percent: u64,
    pub buckets_unused: u64,
    pub buckets_clean: u64,
    pub buckets_dirty: u64,
    pub buckets_open: u64,
    pub unused_percent: u64,
    pub clean_percent: u64,
    pub dirty_percent: u64,
    pub metadata_percent: u64,
    pub root_usage_percent: u64,
    pub active_journal_entries: u64,
    /// Operations of the cache device that failed.
    pub io_errors: u64,
    /// Those of them that count against `io_error_limit`: they fade, as `io_error_halflife` says.
    #[serde(default)]
    pub io_errors_recent: u64,
    pub btree_coalesces: u64,
    pub writeback_keys_done: u64,
    /// Written anew meanwhile, as the kernel counts it.
    pub writeback_keys_failed: u64,
    #[serde(default)]
    pub writeback_errors: u64,
    /// As of the last complete pass of GC, or the start, like the next two; absent: there were no extents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average_key_bytes: Option<u64>,
    pub btree_nodes: u64,
    /// How full the leaves are with what is alive.
    pub btree_used_percent: u64,
    pub btree_gc: Times,
    pub btree_split: Times,
    pub btree_read: Times,
    /// Only on request (`--full`): every bucket is looked at for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ages: Option<Ages>,
}

/// How long ago the data in the buckets was last used, in steps of as much traffic as a 1024th of the cache: the kernel's
/// `priority_stats`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ages {
    /// Buckets that are counted: those without metadata, except the oldest that can be told.
    pub buckets: u64,
    /// Their mean age.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<u64>,
    /// What a 32nd part of them holds.
    pub bytes_per_quantile: u64,
    /// The ages that divide them into 32 such parts, the youngest first.
    pub quantiles: Vec<u64>,
}

/// Statistics of a served volume beside those that stand in the status by themselves.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VolumeNumbers {
    /// Of late.
    pub windows: Windows,
    /// By the way that the requests went; ways that none went are absent.
    pub latency: BTreeMap<String, Latency>,
    /// Operations of the backing device that failed since it was opened; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_errors: Option<u64>,
    /// Number of the volume on the cache device: the kernel would call it `bdevN`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// The same also of a volume without a backing device, which it would call `volumeN`; for control files.
    #[serde(skip)]
    pub slot: Option<u32>,
    /// Until the next data may be written back; for control files.
    #[serde(skip)]
    pub next_writeback: Duration,
    /// The terms of the controller of write-back, and what its last step has changed, in bytes a second.
    pub writeback_proportional_bytes: i64,
    /// See there.
    pub writeback_integral_bytes: i64,
    /// See there.
    pub writeback_change_bytes: i64,
}

impl Windows {
    /// For people: hits of late, if anybody reads.
    #[must_use]
    pub fn sentence(&self) -> Option<String> {
        let windows = [
            (&self.five_minute, "in five minutes"),
            (&self.hour, "in an hour"),
            (&self.day, "in a day"),
            (&self.total, "in all"),
        ];
        let told = windows.into_iter().filter_map(|(counted, when)| Some((counted.hit_percent?, when)));
        let told: Vec<_> = told.map(|(percent, when)| format!("{percent}% {when}")).collect();
        (!told.is_empty()).then(|| format!("reads that hit: {}", told.join(", ")))
    }
}

/// Causes of writes to the cache device that write data of volumes; all others write metadata.
pub const DATA_CAUSES: &[&str] = &["data", "fill", "moved"];

impl CacheNumbers {
    /// What was written to the cache device: what the kernel calls `written` is data, and the rest `metadata_written`.
    #[must_use]
    pub fn written_of(&self, is_data: bool) -> u64 {
        let by_cause = self.written_by_cause_bytes.iter();
        by_cause
            .filter(|(cause, _)| DATA_CAUSES.contains(&cause.as_str()) == is_data)
            .map(|(_, bytes)| bytes)
            .sum()
    }

    /// For people: what was written to the device, the most first.
    #[must_use]
    pub fn sentence(&self) -> Option<String> {
        let human = crate::sizes::human;
        let mut causes: Vec<_> =
            self.written_by_cause_bytes.iter().filter(|(_, bytes)| **bytes > 0).collect();
        causes.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
        let causes: Vec<_> =
            causes.into_iter().map(|(cause, bytes)| format!("{cause} {}", human(*bytes))).collect();
        let all = human(self.written_bytes);
        (self.written_bytes > 0).then(|| format!("{all} written to it ({})", causes.join(", ")))
    }
}
