//! Tells the front ends about volumes that are not served, for clients that connect too early. Such
//! a client waits as long as a start waits for the volume (`wait`). After that, or if the volume is
//! refused, it gets the reason.

use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::{Phase, Supervisor};
use bcached_config::{FlashVolume, WAIT_DEFAULT};
use bcached_port::VolumeAbsence;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Since when volumes are waited for, by name.
#[derive(Default)]
pub struct AwaitedVolumes(BTreeMap<String, Instant>);

impl AwaitedVolumes {
    /// How long the volume has been waited for, since the first call.
    fn lasts(&mut self, name: &str) -> Duration {
        self.0.entry(name.to_owned()).or_insert_with(Instant::now).elapsed()
    }
}

impl Supervisor {
    /// Tells the front ends what is to be expected of volumes that are not served.
    pub fn tell_absent(&mut self) {
        let (mut absent, are_unnamed) = {
            let shared = self.shared();
            let table = &shared.table;
            let opens = table.caches.iter().any(|cache| matches!(cache.state, CacheState::Opening { .. }));
            let absent: Vec<_> = table
                .volumes
                .iter()
                .filter_map(|entry| Some((entry.display_name().to_owned(), state(entry, opens)?)))
                .collect();
            // Volumes of the command line get their names from their superblocks.
            let is_unnamed = |entry: &VolumeEntry| {
                entry.name.is_none()
                    && matches!(entry.state, VolumeState::Waiting(_) | VolumeState::Attaching)
            };
            let starts = shared.phase == Phase::Starting;
            (absent, self.strict && starts && table.volumes.iter().any(is_unnamed))
        };
        absent.extend(self.absent_flash());
        self.awaited.0.retain(|name, _| absent.iter().any(|(absent, _)| absent == name));
        for (name, AbsentVolume { why, coming }) in absent {
            let wait = coming.and_then(|coming| {
                let is_over = self.awaited.lasts(&name) >= coming.wait && !coming.is_sure;
                (!is_over).then_some(coming.wait)
            });
            self.exports.is_absent(&name, VolumeAbsence { why, wait });
        }
        self.exports.expect_names(are_unnamed.then_some(WAIT_DEFAULT));
    }

    /// Configured flash-only volumes that no cache has brought yet.
    fn absent_flash(&self) -> Vec<(String, AbsentVolume)> {
        let shared = self.shared();
        let is_known = |uuid| shared.table.volumes.iter().any(|entry| entry.uuid == Some(uuid));
        let is_settled =
            |state: &CacheState| !matches!(state, CacheState::Waiting(_) | CacheState::Opening { .. });
        let all_settled = shared.table.caches.iter().all(|cache| is_settled(&cache.state));
        let opens = shared.table.caches.iter().any(|cache| matches!(cache.state, CacheState::Opening { .. }));
        let missing = self.config.flash.iter().filter(|flash| flash.served && !is_known(flash.uuid));
        let state = |flash: &FlashVolume| AbsentVolume {
            why: "it is a flash-only volume, and no open cache holds it".to_owned(),
            coming: (!all_settled).then_some(ExpectedArrival { wait: flash.wait, is_sure: opens }),
        };
        missing.map(|flash| (flash.name.clone(), state(flash))).collect()
    }
}

/// What clients of a volume that is not served are told.
struct AbsentVolume {
    why: String,
    coming: Option<ExpectedArrival>,
}

/// The volume may come by itself.
struct ExpectedArrival {
    /// How long a client waits for it, and how long it is waited for unless something is under way.
    wait: Duration,
    /// A device or a cache is being opened.
    is_sure: bool,
}

/// The state of a volume; `None` if it is served, or is no volume any more. `opens`: a cache is
/// being opened.
fn state(entry: &VolumeEntry, opens: bool) -> Option<AbsentVolume> {
    let coming =
        |is_sure| Some(ExpectedArrival { wait: entry.wait, is_sure }).filter(|_| entry.again.is_none());
    let (why, coming) = match &entry.state {
        VolumeState::Served(_) | VolumeState::Removed | VolumeState::Releasing => return None,
        VolumeState::Attaching => ("it is being attached".to_owned(), coming(true)),
        VolumeState::Waiting(failure) => (failure.to_string(), coming(opens)),
        VolumeState::Failed(failure) => (failure.to_string(), None),
        VolumeState::Stopped => ("it was stopped on request".to_owned(), None),
    };
    Some(AbsentVolume { why, coming })
}
