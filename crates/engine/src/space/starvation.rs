//! Bucket starvation that only GC can end: every bucket that could be invalidated is kept because
//! of the age of the pointers to it.
//!
//! A pass of GC may meet a transient error, which is gone at the next pass. So no waiter gives up
//! because of one failed pass, or of one that began before it asked. A task that cannot do without
//! a bucket waits until two passes in a row have failed, of which the second began after it asked,
//! *and* a search for buckets that began after it asked has found nothing. Nor does any task wait
//! forever: such a pass is due at once ([`wants_pass`]).
//!
//! [`wants_pass`]: Starvation::wants_pass

use crate::error::Error;

/// The results of searches for buckets and of passes of GC.
#[derive(Default, Debug)]
pub struct Starvation {
    /// Number of searches begun.
    searches: u64,
    /// Number of passes begun.
    passes: u64,
    /// The newest search, if it found nothing that is usable without GC. Also the number of passes
    /// begun at the first of the consecutive searches with that result.
    starved: Option<StarvedSearch>,
    /// The newest pass that has ended, if it failed, and the number of consecutive failures.
    failed: Option<FailedPasses>,
    /// Number of passes begun when a task last asked.
    asked: u64,
}

#[derive(Clone, Copy, Debug)]
struct StarvedSearch {
    search: u64,
    passes: u64,
}

#[derive(Debug)]
struct FailedPasses {
    pass: u64,
    times: u64,
    error: Error,
}

/// Number of passes that must fail in a row before a waiter gives up (invariant L7).
const TIMES_MIN: u64 = 2;

/// When a task began to wait for buckets: the numbers of searches and passes begun by then.
#[derive(Clone, Copy, Debug)]
pub struct WaitStart {
    searches: u64,
    passes: u64,
}

impl Starvation {
    /// Records the start of a search for buckets whose result can be relied on: everything released
    /// so far is durable.
    pub const fn search_begins(&mut self) {
        self.searches += 1;
    }

    /// Records the end of the search. `kept_by_age`: it found nothing, but would have if the
    /// pointers were younger.
    pub fn search_ends(&mut self, kept_by_age: bool) {
        let passes = self.starved.map_or(self.passes, |starved| starved.passes);
        self.starved = kept_by_age.then_some(StarvedSearch { search: self.searches, passes });
    }

    /// Records the start of a pass of GC.
    pub const fn pass_begins(&mut self) {
        self.passes += 1;
    }

    /// Records the end of the newest pass. `failure`: why it did not complete.
    pub fn pass_ends(&mut self, failure: Option<Error>) {
        let times = 1 + self.failed.as_ref().map_or(0, |failed| failed.times);
        self.failed = failure.map(|error| FailedPasses { pass: self.passes, times, error });
    }

    /// Returns whether a pass must begin at once, for the tasks that wait (invariant L7).
    #[must_use]
    pub fn wants_pass(&self) -> bool {
        let was_once = self.failed.as_ref().is_some_and(|failed| failed.times < TIMES_MIN);
        self.starved.is_some_and(|starved| was_once || self.passes <= starved.passes.max(self.asked))
    }

    /// Records that a task begins to wait, if need be for a pass.
    pub const fn ask(&mut self) -> WaitStart {
        self.asked = self.passes;
        self.now()
    }

    /// Returns the same without asking for a pass: for the pass itself.
    #[must_use]
    pub const fn now(&self) -> WaitStart {
        WaitStart { searches: self.searches, passes: self.passes }
    }

    /// Returns whether a search that began after `asked` has shown that only a pass can help.
    #[must_use]
    pub fn needs_pass(&self, asked: WaitStart) -> bool {
        self.starved.is_some_and(|starved| starved.search > asked.searches)
    }

    /// Returns whether the newest search has shown that only a pass can help.
    #[must_use]
    pub const fn needs_pass_now(&self) -> bool {
        self.starved.is_some()
    }

    /// Returns the error for a task that has waited since `asked`, if its wait cannot succeed.
    #[must_use]
    pub fn verdict(&self, asked: WaitStart) -> Option<Error> {
        self.failed_after(asked.passes).filter(|_| self.needs_pass(asked))
    }

    /// Like [`Starvation::verdict`], for a task that can do without a bucket and begins to wait
    /// while others wait.
    #[must_use]
    pub fn refusal(&self) -> Option<Error> {
        self.failed_after(self.starved?.passes)
    }

    /// Returns why the last pass did not complete; `None` if it did.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.failed.as_ref().map(|failed| failed.error.clone())
    }

    fn failed_after(&self, passes: u64) -> Option<Error> {
        let is_final = |failed: &&FailedPasses| failed.times >= TIMES_MIN && failed.pass > passes;
        self.failed.as_ref().filter(is_final).map(|failed| failed.error.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Starvation {
        fn search(&mut self, kept_by_age: bool) {
            self.search_begins();
            self.search_ends(kept_by_age);
        }

        fn pass(&mut self, failure: Option<Error>) {
            self.pass_begins();
            self.pass_ends(failure);
        }
    }

    const ERROR: Error = Error::NoVolume;

    #[test]
    fn what_one_pass_met_says_nothing() {
        // Proves invariant L7.
        let mut starvation = Starvation::default();
        starvation.search(true);
        let asked = starvation.ask();
        starvation.search(true);
        starvation.pass(Some(ERROR));
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (None, None));
        assert!(starvation.wants_pass(), "the next one is due");
        starvation.pass(Some(ERROR));
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (Some(ERROR), Some(ERROR)));
    }

    #[test]
    fn what_a_pass_met_that_began_before_says_nothing() {
        let mut starvation = Starvation::default();
        starvation.pass(Some(ERROR));
        starvation.pass_begins();
        starvation.search(true);
        let asked = starvation.ask();
        starvation.search(true);
        starvation.pass_ends(Some(ERROR));
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (None, None));
        assert!(starvation.wants_pass());
        starvation.pass_begins();
        assert!(!starvation.wants_pass());
        assert_eq!(
            (starvation.refusal(), starvation.verdict(asked)),
            (None, None),
            "not while it is under way"
        );
        starvation.pass_ends(Some(ERROR));
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (Some(ERROR), Some(ERROR)));
        assert!(!starvation.wants_pass(), "it rests");
    }

    #[test]
    fn who_asks_later_has_a_pass_of_its_own() {
        let mut starvation = Starvation::default();
        starvation.search(true);
        starvation.pass(Some(ERROR));
        starvation.pass(Some(ERROR));
        let asked = starvation.ask();
        starvation.search(true);
        assert!(starvation.wants_pass());
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (Some(ERROR), None));
        starvation.pass(Some(ERROR));
        assert_eq!(starvation.verdict(asked), Some(ERROR));
    }

    #[test]
    fn what_a_search_found_that_began_before_says_nothing() {
        let mut starvation = Starvation::default();
        starvation.search_begins();
        let asked = starvation.ask();
        starvation.search_ends(true);
        starvation.pass(Some(ERROR));
        starvation.pass(Some(ERROR));
        assert_eq!(starvation.verdict(asked), None);
        starvation.search(true);
        assert_eq!(starvation.verdict(asked), Some(ERROR));
    }

    #[test]
    fn it_ends_when_a_search_finds_something_or_a_pass_comes_to_its_end() {
        let mut starvation = Starvation::default();
        starvation.search(true);
        let asked = starvation.ask();
        starvation.search(true);
        starvation.pass(Some(ERROR));
        starvation.pass(Some(ERROR));
        starvation.search(false);
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (None, None));
        assert!(!starvation.wants_pass());
        starvation.search(true);
        starvation.pass(Some(ERROR));
        starvation.pass(None);
        starvation.pass(Some(ERROR));
        assert_eq!((starvation.refusal(), starvation.verdict(asked)), (None, None));
    }
}
