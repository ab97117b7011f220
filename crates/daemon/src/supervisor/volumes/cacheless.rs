//! Serves volumes without their cache if that is missing or fails and has none of their dirty data.
//! All of their data is on their backing devices. They go back to the cache when it returns.
//!
//! Before the first request their superblocks durably say *inconsistent*: their data in the cache
//! is invalid from then on, whichever program opens it next. So a cache that comes back is cold for
//! them, and a cache that is only late loses its contents for the volume. It is therefore waited
//! for as long as any device (`wait`). A volume with dirty data in a cache waits for that cache
//! without limit.

use crate::supervisor::jobs::attach_detach::{Planned, Work};
use crate::supervisor::table::{CacheState, Table, VolumeEntry, VolumeState};
use crate::supervisor::{Phase, Supervisor};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::Verb;
use bcached_format::{BackingState, BackingSuperblock, Uuid};
use std::time::{Duration, Instant};

/// How long it may take, from the decision, to serve a volume without its cache. `ready` waits this
/// much longer for it.
pub const MOMENT: Duration = Duration::from_secs(10);

/// A cache that is unavailable.
#[derive(Clone, Debug)]
pub struct Lack {
    /// Since when.
    since: Instant,
    /// Its name, if known.
    name: Option<String>,
    /// Its set, as named by the volume's superblock.
    set: Uuid,
    /// The latest reason.
    why: Failure,
    /// The cache came back and the volume could not be attached; an administrator has to act.
    is_given_up: bool,
}

/// Returns true if the reason means that the cache's device is gone, does not answer, answers with
/// errors or is damaged. A device in use is not missing: it may be released at any time.
pub const fn is_missing(reason: &Failure) -> bool {
    matches!(reason.kind, Kind::NotFound | Kind::TimeLimit | Kind::DeviceFails | Kind::Damaged)
}

impl Supervisor {
    /// Returns true if the volume is to be served without its cache now, which is missing for this
    /// reason.
    pub fn goes_without(
        &self,
        index: usize,
        name: Option<&str>,
        superblock: &BackingSuperblock,
        reason: &Failure,
    ) -> bool {
        self.shared().table.volumes[index].missed_set = Some(superblock.set_uuid());
        if self.strict || !is_missing(reason) || superblock.state() == BackingState::Dirty {
            self.shared().table.volumes[index].lack = None;
            return false;
        }
        let mut shared = self.shared();
        let since = if shared.phase == Phase::Starting { self.started } else { Instant::now() };
        let entry = &mut shared.table.volumes[index];
        let (name, set) = (name.map(str::to_owned), superblock.set_uuid());
        let new = || Lack { since, name, set, why: reason.clone(), is_given_up: false };
        let lack = entry.lack.get_or_insert_with(new);
        lack.why = reason.clone();
        // Waiting does not repair a damaged cache.
        reason.kind == Kind::Damaged || lack.since.elapsed() >= entry.wait
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
        let (engine, now) = self.engine_and_info(&entry, Verb::Attach)?;
        self.check_blocks(entry.display_name(), &now, cache)?;
        let mut planned = Planned::nothing(Verb::Attach, entry.display_name(), Some(engine));
        planned.work = Some(Work::MovesTo(cache));
        let begun = self.carry_out(volume, Verb::Attach, planned)?;
        let (name, number) = (entry.display_name(), begun.id.unwrap_or_default());
        tracing::info!(event = "job-begun", "{name}: its cache is back: it is attached (job {number})");
        Ok(())
    }

    /// Leaves the volume without its cache after a failed attach. Returns false if it had not gone
    /// without it.
    pub fn stays_without(&self, volume: usize) -> bool {
        let mut shared = self.shared();
        let lack = shared.table.volumes.get_mut(volume).and_then(|entry| entry.lack.as_mut());
        lack.map(|lack| lack.is_given_up = true).is_some()
    }
}

impl Table {
    /// The cache of a volume that is served without it, if the cache is back.
    fn cache_is_back(&self, entry: &VolumeEntry) -> Option<usize> {
        let lack = entry.lack.as_ref().filter(|lack| !lack.is_given_up)?;
        let is_without = matches!(&entry.state, VolumeState::Served(info) if !info.attached);
        if !is_without || entry.wanted_cache.as_deref() == Some(NO_CACHE) {
            return None;
        }
        let is_only = self.lasting_caches().count() == 1;
        let mut caches = self.lasting_caches().filter_map(|(index, cache)| match &cache.state {
            CacheState::Open { set, .. } => Some((index, cache, *set)),
            _ => None,
        });
        let is_its = caches.find(|(_, cache, set)| match &entry.wanted_cache {
            Some(wanted) => cache.name.as_ref() == Some(wanted),
            None => is_only || *set == lack.set,
        });
        is_its.map(|(index, ..)| index)
    }
}

impl VolumeEntry {
    /// Returns true if its cache is back and it could not be attached.
    pub fn stays_without(&self) -> bool {
        self.lack.as_ref().is_some_and(|lack| lack.is_given_up)
    }

    /// Why it is served without its configured cache, and what can be done.
    pub fn without_cache(&self) -> Option<String> {
        let lack = self.lack.as_ref().filter(|_| self.wanted_cache.as_deref() != Some(NO_CACHE))?;
        let name = self.display_name();
        let cache = lack.name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
        let what = format!("its cache{cache} (set {})", lack.set);
        Some(if lack.is_given_up {
            format!(
                "{what} is back, and it could not be attached: the log says why; `bcached attach {name}` tries again"
            )
        } else {
            let back = |when| format!("it goes back to it when the device {when}");
            let (is, then) = match lack.why.kind {
                // It is not waited for: no returning device repairs it.
                Kind::Damaged => {
                    let next =
                        lack.why.next.as_deref().unwrap_or("`bcached check` says what is damaged there");
                    (format!("is there, and refused ({})", lack.why.reason()), next.to_owned())
                }
                Kind::DeviceFails => ("cannot be read or written".to_owned(), back("works again")),
                Kind::TimeLimit => ("does not answer".to_owned(), back("answers")),
                _ => ("is missing".to_owned(), back("is connected")),
            };
            format!(
                "{what} {is}: it is served without it, at its backing device's pace, and what that holds of it is void; {then}; \
                 `bcached replace` gives it another, `bcached detach {name}` none"
            )
        })
    }
}
