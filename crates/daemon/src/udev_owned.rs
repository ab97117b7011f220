//! The list by which udev keeps the kernel's bcache away from the configured devices
//! (`packaging/udev/68-bcached.rules`).
//!
//! * A device that is in no configuration is never on it.
//! * A daemon with a configuration elsewhere keeps no list: the machine has one list and one
//!   configuration.
//! * A device that is missing at the moment must not lose its line, because the kernel would take
//!   it when it appears. So the entries of a former list stay until every configured device is
//!   known.
//! * A list that a person wrote is never touched.

use bcached_control::atomic_file;
use bcached_control::paths;
use bcached_uring::udev::{OWNED_RULES_PATH, owned_rules};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Names another directory for the list, whatever the configuration and the user.
pub const VARIABLE: &str = "BCACHED_UDEV_RULES";

/// UUIDs of devices.
pub type DeviceUuids = BTreeSet<[u8; 16]>;

/// The list, and what it was last made from.
pub struct OwnedList {
    path: PathBuf,
    last: Option<(DeviceUuids, bool)>,
}

impl OwnedList {
    /// Returns the path of this daemon's list, if it keeps one: with the machine's configuration,
    /// as root, if udev has a directory for it.
    pub fn path_of_this_daemon(is_machines_configuration: bool) -> Option<PathBuf> {
        let usual = paths::of_machine(OWNED_RULES_PATH);
        let named = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty());
        match (named, usual.file_name()) {
            (Some(folder), Some(name)) => Some(Path::new(&folder).join(name)),
            _ => {
                let may = is_machines_configuration && rustix::process::geteuid().is_root();
                (may && usual.parent().is_some_and(Path::is_dir)).then_some(usual)
            }
        }
    }

    /// The list at `path`, whose content is not known yet.
    pub const fn at(path: PathBuf) -> Self {
        Self { path, last: None }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the list with the devices `known`, and with no others if `is_complete`.
    pub fn update(&mut self, known: DeviceUuids, is_complete: bool) {
        let now = (known, is_complete);
        if self.last.as_ref() == Some(&now) {
            return;
        }
        let path = self.path.display();
        match replace(&self.path, &now.0, is_complete) {
            Ok(ListUpdate::Unchanged) => {}
            Ok(ListUpdate::Written(devices)) => tracing::info!(
                event = "owned-list-written",
                "{path} now keeps the kernel's bcache away from {devices} device{}; an initramfs has its own copy",
                if devices == 1 { "" } else { "s" }
            ),
            Ok(ListUpdate::NotOurs) => tracing::warn!(
                event = "owned-list-not-ours",
                "{path} was not made by bcached and lacks a configured device; add a line for it, or remove the file"
            ),
            Err(error) => tracing::warn!(
                event = "owned-list-failed",
                "cannot write {path}: {error}; the kernel's bcache may take devices that are configured here"
            ),
        }
        self.last = Some(now);
    }
}

#[derive(PartialEq, Eq, Debug)]
enum ListUpdate {
    Unchanged,
    Written(usize),
    NotOurs,
}

fn replace(path: &Path, known: &DeviceUuids, is_complete: bool) -> io::Result<ListUpdate> {
    let old = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error),
    };
    let listed = devices_of(&old);
    let header = owned_rules(&[]);
    if !old.is_empty() && !old.starts_with(&header) {
        return Ok(if known.is_subset(&listed) { ListUpdate::Unchanged } else { ListUpdate::NotOurs });
    }
    let mut wanted = known.clone();
    if !is_complete {
        wanted.extend(&listed);
    }
    if wanted == listed {
        return Ok(ListUpdate::Unchanged);
    }
    let text = owned_rules(&wanted.iter().copied().collect::<Vec<_>>());
    // udev, too, sees either the old file or the new one.
    atomic_file::write(path, &text)?;
    Ok(ListUpdate::Written(wanted.len()))
}

fn devices_of(text: &str) -> DeviceUuids {
    let uuid = |line: &str| {
        let (_, rest) = line.split_once("ENV{ID_FS_UUID}==\"")?;
        bcached_format::Uuid::from_text(rest.split_once('"')?.0)
    };
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines.filter_map(uuid).map(|uuid| uuid.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(digits: &[u8]) -> DeviceUuids {
        digits.iter().map(|digit| [*digit; 16]).collect()
    }

    #[test]
    fn a_device_keeps_its_line_until_all_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("67-bcached-owned.rules");
        assert_eq!(replace(&path, &devices(&[]), false).unwrap(), ListUpdate::Unchanged);
        assert!(!path.exists(), "nothing to say");
        assert_eq!(replace(&path, &devices(&[1, 2]), true).unwrap(), ListUpdate::Written(2));
        assert_eq!(replace(&path, &devices(&[3]), false).unwrap(), ListUpdate::Written(3));
        assert_eq!(replace(&path, &devices(&[1]), false).unwrap(), ListUpdate::Unchanged);
        assert_eq!(replace(&path, &devices(&[1, 3]), true).unwrap(), ListUpdate::Written(2));
        assert_eq!(fs::read_to_string(&path).unwrap(), owned_rules(&[[1; 16], [3; 16]]));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing unfinished is left");
    }

    #[test]
    fn a_list_that_a_person_wrote_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("67-bcached-owned.rules");
        let own = owned_rules(&[[1; 16]]).replace("# Made", "# Not made");
        fs::write(&path, &own).unwrap();
        assert_eq!(replace(&path, &devices(&[1]), true).unwrap(), ListUpdate::Unchanged);
        assert_eq!(replace(&path, &devices(&[1, 2]), true).unwrap(), ListUpdate::NotOurs);
        assert_eq!(fs::read_to_string(&path).unwrap(), own);
    }
}
