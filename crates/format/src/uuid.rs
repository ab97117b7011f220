//! The uuid table: one slot for each backing device or volume that was ever attached. The number of
//! a slot is the inode of all its keys.
//!
//! The table has no checksum, magic or sequence number. It is never changed in place: a changed
//! table is written to another bucket and takes effect with the journal entry that names it.
//!
//! bcached seals it in two ways. The journal entry holds the checksum of the whole table
//! ([`TableSeal`](crate::jset::TableSeal)), so that any other table is detected. Each slot that is
//! in use or was given up has a seal of its own, in bytes that a kernel leaves unchanged. So the
//! intact slots of a damaged table can be told from the others.

use crate::checksum::Checksum;
use crate::error::UuidError;
use crate::identity::{Label, Uuid};
use crate::jset::TableSeal;
use crate::layout::{Field, Structure};
use crate::superblock::Attachment;
use crate::units::Inode;
use alloc::collections::BTreeMap;

const UUID: Field = Field::new(0, 16, "uuid", "of the backing device or volume; zero: a free slot");
const LABEL: Field = Field::new(16, 32, "label", "text, padded with NUL; may end in a newline and junk");
const FIRST: Field = Field::new(48, 4, "first_reg", "seconds since 1970");
const LAST: Field = Field::new(52, 4, "last_reg", "seconds since 1970");
const INVALIDATED: Field = Field::new(56, 4, "invalidated", "seconds since 1970, 0: valid");
const FLAGS: Field = Field::new(60, 4, "flags", "bit 0: flash-only volume");
const SECTORS: Field = Field::new(64, 8, "sectors", "size of a flash-only volume");
const EDITION: Field = Field::new(72, 8, "edition", "zero; with bcached: the edition of the table");
const SUM: Field = Field::new(
    80,
    8,
    "sum",
    "zero; with bcached: standard checksum of set uuid, u32 slot number, the slot with sum 0",
);
const RELEASED: Field = Field::new(
    88,
    8,
    "released",
    "zero; with bcached: 0x657361656c657262: given up after its keys were no longer needed",
);
const FORMER: Field = Field::new(
    96,
    8,
    "attachment[0]",
    "zero; with bcached: the former attachment, which the backing device may still record",
);
const CURRENT: Field = Field::new(
    104,
    8,
    "attachment[1]",
    "zero; with bcached: the attachment that the backing device is to record",
);
const REST: Field = Field::new(112, 16, "reserved", "zero");

/// Layout table of a slot.
pub const STRUCTURE: Structure = Structure {
    name: "Slot of the uuid table",
    fields: &[
        UUID,
        LABEL,
        FIRST,
        LAST,
        INVALIDATED,
        FLAGS,
        SECTORS,
        EDITION,
        SUM,
        RELEASED,
        FORMER,
        CURRENT,
        REST,
    ],
};

const PAD_OLD: Field = Field::new(60, 4, "pad", "");

/// Layout table of a slot of the old form.
pub const STRUCTURE_OLD: Structure = Structure {
    name: "Slot of the uuid table, journal version 0",
    fields: &[UUID, LABEL, FIRST, LAST, INVALIDATED, PAD_OLD],
};

/// Bytes of a slot.
pub const SLOT_BYTES: usize = REST.end();
/// Bytes of a slot in a table named by a journal entry of version 0.
pub const SLOT_BYTES_OLD: usize = PAD_OLD.end();

/// Largest flash-only volume, in sectors. Its size in bytes fits a signed 64-bit number, which is
/// what clients are told. The table of a kernel has no checksum, so a slot may contain any number.
pub const FLASH_SECTORS_MAX: u64 = (1 << 54) - 1;

const FLAG_FLASH_ONLY: u32 = 1;
const RELEASED_MARK: u64 = u64::from_le_bytes(*b"brelease");

/// One slot of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UuidSlot {
    /// Uuid of the slot's volume; [`Uuid::NIL`] if the slot was never used.
    pub uuid: Uuid,
    /// Label of the volume.
    pub label: Label,
    /// First attached, in seconds since 1970.
    pub first_registered: u32,
    /// Last attached, in seconds since 1970.
    pub last_registered: u32,
    /// When the slot was given up, in seconds since 1970; 0 if it has not been.
    pub invalidated: u32,
    /// Flags as stored; see [`Self::is_flash_only`].
    pub flags: u32,
    /// Size of a flash-only volume in sectors.
    pub sectors: u64,
    /// Number of the write by bcached that stored the slot; see [`Self::is_sealed`].
    pub edition: u64,
    /// Checksum as stored; see [`Self::is_sealed`].
    pub sum: u64,
    /// Release mark as stored; see [`Self::is_released`].
    pub released: u64,
    /// The two stamps of which the superblock of the backing device carries one, if bcached wrote
    /// both ([`Attachment::stamp`](crate::superblock::Attachment::stamp)). The second is the newer
    /// one; zero: nothing is known.
    pub attachment: [u64; 2],
    /// Unused bytes, kept as they were read.
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
        edition: 0,
        sum: 0,
        released: 0,
        attachment: [0; 2],
        reserved: [0; REST.size],
    };

    /// Returns true if the slot was never used.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.uuid.is_nil()
    }

    /// Returns true if the slot was given up. A kernel never uses it again.
    #[must_use]
    pub fn is_invalidated(&self) -> bool {
        self.uuid == Uuid::INVALIDATED
    }

    /// Returns true if the slot belongs to a volume that exists.
    #[must_use]
    pub fn is_used(&self) -> bool {
        !self.is_free() && !self.is_invalidated()
    }

    /// Returns true if the slot belongs to a volume without a backing device.
    #[must_use]
    pub const fn is_flash_only(&self) -> bool {
        self.flags & FLAG_FLASH_ONLY != 0
    }

    /// Sets or clears the mark of a flash-only volume.
    pub const fn set_flash_only(&mut self, flash_only: bool) {
        self.flags = if flash_only { self.flags | FLAG_FLASH_ONLY } else { self.flags & !FLAG_FLASH_ONLY };
    }

    /// Gives up the slot, keeping its label, times and size. This is only for a volume whose keys
    /// are no longer needed: it is *released*.
    pub const fn release(&mut self, seconds: u32) {
        self.uuid = Uuid::INVALIDATED;
        self.invalidated = seconds;
        self.set_flash_only(false);
        self.released = RELEASED_MARK;
    }

    /// Returns true if bcached gave up the slot at a time when nothing in the cache under its
    /// number was needed any more. A kernel does not record this, and a damaged table may call a
    /// slot invalidated although its volume is alive. The result means something only if the slot
    /// [is sealed](Self::is_sealed).
    #[must_use]
    pub const fn is_released(&self) -> bool {
        self.released == RELEASED_MARK
    }

    /// Discards what the slot says about its release.
    pub const fn forget_release(&mut self) {
        self.released = 0;
    }

    /// Seals slot `number` of set `set` for one write of the table.
    pub fn seal(&mut self, set: Uuid, number: Inode, edition: u64) {
        self.edition = edition;
        self.sum = self.computed_sum(set, number);
    }

    /// Returns true if the slot is as bcached wrote it for this set and this number, in the write
    /// numbered [`Self::edition`].
    #[must_use]
    pub fn is_sealed(&self, set: Uuid, number: Inode) -> bool {
        self.edition != 0 && self.sum == self.computed_sum(set, number)
    }

    /// Returns true if a backing device with the record `attachment` was not last used with this
    /// slot, whose number is `number`. Then one of the two devices is an older copy.
    ///
    /// The result means something only if bcached wrote both. The slot also keeps the stamp that
    /// the device had before the newest one, so a slot without both stamps contradicts no device. A
    /// device with the former stamp may also name the former number, if it is not `dirty`: nothing
    /// under that number is needed any more.
    #[must_use]
    pub fn contradicts(&self, number: Inode, attachment: &Attachment, dirty: bool) -> bool {
        let [former, _] = self.attachment;
        let is_known = self.attachment.iter().all(|stamp| *stamp != 0);
        let is_before = attachment.stamp == former && !dirty;
        let is_same = number == attachment.number && self.attachment.contains(&attachment.stamp);
        is_known && !is_before && !is_same
    }

    /// Records that a kernel has used the set since the slot was written. The valid stamps stay
    /// valid. But two equal stamps mean that bcached's last start of the volume was completed and
    /// that no other program has used the set since, which is no longer true. So the former stamp
    /// is replaced by a value that is not a stamp: stamps are odd.
    pub fn was_used_by_others(&mut self) {
        let [former, newest] = self.attachment;
        if former == newest && newest != 0 {
            self.attachment[0] = !newest;
        }
    }

    fn computed_sum(&self, set: Uuid, number: Inode) -> u64 {
        let mut sum = Checksum::default();
        sum.add(&set.0);
        sum.add(&number.0.to_le_bytes());
        sum.add(&Self { sum: 0, ..*self }.to_bytes());
        sum.value()
    }

    fn parse(bytes: &[u8]) -> Self {
        Self {
            flags: FLAGS.u32(bytes),
            sectors: SECTORS.u64(bytes),
            edition: EDITION.u64(bytes),
            sum: SUM.u64(bytes),
            released: RELEASED.u64(bytes),
            attachment: [FORMER.u64(bytes), CURRENT.u64(bytes)],
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

    /// Returns the slot as stored.
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
        EDITION.set_u64(&mut bytes, self.edition);
        SUM.set_u64(&mut bytes, self.sum);
        RELEASED.set_u64(&mut bytes, self.released);
        FORMER.set_u64(&mut bytes, self.attachment[0]);
        CURRENT.set_u64(&mut bytes, self.attachment[1]);
        REST.slice_mut(&mut bytes).copy_from_slice(&self.reserved);
        bytes
    }
}

/// Parses a table; returns its slots in order of inode.
///
/// # Errors
/// [`UuidError`] if `bytes` are not whole slots. Nothing else can be detected.
pub fn parse(bytes: &[u8]) -> Result<impl ExactSizeIterator<Item = UuidSlot>, UuidError> {
    Ok(slots(bytes, SLOT_BYTES)?.map(UuidSlot::parse))
}

/// Parses a table that a journal entry of version 0 names; returns its slots in order of inode.
///
/// # Errors
/// As for [`parse`].
pub fn parse_old(bytes: &[u8]) -> Result<impl ExactSizeIterator<Item = UuidSlot>, UuidError> {
    Ok(slots(bytes, SLOT_BYTES_OLD)?.map(UuidSlot::parse_old))
}

/// Why the content of a slot may differ from what was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotMismatch {
    /// The table is sealed, and the slot is not from this write of it.
    Another,
    /// A flash-only volume of more than [`FLASH_SECTORS_MAX`].
    TooLarge,
    /// Another slot has the same uuid, and nothing tells which of them is right.
    Twice,
}

/// Returns the slots of the table of `set` that may differ from what was written. `seal` is the
/// table's seal from the journal entry that names it. No volume may be served, created or deleted
/// because of such a slot.
#[must_use]
pub fn doubted(set: Uuid, slots: &[UuidSlot], seal: Option<TableSeal>) -> BTreeMap<Inode, SlotMismatch> {
    let edition = seal.map(|seal| seal.edition);
    let (mut doubted, mut by_uuid) = (BTreeMap::new(), BTreeMap::new());
    for (number, slot) in (0..).map(Inode).zip(slots).filter(|(_, slot)| !slot.is_free()) {
        if edition.is_some_and(|edition| slot.edition != edition || !slot.is_sealed(set, number)) {
            doubted.insert(number, SlotMismatch::Another);
        } else if slot.is_used() && slot.is_flash_only() && slot.sectors > FLASH_SECTORS_MAX {
            doubted.insert(number, SlotMismatch::TooLarge);
        } else if slot.is_used()
            && let Some(first) = by_uuid.insert(slot.uuid, number)
        {
            doubted.extend([(first, SlotMismatch::Twice), (number, SlotMismatch::Twice)]);
        }
    }
    doubted
}

fn slots(bytes: &[u8], slot: usize) -> Result<core::slice::ChunksExact<'_, u8>, UuidError> {
    if !bytes.len().is_multiple_of(slot) {
        return Err(UuidError::NotWholeSlots { slot, found: bytes.len() });
    }
    Ok(bytes.chunks_exact(slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_may_say_what_it_said_before() {
        let slot = UuidSlot { attachment: [1, 2], ..UuidSlot::FREE };
        let contradicts = |number, stamp, dirty| {
            let attachment = Attachment { number: Inode(number), stamp, entry: 0 };
            slot.contradicts(Inode(5), &attachment, dirty)
        };
        for dirty in [false, true] {
            assert!(!contradicts(5, 1, dirty) && !contradicts(5, 2, dirty));
            assert!(contradicts(5, 3, dirty) && contradicts(4, 2, dirty) && contradicts(4, 3, dirty));
        }
        assert!(!contradicts(4, 1, false), "an attach failed, and the next one took another number");
        assert!(contradicts(4, 1, true), "its data is under that number");
        let half_known = UuidSlot { attachment: [0, 2], ..UuidSlot::FREE };
        let other = Attachment { number: Inode(4), stamp: 3, entry: 0 };
        assert!(!half_known.contradicts(Inode(5), &other, true));
    }
}
