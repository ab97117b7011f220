//! The keys of the journal that are not in their leaves yet, in a set that is served before they are: they lie over the tree.
//!
//! Of each place they say more than the tree does. So a read takes from them what they hold ([`State::pending_piece`]), and whoever looks at
//! the keys of a leaf, or changes them, has those in his range put there first ([`Need::Replay`]): only then does a leaf say what is so. A task
//! puts the rest (`journal::drain`). The walk alone reads leaves as they are: it counts them, and what is put later changes the counts as any
//! key does. So as long as there are keys here nobody knows what is dirty ([`State::is_counted`]), though every bucket may be known.
//!
//! Each holds its journal entry and its buckets as if it were in a leaf that is not written. A key is taken from here in the transition that
//! puts it there, and never comes back: what enters the leaf later is newer.

use crate::backoff::Tries;
use crate::btree::{Attempt, Content, Need, Piece, Record, live_pointers};
use crate::error::Error;
use crate::journal::latest::{Latest, rest_of};
use crate::journal::replay::is_void;
use crate::state::State;
use alloc::collections::BTreeMap;
use bcached_format::{Inode, Key, Position};

/// The keys, and what they hold.
#[derive(Default)]
pub struct Overlay {
    keys: Latest,
    /// How many there are of each entry.
    by_entry: BTreeMap<u64, u32>,
    by_inode: BTreeMap<Inode, Counts>,
    /// There have been some: what contradicts itself may be met late.
    was_there: bool,
    /// They cannot all be put for now.
    trouble: Tries,
    /// All that are left are of leaves that are damaged and passed by ([`crate::btree::frozen`]): they stay here, and nobody waits for them.
    pub are_frozen: bool,
    /// A start adds keys: with none there are not all in their leaves.
    pub grows: bool,
    /// The task that puts them waits for buckets.
    pub waits_for_buckets: bool,
}

/// Keys of one volume.
#[derive(Clone, Copy, Default)]
struct Counts {
    keys: usize,
    dirty: usize,
}

/// Where the next key is, for who puts one after the other.
pub enum Next {
    /// This one.
    Key(Key),
    /// Not before that, as far as was looked.
    Behind(Position),
    /// There is none.
    None,
}

impl Overlay {
    /// All are in their leaves, if there ever were some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// There are some that will be put.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !self.is_empty() && !self.are_frozen
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// There have been some.
    #[must_use]
    pub const fn was_there(&self) -> bool {
        self.was_there
    }

    /// The oldest entry that has one.
    #[must_use]
    pub fn oldest(&self) -> Option<u64> {
        self.by_entry.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// There are some of volume `inode`.
    #[must_use]
    pub fn has_keys_of(&self, inode: Inode) -> bool {
        self.by_inode.contains_key(&inode)
    }

    /// Some of them are dirty.
    #[must_use]
    pub fn has_dirty_of(&self, inode: Inode) -> bool {
        self.by_inode.get(&inode).is_some_and(|counts| counts.dirty > 0)
    }

    /// The first that has something to say of `[start, end)`.
    #[must_use]
    pub fn first_in(&self, inode: Inode, start: u64, end: u64) -> Option<(u64, Key)> {
        // Most requests are served when there are none any more.
        if self.is_empty() || start >= end {
            return None;
        }
        let first = self.keys.behind(Position::new(inode, start)).next();
        first.filter(|(_, key)| key.inode == inode && key.start() < end).copied()
    }

    /// The next key behind `at` that is of an entry up to `through`, looking at no more than so many.
    #[must_use]
    pub fn next_from(&self, at: Position, through: u64, most: usize) -> Next {
        let mut seen = 0;
        let mut last = at;
        for (sequence, key) in self.keys.behind(at) {
            if seen == most {
                return Next::Behind(last);
            }
            if *sequence <= through {
                return Next::Key(*key);
            }
            (seen, last) = (seen + 1, key.position());
        }
        Next::None
    }

    /// A try to put them all has come to its end, and has met this.
    pub fn tried(&mut self, met: Option<Error>) {
        match met {
            Some(error) => self.trouble.meets(error),
            None => self.trouble = Tries::NONE,
        }
    }

    /// Why they are not all put, after so many tries in a row.
    #[must_use]
    pub fn trouble(&self, tries_min: u32) -> Option<Error> {
        self.trouble.error_after(tries_min)
    }

    /// Asserts that what is counted is there.
    pub fn check_invariants(&self) {
        let entries: u64 = self.by_entry.values().map(|count| u64::from(*count)).sum();
        let keys: usize = self.by_inode.values().map(|counts| counts.keys).sum();
        assert_eq!((entries, keys), (self.len() as u64, self.len()), "pending keys are counted");
    }
}

impl State {
    /// All that the tree and the journal say has been counted, so it is known what is dirty.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.frontier.is_complete() && !self.overlay.is_awaited()
    }

    /// All that they say of volume `inode`.
    #[must_use]
    pub fn has_counted(&self, inode: Inode) -> bool {
        self.has_passed(inode) && !self.overlay.has_keys_of(inode)
    }

    /// All that the tree says of it.
    #[must_use]
    pub fn has_passed(&self, inode: Inode) -> bool {
        self.frontier.has_passed(inode) && self.frozen.hides(inode).is_none()
    }

    /// How much has been, in percent; 100: all.
    #[must_use]
    pub fn counted_percent(&self) -> u64 {
        let percent = self.frontier.percent();
        if self.overlay.is_awaited() { percent.min(99) } else { percent }
    }

    /// Why that does not come to its end, if so. While a set is opened or stopped the first error counts.
    #[must_use]
    pub fn replay_is_in_vain(&self) -> Option<Error> {
        // The walk comes to a damaged node too, and passes it by.
        let passes = |error: &Error| matches!(error, Error::Node { .. }) && !self.frontier.is_complete();
        self.keys_stay().filter(|error| self.overlay.is_awaited() && !passes(error))
    }

    /// Why keys stay where they are, if so.
    fn keys_stay(&self) -> Option<Error> {
        self.overlay.trouble(self.tries_awaited())
    }

    /// Why there will be no more room in the journal, if so: its oldest entry is needed for keys that cannot be put, and nothing else is
    /// on its way.
    #[must_use]
    pub fn journal_is_in_vain(&self) -> Option<Error> {
        let error = self.keys_stay().filter(|_| self.overlay_holds_journal())?;
        (self.journal.is_at_rest() && !self.journal.would_free()).then_some(error)
    }

    /// A replay has used up the room in the journal, and needs more.
    #[must_use]
    pub fn journal_is_exhausted(&self) -> bool {
        let waits = self.overlay.waits_for_buckets && self.overlay_holds_journal();
        self.journal.is_exhausted() || waits && self.journal.has_no_way_on()
    }

    /// The journal is filling up for the sake of keys that stay here: they are to be carried on, or there would be no room one day.
    #[must_use]
    pub fn wants_carrying(&self) -> bool {
        self.overlay.are_frozen && self.overlay_holds_journal() && self.journal.is_half_full()
    }

    /// The oldest entry of the journal that is needed is so for a key that is here.
    fn overlay_holds_journal(&self) -> bool {
        self.overlay.oldest().is_some_and(|oldest| self.journal.oldest_pin() == Some(oldest))
    }

    /// A replay goes on that may come to need what little room there is in the journal.
    #[must_use]
    pub fn is_replay_pressed(&self) -> bool {
        (self.journal.is_replaying() || !self.overlay.is_empty()) && self.journal.is_scarce()
    }

    /// What comes first of what is to be put in `[start, end)`, a part of one leaf, before anybody looks there.
    pub(crate) fn pending(&self, inode: Inode, start: u64, end: u64) -> Result<(), Need> {
        match self.overlay.first_in(inode, start, end) {
            Some((_, key)) => Err(Need::Replay(key.position())),
            None => Ok(()),
        }
    }

    /// What `key`, which lies over `start`, says from there on.
    pub(crate) fn pending_piece(&self, key: &Key, start: u64, end: u64) -> Piece {
        let part = key.cut(start, end).expect("it lies over the start");
        let content = match live_pointers(&self.buckets, &part.pointers) {
            Some(pointers) => Content::Cached { pointers, dirty: part.dirty },
            None => Content::Hole,
        };
        Piece { start: part.start(), end: part.end, content }
    }

    /// Puts the key that ends at `end`, as much of it as its first leaf takes. Done, too, if somebody else has put it.
    pub(crate) fn put_pending(&mut self, end: Position) -> Attempt<()> {
        let Some((sequence, key)) = self.overlay.keys.get(end) else { return Attempt::Done(()) };
        let upto = match self.insert(&self.or_hole(&key), Record::Replay(sequence)) {
            Attempt::Done(upto) => upto,
            Attempt::Needs(need) => return Attempt::Needs(need),
        };
        match key.cut(upto, key.end) {
            // It holds what the whole of it held.
            Some(rest) => self.overlay.keys.replace((sequence, rest)),
            None => drop(self.take_pending(end)),
        }
        Attempt::Done(())
    }

    /// A key whose bucket has been reused since says only that older keys of its range are void (format 9.5): they are, and
    /// what replaced it comes later in the journal, or was clean and may be lost. Of two copies one may be left.
    pub(crate) fn or_hole(&self, key: &Key) -> Key {
        match live_pointers(&self.buckets, &key.pointers).filter(|_| !is_void(&self.buckets, key)) {
            Some(pointers) => Key { pointers, ..*key },
            None => Key::hole(key.inode, key.start(), key.end),
        }
    }

    /// The journal says this last of a place, when the set is opened.
    pub(crate) fn note_replayed(&mut self, key: &Key) {
        if key.dirty {
            self.replayed_dirty.insert(key.inode);
        }
    }

    /// Adds a key of entry `sequence`; there is nothing else in its range.
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

    /// Takes the key away that ends at `end`, and what it holds.
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

    /// Journals a key anew that is here, unless it is not any more: then somebody has put it, or something newer is in its place.
    pub(crate) fn carry_pending(&mut self, key: &Key) -> Attempt<()> {
        match self.overlay.keys.get(key.position()) {
            // It is the only one in its range, so it goes and comes in one step.
            Some((_, found)) if found == *key => self.journal_pending(key).map(|is_all| {
                assert!(is_all, "{key:?}: two keys lie over one place");
            }),
            _ => Attempt::Done(()),
        }
    }

    /// Journals a key that only the note has, and adds it, over what is there. Done with false: there is more to take away first.
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
