//! B12: bytes written to the cache device for each byte that a client writes, for random writes
//! into a cache that has room. Leaves are included: after the load there is time for all of them to
//! be written.

use super::{BenchmarkRow, BenchmarkScale};
use crate::models::bed::{BedConfig, CACHE, TestBed};
use crate::models::load::{Load, StopAfter};
use crate::models::ssd;
use std::time::Duration;

/// Bytes that a kernel writes for each byte at depth 1, by calculation: the data, a journal block,
/// and its share of leaves.
const KERNEL_DEPTH_1: f64 = 2.2;
/// Time by which each leaf has been written.
const LEAVES_WRITTEN: Duration = Duration::from_secs(61);

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn amplification(scale: BenchmarkScale, change: impl FnOnce(&mut Load)) -> f64 {
    // 64 GiB in front of 256.
    let (cache, writes) = (scale.of(64 << 21, 1 << 21), scale.of(1_000_000, 20_000));
    let mut setting = BedConfig::new(ssd::SsdModel::sata_plp(), cache, 4 * cache);
    // Write-back is a separate figure: only client writes count here.
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    let mut load = Load::random_writes(4 * cache, 32, StopAfter::Requests(writes));
    change(&mut load);
    let before = bed.traffic(CACHE).written_bytes;
    let done = bed.run(&load);
    bed.rest(LEAVES_WRITTEN);
    let written = bed.traffic(CACHE).written_bytes - before;
    written as f64 / (done.requests * load.sectors * 512) as f64
}

pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    let few = StopAfter::Requests(scale.of(500_000, 20_000));
    let deep = amplification(scale, |_| {});
    let flushed = amplification(scale, |load| load.flush_each = 31);
    let alone = amplification(scale, |load| (load.depth, load.until) = (1, few));
    let durable = amplification(scale, |load| (load.depth, load.until, load.fua) = (1, few, true));
    vec![
        BenchmarkRow::at_most("B12", "SSD bytes per user byte, depth 32", deep, 1.13, ""),
        BenchmarkRow::tells("B12", "the same, a flush about every 1000 writes", flushed, ""),
        BenchmarkRow::at_most("B12", "depth 1 (0.5 x the kernel's 2.2)", alone, 0.5 * KERNEL_DEPTH_1, ""),
        BenchmarkRow::at_most(
            "B12",
            "depth 1, each write durable (1.05 x 2.2)",
            durable,
            1.05 * KERNEL_DEPTH_1,
            "",
        ),
    ]
}
