//! Devices as the system names and numbers them, for the control files.

use bcached_uring::{DeviceIdentity, DevicePresence};
use std::path::Path;

/// An open device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceName {
    /// The kernel's name of a block device (`sdb1`), or the file name, without its folder, of a
    /// file.
    pub name: String,
    /// Major and minor number of a block device.
    pub number: Option<(u32, u32)>,
}

impl DeviceName {
    /// Describes the device that was opened by `path`. The device itself is not accessed.
    #[must_use]
    pub fn of(opened: &DevicePresence, path: &str) -> Self {
        let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let by_path = || last(Path::new(path)).unwrap_or_default();
        match opened.identity() {
            DeviceIdentity::Block { major, minor } => {
                let place = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}"));
                let name = place.ok().as_deref().and_then(last);
                Self { name: name.unwrap_or_else(by_path), number: Some((major, minor)) }
            }
            DeviceIdentity::File { .. } => Self { name: by_path(), number: None },
        }
    }
}
