//! Reads the superblocks of devices: checked, for the commands that need a sound one, and field by
//! field, unchecked, for those that describe whatever is there.

use super::device::{self, Device};
use bcached_control::failure::{Failure, Kind};
use bcached_format::superblock::STRUCTURE;
use bcached_format::{
    BackingState, DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock,
    SuperblockError, Uuid, units::bytes_of,
};
use std::path::Path;

/// What is in the place of a superblock.
#[derive(Debug)]
pub enum SuperblockProbe {
    /// No bcache superblock, not even a damaged one.
    Absent,
    /// One that can be run.
    Valid(Superblock),
    /// One that cannot be run.
    Invalid(SuperblockError),
}

/// Reads and checks the superblock of `device`.
///
/// # Errors
/// The device's.
pub fn read(device: &Device) -> Result<SuperblockProbe, Failure> {
    let bytes = device::read(device, bytes_of(SUPERBLOCK_SECTOR), SUPERBLOCK_BYTES)?;
    let Ok(raw) = RawSuperblock::from_bytes(&bytes) else { return Ok(SuperblockProbe::Absent) };
    if !raw.is_there() {
        return Ok(SuperblockProbe::Absent);
    }
    let info = device.info();
    let facts = DeviceGeometry {
        sectors: info.sectors,
        logical_block_sectors: u64::from(info.logical_block_sectors),
    };
    Ok(match raw.check(facts) {
        Ok(superblock) => SuperblockProbe::Valid(superblock),
        Err(error) => SuperblockProbe::Invalid(error),
    })
}

/// Returns a superblock on `device` whose magic number was erased, with the set that it names, if
/// it was attached to one.
///
/// # Errors
/// The device's.
pub fn erased(device: &Device) -> Result<Option<Option<Uuid>>, Failure> {
    let bytes = device::read(device, bytes_of(SUPERBLOCK_SECTOR), SUPERBLOCK_BYTES)?;
    let Ok(raw) = RawSuperblock::from_bytes(&bytes) else { return Ok(None) };
    if !raw.is_erased() {
        return Ok(None);
    }
    let whole = bytes.first_chunk().expect("a whole superblock was read");
    let set = Uuid(RawFields::of(whole).bytes("set_uuid").try_into().expect("sixteen bytes"));
    Ok(Some(Some(set).filter(|set| set.0 != [0; 16])))
}

/// The failure if there is no superblock. The superblock may have been lost with what was behind
/// it, so this message does not say whether the device may be made anew.
#[must_use]
pub fn missing(path: &Path) -> Failure {
    Failure::new(Kind::NotBcache, format!("cannot use {}", path.display()))
        .why("it has no bcache superblock")
        .next(format!("`bcached doctor {}` says what is on it and what to do", path.display()))
}

/// Reads the superblock of `device`, which must exist and be fit to run.
///
/// # Errors
/// There is none, or it cannot be run.
pub fn read_sound(device: &Device) -> Result<Superblock, Failure> {
    let what = format!("cannot use {}", device.path().display());
    match read(device)? {
        SuperblockProbe::Valid(superblock) => Ok(superblock),
        SuperblockProbe::Absent => Err(missing(device.path())),
        SuperblockProbe::Invalid(error) => {
            Err(Failure::new(Failure::kind_of_superblock(error), what).why(error.to_string()))
        }
    }
}

/// The unchecked fields of 4096 bytes.
pub struct RawFields<'a>(&'a [u8]);

impl<'a> RawFields<'a> {
    /// The fields of `bytes`, which hold a whole superblock.
    #[must_use]
    pub fn of(bytes: &'a [u8; SUPERBLOCK_BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes of the field with this name in the format's table.
    ///
    /// # Panics
    /// If the table has no such field.
    #[must_use]
    pub fn bytes(&self, name: &str) -> &'a [u8] {
        let field = STRUCTURE.fields.iter().find(|field| field.name == name);
        let field = field.expect("the format's table has every field that is asked for");
        &self.0[field.offset..field.offset + field.size]
    }

    /// The number in a field of up to eight bytes.
    ///
    /// # Panics
    /// If the table has no such field, or it is longer.
    #[must_use]
    pub fn number(&self, name: &str) -> u64 {
        let bytes = self.bytes(name);
        assert!(bytes.len() <= 8, "{name} is not a number");
        bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// The kernel's word for the state of a backing device.
#[must_use]
pub const fn state_name(state: BackingState) -> &'static str {
    match state {
        BackingState::None => "no cache",
        BackingState::Clean => "clean",
        BackingState::Dirty => "dirty",
        BackingState::Stale => "inconsistent",
    }
}
