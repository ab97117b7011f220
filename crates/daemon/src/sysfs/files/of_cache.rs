//! `SET/cache0`: the cache device.

use super::super::print::size;
use super::{File, FileAction, FileRead, FileWrite, SetView, WrittenBytes};
use bcached_config::options::Scope;

fn written(set: &SetView<'_>) -> WrittenBytes {
    WrittenBytes::of(set.counts, set.numbers).since(set.cleared)
}

/// Its files.
pub static CACHE: &[File] = &[
    File::of_set("block_size", |set| size(set.counts.block_bytes)),
    File::of_set("btree_written", |set| size(written(set).btree)),
    File::of_set("bucket_size", |set| size(set.counts.bucket_bytes)),
    File::option(Scope::Cache, "cache_replacement_policy"),
    File::deed("clear_stats", FileAction::ClearStats),
    File::option(Scope::Cache, "discard"),
    File::of_set("io_errors", |set| set.numbers.io_errors_recent.to_string()),
    File::of_set("metadata_written", |set| size(written(set).metadata)),
    File::of_set("nbuckets", |set| set.counts.buckets.to_string()),
    File { name: "priority_stats", read: FileRead::Ages, write: FileWrite::Never },
    File::of_set("written", |set| size(written(set).data)),
];
