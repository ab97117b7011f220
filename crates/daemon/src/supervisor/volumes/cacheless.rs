//! Volumes whose cache is missing or fails, and nothing of which is dirty there: all of their data is on their backing devices, so they are
//! served without it, and go back to it when it comes.
//!
//! Their superblocks say *inconsistent*, durably, before the first request: what the cache holds of them is void from then on, whoever
//! opens it next. So a cache that comes back is cold for them, and a volume whose cache only is late loses that warmth: it is waited
//! for as long as for any device (`wait`). What is dirty somewhere waits for it, however long that takes.

use crate::supervisor::jobs::attach_detach::{Planned, Work};
use crate::supervisor::table::{CacheState, Table, VolumeEntry, VolumeState};
use crate::supervisor::{Phase, Supervisor};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::Verb;
use bcached_format::{BackingState, BackingSuperblock, Uuid};
use std::time::{Duration, Instant};

/// How long it may take to serve a volume without its cache, from when that is done: `ready` waits so much longer for it.
pub const MOMENT: Duration = Duration::from_secs(10);

/// A cache that cannot be had.
#[derive(Clone, Debug)]
pub struct Lack {
    /// Since when it is.
    since: Instant,
    /// What it is called, if that is known.
    name: Option<String>,
    /// The volume's superblock says that this is its set.
    set: Uuid,
    /// Why, the last time.
    why: Failure,
    /// The volume could not be attached when it came: somebody has to look.
    is_given_up: bool,
}

/// The device of a cache that cannot be had for this reason is gone, does not answer, answers with errors or is damaged. One that
/// somebody else has may be given up at any time.
pub const fn is_missing(reason: &Failure) -> bool {
    matches!(reason.kind, Kind::NotFound | Kind::TimeLimit | Kind::DeviceFails | Kind::Damaged)
}

impl Supervisor {
    /// True if a volume is to be served without its cache from now on, which is missing for this reason.
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
        // What is damaged does not come back by waiting.
        reason.kind == Kind::Damaged || lack.since.elapsed() >= entry.wait
    }

    /// Volumes that are served without their caches go back to those that are there again.
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

    /// As somebody who attaches it, but that nothing of it is kept: its section says so already.
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

    /// It could not be attached: it goes on as it is. False if it is not one that had gone without its cache.
    pub fn stays_without(&self, volume: usize) -> bool {
        let mut shared = self.shared();
        let lack = shared.table.volumes.get_mut(volume).and_then(|entry| entry.lack.as_mut());
        lack.map(|lack| lack.is_given_up = true).is_some()
    }
}

impl Table {
    /// The cache of a volume that is served without it, if that has come.
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
    /// Its cache is back, and it could not be attached.
    pub fn stays_without(&self) -> bool {
        self.lack.as_ref().is_some_and(|lack| lack.is_given_up)
    }

    /// Why it is served without the cache that it is to have, and what can be done.
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
                // It is not waited for: no device that comes back mends it.
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
