//! Finds the device with a UUID among several that have it.
//!
//! That several have it is normal: a disk has many paths, and each component of a mirror, a
//! multipath or a mapped device has the superblock of the device above it. Then the upper device is
//! meant. If several remain, they are copies: a snapshot or a clone that became visible. Nothing on
//! them tells which one is in use, and a wrong guess loses data; so none is taken.

use super::own_devices::{block_devices, lies_on_a_volume};
use super::read_superblock;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{Superblock, Uuid};
use bcached_uring::{Access, Device, DeviceIdentity};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Finds the only device with the UUID `wanted`; `name` is how it was configured.
pub fn find(name: &str, wanted: &str) -> Result<PathBuf, Failure> {
    let uuid = Uuid::from_text(wanted)
        .ok_or_else(|| Failure::new(Kind::Config, format!("`{name}` contains no UUID")))?;
    let mut found = BTreeMap::new();
    for path in candidates(uuid) {
        if let Some(identity) = identity_with(&path, uuid) {
            found.entry(identity).or_insert(path);
        }
    }
    let mut upper = uppermost(&found, below);
    match (upper.pop(), upper.is_empty()) {
        (Some(path), true) => Ok(path),
        (Some(last), false) => {
            upper.push(last);
            Err(ambiguous(name, &upper))
        }
        (None, _) => Err(Failure::new(Kind::NotFound, format!("no device has {name}"))
            .why("no block device of this machine has a bcache superblock with that UUID")),
    }
}

fn ambiguous(name: &str, paths: &[PathBuf]) -> Failure {
    let paths: Vec<_> = paths.iter().map(|path| mapped_name(path).display().to_string()).collect();
    Failure::new(Kind::Ambiguous, format!("`{name}` matches several devices"))
        .why(format!("{} carry it, so one is a copy of another", paths.join(" and ")))
        .next(
            "name the right one by its path (/dev/disk/by-id/.., /dev/mapper/..), or hide the copy \
             (a snapshot, a clone)",
        )
}

/// Returns the devices to read. Volumes of bcached are left out: they are never meant, and reading
/// one may wait for the device that is searched for.
fn candidates(uuid: Uuid) -> Vec<PathBuf> {
    let link = PathBuf::from(format!("/dev/disk/by-uuid/{uuid}"));
    let linked = fs::canonicalize(link).ok();
    let linked = linked.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !lies_on_a_volume(&name)
    });
    linked.into_iter().chain(block_devices()).collect()
}

/// Returns the identity of the device at `path`, if it has the UUID.
pub fn identity_with(path: &Path, wanted: Uuid) -> Option<DeviceIdentity> {
    let device = Device::open(path, Access::Look).ok()?;
    let carries_it = match read_superblock(&device).ok()? {
        Superblock::Backing(superblock) => superblock.uuid() == wanted,
        Superblock::Cache(superblock) => superblock.uuid() == wanted || superblock.set_uuid() == wanted,
    };
    carries_it.then(|| device.identity())
}

/// Returns the devices that are below none of the others; `below` returns what a device is directly
/// stacked on.
fn uppermost(
    found: &BTreeMap<DeviceIdentity, PathBuf>,
    below: impl Fn(DeviceIdentity) -> Vec<DeviceIdentity>,
) -> Vec<PathBuf> {
    let mut components = Vec::new();
    let mut open: Vec<_> = found.keys().copied().collect();
    while let Some(device) = open.pop() {
        for component in below(device) {
            if !components.contains(&component) {
                components.push(component);
                open.push(component);
            }
        }
    }
    let upper = found.iter().filter(|(identity, _)| !components.contains(identity));
    upper.map(|(_, path)| path.clone()).collect()
}

/// Returns what the kernel reports the device to be made of: the components of md and
/// device-mapper, the disk below a loop device.
fn below(device: DeviceIdentity) -> Vec<DeviceIdentity> {
    let DeviceIdentity::Block { major, minor } = device else { return Vec::new() };
    let place = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let slaves = fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
    let slaves = slaves.filter_map(|slave| fs::read_to_string(slave.path().join("dev")).ok());
    let mut below: Vec<_> = slaves.filter_map(|number| DeviceIdentity::of_block(&number)).collect();
    let under_loop = device.file_beneath().and_then(|path| Device::open(path, Access::Look).ok());
    below.extend(under_loop.map(|device| device.identity()));
    below
}

/// Returns the usual name of a mapped device.
fn mapped_name(path: &Path) -> PathBuf {
    let name = path.file_name().map(|node| Path::new("/sys/class/block").join(node).join("dm/name"));
    let mapped = name.and_then(|name| fs::read_to_string(name).ok());
    let mapped = mapped.map(|name| Path::new("/dev/mapper").join(name.trim()));
    mapped.filter(|mapped| mapped.exists()).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_control::failure::RetryClass;

    const fn disk(minor: u32) -> DeviceIdentity {
        DeviceIdentity::Block { major: 8, minor }
    }

    /// The uppermost of the devices with these numbers. Each pair is a device and what it is
    /// stacked on.
    fn left(carriers: &[u32], stacks: &[(u32, u32)]) -> Vec<String> {
        let found = carriers.iter().map(|minor| (disk(*minor), PathBuf::from(minor.to_string()))).collect();
        let below = |device| {
            let on = stacks.iter().filter(move |(upper, _)| disk(*upper) == device);
            on.map(|(_, lower)| disk(*lower)).collect()
        };
        uppermost(&found, below).iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn components_give_way_and_copies_do_not() {
        assert_eq!(left(&[1], &[]), ["1"]);
        assert_eq!(left(&[1, 2], &[]), ["1", "2"], "a clone");
        assert_eq!(left(&[1, 2, 9], &[(9, 1), (9, 2)]), ["9"], "a mirror, a multipath");
        assert_eq!(left(&[1, 9], &[(9, 5), (5, 1)]), ["9"], "what lies between may not carry it");
        // LVM: origin 7 and snapshot 8 on the real volume 6, on the disk 1.
        assert_eq!(left(&[6, 7, 8], &[(7, 6), (8, 6), (6, 1)]), ["7", "8"], "a snapshot");
        assert_eq!(left(&[1, 2], &[(1, 2), (2, 1)]), <[&str; 0]>::default(), "a ring does not hang");
    }

    #[test]
    fn the_refusal_names_both_and_what_to_do() {
        let told = ambiguous("UUID=x", &["/dev/sdb".into(), "/dev/sdc".into()]);
        assert_eq!(
            (told.kind.exit(), told.retry_class()),
            (3, RetryClass::WhenPresent),
            "the mirror over both may not be there yet"
        );
        let said = told.to_string();
        assert!(
            said.starts_with("`UUID=x` matches several devices: /dev/sdb and /dev/sdc carry it"),
            "{said}"
        );
    }
}
