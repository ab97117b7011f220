//! B20: a day of mixed load, in which nothing may become slower or larger. To keep the run short, clients work for some seconds of
//! each minute; the rest of it is write-back's.

use super::{Row, Scale};
use crate::models::bed::{Bed, Setting};
use crate::models::load::{Load, Places, Until};
use crate::models::ssd;
use crate::models::zipf::Zipf;
use std::rc::Rc;
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;

/// What an hour came to.
#[derive(Clone, Copy, Default)]
struct Hour {
    /// Requests a second, while clients work.
    iops: f64,
    /// Memory of the nodes, in bytes: the mean of each minute's end, since it goes up and down with what is being rewritten.
    node_bytes: u64,
    /// Resident memory of the whole simulator, in KiB; 0 where nobody says.
    resident_kib: u64,
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn hour(bed: &mut Bed, load: &Load, number: u64, minutes: u64, busy: u64) -> Hour {
    let (mut requests, mut nanoseconds, mut node_bytes) = (0, 0, 0);
    for minute in 0..minutes {
        let seed = number * 60 + minute;
        let done = bed.run(&Load { until: Until::Nanoseconds(busy * SECOND_NS), seed, ..load.clone() });
        requests += done.requests;
        nanoseconds += done.nanoseconds;
        bed.rest(Duration::from_secs(60 - busy));
        node_bytes += bed.status().node_bytes;
    }
    Hour {
        iops: requests as f64 * 1e9 / nanoseconds as f64,
        node_bytes: node_bytes / minutes,
        resident_kib: resident_kib(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn run(scale: Scale) -> Vec<Row> {
    let cache = scale.of(1 << 19, 1 << 17);
    let (hours, minutes, busy) = (scale.of(24, 3), scale.of(60, 2), scale.of(1, 1));
    let mut bed = Bed::new(&Setting::new(ssd::Model::sata_plp(), cache, 4 * cache));
    let zipf = Rc::new(Zipf::new(4 * cache / 8, 1.1, 1));
    let load = Load {
        places: Places::Zipf(zipf),
        read_percent: 70,
        ..Load::random_writes(4 * cache, 16, Until::Requests(0))
    };
    let all: Vec<Hour> = (0..hours).map(|number| hour(&mut bed, &load, number, minutes, busy)).collect();
    let (second, last) = (all[1], all[all.len() - 1]);
    let grown = |first: u64, last: u64| 100.0 * (last as f64 / (first as f64).max(1.0) - 1.0);
    let least = all[1..].iter().map(|hour| hour.iops).fold(f64::INFINITY, f64::min);
    vec![
        Row::at_least("B20", "requests a second, hour 24 / hour 2", last.iops / second.iops, 0.98, ""),
        Row::at_most(
            "B20",
            "memory of nodes, hour 24 against 2",
            grown(second.node_bytes, last.node_bytes),
            2.0,
            "%",
        ),
        Row::at_most(
            "B20",
            "memory of the whole process, hour 24 against 2",
            grown(second.resident_kib, last.resident_kib),
            2.0,
            "%",
        ),
        Row::tells("B20", "requests a second in hour 2", second.iops, ""),
        Row::tells("B20", "in the slowest hour since", least, ""),
    ]
}
