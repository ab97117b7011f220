//! Memory of others that a device's driver can reach: pages of a request to one of our block
//! devices, which the kernel keeps.
//!
//! The lender completes its request after everything that refers to its memory is gone, or knows
//! from the kernel that transfers still in flight to a device hold the pages themselves. So lent
//! memory never outlives its request, and its holder must not keep it longer than it takes to
//! answer. Work that continues after the answer must take a copy before.

use crate::buffer::BufferUnavailable;
use alloc::sync::Arc;
use core::fmt::Debug;
use core::ops::Range;

/// Zeroes that are written at once.
static ZEROES: [u8; 4096] = [0; 4096];

/// Where the memory of a request is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferSlot {
    /// The ring, by a number that is unique among all rings this process has created. I/O on
    /// another ring cannot use the slot.
    pub ring: u64,
    /// Its number among the buffers that are registered there.
    pub number: u16,
}

/// Lends the memory of one request. It may refuse an access at any time. That is then the request's
/// failure, which the lender handles.
pub trait Lender: Send + Sync + Debug {
    /// Returns where the memory is registered.
    fn slot(&self) -> BufferSlot;

    /// Copies the bytes from `start` on out of the memory of a write request. Returns false if they
    /// are not available.
    fn read(&self, start: usize, into: &mut [u8]) -> bool;

    /// Copies bytes into the memory of a read request, from `start` on. Returns false if that is
    /// impossible.
    fn write(&self, start: usize, from: &[u8]) -> bool;
}

/// A piece of the memory of one request.
#[derive(Clone, Debug)]
pub struct LentBuffer {
    lender: Arc<dyn Lender>,
    start: usize,
    length: usize,
}

impl LentBuffer {
    /// Creates the whole memory of a request, `length` bytes.
    #[must_use]
    pub fn new(lender: Arc<dyn Lender>, length: usize) -> Self {
        Self { lender, start: 0, length }
    }

    /// Returns where its memory is registered, and its offset in that, in bytes.
    #[must_use]
    pub fn place(&self) -> (BufferSlot, usize) {
        (self.lender.slot(), self.start)
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies its bytes.
    ///
    /// # Errors
    /// They are not available.
    ///
    /// # Panics
    /// If `into` has another length.
    pub fn copy_to(&self, into: &mut [u8]) -> Result<(), BufferUnavailable> {
        assert_eq!(into.len(), self.length, "the target has the same length");
        if self.lender.read(self.start, into) { Ok(()) } else { Err(BufferUnavailable) }
    }

    /// Copies `bytes` over its beginning. If the lender does not accept them, the request fails.
    ///
    /// # Panics
    /// If there are more than it holds.
    pub fn put(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "the bytes fit");
        let _seen_to_by_the_lender = self.lender.write(self.start, bytes);
    }

    pub(crate) fn clear(&self) {
        for at in (0..self.length).step_by(ZEROES.len()) {
            let bytes = ZEROES.len().min(self.length - at);
            let _seen_to_by_the_lender = self.lender.write(self.start + at, &ZEROES[..bytes]);
        }
    }

    pub(crate) fn split_to(&mut self, bytes: usize) -> Self {
        let first = self.slice(0..bytes);
        *self = self.slice(bytes..self.length);
        first
    }

    pub(crate) fn join(&mut self, next: &Self) {
        let is_next = Arc::ptr_eq(&self.lender, &next.lender) && self.start + self.length == next.start;
        assert!(is_next, "the pieces are adjacent");
        self.length += next.length;
    }

    /// Returns its part `range` (bytes).
    ///
    /// # Panics
    /// If the range is outside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "the range is inside");
        Self { lender: Arc::clone(&self.lender), start: self.start + range.start, length: range.len() }
    }
}
