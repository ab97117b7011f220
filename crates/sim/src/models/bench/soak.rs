//! B20: a day of mixed load, during which nothing may become slower or larger.
//!
//! To keep the run short, clients work only for some seconds of each minute. The rest of the minute
//! belongs to write-back, and once an hour to other events in the life of a volume.

use super::{BenchmarkRow, BenchmarkScale};
use crate::models::bed::{BACKING, BedConfig, TestBed};
use crate::models::load::{AccessPattern, Load, StopAfter};
use crate::models::ssd;
use crate::models::zipf::Zipf;
use bcached_engine::{CacheSet, CancelToken, Error, Request, VolumeId};
use bcached_env::Buffer;
use bcached_format::Label;
use std::rc::Rc;
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;
/// Disk writes that fail each hour.
const FAILING_WRITES: u64 = 20;
/// Bytes of each write to the temporary volume and to the region that is cut off.
const WRITE_BYTES: usize = 64 << 10;

/// The figures of one hour.
#[derive(Clone, Copy, Default)]
struct HourCounts {
    /// Requests per second while clients work.
    iops: f64,
    /// Memory of cached nodes in bytes. It is the mean over the ends of all minutes, because it
    /// fluctuates with what is being rewritten.
    node_bytes: u64,
    /// Resident memory of the whole simulator in KiB; 0 if unknown.
    resident_kib: u64,
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

/// An event that happens once an hour.
#[derive(Clone, Copy)]
enum Disturbance {
    /// The disk fails some writes.
    Faults,
    /// A flash-only volume is created, written to, and removed.
    Lodger,
    /// The volume is shrunk to the region that clients use, which discards the dirty data beyond
    /// it, and is grown again.
    Resize,
    /// The volume is detached from the cache and attached again.
    Reattach,
}

impl Disturbance {
    /// Returns the event for a minute of an hour with `minutes` minutes: each event has its own
    /// sixth of the hour.
    const fn of(minute: u64, minutes: u64) -> Option<Self> {
        let each = if minutes < 6 { 1 } else { minutes / 6 };
        match (minute % each, minute / each) {
            (0, 1) => Some(Self::Faults),
            (0, 2) => Some(Self::Lodger),
            (0, 3) => Some(Self::Resize),
            (0, 4) => Some(Self::Reattach),
            _ => None,
        }
    }
}

fn disturb(bed: &mut TestBed, disturbance: Option<Disturbance>, region: u64) {
    let (set, volume) = (bed.set.clone(), bed.volume);
    let done = match disturbance {
        None => return,
        Some(Disturbance::Faults) => {
            let fail = &mut bed.world.borrow_mut().devices[BACKING].failing_writes;
            assert_eq!(
                std::mem::replace(fail, FAILING_WRITES),
                0,
                "write-back has met the failures of the last hour"
            );
            return;
        }
        Some(Disturbance::Lodger) => bed.block_on(async move { lodge(&set).await }),
        Some(Disturbance::Resize) => bed.block_on(async move { resize(&set, volume, region).await }),
        Some(Disturbance::Reattach) => bed.block_on(async move {
            set.detach(volume, &CancelToken::default()).await?;
            set.attach(volume, &CancelToken::default()).await
        }),
    };
    done.expect("nothing prevents it");
}

async fn write(set: &CacheSet, volume: VolumeId, sector: u64) -> Result<(), Error> {
    let payload = Buffer::zeroed(WRITE_BYTES).freeze();
    set.serve(volume, Request::Write { sector, payload, fua: false }).await.result
}

async fn lodge(set: &CacheSet) -> Result<(), Error> {
    let sectors = WRITE_BYTES as u64 / 512;
    let lodger = set.create_flash_only(16 * sectors, Label::default()).await?;
    for at in 0..16 {
        write(set, lodger, at * sectors).await?;
    }
    let uuid = set.volumes().into_iter().find(|info| info.id == lodger).ok_or(Error::NoVolume)?.uuid;
    set.remove_volume(lodger).await?;
    set.forget(set.begin_forgetting(uuid)?).await
}

async fn resize(set: &CacheSet, volume: VolumeId, region: u64) -> Result<(), Error> {
    let whole = set.volumes().into_iter().find(|info| info.id == volume).ok_or(Error::NoVolume)?.sectors;
    for sector in (region..whole).step_by(WRITE_BYTES / 512) {
        write(set, volume, sector).await?;
    }
    set.shrink(volume, region, &CancelToken::default()).await?;
    set.grow(volume, whole, &CancelToken::default()).await
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn hour(bed: &mut TestBed, load: &Load, number: u64, minutes: u64, busy: u64) -> HourCounts {
    let (mut requests, mut nanoseconds, mut node_bytes) = (0, 0, 0);
    for minute in 0..minutes {
        let seed = number * 60 + minute;
        let done = bed.run(&Load { until: StopAfter::Nanoseconds(busy * SECOND_NS), seed, ..load.clone() });
        requests += done.requests;
        nanoseconds += done.nanoseconds;
        disturb(bed, Disturbance::of(minute, minutes), load.region);
        bed.rest(Duration::from_secs(60 - busy));
        node_bytes += bed.status().node_bytes;
    }
    HourCounts {
        iops: requests as f64 * 1e9 / nanoseconds as f64,
        node_bytes: node_bytes / minutes,
        resident_kib: resident_kib(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    let cache = scale.of(1 << 19, 1 << 17);
    let (hours, minutes, busy) = (scale.of(24, 3), scale.of(60, 5), scale.of(4, 1));
    let mut bed = TestBed::new(&BedConfig::new(ssd::SsdModel::sata_plp(), cache, 4 * cache + cache / 32));
    let zipf = Rc::new(Zipf::new(4 * cache / 8, 1.1, 1));
    let load = Load {
        places: AccessPattern::Zipf(zipf),
        read_percent: 70,
        ..Load::random_writes(4 * cache, 16, StopAfter::Requests(0))
    };
    let all: Vec<HourCounts> =
        (0..hours).map(|number| hour(&mut bed, &load, number, minutes, busy)).collect();
    let (second, last) = (all[1], all[all.len() - 1]);
    // The memory of nodes varies by some percent from hour to hour, as leaves are rewritten. Only
    // the mean over many hours shows a trend.
    let (earlier, later) = all[1..].split_at((all.len() - 1) / 2);
    let nodes = |hours: &[HourCounts]| {
        hours.iter().map(|hour| hour.node_bytes).sum::<u64>() / hours.len().max(1) as u64
    };
    let grown = |first: u64, last: u64| 100.0 * (last as f64 / (first as f64).max(1.0) - 1.0);
    let least = all[1..].iter().map(|hour| hour.iops).fold(f64::INFINITY, f64::min);
    vec![
        BenchmarkRow::at_least(
            "B20",
            "requests a second, hour 24 / hour 2",
            last.iops / second.iops,
            0.98,
            "",
        ),
        BenchmarkRow::at_most(
            "B20",
            "growth of node memory, second half of the day",
            grown(nodes(earlier), nodes(later)),
            2.0,
            "%",
        ),
        BenchmarkRow::at_most(
            "B20",
            "growth of the process's memory, hour 2 to hour 24",
            grown(second.resident_kib, last.resident_kib),
            2.0,
            "%",
        ),
        BenchmarkRow::tells("B20", "requests a second in hour 2", second.iops, ""),
        BenchmarkRow::tells("B20", "requests a second in the slowest hour from 2 on", least, ""),
    ]
}
