//! Tracks operations in progress on one volume by range: writes, fills, cleanings, misses and
//! parked keys.
//!
//! All ordering rules are decided here:
//! 1. Overlapping writes are granted one after the other, in order of arrival.
//! 2. A fill (data read from the backing device on its way into the cache) is dropped when a write
//!    to its range is granted after the fill was entered. It is not entered at all over a write in
//!    progress.
//! 3. A write that goes to the backing device waits for a cleaning (write-back of the range in
//!    progress) to end: the older data must not overwrite the newer. A cleaning does not start over
//!    a write in progress.
//! 4. A write that puts new data on the backing device while older data stays in the tree waits for
//!    the misses (reads of the backing device) that were entered before. A slow one would return
//!    the new data, and the next read the old.
//! 5. A parked key (clean data in the cache whose backing write is not flushed yet) is found by
//!    reads, and cut by the first write to its range that is granted.

use crate::volume::backing_flushes::FlushStamp;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Pointers};
use slab::Slab;

/// Identifies an entry of the table, and says where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    number: u64,
    start: u64,
    /// Its slot among the entries; unused for a cleaning.
    place: u32,
    /// Which of the table's lists it is in; the lists of cleanings follow the others.
    class: u8,
}

/// A point in time that separates earlier entries from later ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Watermark(u64);

/// The longest entries of each of the table's lists, in sectors. Few of the shorter ones overlap,
/// and there are few of the longest.
const LENGTHS: [u64; 3] = [256, 8192, u64::MAX];

/// The slot of a cleaning, which is not among the entries.
const NOWHERE: u32 = u32::MAX;

/// The class of the first list of cleanings.
const CLEANINGS: u8 = 3;
const _: () = assert!(CLEANINGS as usize == LENGTHS.len(), "the lists of cleanings follow the others");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EntryKind {
    Write {
        granted: bool,
    },
    Fill {
        dropped: bool,
        /// The data is still being read from the backing device.
        missing: bool,
    },
    Miss,
}

#[derive(Clone, Copy, Debug)]
struct RangeEntry {
    start: u64,
    number: u64,
    end: u64,
    kind: EntryKind,
}

/// An entry in a list, with what a search for overlaps needs.
#[derive(Clone, Copy, Debug)]
struct ListEntry {
    start: u64,
    end: u64,
    place: u32,
}

/// Clean data that waits for a flush of the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParkedPiece {
    /// End of the range, which starts at the piece's key in the table.
    pub end: u64,
    /// Where the data is in the cache.
    pub pointers: Pointers,
    /// When its backing write completed.
    pub stamp: FlushStamp,
}

impl ParkedPiece {
    /// Returns it as a clean key of volume `inode` that starts at `start`.
    #[must_use]
    pub fn key(&self, inode: Inode, start: u64) -> Key {
        let size = u16::try_from(self.end - start).expect("parked pieces come from buckets, cut to keys");
        Key { inode, size, dirty: false, end: self.end, pointers: self.pointers }
    }
}

/// What is in progress at a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SectorActivity {
    /// It is being written, or a write waits for its turn.
    pub writing: bool,
    /// It is being written back.
    pub writing_back: bool,
    /// It is being read from the backing device.
    pub missing: bool,
    /// Data read there is on its way into the cache.
    pub filling: bool,
}

/// The table of one volume, in sectors of the key space.
#[derive(Default)]
pub struct RangeTable {
    /// All entries but cleanings. Entries do not move, so a claim finds its entry at once.
    entries: Slab<RangeEntry>,
    /// The same entries, ordered by start and then by number, in a list for each class of length. A
    /// search for overlaps visits all entries that start within the longest length before the
    /// range, so without classes one long discard would make it visit everything. A request usually
    /// has one entry, and the lists are short. One piece of memory that grows once costs less than
    /// a tree.
    lists: [Vec<ListEntry>; LENGTHS.len()],
    /// The cleanings: their ends, by start and number. A batch has thousands, and entries of client
    /// requests would have to be moved past them one by one. A cleaning may allocate memory, which
    /// no part of a request does.
    cleanings: [BTreeMap<(u64, u64), u64>; LENGTHS.len()],
    /// The number of writes among the entries.
    writes: usize,
    parked: BTreeMap<u64, ParkedPiece>,
    next: u64,
}

impl RangeTable {
    fn enter(&mut self, start: u64, end: u64, kind: EntryKind) -> Claim {
        let (number, class) = self.claim(start, end);
        let entry = RangeEntry { start, number, end, kind };
        self.writes += usize::from(entry.is_write());
        let place = u32::try_from(self.entries.insert(entry)).expect("fewer than 2^32 entries are in flight");
        let list = &mut self.lists[usize::from(class)];
        // No entry there has a higher number.
        let at = list.partition_point(|other| other.start <= start);
        list.insert(at, ListEntry { start, end, place });
        Claim { number, start, place, class }
    }

    /// Returns a number for the next entry, and the class of its length.
    fn claim(&mut self, start: u64, end: u64) -> (u64, u8) {
        assert!(start < end, "a claim covers at least one sector");
        let number = self.next;
        self.next += 1;
        (number, LENGTHS.iter().map(|longest| u8::from(*longest < end - start)).sum())
    }

    /// Returns the entry of a claim, unless that is a cleaning or has been released.
    fn entry(&self, claim: Claim) -> Option<&RangeEntry> {
        self.entries.get(claim.place as usize).filter(|entry| entry.is_of(claim))
    }

    fn entry_mut(&mut self, claim: Claim) -> Option<&mut RangeEntry> {
        self.entries.get_mut(claim.place as usize).filter(|entry| entry.is_of(claim))
    }

    /// Iterates over the entries that overlap `[start, end)`, except cleanings, in no particular
    /// order. A volume may have thousands of claims, most of them elsewhere.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &RangeEntry> + '_ {
        let lists = LENGTHS.iter().zip(&self.lists);
        let near = lists.flat_map(move |(longest, list)| overlapping_of(list, *longest, (start, end)));
        near.map(|listed| &self.entries[listed.place as usize])
    }

    /// Returns whether `[start, end)` or a part of it is being written back.
    fn is_being_cleaned(&self, start: u64, end: u64) -> bool {
        LENGTHS.iter().zip(&self.cleanings).any(|(longest, list)| {
            // Usually there is none.
            !list.is_empty()
                && list.range((start.saturating_sub(*longest), 0)..(end, 0)).any(|(_, until)| *until > start)
        })
    }

    /// Returns whether any entry that `counts` overlaps `[start, end)`, except cleanings.
    fn is_busy(&self, start: u64, end: u64, counts: impl Fn(EntryKind) -> bool) -> bool {
        LENGTHS.iter().zip(&self.lists).any(|(longest, list)| {
            overlapping_of(list, *longest, (start, end))
                .any(|listed| counts(self.entries[listed.place as usize].kind))
        })
    }

    /// Returns true if nothing is in progress in `[start, end)`, and nothing is parked there.
    #[must_use]
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        let is_busy = self.is_being_cleaned(start, end) || self.is_busy(start, end, |_| true);
        !is_busy && !self.is_parked_in(start, end)
    }

    /// Enters a write in a free range: it is granted at once.
    pub fn begin_write(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, EntryKind::Write { granted: true })
    }

    /// Queues a write; see [`RangeTable::try_grant`].
    pub fn queue_write(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, EntryKind::Write { granted: false })
    }

    /// Grants a queued write if no earlier one overlaps. When it is granted, fills of the range are
    /// dropped and parked pieces are cut (invariant D34). Each cut is passed to `cut`, which
    /// adjusts the pins of the bucket.
    pub fn try_grant(&mut self, claim: Claim, cut: &mut dyn FnMut(ParkedCut)) -> bool {
        let RangeEntry { start, end, .. } = *self.entry(claim).expect("the claim was queued");
        let is_earlier_write = |entry: &RangeEntry| entry.number < claim.number && entry.is_write();
        if self.overlapping(start, end).any(is_earlier_write) {
            return false;
        }
        for (longest, list) in LENGTHS.iter().zip(&self.lists) {
            for listed in overlapping_of(list, *longest, (start, end)) {
                // What was read before must not enter the cache over this write: invariant D34.
                if let EntryKind::Fill { dropped, .. } = &mut self.entries[listed.place as usize].kind {
                    *dropped = true;
                }
            }
        }
        self.cut_parked(start, end, cut);
        self.entry_mut(claim).expect("the claim was queued").kind = EntryKind::Write { granted: true };
        true
    }

    /// Returns true if no write-back overlaps: a write may go to the backing device.
    #[must_use]
    pub fn backing_is_free(&self, start: u64, end: u64) -> bool {
        !self.is_being_cleaned(start, end)
    }

    /// Enters a fill. Returns `None` if a write to the range, or another fill of it, is in
    /// progress.
    pub fn begin_fill(&mut self, start: u64, end: u64) -> Option<Claim> {
        self.begin_fill_from(start, end, false)
    }

    /// Enters a fill together with the read of the backing device that brings its data, which
    /// [`RangeTable::has_read`] ends. Returns `None` in the same cases as
    /// [`RangeTable::begin_fill`].
    pub fn begin_miss_to_fill(&mut self, start: u64, end: u64) -> Option<Claim> {
        self.begin_fill_from(start, end, true)
    }

    fn begin_fill_from(&mut self, start: u64, end: u64, missing: bool) -> Option<Claim> {
        let counts = |kind| {
            matches!(kind, EntryKind::Write { granted: true } | EntryKind::Fill { dropped: false, .. })
        };
        let is_busy = self.is_busy(start, end, counts);
        (!is_busy).then(|| self.enter(start, end, EntryKind::Fill { dropped: false, missing }))
    }

    /// Records that the data of a fill has been read.
    pub fn has_read(&mut self, fill: Claim) {
        if let Some(RangeEntry { kind: EntryKind::Fill { missing, .. }, .. }) = self.entry_mut(fill) {
            *missing = false;
        }
    }

    /// Returns true while the fill's range has not been written to since the fill was entered.
    #[must_use]
    pub fn fill_is_good(&self, claim: Claim) -> bool {
        matches!(self.entry(claim), Some(RangeEntry { kind: EntryKind::Fill { dropped: false, .. }, .. }))
    }

    /// Enters a cleaning. Returns `None` if a write to the range is in progress, or another
    /// cleaning overlaps it.
    pub fn begin_clean(&mut self, start: u64, end: u64) -> Option<Claim> {
        let is_written = self.is_busy(start, end, |kind| kind == EntryKind::Write { granted: true });
        if is_written || self.is_being_cleaned(start, end) {
            return None;
        }
        let (number, class) = self.claim(start, end);
        self.cleanings[usize::from(class)].insert((start, number), end);
        Some(Claim { number, start, place: NOWHERE, class: class + CLEANINGS })
    }

    /// Returns true if writes in progress cover all of `[start, end)`, so that what is there is
    /// about to be replaced.
    #[must_use]
    pub fn is_being_replaced(&self, start: u64, end: u64) -> bool {
        let writes = self.overlapping(start, end);
        let writes = writes.filter(|entry| entry.kind == EntryKind::Write { granted: true });
        let mut writes: Vec<(u64, u64)> = writes.map(|write| (write.start, write.end)).collect();
        writes.sort_unstable();
        let covered =
            writes.into_iter().try_fold(start, |upto, (from, to)| (from <= upto).then_some(upto.max(to)));
        covered.is_some_and(|upto| upto >= end)
    }

    /// Enters a read of the backing device.
    pub fn begin_miss(&mut self, start: u64, end: u64) -> Claim {
        self.enter(start, end, EntryKind::Miss)
    }

    /// Returns the present moment, for [`RangeTable::has_misses`].
    #[must_use]
    pub const fn now(&self) -> Watermark {
        Watermark(self.next)
    }

    /// Returns true while reads of the backing device in that range are in progress that were
    /// entered before `then`.
    #[must_use]
    pub fn has_misses(&self, start: u64, end: u64, then: Watermark) -> bool {
        self.overlapping(start, end).any(|entry| entry.is_being_read() && entry.number < then.0)
    }

    /// Returns the range of a claim.
    #[must_use]
    pub fn range_of(&self, claim: Claim) -> Option<(u64, u64)> {
        let cleaning = claim.class.checked_sub(CLEANINGS).and_then(|class| {
            let end = self.cleanings[usize::from(class)].get(&(claim.start, claim.number))?;
            Some((claim.start, *end))
        });
        cleaning.or_else(|| self.entry(claim).map(|entry| (entry.start, entry.end)))
    }

    /// Returns true while a write is in progress or waits.
    #[must_use]
    pub const fn has_writes(&self) -> bool {
        self.writes > 0
    }

    /// Returns what is in progress at a sector.
    #[must_use]
    pub fn claims_at(&self, sector: u64) -> SectorActivity {
        let mut claims = SectorActivity {
            writing_back: self.is_being_cleaned(sector, sector + 1),
            ..SectorActivity::default()
        };
        for entry in self.overlapping(sector, sector + 1) {
            claims.missing |= entry.is_being_read();
            match entry.kind {
                EntryKind::Write { .. } => claims.writing = true,
                EntryKind::Miss => {}
                EntryKind::Fill { dropped, .. } => claims.filling |= !dropped,
            }
        }
        claims
    }

    /// Ends a write, fill, cleaning or miss.
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

    /// Parks clean data. The range has no parked piece, because its writer or fill held it.
    pub fn park(&mut self, start: u64, parked: ParkedPiece) {
        assert!(!self.is_parked_in(start, parked.end), "a range is parked once");
        self.parked.insert(start, parked);
    }

    /// Returns whether anything is parked in `[start, end)`.
    #[must_use]
    pub fn is_parked_in(&self, start: u64, end: u64) -> bool {
        // Usually nothing is.
        !self.parked.is_empty() && self.parked_in(start, end).next().is_some()
    }

    /// Iterates over the parked pieces that overlap `[start, end)`, in order and uncut, with their
    /// starts.
    pub fn parked_in(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, ParkedPiece)> + '_ {
        let before = self.parked.range(..start).next_back().filter(move |(_, piece)| piece.end > start);
        let inside = self.parked.range(start..end);
        before.into_iter().chain(inside).map(|(start, piece)| (*start, *piece))
    }

    /// Takes parked pieces for which `is_ready` returns true, at most `most`.
    pub fn take_parked(
        &mut self,
        most: usize,
        mut is_ready: impl FnMut(&ParkedPiece) -> bool,
    ) -> Vec<(u64, ParkedPiece)> {
        let ready: Vec<(u64, ParkedPiece)> = self
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

    /// Returns the number of parked pieces.
    #[must_use]
    pub fn parked_count(&self) -> usize {
        self.parked.len()
    }

    fn cut_parked(&mut self, start: u64, end: u64, cut: &mut dyn FnMut(ParkedCut)) {
        if self.parked.is_empty() {
            return;
        }
        let hit: Vec<(u64, ParkedPiece)> = self.parked_in(start, end).collect();
        for (at, piece) in hit {
            self.parked.remove(&at);
            let mut parts = 0;
            for (from, to) in [(at, piece.end.min(start)), (at.max(end), piece.end)] {
                if from < to {
                    let pointers = piece.pointers.advanced(from - at);
                    self.parked.insert(from, ParkedPiece { end: to, pointers, stamp: piece.stamp });
                    parts += 1;
                }
            }
            cut(ParkedCut { pointers: piece.pointers, parts });
        }
    }
}

/// A parked piece was cut: its one pin on the bucket becomes `parts` pins.
#[derive(Clone, Copy, Debug)]
pub struct ParkedCut {
    /// The pointers of the piece before the cut.
    pub pointers: Pointers,
    /// How many pieces are left of it, 0..=2.
    pub parts: usize,
}

impl RangeEntry {
    /// Returns false for an entry that had the slot before, or has it since.
    fn is_of(&self, claim: Claim) -> bool {
        self.number == claim.number
    }

    const fn is_write(&self) -> bool {
        matches!(self.kind, EntryKind::Write { .. })
    }

    /// Returns whether the backing device is being read for it.
    const fn is_being_read(&self) -> bool {
        matches!(self.kind, EntryKind::Miss | EntryKind::Fill { missing: true, .. })
    }
}

/// Returns the entries of a list from the first that may reach beyond `start`. The list is ordered
/// by start, and its entries are not longer than `longest`.
fn near(list: &[ListEntry], longest: u64, start: u64) -> &[ListEntry] {
    let first = start.saturating_sub(longest);
    &list[list.partition_point(|listed| listed.start < first)..]
}

/// Iterates over the entries of such a list that overlap `[start, end)`.
fn overlapping_of(
    list: &[ListEntry],
    longest: u64,
    (start, end): (u64, u64),
) -> impl Iterator<Item = &ListEntry> {
    let near = near(list, longest, start).iter().take_while(move |listed| listed.start < end);
    near.filter(move |listed| listed.end > start)
}

#[cfg(test)]
mod tests;
