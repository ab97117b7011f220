//! Metrics of the cache sets.

use super::text::{Exposition, Label, MetricKind};
use super::{Metric, counter, gauge, tell};
use bcached_control::statistics::CacheStatistics;
use bcached_control::status::{CacheCounts, CacheStatus};

/// An open set.
struct OpenSet<'a> {
    counts: &'a CacheCounts,
    numbers: &'a CacheStatistics,
}

fn gauges<'a>() -> Vec<Metric<OpenSet<'a>>> {
    vec![
        gauge("bcached_cache_size_bytes", "Size of the cache device.", |open| {
            Some((open.counts.buckets * open.counts.bucket_bytes) as f64)
        }),
        gauge(
            "bcached_cache_available_percent",
            "Share of the cache that is available without writing dirty data back.",
            |open| Some(open.numbers.cache_available_percent as f64),
        ),
        gauge("bcached_cache_bucket_bytes", "Size of a bucket.", |open| {
            Some(open.counts.bucket_bytes as f64)
        }),
        gauge(
            "bcached_cache_dirty_bytes",
            "Dirty data, not yet on the backing devices; absent if unknown.",
            |open| open.counts.dirty.dirty_bytes.map(|bytes| bytes as f64),
        ),
        gauge(
            "bcached_cache_congested_bytes",
            "Streams of at least this size bypass the cache device because it is slow; 0 if it is not congested.",
            |open| open.counts.congested_bytes.map(|bytes| bytes as f64),
        ),
        gauge("bcached_cache_btree_depth", "Levels of the btree above its leaves.", |open| {
            Some(open.counts.tree_depth as f64)
        }),
        gauge("bcached_cache_btree_root_usage_percent", "How full the root of the btree is.", |open| {
            Some(open.numbers.root_usage_percent as f64)
        }),
        gauge(
            "bcached_cache_btree_nodes",
            "Nodes of the btree, as of the last pass of GC or the start.",
            |open| Some(open.numbers.btree_nodes as f64),
        ),
        gauge(
            "bcached_cache_btree_key_average_bytes",
            "Mean size of an extent, as of the last pass of GC or the start.",
            |open| open.numbers.average_key_bytes.map(|bytes| bytes as f64),
        ),
        gauge(
            "bcached_cache_ownerless_dirty_bytes",
            "Dirty data of volumes that the table of volumes does not list.",
            |open| Some(open.counts.ownerless_dirty_bytes? as f64),
        ),
        gauge("bcached_cache_memory_nodes", "Btree nodes in memory.", |open| Some(open.counts.nodes as f64)),
        gauge("bcached_cache_memory_bytes", "Memory used by btree nodes and the bucket table.", |open| {
            open.counts.bucket_table_bytes.map(|table| (open.counts.node_bytes + table) as f64)
        }),
        gauge(
            "bcached_cache_memory_limit_bytes",
            "Memory limit of btree nodes and the bucket table together.",
            |open| open.counts.bucket_table_bytes.map(|table| (open.counts.node_budget_bytes + table) as f64),
        ),
        gauge("bcached_cache_memory_buckets_bytes", "Memory used by the bucket table.", |open| {
            open.counts.bucket_table_bytes.map(|bytes| bytes as f64)
        }),
        gauge("bcached_cache_journal_active_entries", "Journal entries that a crash would replay.", |open| {
            Some(open.numbers.active_journal_entries as f64)
        }),
    ]
}

fn counters<'a>() -> Vec<Metric<OpenSet<'a>>> {
    vec![
        counter("bcached_cache_hit_bytes_total", "Bytes read from the cache for requests.", |open| {
            Some(open.counts.hit_bytes as f64)
        }),
        counter("bcached_cache_miss_bytes_total", "Bytes read from backing devices for requests.", |open| {
            Some(open.counts.miss_bytes as f64)
        }),
        counter("bcached_cache_write_bytes_total", "Bytes written by requests.", |open| {
            Some(open.counts.write_bytes as f64)
        }),
        counter("bcached_cache_written_back_bytes_total", "Bytes of dirty data written back.", |open| {
            Some(open.counts.written_back_bytes as f64)
        }),
        counter(
            "bcached_cache_discarded_bytes_total",
            "Bytes discarded on the cache device, in buckets without data.",
            |open| open.counts.discarded_bytes.map(|bytes| bytes as f64),
        ),
        counter(
            "bcached_cache_fill_races_total",
            "Fills dropped because of a write to the same place in the meantime.",
            |open| Some(open.counts.fill_races as f64),
        ),
        counter(
            "bcached_cache_read_retries_total",
            "Reads of clean data that failed and were answered by the backing device.",
            |open| Some(open.counts.read_retries as f64),
        ),
        counter("bcached_cache_io_errors_total", "Failed operations of the cache device.", |open| {
            Some(open.numbers.io_errors as f64)
        }),
        gauge(
            "bcached_cache_io_errors_recent",
            "Recent failed operations, as they count against io_error_limit; they fade with time.",
            |open| Some(open.numbers.io_errors_recent as f64),
        ),
        counter(
            "bcached_cache_node_read_failures_total",
            "Times that a btree node could not be read or was damaged.",
            |open| Some(open.counts.node_read_failures as f64),
        ),
        counter("bcached_cache_journal_entries_total", "Journal entries written.", |open| {
            Some(open.counts.journal_entries as f64)
        }),
        counter(
            "bcached_cache_journal_waits_total",
            "Times that a write waited for journal space.",
            |open| Some(open.counts.journal_waits as f64),
        ),
        counter("bcached_cache_gc_passes_total", "Complete passes of GC.", |open| {
            Some(open.counts.gc_passes as f64)
        }),
        counter("bcached_cache_btree_rewrites_total", "Btree nodes rewritten or split.", |open| {
            Some(open.counts.btree_rewrites as f64)
        }),
    ]
}

/// Writes all of them.
pub fn tell_all(text: &mut Exposition, caches: &[CacheStatus]) {
    let mut family =
        text.family("bcached_cache_open", MetricKind::Gauge, "1 if the cache is open and healthy.");
    for cache in caches {
        let is_open = cache.state == "open" && cache.reason.is_none();
        family.sample(&[("cache", &cache.name)], u8::from(is_open));
    }
    let open: Vec<(Vec<Label<'_>>, OpenSet<'_>)> = caches.iter().filter_map(open).collect();
    let mut family = text.family("bcached_cache_info", MetricKind::Gauge, "Device and set of an open cache.");
    for (labels, set) in &open {
        let device = caches.iter().find(|cache| cache.name == labels[0].1).map_or("", |cache| &cache.device);
        family.sample(&[labels[0], ("device", device), ("uuid", &set.counts.set_uuid)], 1);
    }
    let things: Vec<_> = open.iter().map(|(labels, open)| (labels.clone(), open)).collect();
    tell(text, &gauges(), &things);
    tell_buckets(text, &open);
    tell_written(text, &open);
    tell_reads(text, &open);
    tell_bypassed(text, &open);
    tell(text, &counters(), &things);
}

fn open(cache: &CacheStatus) -> Option<(Vec<Label<'_>>, OpenSet<'_>)> {
    let counts = cache.counts.as_ref()?;
    Some((vec![("cache", &cache.name)], OpenSet { counts, numbers: counts.numbers.as_ref()? }))
}

fn tell_buckets(text: &mut Exposition, open: &[(Vec<Label<'_>>, OpenSet<'_>)]) {
    let mut family = text.family("bcached_cache_buckets", MetricKind::Gauge, "Buckets, by what they hold.");
    for (labels, OpenSet { counts, numbers }) in open {
        let groups = [
            ("unused", numbers.buckets_unused),
            ("clean", numbers.buckets_clean),
            ("dirty", numbers.buckets_dirty),
            ("open", numbers.buckets_open),
            ("metadata", counts.buckets_metadata),
            ("reserved", counts.buckets_reserved.unwrap_or(0)),
        ];
        for (state, buckets) in groups {
            family.sample(&[labels[0], ("state", state)], buckets);
        }
    }
}

fn tell_written(text: &mut Exposition, open: &[(Vec<Label<'_>>, OpenSet<'_>)]) {
    let mut family = text.family(
        "bcached_cache_written_bytes_total",
        MetricKind::Counter,
        "Bytes written to the cache device, by cause; the sum is what the device itself counts.",
    );
    for (labels, open) in open {
        for (cause, bytes) in &open.numbers.written_by_cause_bytes {
            family.sample(&[labels[0], ("cause", cause)], bytes);
        }
    }
}

fn tell_reads(text: &mut Exposition, open: &[(Vec<Label<'_>>, OpenSet<'_>)]) {
    let mut family = text.family(
        "bcached_cache_reads_total",
        MetricKind::Counter,
        "Reads, by whether they were bypassed and whether they found everything in the cache.",
    );
    for (labels, open) in open {
        let total = &open.numbers.windows.total;
        for (result, reads) in super::volumes::reads(total) {
            family.sample(&[labels[0], ("result", result)], reads);
        }
    }
}

fn tell_bypassed(text: &mut Exposition, open: &[(Vec<Label<'_>>, OpenSet<'_>)]) {
    let bypass = |open: &OpenSet<'_>| open.counts.bypass.clone();
    let mut family = text.family(
        "bcached_cache_bypassed_bytes_total",
        MetricKind::Counter,
        "Bytes not added to the cache, by reason.",
    );
    for (labels, open) in open {
        for (reason, one) in bypass(open).into_iter().flat_map(|bypass| bypass.bypassed) {
            family.sample(&[labels[0], ("reason", &reason)], one.bytes);
        }
    }
    let mut family = text.family(
        "bcached_cache_bypassed_requests_total",
        MetricKind::Counter,
        "Requests that added nothing to the cache, by reason.",
    );
    for (labels, open) in open {
        for (reason, one) in bypass(open).into_iter().flat_map(|bypass| bypass.bypassed) {
            family.sample(&[labels[0], ("reason", &reason)], one.requests);
        }
    }
}
