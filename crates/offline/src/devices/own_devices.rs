//! Finds the block devices of this machine that are volumes of bcached, or are stacked on one.
//!
//! A search by UUID reads all devices. A read of a volume may wait for the very device that is
//! searched for. If no daemon serves the volume any more (a ublk device that has outlived its
//! daemon), the read waits for the searching process itself.

use bcached_front_fuse::mountinfo::{self, MountEntry};
use bcached_port::loop_devices;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel lists block devices.
const CLASS: &str = "/sys/class/block";

/// Returns every block device that the kernel lists, sorted by path, except those that are volumes
/// or [lie on one](lies_on_a_volume): a read of a volume that is not served would never end.
#[must_use]
pub fn block_devices() -> Vec<PathBuf> {
    let all = fs::read_dir(CLASS).into_iter().flatten().flatten();
    let names = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = names.filter(|name| !lies_on_a_volume(name));
    // In sysfs the slashes of a device's name are exclamation marks: cciss!c0d0.
    let mut all: Vec<_> = names.map(|name| Path::new("/dev").join(name.replace('!', "/"))).collect();
    all.sort();
    all
}

/// Whether the block device with this name in sysfs is a volume, or is stacked on one: a partition
/// of it, a logical volume, an image in a file system on it. The device itself is not read.
///
/// Limits: of volumes on the kernel's NBD client, only those of this process are recognised. If an
/// image is in a file system with an anonymous device number (btrfs, overlays), the device below
/// that is unknown.
pub fn lies_on_a_volume(name: &str) -> bool {
    reaches_a_volume(name, &below)
}

/// Whether this device, or any device below it, is a volume. `below` returns `None` for a volume,
/// and the devices directly below for any other.
fn reaches_a_volume(name: &str, below: &dyn Fn(&str) -> Option<Vec<String>>) -> bool {
    let (mut all, mut next) = (vec![name.to_owned()], 0);
    while let Some(device) = all.get(next) {
        let Some(found) = below(device) else { return true };
        let new: Vec<_> = found.into_iter().filter(|found| !all.contains(found)).collect();
        all.extend(new);
        next += 1;
    }
    false
}

/// Returns the devices directly below it; `None` if it is a volume.
fn below(name: &str) -> Option<Vec<String>> {
    let class = Path::new(CLASS);
    if name.starts_with("ublkb") && bcached_front_ublk::is_volume(name) {
        return None;
    }
    if name.starts_with("nbd") {
        let serves = fs::read_to_string(class.join(name).join("pid")).ok();
        if serves.is_some_and(|process| process.trim().parse() == Ok(std::process::id())) {
            return None;
        }
    }
    let mut below = below_in(class, name);
    if let Some(on) = mount_under(name) {
        if on.is_of_volumes() {
            return None;
        }
        below.extend(name_of(format!("/sys/dev/block/{}:{}", on.major, on.minor).into()));
    }
    Some(below)
}

/// Returns the mount that holds the file of a loop device.
fn mount_under(name: &str) -> Option<MountEntry> {
    let file = loop_devices::backing_file(Path::new(name))?;
    mountinfo::around(&file).ok().flatten()
}

/// Returns the disk of a partition, and the components of md and device-mapper devices.
fn below_in(class: &Path, name: &str) -> Vec<String> {
    let place = class.join(name);
    let real = place.join("partition").exists().then(|| fs::canonicalize(&place).ok()).flatten();
    let disk = real.and_then(|real| name_of(real.parent()?.to_owned()));
    let slaves = fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
    let slaves = slaves.filter_map(|slave| slave.file_name().into_string().ok());
    disk.into_iter().chain(slaves).collect()
}

fn name_of(place: PathBuf) -> Option<String> {
    fs::canonicalize(place).ok()?.file_name()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// What is stacked on a volume is recognised. A start after a kill once searched for its cache
    /// on the block device of its own volume, which was not served yet, and waited forever.
    #[test]
    fn what_lies_on_a_volume_is_one_too() {
        let root = tempfile::tempdir().expect("a folder");
        let (class, devices) = (root.path().join("class"), root.path().join("devices"));
        let disks = ["ublkb3", "ublkb3/ublkb3p1", "sda", "sda/sda1", "dm-0", "dm-1", "dm-2"];
        fs::create_dir_all(&class).expect("a folder");
        for disk in disks {
            let (place, name) = (devices.join(disk), disk.rsplit('/').next().expect("a name"));
            fs::create_dir_all(place.join("slaves")).expect("a folder");
            if disk.contains('/') {
                fs::write(place.join("partition"), "1").expect("a file");
            }
            symlink(&place, class.join(name)).expect("a link");
        }
        // A logical volume on the partition, and one on that; and one that has nothing to do with a
        // volume.
        for (upper, lower) in [("dm-0", "ublkb3p1"), ("dm-0", "sda1"), ("dm-1", "dm-0"), ("dm-2", "sda1")] {
            fs::write(devices.join(upper).join("slaves").join(lower), "").expect("a file");
        }
        let lies_on_it =
            |name: &str| reaches_a_volume(name, &|name| (name != "ublkb3").then(|| below_in(&class, name)));
        for name in ["ublkb3", "ublkb3p1", "dm-0", "dm-1"] {
            assert!(lies_on_it(name), "{name}");
        }
        for name in ["sda", "sda1", "dm-2", "none"] {
            assert!(!lies_on_it(name), "{name}");
        }
        let ring = |name: &str| Some(vec![if name == "one" { "other" } else { "one" }.to_owned()]);
        assert!(!reaches_a_volume("one", &ring), "a ring does not hang");
    }
}
