//! The mount table, as the kernel reports it (`/proc/self/mountinfo`). Asking a mount itself might
//! mean waiting for its daemon.

use crate::mount::KIND;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// A mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountEntry {
    /// Its mount id, unique while it is mounted; reused later.
    pub(crate) id: u64,
    /// The major number of its device.
    pub major: u32,
    /// The minor number of its device.
    pub minor: u32,
    /// The file system type.
    pub kind: String,
}

impl MountEntry {
    /// Whether it presents volumes of bcached as files.
    #[must_use]
    pub fn is_of_volumes(&self) -> bool {
        self.kind == KIND
    }
}

/// Returns the mount that contains `path`, an absolute path.
///
/// # Errors
/// The mount table cannot be read.
pub fn around(path: &Path) -> std::io::Result<Option<MountEntry>> {
    Ok(find_around(&std::fs::read("/proc/self/mountinfo")?, path))
}

fn find_around(table: &[u8], path: &Path) -> Option<MountEntry> {
    let mounts = table.split(|byte| *byte == b'\n').filter_map(parse);
    let around = mounts.filter(|(place, _)| path.starts_with(place));
    // Of several mounts at one path, the last is on top.
    around.max_by_key(|(place, _)| place.components().count()).map(|(_, found)| found)
}

/// Returns the topmost mount at `directory`.
pub(crate) fn top(directory: &Path) -> std::io::Result<Option<MountEntry>> {
    Ok(find(&std::fs::read("/proc/self/mountinfo")?, directory))
}

fn find(table: &[u8], directory: &Path) -> Option<MountEntry> {
    // Of several mounts at one path, the last is on top.
    table
        .split(|byte| *byte == b'\n')
        .filter_map(parse)
        .rfind(|(place, _)| place == directory)
        .map(|(_, found)| found)
}

/// Parses `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`. Before the hyphen are
/// any number of optional fields.
fn parse(line: &[u8]) -> Option<(PathBuf, MountEntry)> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let text = |index: usize| std::str::from_utf8(fields.get(index)?).ok();
    let hyphen = fields.iter().position(|field| *field == b"-")?;
    let (major, minor) = text(2)?.split_once(':')?;
    let found = MountEntry {
        id: text(0)?.parse().ok()?,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        kind: text(hyphen + 1)?.to_owned(),
    };
    Some((PathBuf::from(OsString::from_vec(unescaped(fields.get(4)?))), found))
}

/// Reverses the kernel's escapes: blanks, tabs, newlines and backslashes appear as `\` and three
/// octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &behind[3..];
            }
            _ => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"36 35 98:0 / /mnt rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue
37 36 0:39 / /mnt/a\\040b rw - fuse.bcached bcached rw
38 37 0:40 / /mnt/a\\040b rw - fuse.bcached bcached rw
39 36 0:41 / /mnt/071 rw - tmpfs - rw
";

    #[test]
    fn the_last_of_several_is_on_top() {
        let found = find(TABLE, Path::new("/mnt/a b"));
        assert_eq!(found, Some(MountEntry { id: 38, major: 0, minor: 40, kind: "fuse.bcached".to_owned() }));
        assert_eq!(find(TABLE, Path::new("/mnt")).map(|found| found.kind), Some("ext3".to_owned()));
        assert_eq!(find(TABLE, Path::new("/mnt/071")).map(|found| found.id), Some(39), "digits are digits");
        assert_eq!(find(TABLE, Path::new("/mnt/a")), None);
    }

    #[test]
    fn a_file_is_on_the_nearest_mount_above_it() {
        let around = |path: &str| find_around(TABLE, Path::new(path));
        assert_eq!(around("/mnt/a b/volumes/tank").map(|found| found.id), Some(38));
        assert!(around("/mnt/a b/volumes/tank").is_some_and(|found| found.is_of_volumes()));
        let plain = around("/mnt/a").expect("on that one");
        assert_eq!((plain.major, plain.minor, plain.is_of_volumes()), (98, 0, false));
        assert_eq!(around("/elsewhere"), None);
    }
}
