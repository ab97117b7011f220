//! Names of block devices that stay the same: `/dev/bcache/by-uuid/UUID` and `/dev/bcache/by-label/LABEL`, as the kernel's bcache has them by its
//! rules for udev. A device's number is any, and another one after each boot.
//!
//! They are made here and not by udev, which learns of a device before anybody could tell it whose it is. What points elsewhere is left
//! alone.

use crate::names::can_be_name;
use bcached_port::Export;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Where they are.
const DIRECTORY: &str = "/dev/bcache";
/// Where the kernel tells of devices.
const BLOCK: &str = "/sys/block";

/// The device at `path` is that volume.
pub fn make(export: &Export, path: &Path) {
    if let Err(error) = make_in((Path::new(DIRECTORY), Path::new(BLOCK)), export, path) {
        let name = &export.name;
        tracing::warn!(event = "device-not-linked", "{name}: no links in {DIRECTORY}: {error}");
    }
}

/// The device at `path` is nobody's.
pub fn remove(path: &Path) {
    remove_in(Path::new(DIRECTORY), path);
}

fn make_in((directory, block): (&Path, &Path), export: &Export, path: &Path) -> io::Result<()> {
    // It may have been another volume's before.
    remove_in(directory, path);
    let mut links = vec![directory.join("by-uuid").join(export.uuid.to_string())];
    if is_name(&export.label) {
        links.push(directory.join("by-label").join(&export.label));
    }
    for link in links {
        if let Some(folder) = link.parent() {
            std::fs::create_dir_all(folder)?;
        }
        if is_dead(&link, block)
            || link.ends_with(Path::new("by-uuid").join(export.uuid.to_string())) && is_former(&link)
        {
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

fn remove_in(directory: &Path, path: &Path) {
    for folder in ["by-uuid", "by-label"] {
        let entries = std::fs::read_dir(directory.join(folder)).into_iter().flatten().flatten();
        let links = entries.map(|entry| entry.path()).filter(|link| target(link).as_deref() == Some(path));
        // Without the right to remove it there was none to make it.
        links.for_each(|link| drop(std::fs::remove_file(link)));
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
mod tests {
    use super::*;
    use bcached_port::{Uuid, Way};

    fn volume(uuid: u8, label: &str) -> Export {
        Export {
            name: "tank".to_owned(),
            uuid: Uuid([uuid; 16]),
            label: label.to_owned(),
            sectors: 8,
            block_sectors: 8,
            read_only: false,
            shared: false,
            ways: Way::Ublk.into(),
            served: None,
        }
    }

    #[test]
    fn links_lead_to_their_device_and_go_with_it() {
        let [folder, block] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let [first, second] = ["ublkb0", "ublkb1"].map(|name| folder.path().join(name));
        for device in [&first, &second] {
            std::fs::write(device, "").expect("a file");
        }
        let by = |kind: &str, name: &str| target(&folder.path().join(kind).join(name));
        let uuid = |byte| Uuid([byte; 16]).to_string();
        make_in((folder.path(), block.path()), &volume(1, "data"), &first).expect("made");
        make_in((folder.path(), block.path()), &volume(2, "data"), &second).expect("made");
        assert_eq!(by("by-uuid", &uuid(1)), Some(first.clone()));
        assert_eq!(by("by-uuid", &uuid(2)), Some(second.clone()));
        assert_eq!(by("by-label", "data"), Some(first.clone()), "the first has it");
        // The numbers are others after a boot.
        std::fs::remove_file(&second).expect("gone");
        make_in((folder.path(), block.path()), &volume(2, "a/b"), &first).expect("made");
        assert_eq!((by("by-uuid", &uuid(1)), by("by-label", "data")), (None, None), "it is another's now");
        assert_eq!(by("by-uuid", &uuid(2)), Some(first.clone()), "a dead link is in nobody's way");
        remove_in(folder.path(), &first);
        assert_eq!(by("by-uuid", &uuid(2)), None);
        // Devices of the loop driver and of the NBD client are there when they are nobody's.
        let [unused, other] = ["nbd4095", "loop4095"].map(|name| folder.path().join(name));
        for device in [&unused, &other] {
            std::fs::write(device, "").expect("a file");
        }
        make_in((folder.path(), block.path()), &volume(3, "data"), &unused).expect("made");
        make_in((folder.path(), block.path()), &volume(3, "data"), &other).expect("made");
        assert_eq!(
            by("by-uuid", &uuid(3)),
            Some(other.clone()),
            "the device that it had before is not its own any more"
        );
        assert_eq!(by("by-label", "data"), Some(other.clone()));
        // Somebody has the old one mounted: what was its label's may be another volume's, its UUID is nobody else's.
        std::fs::create_dir_all(block.path().join("loop4095/loop")).expect("a folder");
        std::fs::write(block.path().join("loop4095/loop/backing_file"), "").expect("a file");
        make_in((folder.path(), block.path()), &volume(3, "data"), &unused).expect("made");
        assert_eq!((by("by-uuid", &uuid(3)), by("by-label", "data")), (Some(unused), Some(other)));
    }
}
