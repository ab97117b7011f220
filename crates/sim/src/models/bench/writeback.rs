//! B9: the time to write randomly placed dirty data back to the disk while there are no client
//! requests.

use super::{BenchmarkRow, BenchmarkScale, sweep_seconds};
use crate::models::bed::{BedConfig, DATA_START, TestBed};
use crate::models::hdd::{self, Hdd};
use crate::models::kernel::{self, DirtyKey};
use crate::models::load::{Load, StopAfter};
use crate::models::ssd::{self, Ssd};
use bcached_env::rng::Rng;
use std::time::Duration;

/// After this time without a request the set is idle, and write-back runs as fast as the devices
/// allow.
const IDLE: Duration = Duration::from_secs(31);

/// Returns a bed with `blocks` dirty blocks in `region` sectors that has been idle for long.
fn dirty_bed(blocks: u64, region: u64) -> TestBed {
    let mut setting = BedConfig::new(ssd::SsdModel::sata_plp(), 4 * 8 * blocks / 1024 * 1024, region);
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    for seed in 1.. {
        let dirty = bed.status().dirty_sectors / 8;
        if dirty >= blocks {
            break;
        }
        let load = Load::random_writes(region, 32, StopAfter::Requests(blocks - dirty));
        bed.run(&Load { seed, ..load });
    }
    bed.rest(IDLE);
    bed
}

/// Returns the virtual seconds until nothing is dirty.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn write_back(bed: &mut TestBed) -> f64 {
    let began = bed.now();
    let changed = bed.set.change_volume_options(bed.volume, |options| options.writeback_running = true);
    changed.expect("the volume is there");
    while bed.status().dirty_sectors > 0 {
        bed.rest(Duration::from_millis(100));
    }
    (bed.now() - began) as f64 / 1e9
}

/// Returns the virtual seconds that the model of the kernel takes on drives of the same kind.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn kernel_seconds(disk: hdd::HddModel, blocks: u64, region: u64) -> f64 {
    let mut rng = Rng::new(1);
    let mut places: Vec<u64> = (0..blocks).map(|_| DATA_START + rng.below(region / 8) * 8).collect();
    places.sort_unstable();
    places.dedup();
    let key = |sector: &u64| DirtyKey { sector: *sector, cached_at: rng.below(blocks) * 8, sectors: 8 };
    let keys: Vec<DirtyKey> = places.iter().map(key).collect();
    let (mut cache, mut disk) = (Ssd::new(ssd::SsdModel::sata_plp()), Hdd::new(disk));
    kernel::write_back((&mut cache, &mut disk), 0, &keys, None) as f64 / 1e9
}

pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    // 4 GiB in 100 GB.
    let (blocks, region) = (scale.of(1 << 20, 1 << 14), scale.of(195_312_496, 3_051_752));
    let disk = hdd::HddModel::d7k8();
    let bound = sweep_seconds(&disk, blocks, region);
    let ours = write_back(&mut dirty_bed(blocks, region));
    let kernel = kernel_seconds(disk.clone(), blocks, region);
    let uncached = kernel_seconds(disk.write_through(), blocks, region);
    vec![
        BenchmarkRow::at_most(
            "B9",
            "write-back of 4 GiB in 100 GB (1.15 x the bound)",
            ours,
            1.15 * bound,
            "s",
        ),
        BenchmarkRow::at_least("B9", "the model of the kernel / ours", kernel / ours, 5.0, ""),
        BenchmarkRow::tells("B9", "the bound", bound, "s"),
        BenchmarkRow::tells("B9", "the model of the kernel, idle", kernel, "s"),
        BenchmarkRow::tells("B9", "the same, disk without a write cache", uncached, "s"),
    ]
}
