//! The superblock of a backing device.

use super::layout as field;
use super::{DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_END_SECTOR, Superblock};
use crate::checksum::Checksum;
use crate::error::SuperblockError;
use crate::identity::{Label, Uuid};
use crate::units::Inode;
use alloc::boxed::Box;
use core::ops::Range;

const VERSION_FIXED_OFFSET: u64 = 1;
const VERSION_DATA_OFFSET: u64 = 4;

/// Where writes go: to the cache, the backing device, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// To both, before the write is acknowledged.
    #[default]
    Writethrough,
    /// To the cache first, to the backing device later.
    Writeback,
    /// To the backing device; reads fill the cache.
    Writearound,
    /// Only to the backing device; reads do not fill the cache either.
    None,
}

impl CacheMode {
    /// Returns the kernel's name for the mode, which our configuration uses as well.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Writethrough => "writethrough",
            Self::Writeback => "writeback",
            Self::Writearound => "writearound",
            Self::None => "none",
        }
    }

    fn from_value(value: u8) -> Result<Self, SuperblockError> {
        match value {
            0 => Ok(Self::Writethrough),
            1 => Ok(Self::Writeback),
            2 => Ok(Self::Writearound),
            3 => Ok(Self::None),
            found => Err(SuperblockError::UnknownCacheMode { found }),
        }
    }

    const fn value(self) -> u8 {
        match self {
            Self::Writethrough => 0,
            Self::Writeback => 1,
            Self::Writearound => 2,
            Self::None => 3,
        }
    }
}

/// The state of a backing device with respect to its cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackingState {
    /// Belongs to no cache; usable alone.
    #[default]
    None,
    /// Attached; all data is on the backing device.
    Clean,
    /// Attached; the newest data may be in the cache only.
    Dirty,
    /// Was run without its cache: cached data must never be used again.
    Stale,
}

impl BackingState {
    const fn from_value(value: u8) -> Self {
        match value & 3 {
            0 => Self::None,
            1 => Self::Clean,
            2 => Self::Dirty,
            _ => Self::Stale,
        }
    }

    const fn value(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Clean => 1,
            Self::Dirty => 2,
            Self::Stale => 3,
        }
    }
}

/// The parameters for formatting a new backing device.
#[derive(Clone, Copy, Debug)]
pub struct BackingFormat {
    /// Uuid of the device.
    pub uuid: Uuid,
    /// Uuid of the cache set made together with it, or random.
    pub set_uuid: Uuid,
    /// Block size in sectors, a power of two.
    pub block_sectors: u16,
    /// Bucket size in sectors, which has no meaning on a backing device. The usual tools write that
    /// of the cache set made together with the device, or else 1024.
    pub bucket_sectors: u16,
    /// Sector at which the data starts, at least 16; `None` for the usual 16 and version 1.
    pub data_offset: Option<u64>,
    /// Cache mode.
    pub cache_mode: CacheMode,
    /// Length of the device in sectors.
    pub device_sectors: u64,
}

/// What bcached records on a backing device about its attachment, above all the number under which
/// the cache holds its data. The record is bound to the superblock's checksum, so any other program
/// that writes the superblock invalidates it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attachment {
    /// Slot of the volume in the uuid table.
    pub number: Inode,
    /// A random number that is also stored in that slot, and replaced at each start and each
    /// orderly stop. An older copy of either device carries an older number.
    pub stamp: u64,
    /// Sequence number of the newest journal entry that was durable when this was written. A cache
    /// without that entry is an older copy.
    pub entry: u64,
}

impl Attachment {
    fn parse(raw: &RawSuperblock) -> Option<Self> {
        let bytes = &raw.0[place_of(raw)?];
        let is_there = field::ATTACHMENT_MARK.u64(bytes) == field::ATTACHED_MARK
            && field::ATTACHMENT_SUM.u64(bytes) == sum(field::CSUM.u64(&raw.0[..]), bytes);
        is_there.then(|| Self {
            number: Inode(field::ATTACHMENT_NUMBER.u32(bytes)),
            stamp: field::ATTACHMENT_STAMP.u64(bytes),
            entry: field::ATTACHMENT_ENTRY.u64(bytes),
        })
    }

    /// Returns the record's bytes for a superblock with the checksum `csum`.
    fn to_bytes(self, csum: u64) -> [u8; field::ATTACHMENT_SUM.end()] {
        let mut bytes = [0; field::ATTACHMENT_SUM.end()];
        field::ATTACHMENT_MARK.set_u64(&mut bytes, field::ATTACHED_MARK);
        field::ATTACHMENT_NUMBER.set_u32(&mut bytes, self.number.0);
        field::ATTACHMENT_STAMP.set_u64(&mut bytes, self.stamp);
        field::ATTACHMENT_ENTRY.set_u64(&mut bytes, self.entry);
        let sum = sum(csum, &bytes);
        field::ATTACHMENT_SUM.set_u64(&mut bytes, sum);
        bytes
    }
}

/// Returns the location of the record in a superblock; `None` if the summed part of the superblock
/// covers it.
fn place_of(raw: &RawSuperblock) -> Option<Range<usize>> {
    let summed = field::JOURNAL.offset + 8 * usize::from(field::JOURNAL_COUNT.u16(&raw.0[..]));
    let place = field::ATTACHMENT_AT..field::ATTACHMENT_AT + field::ATTACHMENT_SUM.end();
    (summed <= place.start).then_some(place)
}

fn sum(csum: u64, attachment: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    sum.add(&csum.to_le_bytes());
    sum.add(&attachment[..field::ATTACHMENT_SUM.offset]);
    sum.value()
}

/// The checked superblock of a backing device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingSuperblock {
    raw: RawSuperblock,
    // Decoded once by the checks, because the stored form can be invalid.
    cache_mode: CacheMode,
    // Likewise, because the record is valid only together with the rest as it was read.
    attachment: Option<Attachment>,
}

impl BackingSuperblock {
    /// Returns the superblock that the usual tools write on a new backing device.
    ///
    /// # Errors
    /// As for [`RawSuperblock::check`], for sizes that are not supported.
    pub fn format(format: BackingFormat) -> Result<Self, SuperblockError> {
        let version = if format.data_offset.is_some() { VERSION_DATA_OFFSET } else { VERSION_FIXED_OFFSET };
        let mut raw = RawSuperblock::formatted(version, format.uuid, format.set_uuid, format.block_sectors);
        field::BUCKETS.set_u64(&mut raw.0[..], format.data_offset.unwrap_or(0));
        field::BUCKET_SIZE.set_u16(&mut raw.0[..], format.bucket_sectors);
        raw.set_flag(field::CACHE_MODE, format.cache_mode.value());
        raw.0 = raw.sealed();
        let device = DeviceGeometry { sectors: format.device_sectors, logical_block_sectors: 1 };
        match raw.check(device)? {
            Superblock::Backing(superblock) => Ok(superblock),
            Superblock::Cache(_) => unreachable!("versions 1 and 4 are backing devices"),
        }
    }

    /// Makes the checks from the version on. Feature words and the first bucket are junk that a
    /// kernel writes from uninitialised memory: the checksum covers them, and otherwise they are
    /// ignored.
    pub(super) fn check(raw: RawSuperblock, device: DeviceGeometry) -> Result<Self, SuperblockError> {
        let data_offset = data_offset(&raw);
        if data_offset < SUPERBLOCK_END_SECTOR {
            return Err(SuperblockError::DataOffsetTooSmall {
                wanted: SUPERBLOCK_END_SECTOR,
                found: data_offset,
            });
        }
        let block = raw.block_sectors();
        if !block.is_power_of_two() {
            return Err(SuperblockError::BlockNotPowerOfTwo { found: block });
        }
        if data_offset >= device.sectors {
            return Err(SuperblockError::DataOffsetBeyondEnd { limit: device.sectors, found: data_offset });
        }
        let cache_mode = CacheMode::from_value(raw.flag(field::CACHE_MODE))?;
        let attachment = Attachment::parse(&raw);
        Ok(Self { raw, cache_mode, attachment })
    }

    /// Returns the bytes to write at [`super::SUPERBLOCK_SECTOR`].
    #[must_use]
    pub fn seal(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        let mut bytes = self.raw.sealed();
        if let (Some(attachment), Some(place)) = (self.attachment, place_of(&self.raw)) {
            let noted = attachment.to_bytes(field::CSUM.u64(&bytes[..]));
            bytes[place].copy_from_slice(&noted);
        }
        bytes
    }

    /// Returns what bcached recorded about the attachment when it wrote this superblock; `None` if
    /// another program wrote it last.
    #[must_use]
    pub const fn attachment(&self) -> Option<Attachment> {
        self.attachment
    }

    /// Records the attachment, or that there is none.
    pub fn set_attachment(&mut self, attachment: Option<Attachment>) {
        self.attachment = attachment;
        if let (None, Some(place)) = (attachment, place_of(&self.raw)) {
            self.raw.0[place].fill(0);
        }
    }

    /// Returns the version: 1, 4 or 6.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.raw.version()
    }

    /// Returns the uuid of this device: its name in the cache set's uuid table.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.raw.uuid()
    }

    /// Returns the uuid of the cache set; meaningless in state [`BackingState::None`].
    #[must_use]
    pub fn set_uuid(&self) -> Uuid {
        self.raw.set_uuid()
    }

    /// Sets the uuid of the cache set, or clears it.
    pub fn set_set_uuid(&mut self, uuid: Uuid) {
        field::SET_UUID.slice_mut(&mut self.raw.0[..]).copy_from_slice(&uuid.0);
    }

    /// Returns the label.
    #[must_use]
    pub fn label(&self) -> Label {
        self.raw.label()
    }

    /// Sets the label.
    pub fn set_label(&mut self, label: Label) {
        self.raw.set_label(label);
    }

    /// Returns the block size in sectors, a power of two.
    #[must_use]
    pub fn block_sectors(&self) -> u64 {
        self.raw.block_sectors()
    }

    /// Returns the sector at which the data starts, at least 16. The keys of this volume include it
    /// in their offsets.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        data_offset(&self.raw)
    }

    /// Returns the cache mode.
    #[must_use]
    pub fn cache_mode(&self) -> CacheMode {
        self.cache_mode
    }

    /// Sets the cache mode.
    pub fn set_cache_mode(&mut self, mode: CacheMode) {
        self.cache_mode = mode;
        self.raw.set_flag(field::CACHE_MODE, mode.value());
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> BackingState {
        BackingState::from_value(self.raw.flag(field::STATE))
    }

    /// Sets the state.
    pub fn set_state(&mut self, state: BackingState) {
        self.raw.set_flag(field::STATE, state.value());
    }

    /// Returns when the device was last started, in seconds since 1970.
    #[must_use]
    pub fn last_mount(&self) -> u32 {
        self.raw.last_mount()
    }

    /// Records when the device was started, in seconds since 1970.
    pub fn set_last_mount(&mut self, seconds: u32) {
        self.raw.set_last_mount(seconds);
    }
}

/// Returns the data offset. Version 1 has no such field, whatever its bytes hold.
fn data_offset(raw: &RawSuperblock) -> u64 {
    if raw.version() == VERSION_FIXED_OFFSET {
        return SUPERBLOCK_END_SECTOR;
    }
    field::BUCKETS.u64(&raw.0[..])
}
