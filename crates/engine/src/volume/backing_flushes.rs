//! Tracks which writes to a backing device are durable.
//!
//! Flushes are numbered as they begin, and one runs at a time. A write is proven durable by a
//! successful flush that began after the write ended, if no flush has failed since the write began.
//! A failing flush may have dropped whatever was not proven by then, and the next one claims
//! success nevertheless. Failures divide time into eras, and a stamp is valid in its own era only.
//! So a later success can never overrule a failure, and nothing needs to be remembered of past
//! eras. A caller that asks too late gets the safe answer: its write counts as lost.
//!
//! Clients learn of a failure through their own flushes. A client's flush answers for the changes
//! (writes, zeroes, discards of clients) that had ended when it was requested. So the ends of
//! changes are numbered, and each failure puts all earlier changes in doubt. A client's flush
//! reports a loss if it answers for a change in doubt that no flush had reported, since the newest
//! failure, when it was requested. Data that survived one failure may have been read since, and be
//! gone with the next one. Refused changes count for the same reason.
//!
//! A flush may have been queued before it gets here, and its client means the changes that were
//! answered before it requested the flush. So a flush that was requested before the newest change
//! in doubt was answered reports a loss, and the next flush reports it once more. A flush that was
//! requested before another one reported the loss reports it too.
//!
//! A write or zeroing with data in flight, or waiting for proof, when a flush fails does not
//! succeed unless it is durable by itself: otherwise a client might be told that lost data is
//! there. (Completions are seen later than they happen, so it is unknown whether the device had the
//! data when it flushed.)

use bcached_env::Time;

/// Flushes and writes of one backing device.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackingFlushes {
    /// Number of the newest flush that has begun; 0: none.
    begun: u64,
    /// Number of the newest flush that has succeeded.
    good: u64,
    /// The newest flush is still in flight.
    running: bool,
    /// Number of failed flushes.
    era: u64,
    /// Client changes that have ended; a former process is assumed to have made one.
    changes: u64,
    /// When the newest change ended.
    changed_at: Time,
    /// The newest change that the newest failure has put in doubt.
    doubtful: u64,
    /// When that change ended.
    doubtful_at: Time,
    /// The newest change in doubt that a flush has reported since.
    reported: u64,
    /// When the last such report was made.
    reported_at: Time,
    /// Changes up to this one had ended when the newest flush began.
    covered: u64,
    /// Changes up to this one had ended when the newest successful flush began.
    proven: u64,
    /// Client writes that have ended and reached a present device.
    client_writes: u64,
    /// Writes in flight.
    open: u64,
    /// The newest flush that had begun when the newest write ended.
    last_write: Option<u64>,
    volatile: bool,
}

/// Token of a write or a read that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoToken {
    era: u64,
}

/// Token of a client request that has begun and may write to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestToken {
    client_writes: u64,
}

/// What a client's flush answers for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushScope {
    /// It answers for changes up to this one.
    upto: u64,
    /// Changes in doubt up to this one have been reported already,
    reported: u64,
    /// unless a flush has failed after this era.
    era: u64,
    /// When the client requested the flush; `Time::MAX`: when this was made.
    asked: Time,
}

/// When data was written, or read, relative to flushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushStamp {
    /// The newest flush that had begun when the write ended.
    ended: u64,
    /// The era in which it began.
    era: u64,
}

/// A flush that a caller needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NeededFlush {
    /// This flush or a later one must succeed,
    number: u64,
    /// and no flush may fail before that.
    era: u64,
}

/// What a caller that needs a flush has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackingFlushAction {
    /// Nothing: its data is durable.
    Durable,
    /// Nothing: a flush has failed since it asked.
    Lost,
    /// Wait until the running flush has ended.
    Wait,
    /// Run the flush, which has been recorded as begun.
    Run,
}

impl FlushStamp {
    /// The stamp of the older era, if there is any.
    #[must_use]
    pub fn older(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        one.into_iter().chain(other).min_by_key(|stamp| stamp.era)
    }
}

impl BackingFlushes {
    /// Creates the record for a device with or without a volatile write cache. What the cache may
    /// hold from before is unknown, so the first client flush is sent to the device.
    #[must_use]
    pub fn new(volatile: bool) -> Self {
        Self { volatile, last_write: volatile.then_some(0), changes: u64::from(volatile), ..Self::default() }
    }

    /// Begins a write.
    pub const fn write_begins(&mut self) -> IoToken {
        self.open += 1;
        IoToken { era: self.era }
    }

    /// Ends a write of client data of which the device may have taken some. Returns the stamp of
    /// its data.
    pub const fn client_write_ends(&mut self, write: IoToken) -> FlushStamp {
        self.client_writes += 1;
        self.write_ends(write)
    }

    /// Ends a write, and returns the stamp of its data.
    pub const fn write_ends(&mut self, write: IoToken) -> FlushStamp {
        self.open = self.open.checked_sub(1).expect("a write that ends has begun");
        self.last_write = Some(self.begun);
        FlushStamp { ended: self.begun, era: write.era }
    }

    /// Begins a read.
    #[must_use]
    pub const fn read_begins(&self) -> IoToken {
        IoToken { era: self.era }
    }

    /// Ends a read, and returns the stamp of its data. That is the stamp of the newest write,
    /// because what was read may be in the volatile write cache only. Whatever waits along with it,
    /// a flush remains needed until the data is durable or lost.
    #[must_use]
    pub const fn read_ends(&self, read: IoToken) -> FlushStamp {
        let ended = match self.last_write {
            Some(number) => number,
            None => 0,
        };
        FlushStamp { ended, era: read.era }
    }

    /// Returns true if data with this stamp survives a power cut.
    #[must_use]
    pub const fn is_durable(&self, stamp: FlushStamp) -> bool {
        // A flush that began after the write ended has succeeded, and none has failed since the
        // write began: invariant D26.
        !self.volatile || (stamp.era == self.era && self.good > stamp.ended)
    }

    /// Returns true if data with this stamp may have been dropped by a failed flush. The answer
    /// stays true forever.
    #[must_use]
    pub const fn is_lost(&self, stamp: FlushStamp) -> bool {
        self.volatile && stamp.era != self.era
    }

    /// The flush that makes everything written so far durable; `None` if it already is. After a
    /// failure a flush is needed until one succeeds, although it cannot bring anything back.
    #[must_use]
    pub fn wants_flush(&self) -> Option<NeededFlush> {
        if !self.volatile {
            return None;
        }
        let number = if self.open > 0 { self.begun + 1 } else { self.last_write? + 1 };
        (self.good < number).then_some(NeededFlush { number, era: self.era })
    }

    /// What a caller that needs a flush has to do now.
    pub const fn turn(&mut self, wanted: NeededFlush) -> BackingFlushAction {
        if self.era != wanted.era {
            return BackingFlushAction::Lost;
        }
        if self.good >= wanted.number {
            return BackingFlushAction::Durable;
        }
        if self.running {
            return BackingFlushAction::Wait;
        }
        self.running = true;
        self.begun += 1;
        self.covered = self.changes;
        BackingFlushAction::Run
    }

    /// Ends the running flush.
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

    /// Ends the running flush after it met a device that never works again. Unproven writes stay
    /// unproven forever. What has become of them is decided when another device takes its place:
    /// [`BackingFlushes::may_have_lost`].
    pub fn flush_finds_nobody(&mut self) {
        assert!(self.running, "a flush that ends has begun");
        self.running = false;
    }

    /// Begins a client request, for [`BackingFlushes::change_ends`].
    #[must_use]
    pub const fn asks(&self) -> RequestToken {
        RequestToken { client_writes: self.client_writes }
    }

    /// Ends a client's change, before its client is answered. `first` is the stamp of the oldest
    /// era among the data that was written to the device and not proven durable at its end. Returns
    /// false if the change must not be reported as successful: a flush has failed since that write
    /// began, and may have dropped it. (A successful flush in between may have proven it. The order
    /// of the two is not remembered, and false is the safe answer.)
    ///
    /// If no client write to the device has ended since the request began, the request has not
    /// written there, and flushes of the device do not concern it. (Its own writes end before it
    /// does.) A write that found no device does not count. Its client gets an error, or retries
    /// when the device is back, and other clients that were told of success meanwhile have lost
    /// nothing.
    #[must_use]
    pub fn change_ends(&mut self, asked: RequestToken, first: Option<FlushStamp>, now: Time) -> bool {
        if !self.volatile || self.client_writes == asked.client_writes {
            return true;
        }
        self.changes += 1;
        self.changed_at = now;
        // A flush that failed meanwhile may have dropped it: invariant D29.
        !first.is_some_and(|first| self.is_lost(first))
    }

    /// What a client's flush that begins now answers for, if it was requested at `asked`.
    #[must_use]
    pub const fn answers(&self, asked: Time) -> FlushScope {
        let reported = if asked.0 > self.reported_at.0 { self.reported } else { 0 };
        FlushScope { upto: self.changes, reported, era: self.era, asked }
    }

    /// Returns true if a client's change may be lost when the device loses all that no flush has
    /// proven, or if a change in doubt has not been reported by any flush yet.
    #[must_use]
    pub const fn may_have_lost(&self) -> bool {
        self.volatile && (self.changes > self.proven || self.doubtful > self.reported)
    }

    /// Ends a client's flush. Returns true if it must report that something it answers for may be
    /// lost. From `now` on that counts as reported to clients that request a flush.
    pub fn report(&mut self, answers: FlushScope, now: Time) -> bool {
        let doubtful = self.doubtful.min(answers.upto);
        if answers.asked > self.doubtful_at && doubtful > self.reported {
            (self.reported, self.reported_at) = (doubtful, now);
        }
        // What was reported before a later failure is reported again: invariant D28.
        doubtful > if answers.era == self.era { answers.reported } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins the flush that a caller needs now.
    fn begin(flushes: &mut BackingFlushes) {
        let wanted = flushes.wants_flush().expect("there is something to flush");
        assert_eq!(flushes.turn(wanted), BackingFlushAction::Run);
    }

    fn written(flushes: &mut BackingFlushes) -> FlushStamp {
        let write = flushes.write_begins();
        flushes.write_ends(write)
    }

    /// Proves invariant D26.
    #[test]
    fn only_a_flush_that_began_after_the_write_ended_covers_it() {
        let mut flushes = BackingFlushes::new(true);
        let write = flushes.write_begins();
        begin(&mut flushes);
        let stamp = flushes.write_ends(write);
        flushes.flush_ends(true);
        assert!(!flushes.is_durable(stamp));
        begin(&mut flushes);
        flushes.flush_ends(true);
        assert!(flushes.is_durable(stamp));
        assert_eq!(flushes.wants_flush(), None);
    }

    #[test]
    fn who_comes_during_a_flush_that_covers_all_there_is_waits_for_that_one() {
        let mut flushes = BackingFlushes::new(true);
        begin(&mut flushes);
        let early = flushes.wants_flush().expect("it has not ended");
        let read = flushes.read_begins();
        let stamp = flushes.read_ends(read);
        written(&mut flushes);
        let late = flushes.wants_flush().expect("it does not cover the write");
        assert_eq!(
            (flushes.turn(early), flushes.turn(late)),
            (BackingFlushAction::Wait, BackingFlushAction::Wait)
        );
        flushes.flush_ends(true);
        assert!(flushes.is_durable(stamp));
        assert_eq!(
            (flushes.turn(early), flushes.turn(late)),
            (BackingFlushAction::Durable, BackingFlushAction::Run)
        );
    }

    /// Proves invariant D26.
    #[test]
    fn a_later_success_never_overrules_a_failure() {
        let mut flushes = BackingFlushes::new(true);
        let across = flushes.write_begins();
        let read = flushes.read_begins();
        let before = written(&mut flushes);
        begin(&mut flushes);
        flushes.flush_ends(false);
        let across = flushes.write_ends(across);
        let read = flushes.read_ends(read);
        let after = written(&mut flushes);
        begin(&mut flushes);
        flushes.flush_ends(true);
        for lost in [before, across, read] {
            assert!(flushes.is_lost(lost) && !flushes.is_durable(lost));
        }
        assert!(flushes.is_durable(after) && !flushes.is_lost(after));
    }

    #[test]
    fn a_failure_is_the_answer_to_all_who_wait() {
        let mut flushes = BackingFlushes::new(true);
        let first = flushes.wants_flush().expect("what was there before");
        let second = flushes.wants_flush().expect("what was there before");
        assert_eq!(
            (flushes.turn(first), flushes.turn(second)),
            (BackingFlushAction::Run, BackingFlushAction::Wait)
        );
        flushes.flush_ends(false);
        assert_eq!(
            (flushes.turn(first), flushes.turn(second)),
            (BackingFlushAction::Lost, BackingFlushAction::Lost)
        );
    }

    /// A request that writes to the device, from its beginning to its answer.
    fn asked_and_written(flushes: &mut BackingFlushes) {
        let asked = flushes.asks();
        let write = flushes.write_begins();
        let stamp = flushes.client_write_ends(write);
        assert!(flushes.change_ends(asked, Some(stamp), Time(1)));
    }

    fn fail(flushes: &mut BackingFlushes) {
        begin(flushes);
        flushes.flush_ends(false);
    }

    /// Proves invariant D28.
    #[test]
    fn a_failure_is_told_by_all_flushes_under_way_or_else_by_the_next() {
        let mut flushes = BackingFlushes::new(true);
        asked_and_written(&mut flushes);
        let (first, second) = (flushes.answers(Time::MAX), flushes.answers(Time::MAX));
        fail(&mut flushes);
        assert!(flushes.report(first, Time(1)) && flushes.report(second, Time(1)));
        asked_and_written(&mut flushes);
        fail(&mut flushes);
        let (third, fourth) = (flushes.answers(Time::MAX), flushes.answers(Time::MAX));
        assert!(flushes.report(third, Time(1)) && flushes.report(fourth, Time(1)));
        let fifth = flushes.answers(Time::MAX);
        assert!(!flushes.report(fifth, Time(1)), "it has been said");
        fail(&mut flushes);
        assert!(flushes.report(fifth, Time(1)), "what outlived the first may be gone now");
        let sixth = flushes.answers(Time::MAX);
        assert!(!flushes.report(sixth, Time(1)), "it has been said");
    }

    /// Regression: the flush was taken to answer for all changes that had ended when it got here,
    /// and the next one for nothing.
    #[test]
    fn a_flush_that_has_waited_does_not_take_the_error_of_what_was_answered_meanwhile() {
        let mut flushes = BackingFlushes::new(true);
        asked_and_written(&mut flushes); // at 1
        let waited = flushes.answers(Time(1));
        fail(&mut flushes);
        assert!(flushes.report(waited, Time(3)), "something may be lost");
        let later = flushes.answers(Time(4));
        assert!(flushes.report(later, Time(5)), "and nobody has been told of the write");
        let beside = flushes.answers(Time(5));
        assert!(flushes.report(beside, Time(6)), "it was asked for before that was said");
        let last = flushes.answers(Time(6));
        assert!(!flushes.report(last, Time(7)), "it has been said");
    }

    /// Proves invariant D29.
    #[test]
    fn a_write_that_was_under_way_when_a_flush_failed_is_not_acknowledged() {
        // The device may have received the write before it flushed, although its completion is seen
        // after that of the flush.
        for flush_first in [false, true] {
            let mut flushes = BackingFlushes::new(true);
            let asked = flushes.asks();
            if flush_first {
                begin(&mut flushes);
            }
            let write = flushes.write_begins();
            if !flush_first {
                begin(&mut flushes);
            }
            flushes.flush_ends(false);
            let stamp = flushes.client_write_ends(write);
            assert!(!flushes.change_ends(asked, Some(stamp), Time(1)));
        }
        let mut flushes = BackingFlushes::new(true);
        let asked = flushes.asks();
        fail(&mut flushes);
        let write = flushes.write_begins();
        let stamp = flushes.client_write_ends(write);
        assert!(flushes.change_ends(asked, Some(stamp), Time(1)), "it began after the failure");
        let next = flushes.answers(Time::MAX);
        assert!(flushes.report(next, Time(1)), "of a former process");
        fail(&mut flushes);
        let last = flushes.answers(Time::MAX);
        assert!(flushes.report(last, Time(1)), "of the write");
    }

    #[test]
    fn a_request_that_wrote_to_the_cache_only_is_not_in_doubt() {
        let mut flushes = BackingFlushes::new(true);
        let former = flushes.answers(Time::MAX);
        fail(&mut flushes);
        assert!(flushes.report(former, Time(1)), "a former process may have written something");
        let asked = flushes.asks();
        assert!(flushes.change_ends(asked, None, Time(1)));
        let next = flushes.answers(Time::MAX);
        assert!(!flushes.report(next, Time(1)));
    }

    /// Proves invariant D30.
    #[test]
    fn what_no_flush_has_proven_goes_with_the_power() {
        let mut flushes = BackingFlushes::new(true);
        assert!(flushes.may_have_lost(), "a former process may have written something");
        begin(&mut flushes);
        flushes.flush_ends(true);
        written(&mut flushes);
        assert!(!flushes.may_have_lost(), "it was no client's");
        begin(&mut flushes);
        asked_and_written(&mut flushes);
        flushes.flush_ends(true);
        assert!(flushes.may_have_lost(), "the flush had begun before it ended");
        fail(&mut flushes);
        begin(&mut flushes);
        flushes.flush_ends(true);
        assert!(flushes.may_have_lost(), "nobody has heard of the failure");
        let answers = flushes.answers(Time::MAX);
        assert!(flushes.report(answers, Time(1)) && !flushes.may_have_lost());
        assert!(!BackingFlushes::new(false).may_have_lost(), "it loses nothing");
    }

    #[test]
    fn who_writes_beside_one_that_found_no_device_has_lost_nothing() {
        let mut flushes = BackingFlushes::new(true);
        begin(&mut flushes);
        flushes.flush_ends(true);
        let asked = flushes.asks();
        let missed = flushes.write_begins();
        flushes.write_ends(missed);
        assert!(flushes.change_ends(asked, None, Time(1)));
        assert!(!flushes.may_have_lost());
        let (asked, write) = (flushes.asks(), flushes.write_begins());
        let stamp = flushes.client_write_ends(write);
        assert!(
            flushes.change_ends(asked, Some(stamp), Time(1)) && flushes.may_have_lost(),
            "the device took that"
        );
    }

    #[test]
    fn what_was_dropped_before_the_answer_is_not_acknowledged() {
        let mut flushes = BackingFlushes::new(true);
        let asked = flushes.asks();
        let write = flushes.write_begins();
        let first = flushes.client_write_ends(write);
        fail(&mut flushes);
        let write = flushes.write_begins();
        let second = flushes.client_write_ends(write);
        assert!(!flushes.change_ends(asked, FlushStamp::older(Some(second), Some(first)), Time(1)));
        assert!(flushes.change_ends(asked, Some(second), Time(1)), "it began after the failure");
        assert!(flushes.change_ends(asked, None, Time(1)), "a durable one cannot be dropped");
    }

    #[test]
    fn what_a_refused_change_left_is_not_dropped_in_silence() {
        let mut flushes = BackingFlushes::new(true);
        fail(&mut flushes);
        let former = flushes.answers(Time::MAX);
        assert!(flushes.report(former, Time(1)));
        let asked = flushes.asks();
        let write = flushes.write_begins();
        flushes.client_write_ends(write);
        // It failed elsewhere. A client reads what is there now.
        assert!(flushes.change_ends(asked, None, Time(1)));
        fail(&mut flushes);
        let next = flushes.answers(Time::MAX);
        assert!(flushes.report(next, Time(1)));
    }

    #[test]
    fn a_device_without_a_volatile_cache_needs_no_flush() {
        let mut flushes = BackingFlushes::new(false);
        let stamp = written(&mut flushes);
        assert!(flushes.is_durable(stamp) && flushes.wants_flush().is_none());
    }
}
