//! B8: how continuous random writes perform when the cache has no more room for dirty data.

use super::{BenchmarkRow, BenchmarkScale, sweep_seconds};
use crate::models::bed::{BedConfig, TestBed};
use crate::models::gauge::{closed_loop, random};
use crate::models::hdd::Hdd;
use crate::models::load::{Load, LoadResult, StopAfter};
use crate::models::mechanism::CommandKind;
use crate::models::ssd;

/// Number of requests in flight.
const DEPTH: u64 = 128;

/// Writes four times the size of the cache to a region of that size.
fn fill(cache: u64, setting: &BedConfig) -> LoadResult {
    let mut bed = TestBed::new(setting);
    bed.run(&Load::random_writes(4 * cache, DEPTH, StopAfter::Requests(4 * cache / 8)))
}

/// Returns the largest loss from one whole second to the next, as a fraction of the former, and the
/// requests in the worst second.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn drop_and_least(done: &LoadResult) -> (f64, f64) {
    // The last second is not a whole one.
    let whole = &done.by_second[..done.by_second.len().saturating_sub(1)];
    let drop = whole.windows(2).map(|pair| 1.0 - pair[1] as f64 / (pair[0] as f64).max(1.0));
    (drop.fold(0.0, f64::max), whole.iter().copied().min().unwrap_or(0) as f64)
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    // A smaller cache is full before the pace can come down by less than a third each second.
    let cache = scale.of(8 << 20, 1 << 15);
    let setting = BedConfig::new(ssd::SsdModel::sata_plp(), cache, 4 * cache);
    let writes = scale.of(200_000, 20_000);
    let bare = closed_loop(
        &mut Hdd::new(setting.backing.clone()),
        0,
        (DEPTH, writes),
        random(CommandKind::Write, 4 * cache, 8, 1),
    );
    // Nine tenths of the cache may be dirty.
    let dirty = cache / 8 * 9 / 10;
    let sorted = dirty as f64 / sweep_seconds(&setting.backing, dirty, 4 * cache);
    let done = fill(cache, &setting);
    let mut changed = setting.clone();
    changed.options.volume.writeback_percent = 0;
    let unthrottled = fill(cache, &changed);
    let small = scale.of(1 << 20, 1 << 15);
    let small_setting = BedConfig::new(ssd::SsdModel::sata_plp(), small, 4 * small);
    let small_done = fill(small, &small_setting);
    let uncached = fill(small, &BedConfig { backing: setting.backing.write_through(), ..small_setting });
    let (drop, least) = drop_and_least(&done);
    let ratio = done.nanoseconds as f64 / unthrottled.nanoseconds as f64;
    vec![
        BenchmarkRow::at_least(
            "B8",
            "the worst second (sorted write-back or bare disk)",
            least,
            sorted.max(bare.iops()),
            "IOPS",
        ),
        BenchmarkRow::at_most("B8", "largest drop between two seconds", 100.0 * drop, 30.0, "%"),
        BenchmarkRow::at_most("B8", "total / total without a rate limit", ratio, 1.05, ""),
        BenchmarkRow::tells("B8", "sorted write-back", sorted, "IOPS"),
        BenchmarkRow::tells("B8", "bare disk", bare.iops(), "IOPS"),
        BenchmarkRow::tells("B8", "mean", done.iops(), "IOPS"),
        BenchmarkRow::tells("B8", "total", done.nanoseconds as f64 / 1e9, "s"),
        BenchmarkRow::tells(
            "B8",
            "an eighth of the cache: the worst second",
            drop_and_least(&small_done).1,
            "IOPS",
        ),
        BenchmarkRow::tells(
            "B8",
            "an eighth of the cache: largest drop",
            100.0 * drop_and_least(&small_done).0,
            "%",
        ),
        BenchmarkRow::tells("B8", "an eighth of the cache: mean", small_done.iops(), "IOPS"),
        BenchmarkRow::tells("B8", "the same, disk without a write cache: mean", uncached.iops(), "IOPS"),
    ]
}
