//! Why a device could not be used: what, why, and what to do next, as one sentence for people and
//! in parts for JSON.

use super::holders::Holder;
use crate::errno::kind_of;
use bcached_env::IoErrorKind;
use rustix::io::Errno;
use std::path::PathBuf;
use thiserror::Error;

/// A failure to open a device, or of offline work on it.
#[derive(Debug, Error)]
#[error("{}: {}; {}", self.what(), self.why(), self.next())]
pub struct DeviceError {
    /// The device, as it was named.
    pub path: PathBuf,
    /// The kind, for decisions.
    pub kind: DeviceErrorKind,
}

/// The kinds of failure.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// Nothing is there.
    NotFound,
    /// The user lacks permission.
    Permission,
    /// The block device is set to read-only, or its file system is.
    ReadOnly,
    /// Neither a block device nor a regular file, but this.
    NotADevice(&'static str),
    /// The path led to another device a moment later.
    Changed,
    /// It is in use. Empty if the holders could not be found out.
    Busy(Vec<Holder>),
    /// This process has it already, perhaps by another path.
    Twice,
    /// The process that passed it on still writes to it: another one, or this one, which was to be
    /// replaced and continues.
    StillWritten,
    /// The file is too short for a whole block.
    Empty,
    /// The block device has no size: the reader is empty, or the device is not set up.
    NoMedium,
    /// The device's blocks are larger than the format's. In sectors.
    BlockTooLarge {
        /// The device's.
        found: u32,
        /// The format's.
        wanted: u32,
    },
    /// Offline work outside the device. In sectors.
    OutOfRange {
        /// First sector requested.
        sector: u64,
        /// Sectors of the device.
        sectors: u64,
    },
    /// Offline work that is not in whole blocks.
    Unaligned {
        /// First sector requested.
        sector: u64,
        /// Sectors in a block of the device.
        block: u32,
    },
    /// The operating system refused, or the device failed.
    Io {
        /// What was being done: "open", "read sector 8"..
        doing: String,
        /// How it failed.
        source: std::io::Error,
    },
}

impl DeviceErrorKind {
    pub(crate) fn from_errno(doing: impl Into<String>, errno: Errno) -> Self {
        match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::NODEV | Errno::NXIO => Self::NotFound,
            Errno::ACCESS | Errno::PERM => Self::Permission,
            errno => Self::Io { doing: doing.into(), source: errno.into() },
        }
    }
}

impl DeviceError {
    /// Returns true if the device, or what leads to it, answers with errors. A lack of system
    /// resources, such as open files, does not count.
    #[must_use]
    pub fn is_of_device(&self) -> bool {
        let DeviceErrorKind::Io { source, .. } = &self.kind else { return false };
        let Some(errno) = Errno::from_io_error(source) else { return false };
        let is_of_system = matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM);
        !is_of_system && matches!(kind_of(errno), IoErrorKind::Io | IoErrorKind::Unreachable)
    }

    /// What failed.
    #[must_use]
    pub fn what(&self) -> String {
        let path = self.path.display();
        match &self.kind {
            DeviceErrorKind::Io { doing, .. } => format!("cannot {doing} {path}"),
            DeviceErrorKind::OutOfRange { sector, .. } | DeviceErrorKind::Unaligned { sector, .. } => {
                format!("cannot access sector {sector} of {path}")
            }
            _ => format!("cannot use {path}"),
        }
    }

    /// Why it failed.
    #[must_use]
    pub fn why(&self) -> String {
        match &self.kind {
            DeviceErrorKind::NotFound => "it does not exist".into(),
            DeviceErrorKind::Permission => "permission denied".into(),
            DeviceErrorKind::ReadOnly => "it is read-only".into(),
            DeviceErrorKind::NotADevice(found) => {
                format!("it is {found}, not a block device or a regular file")
            }
            DeviceErrorKind::Changed => "the path changed to another device while it was being opened".into(),
            DeviceErrorKind::Busy(holders) if holders.is_empty() => {
                "it is in use, but the holder could not be determined".into()
            }
            DeviceErrorKind::Busy(holders) => {
                let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
                format!("it is in use by {}", names.join(", "))
            }
            DeviceErrorKind::Twice => "this process has opened it already, perhaps by another path".into(),
            DeviceErrorKind::StillWritten => {
                "its previous owner still uses it: an operation on it, or on a device served with it, is \
                 in flight"
                    .into()
            }
            DeviceErrorKind::Empty => "it is empty".into(),
            DeviceErrorKind::NoMedium => {
                "it has no size: no medium is inserted, or the device is not set up".into()
            }
            DeviceErrorKind::BlockTooLarge { found, wanted } => format!(
                "it works in blocks of {} bytes, but the format needs blocks of {} bytes",
                u64::from(*found) * 512,
                u64::from(*wanted) * 512
            ),
            DeviceErrorKind::OutOfRange { sectors, .. } => format!("it has only {sectors} sectors"),
            DeviceErrorKind::Unaligned { block, .. } => {
                format!("it can be written only in whole blocks of {block} sectors")
            }
            DeviceErrorKind::Io { source, .. } => source.to_string(),
        }
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self) -> String {
        match &self.kind {
            DeviceErrorKind::NotFound => "check the name, and that the device is connected".into(),
            DeviceErrorKind::Permission => {
                "run as a user with access to it (root, or a member of its group)".into()
            }
            DeviceErrorKind::ReadOnly => {
                "make it writable (blockdev --setrw, or mount its file system read-write)".into()
            }
            DeviceErrorKind::NotADevice(_) => "name a disk, a partition or an image file".into(),
            DeviceErrorKind::Changed => "name it by a stable path, such as one in /dev/disk/by-id".into(),
            DeviceErrorKind::Busy(holders) if holders.is_empty() => {
                "look for the holder as root, or with lsblk and fuser -v".into()
            }
            DeviceErrorKind::Busy(holders) => holders[0].how_to_release(),
            DeviceErrorKind::Twice => "name each device once".into(),
            DeviceErrorKind::StillWritten => "wait until its last operations have completed".into(),
            DeviceErrorKind::Empty => "give it a size first".into(),
            DeviceErrorKind::NoMedium => "insert the medium, or set it up".into(),
            DeviceErrorKind::BlockTooLarge { .. } => {
                "use a device with smaller blocks, or make the set with larger ones".into()
            }
            DeviceErrorKind::OutOfRange { .. } => "check that it is the whole device".into(),
            DeviceErrorKind::Unaligned { .. } => "write whole blocks".into(),
            DeviceErrorKind::Io { .. } => "see the kernel's log".into(),
        }
    }

    /// Returns the holders of the device, if they are the reason.
    #[must_use]
    pub fn holders(&self) -> &[Holder] {
        if let DeviceErrorKind::Busy(holders) = &self.kind { holders } else { &[] }
    }

    /// Returns true if the refusal protects data in use rather than reports a fault (exit status 3
    /// instead of 4).
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        matches!(self.kind, DeviceErrorKind::Busy(_) | DeviceErrorKind::Twice | DeviceErrorKind::StillWritten)
    }
}
