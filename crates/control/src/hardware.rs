//! Devices as the system knows them, which control files tell of.

use bcached_uring::{Identity, Presence};
use std::path::Path;

/// A device that is open.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hardware {
    /// What the kernel calls a block device (`sdb1`); of a file its name without its folder.
    pub name: String,
    /// Major and minor number of a block device.
    pub number: Option<(u32, u32)>,
}

impl Hardware {
    /// Of what was opened by `path`. The device itself is not asked.
    #[must_use]
    pub fn of(opened: &Presence, path: &str) -> Self {
        let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let by_path = || last(Path::new(path)).unwrap_or_default();
        match opened.identity() {
            Identity::Block { major, minor } => {
                let place = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}"));
                let name = place.ok().as_deref().and_then(last);
                Self { name: name.unwrap_or_else(by_path), number: Some((major, minor)) }
            }
            Identity::File { .. } => Self { name: by_path(), number: None },
        }
    }
}
