//! The part of one write in one page, between landing and reaching the medium.

use super::store::{PAGE_SECTORS, SectorStore};
use crate::stamp::SECTOR;
use bcached_env::Payload;
use std::ops::Range;
use std::rc::Rc;

/// What a write, zeroing or discard puts down.
#[derive(Clone, Debug)]
pub enum WriteContent {
    /// These bytes, shared with the engine.
    Payload(Payload),
    /// These bytes, owned by the simulation.
    Data(Rc<[u8]>),
    /// Zeroes.
    Zero,
    /// Nothing: a discard that the device ignores here.
    Keep,
}

/// A part of a content, starting at its sector `first`.
#[derive(Clone, Debug)]
pub(super) struct ContentPart {
    content: WriteContent,
    first: u64,
}

impl WriteContent {
    pub(super) fn slice(&self, range: Range<u64>) -> ContentPart {
        ContentPart { content: self.clone(), first: range.start }
    }
}

impl ContentPart {
    /// Returns the bytes of the sectors `range` of this part; `None` for zeroes.
    fn sectors(&self, range: Range<u64>) -> Option<&[u8]> {
        let at = |index| usize::try_from(self.first + index).expect("a request fits memory") * SECTOR;
        let bytes = at(range.start)..at(range.end);
        match &self.content {
            WriteContent::Payload(payload) => Some(&payload.as_slice()[bytes]),
            WriteContent::Data(data) => Some(&data[bytes]),
            WriteContent::Zero | WriteContent::Keep => None,
        }
    }
}

/// The sectors of one page that one write has put down.
#[derive(Clone, Debug)]
pub(super) struct PageVersion {
    /// Number of the write on its device.
    pub(super) number: u64,
    /// Sector within the page at which `part` starts.
    first: u64,
    /// Bit mask of the page's sectors whose content still comes from this version.
    mask: u8,
    part: ContentPart,
}

impl PageVersion {
    /// Creates the version of one page; `range` must lie within that page.
    pub(super) fn new(number: u64, range: Range<u64>, part: ContentPart) -> Self {
        let first = range.start % PAGE_SECTORS;
        let count = range.end - range.start;
        assert!(first + count <= PAGE_SECTORS, "a version stays within a page");
        let ones = u8::MAX >> (PAGE_SECTORS - count);
        let mask = if matches!(part.content, WriteContent::Keep) { 0 } else { ones << first };
        Self { number, first, mask, part }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.mask == 0
    }

    /// Returns whether this version still holds this sector of the page.
    pub(super) const fn stands_for(&self, sector: u64) -> bool {
        self.mask >> sector & 1 == 1
    }

    /// Writes its sectors to `store`.
    pub(super) fn apply(&self, store: &mut SectorStore, page: u64) {
        let mut first = 0;
        while first < PAGE_SECTORS {
            // The next run of sectors that this version still holds.
            first += u64::from((self.mask >> first).trailing_zeros()).min(PAGE_SECTORS - first);
            let count = u64::from((!(u64::from(self.mask) >> first)).trailing_zeros());
            if count == 0 {
                return;
            }
            let at = page * PAGE_SECTORS + first;
            let end = first + count;
            match self.part.sectors(first - self.first..end - self.first) {
                Some(bytes) => store.write(at, bytes),
                None => store.zero(at, count),
            }
            first = end;
        }
    }

    /// Returns the sectors that it still holds, in order.
    pub(super) fn sectors(&self, page: u64) -> impl Iterator<Item = u64> + use<> {
        let mask = self.mask;
        (0..PAGE_SECTORS)
            .filter(move |sector| mask >> sector & 1 == 1)
            .map(move |sector| page * PAGE_SECTORS + sector)
    }

    /// Gives up the sectors that `newer` holds.
    pub(super) const fn give_up(&mut self, newer: &Self) {
        self.mask &= !newer.mask;
    }

    /// Keeps only the sectors that `keep` accepts; it is called with the sector's index within the
    /// page.
    pub(super) fn thin(&mut self, keep: impl Fn(u64) -> bool) {
        for sector in 0..PAGE_SECTORS {
            if !keep(sector) {
                self.mask &= !(1 << sector);
            }
        }
    }
}
