//! Opens the devices that the configuration names: from a name to a claimed device with a sound
//! superblock.

pub mod memory;
mod own_devices;
mod reconnected;
mod twins;

use crate::superblock;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{
    BackingState, BackingSuperblock, CacheSuperblock, DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES,
    SUPERBLOCK_SECTOR, Superblock,
};
use bcached_uring::{Access, Device, DevicePresence};
pub use own_devices::block_devices;
pub use reconnected::{Reconnection, open_returned, open_returned_cache};
use std::path::PathBuf;

/// A claimed cache device.
pub struct CacheDevice {
    /// The claim.
    pub device: Device,
    /// Its superblock.
    pub superblock: CacheSuperblock,
}

/// A claimed backing device.
pub struct BackingDevice {
    /// The claim.
    pub device: Device,
    /// Its superblock.
    pub superblock: BackingSuperblock,
}

/// Opens and claims the cache device `name`.
pub fn open_cache(name: &str) -> Result<CacheDevice, Failure> {
    let (device, superblock) = open(name)?;
    match superblock {
        Superblock::Cache(superblock) => Ok(CacheDevice { device, superblock }),
        Superblock::Backing(_) => Err(wrong_role(&device, "a backing device", "--backing")),
    }
}

/// Opens and claims the backing device `name`.
pub fn open_backing(name: &str) -> Result<BackingDevice, Failure> {
    let (device, superblock) = open(name)?;
    match superblock {
        Superblock::Backing(superblock) => Ok(BackingDevice { device, superblock }),
        Superblock::Cache(_) => Err(wrong_role(&device, "a cache device", "--cache")),
    }
}

/// Durably clears the backing device `name`'s membership in its set. The set must hold no dirty
/// data of it.
///
/// # Errors
/// It is dirty, in use, or cannot be written.
pub fn forsake(name: &str) -> Result<(), Failure> {
    let BackingDevice { device, mut superblock } = open_backing(name)?;
    match superblock.state() {
        BackingState::Clean | BackingState::Stale => superblock.set_state(BackingState::None),
        BackingState::None => return Ok(()),
        BackingState::Dirty => {
            return Err(Failure::new(Kind::DataLoss, format!("cannot take {name} from its cache"))
                .why("its newest data is in that cache"));
        }
    }
    device.write_at(SUPERBLOCK_SECTOR, &superblock.seal()[..])?;
    Ok(device.sync()?)
}

/// Returns the superblock of the device `name`, whatever its role. The device is read and not
/// claimed.
pub fn look(name: &str) -> Result<Superblock, Failure> {
    look_where(name).map(|(superblock, _)| superblock)
}

/// The same, and which device that is.
pub fn look_where(name: &str) -> Result<(Superblock, DevicePresence), Failure> {
    let device = Device::open(resolve(name)?, Access::Look)?;
    Ok((read_superblock(&device)?, device.presence()))
}

/// Returns the superblock of the backing device `name`. The device is read and not claimed.
pub fn look_at_backing(name: &str) -> Result<BackingSuperblock, Failure> {
    look_where_backing(name).map(|(superblock, _)| superblock)
}

/// The same, and which device that is.
pub fn look_where_backing(name: &str) -> Result<(BackingSuperblock, DevicePresence), Failure> {
    let device = Device::open(resolve(name)?, Access::Look)?;
    device.require_blocks(8)?;
    match read_superblock(&device)? {
        Superblock::Backing(superblock) => Ok((superblock, device.presence())),
        Superblock::Cache(_) => Err(wrong_role(&device, "a cache device", "--cache")),
    }
}

fn wrong_role(device: &Device, found: &str, option: &str) -> Failure {
    Failure::new(Kind::NotBcache, format!("cannot use {}", device.path().display()))
        .why(format!("it is {found}"))
        .next(format!("name it with {option}"))
}

fn open(name: &str) -> Result<(Device, Superblock), Failure> {
    let path = resolve(name)?;
    let device = Device::open(&path, Access::Own)?;
    // The engine does sub-block access. A file must accept the set's blocks even if its disk has
    // large ones.
    device.require_blocks(8)?;
    let superblock = read_superblock(&device)?;
    let block = match &superblock {
        Superblock::Cache(superblock) => superblock.block_sectors(),
        Superblock::Backing(superblock) => superblock.block_sectors(),
    };
    device.require_blocks(u32::try_from(block).unwrap_or(u32::MAX))?;
    Ok((device, superblock))
}

/// Reads the superblock of `device`, which must be fit to run.
fn read_superblock(device: &Device) -> Result<Superblock, Failure> {
    let cannot = |kind| Failure::new(kind, format!("cannot use {}", device.path().display()));
    let not_bcache = || superblock::missing(device.path());
    let info = device.info();
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    if info.sectors < SUPERBLOCK_SECTOR + 8 {
        return Err(not_bcache());
    }
    device.read_at(SUPERBLOCK_SECTOR, &mut bytes)?;
    let raw = RawSuperblock::from_bytes(&bytes).map_err(|_| not_bcache())?;
    if !raw.is_there() {
        return Err(not_bcache());
    }
    let logical_block_sectors =
        if device.kind() == bcached_uring::DeviceKind::File { 1 } else { info.logical_block_sectors };
    let facts = DeviceGeometry { sectors: info.sectors, logical_block_sectors: logical_block_sectors.into() };
    raw.check(facts).map_err(|error| {
        cannot(Failure::kind_of_superblock(error))
            .why(format!("its superblock is not usable: {error}"))
            .next("`bcached show -f` prints it; `bcached check` examines the device further")
    })
}

/// Returns the path that `name` stands for: itself, or the device with that UUID.
pub fn resolve(name: &str) -> Result<PathBuf, Failure> {
    match name.strip_prefix("UUID=") {
        Some(uuid) => twins::find(name, uuid),
        None => Ok(PathBuf::from(name)),
    }
}
