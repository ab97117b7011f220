//! Caches whose devices answer with errors when they are opened, anywhere from the superblock to the root of the index: a dying SSD, or
//! one whose cable is loose. They are tried again, ever less often, and meanwhile they are as good as missing: who has nothing dirty
//! there is served without them. A cache for whose note there is no room is tried again like that; it is well, and waited for.

use super::Supervisor;
use super::returning::Absent;
use super::table::CacheState;
use crate::devices::{self, CacheDevice};
use crate::failure::{Failure, Kind};
use std::collections::BTreeMap;

/// What the loop knows of them, by cache.
#[derive(Default)]
pub struct Ailing(BTreeMap<usize, One>);

struct One {
    again: Absent,
    /// The engine that could not open the set has not ended: it says so, which must not be taken for the end of the next one.
    is_ending: bool,
}

impl Ailing {
    /// It may be tried now.
    pub fn is_due(&mut self, cache: usize) -> bool {
        self.0.get_mut(&cache).is_none_or(|one| !one.is_ending && one.again.is_due())
    }

    /// Whoever is to open it has not come to that yet.
    pub fn soon(&mut self, cache: usize) {
        if let Some(one) = self.0.get_mut(&cache) {
            one.again.soon();
        }
    }

    /// True if the engine that has ended is one that could not open its set.
    pub fn has_ended(&mut self, cache: usize) -> bool {
        self.0.get_mut(&cache).is_some_and(|one| std::mem::take(&mut one.is_ending))
    }

    /// The way to open it.
    pub fn opens(&self, cache: usize) -> fn(&str) -> Result<CacheDevice, Failure> {
        // Each close after an opening for writing wakes up udev, which reads the device.
        let looks_first = |name: &str| devices::look(name).and_then(|_| devices::open_cache(name));
        if self.0.contains_key(&cache) { looks_first } else { devices::open_cache }
    }
}

/// Nobody has to mend anything here, and whether it has passed is known only when it is tried.
const fn is_tried_again(failure: &Failure) -> bool {
    matches!(failure.kind, Kind::DeviceFails | Kind::NoteRoom)
}

/// The same, with what is done about it. Who serves the devices of the command line does nothing: nobody else may say this.
fn with_promise(failure: Failure) -> Failure {
    let again = "it is tried again, ever less often";
    let next = failure.next.as_ref().map_or_else(|| again.to_owned(), |next| format!("{next}: {again}"));
    failure.next(next)
}

impl Supervisor {
    /// What becomes of a cache that cannot be opened for this reason.
    pub(super) fn cache_refused(&mut self, index: usize, failure: Failure) -> CacheState {
        if !is_tried_again(&failure) || self.strict {
            self.cache_is_well(index);
            return match failure.may_pass() && !self.strict {
                true => CacheState::Waiting(failure),
                false => CacheState::Failed(failure),
            };
        }
        let failure = with_promise(failure);
        let new = || One { again: Absent::since_now(), is_ending: false };
        let is_news = self.ailing.0.entry(index).or_insert_with(new).again.refused(&failure);
        let entry = &mut self.shared().table.caches[index];
        entry.trouble = Some(failure.clone());
        entry.wait_logged &= !is_news;
        CacheState::Waiting(failure)
    }

    /// The engine of a cache could not open its set.
    pub(super) fn set_refused(&mut self, index: usize, failure: Failure) {
        let state = match is_tried_again(&failure) {
            true => self.cache_refused(index, failure),
            false => {
                self.cache_is_well(index);
                CacheState::Failed(failure)
            }
        };
        if let Some(one) = self.ailing.0.get_mut(&index) {
            one.is_ending = true;
        }
        self.shared().table.set_cache(index, state);
    }

    /// Its device answers, or has another trouble now.
    pub(super) fn cache_is_well(&mut self, index: usize) {
        self.ailing.0.remove(&index);
        if let Some(entry) = self.shared().table.caches.get_mut(index) {
            entry.trouble = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CommandLine;
    use std::path::PathBuf;

    /// `serve --cache .. --backing ..` ended with the promise to try it again.
    #[test]
    fn only_what_is_tried_again_is_said_to_be() {
        let refused = |strict| {
            let config = crate::supervisor::tests::config(&[]);
            let mut supervisor =
                Supervisor::new(CommandLine::default(), config, PathBuf::from("/nonexistent"));
            supervisor.strict = strict;
            let failure = Failure::new(Kind::NoteRoom, "no room").next("make room there");
            match supervisor.cache_refused(0, failure) {
                CacheState::Waiting(failure) | CacheState::Failed(failure) => failure.to_string(),
                _ => String::new(),
            }
        };
        assert_eq!(refused(true), "no room; make room there");
        assert_eq!(refused(false), "no room; make room there: it is tried again, ever less often");
    }
}
