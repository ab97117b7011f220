//! The contents of a modelled device, exact to the byte: a sparse map of 4 KiB pages in which pages
//! of zeroes take no memory.
//!
//! This is enough to hold a full cache of 64 GiB: the clients of a benchmark write zeroes, the
//! engine does not look at data, and its metadata is small. Every write, whatever its source, is
//! stored and read back exactly.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Bytes in a page.
const PAGE: usize = 4096;
/// Sectors in a page.
const PAGE_SECTORS: u64 = 8;
const SECTOR: usize = 512;

/// Non-zero pages by page number.
#[derive(Default)]
pub struct SparseContent {
    pages: BTreeMap<u64, Box<[u8; PAGE]>>,
}

impl SparseContent {
    /// Copies the contents from `sector` on into `into` (whole sectors).
    pub fn read(&self, sector: u64, into: &mut [u8]) {
        into.fill(0);
        for (page, at, bytes) in pieces(sector, into.len()) {
            if let Some(found) = self.pages.get(&page) {
                let length = bytes.len();
                into[bytes].copy_from_slice(&found[at..at + length]);
            }
        }
    }

    /// Stores `from` (whole sectors) at `sector`.
    pub fn write(&mut self, sector: u64, from: &[u8]) {
        for (page, at, bytes) in pieces(sector, from.len()) {
            let piece = &from[bytes];
            if is_zero(piece) {
                self.clear(page, at, piece.len());
            } else {
                let held = self.pages.entry(page).or_insert_with(|| Box::new([0; PAGE]));
                held[at..at + piece.len()].copy_from_slice(piece);
            }
        }
    }

    /// Zeroes `sectors` sectors from `sector` on.
    pub fn zero(&mut self, sector: u64, sectors: u64) {
        let (first, end) = (sector / PAGE_SECTORS, (sector + sectors).div_ceil(PAGE_SECTORS));
        let held: Vec<u64> = self.pages.range(first..end).map(|(page, _)| *page).collect();
        for page in held {
            let from = sector.max(page * PAGE_SECTORS);
            let to = (sector + sectors).min((page + 1) * PAGE_SECTORS);
            let bytes = |sectors: u64| usize::try_from(sectors).expect("within a page") * SECTOR;
            self.clear(page, bytes(from - page * PAGE_SECTORS), bytes(to - from));
        }
    }

    /// Writes all stored pages to their places in `image`, a file that reads as zeroes, so that
    /// another program can examine it.
    ///
    /// # Errors
    /// Returns the first error of a write to the file.
    pub fn write_to(&self, image: &File) -> io::Result<()> {
        self.pages.iter().try_for_each(|(page, bytes)| image.write_all_at(&bytes[..], page * PAGE as u64))
    }

    /// Returns the number of pages that take memory.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    fn clear(&mut self, page: u64, at: usize, bytes: usize) {
        if bytes == PAGE {
            self.pages.remove(&page);
        } else if let Some(held) = self.pages.get_mut(&page) {
            held[at..at + bytes].fill(0);
            if is_zero(&held[..]) {
                self.pages.remove(&page);
            }
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks_exact(SECTOR).all(|sector| sector.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Splits a run of `bytes` bytes from `sector` on at page boundaries. Each piece is the page, the
/// offset in the page, and the range of the run's bytes.
fn pieces(sector: u64, bytes: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let first = usize::try_from(sector % PAGE_SECTORS).expect("below eight") * SECTOR;
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < bytes).then(|| {
            let at = (first + done) % PAGE;
            let page = sector / PAGE_SECTORS + ((first + done) / PAGE) as u64;
            let length = (PAGE - at).min(bytes - done);
            done += length;
            (page, at, done - length..done)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_what_is_read_and_zeroes_take_no_memory() {
        let mut content = SparseContent::default();
        let bytes: Vec<u8> = (0..20 * SECTOR).map(|at| u8::try_from(at / SECTOR + 1).unwrap()).collect();
        content.write(5, &bytes);
        assert_eq!(content.pages(), 4);
        let read = |content: &SparseContent, sector, sectors: usize| {
            let mut into = vec![9; sectors * SECTOR];
            content.read(sector, &mut into);
            into.iter().step_by(SECTOR).copied().collect::<Vec<_>>()
        };
        assert_eq!(read(&content, 3, 5), [0, 0, 1, 2, 3]);
        assert_eq!(read(&content, 23, 4), [19, 20, 0, 0]);
        content.write(8, &[0; 8 * SECTOR]);
        assert_eq!(content.pages(), 3);
        assert_eq!(read(&content, 7, 10), [3, 0, 0, 0, 0, 0, 0, 0, 0, 12]);
        content.write(5, &[0; 3 * SECTOR]);
        assert_eq!(content.pages(), 2, "a page in pieces");
        content.zero(17, 100);
        assert_eq!(content.pages(), 1);
        assert_eq!(read(&content, 16, 2), [12, 0]);
    }
}
