//! Memory of others that a device's driver reaches: pages of a request of a block device of ours, which the kernel keeps.
//!
//! The lender answers his request after everything that refers to its memory is gone, or knows from the kernel that what is still on its way
//! to a device holds the pages itself. So lent memory never outlives what it stands for, and who has some must not keep it longer than he
//! takes to answer: a favour that is done afterwards takes a copy before.

use crate::buffer::OutOfReach;
use alloc::sync::Arc;
use core::fmt::Debug;
use core::ops::Range;

/// Zeroes that are put at once.
static ZEROES: [u8; 4096] = [0; 4096];

/// Where the memory of a request is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// With which ring, by a number that no other one of this process has or had. Who does I/O on another one cannot use it.
    pub ring: u64,
    /// Its number among the buffers that are registered there.
    pub number: u16,
}

/// Who lends the memory of one request. What he is asked for may be refused at any time, and is then the request's failure, which he sees to.
pub trait Lender: Send + Sync + Debug {
    /// Where it is registered.
    fn slot(&self) -> Slot;

    /// Copies the bytes from `start` on out of the memory of a request that writes. False: they are not to be had.
    fn read(&self, start: usize, into: &mut [u8]) -> bool;

    /// Copies bytes into the memory of a request that reads, from `start` on. False: that cannot be.
    fn write(&self, start: usize, from: &[u8]) -> bool;
}

/// A piece of the memory of one request.
#[derive(Clone, Debug)]
pub struct Lent {
    lender: Arc<dyn Lender>,
    start: usize,
    length: usize,
}

impl Lent {
    /// The whole memory of a request, `length` bytes.
    #[must_use]
    pub fn new(lender: Arc<dyn Lender>, length: usize) -> Self {
        Self { lender, start: 0, length }
    }

    /// Where its memory is registered, and where in that it begins, in bytes.
    #[must_use]
    pub fn place(&self) -> (Slot, usize) {
        (self.lender.slot(), self.start)
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// True when there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies its bytes.
    ///
    /// # Errors
    /// They are not to be had.
    ///
    /// # Panics
    /// If `into` has another length.
    pub fn copy_to(&self, into: &mut [u8]) -> Result<(), OutOfReach> {
        assert_eq!(into.len(), self.length, "all of it");
        if self.lender.read(self.start, into) { Ok(()) } else { Err(OutOfReach) }
    }

    /// Lays `bytes` over its first ones. If its lender does not take them the request fails.
    ///
    /// # Panics
    /// If there are more than it holds.
    pub fn put(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "it fits");
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
        assert!(is_next, "it was split from there");
        self.length += next.length;
    }

    /// The part `range` (bytes) of it.
    ///
    /// # Panics
    /// If the range is outside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "it is inside");
        Self { lender: Arc::clone(&self.lender), start: self.start + range.start, length: range.len() }
    }
}
