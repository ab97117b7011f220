//! Reuses the memory of requests: a server that has been busy for a while makes no allocations.
//!
//! Fresh large memory costs more than the work done with it: the system clears it page by page when
//! it is touched, takes it back when it is freed, and clears it again for the next request.
//!
//! Only pieces of certain sizes are kept, and each is handed out at its full length: for a piece
//! that was returned shortened, the memory behind it would be unknown.

use crate::buffer::{ALIGNMENT, Buffer, Payload};
use alloc::vec::Vec;

/// The smallest piece, in bytes.
const SMALLEST: usize = 4096;
/// The largest, in bytes.
const LARGEST: usize = 2 << 20;
/// Number of piece sizes: powers of two.
const SIZES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;

/// A pool of buffers; see the module documentation.
#[derive(Debug)]
pub struct BufferPool {
    /// By size, smallest first.
    classes: [SizeClass; SIZES],
    /// Number of pieces requested so far.
    taken: u64,
    /// Bytes of all pieces in the pool, including their alignment space.
    bytes: usize,
    bytes_max: usize,
}

/// Pieces of one size.
#[derive(Debug, Default)]
struct SizeClass {
    pieces: Vec<Buffer>,
    /// When a piece was last requested.
    used: u64,
}

impl BufferPool {
    /// Creates an empty pool that keeps at most this many bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { classes: core::array::from_fn(|_| SizeClass::default()), taken: 0, bytes: 0, bytes_max }
    }

    /// Returns `bytes` bytes, aligned like fresh ones. **Their content is arbitrary**, including
    /// data that others have read or written: the caller must overwrite them before it passes any
    /// of them on.
    #[must_use]
    pub fn take(&mut self, bytes: usize) -> Buffer {
        self.find(bytes).unwrap_or_else(|| Buffer::zeroed(bytes))
    }

    /// The same, if the pool has some: for callers that share a pool, and allocate fresh memory
    /// without blocking others.
    #[must_use]
    pub fn find(&mut self, bytes: usize) -> Option<Buffer> {
        let class = class_of(bytes)?;
        self.taken += 1;
        let class = &mut self.classes[class];
        class.used = self.taken;
        let piece = class.pieces.pop()?;
        self.bytes -= cost(bytes);
        Some(piece)
    }

    /// Returns whether pieces of this size are kept at all.
    #[must_use]
    pub fn keeps(bytes: usize) -> bool {
        class_of(bytes).is_some()
    }

    /// Keeps memory for later reuse, if there is room for it.
    pub fn put(&mut self, buffer: Buffer) {
        let size = buffer.len();
        let Some(own) = class_of(size) else { return };
        if buffer.lent().is_some() || buffer.as_slice().as_ptr().align_offset(ALIGNMENT) != 0 {
            return;
        }
        // One size must not displace others: the size that was not requested for the longest time
        // is evicted.
        while self.bytes + cost(size) > self.bytes_max {
            let filled = self.classes.iter().enumerate().filter(|(_, class)| !class.pieces.is_empty());
            let Some((longest, _)) = filled.min_by_key(|(_, class)| class.used) else { return };
            if longest == own {
                return;
            }
            self.classes[longest].pieces.pop();
            self.bytes -= cost(SMALLEST << longest);
        }
        self.bytes += cost(size);
        self.classes[own].pieces.push(buffer);
    }

    /// The same for a written payload, unless it is still shared.
    pub fn put_payload(&mut self, payload: Payload) {
        if let Some(buffer) = payload.into_buffer() {
            self.put(buffer);
        }
    }
}

/// Returns the class of this size, if it is kept.
fn class_of(bytes: usize) -> Option<usize> {
    let is_size = bytes.is_power_of_two() && (SMALLEST..=LARGEST).contains(&bytes);
    is_size.then(|| (bytes / SMALLEST).ilog2() as usize)
}

/// Bytes of memory that a piece occupies.
const fn cost(size: usize) -> usize {
    size + ALIGNMENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_back_is_taken_again() {
        let mut pool = BufferPool::new(1 << 20);
        let first = pool.take(4096);
        let place = first.as_slice().as_ptr();
        assert_eq!(place.align_offset(ALIGNMENT), 0);
        let payload = first.freeze();
        let part = payload.slice(512..1024);
        pool.put_payload(payload);
        assert_ne!(pool.take(4096).as_slice().as_ptr(), place, "a part of it is somebody's");
        // Not page-aligned, so it is not kept.
        pool.put_payload(part);
        let mut whole = pool.take(8192);
        let mut half = whole.split_to(4096);
        let place = half.as_slice().as_ptr();
        half.join(whole);
        pool.put(half);
        let again = pool.take(8192);
        assert_eq!((again.as_slice().as_ptr(), again.len()), (place, 8192));
    }

    /// Regression: a reader of odd sizes made each piece seem smaller every time it was returned,
    /// until thousands of large pieces were counted as small ones.
    #[test]
    fn what_is_kept_is_as_large_as_it_is_counted() {
        let mut pool = BufferPool::new(1 << 20);
        for round in 0..2000 {
            let bytes =
                [LARGEST, (1 << 20) + 4096, (64 << 10) + 512, 8192 + 4096, 4096, 512, 32 << 20][round % 7];
            // As the engine reads: in pieces, with nothing left over.
            let mut rest = pool.take(bytes);
            let mut read = rest.split_to(bytes / 2);
            let second = rest.split_to(rest.len());
            read.join(second);
            assert_eq!(read.len(), bytes);
            pool.put(read);
        }
        let kept = |class: usize| {
            pool.classes[class].pieces.iter().map(move |piece| (piece.len(), SMALLEST << class))
        };
        for (length, size) in (0..SIZES).flat_map(kept) {
            assert_eq!(length, size);
        }
        assert!(pool.classes[1].pieces.is_empty(), "nobody took one of 8 KiB");
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let mut pool = BufferPool::new(1 << 20);
        for bytes in [2 * LARGEST, LARGEST, 1 << 19, 4096, 4097, 60_000, 1] {
            let taken: Vec<Buffer> = (0..300).map(|_| pool.take(bytes)).collect();
            assert!(taken.iter().all(|buffer| buffer.len() == bytes));
            taken.into_iter().for_each(|buffer| pool.put(buffer));
            let of_class = |class: usize| pool.classes[class].pieces.len() * cost(SMALLEST << class);
            assert_eq!(pool.bytes, (0..SIZES).map(of_class).sum());
            assert!(pool.bytes <= 1 << 20);
        }
        assert_eq!(pool.classes[0].pieces.len(), 128, "what is in use has driven out what was before it");
        let taken = pool.take(1 << 19);
        let place = taken.as_slice().as_ptr();
        pool.put(taken);
        assert_eq!(pool.take(1 << 19).as_slice().as_ptr(), place, "large ones drive out small ones as well");
    }
}
