//! `SET/cache0`: the cache device.

use super::super::print::size;
use super::{Deed, File, Read, Set, Write, Written};
use bcached_config::options::Scope;

fn written(set: &Set<'_>) -> Written {
    Written::of(set.counts, set.numbers).since(set.cleared)
}

/// Its files.
pub static CACHE: &[File] = &[
    File::of_set("block_size", |set| size(set.counts.block_bytes)),
    File::of_set("btree_written", |set| size(written(set).btree)),
    File::of_set("bucket_size", |set| size(set.counts.bucket_bytes)),
    File::option(Scope::Cache, "cache_replacement_policy"),
    File::deed("clear_stats", Deed::ClearStats),
    File::option(Scope::Cache, "discard"),
    File::of_set("io_errors", |set| set.numbers.io_errors_recent.to_string()),
    File::of_set("metadata_written", |set| size(written(set).metadata)),
    File::of_set("nbuckets", |set| set.counts.buckets.to_string()),
    File { name: "priority_stats", read: Read::Ages, write: Write::Never },
    File::of_set("written", |set| size(written(set).data)),
];
