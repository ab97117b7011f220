//! The overlay: journal keys that are not in their leaves yet, in a set that serves requests before
//! replay has finished.
//!
//! For each extent the overlay is newer than the tree:
//!
//! - A read takes overlay keys first ([`State::pending_piece`]).
//! - Code that looks at the keys of a leaf, or changes them, first has the overlay keys in its
//!   range applied there ([`Need::Replay`]). Only then is the leaf up to date.
//! - A task applies the rest (`journal::drain`).
//! - Only the tree walk reads leaves as they are. It counts their keys, and a key that is applied
//!   later changes the counts like any other. So while the overlay has keys, the amount of dirty
//!   data is unknown ([`State::is_counted`]), even if every bucket is known.
//!
//! Each key pins its journal entry and its buckets as if it were in an unwritten leaf. A key is
//! removed from the overlay in the same transition that inserts it into the leaf, and never
//! returns: whatever enters the leaf later is newer.

use crate::backoff::Backoff;
use crate::btree::{Attempt, Content, InsertKind, Need, Piece, live_pointers};
use crate::error::Error;
use crate::journal::latest::{LatestKeys, rest_of};
use crate::journal::replay::is_void;
use crate::state::State;
use alloc::collections::BTreeMap;
use bcached_format::{Inode, Key, Position};

/// The overlay keys, and the journal entries and buckets that they pin.
#[derive(Default)]
pub struct Overlay {
    keys: LatestKeys,
    /// Number of keys from each journal entry.
    by_entry: BTreeMap<u64, u32>,
    by_inode: BTreeMap<Inode, KeyCounts>,
    /// The overlay has held keys: inconsistencies in the metadata may be discovered late.
    was_there: bool,
    /// The tries that could not apply all keys, and their error.
    trouble: Backoff,
    /// All remaining keys belong to damaged leaves that are skipped
    /// ([`crate::btree::frozen_ranges`]). They stay here, and no task waits for them.
    pub are_frozen: bool,
    /// A start is still adding keys: an empty overlay does not mean that all keys are in their
    /// leaves.
    pub grows: bool,
    /// The drain task waits for buckets.
    pub waits_for_buckets: bool,
}

/// Key counts of one volume.
#[derive(Clone, Copy, Default)]
struct KeyCounts {
    keys: usize,
    dirty: usize,
}

/// Where the next key is, for code that applies one after the other.
pub enum NextKey {
    /// This key.
    Key(Key),
    /// The search stopped here without a match; the next key lies behind this position.
    Behind(Position),
    /// No further key.
    None,
}

impl Overlay {
    /// Returns true if all keys are in their leaves, or there never were any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns true if there are keys that will be applied.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !self.is_empty() && !self.are_frozen
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if the overlay has ever held keys.
    #[must_use]
    pub const fn was_there(&self) -> bool {
        self.was_there
    }

    /// The oldest journal entry that a key comes from.
    #[must_use]
    pub fn oldest(&self) -> Option<u64> {
        self.by_entry.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// Returns true if there are keys of volume `inode`.
    #[must_use]
    pub fn has_keys_of(&self, inode: Inode) -> bool {
        self.by_inode.contains_key(&inode)
    }

    /// Returns true if there are dirty keys of volume `inode`.
    #[must_use]
    pub fn has_dirty_of(&self, inode: Inode) -> bool {
        self.by_inode.get(&inode).is_some_and(|counts| counts.dirty > 0)
    }

    /// The first key that overlaps `[start, end)`.
    #[must_use]
    pub fn first_in(&self, inode: Inode, start: u64, end: u64) -> Option<(u64, Key)> {
        // Fast path: the overlay is empty for most requests.
        if self.is_empty() || start >= end {
            return None;
        }
        let first = self.keys.behind(Position::new(inode, start)).next();
        first.filter(|(_, key)| key.inode == inode && key.start() < end).copied()
    }

    /// The next key behind `at` from an entry up to `through`. Looks at no more than `most` keys.
    #[must_use]
    pub fn next_from(&self, at: Position, through: u64, most: usize) -> NextKey {
        let mut seen = 0;
        let mut last = at;
        for (sequence, key) in self.keys.behind(at) {
            if seen == most {
                return NextKey::Behind(last);
            }
            if *sequence <= through {
                return NextKey::Key(*key);
            }
            (seen, last) = (seen + 1, key.position());
        }
        NextKey::None
    }

    /// Records the end of a try to apply all keys, and the error that it met, if any.
    pub fn tried(&mut self, met: Option<Error>) {
        match met {
            Some(error) => self.trouble.meets(error),
            None => self.trouble = Backoff::NONE,
        }
    }

    /// The error that keeps keys in the overlay, once `tries_min` tries in a row have failed.
    #[must_use]
    pub fn trouble(&self, tries_min: u32) -> Option<Error> {
        self.trouble.error_after(tries_min)
    }

    /// Asserts that the counts match the keys.
    pub fn check_invariants(&self) {
        let entries: u64 = self.by_entry.values().map(|count| u64::from(*count)).sum();
        let keys: usize = self.by_inode.values().map(|counts| counts.keys).sum();
        assert_eq!((entries, keys), (self.len() as u64, self.len()), "pending keys are counted");
    }
}

impl State {
    /// Returns true if everything in the tree and the journal has been counted, so that the amount
    /// of dirty data is known (invariant D43).
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.frontier.is_complete() && !self.overlay.is_awaited()
    }

    /// Like [`State::is_counted`], for volume `inode` only.
    #[must_use]
    pub fn has_counted(&self, inode: Inode) -> bool {
        self.has_passed(inode) && !self.overlay.has_keys_of(inode)
    }

    /// Returns true if the walk has counted all keys of volume `inode` in the tree.
    #[must_use]
    pub fn has_passed(&self, inode: Inode) -> bool {
        self.frontier.has_passed(inode) && self.frozen.hides(inode).is_none()
    }

    /// Counting progress in percent; 100: complete.
    #[must_use]
    pub fn counted_percent(&self) -> u64 {
        let percent = self.frontier.percent();
        if self.overlay.is_awaited() { percent.min(99) } else { percent }
    }

    /// The error that keeps replay from finishing, if any. While a set is being opened or stopped,
    /// the first error counts.
    #[must_use]
    pub fn replay_is_in_vain(&self) -> Option<Error> {
        // The walk reaches a damaged node too, and skips it.
        let passes = |error: &Error| matches!(error, Error::Node { .. }) && !self.frontier.is_complete();
        self.keys_stay().filter(|error| self.overlay.is_awaited() && !passes(error))
    }

    /// The error that keeps keys in the overlay, if any.
    fn keys_stay(&self) -> Option<Error> {
        self.overlay.trouble(self.tries_awaited())
    }

    /// The error because of which no more journal space can become free, if that is so: the oldest
    /// entry is pinned by keys that cannot be applied, and no other entry is pending.
    #[must_use]
    pub fn journal_is_in_vain(&self) -> Option<Error> {
        let error = self.keys_stay().filter(|_| self.overlay_holds_journal())?;
        (self.journal.is_at_rest() && !self.journal.would_free()).then_some(error)
    }

    /// Returns true if replay has used up the journal's space and needs more.
    #[must_use]
    pub fn journal_is_exhausted(&self) -> bool {
        let waits = self.overlay.waits_for_buckets && self.overlay_holds_journal();
        self.journal.is_exhausted() || waits && self.journal.has_no_way_on()
    }

    /// Returns true if keys that stay in the overlay fill up the journal. They must be
    /// re-journalled, or the journal eventually runs out of space.
    #[must_use]
    pub fn wants_carrying(&self) -> bool {
        self.overlay.are_frozen && self.overlay_holds_journal() && self.journal.is_half_full()
    }

    /// Returns true if an overlay key pins the oldest journal entry that is needed.
    fn overlay_holds_journal(&self) -> bool {
        self.overlay.oldest().is_some_and(|oldest| self.journal.oldest_pin() == Some(oldest))
    }

    /// Returns true if replay is in progress and may need the little space that the journal has
    /// left.
    #[must_use]
    pub fn is_replay_pressed(&self) -> bool {
        (self.journal.is_replaying() || !self.overlay.is_empty()) && self.journal.is_scarce()
    }

    /// Returns the first key to apply in `[start, end)`, a part of one leaf, as a [`Need`], before
    /// anything reads or changes the leaf there (invariant D44).
    pub(crate) fn pending(&self, inode: Inode, start: u64, end: u64) -> Result<(), Need> {
        match self.overlay.first_in(inode, start, end) {
            Some((_, key)) => Err(Need::Replay(key.position())),
            None => Ok(()),
        }
    }

    /// What `key`, which covers `start`, says about `[start, end)`.
    pub(crate) fn pending_piece(&self, key: &Key, start: u64, end: u64) -> Piece {
        let part = key.cut(start, end).expect("the key covers the start");
        let content = match live_pointers(&self.buckets, &part.pointers) {
            Some(pointers) => Content::Cached { pointers, dirty: part.dirty },
            None => Content::Hole,
        };
        Piece { start: part.start(), end: part.end, content }
    }

    /// Applies the key that ends at `end`, as much of it as belongs to its first leaf. Also done if
    /// the key has been applied already.
    pub(crate) fn put_pending(&mut self, end: Position) -> Attempt<()> {
        let Some((sequence, key)) = self.overlay.keys.get(end) else { return Attempt::Done(()) };
        let upto = match self.insert(&self.or_hole(&key), InsertKind::Replay(sequence)) {
            Attempt::Done(upto) => upto,
            Attempt::Needs(need) => return Attempt::Needs(need),
        };
        match key.cut(upto, key.end) {
            // The remainder keeps the pins of the whole key.
            Some(rest) => self.overlay.keys.replace((sequence, rest)),
            None => drop(self.take_pending(end)),
        }
        Attempt::Done(())
    }

    /// Replaces a key whose bucket has been reused since by a hole. Such a key says only that older
    /// keys of its range are void. That remains true: what replaced its data comes
    /// later in the journal, or was clean and may be lost. Of two copies one may still be valid.
    pub(crate) fn or_hole(&self, key: &Key) -> Key {
        match live_pointers(&self.buckets, &key.pointers).filter(|_| !is_void(&self.buckets, key)) {
            Some(pointers) => Key { pointers, ..*key },
            None => Key::hole(key.inode, key.start(), key.end),
        }
    }

    /// Notes the last key that the journal has for an extent when the set is opened.
    pub(crate) fn note_replayed(&mut self, key: &Key) {
        if key.dirty {
            self.replayed_dirty.insert(key.inode);
        }
    }

    /// Adds a key of entry `sequence`. Nothing else in the overlay overlaps its range.
    pub(crate) fn add_pending(&mut self, sequence: u64, key: &Key) {
        self.pin(&key.pointers);
        let entry = self.overlay.by_entry.entry(sequence).or_insert(0);
        *entry += 1;
        if *entry == 1 {
            self.journal.pin(sequence);
        }
        let counts = self.overlay.by_inode.entry(key.inode).or_default();
        counts.keys += 1;
        counts.dirty += usize::from(key.dirty);
        self.overlay.keys.replace((sequence, *key));
        self.overlay.was_there = true;
    }

    /// Removes the key that ends at `end`, with its pins and counts.
    fn take_pending(&mut self, end: Position) -> Option<(u64, Key)> {
        let (sequence, key) = self.overlay.keys.take(end)?;
        self.unpin(&key.pointers);
        let entry = self.overlay.by_entry.get_mut(&sequence).expect("keys are counted by their entries");
        *entry -= 1;
        if *entry == 0 {
            self.overlay.by_entry.remove(&sequence);
            self.journal.unpin(sequence);
        }
        let counts = self.overlay.by_inode.get_mut(&key.inode).expect("keys are counted by their volumes");
        counts.keys -= 1;
        counts.dirty -= usize::from(key.dirty);
        if counts.keys == 0 {
            self.overlay.by_inode.remove(&key.inode);
        }
        Some((sequence, key))
    }

    /// Re-journals an overlay key, unless it is gone: then it has been applied, or something newer
    /// is in its place.
    pub(crate) fn carry_pending(&mut self, key: &Key) -> Attempt<()> {
        match self.overlay.keys.get(key.position()) {
            // It is the only key in its range, so it is replaced in one step.
            Some((_, found)) if found == *key => self.journal_pending(key).map(|is_all| {
                assert!(is_all, "{key:?}: two keys cover the same range");
            }),
            _ => Attempt::Done(()),
        }
    }

    /// Journals a key that only the note has, and adds it over whatever the overlay holds in its
    /// range. Done with false: more keys must be removed first.
    pub(crate) fn journal_pending(&mut self, key: &Key) -> Attempt<bool> {
        let key = self.or_hole(key);
        if !self.journal.has_room(key.words()) {
            return Attempt::Needs(Need::Journal);
        }
        for end in self.overlay.keys.under(&key) {
            self.work.insert(0);
            let Some((sequence, old)) = self.take_pending(end) else { continue };
            for part in rest_of(&old, &key) {
                self.add_pending(sequence, &part);
            }
        }
        self.work.insert(0);
        if !self.overlay.keys.under(&key).is_empty() {
            return Attempt::Done(false);
        }
        self.untold |= !self.journal.has_keys();
        let sequence = self.journal.append(&key);
        self.add_pending(sequence, &key);
        Attempt::Done(true)
    }
}
