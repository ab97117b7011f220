//! Memory for I/O. The driver owns it from submission to completion.
//!
//! [`Buffer`] is unique and writable: reads fill it. It can be split into adjacent pieces that are
//! filled independently and joined again without a copy. [`Payload`] is shared and immutable: one
//! payload can be in flight to two devices at once and cannot change meanwhile (bytes written to
//! two places come from one stable copy, [`Payload::stable`]).
//!
//! Both are opaque, because there are two kinds of memory: **our own**, and **lent**
//! ([`LentBuffer`]). Lent memory consists of pages of a request that the kernel keeps and has
//! registered with the ring; devices can read into it and be written from it, but its bytes are
//! accessible only by a copy. Code that handles either kind uses [`Buffer::put`],
//! [`Payload::stable`] and their like; `as_slice` is for code that has allocated the memory and
//! knows that it is our own.

use crate::foreign_buffer::LentBuffer;
use bytes::{Buf as _, Bytes, BytesMut};
use core::ops::Range;

/// Alignment of every fresh buffer: a page, which every device accepts for direct I/O.
pub const ALIGNMENT: usize = 4096;

/// Why `as_slice` panics.
const LENT: &str = "lent memory is accessible only through a copy";

/// Unique memory, aligned when fresh; pieces split at multiples of a block keep the block's
/// alignment.
#[derive(Debug)]
pub struct Buffer(Memory<BytesMut>);

/// Shared, immutable memory. Clones and slices are cheap and refer to the same bytes.
#[derive(Clone, Debug)]
pub struct Payload(Memory<Bytes>);

#[derive(Clone, Debug)]
enum Memory<Own> {
    Own(Own),
    Lent(LentBuffer),
}

impl<Own> Memory<Own> {
    fn own(&self) -> &Own {
        let Self::Own(own) = self else { unreachable!("{LENT}") };
        own
    }

    const fn lent(&self) -> Option<&LentBuffer> {
        match self {
            Self::Own(_) => None,
            Self::Lent(lent) => Some(lent),
        }
    }
}

/// The bytes of lent memory are not accessible: the lender has taken it back, or the kernel does
/// not give access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the memory of a request is no longer accessible")]
pub struct BufferUnavailable;

impl Buffer {
    /// Returns `bytes` zero bytes, aligned to [`ALIGNMENT`].
    #[must_use]
    pub fn zeroed(bytes: usize) -> Self {
        let mut memory = BytesMut::zeroed(bytes + ALIGNMENT);
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        // Split off rather than skipped: so references are counted from the start, and a payload
        // made of it, which has several, need not allocate a counter each time the memory is
        // reused.
        drop(memory.split_to(skip));
        memory.truncate(bytes);
        Self(Memory::Own(memory))
    }

    /// Returns a fresh aligned buffer holding `bytes`.
    #[must_use]
    pub fn copied_from(bytes: &[u8]) -> Self {
        let mut memory = BytesMut::with_capacity(bytes.len() + ALIGNMENT);
        // Only the bytes before it need be cleared.
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        memory.resize(skip, 0);
        memory.extend_from_slice(bytes);
        memory.advance(skip);
        Self(Memory::Own(memory))
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Own(memory) => memory.len(),
            Memory::Lent(lent) => lent.len(),
        }
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the lent memory; `None` if the memory is our own.
    #[must_use]
    pub const fn lent(&self) -> Option<&LentBuffer> {
        self.0.lent()
    }

    /// The bytes.
    ///
    /// # Panics
    /// If the memory is lent.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.0.own()
    }

    /// The bytes, writable.
    ///
    /// # Panics
    /// If the memory is lent.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let Memory::Own(memory) = &mut self.0 else { unreachable!("{LENT}") };
        memory
    }

    /// Copies `bytes` over its beginning. If lent memory does not accept them, its request fails,
    /// which the lender handles.
    ///
    /// # Panics
    /// If there are more than it holds.
    pub fn put(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Memory::Own(memory) => memory[..bytes.len()].copy_from_slice(bytes),
            Memory::Lent(lent) => lent.put(bytes),
        }
    }

    /// Sets all its bytes to zero, like [`Buffer::put`].
    pub fn clear(&mut self) {
        match &mut self.0 {
            Memory::Own(memory) => memory.fill(0),
            Memory::Lent(lent) => lent.clear(),
        }
    }

    /// Splits off and returns the first `bytes`; `self` keeps the rest.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn split_to(&mut self, bytes: usize) -> Self {
        Self(match &mut self.0 {
            Memory::Own(memory) => Memory::Own(memory.split_to(bytes)),
            Memory::Lent(lent) => Memory::Lent(lent.split_to(bytes)),
        })
    }

    /// Appends `next` to `self`; without a copy if it was split from there.
    ///
    /// # Panics
    /// If one of them is lent and `next` was not split from there.
    pub fn join(&mut self, next: Self) {
        match (&mut self.0, next.0) {
            (Memory::Own(memory), Memory::Own(next)) => memory.unsplit(next),
            (Memory::Lent(lent), Memory::Lent(next)) => lent.join(&next),
            _ => unreachable!("memory of two kinds cannot be joined"),
        }
    }

    /// Makes the bytes shared and immutable.
    #[must_use]
    pub fn freeze(self) -> Payload {
        Payload(match self.0 {
            Memory::Own(memory) => Memory::Own(memory.freeze()),
            Memory::Lent(lent) => Memory::Lent(lent),
        })
    }
}

/// For our own memory, like [`Buffer::as_mut_slice`].
impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self(Memory::Own(BytesMut::default()))
    }
}

impl Payload {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Own(bytes) => bytes.len(),
            Memory::Lent(lent) => lent.len(),
        }
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the lent memory; `None` if the memory is our own.
    #[must_use]
    pub const fn lent(&self) -> Option<&LentBuffer> {
        self.0.lent()
    }

    /// The bytes.
    ///
    /// # Panics
    /// If the memory is lent.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.0.own()
    }

    /// Returns the same bytes in memory that cannot change: itself if it is our own, else a copy.
    /// The owner of lent memory may write to it while it is read, so bytes written to two places
    /// must come from here.
    ///
    /// # Errors
    /// The lent memory can no longer be read.
    pub fn stable(&self) -> Result<Self, BufferUnavailable> {
        let Memory::Lent(lent) = &self.0 else { return Ok(self.clone()) };
        let mut copy = Buffer::zeroed(lent.len());
        lent.copy_to(copy.as_mut_slice())?;
        Ok(copy.freeze())
    }

    /// Returns the memory for reuse, if neither it nor any part of it is shared.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        let Memory::Own(bytes) = self.0 else { return None };
        bytes.try_into_mut().ok().map(|memory| Buffer(Memory::Own(memory)))
    }

    /// Returns the part `range` (bytes) of the same memory.
    ///
    /// # Panics
    /// If the range is outside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self(match &self.0 {
            Memory::Own(bytes) => Memory::Own(bytes.slice(range)),
            Memory::Lent(lent) => Memory::Lent(lent.slice(range)),
        })
    }
}

impl Default for Payload {
    fn default() -> Self {
        Self(Memory::Own(Bytes::default()))
    }
}

impl From<Buffer> for Payload {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}

impl From<LentBuffer> for Buffer {
    /// The request that owns the memory must be completed after this has been dropped.
    fn from(lent: LentBuffer) -> Self {
        Self(Memory::Lent(lent))
    }
}
