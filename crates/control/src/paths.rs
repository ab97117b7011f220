//! The places of a machine: paths that nobody has to name, such as `/etc/bcached/config.toml` and `/run/bcached`.
//!
//! Tests run programs on machines that have a bcached of their own. They name a folder in `BCACHED_ROOT`, which holds
//! these places instead of `/`: then no file, socket or note of that other bcached is seen, and none is written.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the folder that has the machine's places, instead of `/`; for tests.
pub const VARIABLE: &str = "BCACHED_ROOT";

/// Where `place`, an absolute path, is on this machine.
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

/// True for a name that may mean another disk after the next boot.
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
