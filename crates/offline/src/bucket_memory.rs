//! The memory that a cache's bucket table takes while the cache is served, and the messages about
//! it.
//!
//! It depends only on the number of buckets, which is chosen when the cache is made and does not
//! change later.

use crate::device::{self, Access};
use crate::superblock::{self, SuperblockProbe};
use bcached_config::{Cache, Config};
use bcached_control::failure::{self, Failure, Kind};
use bcached_control::sizes::{human, typed};
use bcached_engine::{bucket_table_bytes, node_budget_min};
use bcached_format::{CacheSuperblock, Geometry, Superblock};
use std::path::Path;

/// The size in bytes up to which a table is not worth a message: half of what `memory` gives nodes
/// by default.
pub const NOTABLE: u64 = 64 << 20;

/// The largest bucket that a superblock can have in its plain field, in sectors.
const BUCKET_SECTORS_MAX: u64 = 32_768;

/// Memory of a table of this many buckets, in bytes.
#[must_use]
pub const fn of(buckets: u64) -> u64 {
    bucket_table_bytes(buckets)
}

/// The least memory in which this set can be served, in bytes: its table and its nodes.
#[must_use]
pub fn least(superblock: &CacheSuperblock) -> u64 {
    let nodes = node_budget_min(Geometry::of(superblock).node_sectors(), 0);
    of(superblock.buckets()).saturating_add(nodes as u64)
}

/// What to do if a set that needs `bytes` gets too little memory.
#[must_use]
pub fn more(bytes: u64) -> String {
    // Half of the memory is for sets; several sets share it.
    let memory = bytes.saturating_mul(2).div_ceil(1 << 20);
    format!("set `memory` in [daemon] to {memory}M or more for each configured cache")
}

/// Why the set on `device` is not opened: it has `bytes` of memory and needs `least`. `advised` is
/// the `memory` with which each cache would have enough.
#[must_use]
pub fn too_large(device: &str, (bytes, least): (u64, u64), buckets: u64, advised: u64) -> Failure {
    let table = of(buckets);
    Failure::new(Kind::Config, failure::cannot_open(Path::new(device)))
        .why(format!(
            "its table of {buckets} buckets takes {} of memory and its index at least {}, but its \
             share of `memory` is {}",
            human(table),
            human(least.saturating_sub(table)),
            human(bytes)
        ))
        .next(format!(
            "set `memory = \"{}\"` or more, or leave `memory` unset: the limit then grows with \
             such tables",
            typed(advised.next_multiple_of(1 << 20))
        ))
}

/// A sentence about the bucket table of the cache on `device`, if it is notable.
#[must_use]
pub fn told(device: &str, buckets: u64, config: &Config) -> Option<String> {
    let place = if config.memory_is_said { "within" } else { "in addition to the default of" };
    (of(buckets) > NOTABLE).then(|| {
        format!(
            "{device}: its table of {buckets} buckets takes {} of memory, {place} `memory` ({})",
            human(of(buckets)),
            typed(config.memory_bytes)
        )
    })
}

/// A sentence about the memory of each configured cache, as far as its device can be read now.
#[must_use]
pub fn of_configured(config: &Config) -> Vec<String> {
    let ways = || config.volumes.iter().map(|volume| volume.ways);
    let count = config.caches.len().max(1) as u64;
    let part = config.memory_of_nodes(ways()) / count;
    let sentence = |cache: &Cache| {
        let looked = device::open(Path::new(&cache.device), Access::Look).ok()?;
        let Ok(SuperblockProbe::Valid(Superblock::Cache(superblock))) = superblock::read(&looked) else {
            return None;
        };
        let (least, buckets) = (least(&superblock), superblock.buckets());
        if config.memory_is_said && part < least {
            let advised = config.memory_for(count.saturating_mul(least), ways());
            return Some(too_large(&cache.device, (part, least), buckets, advised).to_string());
        }
        told(&cache.device, buckets, config)
    };
    config.caches.iter().filter_map(sentence).collect()
}

/// A sentence about the memory of this many buckets of this size in sectors, and how it could be
/// less, if it is notable.
#[must_use]
pub fn advice(buckets: u64, bucket_sectors: u64) -> Option<String> {
    if of(buckets) <= NOTABLE {
        return None;
    }
    let takes = format!("{buckets} buckets take {} of memory while the cache is served", human(of(buckets)));
    Some(match better(buckets, bucket_sectors) {
        Some((option, memory)) => format!("{takes}; with `{option}` it would be {memory}"),
        None => takes,
    })
}

/// A clause about the memory of an existing cache's table, and how a cache made anew would take
/// less, if it is notable.
#[must_use]
pub fn of_cache(buckets: u64, bucket_sectors: u64) -> String {
    let takes = format!("{} of memory while it is served", human(of(buckets)));
    let better = if of(buckets) > NOTABLE { better(buckets, bucket_sectors) } else { None };
    better.map_or(takes.clone(), |(option, memory)| {
        format!("{takes}; made with `{option}` it would take {memory}")
    })
}

/// The option of `make` with which the table for the same device is not notable, or as small as
/// possible, and its memory.
fn better(buckets: u64, bucket_sectors: u64) -> Option<(String, String)> {
    let larger = core::iter::successors(Some(bucket_sectors), |sectors| sectors.checked_mul(2));
    let mut larger = larger.skip(1).take_while(|sectors| *sectors <= BUCKET_SECTORS_MAX);
    let with = |sectors: u64| of(buckets / (sectors / bucket_sectors.max(1)).max(1));
    let found = larger.clone().find(|sectors| with(*sectors) <= NOTABLE).or_else(|| larger.by_ref().last());
    found.map(|sectors| (format!("--bucket {}", typed(512 * sectors)), human(with(sectors))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_table_is_told_with_a_bucket_that_makes_it_small() {
        assert_eq!(advice(NOTABLE / 25, 1024), None);
        let (buckets, tib) = (16 << 20, (8 << 40) / 512);
        assert_eq!(
            advice(buckets, tib / buckets).as_deref(),
            Some(
                "16777216 buckets take 400 MiB of memory while the cache is served; with `--bucket \
                 4M` it would be 50 MiB"
            )
        );
        let huge = advice(1 << 30, 32_768).expect("25 GiB");
        assert!(huge.ends_with("25 GiB of memory while the cache is served"), "{huge}");
        let half = advice(1 << 30, 16_384).expect("25 GiB");
        assert!(half.ends_with("with `--bucket 16M` it would be 12.5 GiB"), "{half}");
    }
}
