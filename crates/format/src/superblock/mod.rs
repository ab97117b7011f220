//! Superblocks of cache and backing devices, all versions: 4096 unverified bytes -> a checked value
//! -> sealed bytes.
//!
//! A device has one copy, which is overwritten in place. A superblock must therefore be written
//! alone, followed by a flush. A checked superblock keeps every byte that was read and changes only
//! the fields that are set. Sealing it again unchanged yields the same bytes, including junk in
//! undefined fields (a kernel leaves some there, and sums it).

mod backing;
mod cache;
pub(crate) mod layout;

use crate::checksum::{CHECKSUM_BYTES, checksum};
use crate::error::SuperblockError;
use crate::identity::{Label, Uuid};
use crate::units::SECTOR_BYTES;
use alloc::boxed::Box;
use layout as field;

pub use backing::{Attachment, BackingFormat, BackingState, BackingSuperblock, CacheMode};
pub use cache::{BUCKETS_MIN, CacheFormat, CacheSuperblock, ReplacementPolicy};
pub use layout::{ATTACHMENT, STRUCTURE};

/// Sector of the superblock on every device.
pub const SUPERBLOCK_SECTOR: u64 = 8;

/// Bytes of a superblock as read and written.
pub const SUPERBLOCK_BYTES: usize = 4096;

/// First sector after the superblock: a backing device's data may start here.
pub const SUPERBLOCK_END_SECTOR: u64 = SUPERBLOCK_SECTOR + SUPERBLOCK_BYTES as u64 / SECTOR_BYTES;

/// Most journal buckets that a superblock can list.
pub const MAX_JOURNAL_BUCKETS: u64 = 256;

/// Magic that marks a bcache superblock.
pub const MAGIC: Uuid =
    Uuid([0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81]);

/// Magic that marks a superblock of bcachefs, except an old one, which has bcache's.
const MAGIC_OF_BCACHEFS: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef];

/// Facts about a device that its superblock is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceGeometry {
    /// Length of the device in sectors.
    pub sectors: u64,
    /// Logical block of the device in sectors; 1 for a plain file.
    pub logical_block_sectors: u64,
}

/// 4096 bytes that have not been checked.
#[derive(Clone, PartialEq, Eq)]
pub struct RawSuperblock(Box<[u8; SUPERBLOCK_BYTES]>);

/// A checked superblock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Superblock {
    /// Superblock of a cache device.
    Cache(CacheSuperblock),
    /// Superblock of a backing device.
    Backing(BackingSuperblock),
}

impl RawSuperblock {
    /// Takes the first 4096 of `bytes`, which were read from [`SUPERBLOCK_SECTOR`] on.
    ///
    /// # Errors
    /// [`SuperblockError::Truncated`] if there are fewer.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let truncated = SuperblockError::Truncated { wanted: SUPERBLOCK_BYTES, found: bytes.len() };
        let bytes = bytes.get(..SUPERBLOCK_BYTES).ok_or(truncated)?;
        Ok(Self(Box::new(bytes.try_into().map_err(|_| truncated)?)))
    }

    fn zeroed() -> Self {
        Self(Box::new([0; SUPERBLOCK_BYTES]))
    }

    /// Returns true if the bytes are a bcache superblock, intact or damaged: the magic of bcache,
    /// or most of it, is in its place. Nothing else is checked.
    #[must_use]
    pub fn is_there(&self) -> bool {
        (self.has_magic() || self.has_damaged_magic()) && !self.is_bcachefs()
    }

    /// Returns true if the magic of a bcache superblock was overwritten with zeroes, as `wipefs`
    /// does, and the rest is intact: the checksum is right once the magic is restored.
    #[must_use]
    pub fn is_erased(&self) -> bool {
        let found: [u8; 16] = field::MAGIC.array(&self.0[..]);
        found == [0; 16] && self.is_summed_with_magic()
    }

    /// Offset in a bcachefs superblock of the list of its copies; the list begins with its magic.
    pub const LAYOUT_OF_BCACHEFS: usize = 240;

    /// Returns true for a superblock of bcachefs, which begins at the same sector. It has its own
    /// magic, or bcache's if older versions of its tools made it. In that case the list of copies
    /// identifies it, which bcache does not have.
    #[must_use]
    pub fn is_bcachefs(&self) -> bool {
        let magic: [u8; 16] = field::MAGIC.array(&self.0[..]);
        let layout = &self.0[Self::LAYOUT_OF_BCACHEFS..];
        magic == MAGIC_OF_BCACHEFS
            || magic == MAGIC.0
                && Self::begins_with_magic_of_bcachefs(layout)
                && self.computed_checksum() != Ok(field::CSUM.u64(&self.0[..]))
    }

    /// Returns true if these bytes begin with one of the magics that bcachefs has used.
    #[must_use]
    pub fn begins_with_magic_of_bcachefs(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC_OF_BCACHEFS) || bytes.starts_with(&MAGIC.0)
    }

    fn has_magic(&self) -> bool {
        field::MAGIC.array(&self.0[..]) == MAGIC.0
    }

    /// Returns true if the magic used to be that of bcache: most of it is intact (bcachefs shares a
    /// quarter of it), or the checksum is right once it is restored. A magic of zeroes was erased
    /// (`wipefs`), and is no longer a superblock.
    fn has_damaged_magic(&self) -> bool {
        let found: [u8; 16] = field::MAGIC.array(&self.0[..]);
        let standing = found.iter().zip(MAGIC.0).filter(|(found, wanted)| **found == *wanted).count();
        !self.has_magic() && found != [0; 16] && (standing >= 12 || self.is_summed_with_magic())
    }

    fn is_summed_with_magic(&self) -> bool {
        let mut mended = self.clone();
        field::MAGIC.slice_mut(&mut mended.0[..]).copy_from_slice(&MAGIC.0);
        mended.computed_checksum() == Ok(field::CSUM.u64(&self.0[..]))
    }

    /// Makes all checks of a kernel in the kernel's order, then those that it omits.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn check(self, device: DeviceGeometry) -> Result<Superblock, SuperblockError> {
        self.check_identity()?;
        let block = self.block_sectors();
        if block == 0 || block < device.logical_block_sectors {
            return Err(SuperblockError::BlockBelowDevice {
                wanted: device.logical_block_sectors,
                found: block,
            });
        }
        match self.version() {
            0 | 3 | 5 => CacheSuperblock::check(self, device).map(Superblock::Cache),
            1 | 4 | 6 => BackingSuperblock::check(self, device).map(Superblock::Backing),
            found => Err(SuperblockError::UnsupportedVersion { found }),
        }
    }

    /// Checks that this is a superblock, that it is intact, and that it has a uuid.
    fn check_identity(&self) -> Result<(), SuperblockError> {
        let bytes = &self.0[..];
        let found = field::OFFSET.u64(bytes);
        if found != SUPERBLOCK_SECTOR {
            return Err(SuperblockError::BadOffset { wanted: SUPERBLOCK_SECTOR, found });
        }
        if !self.has_magic() {
            let found = Uuid(field::MAGIC.array(bytes));
            return Err(match self.has_damaged_magic() {
                true => SuperblockError::DamagedMagic { found },
                false => SuperblockError::BadMagic { found },
            });
        }
        let (wanted, found) = (self.computed_checksum()?, field::CSUM.u64(bytes));
        if wanted != found {
            return Err(SuperblockError::BadChecksum { wanted, found });
        }
        if self.uuid().is_nil() {
            return Err(SuperblockError::NilUuid);
        }
        Ok(())
    }

    /// Computes the checksum, which covers the listed journal buckets. A count that does not fit
    /// cannot be summed (a kernel reads past the superblock here).
    fn computed_checksum(&self) -> Result<u64, SuperblockError> {
        let found = u64::from(field::JOURNAL_COUNT.u16(&self.0[..]));
        if found > MAX_JOURNAL_BUCKETS {
            return Err(SuperblockError::TooManyJournalBuckets { limit: MAX_JOURNAL_BUCKETS, found });
        }
        let end = field::JOURNAL.offset + 8 * usize::from(field::JOURNAL_COUNT.u16(&self.0[..]));
        Ok(checksum(&self.0[CHECKSUM_BYTES..end]))
    }

    /// Returns the bytes with an updated checksum.
    fn sealed(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        let sum = self.computed_checksum().expect("a checked superblock lists few enough journal buckets");
        let mut bytes = self.0.clone();
        field::CSUM.set_u64(&mut bytes[..], sum);
        bytes
    }

    /// Creates a superblock with the fields that newly formatted devices of both kinds share.
    fn formatted(version: u64, uuid: Uuid, set_uuid: Uuid, block_sectors: u16) -> Self {
        let mut raw = Self::zeroed();
        let bytes = &mut raw.0[..];
        field::OFFSET.set_u64(bytes, SUPERBLOCK_SECTOR);
        field::VERSION.set_u64(bytes, version);
        field::MAGIC.slice_mut(bytes).copy_from_slice(&MAGIC.0);
        field::UUID.slice_mut(bytes).copy_from_slice(&uuid.0);
        field::SET_UUID.slice_mut(bytes).copy_from_slice(&set_uuid.0);
        field::BLOCK_SIZE.set_u16(bytes, block_sectors);
        raw
    }

    fn version(&self) -> u64 {
        field::VERSION.u64(&self.0[..])
    }

    fn uuid(&self) -> Uuid {
        Uuid(field::UUID.array(&self.0[..]))
    }

    fn set_uuid(&self) -> Uuid {
        Uuid(field::SET_UUID.array(&self.0[..]))
    }

    fn label(&self) -> Label {
        Label(field::LABEL.array(&self.0[..]))
    }

    fn block_sectors(&self) -> u64 {
        u64::from(field::BLOCK_SIZE.u16(&self.0[..]))
    }

    fn flag(&self, flag: field::Flag) -> u8 {
        flag.of(field::FLAGS.u64(&self.0[..]))
    }

    fn set_flag(&mut self, flag: field::Flag, value: u8) {
        let word = flag.with(field::FLAGS.u64(&self.0[..]), value);
        field::FLAGS.set_u64(&mut self.0[..], word);
    }

    fn set_label(&mut self, label: Label) {
        field::LABEL.slice_mut(&mut self.0[..]).copy_from_slice(&label.0);
    }

    fn last_mount(&self) -> u32 {
        field::LAST_MOUNT.u32(&self.0[..])
    }

    fn set_last_mount(&mut self, seconds: u32) {
        field::LAST_MOUNT.set_u32(&mut self.0[..], seconds);
    }
}

impl core::fmt::Debug for RawSuperblock {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "superblock of {}, version {}", self.uuid(), self.version())
    }
}
