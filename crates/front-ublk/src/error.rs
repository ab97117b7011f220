//! Errors outside of requests, in one sentence each.

use crate::abi::Command;
use crate::control::CONTROL;
use rustix::io::Errno;
use std::time::Duration;
use thiserror::Error;

/// Why ublk is not available on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum UblkUnavailable {
    /// The driver is not loaded, or the kernel has none.
    #[error("{CONTROL} does not exist: load the module (modprobe ublk_drv; Linux 6.5 and newer)")]
    NoDriver,
    /// The control device exists, but may not be opened.
    #[error("{CONTROL} may not be opened: root is needed")]
    NotPermitted,
    /// The control device may be opened, but the devices that the kernel would create do not fulfil
    /// what a volume is promised.
    #[error(
        "no device is created without CAP_SYS_ADMIN: it would fail when the daemon dies, and the \
         kernel would kill the daemon if a request took 30 s"
    )]
    Unprivileged,
    /// The driver is too old.
    #[error("the kernel's ublk driver lacks {0} (Linux 6.5 has it)")]
    TooOld(&'static str),
    /// Any other error.
    #[error("{CONTROL} does not work as expected: {0}")]
    Other(String),
}

impl UblkUnavailable {
    /// What to do about it, or what to use instead, if the user and not the machine lacks
    /// something.
    #[must_use]
    pub const fn mends(&self) -> Option<&'static str> {
        match self {
            Self::NotPermitted | Self::Unprivileged => Some(
                "run as root, or with CAP_SYS_ADMIN and CAP_DAC_OVERRIDE; an ordinary user can \
                 have volumes by nbd, fuse and vhost-user",
            ),
            Self::NoDriver | Self::TooOld(_) | Self::Other(_) => None,
        }
    }
}

/// A command to the driver has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControlError {
    pub(crate) command: Command,
    pub(crate) number: u32,
    /// The driver's error.
    pub why: Errno,
}

/// Up to some kernels of 2025 the limit applies to all devices, and its error looks like a missing
/// privilege. In later ones it applies to devices of ordinary users.
const NONE_LEFT: &str = "the kernel has no more ublk devices: `bcached remove` those that are no longer \
                         served, or load the module with more (modprobe ublk_drv ublks_max=256)";

impl std::error::Error for ControlError {}

impl std::fmt::Display for ControlError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (does, number) = (self.command.does(), self.number);
        match self.why {
            Errno::TIMEDOUT => write!(formatter, "the kernel took too long to {does}"),
            // Without the privilege, the code does not reach this point.
            Errno::ACCESS if self.command == Command::AddDev => formatter.write_str(NONE_LEFT),
            Errno::NOSPC if number == u32::MAX => formatter.write_str(NONE_LEFT),
            Errno::EXIST => write!(formatter, "ublk device {number} already exists"),
            Errno::BUSY => write!(formatter, "cannot {does}: it is in use"),
            why => write!(formatter, "cannot {does}: {}", std::io::Error::from(why)),
        }
    }
}

/// Why a volume has no device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver refused a command.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The character device could not be used.
    #[error("cannot use {path}: {why}")]
    Character {
        /// Its path.
        path: String,
        /// The reason.
        why: std::io::Error,
    },
    /// We may not open the character device.
    #[error(
        "{path} may not be opened, and this user was not given access within {} s: \
         CAP_DAC_OVERRIDE is needed, or a udev rule that grants access",
        .patience.as_secs()
    )]
    NotGiven {
        /// Its path.
        path: String,
        /// How long we waited for access.
        patience: Duration,
    },
    /// The engine's ring takes no queues.
    #[error(transparent)]
    NoRing(#[from] bcached_uring::ring_client::RingClosed),
    /// Another process serves it.
    #[error("the volume's device /dev/ublkb{number} is served by another process ({process})")]
    ServedByOther {
        /// The device.
        number: u32,
        /// Its server.
        process: i32,
    },
    /// The volume's block size is invalid for a block device.
    #[error("a block device cannot have blocks of {0} bytes")]
    Block(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With no device left, the message says what to do, whichever error the kernel returns: that
    /// of the `ublks_max` limit of older kernels, or that for running out of minor numbers.
    #[test]
    fn a_kernel_without_another_device_says_what_to_do() {
        for why in [Errno::ACCESS, Errno::NOSPC] {
            let told = ControlError { command: Command::AddDev, number: u32::MAX, why }.to_string();
            assert!(
                told.contains("no more ublk devices") && told.contains("modprobe ublk_drv ublks_max"),
                "{told}"
            );
        }
        let told = ControlError { command: Command::DelDev, number: 0, why: Errno::ACCESS }.to_string();
        assert!(told.starts_with("cannot "), "{told}");
    }
}
