//! The uuid table: one slot for each backing device or volume that was ever attached. The number of a slot is the
//! inode of all its keys.
//!
//! The table has no checksum, magic or sequence number. It is never changed in place: a changed table is written to
//! another bucket and takes effect with the journal entry that names it.

use crate::error::UuidError;
use crate::identity::{Label, Uuid};
use crate::layout::{Field, Structure};

const UUID: Field = Field::new(0, 16, "uuid", "of the backing device or volume; zero: a free slot");
const LABEL: Field = Field::new(16, 32, "label", "text, padded with NUL; may end in a newline and junk");
const FIRST: Field = Field::new(48, 4, "first_reg", "seconds since 1970");
const LAST: Field = Field::new(52, 4, "last_reg", "seconds since 1970");
const INVALIDATED: Field = Field::new(56, 4, "invalidated", "seconds since 1970, 0: valid");
const FLAGS: Field = Field::new(60, 4, "flags", "bit 0: flash-only volume");
const SECTORS: Field = Field::new(64, 8, "sectors", "size of a flash-only volume");
const REST: Field = Field::new(72, 56, "reserved", "zero");

/// The table of a slot.
pub const STRUCTURE: Structure = Structure {
    name: "Slot of the uuid table",
    fields: &[UUID, LABEL, FIRST, LAST, INVALIDATED, FLAGS, SECTORS, REST],
};

const PAD_OLD: Field = Field::new(60, 4, "pad", "");

/// The table of a slot of the old form.
pub const STRUCTURE_OLD: Structure = Structure {
    name: "Slot of the uuid table, journal version 0",
    fields: &[UUID, LABEL, FIRST, LAST, INVALIDATED, PAD_OLD],
};

/// Bytes of a slot.
pub const SLOT_BYTES: usize = REST.end();
/// Bytes of a slot in a table named by a journal entry of version 0.
pub const SLOT_BYTES_OLD: usize = PAD_OLD.end();

const FLAG_FLASH_ONLY: u32 = 1;

/// One slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UuidSlot {
    /// Whom the slot belongs to; [`Uuid::NIL`] if nobody yet.
    pub uuid: Uuid,
    /// Label of the volume.
    pub label: Label,
    /// First attached, in seconds since 1970.
    pub first_registered: u32,
    /// Last attached, in seconds since 1970.
    pub last_registered: u32,
    /// When the slot was given up, in seconds since 1970; 0 if it was not.
    pub invalidated: u32,
    /// Flags as stored; see [`Self::is_flash_only`].
    pub flags: u32,
    /// Size of a flash-only volume in sectors.
    pub sectors: u64,
    /// Bytes that mean nothing yet, kept as they were read.
    pub reserved: [u8; REST.size],
}

impl UuidSlot {
    /// A slot that was never used.
    pub const FREE: Self = Self {
        uuid: Uuid::NIL,
        label: Label([0; 32]),
        first_registered: 0,
        last_registered: 0,
        invalidated: 0,
        flags: 0,
        sectors: 0,
        reserved: [0; REST.size],
    };

    /// The slot was never used.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.uuid.is_nil()
    }

    /// The slot was given up. A kernel never uses it again.
    #[must_use]
    pub fn is_invalidated(&self) -> bool {
        self.uuid == Uuid::INVALIDATED
    }

    /// Belongs to a volume that exists.
    #[must_use]
    pub fn is_used(&self) -> bool {
        !self.is_free() && !self.is_invalidated()
    }

    /// Belongs to a volume without a backing device.
    #[must_use]
    pub const fn is_flash_only(&self) -> bool {
        self.flags & FLAG_FLASH_ONLY != 0
    }

    /// Makes the slot a flash-only volume's, or not.
    pub const fn set_flash_only(&mut self, flash_only: bool) {
        self.flags = if flash_only { self.flags | FLAG_FLASH_ONLY } else { self.flags & !FLAG_FLASH_ONLY };
    }

    /// Gives the slot up. Label, times and size remain.
    pub const fn invalidate(&mut self, seconds: u32) {
        self.uuid = Uuid::INVALIDATED;
        self.invalidated = seconds;
        self.set_flash_only(false);
    }

    fn parse(bytes: &[u8]) -> Self {
        Self {
            flags: FLAGS.u32(bytes),
            sectors: SECTORS.u64(bytes),
            reserved: REST.array(bytes),
            ..Self::parse_old(bytes)
        }
    }

    fn parse_old(bytes: &[u8]) -> Self {
        Self {
            uuid: Uuid(UUID.array(bytes)),
            label: Label(LABEL.array(bytes)),
            first_registered: FIRST.u32(bytes),
            last_registered: LAST.u32(bytes),
            invalidated: INVALIDATED.u32(bytes),
            ..Self::FREE
        }
    }

    /// The slot as stored.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        UUID.slice_mut(&mut bytes).copy_from_slice(&self.uuid.0);
        LABEL.slice_mut(&mut bytes).copy_from_slice(&self.label.0);
        FIRST.set_u32(&mut bytes, self.first_registered);
        LAST.set_u32(&mut bytes, self.last_registered);
        INVALIDATED.set_u32(&mut bytes, self.invalidated);
        FLAGS.set_u32(&mut bytes, self.flags);
        SECTORS.set_u64(&mut bytes, self.sectors);
        REST.slice_mut(&mut bytes).copy_from_slice(&self.reserved);
        bytes
    }
}

/// The slots of a table, in order of inode.
///
/// # Errors
/// [`UuidError`] if `bytes` are not whole slots. Nothing else can be noticed.
pub fn parse(bytes: &[u8]) -> Result<impl ExactSizeIterator<Item = UuidSlot>, UuidError> {
    Ok(slots(bytes, SLOT_BYTES)?.map(UuidSlot::parse))
}

/// The slots of a table that a journal entry of version 0 names.
///
/// # Errors
/// As [`parse`].
pub fn parse_old(bytes: &[u8]) -> Result<impl ExactSizeIterator<Item = UuidSlot>, UuidError> {
    Ok(slots(bytes, SLOT_BYTES_OLD)?.map(UuidSlot::parse_old))
}

fn slots(bytes: &[u8], slot: usize) -> Result<core::slice::ChunksExact<'_, u8>, UuidError> {
    if !bytes.len().is_multiple_of(slot) {
        return Err(UuidError::NotWholeSlots { slot, found: bytes.len() });
    }
    Ok(bytes.chunks_exact(slot))
}
