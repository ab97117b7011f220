//! The statistics in the status. Names end in the unit. A value that is not known, or has no basis,
//! is absent.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Counts of requests, in total and over recent periods, under the kernel's names.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestWindows {
    /// Since the volume or set was taken into service.
    pub total: RequestCounts,
    /// About the last five minutes, decaying: a request five minutes ago counts half.
    pub five_minute: RequestCounts,
    /// About the last hour.
    pub hour: RequestCounts,
    /// About the last day.
    pub day: RequestCounts,
}

/// Counts of requests. Bypassed requests are not included in hits and misses.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct RequestCounts {
    pub hits: u64,
    pub misses: u64,
    /// Rounded down; absent if there were no reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_percent: Option<u64>,
    pub bypass_hits: u64,
    pub bypass_misses: u64,
    pub miss_collisions: u64,
    pub bypassed_bytes: u64,
}

/// Latency of the requests that took one path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PathLatency {
    /// Number of requests since the volume was taken into service.
    pub requests: u64,
    /// Mean latency.
    pub mean_us: u64,
    /// Median. This and the next three are up to one eighth too high.
    pub p50_us: u64,
    /// 90th percentile.
    pub p90_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// 99.9th percentile.
    pub p999_us: u64,
    /// Maximum.
    pub max_us: u64,
    /// The histogram, for metrics: the number of requests that took at most the bounds in
    /// [`WITHIN_POWERS`].
    #[serde(skip)]
    pub within: Vec<u64>,
    /// Sum of all latencies, for metrics.
    #[serde(skip)]
    pub total_seconds: f64,
}

/// The bounds of [`PathLatency::within`]: exponents of powers of two, in microseconds, from 16 us
/// to 16.8 s.
pub const WITHIN_POWERS: [u32; 11] = [4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24];

/// Timing of a recurring internal operation of a set.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct OperationTiming {
    /// Number of times it ran.
    pub count: u64,
    /// Recent average duration.
    pub average_us: u64,
    /// Recent average time from one run to the next.
    pub between_us: u64,
    /// Longest duration.
    pub max_us: u64,
    /// Time since the end of the last run; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_us: Option<u64>,
}

/// Statistics of a set, in addition to those that are direct fields of the status.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is its own description, with its unit")]
pub struct CacheStatistics {
    /// The counts by kind are also in [`super::status::CacheCounts`].
    pub windows: RequestWindows,
    /// All bytes written to the cache device, as counted at the device.
    pub written_bytes: u64,
    /// The same by cause.
    pub written_by_cause_bytes: BTreeMap<String, u64>,
    /// Space that can only be freed by writing dirty data back does not count as available.
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
    /// Those that count against `io_error_limit`. They decay as `io_error_halflife` configures.
    #[serde(default)]
    pub io_errors_recent: u64,
    pub btree_coalesces: u64,
    pub writeback_keys_done: u64,
    /// Keys whose data was overwritten during write-back, as the kernel counts it.
    pub writeback_keys_failed: u64,
    #[serde(default)]
    pub writeback_errors: u64,
    /// As of the last complete GC pass or the start, as are the next two; absent if there were no
    /// extents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average_key_bytes: Option<u64>,
    pub btree_nodes: u64,
    /// How full the leaves are with live keys.
    pub btree_used_percent: u64,
    pub btree_gc: OperationTiming,
    pub btree_split: OperationTiming,
    pub btree_read: OperationTiming,
    /// Only on request (`--full`), because it examines every bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ages: Option<PriorityStats>,
}

/// Time since the data in the buckets was last used, as in the kernel's `priority_stats`. The unit
/// is traffic of 1/1024 of the cache's size.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PriorityStats {
    /// Number of buckets counted: those without metadata, except those that are too old for their
    /// age to be known.
    pub buckets: u64,
    /// Their mean age.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<u64>,
    /// Bytes that 1/32 of these buckets hold.
    pub bytes_per_quantile: u64,
    /// The ages that divide the buckets into 32 equal parts, the youngest first.
    pub quantiles: Vec<u64>,
}

/// Statistics of a served volume, in addition to those that are direct fields of the status.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VolumeStatistics {
    /// Counts of requests.
    pub windows: RequestWindows,
    /// Latency by the path of the requests; a path that no request took is absent.
    pub latency: BTreeMap<String, PathLatency>,
    /// Operations of the backing device that failed since it was opened; absent without a backing
    /// device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_errors: Option<u64>,
    /// Number of the volume on the cache device; the kernel would call it `bdevN`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// The same number, also for a volume without a backing device, which the kernel would call
    /// `volumeN`; for control files.
    #[serde(skip)]
    pub slot: Option<u32>,
    /// Time until more data may be written back; for control files.
    #[serde(skip)]
    pub next_writeback: Duration,
    /// The terms of the write-back controller and the change of its last step, in bytes per second.
    pub writeback_proportional_bytes: i64,
    /// See there.
    pub writeback_integral_bytes: i64,
    /// See there.
    pub writeback_change_bytes: i64,
}

impl RequestWindows {
    /// Formats the hit rates for people, if there were any reads.
    #[must_use]
    pub fn sentence(&self) -> Option<String> {
        let windows = [
            (&self.five_minute, "in 5 minutes"),
            (&self.hour, "in an hour"),
            (&self.day, "in a day"),
            (&self.total, "in all"),
        ];
        let told = windows.into_iter().filter_map(|(counted, when)| Some((counted.hit_percent?, when)));
        let told: Vec<_> = told.map(|(percent, when)| format!("{percent}% {when}")).collect();
        (!told.is_empty()).then(|| format!("read hits: {}", told.join(", ")))
    }
}

/// Causes of writes to the cache device that carry data of volumes. All other causes are metadata.
pub const DATA_CAUSES: &[&str] = &["data", "fill", "moved"];

impl CacheStatistics {
    /// Returns the bytes of data or of metadata written to the cache device: `written` and
    /// `metadata_written` in the kernel.
    #[must_use]
    pub fn written_of(&self, is_data: bool) -> u64 {
        let by_cause = self.written_by_cause_bytes.iter();
        by_cause
            .filter(|(cause, _)| DATA_CAUSES.contains(&cause.as_str()) == is_data)
            .map(|(_, bytes)| bytes)
            .sum()
    }

    /// Formats for people what was written to the device, the largest cause first.
    #[must_use]
    pub fn sentence(&self) -> Option<String> {
        let human = crate::sizes::human;
        let mut causes: Vec<_> =
            self.written_by_cause_bytes.iter().filter(|(_, bytes)| **bytes > 0).collect();
        causes.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
        let causes: Vec<_> =
            causes.into_iter().map(|(cause, bytes)| format!("{cause} {}", human(*bytes))).collect();
        let all = human(self.written_bytes);
        (self.written_bytes > 0).then(|| format!("{all} written to its device ({})", causes.join(", ")))
    }
}
