//! What of a backing device's writes is durable.
//!
//! Flushes are numbered as they begin, and one runs at a time. A write is proven durable by a flush that began after
//! the write ended and succeeded, if no flush has failed since the write began: a flush that fails may have dropped
//! whatever was not proven then, and the next one will claim success all the same. Failures divide time into eras, and
//! a stamp is worth something in its own era only. So a later success can never overrule a failure, nothing has to be
//! remembered of past eras, and whoever asks too late gets the safe answer: what he wrote counts as lost.
//!
//! Clients learn of a failure by their flushes. A flush answers for the changes (writes, zeroes, discards of clients) that
//! had ended when it was asked for, so their ends are numbered, and each failure puts all in doubt that came before it. A
//! flush says so if it answers for one in doubt of which none had said so when it was asked for, and since the newest
//! failure: what outlived one may have been read since, and be gone with the next. Changes that were refused count for the
//! same reason.
//!
//! A flush may have waited before it came here, and its client means what was answered before it asked. So a flush that
//! was asked for before the newest change in doubt was answered says that something is lost, and the next one says so
//! once more; and one that was asked for before another one had said so says so, too.
//!
//! A write or zeroing of which something was being written, or waited for its proof, when a flush failed does not succeed
//! unless it is durable by itself: it might be told that what is gone is there. (Whether the device had the data when it
//! flushed, nobody can tell who sees completions later than they happen.)

use bcached_env::Time;

/// Flushes and writes of one backing device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epoch {
    /// Number of the newest flush that has begun; 0: none.
    begun: u64,
    /// Number of the newest flush that has succeeded.
    good: u64,
    /// The newest flush has not ended.
    running: bool,
    /// Flushes that have failed.
    era: u64,
    /// Changes of clients that have ended; a former process is taken to have made one.
    changes: u64,
    /// When the newest of them ended.
    changed_at: Time,
    /// The newest of them that the newest failure has put in doubt.
    doubtful: u64,
    /// When that one ended.
    doubtful_at: Time,
    /// The newest in doubt of which a flush has said so since.
    reported: u64,
    /// When the last one did.
    reported_at: Time,
    /// Those up to here had ended when the newest flush began,
    covered: u64,
    /// and up to here when one began that has succeeded.
    proven: u64,
    /// Writes of clients that have ended, and found the device there.
    client_writes: u64,
    /// Writes that have begun and not ended.
    open: u64,
    /// The newest flush that had begun when the newest write ended.
    last_write: Option<u64>,
    volatile: bool,
}

/// A write or a read has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Begun {
    era: u64,
}

/// A request of a client has begun that may write to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    client_writes: u64,
}

/// What a client's flush answers for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answers {
    /// Changes up to this one,
    upto: u64,
    /// but of those in doubt up to this one it has been said,
    reported: u64,
    /// if no flush has failed after this era.
    era: u64,
    /// When the client asked for it; `Time::MAX`: as this was made.
    asked: Time,
}

/// When data was written, or read, relative to flushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The newest flush that had begun when the write ended.
    ended: u64,
    /// The era in which it began.
    era: u64,
}

/// A flush that somebody wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// This one or a later one must succeed,
    number: u64,
    /// and none may fail before.
    era: u64,
}

/// What who wants a flush has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// Nothing: what he wanted to be durable is.
    Durable,
    /// Nothing: a flush has failed since he asked.
    Lost,
    /// Wait until the flush that is running has ended.
    Wait,
    /// Run one: it has begun.
    Run,
}

impl Stamp {
    /// The one of the older era, if there is any.
    #[must_use]
    pub fn older(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        one.into_iter().chain(other).min_by_key(|stamp| stamp.era)
    }
}

impl Epoch {
    /// A device that has (or has not) a volatile cache; what it may hold from before is unknown, so the first flush
    /// of a client goes through.
    #[must_use]
    pub fn new(volatile: bool) -> Self {
        Self { volatile, last_write: volatile.then_some(0), changes: u64::from(volatile), ..Self::default() }
    }

    /// A write begins.
    pub const fn write_begins(&mut self) -> Begun {
        self.open += 1;
        Begun { era: self.era }
    }

    /// A write of what a client has sent ended, of which the device may have taken something.
    pub const fn client_write_ends(&mut self, write: Begun) -> Stamp {
        self.client_writes += 1;
        self.write_ends(write)
    }

    /// A write ended; the stamp of its data.
    pub const fn write_ends(&mut self, write: Begun) -> Stamp {
        self.open = self.open.checked_sub(1).expect("a write that ends has begun");
        self.last_write = Some(self.begun);
        Stamp { ended: self.begun, era: write.era }
    }

    /// A read begins.
    #[must_use]
    pub const fn read_begins(&self) -> Begun {
        Begun { era: self.era }
    }

    /// A read ended; the stamp of its data, which is that of the newest write, because what was read may be in the
    /// volatile cache only. Whatever waits with it, a flush is still wanted until it is durable or lost.
    #[must_use]
    pub const fn read_ends(&self, read: Begun) -> Stamp {
        let ended = match self.last_write {
            Some(number) => number,
            None => 0,
        };
        Stamp { ended, era: read.era }
    }

    /// True when data with this stamp survives a power cut.
    #[must_use]
    pub const fn is_durable(&self, stamp: Stamp) -> bool {
        !self.volatile || (stamp.era == self.era && self.good > stamp.ended)
    }

    /// True when data with this stamp may have been dropped by a flush that failed. It stays so for ever.
    #[must_use]
    pub const fn is_lost(&self, stamp: Stamp) -> bool {
        self.volatile && stamp.era != self.era
    }

    /// The flush that makes durable all that has been written; `None` if that is so already. After a failure one is
    /// wanted until one succeeds, though it cannot bring anything back.
    #[must_use]
    pub fn wants_flush(&self) -> Option<Wanted> {
        if !self.volatile {
            return None;
        }
        let number = if self.open > 0 { self.begun + 1 } else { self.last_write? + 1 };
        (self.good < number).then_some(Wanted { number, era: self.era })
    }

    /// What who wants a flush has to do now.
    pub const fn turn(&mut self, wanted: Wanted) -> Turn {
        if self.era != wanted.era {
            return Turn::Lost;
        }
        if self.good >= wanted.number {
            return Turn::Durable;
        }
        if self.running {
            return Turn::Wait;
        }
        self.running = true;
        self.begun += 1;
        self.covered = self.changes;
        Turn::Run
    }

    /// The flush that was running has ended.
    pub fn flush_ends(&mut self, succeeded: bool) {
        assert!(self.running, "a flush that ends has begun");
        self.running = false;
        if succeeded {
            (self.good, self.proven) = (self.begun, self.covered);
        } else {
            self.era += 1;
            (self.doubtful, self.reported) = (self.changes, 0);
            self.doubtful_at = self.changed_at;
        }
    }

    /// The flush that was running has met a device that never works again. What had not been proven stays so for ever, and what has
    /// become of it is not asked here, but when another device takes its place: [`Epoch::may_have_lost`].
    pub fn flush_finds_nobody(&mut self) {
        assert!(self.running, "a flush that ends has begun");
        self.running = false;
    }

    /// A request of a client begins, for [`Epoch::change_ends`].
    #[must_use]
    pub const fn asks(&self) -> Asked {
        Asked { client_writes: self.client_writes }
    }

    /// A client is about to be told how its change went, of which `first` is of the oldest era among what was put on the
    /// device and not proven durable at its end. False if it must not be told of success, because a flush has failed since
    /// that began, and may have dropped it. (A good flush in between may have proven it: who failed after that is not
    /// remembered, the answer is the safe one.)
    ///
    /// If no client's write to the device has ended since the request was asked for it has not written there, and no flush of the device is
    /// about it. (Its own end before it does.) One that found no device does not count: whoever asked for it is refused for that, or asks again
    /// when the device is back, and others who were told of success beside it have lost nothing.
    #[must_use]
    pub fn change_ends(&mut self, asked: Asked, first: Option<Stamp>, now: Time) -> bool {
        if !self.volatile || self.client_writes == asked.client_writes {
            return true;
        }
        self.changes += 1;
        self.changed_at = now;
        !first.is_some_and(|first| self.is_lost(first))
    }

    /// What a client's flush that begins now answers for, which was asked for then.
    #[must_use]
    pub const fn answers(&self, asked: Time) -> Answers {
        let reported = if asked.0 > self.reported_at.0 { self.reported } else { 0 };
        Answers { upto: self.changes, reported, era: self.era, asked }
    }

    /// The device may have lost all that no flush has proven: true if that may be a change of a client, or if there is one in doubt of
    /// which no flush has said so yet.
    #[must_use]
    pub const fn may_have_lost(&self) -> bool {
        self.volatile && (self.changes > self.proven || self.doubtful > self.reported)
    }

    /// At the end of a client's flush: true if it must say that something it answers for may be gone; then that has been
    /// said to whoever asks from `now` on.
    pub fn report(&mut self, answers: Answers, now: Time) -> bool {
        let doubtful = self.doubtful.min(answers.upto);
        if answers.asked > self.doubtful_at && doubtful > self.reported {
            (self.reported, self.reported_at) = (doubtful, now);
        }
        doubtful > if answers.era == self.era { answers.reported } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flush by somebody who wants one now.
    fn begin(epoch: &mut Epoch) {
        let wanted = epoch.wants_flush().expect("there is something to flush");
        assert_eq!(epoch.turn(wanted), Turn::Run);
    }

    fn written(epoch: &mut Epoch) -> Stamp {
        let write = epoch.write_begins();
        epoch.write_ends(write)
    }

    #[test]
    fn only_a_flush_that_began_after_the_write_ended_covers_it() {
        let mut epoch = Epoch::new(true);
        let write = epoch.write_begins();
        begin(&mut epoch);
        let stamp = epoch.write_ends(write);
        epoch.flush_ends(true);
        assert!(!epoch.is_durable(stamp));
        begin(&mut epoch);
        epoch.flush_ends(true);
        assert!(epoch.is_durable(stamp));
        assert_eq!(epoch.wants_flush(), None);
    }

    #[test]
    fn who_comes_during_a_flush_that_covers_all_there_is_waits_for_that_one() {
        let mut epoch = Epoch::new(true);
        begin(&mut epoch);
        let early = epoch.wants_flush().expect("it has not ended");
        let read = epoch.read_begins();
        let stamp = epoch.read_ends(read);
        written(&mut epoch);
        let late = epoch.wants_flush().expect("it does not cover the write");
        assert_eq!((epoch.turn(early), epoch.turn(late)), (Turn::Wait, Turn::Wait));
        epoch.flush_ends(true);
        assert!(epoch.is_durable(stamp));
        assert_eq!((epoch.turn(early), epoch.turn(late)), (Turn::Durable, Turn::Run));
    }

    #[test]
    fn a_later_success_never_overrules_a_failure() {
        let mut epoch = Epoch::new(true);
        let across = epoch.write_begins();
        let read = epoch.read_begins();
        let before = written(&mut epoch);
        begin(&mut epoch);
        epoch.flush_ends(false);
        let across = epoch.write_ends(across);
        let read = epoch.read_ends(read);
        let after = written(&mut epoch);
        begin(&mut epoch);
        epoch.flush_ends(true);
        for lost in [before, across, read] {
            assert!(epoch.is_lost(lost) && !epoch.is_durable(lost));
        }
        assert!(epoch.is_durable(after) && !epoch.is_lost(after));
    }

    #[test]
    fn a_failure_is_the_answer_to_all_who_wait() {
        let mut epoch = Epoch::new(true);
        let first = epoch.wants_flush().expect("what was there before");
        let second = epoch.wants_flush().expect("what was there before");
        assert_eq!((epoch.turn(first), epoch.turn(second)), (Turn::Run, Turn::Wait));
        epoch.flush_ends(false);
        assert_eq!((epoch.turn(first), epoch.turn(second)), (Turn::Lost, Turn::Lost));
    }

    /// A request that writes to the device, from asking to its answer.
    fn asked_and_written(epoch: &mut Epoch) {
        let asked = epoch.asks();
        let write = epoch.write_begins();
        let stamp = epoch.client_write_ends(write);
        assert!(epoch.change_ends(asked, Some(stamp), Time(1)));
    }

    fn fail(epoch: &mut Epoch) {
        begin(epoch);
        epoch.flush_ends(false);
    }

    #[test]
    fn a_failure_is_told_by_all_flushes_under_way_or_else_by_the_next() {
        let mut epoch = Epoch::new(true);
        asked_and_written(&mut epoch);
        let (first, second) = (epoch.answers(Time::MAX), epoch.answers(Time::MAX));
        fail(&mut epoch);
        assert!(epoch.report(first, Time(1)) && epoch.report(second, Time(1)));
        asked_and_written(&mut epoch);
        fail(&mut epoch);
        let (third, fourth) = (epoch.answers(Time::MAX), epoch.answers(Time::MAX));
        assert!(epoch.report(third, Time(1)) && epoch.report(fourth, Time(1)));
        let fifth = epoch.answers(Time::MAX);
        assert!(!epoch.report(fifth, Time(1)), "it has been said");
        fail(&mut epoch);
        assert!(epoch.report(fifth, Time(1)), "what outlived the first may be gone now");
        let sixth = epoch.answers(Time::MAX);
        assert!(!epoch.report(sixth, Time(1)), "it has been said");
    }

    /// It was taken to answer for all that had ended when it came here, and the next one for nothing.
    #[test]
    fn a_flush_that_has_waited_does_not_take_the_error_of_what_was_answered_meanwhile() {
        let mut epoch = Epoch::new(true);
        asked_and_written(&mut epoch); // at 1
        let waited = epoch.answers(Time(1));
        fail(&mut epoch);
        assert!(epoch.report(waited, Time(3)), "something may be lost");
        let later = epoch.answers(Time(4));
        assert!(epoch.report(later, Time(5)), "and nobody has been told of the write");
        let beside = epoch.answers(Time(5));
        assert!(epoch.report(beside, Time(6)), "it was asked for before that was said");
        let last = epoch.answers(Time(6));
        assert!(!epoch.report(last, Time(7)), "it has been said");
    }

    #[test]
    fn a_write_that_was_under_way_when_a_flush_failed_is_not_acknowledged() {
        // The device may have had it when it flushed, though its end is noticed after that of the flush.
        for flush_first in [false, true] {
            let mut epoch = Epoch::new(true);
            let asked = epoch.asks();
            if flush_first {
                begin(&mut epoch);
            }
            let write = epoch.write_begins();
            if !flush_first {
                begin(&mut epoch);
            }
            epoch.flush_ends(false);
            let stamp = epoch.client_write_ends(write);
            assert!(!epoch.change_ends(asked, Some(stamp), Time(1)));
        }
        let mut epoch = Epoch::new(true);
        let asked = epoch.asks();
        fail(&mut epoch);
        let write = epoch.write_begins();
        let stamp = epoch.client_write_ends(write);
        assert!(epoch.change_ends(asked, Some(stamp), Time(1)), "it began after the failure");
        let next = epoch.answers(Time::MAX);
        assert!(epoch.report(next, Time(1)), "of a former process");
        fail(&mut epoch);
        let last = epoch.answers(Time::MAX);
        assert!(epoch.report(last, Time(1)), "of the write");
    }

    #[test]
    fn a_request_that_wrote_to_the_cache_only_is_not_in_doubt() {
        let mut epoch = Epoch::new(true);
        let former = epoch.answers(Time::MAX);
        fail(&mut epoch);
        assert!(epoch.report(former, Time(1)), "a former process may have written something");
        let asked = epoch.asks();
        assert!(epoch.change_ends(asked, None, Time(1)));
        let next = epoch.answers(Time::MAX);
        assert!(!epoch.report(next, Time(1)));
    }

    #[test]
    fn what_no_flush_has_proven_goes_with_the_power() {
        let mut epoch = Epoch::new(true);
        assert!(epoch.may_have_lost(), "a former process may have written something");
        begin(&mut epoch);
        epoch.flush_ends(true);
        written(&mut epoch);
        assert!(!epoch.may_have_lost(), "it was no client's");
        begin(&mut epoch);
        asked_and_written(&mut epoch);
        epoch.flush_ends(true);
        assert!(epoch.may_have_lost(), "the flush had begun before it ended");
        fail(&mut epoch);
        begin(&mut epoch);
        epoch.flush_ends(true);
        assert!(epoch.may_have_lost(), "nobody has heard of the failure");
        let answers = epoch.answers(Time::MAX);
        assert!(epoch.report(answers, Time(1)) && !epoch.may_have_lost());
        assert!(!Epoch::new(false).may_have_lost(), "it loses nothing");
    }

    #[test]
    fn who_writes_beside_one_that_found_no_device_has_lost_nothing() {
        let mut epoch = Epoch::new(true);
        begin(&mut epoch);
        epoch.flush_ends(true);
        let asked = epoch.asks();
        let missed = epoch.write_begins();
        epoch.write_ends(missed);
        assert!(epoch.change_ends(asked, None, Time(1)));
        assert!(!epoch.may_have_lost());
        let (asked, write) = (epoch.asks(), epoch.write_begins());
        let stamp = epoch.client_write_ends(write);
        assert!(
            epoch.change_ends(asked, Some(stamp), Time(1)) && epoch.may_have_lost(),
            "the device took that"
        );
    }

    #[test]
    fn what_was_dropped_before_the_answer_is_not_acknowledged() {
        let mut epoch = Epoch::new(true);
        let asked = epoch.asks();
        let write = epoch.write_begins();
        let first = epoch.client_write_ends(write);
        fail(&mut epoch);
        let write = epoch.write_begins();
        let second = epoch.client_write_ends(write);
        assert!(!epoch.change_ends(asked, Stamp::older(Some(second), Some(first)), Time(1)));
        assert!(epoch.change_ends(asked, Some(second), Time(1)), "it began after the failure");
        assert!(epoch.change_ends(asked, None, Time(1)), "a durable one cannot be dropped");
    }

    #[test]
    fn what_a_refused_change_left_is_not_dropped_in_silence() {
        let mut epoch = Epoch::new(true);
        fail(&mut epoch);
        let former = epoch.answers(Time::MAX);
        assert!(epoch.report(former, Time(1)));
        let asked = epoch.asks();
        let write = epoch.write_begins();
        epoch.client_write_ends(write);
        // It failed elsewhere. Somebody reads what is there now.
        assert!(epoch.change_ends(asked, None, Time(1)));
        fail(&mut epoch);
        let next = epoch.answers(Time::MAX);
        assert!(epoch.report(next, Time(1)));
    }

    #[test]
    fn a_device_without_a_volatile_cache_needs_no_flush() {
        let mut epoch = Epoch::new(false);
        let stamp = written(&mut epoch);
        assert!(epoch.is_durable(stamp) && epoch.wants_flush().is_none());
    }
}
