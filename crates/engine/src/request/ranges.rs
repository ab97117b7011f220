//! Who is doing what where: writes, fills, cleanings, misses and parked keys of one volume, by range.
//!
//! Rules, all decided here:
//! 1. Overlapping writes go one after the other, in order of arrival.
//! 2. A fill (data read from the backing device on its way into the cache) is dropped when a write to its range is
//!    granted after the fill was entered; it is not entered at all over a write in progress.
//! 3. A write that goes to the backing device waits for a cleaning (write-back of the range in progress) to end: the
//!    older data must not land on top. A cleaning does not start over a write in progress.
//! 4. A write that puts new data on the backing device while what is older stays in the tree waits for the misses (reads of
//!    the backing device) that were entered before: a slow one would return the new data, and the next read the old.
//! 5. A parked key (clean data in the cache whose backing write is not flushed yet) is found by reads, and cut by the
//!    first write to its range that is granted.

use crate::volume::epoch::Stamp;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Pointers};
use slab::Slab;

/// Names an entry of the table, and says where it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    number: u64,
    start: u64,
    /// Its place among the entries, if it is not of a cleaning.
    place: u32,
    /// Which of the table's lists it is in; those of cleanings follow the others.
    class: u8,
}

/// What was entered before it is told from what came later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment(u64);

/// The longest entries of each of the table's lists, in sectors: few overlap among the shorter, and there are few of the longest.
const LENGTHS: [u64; 3] = [256, 8192, u64::MAX];

/// The place of a cleaning among the entries.
const NOWHERE: u32 = u32::MAX;

/// The class of the first list of cleanings.
const CLEANINGS: u8 = 3;
const _: () = assert!(CLEANINGS as usize == LENGTHS.len(), "they follow the others");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Write {
        granted: bool,
    },
    Fill {
        dropped: bool,
        /// What is to be filled is still being read from the backing device.
        missing: bool,
    },
    Miss,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: u64,
    number: u64,
    end: u64,
    kind: Kind,
}

/// An entry in a list: what those who look for what overlaps must know of it.
#[derive(Clone, Copy, Debug)]
struct Listed {
    start: u64,
    end: u64,
    place: u32,
}

/// Clean data that waits for the backing device's flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parked {
    /// End of the range; it starts at its key in the table.
    pub end: u64,
    /// Where the data is in the cache.
    pub pointers: Pointers,
    /// When its backing write completed.
    pub stamp: Stamp,
}

impl Parked {
    /// As a clean key of volume `inode`, starting at `start`.
    #[must_use]
    pub fn key(&self, inode: Inode, start: u64) -> Key {
        let size = u16::try_from(self.end - start).expect("parked pieces come from buckets, cut to keys");
        Key { inode, size, dirty: false, end: self.end, pointers: self.pointers }
    }
}

/// What goes on at a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claims {
    /// It is being written, or a write waits for its turn.
    pub writing: bool,
    /// It is being written back.
    pub writing_back: bool,
    /// It is being read from the backing device.
    pub missing: bool,
    /// What was read there is on its way into the cache.
    pub filling: bool,
}

/// The table of one volume. Sectors of the key space.
#[derive(Default)]
pub struct Ranges {
    /// All but cleanings, where nothing is moved: who has a claim finds its entry at once.
    entries: Slab<Entry>,
    /// The same by where they start, and then by number; those apart that are longer than others: who looks for what overlaps goes over all that
    /// start so far before, and one long discard would have him go over everything. A request has one entry as a rule, and a list of what is in
    /// flight is short: in one piece of memory that grows once, it takes less than a tree.
    lists: [Vec<Listed>; LENGTHS.len()],
    /// The same of cleanings, by start and number: their ends. A batch has thousands, which those who are in flight for clients would be moved
    /// past one by one; and it may ask for memory, as nothing of a request does.
    cleanings: [BTreeMap<(u64, u64), u64>; LENGTHS.len()],
    /// Writes among them.
    writes: usize,
    parked: BTreeMap<u64, Parked>,
    next: u64,
}

impl Ranges {
    fn enter(&mut self, start: u64, end: u64, kind: Kind) -> Claim {
        let (number, class) = self.claim(start, end);
        let entry = Entry { start, number, end, kind };
        self.writes += usize::from(entry.is_write());
        let place = u32::try_from(self.entries.insert(entry)).expect("fewer than that are in flight");
        let list = &mut self.lists[usize::from(class)];
        // Nothing there has a higher number.
        let at = list.partition_point(|other| other.start <= start);
        list.insert(at, Listed { start, end, place });
        Claim { number, start, place, class }
    }

    /// A number for what is entered next, and the class of its length.
    fn claim(&mut self, start: u64, end: u64) -> (u64, u8) {
        assert!(start < end, "a claim covers something");
        let number = self.next;
        self.next += 1;
        (number, LENGTHS.iter().map(|longest| u8::from(*longest < end - start)).sum())
    }

    /// The entry of a claim, if that is not of a cleaning and has not been released.
    fn entry(&self, claim: Claim) -> Option<&Entry> {
        self.entries.get(claim.place as usize).filter(|entry| entry.is_of(claim))
    }

    fn entry_mut(&mut self, claim: Claim) -> Option<&mut Entry> {
        self.entries.get_mut(claim.place as usize).filter(|entry| entry.is_of(claim))
    }

    /// What overlaps `[start, end)`, but for cleanings, in no order. The volume may have thousands of claims, most of them elsewhere.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &Entry> + '_ {
        let lists = LENGTHS.iter().zip(&self.lists);
        let near = lists.flat_map(move |(longest, list)| overlapping_of(list, *longest, (start, end)));
        near.map(|listed| &self.entries[listed.place as usize])
    }

    /// Whether `[start, end)` or a part of it is being written back.
    fn is_being_cleaned(&self, start: u64, end: u64) -> bool {
        LENGTHS.iter().zip(&self.cleanings).any(|(longest, list)| {
            // As a rule there is none.
            !list.is_empty()
                && list.range((start.saturating_sub(*longest), 0)..(end, 0)).any(|(_, until)| *until > start)
        })
    }

    /// Whether anything that `counts` overlaps `[start, end)`, but for cleanings.
    fn is_busy(&self, start: u64, end: u64, counts: impl Fn(Kind) -> bool) -> bool {
        LENGTHS.iter().zip(&self.lists).any(|(longest, list)| {
            overlapping_of(list, *longest, (start, end))
                .any(|listed| counts(self.entries[listed.place as usize].kind))
        })
    }

    /// Nobody does anything in `[start, end)`, and nothing is parked there.
    #[must_use]
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        let is_busy = self.is_being_cleaned(start, end) || self.is_busy(start, end, |_| true);
        !is_busy && !self.is_parked_in(start, end)
    }

    /// Enters a write where nobody does anything: it is granted.
    pub fn begin_write(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, Kind::Write { granted: true })
    }

    /// Queues a write; see [`Ranges::try_grant`].
    pub fn queue_write(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, Kind::Write { granted: false })
    }

    /// Grants a queued write if no earlier one overlaps. When granted, fills of the range are dropped and parked
    /// pieces are cut; `cut` is told which parts went, so that their buckets can be unpinned and pinned again.
    pub fn try_grant(&mut self, claim: Claim, cut: &mut dyn FnMut(Cut)) -> bool {
        let Entry { start, end, .. } = *self.entry(claim).expect("it was queued");
        let is_earlier_write = |entry: &Entry| entry.number < claim.number && entry.is_write();
        if self.overlapping(start, end).any(is_earlier_write) {
            return false;
        }
        for (longest, list) in LENGTHS.iter().zip(&self.lists) {
            for listed in overlapping_of(list, *longest, (start, end)) {
                if let Kind::Fill { dropped, .. } = &mut self.entries[listed.place as usize].kind {
                    *dropped = true;
                }
            }
        }
        self.cut_parked(start, end, cut);
        self.entry_mut(claim).expect("it was queued").kind = Kind::Write { granted: true };
        true
    }

    /// True when nothing that is being written back overlaps: a write may go to the backing device.
    #[must_use]
    pub fn backing_is_free(&self, start: u64, end: u64) -> bool {
        !self.is_being_cleaned(start, end)
    }

    /// Enters a fill; `None` if a write to the range is in progress, or another fill of it is under way.
    pub fn begin_fill(&mut self, start: u64, end: u64) -> Option<Claim> {
        self.begin_fill_from(start, end, false)
    }

    /// Enters a fill with the read of the backing device that brings what it puts, which [`Ranges::has_read`] ends; `None` as of
    /// [`Ranges::begin_fill`].
    pub fn begin_miss_to_fill(&mut self, start: u64, end: u64) -> Option<Claim> {
        self.begin_fill_from(start, end, true)
    }

    fn begin_fill_from(&mut self, start: u64, end: u64, missing: bool) -> Option<Claim> {
        let counts = |kind| matches!(kind, Kind::Write { granted: true } | Kind::Fill { dropped: false, .. });
        let is_busy = self.is_busy(start, end, counts);
        (!is_busy).then(|| self.enter(start, end, Kind::Fill { dropped: false, missing }))
    }

    /// What a fill puts has been read.
    pub fn has_read(&mut self, fill: Claim) {
        if let Some(Entry { kind: Kind::Fill { missing, .. }, .. }) = self.entry_mut(fill) {
            *missing = false;
        }
    }

    /// True while nobody has written to the fill's range since it was entered.
    #[must_use]
    pub fn fill_is_good(&self, claim: Claim) -> bool {
        matches!(self.entry(claim), Some(Entry { kind: Kind::Fill { dropped: false, .. }, .. }))
    }

    /// Enters a cleaning; `None` if a write to the range is in progress or another cleaning covers it.
    pub fn begin_clean(&mut self, start: u64, end: u64) -> Option<Claim> {
        let is_written = self.is_busy(start, end, |kind| kind == Kind::Write { granted: true });
        if is_written || self.is_being_cleaned(start, end) {
            return None;
        }
        let (number, class) = self.claim(start, end);
        self.cleanings[usize::from(class)].insert((start, number), end);
        Some(Claim { number, start, place: NOWHERE, class: class + CLEANINGS })
    }

    /// True if writes in progress cover all of `[start, end)`: whatever stands there is older than what comes.
    #[must_use]
    pub fn is_being_replaced(&self, start: u64, end: u64) -> bool {
        let writes = self.overlapping(start, end);
        let writes = writes.filter(|entry| entry.kind == Kind::Write { granted: true });
        let mut writes: Vec<(u64, u64)> = writes.map(|write| (write.start, write.end)).collect();
        writes.sort_unstable();
        let covered =
            writes.into_iter().try_fold(start, |upto, (from, to)| (from <= upto).then_some(upto.max(to)));
        covered.is_some_and(|upto| upto >= end)
    }

    /// Enters a read of the backing device.
    pub fn begin_miss(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, Kind::Miss)
    }

    /// What is entered from now on, for [`Ranges::has_misses`].
    #[must_use]
    pub const fn now(&self) -> Moment {
        Moment(self.next)
    }

    /// True while the backing device is being read there by who was entered before `then`.
    #[must_use]
    pub fn has_misses(&self, start: u64, end: u64, then: Moment) -> bool {
        self.overlapping(start, end).any(|entry| entry.is_being_read() && entry.number < then.0)
    }

    /// The range of a claim.
    #[must_use]
    pub fn range_of(&self, claim: Claim) -> Option<(u64, u64)> {
        let cleaning = claim.class.checked_sub(CLEANINGS).and_then(|class| {
            let end = self.cleanings[usize::from(class)].get(&(claim.start, claim.number))?;
            Some((claim.start, *end))
        });
        cleaning.or_else(|| self.entry(claim).map(|entry| (entry.start, entry.end)))
    }

    /// True while a write is in progress or waits.
    #[must_use]
    pub const fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// What goes on at a sector.
    #[must_use]
    pub fn claims_at(&self, sector: u64) -> Claims {
        let mut claims =
            Claims { writing_back: self.is_being_cleaned(sector, sector + 1), ..Claims::default() };
        for entry in self.overlapping(sector, sector + 1) {
            claims.missing |= entry.is_being_read();
            match entry.kind {
                Kind::Write { .. } => claims.writing = true,
                Kind::Miss => {}
                Kind::Fill { dropped, .. } => claims.filling |= !dropped,
            }
        }
        claims
    }

    /// The end of a write, fill, cleaning or miss.
    pub fn release(&mut self, claim: Claim) {
        if let Some(class) = claim.class.checked_sub(CLEANINGS) {
            let ended = self.cleanings[usize::from(class)].remove(&(claim.start, claim.number));
            assert!(ended.is_some(), "a claim is released once");
            return;
        }
        let is_write = self.entry(claim).expect("a claim is released once").is_write();
        self.writes -= usize::from(is_write);
        self.entries.remove(claim.place as usize);
        let list = &mut self.lists[usize::from(claim.class)];
        let first = list.partition_point(|listed| listed.start < claim.start);
        let behind = list[first..].iter().position(|listed| listed.place == claim.place);
        list.remove(first + behind.expect("each entry is listed"));
    }

    /// Parks clean data. The range has no parked piece: its writer or fill held it.
    pub fn park(&mut self, start: u64, parked: Parked) {
        assert!(!self.is_parked_in(start, parked.end), "a range is parked once");
        self.parked.insert(start, parked);
    }

    /// Something is parked in `[start, end)`.
    #[must_use]
    pub fn is_parked_in(&self, start: u64, end: u64) -> bool {
        // As a rule nothing is.
        !self.parked.is_empty() && self.parked_in(start, end).next().is_some()
    }

    /// The parked pieces that overlap `[start, end)`, in order, uncut: start and piece.
    pub fn parked_in(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, Parked)> + '_ {
        let before = self.parked.range(..start).next_back().filter(move |(_, piece)| piece.end > start);
        let inside = self.parked.range(start..end);
        before.into_iter().chain(inside).map(|(start, piece)| (*start, *piece))
    }

    /// Takes parked pieces that `is_ready` says so of, at most so many.
    pub fn take_parked(
        &mut self,
        most: usize,
        mut is_ready: impl FnMut(&Parked) -> bool,
    ) -> Vec<(u64, Parked)> {
        let ready: Vec<(u64, Parked)> = self
            .parked
            .iter()
            .filter(|(_, piece)| is_ready(piece))
            .take(most)
            .map(|(start, piece)| (*start, *piece))
            .collect();
        for (start, _) in &ready {
            self.parked.remove(start);
        }
        ready
    }

    /// Parked pieces.
    #[must_use]
    pub fn parked_count(&self) -> usize {
        self.parked.len()
    }

    fn cut_parked(&mut self, start: u64, end: u64, cut: &mut dyn FnMut(Cut)) {
        if self.parked.is_empty() {
            return;
        }
        let hit: Vec<(u64, Parked)> = self.parked_in(start, end).collect();
        for (at, piece) in hit {
            self.parked.remove(&at);
            let mut parts = 0;
            for (from, to) in [(at, piece.end.min(start)), (at.max(end), piece.end)] {
                if from < to {
                    let pointers = piece.pointers.advanced(from - at);
                    self.parked.insert(from, Parked { end: to, pointers, stamp: piece.stamp });
                    parts += 1;
                }
            }
            cut(Cut { pointers: piece.pointers, parts });
        }
    }
}

/// A parked piece was cut: its one pin on the bucket becomes `parts` pins.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Of the piece as it was.
    pub pointers: Pointers,
    /// What is left of it, 0..=2 pieces.
    pub parts: usize,
}

impl Entry {
    /// Not of another that had the place before, or has it since.
    fn is_of(&self, claim: Claim) -> bool {
        self.number == claim.number
    }

    const fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Write { .. })
    }

    /// The backing device is being read for it.
    const fn is_being_read(&self) -> bool {
        matches!(self.kind, Kind::Miss | Kind::Fill { missing: true, .. })
    }
}

/// From the first of a list, in order of their starts, whose entries are not longer than `longest`, that may reach behind `start`.
fn near(list: &[Listed], longest: u64, start: u64) -> &[Listed] {
    let first = start.saturating_sub(longest);
    &list[list.partition_point(|listed| listed.start < first)..]
}

/// What of such a list overlaps `[start, end)`.
fn overlapping_of(list: &[Listed], longest: u64, (start, end): (u64, u64)) -> impl Iterator<Item = &Listed> {
    let near = near(list, longest, start).iter().take_while(move |listed| listed.start < end);
    near.filter(move |listed| listed.end > start)
}

#[cfg(test)]
mod tests;
