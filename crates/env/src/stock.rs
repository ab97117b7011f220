//! Memory for requests that is used again: a server that has been busy for a while asks the allocator for nothing.
//!
//! Fresh large memory costs more than what is done with it: the system clears it page by page as it is touched, takes it back when it is
//! freed, and clears it again for the next request.

use crate::buffer::{ALIGNMENT, Buffer, Payload};
use alloc::vec::Vec;

/// The smallest piece, in bytes.
const SMALLEST: usize = 4096;
/// The largest, in bytes; larger memory is fresh each time.
const LARGEST: usize = 2 << 20;
/// Sizes of pieces: powers of two.
const SIZES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;

/// See the module's page.
#[derive(Debug)]
pub struct Stock {
    /// By size, smallest first.
    shelves: [Shelf; SIZES],
    /// Counts pieces that are taken.
    taken: u64,
    /// Bytes of all pieces that lie here.
    bytes: usize,
    bytes_max: usize,
}

/// Pieces of one size.
#[derive(Debug, Default)]
struct Shelf {
    pieces: Vec<Buffer>,
    /// When one was asked for last.
    used: u64,
}

impl Stock {
    /// An empty one that keeps at most so many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { shelves: core::array::from_fn(|_| Shelf::default()), taken: 0, bytes: 0, bytes_max }
    }

    /// `bytes` bytes, aligned as fresh ones are. **They hold anything**, what others have read or written too: whoever takes
    /// them gives none of them away before they have been overwritten.
    #[must_use]
    pub fn take(&mut self, bytes: usize) -> Buffer {
        let size = bytes.max(SMALLEST).next_power_of_two();
        if size > LARGEST {
            return Buffer::zeroed(bytes);
        }
        self.taken += 1;
        let shelf = &mut self.shelves[shelf_of(size)];
        shelf.used = self.taken;
        let mut buffer = match shelf.pieces.pop() {
            Some(piece) => {
                self.bytes -= size;
                piece
            }
            None => Buffer::zeroed(size),
        };
        buffer.resize(bytes);
        buffer
    }

    /// Keeps memory for later, if there is room for it.
    pub fn put(&mut self, buffer: Buffer) {
        let capacity = buffer.capacity();
        if capacity < SMALLEST || buffer.as_slice().as_ptr().align_offset(ALIGNMENT) != 0 {
            return;
        }
        let size = 1 << capacity.min(LARGEST).ilog2();
        // One size must not keep others out: those go that were not asked for for longest.
        while self.bytes + size > self.bytes_max {
            let filled = self.shelves.iter().enumerate().filter(|(_, shelf)| !shelf.pieces.is_empty());
            let Some((longest, _)) = filled.min_by_key(|(_, shelf)| shelf.used) else { return };
            if longest == shelf_of(size) {
                return;
            }
            self.shelves[longest].pieces.pop();
            self.bytes -= SMALLEST << longest;
        }
        self.bytes += size;
        self.shelves[shelf_of(size)].pieces.push(buffer);
    }

    /// The same for what was written, unless others still have it.
    pub fn put_payload(&mut self, payload: Payload) {
        if let Some(buffer) = payload.into_buffer() {
            self.put(buffer);
        }
    }
}

const fn shelf_of(size: usize) -> usize {
    (size / SMALLEST).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_back_is_taken_again() {
        let mut stock = Stock::new(1 << 20);
        let first = stock.take(4096);
        let place = first.as_slice().as_ptr();
        assert_eq!(place.align_offset(ALIGNMENT), 0);
        let payload = first.freeze();
        let part = payload.slice(512..1024);
        stock.put_payload(payload);
        assert_ne!(stock.take(4096).as_slice().as_ptr(), place, "a part of it is somebody's");
        // Not on a page's edge, so of no use.
        stock.put_payload(part);
        let mut whole = stock.take(8192);
        let mut half = whole.split_to(4096);
        let place = half.as_slice().as_ptr();
        half.join(whole);
        stock.put(half);
        let again = stock.take(5000);
        assert_eq!((again.as_slice().as_ptr(), again.len()), (place, 5000));
        stock.put(again);
        assert_eq!(stock.take(8192).len(), 8192, "the rest of it is there again");
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let mut stock = Stock::new(1 << 20);
        for bytes in [LARGEST + 1, LARGEST, 1 << 20, 4096, 4097, 60_000, 1] {
            let taken: Vec<Buffer> = (0..300).map(|_| stock.take(bytes)).collect();
            assert!(taken.iter().all(|buffer| buffer.len() == bytes));
            taken.into_iter().for_each(|buffer| stock.put(buffer));
            let kept: usize =
                (0..SIZES).map(|shelf| stock.shelves[shelf].pieces.len() * (SMALLEST << shelf)).sum();
            assert_eq!(stock.bytes, kept);
            assert!(kept <= 1 << 20);
        }
        assert_eq!(stock.shelves[0].pieces.len(), 256, "what is in use has driven out what was before it");
        let taken = stock.take(1 << 20);
        let place = taken.as_slice().as_ptr();
        stock.put(taken);
        assert_eq!(stock.take(1 << 20).as_slice().as_ptr(), place, "large ones drive out small ones as well");
    }
}
