//! Fields of a superblock (sector 8 of every cache and backing device, 4096 bytes).

use crate::layout::{Field, Structure};

pub const CSUM: Field = Field::new(0, 8, "csum", "standard checksum of bytes 8 .. 208 + 8 n");
pub const OFFSET: Field = Field::new(8, 8, "offset", "8: the superblock's own sector");
pub const VERSION: Field = Field::new(16, 8, "version", "cache 0, 3, 5; backing 1, 4, 6");
pub const MAGIC: Field = Field::new(24, 16, "magic", "c68573f6-4e1a-45ca-8265-f57f48ba6d81");
pub const UUID: Field = Field::new(40, 16, "uuid", "of this device, not zero");
pub const SET_UUID: Field = Field::new(56, 16, "set_uuid", "of the cache set");
pub const LABEL: Field = Field::new(72, 32, "label", "text, padded with NUL");
pub const FLAGS: Field = Field::new(104, 8, "flags", "see the table of flags");
pub const SEQ: Field = Field::new(112, 8, "seq", "cache: one more at each write");
pub const COMPAT: Field = Field::new(120, 8, "feature_compat", "version 5 and later");
pub const INCOMPAT: Field = Field::new(128, 8, "feature_incompat", "version 5 and later");
pub const RO_COMPAT: Field = Field::new(136, 8, "feature_ro_compat", "version 5 and later");
pub const RESERVED: Field = Field::new(144, 40, "reserved", "zero");
pub const BUCKETS: Field =
    Field::new(184, 8, "nbuckets / data_offset", "cache: buckets N; backing: sector of its data");
pub const BLOCK_SIZE: Field = Field::new(192, 2, "block_size", "sectors");
pub const BUCKET_SIZE: Field = Field::new(194, 2, "bucket_size", "cache: sectors, or their logarithm");
pub const DEVICES: Field = Field::new(196, 2, "nr_in_set", "cache: 1");
pub const DEVICE_INDEX: Field = Field::new(198, 2, "nr_this_dev", "cache: 0");
pub const LAST_MOUNT: Field = Field::new(200, 4, "last_mount", "seconds since 1970");
pub const FIRST_BUCKET: Field =
    Field::new(204, 2, "first_bucket", "cache: first usable bucket; backing: junk");
pub const JOURNAL_COUNT: Field = Field::new(206, 2, "njournal_buckets", "n");
pub const JOURNAL: Field =
    Field::new(208, 2048, "d", "u64 numbers of the journal buckets; the first n are used");
pub const BUCKET_SIZE_HIGH: Field = Field::new(2256, 2, "bucket_size_hi", "obsolete");

/// Layout table of a superblock.
pub const STRUCTURE: Structure = Structure {
    name: "Superblock",
    fields: &[
        CSUM,
        OFFSET,
        VERSION,
        MAGIC,
        UUID,
        SET_UUID,
        LABEL,
        FLAGS,
        SEQ,
        COMPAT,
        INCOMPAT,
        RO_COMPAT,
        RESERVED,
        BUCKETS,
        BLOCK_SIZE,
        BUCKET_SIZE,
        DEVICES,
        DEVICE_INDEX,
        LAST_MOUNT,
        FIRST_BUCKET,
        JOURNAL_COUNT,
        JOURNAL,
        BUCKET_SIZE_HIGH,
    ],
};

/// A group of bits of the flags word.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    shift: u32,
    bits: u32,
}

pub const SYNCHRONOUS: Flag = Flag { shift: 0, bits: 1 };
pub const DISCARD: Flag = Flag { shift: 1, bits: 1 };
pub const REPLACEMENT: Flag = Flag { shift: 2, bits: 3 };
pub const CACHE_MODE: Flag = Flag { shift: 0, bits: 4 };
pub const STATE: Flag = Flag { shift: 61, bits: 2 };

impl Flag {
    const fn mask(self) -> u64 {
        (1 << self.bits) - 1
    }

    /// Returns the group's value in `word`.
    #[expect(clippy::cast_possible_truncation, reason = "a group has four bits at most")]
    pub const fn of(self, word: u64) -> u8 {
        ((word >> self.shift) & self.mask()) as u8
    }

    /// Returns `word` with the group set to `value`.
    pub const fn with(self, word: u64, value: u8) -> u64 {
        (word & !(self.mask() << self.shift)) | ((value as u64 & self.mask()) << self.shift)
    }
}

const _: () = assert!(CACHE_MODE.bits <= 8 && REPLACEMENT.bits <= 8, "a group's value is a byte");

/// The record that bcached adds to the superblock of a backing device.
///
/// It lies at [`ATTACHMENT_AT`], in bytes that a kernel leaves unchanged, after the summed part
/// (which ends at the empty list of journal buckets). It is within the first 512 bytes, which are
/// written as one unit.
pub const ATTACHMENT: Structure = Structure {
    name: "What bcached adds to the superblock of a backing device, at 448",
    fields: &[
        ATTACHMENT_MARK,
        ATTACHMENT_NUMBER,
        ATTACHMENT_PAD,
        ATTACHMENT_STAMP,
        ATTACHMENT_ENTRY,
        ATTACHMENT_SUM,
    ],
};

pub const ATTACHMENT_AT: usize = 448;
pub const ATTACHMENT_MARK: Field = Field::new(0, 8, "mark", "0x6863617474616362");
pub const ATTACHMENT_NUMBER: Field = Field::new(8, 4, "number", "slot of the uuid table");
pub const ATTACHMENT_PAD: Field = Field::new(12, 4, "pad", "0");
pub const ATTACHMENT_STAMP: Field = Field::new(16, 8, "stamp", "one of the two in the slot");
pub const ATTACHMENT_ENTRY: Field =
    Field::new(24, 8, "entry", "newest durable journal entry when this was written");
pub const ATTACHMENT_SUM: Field =
    Field::new(32, 8, "sum", "standard checksum of the superblock's csum and bytes 0 .. 32 of this");
pub const ATTACHED_MARK: u64 = u64::from_le_bytes(*b"bcattach");

const _: () = assert!(ATTACHMENT_AT + ATTACHMENT_SUM.end() <= 512, "it is written with the first sector");
