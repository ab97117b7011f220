//! B10: how long it takes after a crash until a volume is served, its cache full of small extents.

use super::{Row, Scale};
use crate::models::bed::{Bed, CACHE, Setting};
use crate::models::load::{Load, Places, Until};
use crate::models::ssd;

/// The limit of memory, in MiB.
const MEMORY_MIB: f64 = 256.0;

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn run(scale: Scale) -> Vec<Row> {
    let cache = scale.of(64 << 21, 1 << 19);
    let mut setting = Setting::new(ssd::Model::sata_plp(), cache, 4 * cache);
    setting.options.volume.writeback_running = false;
    let mut bed = Bed::new(&setting);
    // With more of it dirty, writes would go past it. No two extents lie side by side, or they would be one; they are written in
    // order because that makes the same tree sooner.
    let load = Load::random_writes(4 * cache, 32, Until::Requests(cache / 8 * 85 / 100));
    bed.run(&Load { places: Places::Strided(4), ..load });
    let nodes_before = bed.status();
    let read_before = bed.traffic(CACHE).read_bytes;
    let (mut bed, opened) = bed.crash_and_reopen();
    let read = bed.traffic(CACHE).read_bytes - read_before;
    let first = bed.run(&Load { read_percent: 100, until: Until::Requests(1), depth: 1, ..load });
    let memory = bed.status().node_bytes_max as f64 / f64::from(1 << 20);
    vec![
        Row::at_most(
            "B10",
            "first answer after a crash",
            (opened + first.nanoseconds) as f64 / 1e9,
            1.0,
            "s",
        ),
        Row::at_most("B10", "memory of nodes at most", memory, MEMORY_MIB, "MiB"),
        Row::tells("B10", "dirty data", nodes_before.dirty_sectors as f64 / f64::from(1 << 21), "GiB"),
        Row::tells("B10", "read from the cache device by then", read as f64 / f64::from(1 << 20), "MiB"),
    ]
}
