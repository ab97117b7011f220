//! `stats_total`, `stats_day`, `stats_hour`, `stats_five_minute`.

use super::super::print::size;
use super::{File, FileRead, FileWrite};
use bcached_control::statistics::RequestCounts;

const fn counted(name: &'static str, read: fn(&RequestCounts) -> String) -> File {
    File { name, read: FileRead::Counted(read), write: FileWrite::Never }
}

/// The files of one of them.
pub static STATS: &[File] = &[
    counted("bypassed", |counted| size(counted.bypassed_bytes)),
    counted("cache_bypass_hits", |counted| counted.bypass_hits.to_string()),
    counted("cache_bypass_misses", |counted| counted.bypass_misses.to_string()),
    counted("cache_hit_ratio", |counted| counted.hit_percent.unwrap_or_default().to_string()),
    counted("cache_hits", |counted| counted.hits.to_string()),
    counted("cache_miss_collisions", |counted| counted.miss_collisions.to_string()),
    counted("cache_misses", |counted| counted.misses.to_string()),
];
