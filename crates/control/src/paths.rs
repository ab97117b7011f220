//! Well-known paths of a machine that users need not name, such as `/etc/bcached/config.toml` and
//! `/run/bcached`.
//!
//! Tests run the programs on machines that have a bcached of their own. They set `BCACHED_ROOT` to
//! a folder, which then holds these paths instead of `/`. So no file, socket or note of the other
//! bcached is read, and none is written.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable that names the folder which replaces `/` as the root of these paths;
/// for tests.
pub const VARIABLE: &str = "BCACHED_ROOT";

/// Returns the location of `place`, an absolute path, on this machine.
#[must_use]
pub fn of_machine(place: impl AsRef<Path>) -> PathBuf {
    below(std::env::var_os(VARIABLE), place.as_ref())
}

fn below(root: Option<OsString>, place: &Path) -> PathBuf {
    match root.filter(|root| !root.is_empty()) {
        Some(root) => Path::new(&root).join(place.strip_prefix("/").unwrap_or(place)),
        None => place.to_owned(),
    }
}

/// Returns whether `name` is a device name that may mean another disk after the next boot.
#[must_use]
pub fn is_unstable_name(name: &str) -> bool {
    let Some(node) = name.strip_prefix("/dev/") else { return false };
    ["sd", "vd", "hd", "xvd", "nvme"].iter().any(|prefix| node.starts_with(prefix)) && !node.contains('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_root_holds_all_places() {
        let place = Path::new("/run/bcached/control.sock");
        let of = |root: Option<&str>| below(root.map(Into::into), place);
        assert_eq!(of(Some("/tmp/x")), Path::new("/tmp/x/run/bcached/control.sock"));
        assert_eq!((of(None), of(Some(""))), (place.to_owned(), place.to_owned()));
    }
}
