//! Counts what this process holds of a guest: its own share, and its server's.

use std::fs::{self, File};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::MetadataExt as _;
use vmm_sys_util::eventfd::EventFd;

/// How often a guest's memory is mapped.
pub fn mappings(file: &File) -> usize {
    let inode = format!(" {} ", file.metadata().expect("open").ino());
    let maps = fs::read_to_string("/proc/self/maps").expect("there is a /proc");
    maps.lines().filter(|line| line.contains("memfd:guest") && line.contains(&inode)).count()
}

/// How many descriptors refer to a file.
pub fn descriptors(file: &File) -> usize {
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let wanted = place(file.metadata().expect("open"));
    let is_it = |fd: &RawFd| fs::metadata(format!("/proc/self/fd/{fd}")).is_ok_and(|it| place(it) == wanted);
    open().into_iter().filter(is_it).count()
}

/// How many descriptors refer to an eventfd. (All eventfds have the same inode, so they are told
/// apart by their ids.)
pub fn eventfds(event: &EventFd) -> usize {
    let number = |fd: RawFd| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
        info.lines().find(|line| line.starts_with("eventfd-id:")).map(str::to_owned)
    };
    let wanted = number(event.as_raw_fd());
    assert!(wanted.is_some(), "the system numbers its eventfds");
    open().into_iter().filter(|fd| number(*fd) == wanted).count()
}

fn open() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").expect("there is a /proc");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
