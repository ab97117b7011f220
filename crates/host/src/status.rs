//! The status of a host: that of its set, with all volumes wherever they are.

use crate::Host;
use crate::host::{AwayVolume, HostState};
use bcached_engine::{Latencies, Status, TimedOutVolume, VolumeId, VolumeInfo};
use bcached_env::Time;

impl Host {
    /// Returns a snapshot. While the set is closed, it shows the set as it was.
    #[must_use]
    pub fn status(&self) -> Status {
        let (main, cacheless) = self.with(|state| (state.main.clone(), state.cacheless.clone()));
        let of_cacheless = cacheless.map(|(cacheless, _)| cacheless.status());
        let of_main = main.map(|main| main.status());
        let now = self.inner().env.now();
        self.with(|state| {
            let before = || state.before.as_deref().expect("the status was kept at closing").clone();
            let mut status = of_main.unwrap_or_else(before);
            // Volumes that are away are served, or soon will be.
            status.unserved.retain(|left| !state.away.values().any(|away| away.info.uuid == left.uuid));
            for (id, away) in &state.away {
                let (mut info, latencies) = shown(*id, away, of_cacheless.as_ref());
                // Its device may have gone or come back since the volume left.
                info.backing_health = Some(self.inner().env.disk(away.disk).health());
                put(&mut status, (info, latencies));
            }
            status.without_backing = state.absences.gone().collect();
            status.waited_out =
                status.volumes.iter().filter_map(|info| waited_out(state, info, now)).collect();
            status
        })
    }
}

/// Returns a volume that is away, as it is in the cacheless set, or as it was when it left.
fn shown(id: VolumeId, away: &AwayVolume, of_cacheless: Option<&Status>) -> (VolumeInfo, Latencies) {
    let is_cacheless = of_cacheless.filter(|_| away.is_cacheless).and_then(|status| {
        let at = status.volumes.iter().position(|volume| volume.id == id)?;
        Some((status.volumes[at].clone(), status.latencies.get(at)?.clone()))
    });
    is_cacheless.unwrap_or_else(|| (away.info.clone(), away.latencies.clone()))
}

fn put(status: &mut Status, (info, latencies): (VolumeInfo, Latencies)) {
    match status.volumes.iter().position(|volume| volume.id == info.id) {
        Some(at) => (status.volumes[at], status.latencies[at]) = (info, latencies),
        None => {
            status.volumes.push(info);
            status.latencies.push(latencies);
        }
    }
}

/// Returns the devices of the volume for which requests have waited up to their time limit without
/// success.
fn waited_out(state: &HostState, info: &VolumeInfo, now: Time) -> Option<TimedOutVolume> {
    let is_over = |since: Time| now >= since + info.options.freeze_timeout;
    let cache = state.waiting_since(info.id).is_some_and(is_over);
    let backing = state.absences.missed_since(info.id).is_some_and(is_over);
    (cache || backing).then_some(TimedOutVolume { volume: info.id, cache, backing })
}
