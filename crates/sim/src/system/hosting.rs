//! Chooses how requests are handled while a device fails, and how long the host waits, from the
//! sizes and options of a run. (None of this is drawn, so that a seed keeps drawing the same
//! workload.)

use super::Geometry;
use crate::digest::mix;
use bcached_engine::{ErrorPolicy, VolumeOptions};
use bcached_host::Limits;
use std::time::Duration;

/// Returns how many requests a host works on at once: few, so that some wait, or more than are ever
/// in flight.
pub fn room(geometry: &Geometry) -> usize {
    [3, 1024, 1024, 8][pick(geometry, 3)]
}

/// Sets the failure policies of a set's volumes.
pub fn tell(geometry: &Geometry, options: &mut VolumeOptions) {
    const POLICIES: [ErrorPolicy; 4] =
        [ErrorPolicy::Freeze, ErrorPolicy::Freeze, ErrorPolicy::ReadOnly, ErrorPolicy::Fail];
    options.on_cache_error = POLICIES[pick(geometry, 0)];
    options.on_backing_error = POLICIES[pick(geometry, 1)];
    // Shorter than clients wait for the next answer of any kind.
    options.freeze_timeout = Duration::from_millis([10, 300, 2000, 8000][pick(geometry, 2)]);
}

/// Returns the time limits of the host.
pub fn limits(geometry: &Geometry) -> Limits {
    let milliseconds = |choices: [u64; 4], which| Duration::from_millis(choices[pick(geometry, which)]);
    Limits {
        hangs: milliseconds([5, 50, 2000, 2000], 4),
        quiesce: milliseconds([2, 20, 200, 5000], 5),
        exchange: milliseconds([5, 50, 500, 10_000], 6),
        try_again: milliseconds([1, 10, 100, 1000], 7),
        pause_min: milliseconds([1, 1, 20, 1000], 8),
        pause_max: milliseconds([20, 100, 1000, 5000], 9),
        works_after: milliseconds([10, 100, 1000, 60_000], 10),
        waiting_of_volume: [1, 2, 512, 512][pick(geometry, 11)],
        waiting_of_all: [2, 3, 4096, 4096][pick(geometry, 12)],
    }
}

/// Picks one of four values, independently for each kind of choice and each run.
fn pick(geometry: &Geometry, which: u64) -> usize {
    let Geometry { buckets, volumes, note_records, tuning, .. } = geometry;
    let set = &tuning.set;
    let run = [
        *buckets,
        volumes.iter().sum(),
        *note_records as u64,
        set.journal_delay_ms,
        set.leaf_delay_ms,
        set.node_budget_mib,
        tuning.devices.first_mode,
        tuning.devices.cache_latency_us,
        which,
    ];
    (mix(&run) % 4) as usize
}
