//! The text of the metrics, for a status that is made here.

use super::{node_text, text};
use bcached_control::status::Status;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";

fn windows() -> Value {
    let counted = |hits: u64| {
        json!({
            "hits": hits, "misses": 1, "hit_percent": 75, "bypass_hits": 5, "bypass_misses": 6,
            "miss_collisions": 7, "bypassed_bytes": 8192
        })
    };
    json!({ "total": counted(300), "five_minute": counted(3), "hour": counted(30), "day": counted(33) })
}

fn bypassed() -> Value {
    json!({ "sequential": { "requests": 2, "bytes": 8192 } })
}

/// The plain numbers of a set: their values are 100, 101 and so on.
const NUMBERS: [&str; 49] = [
    "block_bytes",
    "bucket_bytes",
    "buckets",
    "buckets_available",
    "buckets_free",
    "buckets_metadata",
    "dirty_bytes",
    "tree_depth",
    "nodes",
    "node_bytes",
    "node_bytes_max",
    "node_budget_bytes",
    "journal_sequence",
    "hits",
    "misses",
    "hit_bytes",
    "miss_bytes",
    "bypassed_bytes",
    "write_bytes",
    "data_written_bytes",
    "moved_bytes",
    "btree_written_bytes",
    "journal_written_bytes",
    "prio_written_bytes",
    "journal_entries",
    "journal_waits",
    "btree_rewrites",
    "gc_passes",
    "written_back_bytes",
    "fill_races",
    "read_retries",
    "cache_available_percent",
    "buckets_unused",
    "buckets_clean",
    "buckets_dirty",
    "buckets_open",
    "unused_percent",
    "clean_percent",
    "dirty_percent",
    "metadata_percent",
    "root_usage_percent",
    "active_journal_entries",
    "io_errors",
    "btree_coalesces",
    "writeback_keys_done",
    "writeback_keys_failed",
    "writeback_errors",
    "io_errors_recent",
    "bucket_table_bytes",
];

fn cache() -> Value {
    let times = json!({ "count": 1, "average_us": 250, "between_us": 0, "max_us": 250 });
    let mut cache = json!({
        "name": "fast", "device": "/dev/\"fast\"", "state": "open", "set_uuid": UUID,
        "bypass_hits": 5, "bypass_misses": 6, "bypassed_requests": 2, "bypassed": bypassed(),
        "windows": windows(), "written_bytes": 45,
        "written_by_cause_bytes": { "data": 1, "fill": 2, "moved": 3, "btree": 4, "journal": 5, "priorities": 6,
            "uuids": 7, "superblock": 8, "summaries": 9 },
        "average_key_bytes": 8192, "btree_nodes": 3, "btree_used_percent": 40,
        "btree_gc": times, "btree_split": times, "btree_read": times, "congested_bytes": 0,
        "discarded_bytes": 0
    });
    for (index, name) in NUMBERS.into_iter().enumerate() {
        cache[name] = (100 + index).into();
    }
    cache
}

fn volume() -> Value {
    json!({
        "name": "tank", "state": "served", "backing": "/dev/sdb", "cache": "fast", "uuid": "u", "label": "tank",
        "size_bytes": 4096, "block_bytes": 512, "cache_mode": "writeback", "backing_state": "dirty",
        "dirty_bytes": 1024, "dirty_target_bytes": 2048, "oldest_dirty_seconds": 9, "writeback_rate_bytes": 4096,
        "hits": 300, "misses": 1, "miss_collisions": 7, "bypassed_bytes": 8192, "bypass_hits": 5,
        "bypass_misses": 6, "bypassed_requests": 2, "bypassed": bypassed(), "windows": windows(),
        "latency": { "read_hit": { "requests": 300, "mean_us": 100, "p50_us": 90, "p90_us": 120, "p99_us": 200,
            "p999_us": 300, "max_us": 301 } },
        "unwritable": { "ranges": 2, "bytes": 4608, "start_bytes": 512, "length_bytes": 512, "error": "bad", "tries": 3,
            "retry_seconds": 4 },
        "io_errors": 11, "number": 4, "writeback_proportional_bytes": -1, "writeback_integral_bytes": 2,
        "writeback_change_bytes": -3
    })
}

/// A status with one set and one volume, and one absent one of each.
fn status() -> Status {
    let mut status: Status = serde_json::from_value(json!({
        "state": "ready", "pid": 1, "uptime_seconds": 12, "nbd": [], "clients": [],
        "caches": [cache(), { "name": "gone", "device": "/dev/gone", "state": "waiting" }],
        "volumes": [volume(), { "name": "lost", "state": "waiting" }]
    }))
    .expect("a status");
    let facts = status.volumes[0].facts.as_mut().expect("it is served");
    let latency = facts.numbers.as_mut().and_then(|numbers| numbers.latency.get_mut("read_hit"));
    let latency = latency.expect("there were hits");
    (latency.within, latency.total_seconds) = ((0..11).map(|power| power * 30).collect(), 0.03);
    status
}

/// Returns the names of the families. Checks that samples are in order, and that every line is of
/// one of the three kinds.
fn families(text: &str) -> BTreeSet<String> {
    let mut families = BTreeSet::new();
    let mut current = String::new();
    let mut kind = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, of) = rest.split_once(' ').expect("name and type");
            assert!(families.insert(name.to_owned()), "{name} stands there twice");
            (current, kind) = (name.to_owned(), of.to_owned());
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        } else if !line.starts_with("# HELP ") {
            let (sample, value) = line.rsplit_once(' ').expect("a value");
            let name = sample.split('{').next().expect("a name");
            let suffix = name.strip_prefix(&current).unwrap_or_else(|| panic!("{line} is not of {current}"));
            let is_suffix = matches!(suffix, "_bucket" | "_sum" | "_count");
            assert_eq!(is_suffix, kind == "histogram", "{line}");
            let _number: f64 = value.parse().expect("a number");
        }
    }
    families
}

#[test]
fn every_number_has_its_name_and_labels() {
    // Proves invariant N5.
    let text = text(&status());
    let names = families(&text);
    assert!(names.iter().all(|name| name.starts_with("bcached_")), "{names:?}");
    for line in [
        "bcached_state{state=\"ready\"} 1",
        "bcached_cache_open{cache=\"fast\"} 1",
        "bcached_cache_open{cache=\"gone\"} 0",
        &format!("bcached_cache_info{{cache=\"fast\",device=\"/dev/\\\"fast\\\"\",uuid=\"{UUID}\"}} 1"),
        "bcached_cache_written_bytes_total{cache=\"fast\",cause=\"journal\"} 5",
        "bcached_cache_reads_total{cache=\"fast\",result=\"hit\"} 300",
        "bcached_cache_bypassed_bytes_total{cache=\"fast\",reason=\"sequential\"} 8192",
        "bcached_cache_buckets{cache=\"fast\",state=\"metadata\"} 105",
        "bcached_volume_served{volume=\"lost\"} 0",
        "bcached_volume_healthy{volume=\"tank\"} 1",
        "bcached_volume_dirty_bytes{volume=\"tank\"} 1024",
        "bcached_volume_oldest_dirty_seconds{volume=\"tank\"} 9",
        "bcached_volume_unwritable_bytes{volume=\"tank\"} 4608",
        "bcached_volume_unwritable_ranges{volume=\"tank\"} 2",
        "bcached_volume_io_errors_total{volume=\"tank\"} 11",
        "bcached_volume_hit_percent{volume=\"tank\",window=\"five_minute\"} 75",
        "bcached_volume_bypassed_requests_total{volume=\"tank\",reason=\"sequential\"} 2",
        "bcached_volume_request_seconds_bucket{volume=\"tank\",path=\"read_hit\",le=\"0.000064\"} 30",
        "bcached_volume_request_seconds_bucket{volume=\"tank\",path=\"read_hit\",le=\"16.777216\"} 300",
        "bcached_volume_request_seconds_bucket{volume=\"tank\",path=\"read_hit\",le=\"+Inf\"} 300",
        "bcached_volume_request_seconds_sum{volume=\"tank\",path=\"read_hit\"} 0.03",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

/// All of node_exporter's names for the kernel's bcache are there, once, with node_exporter's
/// labels.
#[test]
fn node_exporters_names_are_all_there() {
    // Proves invariant N5.
    let text = node_text(&status());
    let of_sets = [
        "average_key_size_sectors 16",
        "btree_cache_size_bytes 109",
        "cache_available_percent 131",
        "congested 0",
        "root_usage_percent 140",
        "tree_depth 107",
        "active_journal_entries 141",
        "btree_nodes 3",
        "btree_read_average_duration_seconds 0.00025",
        "cache_read_races_total 0",
    ];
    let of_members = [
        "dirty_data_bytes 1024",
        "dirty_target_bytes 2048",
        "writeback_rate 4096",
        "writeback_rate_proportinal_term -1",
        "writeback_rate_integral_term 2",
        "writeback_change -3",
        "bypassed_bytes_total 8192",
        "cache_hits_total 300",
        "cache_misses_total 1",
        "cache_bypass_hits_total 5",
        "cache_bypass_misses_total 6",
        "cache_miss_collisions_total 7",
        "cache_readaheads_total 0",
    ];
    let of_devices = [
        "io_errors 147",
        "metadata_written_bytes_total 39",
        "written_bytes_total 6",
        "priority_stats_unused_percent 136",
        "priority_stats_metadata_percent 139",
    ];
    let uuid = format!("uuid=\"{UUID}\"");
    let groups: [(&[&str], String); 3] = [
        (&of_sets, format!("{{{uuid}}}")),
        (&of_members, format!("{{{uuid},backing_device=\"bdev4\"}}")),
        (&of_devices, format!("{{{uuid},cache_device=\"cache0\"}}")),
    ];
    let mut wanted = BTreeSet::new();
    for (metrics, labels) in groups {
        for metric in metrics {
            let (name, value) = metric.split_once(' ').expect("name and value");
            let line = format!("node_bcache_{name}{labels} {value}");
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
            wanted.insert(format!("node_bcache_{name}"));
        }
    }
    assert_eq!(families(&text), wanted);
    assert!(!text.contains("# HELP"), "node_exporter has its own");
}

/// The guide names all metrics: that is where dashboards are made from.
#[test]
fn the_guide_has_every_name() {
    const GUIDE: &str = include_str!("../../../../docs/guide.md");
    for name in families(&text(&status())) {
        let tail =
            |prefix| name.strip_prefix(prefix).is_some_and(|tail| GUIDE.contains(&format!("`{tail}`")));
        let is_there = GUIDE.contains(&format!("`{name}`"));
        assert!(
            is_there || tail("bcached_cache") || tail("bcached_volume"),
            "the guide does not name {name}"
        );
    }
}
