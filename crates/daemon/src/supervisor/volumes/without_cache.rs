//! Serves volumes without their cache if that is missing or fails and has none of their dirty data.
//! All of their data is on their backing devices. They go back to the cache when it returns.
//!
//! Before the first request their superblocks durably say *stale*: their data in the cache
//! is invalid from then on, whichever program opens it next. So a cache that comes back is cold for
//! them, and a cache that is only late loses its contents for the volume. It is therefore waited
//! for as long as any device (`wait`). A volume with dirty data in a cache waits for that cache
//! without limit.

use crate::supervisor::Supervisor;
use crate::supervisor::jobs::attach_detach::{JobPlan, JobWork};
use crate::supervisor::table::VolumeEntry;
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::JobKind;
use bcached_format::{BackingSuperblock, Uuid};
use std::time::Duration;

/// How long it may take, from the decision, to serve a volume without its cache. `ready` waits this
/// much longer for it.
pub const MOMENT: Duration = Duration::from_secs(10);

/// A cache that is unavailable.
#[derive(Clone, Debug)]
pub struct MissingCache {
    /// Since when, counted from the daemon's start.
    since: Duration,
    /// Its name, if known.
    name: Option<String>,
    /// Its set, as named by the volume's superblock.
    set: Uuid,
    /// The latest reason.
    why: Failure,
    /// The cache came back and the volume could not be attached; an administrator has to act.
    is_given_up: bool,
}

impl Supervisor {
    /// Notes since when a volume's cache is missing, by the latest decision, and why; or that the
    /// volume cannot do without it.
    pub fn note_lack(
        &self,
        index: usize,
        superblock: &BackingSuperblock,
        since: Option<Duration>,
        (name, why): (Option<String>, Failure),
    ) {
        let mut shared = self.shared();
        let entry = &mut shared.table.volumes[index];
        let set = superblock.set_uuid();
        entry.missed_set = Some(set);
        let Some(since) = since else {
            entry.missing_cache = None;
            return;
        };
        let new = || MissingCache { since, name, set, why: why.clone(), is_given_up: false };
        entry.missing_cache.get_or_insert_with(new).why = why.clone();
    }

    /// Attaches volumes that are served without their caches to those that have come back.
    pub fn take_caches_back(&self) {
        let back: Vec<(usize, usize)> = {
            let shared = self.shared();
            let volumes = shared.table.volumes.iter().enumerate();
            let idle = volumes.filter(|(volume, _)| shared.jobs.running(*volume).is_none());
            idle.filter_map(|(volume, entry)| Some((volume, shared.table.cache_is_back(entry)?))).collect()
        };
        for (volume, cache) in back {
            if let Err(failure) = self.goes_back(volume, cache) {
                self.stays_without(volume);
                let name = self.shared().table.volumes[volume].display_name().to_owned();
                tracing::error!(event = "job-failed", "{name}: attach: {failure}");
            }
        }
    }

    /// Attaches the volume as the `attach` command does, but writes nothing to the files: its
    /// section names the cache already.
    fn goes_back(&self, volume: usize, cache: usize) -> Result<(), Failure> {
        let entry = self.shared().table.volumes[volume].clone();
        let (engine, now) = self.engine_and_info(&entry, JobKind::Attach)?;
        self.check_blocks(entry.display_name(), &now, cache)?;
        let mut planned = JobPlan::nothing(JobKind::Attach, entry.display_name(), Some(engine));
        planned.work = Some(JobWork::MoveTo(cache));
        let begun = self.carry_out(volume, JobKind::Attach, planned)?;
        let (name, number) = (entry.display_name(), begun.id.unwrap_or_default());
        tracing::info!(event = "job-begun", "{name}: its cache is back: attaching it (job {number})");
        Ok(())
    }

    /// Leaves the volume without its cache after a failed attach. Returns false if it had not gone
    /// without it.
    pub fn stays_without(&self, volume: usize) -> bool {
        let mut shared = self.shared();
        let missing_cache =
            shared.table.volumes.get_mut(volume).and_then(|entry| entry.missing_cache.as_mut());
        missing_cache.map(|missing| missing.is_given_up = true).is_some()
    }
}

impl VolumeEntry {
    /// Since when its cache is missing, counted from the daemon's start.
    pub fn lacks_since(&self) -> Option<Duration> {
        self.missing_cache.as_ref().map(|missing| missing.since)
    }

    /// The set of the missing cache to which it is to go back.
    pub fn lacked_set(&self) -> Option<Uuid> {
        self.missing_cache.as_ref().filter(|missing| !missing.is_given_up).map(|missing| missing.set)
    }

    /// Returns true if its cache is back and it could not be attached.
    pub fn stays_without(&self) -> bool {
        self.missing_cache.as_ref().is_some_and(|missing| missing.is_given_up)
    }

    /// Why it is served without its configured cache, and what can be done.
    pub fn without_cache(&self) -> Option<String> {
        let missing =
            self.missing_cache.as_ref().filter(|_| self.wanted_cache.as_deref() != Some(NO_CACHE))?;
        let name = self.display_name();
        let cache = missing.name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
        let what = format!("its cache{cache} (set {})", missing.set);
        Some(if missing.is_given_up {
            format!(
                "{what} is back, but the volume could not be attached to it: the log says why; \
                 `bcached attach {name}` tries again"
            )
        } else {
            let back = |when| format!("the volume is attached again when the cache's device {when}");
            let (is, then) = match missing.why.kind {
                // It is not waited for: no returning device repairs it.
                Kind::Damaged => {
                    let next =
                        missing.why.next.as_deref().unwrap_or("`bcached check` shows what is damaged there");
                    (format!("is present, but refused ({})", missing.why.reason()), next.to_owned())
                }
                Kind::DeviceFails => ("cannot be read or written".to_owned(), back("works again")),
                Kind::TimeLimit => ("does not answer".to_owned(), back("answers")),
                _ => ("is missing".to_owned(), back("is connected")),
            };
            format!(
                "{what} {is}: the volume is served without it, at the speed of its backing device, and its data in \
                 that cache is no longer valid; {then}; `bcached replace` puts another device in its place, \
                 `bcached detach {name}` leaves the volume without a cache"
            )
        })
    }
}
