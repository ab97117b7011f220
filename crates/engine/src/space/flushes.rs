//! Flushes of the cache device: numbered in the order in which they begin, one at a time.
//!
//! Callers that arrive during a flush wait for it and then run the next one, which serves all of
//! them. Two flushes never overlap: if both fail, the kernel may report the failure to only one of
//! them. After the first failure, no later success proves anything.

use bcached_env::IoError;

/// The flushes since the set was opened.
#[derive(Clone, Copy, Default, Debug)]
pub struct CacheFlushes {
    /// Number of the newest flush that has begun; 0: none.
    begun: u64,
    /// The newest flush is still in flight.
    running: bool,
    /// Number of the newest flush that succeeded before any failed.
    succeeded: u64,
    /// The first failure: the writes that flush covered may be lost.
    failure: Option<IoError>,
}

/// What a caller that needs a flush has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheFlushAction {
    /// Nothing: a flush that began after the request has succeeded.
    Done,
    /// Nothing: a flush has failed.
    Failed(IoError),
    /// Wait until the flush in flight has ended.
    Wait,
    /// Run a flush: it counts as begun.
    Run,
}

/// Identifies the flush in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunningFlush(u64);

impl CacheFlushes {
    /// Number of the newest flush that has begun. Only later flushes cover data written from now
    /// on.
    #[must_use]
    pub const fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns whether a flush has succeeded before any failed.
    #[must_use]
    pub const fn have_succeeded(&self) -> bool {
        self.succeeded > 0
    }

    /// Number of the first flush that covers everything written so far.
    #[must_use]
    pub const fn wanted(&self) -> u64 {
        self.begun + 1
    }

    /// Says what to do for flush `wanted` or a later one.
    pub const fn turn(&mut self, wanted: u64) -> CacheFlushAction {
        if let Some(failure) = self.failure {
            return CacheFlushAction::Failed(failure);
        }
        if self.succeeded >= wanted {
            return CacheFlushAction::Done;
        }
        if self.running {
            return CacheFlushAction::Wait;
        }
        self.running = true;
        self.begun += 1;
        CacheFlushAction::Run
    }

    /// Records the end of the flush in flight. After a failure no flush runs any more.
    pub fn ends(&mut self, result: Result<(), IoError>) {
        assert!(self.running, "a flush that ends has begun");
        self.running = false;
        match result {
            Ok(()) => self.succeeded = self.begun,
            Err(error) => self.failure = Some(error),
        }
    }

    /// Returns true if a flush is in flight or has failed. Otherwise reads return what was written.
    #[must_use]
    pub const fn are_in_doubt(&self) -> bool {
        self.running || self.failure.is_some()
    }

    /// Returns true if data written while flush `number` was the newest may be lost. Data that was
    /// there when the set was opened (0) is safe.
    #[must_use]
    pub fn may_have_dropped(&self, number: u64) -> bool {
        self.failure.is_some() && number >= self.succeeded.max(1)
    }

    /// Returns the flush in flight if it may lose data written while flush `number` was the newest.
    /// Whether it does is unknown until it ends.
    #[must_use]
    pub fn may_be_dropping(&self, number: u64) -> Option<RunningFlush> {
        (self.running && number >= self.succeeded.max(1)).then_some(RunningFlush(self.begun))
    }

    /// Returns whether that flush is still in flight.
    #[must_use]
    pub fn runs(&self, flush: RunningFlush) -> bool {
        self.running && self.begun == flush.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_env::{DiskId, IoErrorKind};

    fn failure() -> IoError {
        IoError { kind: IoErrorKind::Io, disk: DiskId(0), sector: 0 }
    }

    #[test]
    fn one_flush_serves_all_who_waited_for_it() {
        let mut flushes = CacheFlushes::default();
        let first = flushes.wanted();
        assert_eq!(flushes.turn(first), CacheFlushAction::Run);
        let (second, third) = (flushes.wanted(), flushes.wanted());
        assert_eq!(
            (flushes.turn(second), flushes.turn(third)),
            (CacheFlushAction::Wait, CacheFlushAction::Wait)
        );
        flushes.ends(Ok(()));
        assert_eq!(
            (flushes.turn(first), flushes.turn(second)),
            (CacheFlushAction::Done, CacheFlushAction::Run)
        );
        assert_eq!(flushes.turn(third), CacheFlushAction::Wait);
        flushes.ends(Ok(()));
        assert_eq!(flushes.turn(third), CacheFlushAction::Done);
    }

    #[test]
    fn what_a_running_flush_is_about_is_not_known_until_it_ends() {
        let mut flushes = CacheFlushes::default();
        for _ in 0..2 {
            assert_eq!(flushes.may_be_dropping(flushes.begun()), None);
            assert_eq!(flushes.turn(flushes.wanted()), CacheFlushAction::Run);
            flushes.ends(Ok(()));
        }
        let (proven, written) = (flushes.begun() - 1, flushes.begun());
        assert_eq!(flushes.turn(flushes.wanted()), CacheFlushAction::Run);
        assert_eq!(flushes.may_be_dropping(0), None, "it was there when the set was opened");
        assert_eq!(flushes.may_be_dropping(proven), None);
        let running = flushes.may_be_dropping(written).expect("it is not proven");
        assert!(flushes.runs(running));
        flushes.ends(Ok(()));
        assert!(!flushes.runs(running) && flushes.may_be_dropping(written).is_none());
        assert_eq!(flushes.turn(flushes.wanted()), CacheFlushAction::Run);
        assert!(!flushes.runs(running), "another one");
    }

    #[test]
    fn after_a_failure_no_success_counts() {
        let mut flushes = CacheFlushes::default();
        let wanted = flushes.wanted();
        assert_eq!(flushes.turn(wanted), CacheFlushAction::Run);
        let written = flushes.begun();
        flushes.ends(Err(failure()));
        assert_eq!(flushes.turn(wanted), CacheFlushAction::Failed(failure()));
        assert!(flushes.may_have_dropped(written) && !flushes.may_have_dropped(0));
    }
}
