//! Finds loop devices over files that are served, as the kernel lists them in `/sys/block`, which
//! accesses no file system.

use std::path::{Path, PathBuf};

/// Where devices are listed.
const BLOCK: &str = "/sys/block";

/// Returns the loop devices over the file `below`, or over files below it. After an unmount only
/// the loop devices remain, so call this before.
#[must_use]
pub fn over(below: &Path) -> Vec<PathBuf> {
    over_in(Path::new(BLOCK), below)
}

/// Returns the file that the kernel reports under a loop device. `None`: there is none, or it is
/// not a loop device.
#[must_use]
pub fn backing_file(device: &Path) -> Option<PathBuf> {
    backing_file_in(Path::new(BLOCK), device)
}

fn over_in(block: &Path, below: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(block).into_iter().flatten().flatten();
    let devices = entries.map(|entry| Path::new("/dev").join(entry.file_name()));
    let is_over =
        |device: &PathBuf| backing_file_in(block, device).is_some_and(|file| file.starts_with(below));
    devices.filter(is_over).collect()
}

fn backing_file_in(block: &Path, device: &Path) -> Option<PathBuf> {
    let told = std::fs::read_to_string(block.join(device.file_name()?).join("loop/backing_file")).ok()?;
    Some(told.trim_end_matches('\n').into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_over_a_mount_is_found_by_what_the_kernel_says() {
        let block = tempfile::tempdir().expect("a folder");
        for (name, file) in [
            ("loop0", "/run/b/dev/volumes/tank\n"),
            ("loop1", "/run/b/developer\n"),
            ("loop2", "/run/b/dev/volumes/a b (deleted)\n"),
            ("loop4", "/run/b/dev/volumes/tanks\n"),
        ] {
            std::fs::create_dir_all(block.path().join(name).join("loop")).expect("a folder");
            std::fs::write(block.path().join(name).join("loop/backing_file"), file).expect("a file");
        }
        std::fs::create_dir_all(block.path().join("loop3")).expect("one that is free");
        std::fs::create_dir_all(block.path().join("sda")).expect("a disk");
        let mut left = over_in(block.path(), Path::new("/run/b/dev"));
        left.sort();
        assert_eq!(left, [Path::new("/dev/loop0"), Path::new("/dev/loop2"), Path::new("/dev/loop4")]);
        assert_eq!(over_in(block.path(), Path::new("/run/b/dev/volumes/tank")), [Path::new("/dev/loop0")]);
        let told = backing_file_in(block.path(), Path::new("/dev/loop2"));
        assert_eq!(told.as_deref(), Some(Path::new("/run/b/dev/volumes/a b (deleted)")));
        assert_eq!(backing_file_in(block.path(), Path::new("/dev/loop3")), None);
    }
}
