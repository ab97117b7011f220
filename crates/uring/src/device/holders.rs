//! Finds out which processes or kernel users hold a device: for the text of a refusal, and for
//! whether the device may soon be free. The refusal itself is the kernel's (`O_EXCL`, locks).
//!
//! Everything is best effort: without privileges, other users' processes are invisible, and what is
//! found may be gone a moment later. Sources: `/proc/PID/fd` and `fdinfo` (also in containers: only
//! what is visible there), the mount table, swaps, and sysfs `holders` (md, device-mapper) and
//! `bcache`, of the device and its partitions.

use super::DeviceIdentity;
use super::limits::sysfs;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use std::fmt;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// A holder of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Holder {
    /// A process has it open.
    Process {
        /// Process id.
        id: u32,
        /// Its short name.
        name: String,
    },
    /// It is mounted there.
    Mount(PathBuf),
    /// It is swap space.
    Swap,
    /// Another block device of the kernel is built on it: md, device-mapper (LVM, crypt,
    /// multipath), loop.
    Device(String),
    /// The kernel's own bcache has registered it.
    KernelBcache,
}

impl fmt::Display for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { id, name } => write!(formatter, "process {id} ({name})"),
            Self::Mount(place) => write!(formatter, "the mount {}", place.display()),
            Self::Swap => formatter.write_str("swap"),
            Self::Device(name) => write!(formatter, "the device {name}"),
            Self::KernelBcache => formatter.write_str("the kernel's bcache"),
        }
    }
}

impl Holder {
    /// Returns what a person can do about it.
    #[must_use]
    pub fn how_to_release(&self) -> String {
        match self {
            Self::Process { id, name } if name == "bcached" => {
                format!("stop it (`systemctl stop bcached`, or SIGTERM to {id}); nothing overrides this")
            }
            Self::Process { id, .. } => format!("end process {id}; nothing overrides this"),
            Self::Mount(place) => format!("unmount {}", place.display()),
            Self::Swap => "turn it off with swapoff".into(),
            Self::Device(name) if name.starts_with("loop") => {
                format!("detach it with losetup -d /dev/{name}")
            }
            Self::Device(name) => {
                format!("stop {name} with mdadm --stop or dmsetup remove, or use that device instead")
            }
            Self::KernelBcache => "stop it through /sys/block/DEVICE/bcache, then try again".into(),
        }
    }
}

/// Returns all that have the device open or have built something on it.
pub(super) fn find(identity: DeviceIdentity) -> Vec<Holder> {
    let mut holders = Vec::new();
    if let DeviceIdentity::Block { major, minor } = identity {
        for (number, place) in with_partitions(major, minor) {
            holders.extend(kernel_holders(&place));
            holders.extend(mounts(&number));
            holders.extend(swaps(&number));
        }
    }
    // If there is a kernel holder, a process that has the device open is probably only looking.
    if holders.is_empty() {
        holders = processes(&|found| found == identity, |_| true);
    }
    if holders.is_empty() {
        // A claim on a disk is one on its partitions, and the other way round.
        let relatives = relatives(identity);
        let is_relative = |found| matches!(found, DeviceIdentity::Block { .. }) && relatives.contains(&found);
        holders = processes(&is_relative, |_| true);
    }
    holders
}

/// The same, except for the kernel's bcache, which serves the device.
pub(super) fn find_users(identity: DeviceIdentity) -> Vec<Holder> {
    let mut users = find(identity);
    users.retain(|holder| *holder != Holder::KernelBcache);
    if users.is_empty() { processes(&|found| found == identity, |_| true) } else { users }
}

/// Returns true if none of the holders persists: none is found, or all are processes that were
/// killed.
pub(super) fn are_dying(holders: &[Holder]) -> bool {
    holders.iter().all(|holder| matches!(holder, Holder::Process { id, .. } if is_dying(*id)))
}

/// Returns true for a process that is exiting, or will exit when it returns from its wait in the
/// kernel.
fn is_dying(id: u32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{id}/{name}"));
    let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else { return true };
    ends(&stat) || has_been_killed(&status)
}

/// Returns true if `/proc/PID/stat` shows a zombie or an exiting process.
fn ends(stat: &str) -> bool {
    /// From `linux/sched.h`.
    const PF_EXITING: u64 = 4;
    // "123 (a name) S ..": the name may hold anything; see proc(5). The flags are the seventh
    // field, counted from the state.
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    matches!(state, Some("Z" | "X")) || flags & PF_EXITING != 0
}

/// Returns true if `/proc/PID/status` lists SIGKILL as pending.
fn has_been_killed(status: &str) -> bool {
    const SIGKILL: u64 = 1 << 8;
    status.lines().any(|line| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set & SIGKILL != 0)
    })
}

/// Returns the disk of a partition, or the partitions of a disk.
fn relatives(identity: DeviceIdentity) -> Vec<DeviceIdentity> {
    let DeviceIdentity::Block { major, minor } = identity else { return Vec::new() };
    let place = sysfs(major, minor);
    let mut numbers: Vec<_> =
        with_partitions(major, minor).into_iter().skip(1).map(|found| found.0).collect();
    if place.join("partition").exists() {
        // The link of a partition leads into the folder of its disk.
        let disk = std::fs::canonicalize(&place).ok().and_then(|place| Some(place.parent()?.join("dev")));
        numbers.extend(disk.and_then(|path| std::fs::read_to_string(path).ok()));
    }
    numbers.iter().filter_map(|number| DeviceIdentity::of_block(number)).collect()
}

/// Returns the processes that hold a lock on the file.
pub(super) fn find_lockers(identity: DeviceIdentity) -> Vec<Holder> {
    let holds_lock = |fdinfo: &Path| {
        std::fs::read_to_string(fdinfo).is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:")))
    };
    processes(&|found| found == identity, holds_lock)
}

/// Returns the loop devices over the file.
pub(super) fn find_loops(identity: DeviceIdentity) -> Vec<Holder> {
    let Ok(entries) = std::fs::read_dir("/sys/block") else { return Vec::new() };
    let mut loops = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(backing) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        if identity_of(Path::new(backing.trim_end_matches('\n'))) == Some(identity) {
            loops.push(Holder::Device(name));
        }
    }
    loops
}

pub(super) fn identity_of(path: &Path) -> Option<DeviceIdentity> {
    let found = std::fs::metadata(path).ok()?;
    if found.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        return Some(DeviceIdentity::Block { major, minor });
    }
    Some(DeviceIdentity::File { device: found.dev(), inode: found.ino() })
}

/// The same for what a process has open, from what the system has cached: a file on a server that
/// does not answer would block us.
fn identity_of_open(descriptor: &Path) -> Option<DeviceIdentity> {
    let known = StatxFlags::TYPE | StatxFlags::INO;
    let found = statx(CWD, descriptor, AtFlags::STATX_DONT_SYNC, known).ok()?;
    if FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice {
        return Some(DeviceIdentity::Block { major: found.stx_rdev_major, minor: found.stx_rdev_minor });
    }
    let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
    Some(DeviceIdentity::File { device, inode: found.stx_ino })
}

/// Returns the device's number (`8:1`) and place in sysfs, then those of its partitions.
fn with_partitions(major: u32, minor: u32) -> Vec<(String, PathBuf)> {
    let place = sysfs(major, minor);
    let mut all = vec![(format!("{major}:{minor}"), place.clone())];
    for entry in std::fs::read_dir(&place).into_iter().flatten().flatten() {
        let partition = entry.path();
        if !partition.join("partition").exists() {
            continue;
        }
        if let Ok(number) = std::fs::read_to_string(partition.join("dev")) {
            all.push((number.trim().to_owned(), partition));
        }
    }
    all
}

fn kernel_holders(place: &Path) -> Vec<Holder> {
    let mut holders = Vec::new();
    if place.join("bcache").exists() {
        holders.push(Holder::KernelBcache);
    }
    for entry in std::fs::read_dir(place.join("holders")).into_iter().flatten().flatten() {
        let kernel_name = entry.file_name().to_string_lossy().into_owned();
        let mapped = std::fs::read_to_string(entry.path().join("dm/name")).ok();
        holders.push(Holder::Device(match mapped {
            Some(name) => format!("{kernel_name} ({})", name.trim()),
            None => kernel_name,
        }));
    }
    holders
}

/// Returns the mounts of the device with this number (`8:1`), in this mount namespace.
fn mounts(number: &str) -> Vec<Holder> {
    let Ok(table) = std::fs::read_to_string("/proc/self/mountinfo") else { return Vec::new() };
    let mut found = Vec::new();
    for line in table.lines() {
        // "36 35 98:0 /root /mount/point options - type source superoptions"; see proc(5).
        let mut fields = line.split(' ');
        let (device, place) = (fields.nth(2), fields.nth(1));
        let source = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1));
        // Some file systems (btrfs) have a number of their own; their source still names the
        // device.
        let by_source =
            || source.filter(|source| source.starts_with('/')).is_some_and(|source| is(source, number));
        if device == Some(number) || by_source() {
            found.extend(place.map(|place| Holder::Mount(unescape(place).into())));
        }
    }
    found
}

fn swaps(number: &str) -> Option<Holder> {
    let table = std::fs::read_to_string("/proc/swaps").ok()?;
    let mut paths = table.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    paths.any(|path| is(&unescape(path), number)).then_some(Holder::Swap)
}

/// Returns true if `path` is the block device with this number.
fn is(path: &str, number: &str) -> bool {
    matches!(identity_of(Path::new(path)), Some(DeviceIdentity::Block { major, minor }) if format!("{major}:{minor}") == number)
}

/// Undoes the octal escapes of proc's tables (space, tab, newline, backslash).
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
}

/// Returns the visible processes that have such a device open; `counts` filters by the path of the
/// fdinfo.
fn processes(is_it: &dyn Fn(DeviceIdentity) -> bool, counts: impl Fn(&Path) -> bool) -> Vec<Holder> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let place = entry.path();
        for descriptor in std::fs::read_dir(place.join("fd")).into_iter().flatten().flatten() {
            let fdinfo = place.join("fdinfo").join(descriptor.file_name());
            if !identity_of_open(&descriptor.path()).is_some_and(is_it) || !counts(&fdinfo) {
                continue;
            }
            let name = std::fs::read_to_string(place.join("comm")).unwrap_or_default();
            found.push(Holder::Process { id, name: name.trim().to_owned() });
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ioctl;

    #[test]
    fn the_root_file_system_and_escapes_are_read_from_the_mount_table() {
        assert_eq!(unescape("/mnt/two\\040words"), "/mnt/two words");
        let root = std::fs::metadata("/").expect("there is a root");
        let number = format!("{}:{}", rustix::fs::major(root.dev()), rustix::fs::minor(root.dev()));
        assert!(mounts(&number).contains(&Holder::Mount("/".into())));
        assert!(mounts("4095:1048575").is_empty());
    }

    #[test]
    fn a_killed_process_is_told_from_one_that_lives() {
        let stat = |state, flags| format!("7 (a ) b) {state} 1 7 7 0 -1 {flags} 0 0 0");
        assert!(!ends(&stat("S", 4_194_560)) && !ends(&stat("D", 4_194_560)));
        assert!(ends(&stat("Z", 4_194_560)) && ends(&stat("D", 4_194_564)));
        let status = |own, shared| format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t{shared}\n");
        assert!(!has_been_killed(&status("0000000000000000", "0000000000004000")));
        assert!(has_been_killed(&status("0000000000000100", "0000000000000000")));
        assert!(!is_dying(std::process::id()) && is_dying(u32::MAX));
        let own = Holder::Process { id: std::process::id(), name: "this".into() };
        assert!(are_dying(&[]) && !are_dying(&[Holder::Swap]) && !are_dying(&[own]));
    }

    #[test]
    fn this_process_is_found_by_its_open_file() {
        let file = tempfile::NamedTempFile::new().expect("a file in the temporary directory");
        let identity = identity_of(file.path()).expect("it is there");
        let own = |holder: &Holder| matches!(holder, Holder::Process { id, .. } if *id == std::process::id());
        assert!(find(identity).iter().any(own));
        assert!(!find_lockers(identity).iter().any(own), "it is not locked");
        ioctl::lock(file.as_file(), ioctl::LockMode::Exclusive, ioctl::LockRange::All)
            .expect("nobody else has it");
        assert!(find_lockers(identity).iter().any(own));
    }
}
