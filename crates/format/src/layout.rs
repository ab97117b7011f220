//! Describes where each field of a structure lies: one table per structure, used by the parsers and
//! to render `docs/format.md`.
//!
//! A parser never contains an offset as a number; it names a [`Field`]. The page of layout tables
//! is rendered from the same constants, so page and code cannot diverge.

/// One field of a structure: its offset and size in bytes, its name and its meaning.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// First byte, from the start of the structure.
    pub offset: usize,
    /// Length in bytes.
    pub size: usize,
    /// Name of the field in the format.
    pub name: &'static str,
    /// One phrase for the page of layout tables.
    pub meaning: &'static str,
}

/// A structure of the on-disk format, for the page of layout tables.
#[derive(Clone, Copy, Debug)]
pub struct Structure {
    /// Heading of its table.
    pub name: &'static str,
    /// Its fields in ascending order of offset.
    pub fields: &'static [Field],
}

impl Field {
    pub(crate) const fn new(offset: usize, size: usize, name: &'static str, meaning: &'static str) -> Self {
        Self { offset, size, name, meaning }
    }

    /// Returns the offset of the first byte after the field.
    #[must_use]
    pub const fn end(&self) -> usize {
        self.offset + self.size
    }

    /// Returns the field's bytes. The caller has checked the length of the structure.
    pub(crate) fn slice<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.offset..self.end()]
    }

    pub(crate) fn slice_mut<'a>(&self, bytes: &'a mut [u8]) -> &'a mut [u8] {
        &mut bytes[self.offset..self.end()]
    }

    pub(crate) fn array<const N: usize>(&self, bytes: &[u8]) -> [u8; N] {
        self.slice(bytes).try_into().expect("the field has the size its reader asks for")
    }

    pub(crate) fn u64(&self, bytes: &[u8]) -> u64 {
        u64::from_le_bytes(self.array(bytes))
    }

    pub(crate) fn u32(&self, bytes: &[u8]) -> u32 {
        u32::from_le_bytes(self.array(bytes))
    }

    pub(crate) fn u16(&self, bytes: &[u8]) -> u16 {
        u16::from_le_bytes(self.array(bytes))
    }

    pub(crate) fn set_u64(&self, bytes: &mut [u8], value: u64) {
        self.slice_mut(bytes).copy_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn set_u32(&self, bytes: &mut [u8], value: u32) {
        self.slice_mut(bytes).copy_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn set_u16(&self, bytes: &mut [u8], value: u16) {
        self.slice_mut(bytes).copy_from_slice(&value.to_le_bytes());
    }
}

/// Every structure that has a table, in the order of the page.
pub const STRUCTURES: &[Structure] = &[
    crate::superblock::STRUCTURE,
    crate::superblock::ATTACHMENT,
    crate::bset::STRUCTURE,
    crate::jset::STRUCTURE,
    crate::prio::STRUCTURE,
    crate::uuid::STRUCTURE,
    crate::uuid::STRUCTURE_OLD,
    crate::stamp::STRUCTURE,
    crate::summary::STRUCTURE,
];
