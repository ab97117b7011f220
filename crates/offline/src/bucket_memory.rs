//! Memory that the table of a cache's buckets takes while the cache is served, and what people are told of it.
//!
//! It depends on the number of buckets alone, which whoever makes a cache chooses and nobody changes later.

use crate::device::{self, Access};
use crate::superblock::{self, Found};
use bcached_config::{Cache, Config};
use bcached_control::failure::{self, Failure, Kind};
use bcached_control::sizes::{human, typed};
use bcached_engine::{bucket_table_bytes, node_budget_min};
use bcached_format::{CacheSuperblock, Geometry, Superblock};
use std::path::Path;

/// A table up to so many bytes is not worth a word: half of what `memory` gives nodes by default.
pub const NOTABLE: u64 = 64 << 20;

/// The largest bucket that a superblock can name in its plain field, in sectors.
const BUCKET_SECTORS_MAX: u64 = 32_768;

/// Memory of a table of so many buckets, in bytes.
#[must_use]
pub const fn of(buckets: u64) -> u64 {
    bucket_table_bytes(buckets)
}

/// The least memory in which a set like this can be served, in bytes: its table, and nodes.
#[must_use]
pub fn least(superblock: &CacheSuperblock) -> u64 {
    let nodes = node_budget_min(Geometry::of(superblock).node_sectors(), 0);
    of(superblock.buckets()).saturating_add(nodes as u64)
}

/// A part of the memory that a set of `bytes` needs is too small: what to do.
#[must_use]
pub fn more(bytes: u64) -> String {
    // Half of the memory is for sets; one of several shares that with the others.
    let memory = bytes.saturating_mul(2).div_ceil(1 << 20);
    format!("give [daemon] `memory` of {memory}M or more for each cache that is configured")
}

/// The set on `device` is not opened with `bytes` of memory, because it needs `least`. `advised`: the `memory` with which each
/// cache could have so much.
#[must_use]
pub fn too_large(device: &str, (bytes, least): (u64, u64), buckets: u64, advised: u64) -> Failure {
    let table = of(buckets);
    Failure::new(Kind::Config, failure::cannot_open(Path::new(device)))
        .why(format!(
            "the table of its {buckets} buckets takes {} of memory and its index {} at least; its part of `memory` is {}",
            human(table),
            human(least.saturating_sub(table)),
            human(bytes)
        ))
        .next(format!(
            "write `memory = \"{}\"` or more, or leave it out: then it grows with such tables",
            typed(advised.next_multiple_of(1 << 20))
        ))
}

/// What the table of the buckets of the cache on `device` takes, if that is notable.
#[must_use]
pub fn told(device: &str, buckets: u64, config: &Config) -> Option<String> {
    let place = if config.memory_is_said { "within" } else { "beside the default of" };
    (of(buckets) > NOTABLE).then(|| {
        format!(
            "{device}: the table of its {buckets} buckets takes {} of memory, {place} `memory` ({})",
            human(of(buckets)),
            typed(config.memory_bytes)
        )
    })
}

/// What the devices of configured caches tell of memory, as far as they can be read now: a sentence each.
#[must_use]
pub fn of_configured(config: &Config) -> Vec<String> {
    let ways = || config.volumes.iter().map(|volume| volume.ways);
    let count = config.caches.len().max(1) as u64;
    let part = config.memory_of_nodes(ways()) / count;
    let sentence = |cache: &Cache| {
        let looked = device::open(Path::new(&cache.device), Access::Look).ok()?;
        let Ok(Found::Sound(Superblock::Cache(superblock))) = superblock::read(&looked) else { return None };
        let (least, buckets) = (least(&superblock), superblock.buckets());
        if config.memory_is_said && part < least {
            let advised = config.memory_for(count.saturating_mul(least), ways());
            return Some(too_large(&cache.device, (part, least), buckets, advised).to_string());
        }
        told(&cache.device, buckets, config)
    };
    config.caches.iter().filter_map(sentence).collect()
}

/// What the table of so many buckets of so many sectors takes, and how it would take less: a sentence, if it is much.
#[must_use]
pub fn advice(buckets: u64, bucket_sectors: u64) -> Option<String> {
    if of(buckets) <= NOTABLE {
        return None;
    }
    let takes = format!("{buckets} buckets take {} of memory while the cache is served", human(of(buckets)));
    Some(match better(buckets, bucket_sectors) {
        Some((option, memory)) => format!("{takes}; `{option}` takes {memory}"),
        None => takes,
    })
}

/// What the table of a cache takes that is there, and how one that is made anew would take less, if it is much: a clause.
#[must_use]
pub fn of_cache(buckets: u64, bucket_sectors: u64) -> String {
    let takes = format!("{} of memory while it is served", human(of(buckets)));
    let better = if of(buckets) > NOTABLE { better(buckets, bucket_sectors) } else { None };
    better
        .map_or(takes.clone(), |(option, memory)| format!("{takes}; made with `{option}` it takes {memory}"))
}

/// The option of `make` with which the table of the same device is not notable, or as small as can be, and what that takes.
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
                "16777216 buckets take 400 MiB of memory while the cache is served; `--bucket 4M` takes 50 MiB"
            )
        );
        let huge = advice(1 << 30, 32_768).expect("25 GiB");
        assert!(huge.ends_with("25 GiB of memory while the cache is served"), "{huge}");
        let half = advice(1 << 30, 16_384).expect("25 GiB");
        assert!(half.ends_with("`--bucket 16M` takes 12.5 GiB"), "{half}");
    }
}
