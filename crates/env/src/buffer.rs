//! Memory that I/O is done with. The driver owns it from submission to completion.
//!
//! [`Buffer`] is unique and can be written: reads land in it; it can be split into neighbouring pieces that are filled
//! independently and joined again without a copy. [`Payload`] is shared and immutable: one payload can be on its way
//! to two devices at once, and nobody can change it meanwhile (bytes that go to two places come from one
//! stable copy). Both are opaque: memory of another kind (a guest's, a registered request buffer) becomes a second
//! form behind the same types, and only code that must look at bytes calls `as_slice`.

use bytes::{Buf as _, Bytes, BytesMut};
use core::ops::Range;

/// Alignment of every fresh buffer: a page, which every device accepts for direct I/O.
pub const ALIGNMENT: usize = 4096;

/// Unique memory, aligned when fresh; pieces split at multiples of a block keep the block's alignment.
#[derive(Debug, Default)]
pub struct Buffer(BytesMut);

/// Shared, immutable memory. Clones and slices are cheap and refer to the same bytes.
#[derive(Clone, Debug, Default)]
pub struct Payload(Bytes);

impl Buffer {
    /// `bytes` zero bytes, aligned to [`ALIGNMENT`].
    #[must_use]
    pub fn zeroed(bytes: usize) -> Self {
        let mut memory = BytesMut::zeroed(bytes + ALIGNMENT);
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        memory.advance(skip);
        memory.truncate(bytes);
        Self(memory)
    }

    /// A fresh aligned buffer holding `bytes`.
    #[must_use]
    pub fn copied_from(bytes: &[u8]) -> Self {
        let mut memory = BytesMut::with_capacity(bytes.len() + ALIGNMENT);
        // What lies before it is all that need be cleared.
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        memory.resize(skip, 0);
        memory.extend_from_slice(bytes);
        memory.advance(skip);
        Self(memory)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// The bytes, writable.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Splits off and returns the first `bytes`; `self` keeps the rest.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_to(&mut self, bytes: usize) -> Self {
        Self(self.0.split_to(bytes))
    }

    /// Puts `next` behind `self`; without a copy if it was split from there.
    pub fn join(&mut self, next: Self) {
        self.0.unsplit(next.0);
    }

    /// Makes the bytes shared and immutable.
    #[must_use]
    pub fn freeze(self) -> Payload {
        Payload(self.0.freeze())
    }
}

impl Payload {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// To be written again, if nobody else has it or any part of it.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        self.0.try_into_mut().ok().map(Buffer)
    }

    /// The part `range` (bytes) of the same memory.
    ///
    /// # Panics
    /// If the range is outside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self(self.0.slice(range))
    }
}

impl From<Buffer> for Payload {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}
