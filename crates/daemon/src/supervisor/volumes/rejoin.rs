//! Tracks the volumes that have to come to a new cache device after a dead one was replaced.
//! Nothing can be moved off the dead device, so the volumes attach by themselves when the new set
//! is open. The client that asked for the replacement waits until they have, and learns what that
//! waits for.
//!
//! Nothing here changes a volume. A wait that is cancelled, or cut off by the end of the daemon,
//! leaves nothing half done, and the same command waits again. Each device has its `wait`, as at a
//! start. The first look at a device and the opening of a set are waited for without limit.

use crate::supervisor::Supervisor;
use crate::supervisor::jobs::{Job, JobTarget};
use crate::supervisor::table::{CacheState, Table, VolumeEntry, VolumeState};
use crate::supervisor::volumes::without_cache;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobState};
use std::time::Duration;

/// How far the volumes are.
#[derive(Debug, PartialEq, Eq)]
pub enum RejoinState {
    /// All that can come have come.
    Done,
    /// Waits for this, as a clause.
    Waiting(String),
    /// This permanently keeps a volume from coming.
    Failed(Failure),
}

impl Supervisor {
    /// Begins a job that waits for the volumes that come to the cache.
    pub fn begin_arrival(&self, cache: usize, name: &str) -> JobReport {
        let mut shown = JobReport::new(JobKind::Replace, name.to_owned(), JobState::Running);
        shown.id = Some(self.shared().jobs.add(Job::new(&shown, JobTarget::Arrivals(cache), None)));
        shown
    }

    /// The same for a repeated request, if anything is still on its way.
    pub fn wait_again(&self, name: &str) -> Result<JobReport, Failure> {
        let cache = self.cache_called_so(name)?;
        let running = self.shared().jobs.arriving(cache);
        if let Some(number) = running {
            return crate::supervisor::jobs::api::show(&self.shared, number);
        }
        if self.shared().table.arrival_after_dead(cache) == RejoinState::Done {
            return Ok(JobReport {
                already: true,
                ..JobReport::new(JobKind::Replace, name.to_owned(), JobState::Done)
            });
        }
        Ok(self.begin_arrival(cache, name))
    }

    /// Ends the waits that are over, successfully or not.
    pub fn look_after_arrivals(&self) {
        let all = self.shared().jobs.arrivals();
        for (number, cache, waited) in all {
            let arrival = self.shared().table.arrival(cache, waited);
            match arrival {
                RejoinState::Waiting(what) => self.shared().jobs.block(number, Some(what)),
                RejoinState::Done => self.end_job(number, Ok(())),
                RejoinState::Failed(failure) => self.end_job(number, Err(failure)),
            }
        }
        let come = self.shared().table.have_all_come();
        for (cache, name) in come {
            self.shared().table.caches[cache].is_awaited = false;
            if let Err(failure) = self.keep_awaited(&name, false) {
                tracing::error!(event = "set-not-taken-back", "{failure}");
            }
        }
    }

    /// Cancels a wait.
    pub fn stop_waiting(&self, number: u64) {
        let failure = Failure::new(Kind::Cancelled, "the wait for its volumes was cancelled")
            .why(
                "the replacement is not undone, and its volumes attach to the new device as soon as they can",
            )
            .next("`bcached status` shows them; the same command waits again");
        self.end_job(number, Err(failure));
    }
}

impl Table {
    /// Which of the cache's volumes have not come to it, after waiting for `waited`.
    pub fn arrival(&self, cache: usize, waited: Duration) -> RejoinState {
        let entry = &self.caches[cache];
        let name = entry.display_name();
        let not_all =
            || format!("{name} is on a new device, but not all of its volumes are attached to that");
        if !entry.is_real() || entry.former_of.is_some() {
            let failure = Failure::new(Kind::Cancelled, not_all());
            return RejoinState::Failed(failure.why("it was released or replaced during the wait"));
        }
        let volumes: Vec<_> = self.coming_to(cache).collect();
        let patience = volumes.iter().map(|entry| entry.wait).max().unwrap_or(bcached_config::WAIT_DEFAULT);
        let is_late = waited >= patience.saturating_add(without_cache::MOMENT);
        let late = |why: String| {
            Failure::new(Kind::TimeLimit, not_all()).why(why).next(
                "the rest follows automatically; `bcached status` shows it, and the same command waits again",
            )
        };
        match &entry.state {
            CacheState::Open { .. } => {}
            CacheState::Failed(failure) => {
                return RejoinState::Failed(of_device(failure));
            }
            CacheState::Waiting(failure) if failure.kind != Kind::NotLooked => {
                let waits = format!("the new device is not served: {failure}");
                return if is_late { RejoinState::Failed(late(waits)) } else { RejoinState::Waiting(waits) };
            }
            _ => return RejoinState::Waiting("the new device is not open yet".to_owned()),
        }
        let all: Vec<_> = volumes.iter().map(|entry| entry.arrival(cache)).collect();
        // As long as one can still come, wait for it, even if another cannot.
        let waits = all.iter().find_map(|one| match one {
            RejoinState::Waiting(what) => Some(what.clone()),
            _ => None,
        });
        match waits {
            Some(what) if is_late => RejoinState::Failed(late(what)),
            Some(what) => RejoinState::Waiting(what),
            None => all.into_iter().find(|one| *one != RejoinState::Done).unwrap_or(RejoinState::Done),
        }
    }

    /// The same for a cache that replaced a dead one. Any other cache waits for no volume.
    pub fn arrival_after_dead(&self, cache: usize) -> RejoinState {
        match self.caches[cache].is_awaited {
            true => self.arrival(cache, Duration::ZERO),
            false => RejoinState::Done,
        }
    }

    /// Caches that no longer have volumes to wait for, with their names.
    fn have_all_come(&self) -> Vec<(usize, String)> {
        let awaited = self.lasting_caches().filter(|(_, cache)| cache.is_awaited);
        let come = awaited.filter(|(index, _)| self.arrival(*index, Duration::ZERO) == RejoinState::Done);
        come.map(|(index, cache)| (index, cache.display_name().to_owned())).collect()
    }

    /// The volumes that are to be on the cache, without stopped and removed ones.
    fn coming_to(&self, cache: usize) -> impl Iterator<Item = &VolumeEntry> {
        let all = self.volumes.iter().filter(|entry| entry.backing.is_some());
        all.filter(|entry| !entry.is_gone() && !entry.is_leaving())
            .filter(move |entry| self.is_meant(entry, cache))
    }
}

/// The failure: the new device cannot be used.
fn of_device(failure: &Failure) -> Failure {
    let next = failure.next.as_deref().unwrap_or("`bcached status` shows its state");
    Failure::new(failure.kind, "the new device is not served").why(failure.reason()).next(next)
}

impl VolumeEntry {
    /// How far the volume is on its way to the cache.
    fn arrival(&self, cache: usize) -> RejoinState {
        let name = self.display_name();
        match &self.state {
            VolumeState::Served(_) if self.cache == Some(cache) => RejoinState::Done,
            VolumeState::Served(_) if self.stays_without() => RejoinState::Failed(
                Failure::new(Kind::Io, format!("{name} could not be attached to the new device"))
                    .why("it is served without a cache; the log says why")
                    .next(format!("`bcached attach {name}` tries again")),
            ),
            VolumeState::Served(_) if self.missing_cache.is_some() => {
                RejoinState::Waiting(format!("{name} is still served without a cache"))
            }
            // It is on a cache that its section does not name.
            VolumeState::Served(_) => RejoinState::Done,
            VolumeState::Attaching => RejoinState::Waiting(format!("the new cache is attaching {name}")),
            VolumeState::Waiting(why) => RejoinState::Waiting(format!("{name} is not served: {why}")),
            VolumeState::Failed(why) => {
                let next = why.next.as_deref().unwrap_or("`bcached status` shows its state");
                let what = format!("{name} is not attached to the new device");
                RejoinState::Failed(Failure::new(why.kind, what).why(why.reason()).next(next))
            }
            VolumeState::Releasing | VolumeState::Removed | VolumeState::Stopped => RejoinState::Done,
        }
    }
}
