//! Decides, for caches and volumes, what a refusal means for later attempts: [`RetryClass`].
//!
//! Devices that answer with errors when they are opened, anywhere from the superblock to the root
//! of the index (a dying SSD, a loose cable, a full file system below a file), are retried with
//! back-off. The rule differs by case:
//!
//! - A cache whose device fails counts as missing meanwhile: volumes without dirty data there are
//!   served without it.
//! - A cache that has no room for its note, or too little memory for its index because others have
//!   the rest, is retried in the same way. It is healthy, so volumes wait for it.
//! - A volume reports meanwhile why it waits, but a start does not wait for it.

use crate::engine_error::START_AGAIN;
use crate::supervisor::Supervisor;
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::volumes::reconnect::RetryState;
use bcached_control::failure::{Failure, Kind, RetryClass};
use bcached_offline::devices::{self, CacheDevice};
use std::collections::BTreeMap;

/// The retry state of caches whose devices fail, by cache.
#[derive(Default)]
pub struct CacheRetries(BTreeMap<usize, CacheRetry>);

struct CacheRetry {
    again: RetryState,
    /// The engine that could not open the set has not ended yet. Its end will be reported, and must
    /// not be mistaken for that of the next engine.
    is_ending: bool,
}

impl CacheRetries {
    /// Returns true if the cache may be tried now.
    pub fn is_due(&mut self, cache: usize) -> bool {
        self.0.get_mut(&cache).is_none_or(|one| !one.is_ending && one.again.is_due())
    }

    /// Makes the cache due at once: the last attempt did not get as far as opening it.
    pub fn soon(&mut self, cache: usize) {
        if let Some(one) = self.0.get_mut(&cache) {
            one.again.soon();
        }
    }

    /// Returns true if the engine that has ended is one that could not open its set.
    pub fn has_ended(&mut self, cache: usize) -> bool {
        self.0.get_mut(&cache).is_some_and(|one| std::mem::take(&mut one.is_ending))
    }

    /// The function that opens the cache.
    pub fn opens(&self, cache: usize) -> fn(&str) -> Result<CacheDevice, Failure> {
        // Read-only first: each close after an opening for writing wakes up udev, which reads the
        // device.
        let looks_first = |name: &str| devices::look(name).and_then(|_| devices::open_cache(name));
        if self.0.contains_key(&cache) { looks_first } else { devices::open_cache }
    }
}

/// Adds to the failure that it is retried. With devices of the command line nothing is retried, so
/// this must not be used for them.
fn with_promise(failure: Failure) -> Failure {
    let again = "bcached tries again, at growing intervals";
    let next = failure.next.as_deref().map(|next| next.strip_suffix(START_AGAIN).unwrap_or(next));
    let next = next.map_or_else(|| again.to_owned(), |next| format!("{next}; {again}"));
    failure.next(next)
}

impl Supervisor {
    /// Returns the state of a cache that cannot be opened for this reason.
    pub fn cache_refused(&mut self, index: usize, failure: Failure) -> CacheState {
        let retry_class = failure.retry_class();
        if self.strict || retry_class != RetryClass::Backoff {
            self.cache_is_well(index);
            return match retry_class == RetryClass::WhenPresent && !self.strict {
                true => CacheState::Waiting(failure),
                false => CacheState::Failed(failure),
            };
        }
        let failure = with_promise(failure);
        let new = || CacheRetry { again: RetryState::since_now(), is_ending: false };
        let is_news = self.cache_retries.0.entry(index).or_insert_with(new).again.refused(&failure);
        let entry = &mut self.shared().table.caches[index];
        entry.trouble = Some(failure.clone());
        entry.wait_logged &= !is_news;
        CacheState::Waiting(failure)
    }

    /// Returns the state of a cache whose set is too large for its share of the memory.
    pub fn refused_for_memory(&mut self, index: usize, mut failure: Failure) -> CacheState {
        // No other refusal of a set has the kind `Config`.
        if failure.kind == Kind::Config && self.is_short_of_memory(index) {
            failure.kind = Kind::Scarce;
        }
        match failure.retry_class() {
            RetryClass::Backoff => self.cache_refused(index, failure),
            // The device is present, so waiting for one would not help.
            RetryClass::WhenPresent | RetryClass::Never => {
                self.cache_is_well(index);
                CacheState::Failed(failure)
            }
        }
    }

    /// Handles an engine's failure to open its set.
    pub fn set_refused(&mut self, index: usize, failure: Failure) {
        let state = self.refused_for_memory(index, failure);
        if let Some(one) = self.cache_retries.0.get_mut(&index) {
            one.is_ending = true;
        }
        self.shared().table.set_cache(index, state);
    }

    /// Returns the state of a volume that its device or its engine refuses for this reason.
    pub fn volume_refused(&self, index: usize, failure: Failure) -> VolumeState {
        let again = &mut self.shared().table.volumes[index].again;
        match failure.retry_class() {
            RetryClass::Backoff if !self.strict => {
                let failure = with_promise(failure);
                // The change of state logs it.
                let _is_news = again.get_or_insert_with(RetryState::since_now).refused(&failure);
                VolumeState::Waiting(failure)
            }
            RetryClass::WhenPresent if !self.strict => {
                *again = None;
                VolumeState::Waiting(failure)
            }
            _ => {
                *again = None;
                VolumeState::Failed(failure)
            }
        }
    }

    /// Clears the retry state: the cache's device answers, or has another problem now.
    pub fn cache_is_well(&mut self, index: usize) {
        self.cache_retries.0.remove(&index);
        if let Some(entry) = self.shared().table.caches.get_mut(index) {
            entry.trouble = None;
        }
    }
}

impl VolumeEntry {
    /// Returns true if the volume may be tried now.
    pub fn is_due(&mut self) -> bool {
        self.again.as_mut().is_none_or(RetryState::is_due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_config::CommandLine;
    use bcached_engine::{Error, ErrorContext};
    use bcached_env::{DiskId, IoError, IoErrorKind};

    /// Regression: `serve --cache .. --backing ..` ended with the promise to retry.
    #[test]
    fn only_what_is_tried_again_is_said_to_be() {
        let refused = |strict| {
            let config = crate::supervisor::tests::config(&[]);
            let mut supervisor =
                Supervisor::new(CommandLine::default(), crate::supervisor::SupervisorParameters::of(config));
            supervisor.strict = strict;
            let failure = Failure::new(Kind::Scarce, "no room").next("make room there");
            match supervisor.cache_refused(0, failure) {
                CacheState::Waiting(failure) | CacheState::Failed(failure) => failure.to_string(),
                _ => String::new(),
            }
        };
        assert_eq!(refused(true), "no room; make room there");
        assert_eq!(refused(false), "no room; make room there; bcached tries again, at growing intervals");
    }

    /// Regression: errors that an engine met while taking up a volume were final, and so were
    /// errors from looking at its device.
    #[test]
    fn one_rule_says_what_a_refusal_means_for_a_volume() {
        let config = crate::supervisor::tests::config(&["one"]);
        let mut supervisor =
            Supervisor::new(CommandLine::default(), crate::supervisor::SupervisorParameters::of(config));
        let meets = |supervisor: &Supervisor, doing, kind| {
            let source = IoError { kind, disk: DiskId(0), sector: 8 };
            supervisor.volume_added(0, Err(Error::Io { doing, source }));
            let mut shared = supervisor.shared();
            let entry = &mut shared.table.volumes[0];
            (matches!(entry.state, VolumeState::Waiting(_)), entry.again.is_some(), entry.is_due())
        };
        let (full, ill) = (IoErrorKind::NoSpace, IoErrorKind::Io);
        assert_eq!(
            meets(&supervisor, ErrorContext::Backing, ill),
            (true, true, false),
            "it is left alone for a while"
        );
        assert_eq!(meets(&supervisor, ErrorContext::Uuids, full), (true, true, false));
        assert_eq!(
            meets(&supervisor, ErrorContext::CacheFlush, ill),
            (false, false, true),
            "nobody knows what is gone"
        );
        let gone = supervisor.volume_refused(0, Failure::new(Kind::NotFound, "it is not there"));
        assert!(
            matches!(gone, VolumeState::Waiting(_)) && supervisor.shared().table.volumes[0].again.is_none()
        );
        supervisor.strict = true;
        assert_eq!(
            meets(&supervisor, ErrorContext::Backing, ill),
            (false, false, true),
            "all of a command line is meant now"
        );
    }
}
