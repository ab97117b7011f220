//! Devices of ours in the kernel that nobody serves: of a daemon that has died, or has left them for the next one. What is asked of them waits
//! until somebody serves their volume again, or takes them away.

use crate::abi::State;
use crate::control::Control;
use crate::device::{MARK, block_device, info_of, is_alive, listed, open_control, take_away};
use crate::error::{ControlError, DeviceError};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// One of them.
pub struct Orphan {
    number: u32,
    control: Control,
}

impl Orphan {
    /// All that there are.
    ///
    /// # Errors
    /// The driver could not be asked.
    pub fn all() -> Result<Vec<Self>, DeviceError> {
        listed().into_iter().filter_map(|number| Self::of(number).transpose()).collect()
    }

    /// The one whose block or character device, or a link to that, is at `path`; `None`: there is none there, it is not of ours, or somebody
    /// serves it.
    ///
    /// # Errors
    /// The driver could not be asked.
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
        let is_served = info.state() == State::Live && is_alive(info.process);
        let is_orphan = info.identity & 0xffff == MARK && !is_served;
        Ok(is_orphan.then_some(Self { number, control }))
    }

    /// Its block device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        block_device(self.number)
    }

    /// Takes it from the kernel: what waits there fails, and what its users have not written yet is lost.
    ///
    /// # Errors
    /// The driver's refusal; that it takes too long.
    pub fn remove(self) -> Result<(), DeviceError> {
        take_away(&self.control, self.number)
    }
}

/// Whether the block device of this name (`ublkb3`) is a volume of bcached's, served or not. One of which the driver says nothing may be one.
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
