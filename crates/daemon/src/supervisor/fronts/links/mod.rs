//! Stable names of block devices: `/dev/bcache/by-uuid/UUID` and `/dev/bcache/by-label/LABEL`, as
//! the udev rules of the kernel's bcache make them, and `/dev/bcacheN` where that is asked for. A
//! device's own number is arbitrary, and differs after each boot.
//!
//! The links are made here and not by udev, which learns of a device before it could be told which
//! volume that is. Links that point elsewhere are left alone.

mod numbered;

use bcached_control::names::{can_be_name, in_control_files};
use bcached_control::paths;
use bcached_port::{Export, Uuid};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where the links are, and where the kernel shows its devices and modules.
struct LinkPaths {
    directory: PathBuf,
    system: PathBuf,
}

/// Serialises the changes: what a change is based on must not change meanwhile.
static CHANGES: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkPaths {
    fn real() -> Self {
        Self { directory: paths::of_machine("/dev/bcache"), system: "/sys".into() }
    }

    fn by_uuid(&self) -> PathBuf {
        self.directory.join("by-uuid")
    }

    fn of(&self, uuid: Uuid) -> PathBuf {
        self.by_uuid().join(uuid.to_string())
    }

    /// Returns the directory of the device nodes.
    fn devices(&self) -> &Path {
        self.directory.parent().unwrap_or(&self.directory)
    }

    fn numbered(&self, number: usize) -> PathBuf {
        self.devices().join(in_control_files(number))
    }

    fn block(&self) -> PathBuf {
        self.system.join("block")
    }

    /// Checks whether the kernel's bcache, or a part of it, is loaded.
    fn has_kernel(&self) -> bool {
        ["module/bcache", "fs/bcache"].iter().any(|sign| self.system.join(sign).exists())
    }
}

/// Makes the links of a volume to its device at `path`.
pub fn make(export: &Export, path: &Path) {
    let (places, _alone) = (LinkPaths::real(), alone());
    if let Err(error) = make_in(&places, export, path) {
        let (name, directory) = (&export.name, places.directory.display());
        tracing::warn!(event = "device-not-linked", "{name}: cannot make its links in {directory}: {error}");
    }
}

/// Makes the numbered link of a volume whose section asks for `number`, and removes links of the
/// volume under other numbers. Returns true if the link is new, false if it existed, or why there
/// is none; `None` if nothing can be said of it now.
pub fn number(uuid: Uuid, number: Option<usize>, path: &Path) -> Option<Result<bool, String>> {
    let (places, _alone) = (LinkPaths::real(), alone());
    number_in(&places, uuid, number, path)
}

/// Looks after the numbered link from time to time, as long as the device exists.
pub fn keep_number(uuid: Uuid, number: usize, path: &Path) -> Option<Result<bool, String>> {
    let (places, _alone) = (LinkPaths::real(), alone());
    numbered::keep(&places, number, (&places.of(uuid), path))
}

/// Removes the links to the device at `path`, which belongs to no volume any more.
pub fn remove(path: &Path) {
    let _alone = alone();
    remove_in(&LinkPaths::real(), path);
}

fn make_in(places: &LinkPaths, export: &Export, path: &Path) -> io::Result<()> {
    // The device may have belonged to another volume before.
    remove_in(places, path);
    let own = places.of(export.uuid);
    let mut links = vec![own.clone()];
    if is_name(&export.label) {
        links.push(places.directory.join("by-label").join(&export.label));
    }
    for link in links {
        if let Some(folder) = link.parent() {
            std::fs::create_dir_all(folder)?;
        }
        if is_dead(&link, &places.block()) || link == own && is_former(&link) {
            std::fs::remove_file(&link)?;
        }
        match symlink(path, &link) {
            // Of two volumes with one label the first has it; the kernel's bcache may have a device
            // of that name.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    Ok(())
}

fn number_in(
    places: &LinkPaths,
    uuid: Uuid,
    number: Option<usize>,
    path: &Path,
) -> Option<Result<bool, String>> {
    let own = places.of(uuid);
    numbered::remove(places, &own, number);
    numbered::keep(places, number?, (&own, path))
}

fn remove_in(places: &LinkPaths, path: &Path) {
    for folder in ["by-uuid", "by-label"] {
        let entries = std::fs::read_dir(places.directory.join(folder)).into_iter().flatten().flatten();
        let links = entries.map(|entry| entry.path()).filter(|link| target(link).as_deref() == Some(path));
        for link in links {
            numbered::remove(places, &link, None);
            // Without the permission to remove it, it could not have been made.
            drop(std::fs::remove_file(link));
        }
    }
}

fn target(link: &Path) -> Option<PathBuf> {
    std::fs::read_link(link).ok()
}

/// Checks for a link to nothing, or to an unused device: nodes of the loop driver and of the NBD
/// client stay when they are not used.
fn is_dead(link: &Path, block: &Path) -> bool {
    let is_unused = |device: PathBuf| {
        let block = block.join(device.file_name().unwrap_or_default());
        // These files show the user of a device as long as it has one.
        is_former(link) && !block.join("loop/backing_file").exists() && !block.join("pid").exists()
    };
    target(link).is_some_and(|device| !link.exists() || is_unused(device))
}

/// Checks for a link to a loop or NBD device. Under a volume's UUID it is the former device of the
/// volume: the kernel's bcache has no links to those.
fn is_former(link: &Path) -> bool {
    let target = target(link).unwrap_or_default();
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    ["loop", "nbd"].iter().any(|kind| name.starts_with(kind))
}

fn is_name(label: &str) -> bool {
    can_be_name(label) && label != "." && label != ".."
}

#[cfg(test)]
mod tests;
