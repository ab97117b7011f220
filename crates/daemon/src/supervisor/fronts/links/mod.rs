//! Names of block devices that stay the same: `/dev/bcache/by-uuid/UUID` and `/dev/bcache/by-label/LABEL`, as the kernel's bcache has them by its
//! rules for udev, and `/dev/bcacheN` where that is asked for. A device's own number is any, and another one after each boot.
//!
//! They are made here and not by udev, which learns of a device before anybody could tell it whose it is. What points elsewhere is left
//! alone.

mod numbered;

use bcached_control::names::{can_be_name, in_control_files};
use bcached_control::paths;
use bcached_port::{Export, Uuid};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where they are, and where the kernel tells of devices and of itself.
struct Places {
    directory: PathBuf,
    system: PathBuf,
}

/// What is judged is what is changed: one at a time.
static CHANGES: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    fn real() -> Self {
        Self { directory: paths::of_machine("/dev/bcache"), system: "/sys".into() }
    }

    fn by_uuid(&self) -> PathBuf {
        self.directory.join("by-uuid")
    }

    fn of(&self, uuid: Uuid) -> PathBuf {
        self.by_uuid().join(uuid.to_string())
    }

    /// Where devices are.
    fn devices(&self) -> &Path {
        self.directory.parent().unwrap_or(&self.directory)
    }

    fn numbered(&self, number: usize) -> PathBuf {
        self.devices().join(in_control_files(number))
    }

    fn block(&self) -> PathBuf {
        self.system.join("block")
    }

    /// The kernel's bcache is loaded, or a part of it.
    fn has_kernel(&self) -> bool {
        ["module/bcache", "fs/bcache"].iter().any(|sign| self.system.join(sign).exists())
    }
}

/// The device at `path` is that volume.
pub fn make(export: &Export, path: &Path) {
    let (places, _alone) = (Places::real(), alone());
    if let Err(error) = make_in(&places, export, path) {
        let (name, directory) = (&export.name, places.directory.display());
        tracing::warn!(event = "device-not-linked", "{name}: no links in {directory}: {error}");
    }
}

/// The same, of a volume whose section asks for that number, or for none: what it had of another goes. True if the link is new, else why there is
/// none; `None` if nothing can be told of it now.
pub fn number(uuid: Uuid, number: Option<usize>, path: &Path) -> Option<Result<bool, String>> {
    let (places, _alone) = (Places::real(), alone());
    number_in(&places, uuid, number, path)
}

/// The same, now and then, as long as the device is there.
pub fn keep_number(uuid: Uuid, number: usize, path: &Path) -> Option<Result<bool, String>> {
    let (places, _alone) = (Places::real(), alone());
    numbered::keep(&places, number, (&places.of(uuid), path))
}

/// The device at `path` is nobody's.
pub fn remove(path: &Path) {
    let _alone = alone();
    remove_in(&Places::real(), path);
}

fn make_in(places: &Places, export: &Export, path: &Path) -> io::Result<()> {
    // It may have been another volume's before.
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
            // Of two volumes with one label the first has it; the kernel's bcache may have a device of that name.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    Ok(())
}

fn number_in(
    places: &Places,
    uuid: Uuid,
    number: Option<usize>,
    path: &Path,
) -> Option<Result<bool, String>> {
    let own = places.of(uuid);
    numbered::remove(places, &own, number);
    numbered::keep(places, number?, (&own, path))
}

fn remove_in(places: &Places, path: &Path) {
    for folder in ["by-uuid", "by-label"] {
        let entries = std::fs::read_dir(places.directory.join(folder)).into_iter().flatten().flatten();
        let links = entries.map(|entry| entry.path()).filter(|link| target(link).as_deref() == Some(path));
        for link in links {
            numbered::remove(places, &link, None);
            // Without the right to remove it there was none to make it.
            drop(std::fs::remove_file(link));
        }
    }
}

fn target(link: &Path) -> Option<PathBuf> {
    std::fs::read_link(link).ok()
}

/// A link to what is not there, or to a device of nobody's: nodes of the loop driver and of the NBD client stay when they are not used.
fn is_dead(link: &Path, block: &Path) -> bool {
    let is_unused = |device: PathBuf| {
        let block = block.join(device.file_name().unwrap_or_default());
        // Whose it is stands beside it as long as it is somebody's.
        is_former(link) && !block.join("loop/backing_file").exists() && !block.join("pid").exists()
    };
    target(link).is_some_and(|device| !link.exists() || is_unused(device))
}

/// A link to such a device. Of a volume's UUID it is the device that the volume has had: the kernel's bcache has no links to those.
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
