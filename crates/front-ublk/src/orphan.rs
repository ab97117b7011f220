//! Devices of ours in the kernel that are not being served: left by a daemon that has died, or that
//! has handed them over to the next one. I/O on them waits until their volume is served again, or
//! they are removed.

use crate::abi::ServerState;
use crate::control::ControlDevice;
use crate::device::{MARK, block_device, info_of, is_alive, listed, open_control, take_away};
use crate::error::{ControlError, DeviceError};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// A device of ours that is not being served.
pub struct OrphanDevice {
    number: u32,
    control: ControlDevice,
}

impl OrphanDevice {
    /// Returns all such devices.
    ///
    /// # Errors
    /// The driver could not be queried.
    pub fn all() -> Result<Vec<Self>, DeviceError> {
        listed().into_iter().filter_map(|number| Self::of(number).transpose()).collect()
    }

    /// Returns the one whose block or character device, or a link to it, is at `path`. Returns
    /// `None` if there is no device, it is not ours, or it is being served.
    ///
    /// # Errors
    /// The driver could not be queried.
    pub fn at(path: &Path) -> Result<Option<Self>, DeviceError> {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = path.strip_prefix("/dev").ok().and_then(Path::to_str);
        let digits = name.and_then(|name| name.strip_prefix("ublkb").or_else(|| name.strip_prefix("ublkc")));
        match digits.and_then(|digits| digits.parse().ok()) {
            Some(number) => Self::of(number),
            None => Ok(None),
        }
    }

    fn of(number: u32) -> Result<Option<Self>, DeviceError> {
        let control = open_control()?;
        let info = match info_of(&control, number) {
            Ok(info) => info,
            Err(ControlError { why: Errno::NODEV | Errno::INVAL, .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let is_served = info.state() == ServerState::Live && is_alive(info.process);
        let is_orphan = info.identity & 0xffff == MARK && !is_served;
        Ok(is_orphan.then_some(Self { number, control }))
    }

    /// Its block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        block_device(self.number)
    }

    /// Removes it from the kernel. I/O that waits for it fails, and data that its users have not
    /// written yet is lost.
    ///
    /// # Errors
    /// The driver refuses, or takes too long.
    pub fn remove(self) -> Result<(), DeviceError> {
        take_away(&self.control, self.number)
    }
}

/// Whether the block device of this name (`ublkb3`) is a volume of bcached, served or not. Returns
/// true if the driver gives no information about it, since it may be one.
#[must_use]
pub fn is_volume(name: &str) -> bool {
    let Some(number) = name.strip_prefix("ublkb").and_then(|digits| digits.parse().ok()) else {
        return false;
    };
    match open_control().map(|control| info_of(&control, number)) {
        Ok(Ok(info)) => info.identity & 0xffff == MARK,
        Ok(Err(ControlError { why: Errno::NODEV | Errno::INVAL, .. })) => false,
        Ok(Err(_)) | Err(_) => true,
    }
}
