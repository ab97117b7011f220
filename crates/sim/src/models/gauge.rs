//! Measures a device alone under a closed loop: a fixed number of commands in flight, each replaced
//! as soon as it completes.

use super::latencies::Latencies;
use super::mechanism::{CommandKind, DeviceCommand, TimingModel};
use bcached_env::rng::Rng;
use std::collections::BTreeMap;

/// The result of a measurement.
#[derive(Debug)]
pub struct Measurement {
    /// Virtual nanoseconds from the first submission to the last completion.
    pub nanoseconds: u64,
    /// Latency of each command.
    pub latencies: Latencies,
}

impl Measurement {
    /// Returns commands per second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    pub fn iops(&self) -> f64 {
        self.latencies.count() as f64 * 1e9 / self.nanoseconds as f64
    }
}

/// Submits `count` commands to `device` from virtual time `start` on, with `depth` in flight.
/// `draw` returns the kind, first sector and length of the n-th command.
///
/// # Panics
/// If the device never answers.
pub fn closed_loop(
    device: &mut dyn TimingModel,
    start: u64,
    (depth, count): (u64, u64),
    mut draw: impl FnMut(u64) -> (CommandKind, u64, u64),
) -> Measurement {
    let mut now = start;
    let mut begun = 0;
    let mut since = BTreeMap::new();
    let mut latencies = Latencies::default();
    let mut ended = Vec::new();
    while latencies.count() < count {
        while begun < count && (since.len() as u64) < depth {
            let (kind, sector, sectors) = draw(begun);
            device.submit(now, DeviceCommand { number: begun, kind, sector, sectors });
            since.insert(begun, now);
            begun += 1;
        }
        now = device.next().expect("a device that has commands does something");
        device.advance(now, &mut ended);
        for number in ended.drain(..) {
            let began = since.remove(&number).expect("each command ends once");
            latencies.add(now - began);
        }
    }
    Measurement { nanoseconds: now - start, latencies }
}

/// Draws commands of `sectors` sectors at random places below `region` sectors, aligned to their
/// length.
pub fn random(
    kind: CommandKind,
    region: u64,
    sectors: u64,
    seed: u64,
) -> impl FnMut(u64) -> (CommandKind, u64, u64) {
    let mut rng = Rng::new(seed);
    move |_| (kind, rng.below(region / sectors) * sectors, sectors)
}

/// Draws commands of `sectors` sectors, one after the other from sector 0 on.
pub fn sequential(kind: CommandKind, sectors: u64) -> impl FnMut(u64) -> (CommandKind, u64, u64) {
    move |number| (kind, number * sectors, sectors)
}

/// Draws writes at random places below `region` sectors, each followed by a flush.
pub fn fsynced(region: u64, sectors: u64, seed: u64) -> impl FnMut(u64) -> (CommandKind, u64, u64) {
    let mut write = random(CommandKind::Write, region, sectors, seed);
    move |number| if number % 2 == 0 { write(number) } else { (CommandKind::Flush, 0, 0) }
}
