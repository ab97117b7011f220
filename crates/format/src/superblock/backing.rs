//! The superblock of a backing device.

use super::layout as field;
use super::{DeviceFacts, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_END_SECTOR, Superblock};
use crate::error::SuperblockError;
use crate::identity::{Label, Uuid};
use alloc::boxed::Box;

const VERSION_FIXED_OFFSET: u64 = 1;
const VERSION_DATA_OFFSET: u64 = 4;

/// How writes go to the cache and the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// To both, before the write is answered.
    #[default]
    Writethrough,
    /// To the cache first, to the backing device later.
    Writeback,
    /// To the backing device; reads fill the cache.
    Writearound,
    /// The cache is not filled at all.
    None,
}

impl CacheMode {
    /// The kernel's word for it, which is also that of our configuration.
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

/// What a backing device says about its cache.
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

/// What a new backing device is formatted with.
#[derive(Clone, Copy, Debug)]
pub struct BackingFormat {
    /// Of the device.
    pub uuid: Uuid,
    /// Of the cache set made together with it, or random.
    pub set_uuid: Uuid,
    /// Block size in sectors, a power of two.
    pub block_sectors: u16,
    /// Bucket size in sectors, which means nothing here; the usual tools write that of the cache set made together with
    /// the device, else 1024.
    pub bucket_sectors: u16,
    /// Sector at which the data starts, at least 16; `None` for the usual 16 and version 1.
    pub data_offset: Option<u64>,
    /// Cache mode.
    pub cache_mode: CacheMode,
    /// Length of the device in sectors.
    pub device_sectors: u64,
}

/// The checked superblock of a backing device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingSuperblock {
    raw: RawSuperblock,
    // Decoded once by the checks, because its stored form can be invalid.
    cache_mode: CacheMode,
}

impl BackingSuperblock {
    /// The superblock that the usual tools write on a new backing device.
    ///
    /// # Errors
    /// As [`RawSuperblock::check`], for sizes that cannot be run.
    pub fn format(format: BackingFormat) -> Result<Self, SuperblockError> {
        let version = if format.data_offset.is_some() { VERSION_DATA_OFFSET } else { VERSION_FIXED_OFFSET };
        let mut raw = RawSuperblock::formatted(version, format.uuid, format.set_uuid, format.block_sectors);
        field::BUCKETS.set_u64(&mut raw.0[..], format.data_offset.unwrap_or(0));
        field::BUCKET_SIZE.set_u16(&mut raw.0[..], format.bucket_sectors);
        raw.set_flag(field::CACHE_MODE, format.cache_mode.value());
        raw.0 = raw.sealed();
        let device = DeviceFacts { sectors: format.device_sectors, logical_block_sectors: 1 };
        match raw.check(device)? {
            Superblock::Backing(superblock) => Ok(superblock),
            Superblock::Cache(_) => unreachable!("versions 1 and 4 are backing devices"),
        }
    }

    /// The checks from the version on. Feature words and the first bucket are junk that a kernel writes from memory
    /// it never initialised: they are summed, and otherwise ignored.
    pub(super) fn check(raw: RawSuperblock, device: DeviceFacts) -> Result<Self, SuperblockError> {
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
        Ok(Self { raw, cache_mode })
    }

    /// The bytes to write at [`super::SUPERBLOCK_SECTOR`].
    #[must_use]
    pub fn seal(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        self.raw.sealed()
    }

    /// Version: 1, 4 or 6.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.raw.version()
    }

    /// Uuid of this device: its name in the cache set's uuid table.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.raw.uuid()
    }

    /// Uuid of the cache set; meaningless in state [`BackingState::None`].
    #[must_use]
    pub fn set_uuid(&self) -> Uuid {
        self.raw.set_uuid()
    }

    /// Names the cache set, or none.
    pub fn set_set_uuid(&mut self, uuid: Uuid) {
        field::SET_UUID.slice_mut(&mut self.raw.0[..]).copy_from_slice(&uuid.0);
    }

    /// The label.
    #[must_use]
    pub fn label(&self) -> Label {
        self.raw.label()
    }

    /// Sets the label.
    pub fn set_label(&mut self, label: Label) {
        self.raw.set_label(label);
    }

    /// Block size in sectors, a power of two.
    #[must_use]
    pub fn block_sectors(&self) -> u64 {
        self.raw.block_sectors()
    }

    /// Sector at which the data starts, at least 16. Keys of this volume count it in.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        data_offset(&self.raw)
    }

    /// Cache mode.
    #[must_use]
    pub fn cache_mode(&self) -> CacheMode {
        self.cache_mode
    }

    /// Sets the cache mode.
    pub fn set_cache_mode(&mut self, mode: CacheMode) {
        self.cache_mode = mode;
        self.raw.set_flag(field::CACHE_MODE, mode.value());
    }

    /// State.
    #[must_use]
    pub fn state(&self) -> BackingState {
        BackingState::from_value(self.raw.flag(field::STATE))
    }

    /// Sets the state.
    pub fn set_state(&mut self, state: BackingState) {
        self.raw.set_flag(field::STATE, state.value());
    }

    /// When the device was last started, in seconds since 1970.
    #[must_use]
    pub fn last_mount(&self) -> u32 {
        self.raw.last_mount()
    }

    /// Notes when the device was started.
    pub fn set_last_mount(&mut self, seconds: u32) {
        self.raw.set_last_mount(seconds);
    }
}

/// Version 1 has no such field, whatever its bytes hold.
fn data_offset(raw: &RawSuperblock) -> u64 {
    if raw.version() == VERSION_FIXED_OFFSET {
        return SUPERBLOCK_END_SECTOR;
    }
    field::BUCKETS.u64(&raw.0[..])
}
