//! Stores the content of a device sparsely, in pages of 4096 bytes. A clone costs only a few
//! hundred reference counts, because each crash point clones whole devices.

use crate::stamp;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Sectors per page.
pub const PAGE_SECTORS: u64 = 8;
/// Bytes per sector.
const SECTOR: usize = stamp::SECTOR;
const PAGE: usize = 4096;
/// Pages per chunk: with 64, a clone of a 64 MiB device takes 256 reference counts, and the first
/// change of a chunk takes 64.
const CHUNK_PAGES: usize = 64;
const CHUNK_SECTORS: u64 = PAGE_SECTORS * CHUNK_PAGES as u64;

/// The content of sectors that were never written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InitialContent {
    /// Zeroes, as on a new device.
    Zero {
        /// Sector of the device at which sector 0 of the volume lies; 0 for a device without a
        /// volume.
        data_start: u64,
    },
    /// The volume's initial content: stamps of write 0, so that misplaced data is distinguishable
    /// from data that was never written. Sectors before `data_start` are zero.
    Stamped {
        /// The volume that this initial content belongs to.
        volume: u32,
        /// Sector of the device at which sector 0 of the volume lies.
        data_start: u64,
    },
}

type Page = Rc<[u8; PAGE]>;

#[derive(Clone)]
struct StoreChunk {
    pages: [Option<Page>; CHUNK_PAGES],
}

/// Content by sector.
#[derive(Clone)]
pub struct SectorStore {
    chunks: BTreeMap<u64, Rc<StoreChunk>>,
    background: InitialContent,
    zeroes: Page,
}

impl SectorStore {
    /// Creates a store that holds only the background.
    #[must_use]
    pub fn new(background: InitialContent) -> Self {
        Self { chunks: BTreeMap::new(), background, zeroes: Rc::new([0; PAGE]) }
    }

    /// Copies the content from `sector` on into `into` (whole sectors).
    pub fn read(&self, sector: u64, into: &mut [u8]) {
        for (first, bytes) in pieces(sector, into.len()) {
            let piece = &mut into[bytes];
            match self.page(first) {
                Some(page) => {
                    let from = offset_in_page(first);
                    piece.copy_from_slice(&page[from..from + piece.len()]);
                }
                None => self.read_background(first, piece),
            }
        }
    }

    /// Writes `from` (whole sectors) at `sector`.
    pub fn write(&mut self, sector: u64, from: &[u8]) {
        for (first, bytes) in pieces(sector, from.len()) {
            let at = offset_in_page(first);
            let piece = &from[bytes];
            self.page_mut(first)[at..at + piece.len()].copy_from_slice(piece);
        }
    }

    /// Zeroes `sectors` sectors from `sector` on.
    pub fn zero(&mut self, sector: u64, sectors: u64) {
        let end = sector + sectors;
        let mut first = sector;
        while first < end {
            let next = end.min((first / PAGE_SECTORS + 1) * PAGE_SECTORS);
            if next - first == PAGE_SECTORS {
                let zeroes = Rc::clone(&self.zeroes);
                *self.slot(first) = Some(zeroes);
            } else {
                let at = offset_in_page(first);
                let bytes = usize::try_from(next - first).expect("within a page") * SECTOR;
                self.page_mut(first)[at..at + bytes].fill(0);
            }
            first = next;
        }
    }

    /// Inverts one bit.
    pub fn flip(&mut self, sector: u64, bit: u16) {
        let at = offset_in_page(sector) + usize::from(bit / 8);
        assert!(usize::from(bit) < SECTOR * 8, "a bit of one sector");
        self.page_mut(sector)[at] ^= 1 << (bit % 8);
    }

    /// Makes the page that holds `sector` equal to that of `other`, sharing it.
    pub fn copy_page(&mut self, sector: u64, other: &Self) {
        let page = other.page(sector).cloned();
        *self.slot(sector) = page;
    }

    /// Returns a hash of all pages written. Equal content with the same history has the same hash.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hash = crate::digest::Digest::new();
        for (number, chunk) in &self.chunks {
            for (index, page) in chunk.pages.iter().enumerate() {
                let Some(page) = page else { continue };
                hash.word(number * CHUNK_PAGES as u64 + index as u64);
                hash.bytes(page.as_slice());
            }
        }
        hash.value()
    }

    fn page(&self, sector: u64) -> Option<&Page> {
        self.chunks.get(&(sector / CHUNK_SECTORS))?.pages[page_in_chunk(sector)].as_ref()
    }

    fn slot(&mut self, sector: u64) -> &mut Option<Page> {
        let empty = || Rc::new(StoreChunk { pages: [const { None }; CHUNK_PAGES] });
        let chunk = self.chunks.entry(sector / CHUNK_SECTORS).or_insert_with(empty);
        &mut Rc::make_mut(chunk).pages[page_in_chunk(sector)]
    }

    fn page_mut(&mut self, sector: u64) -> &mut [u8; PAGE] {
        if self.page(sector).is_none() {
            let mut fresh = [0; PAGE];
            self.read_background(sector / PAGE_SECTORS * PAGE_SECTORS, &mut fresh);
            *self.slot(sector) = Some(Rc::new(fresh));
        }
        Rc::make_mut(self.slot(sector).as_mut().expect("filled above"))
    }

    fn read_background(&self, sector: u64, into: &mut [u8]) {
        into.fill(0);
        let InitialContent::Stamped { volume, data_start } = self.background else { return };
        for (index, piece) in into.chunks_exact_mut(SECTOR).enumerate() {
            if let Some(data_sector) = (sector + index as u64).checked_sub(data_start) {
                stamp::fill(piece, volume, data_sector, 0);
            }
        }
    }
}

fn offset_in_page(sector: u64) -> usize {
    usize::try_from(sector % PAGE_SECTORS).expect("below eight") * SECTOR
}

fn page_in_chunk(sector: u64) -> usize {
    usize::try_from(sector / PAGE_SECTORS).expect("devices fit memory") % CHUNK_PAGES
}

/// Splits `bytes` bytes from `sector` on at page boundaries: the first sector and the buffer range
/// of each piece.
fn pieces(sector: u64, bytes: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    assert!(bytes.is_multiple_of(SECTOR), "content is moved by whole sectors");
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == bytes {
            return None;
        }
        let first = sector + (done / SECTOR) as u64;
        let length = (PAGE - offset_in_page(first)).min(bytes - done);
        let range = done..done + length;
        done += length;
        Some((first, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::SectorValue;

    fn value(store: &SectorStore, sector: u64) -> SectorValue {
        let mut bytes = [0; SECTOR];
        store.read(sector, &mut bytes);
        stamp::parse(&bytes, 0, sector).expect("a value of its place")
    }

    #[test]
    fn clones_do_not_see_each_other() {
        let mut store = SectorStore::new(InitialContent::Stamped { volume: 0, data_start: 0 });
        let mut bytes = vec![0; 20 * SECTOR];
        stamp::fill(&mut bytes, 0, 5, 1);
        store.write(5, &bytes);
        let then = store.clone();
        store.zero(6, 12);
        assert_eq!(
            (value(&store, 5), value(&store, 6), value(&store, 17)),
            (SectorValue::Written(1), SectorValue::Zero, SectorValue::Zero)
        );
        assert_eq!(value(&store, 18), SectorValue::Written(1));
        assert_eq!(value(&store, 25), SectorValue::Written(0));
        for sector in 5..25 {
            assert_eq!(value(&then, sector), SectorValue::Written(1));
        }
        assert_ne!(then.digest(), store.digest());
    }

    #[test]
    fn the_background_starts_at_the_data() {
        let store = SectorStore::new(InitialContent::Stamped { volume: 3, data_start: 16 });
        let mut bytes = [1; SECTOR];
        store.read(15, &mut bytes);
        assert_eq!(bytes, [0; SECTOR]);
        store.read(16, &mut bytes);
        assert_eq!(stamp::parse(&bytes, 3, 0), Ok(SectorValue::Written(0)));
    }
}
