//! The history of one sector, as far as it still matters: which values may be read, and which may
//! be there after a crash.
//!
//! A *version* is a value that an operation may have put down. It took effect at one unknown
//! moment, not before `start`. The latest possible moment, once known, is `by`: when the client was
//! told, or the end of the first read that saw it. Everything below follows from these two numbers.
//!
//! **Order.** Version *d* surely replaced *u* if *d* surely happened and `u.by < d.start`, or if a
//! read that saw *d* began after `u.by` (then *u* is marked as *before* *d*). From then on *u* is
//! *dead*: reads that begin later may not see it.
//!
//! **Reading.** A read from `start` to `end` may return any version that had started by its end and
//! was not dead at its start. The version that it returns has happened. Other versions that had
//! settled before the read began are dead: once read, a value stays.
//!
//! **Durability.** An acknowledged write is *promised*. A flush that began after the promise makes
//! it durable; FUA does so at once. A version is *lost* for good if a durable one surely replaced
//! it. Versions that are not lost may be there after a power cut.
//!
//! **A power cut** leaves one of the versions that are not lost; which one is unknown. They become
//! equal candidates, and the first read picks one. That one is on the medium, so the next power cut
//! cannot take it back.
//!
//! **The death of a process** ends operations in flight: done or not. Nothing else changes, and
//! promises stay.
//!
//! **A failed write**, too, happened or did not. If a later read sees a value that it would have
//! replaced, it did not happen and cannot appear later.
//!
//! **A device that drops** data it had not made durable takes versions back. Those that are not
//! lost become equal candidates, as after a power cut, but are on no medium. Operations in flight
//! may be lost with them, even if a read had seen them, or may hide what the device reverted to,
//! until a power cut. Promises stay, because no client has been told: a flush that succeeds now
//! must be true. They end with the flush that fails (*broken*) or with the process (*untold*). A
//! read that finds the data there all the same brings them back. An example: *a* is flushed, *b* is
//! acknowledged, and the device drops *b*. A read may return *a* or *b*, and that value stays. If
//! the next flush succeeds, the device must hold *b*; if it fails, either.
//!
//! **A discard** may have brought back any former value, or zero. It is a version that matches all
//! of these, until a read turns it into one of them.

use crate::stamp::SectorValue;

/// Not yet, or never.
pub(super) const NEVER: u64 = u64::MAX;

/// The content that a version would read as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VersionContent {
    Value(SectorValue),
    /// After a discard: zero, or the data of any write to this sector with a number below `before`;
    /// [`NEVER`] while in flight.
    Former {
        before: u64,
    },
}

/// A value that an operation may have put down.
#[derive(Clone, Debug)]
pub(super) struct SectorVersion {
    /// Number of the operation.
    pub(super) number: u64,
    pub(super) content: VersionContent,
    /// It did not take effect before this event.
    pub(super) start: u64,
    /// It did not take effect after this event; [`NEVER`] while in flight and unseen.
    by: u64,
    /// The operation has not ended.
    in_flight: bool,
    /// It surely took effect: it was acknowledged, or a read saw it.
    happened: bool,
    /// It was acknowledged and has not been in doubt since.
    acknowledged: bool,
    /// A flush that begins after this event makes it durable.
    promised: u64,
    /// When the operation ended, with whatever result. A flush that was submitted later and fails
    /// applies to this version.
    ended: u64,
    durable: bool,
    /// A power cut may have left it on the medium; if a read returns it, it is durable.
    on_medium: bool,
    /// A device may have reverted to it: it may be on the medium, whatever is read.
    returned: bool,
    /// It was promised when a device reverted, and no read has shown it since: it may be lost, and
    /// no client was told.
    untold: bool,
    /// A failed flush has ended the promise. A read that shows it renews the promise, as of when it
    /// was first given.
    broken: bool,
    /// Reads that begin at or after this event may not see it.
    dead_at: u64,
    /// Versions that surely came later, in addition to those that the times show.
    before: Vec<u64>,
}

impl SectorVersion {
    /// Creates the version of an operation that has just begun.
    pub(super) const fn begun(number: u64, content: VersionContent, start: u64) -> Self {
        Self {
            number,
            content,
            start,
            by: NEVER,
            in_flight: true,
            happened: false,
            acknowledged: false,
            promised: NEVER,
            ended: NEVER,
            durable: false,
            on_medium: false,
            returned: false,
            untold: false,
            broken: false,
            dead_at: NEVER,
            before: Vec::new(),
        }
    }

    /// Creates the version that was there before all operations.
    pub(super) const fn first(value: SectorValue) -> Self {
        let mut version = Self::begun(0, VersionContent::Value(value), 0);
        (version.by, version.ended) = (0, 0);
        version.in_flight = false;
        version.happened = true;
        version.durable = true;
        version
    }

    /// Returns whether a read may return it.
    const fn is_visible(&self, seen: &SectorRead) -> bool {
        self.start < seen.end && self.dead_at > seen.start
    }

    /// Ends the operation, with whatever result.
    fn end(&mut self, now: u64) {
        self.in_flight = false;
        self.by = self.by.min(now);
        self.ended = self.ended.min(now);
    }

    /// Returns whether a flush that begins at `started` covers it.
    const fn is_covered(&self, started: u64) -> bool {
        self.promised < started && !self.broken
    }

    fn precedes(&self, later: &Self) -> bool {
        self.by < later.start || self.before.contains(&later.number)
    }
}

/// A read as one sector sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SectorRead {
    pub(super) value: SectorValue,
    /// Event numbers of the read's start and end.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Number of the read.
    pub(super) number: u64,
    /// For a former value: the number of its write, if that wrote this sector (0 for zero and the
    /// first content).
    pub(super) former: Option<u64>,
}

/// The versions of one sector that still matter.
#[derive(Clone, Debug)]
pub(super) struct Sector {
    versions: Vec<SectorVersion>,
    /// When a backing device last reverted to earlier content.
    reverted: u64,
    /// It may have held zeroes at some time.
    zeroed: bool,
}

impl Sector {
    pub(super) fn new(first: SectorValue) -> Self {
        Self { versions: vec![SectorVersion::first(first)], reverted: 0, zeroed: first == SectorValue::Zero }
    }

    /// Returns the number of the newest operation that still matters.
    pub(super) fn newest(&self) -> u64 {
        self.versions.iter().map(|version| version.number).max().unwrap_or(0)
    }

    /// Begins an operation.
    pub(super) fn begin(&mut self, version: SectorVersion) {
        self.zeroed |= matches!(
            version.content,
            VersionContent::Value(SectorValue::Zero) | VersionContent::Former { .. }
        );
        self.versions.push(version);
    }

    /// Acknowledges operation `number` at `now`.
    pub(super) fn acknowledge(&mut self, number: u64, now: u64, fua: bool) {
        self.over(now);
        for version in self.versions.iter_mut().filter(|version| version.number == number) {
            version.end(now);
            // A discard promises nothing in particular: the first read fixes, and promises, what it
            // left.
            if matches!(version.content, VersionContent::Value(_)) {
                version.happened = true;
                version.acknowledged = true;
                version.promised = version.promised.min(now);
                version.durable |= fua;
            }
        }
        self.settle();
    }

    /// Ends discard `number`: operations from number `next` on are not former values for it.
    pub(super) fn end_discard(&mut self, number: u64, next: u64) {
        for version in self.versions.iter_mut().filter(|version| version.number == number) {
            if let VersionContent::Former { before } = &mut version.content {
                *before = next;
            }
        }
    }

    /// Gives up operation `number`, which has failed or will never be answered: it took effect by
    /// `now` or not at all.
    pub(super) fn give_up(&mut self, number: u64, now: u64) {
        self.over(now);
        self.versions
            .iter_mut()
            .filter(|version| version.number == number)
            .for_each(|version| version.end(now));
    }

    /// Ends an operation, and with it the versions that reads derived from it while it was in
    /// flight.
    fn over(&mut self, now: u64) {
        for version in self.versions.iter_mut().filter(|version| !version.in_flight) {
            version.ended = version.ended.min(now);
        }
    }

    /// Returns whether a read may have returned this value without providing new information.
    pub(super) fn is_known(&self, seen: &SectorRead) -> bool {
        let [only] = self.versions.as_slice() else { return false };
        let is_settled = only.happened && only.durable && !only.in_flight;
        let has_ended = only.by <= seen.end && only.promised <= seen.end;
        only.is_visible(seen) && is_settled && has_ended && only.content == VersionContent::Value(seen.value)
    }

    /// Returns whether a read may return this value.
    pub(super) fn may_return(&self, seen: &SectorRead) -> bool {
        let (matches, formers) = self.sources(seen);
        !matches.is_empty() || !formers.is_empty()
    }

    /// Returns whether the backing device reverted after `started`, during a read that began then.
    pub(super) const fn is_crossed(&self, started: u64) -> bool {
        self.reverted > started
    }

    /// Returns whether the sector may ever have held the value seen.
    pub(super) fn has_been(&self, seen: &SectorRead) -> bool {
        seen.former.is_some() && (seen.value != SectorValue::Zero || self.zeroed)
    }

    /// Finds what a read can have seen: the indices of versions with that content, and discards
    /// that may have left it.
    fn sources(&self, seen: &SectorRead) -> (Vec<usize>, Vec<&SectorVersion>) {
        let same = |version: &SectorVersion| version.content == VersionContent::Value(seen.value);
        let matches = (0..self.versions.len())
            .filter(|at| self.versions[*at].is_visible(seen) && same(&self.versions[*at]));
        let former = |version: &SectorVersion| match version.content {
            VersionContent::Former { before } => seen.former.is_some_and(|number| number < before),
            VersionContent::Value(_) => false,
        };
        let formers = self.versions.iter().filter(|version| version.is_visible(seen) && former(version));
        (matches.collect(), formers.collect())
    }

    /// Records the result of a read; returns false if the read may not return it.
    pub(super) fn read(&mut self, seen: &SectorRead) -> bool {
        let (matches, formers) = self.sources(seen);
        if matches.is_empty() && formers.is_empty() {
            return false;
        }
        let picked = if matches.len() == 1 && formers.is_empty() {
            self.confirm(matches[0], seen)
        } else {
            let sources: Vec<&SectorVersion> =
                matches.iter().map(|at| &self.versions[*at]).chain(formers).collect();
            let fixed = Self::fixed(&sources, seen);
            self.versions.push(fixed);
            self.versions.len() - 1
        };
        let (number, by) = (self.versions[picked].number, self.versions[picked].by);
        // An operation that failed or was cut off by the death of its process did not happen if it
        // would have replaced this value.
        self.versions.retain(|version| {
            let undecided =
                !version.happened && !version.returned && matches!(version.content, VersionContent::Value(_));
            !(undecided && version.by < seen.start && by < version.start)
        });
        let mut replaced = Vec::new();
        for version in &mut self.versions {
            if version.number != number && version.by < seen.start {
                version.before.push(number);
                if version.returned {
                    // The value read has hidden it all the time.
                    version.start = version.start.min(by);
                }
                version.by = version.by.min(by);
                version.dead_at = version.dead_at.min(by);
                replaced.push(version.number);
            }
        }
        // The value has returned over newer ones, if a device reverted.
        for version in self.versions.iter_mut().filter(|version| version.number == number) {
            version.before.retain(|number| !replaced.contains(number));
        }
        self.settle();
        true
    }

    /// Records that the only version that the read can have seen has happened.
    fn confirm(&mut self, at: usize, seen: &SectorRead) -> usize {
        let version = &mut self.versions[at];
        version.by = version.by.min(seen.end);
        (version.happened, version.untold, version.broken) = (true, false, false);
        if !version.in_flight {
            version.promised = version.promised.min(seen.end);
        }
        version.durable |= version.on_medium;
        at
    }

    /// Makes a new version for a value that has several sources or comes from a discard: the read
    /// itself fixes it.
    fn fixed(sources: &[&SectorVersion], seen: &SectorRead) -> SectorVersion {
        let start = sources.iter().map(|version| version.start).min().expect("there is a source");
        let mut version = SectorVersion::begun(seen.number, VersionContent::Value(seen.value), start);
        version.by = seen.end;
        version.in_flight = false;
        let ended = |version: &&SectorVersion| match version.content {
            VersionContent::Value(_) => version.ended,
            // It may be the data of any earlier operation.
            VersionContent::Former { .. } => 0,
        };
        version.ended = sources.iter().map(ended).min().expect("there is a source");
        version.happened = true;
        version.on_medium = sources.iter().all(|version| version.on_medium);
        version.durable = version.on_medium;
        if !sources.iter().any(|version| version.in_flight) {
            version.promised = seen.end;
        }
        version
    }

    /// Records the success of a flush that began at `started`.
    pub(super) fn flush(&mut self, started: u64) {
        for version in self.versions.iter_mut().filter(|version| version.is_covered(started)) {
            version.durable = true;
        }
    }

    /// Returns whether a flush that began at `started` would change something.
    pub(super) fn flush_matters(&self, started: u64) -> bool {
        self.versions.iter().any(|version| !version.durable && version.is_covered(started))
    }

    /// Returns whether nothing is in doubt: there is one durable value.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.versions.as_slice(), [only] if only.durable)
    }

    /// Records a power cut at `now`.
    pub(super) fn cut_power(&mut self, now: u64) {
        self.drop_lost(0);
        self.forget_order(now, true, false, |_| true);
    }

    /// Records that a backing device has reverted to the content before its last writes. Nothing is
    /// kept for reads in flight: they may have seen that content too, however long ago a durable
    /// version replaced it in the cache.
    pub(super) fn drop_backing(&mut self, now: u64) {
        self.reverted = now;
        self.revert(now, 0);
    }

    /// Records that versions that are not durable may have reverted to an older one, and that
    /// clients have not been told: a later successful flush still promises what was acknowledged.
    pub(super) fn revert(&mut self, now: u64, oldest_read: u64) {
        self.drop_lost(oldest_read);
        let lost = self.lost();
        let order = self.order(|later| later.is_covered(NEVER) || later.in_flight);
        let promised: Vec<(u64, bool)> =
            self.versions.iter().map(|version| (version.promised, version.broken)).collect();
        // An operation in flight may consist of several writes, some of which had landed, were seen
        // and are lost. Or it may have come back over a later one.
        let mut reopened = false;
        for version in self.versions.iter_mut().filter(|version| version.in_flight && version.happened) {
            (version.happened, version.by, version.dead_at) = (false, NEVER, NEVER);
            reopened = true;
        }
        let back = |version: &SectorVersion| !version.in_flight && !lost.contains(&version.number);
        self.forget_order(now, false, !reopened, back);
        // `forget_order` merges versions only for a power cut, so the indices still match.
        for ((version, before), promised) in self.versions.iter_mut().zip(order).zip(promised) {
            if back(version) {
                version.before = before;
                (version.promised, version.broken) = promised;
                version.untold = version.is_covered(NEVER);
            }
        }
        self.settle();
    }

    /// Records the failure of a flush that was submitted at `started`. Its client knows, so what it
    /// should have covered is not promised.
    pub(super) fn forget_promises(&mut self, started: u64) {
        for version in self.versions.iter_mut().filter(|version| version.ended < started) {
            version.broken |= !version.durable && version.promised != NEVER;
        }
    }

    /// Records the death of the process, and with it the loss of all knowledge of what a device has
    /// dropped.
    pub(super) fn forget_untold(&mut self) {
        for version in self.versions.iter_mut().filter(|version| version.untold) {
            (version.untold, version.broken) = (false, true);
        }
    }

    /// Records the death of a process whose cache had dropped something at `dropped`. What was
    /// acknowledged by then and is not durable may have reverted again, whatever was read since,
    /// unless something was acknowledged later.
    pub(super) fn go_back(&mut self, now: u64, dropped: u64) {
        if self.stands_since(dropped) {
            self.forget_untold();
        } else {
            self.drop_lost(0);
            self.forget_order(now, false, true, |_| true);
        }
    }

    /// Records that a backing device is back that dropped something at `dropped` and was away
    /// since. What was in flight then, and has ended, has reverted too, unless something was
    /// acknowledged later.
    pub(super) fn is_back(&mut self, now: u64, dropped: u64) {
        if !self.stands_since(dropped) {
            self.drop_backing(now);
        }
    }

    /// Returns whether an operation has happened that was submitted after `event`.
    fn stands_since(&self, event: u64) -> bool {
        self.versions.iter().any(|version| version.happened && version.start > event)
    }

    /// Records the death of a process and the loss of its note, whose file was removed at `gone`.
    /// What is not durable may have reverted, whatever was read since, unless something was
    /// submitted later and acknowledged.
    pub(super) fn lose_note(&mut self, now: u64, gone: u64) {
        let mut since = self.versions.iter().filter(|version| version.happened && version.start > gone);
        let stands = since.clone().next().is_some() && since.all(|version| version.acknowledged);
        if !stands {
            self.drop_lost(0);
            self.forget_order(now, false, true, |_| true);
        }
    }

    /// Returns the contents that may be there now.
    pub(super) fn candidates(&self) -> Vec<VersionContent> {
        let mut contents: Vec<VersionContent> = Vec::new();
        for version in self.versions.iter().filter(|version| version.dead_at == NEVER) {
            if !contents.contains(&version.content) {
                contents.push(version.content);
            }
        }
        contents
    }

    /// Returns, for each version, the versions that surely come later, among those that `counts`
    /// accepts.
    fn order(&self, counts: impl Fn(&SectorVersion) -> bool) -> Vec<Vec<u64>> {
        let later = |older: &SectorVersion| {
            let later = self.versions.iter().filter(|later| counts(later) && older.precedes(later));
            later.map(|later| later.number).collect()
        };
        self.versions.iter().map(later).collect()
    }

    /// Makes the `chosen` versions equal candidates; a single one may stay as it is.
    fn forget_order(
        &mut self,
        now: u64,
        power_cut: bool,
        may_stay: bool,
        chosen: impl Fn(&SectorVersion) -> bool,
    ) {
        if power_cut {
            let mut distinct: Vec<SectorVersion> = Vec::with_capacity(self.versions.len());
            for version in self.versions.drain(..) {
                if !distinct.iter().any(|kept| kept.content == version.content) {
                    distinct.push(version);
                }
            }
            self.versions = distinct;
        }
        let (mut candidates, mut contents) = (0, 0);
        for version in self.versions.iter().filter(|version| chosen(version)) {
            candidates += 1;
            contents += usize::from(matches!(version.content, VersionContent::Value(_)));
        }
        let single = (candidates, contents) == (1, 1);
        if single && may_stay {
            // There is nothing else that could have come back.
            return;
        }
        for version in self.versions.iter_mut().filter(|version| chosen(version)) {
            let fresh = SectorVersion::begun(version.number, version.content, now);
            *version = SectorVersion {
                by: now,
                in_flight: false,
                happened: single,
                durable: single && (power_cut || version.durable),
                promised: if single { version.promised } else { NEVER },
                ended: version.ended.min(now),
                on_medium: power_cut,
                returned: !power_cut,
                ..fresh
            };
        }
    }

    /// Records the death of the process at `now`: operations in flight took effect by now or not at
    /// all.
    pub(super) fn kill(&mut self, now: u64) {
        self.versions.iter_mut().filter(|version| version.in_flight).for_each(|version| version.end(now));
    }

    /// Forgets versions that no crash and no read begun since `oldest_read` can show.
    pub(super) fn prune(&mut self, oldest_read: u64) {
        if self.versions.len() > 1 {
            self.drop_lost(oldest_read);
        }
    }

    /// Returns the versions that a durable one surely replaced; only reads that began earlier may
    /// still return them.
    fn lost(&self) -> Vec<u64> {
        let is_lost = |version: &&SectorVersion| {
            let replaced = |later: &SectorVersion| {
                later.number != version.number && later.durable && version.precedes(later)
            };
            self.versions.iter().any(replaced)
        };
        self.versions.iter().filter(is_lost).map(|version| version.number).collect()
    }

    /// Drops lost versions. If `oldest_read` is zero, no read is in flight.
    fn drop_lost(&mut self, oldest_read: u64) {
        let lost = |at: usize| {
            let version = &self.versions[at];
            let readable = oldest_read > 0 && version.dead_at > oldest_read;
            let replaced = |(other, later): (usize, &SectorVersion)| {
                other != at && later.durable && version.precedes(later)
            };
            !readable && self.versions.iter().enumerate().any(replaced)
        };
        let flags: Vec<bool> = (0..self.versions.len()).map(lost).collect();
        let mut flags = flags.into_iter();
        self.versions.retain(|_| !flags.next().expect("one flag each"));
    }

    /// Marks versions as dead that the times show to be replaced.
    fn settle(&mut self) {
        for later in 0..self.versions.len() {
            let SectorVersion { number, happened, start, by, .. } = self.versions[later];
            if !happened {
                continue;
            }
            for (other, version) in self.versions.iter_mut().enumerate() {
                if other != later && (version.by < start || version.before.contains(&number)) {
                    version.dead_at = version.dead_at.min(by);
                }
            }
        }
    }

    /// Returns, for the report, what a read that began at `start` might have returned.
    pub(super) fn allowed(&self, start: u64) -> Vec<VersionContent> {
        self.versions
            .iter()
            .filter(|version| version.dead_at > start)
            .map(|version| version.content)
            .collect()
    }
}
