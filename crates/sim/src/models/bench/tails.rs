//! B7: tail latencies of random writes during garbage collection, compared with those before it.

use super::{BenchmarkRow, BenchmarkScale};
use crate::models::bed::{BACKING, BedConfig, TestBed};
use crate::models::latencies::Latencies;
use crate::models::load::{AccessPattern, Load, StopAfter};
use crate::models::ssd;
use crate::models::zipf::Zipf;
use bcached_engine::Stats;
use std::rc::Rc;

const MS: f64 = 1e6;

/// Returns counters that are non-zero once the engine has done any work to find space.
const fn collected(stats: &Stats) -> (u64, u64, u64) {
    (stats.gc_passes, stats.moved_bytes, stats.btree_coalesces)
}

/// Latencies before anything was collected, and since then.
struct LatencyTails {
    before: Latencies,
    since: Latencies,
    stats: Stats,
    /// Writes to the backing disk.
    backing_writes: u64,
}

/// Writes randomly over `share` percent of a cache. Nothing is written back, so that only
/// collection frees space.
fn tails(scale: BenchmarkScale, share: u64) -> LatencyTails {
    let cache = scale.of(2 << 21, 1 << 17);
    let region = cache * share / 100 / 8 * 8;
    let slice = scale.of(20_000, 2_000);
    let mut setting = BedConfig::new(ssd::SsdModel::nvme_plp(), cache, cache);
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    // The first write marks the backing device dirty, which is a write to a disk.
    bed.run(&Load::random_writes(region, 1, StopAfter::Requests(1)));
    let mut slices: Vec<Latencies> = Vec::new();
    let mut tails = LatencyTails {
        before: Latencies::default(),
        since: Latencies::default(),
        stats: Stats::default(),
        backing_writes: 0,
    };
    // Four times what the cache holds.
    for seed in 1..=4 * cache / 8 / slice {
        let load = Load::random_writes(region, 10, StopAfter::Requests(slice));
        let done = bed.run(&Load { seed, ..load });
        let stats = bed.status().stats;
        if collected(&stats) == (0, 0, 0) {
            slices.push(done.writes);
        } else {
            tails.since.join(&done.writes);
        }
        tails.stats = stats;
    }
    // The last slices may have overlapped with a pass that had not ended.
    slices.truncate(slices.len().saturating_sub(slices.len() / 10 + 1));
    slices.iter().for_each(|slice| tails.before.join(slice));
    tails.backing_writes = bed.traffic(BACKING).writes;
    tails
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    let mut rows = Vec::new();
    for share in [25, 50] {
        let LatencyTails { mut before, mut since, stats, backing_writes } = tails(scale, share);
        let writes = stats.write_bytes / 4096;
        let (median, p999) = (before.quantile(500) as f64, before.quantile(999) as f64);
        let (longest, tail) = (since.longest() as f64, since.quantile(999) as f64);
        let of = format!("{share} % of the cache live");
        rows.extend([
            BenchmarkRow::at_most(
                "B7",
                format!("p99.9 under gc / without, {of}"),
                tail / p999.max(1.0),
                2.0,
                "",
            ),
            BenchmarkRow::at_most(
                "B7",
                "longest under gc / median without",
                longest / median.max(1.0),
                10.0,
                "",
            ),
            BenchmarkRow::at_most("B7", "longest under gc", longest / MS, 20.0, "ms"),
            BenchmarkRow::tells("B7", "median without", median / MS, "ms"),
            BenchmarkRow::tells("B7", "p99.9 without", p999 / MS, "ms"),
            BenchmarkRow::tells("B7", "longest without", before.longest() as f64 / MS, "ms"),
            BenchmarkRow::tells("B7", "median under gc", since.quantile(500) as f64 / MS, "ms"),
            BenchmarkRow::tells("B7", "passes of gc", stats.gc_passes as f64, ""),
            BenchmarkRow::tells(
                "B7",
                "bytes moved / written",
                stats.moved_bytes as f64 / stats.write_bytes as f64,
                "",
            ),
            BenchmarkRow::tells(
                "B7",
                "writes that went to the disk",
                100.0 * backing_writes as f64 / writes as f64,
                "%",
            ),
            BenchmarkRow::tells(
                "B7",
                "bytes of priorities / written",
                stats.written.of(bcached_engine::WriteCause::Priorities) as f64 / stats.write_bytes as f64,
                "",
            ),
        ]);
    }
    rows.push(BenchmarkRow::tells(
        "B7",
        "bytes moved / written, some blocks much more often",
        skewed(scale),
        "",
    ));
    let (back, moved) = written_over(scale);
    rows.push(BenchmarkRow::at_most("B7", "with write-back: bytes written back / written", back, 0.1, ""));
    rows.push(BenchmarkRow::tells("B7", "with write-back: bytes moved / written", moved, ""));
    rows
}

/// Returns the bytes written back and the bytes moved, per byte written. A quarter of the cache is
/// overwritten again and again, and more than that may be dirty.
///
/// Here write-back frees no space that moving would not free, and the disk has other work. Moving,
/// and write-back with it, alternate with pauses: free space lasts for as many writes as the cache
/// holds, and is then reclaimed for as long. The run covers several such cycles, so that the figure
/// does not depend on where it ends.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn written_over(scale: BenchmarkScale) -> (f64, f64) {
    let cache = scale.of(2 << 21, 1 << 17);
    let mut setting = BedConfig::new(ssd::SsdModel::nvme_plp(), cache, cache);
    setting.options.volume.writeback_percent = 40;
    let mut bed = TestBed::new(&setting);
    bed.run(&Load::random_writes(cache / 4, 10, StopAfter::Requests(12 * cache / 8)));
    let stats = bed.status().stats;
    let by_writes = |bytes: u64| bytes as f64 / stats.write_bytes as f64;
    (by_writes(stats.written_back_bytes), by_writes(stats.moved_bytes))
}

/// Returns the bytes moved per byte written, where some blocks are written much more often than
/// others. Data that stays live is moved again and again if it shares buckets with data that does
/// not.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn skewed(scale: BenchmarkScale) -> f64 {
    let cache = scale.of(2 << 21, 1 << 17);
    let region = cache * 3 / 4;
    let mut setting = BedConfig::new(ssd::SsdModel::nvme_plp(), cache, cache);
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    let places = AccessPattern::Zipf(Rc::new(Zipf::new(region / 8, 0.99, 1)));
    bed.run(&Load { places, ..Load::random_writes(region, 10, StopAfter::Requests(6 * cache / 8)) });
    let stats = bed.status().stats;
    stats.moved_bytes as f64 / stats.write_bytes as f64
}
