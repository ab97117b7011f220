//! `SET` and `SET/internal`, and the files beside the sets.

use super::super::print::{TimingField, choice, lines, size};
use super::{File, FileAction, FileRead, FileWrite, SetView};
use bcached_config::options::Scope;
use bcached_config::options::value::ValueKind;

const NOT_FOR_A_TIME: &str =
    "registration must outlast a restart: use `bcached add NAME --backing DEV` or `bcached import DEV`";

/// The files beside the sets.
pub static TOP: &[File] = &[
    File::refused("pendings_cleanup", "only named volumes are stopped: use `bcached remove` for each"),
    File::refused("register", NOT_FOR_A_TIME),
    File::refused("register_quiet", NOT_FOR_A_TIME),
];

/// The files of a set.
pub static SET: &[File] = &[
    File::of_set("average_key_size", |set| size(set.numbers.average_key_bytes.unwrap_or_default())),
    File::of_set("block_size", |set| size(set.counts.block_bytes)),
    File::of_set("btree_cache_size", |set| size(set.counts.node_bytes)),
    File::of_set("bucket_size", |set| size(set.counts.bucket_bytes)),
    File::of_set("cache_available_percent", |set| set.numbers.cache_available_percent.to_string()),
    File::deed("clear_stats", FileAction::ClearStats),
    File::of_set("congested", |set| size(set.counts.congested_bytes.unwrap_or_default())),
    File::option(Scope::Cache, "congested_read_threshold_us"),
    File::option(Scope::Cache, "congested_write_threshold_us"),
    File {
        name: "errors",
        read: FileRead::Set(|_| choice(ERRORS, "unregister")),
        write: FileWrite::Fixed(
            ValueKind::Choice(ERRORS),
            "a failed set only stops writing: `on_cache_error` of each volume decides what happens to requests",
        ),
    },
    File::deed("flash_vol_create", FileAction::CreateFlash),
    File::option(Scope::Cache, "io_error_halflife"),
    File::option(Scope::Cache, "io_error_limit"),
    File::option(Scope::Cache, "journal_delay_ms"),
    File::of_set("root_usage_percent", |set| set.numbers.root_usage_percent.to_string()),
    File::refused(
        "stop",
        "use `bcached stop VOLUME` for each volume, or `bcached release` for the set with its volumes",
    ),
    fixed_flag("synchronous", "1", "without a journal, the whole cache would be invalid at the next start"),
    File::of_set("tree_depth", |set| set.counts.tree_depth.to_string()),
    File::refused(
        "unregister",
        "use `bcached detach` for each of its volumes, then `bcached release` for the set",
    ),
];

const ERRORS: &[&str] = &["unregister", "panic"];

/// The kernel reports `large_bucket` for bucket sizes that its old field cannot hold.
const LARGE_BUCKET_BYTES: u64 = 32 << 20;

const GC: &str =
    "free buckets are known without a pass over the tree; passes run beside requests when they are due";
const NODES: &str = "btree nodes have their configured share of `memory`";

/// The files of `internal`.
pub static INTERNAL: &[File] = &[
    File::of_set("active_journal_entries", |set| set.numbers.active_journal_entries.to_string()),
    File::of_set("bset_tree_stats", search_trees),
    File::of_set("btree_cache_max_chain", none),
    File::of_set("btree_gc_average_duration_ms", |set| TimingField::Average(1000).of(&set.numbers.btree_gc)),
    File::of_set("btree_gc_average_frequency_sec", |set| {
        TimingField::Between(1_000_000).of(&set.numbers.btree_gc)
    }),
    File::of_set("btree_gc_last_sec", |set| TimingField::Last(1_000_000).of(&set.numbers.btree_gc)),
    File::of_set("btree_gc_max_duration_ms", |set| TimingField::Longest(1000).of(&set.numbers.btree_gc)),
    File::of_set("btree_nodes", |set| set.numbers.btree_nodes.to_string()),
    File::of_set("btree_read_average_duration_us", |set| TimingField::Average(1).of(&set.numbers.btree_read)),
    File::of_set("btree_read_average_frequency_ms", |set| {
        TimingField::Between(1000).of(&set.numbers.btree_read)
    }),
    File::of_set("btree_read_last_ms", |set| TimingField::Last(1000).of(&set.numbers.btree_read)),
    File::of_set("btree_read_max_duration_us", |set| TimingField::Longest(1).of(&set.numbers.btree_read)),
    fixed_flag("btree_shrinker_disabled", "0", NODES),
    // Keys are kept in order here, and never sorted.
    File::of_set("btree_sort_average_duration_us", none),
    File::of_set("btree_sort_average_frequency_ms", none),
    File::of_set("btree_sort_last_ms", |_| "-1".to_owned()),
    File::of_set("btree_sort_max_duration_us", none),
    File::of_set("btree_split_average_duration_us", |set| {
        TimingField::Average(1).of(&set.numbers.btree_split)
    }),
    File::of_set("btree_split_average_frequency_sec", |set| {
        TimingField::Between(1_000_000).of(&set.numbers.btree_split)
    }),
    File::of_set("btree_split_last_sec", |set| TimingField::Last(1_000_000).of(&set.numbers.btree_split)),
    File::of_set("btree_split_max_duration_us", |set| TimingField::Longest(1).of(&set.numbers.btree_split)),
    File::of_set("btree_used_percent", |set| set.numbers.btree_used_percent.to_string()),
    // A bucket that is being read is never reused.
    File::of_set("cache_read_races", none),
    fixed_flag("copy_gc_enabled", "1", "without moving data, a cache of half empty buckets would be full"),
    of_option("cutoff_writeback"),
    of_option("cutoff_writeback_sync"),
    bare("feature_compat", |_| String::new()),
    bare("feature_incompat", |set| {
        let is_set = set.counts.bucket_bytes >= LARGE_BUCKET_BYTES;
        if is_set { "[large_bucket]\n" } else { "large_bucket\n" }.to_owned()
    }),
    bare("feature_ro_compat", |_| String::new()),
    // Journal space is reclaimed in another way.
    File::of_set("flush_write", none),
    fixed_flag("gc_after_writeback", "0", GC),
    fixed_flag("gc_always_rewrite", "0", GC),
    File::option(Scope::Cache, "idle_max_writeback_rate"),
    fixed_flag("io_disable", "0", "use `bcached stop VOLUME` to end service in order"),
    File::refused("prune_cache", NODES),
    File::of_set("reclaim", none),
    File::of_set("reclaimed_journal_buckets", none),
    File::refused("trigger_gc", GC),
    File::of_set("writeback_keys_done", |set| set.numbers.writeback_keys_done.to_string()),
    File::of_set("writeback_keys_failed", |set| set.numbers.writeback_keys_failed.to_string()),
];

/// The value of what does not exist here.
fn none(_: &SetView<'_>) -> String {
    "0".to_owned()
}

const fn of_option(name: &'static str) -> File {
    File { name, read: FileRead::Option(Scope::Cache, name), write: FileWrite::Never }
}

const fn bare(name: &'static str, read: fn(&SetView<'_>) -> String) -> File {
    File { name, read: FileRead::Bare(read), write: FileWrite::Never }
}

/// A flag with a fixed value.
const fn fixed_flag(name: &'static str, is: &'static str, why: &'static str) -> File {
    let read: fn(&SetView<'_>) -> String = match is.as_bytes() {
        b"1" => |_| "1".to_owned(),
        _ => |_| "0".to_owned(),
    };
    File { name, read: FileRead::Set(read), write: FileWrite::Fixed(ValueKind::Flag, why) }
}

/// The kernel keeps search trees in memory. Only the number of nodes applies here; the rest is 0.
fn search_trees(set: &SetView<'_>) -> String {
    let nothing = || "0".to_owned();
    let text = lines(&[
        ("btree nodes", 2, set.counts.nodes.to_string()),
        ("written sets", 2, nothing()),
        ("unwritten sets", 2, nothing()),
        ("written key bytes", 1, nothing()),
        ("unwritten key bytes", 1, nothing()),
        ("floats", 3, nothing()),
        ("failed", 3, nothing()),
    ]);
    text.trim_end_matches('\n').to_owned()
}
