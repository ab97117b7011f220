//! What is mounted where, in the kernel's words (`/proc/self/mountinfo`): to ask a mount itself may mean to wait for its
//! daemon.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// A mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mounted {
    /// Its number, which no other mount has while it is there; used again after that.
    pub(crate) id: u64,
    /// The minor number of its device.
    pub(crate) minor: u32,
    /// The kind of file system.
    pub(crate) kind: String,
}

/// What lies on top at `directory`.
pub(crate) fn top(directory: &Path) -> std::io::Result<Option<Mounted>> {
    Ok(find(&std::fs::read("/proc/self/mountinfo")?, directory))
}

fn find(table: &[u8], directory: &Path) -> Option<Mounted> {
    // The last of several at one place is on top.
    table
        .split(|byte| *byte == b'\n')
        .filter_map(parse)
        .rfind(|(place, _)| place == directory)
        .map(|(_, found)| found)
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`: before the hyphen are any number of optional fields.
fn parse(line: &[u8]) -> Option<(PathBuf, Mounted)> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let text = |index: usize| std::str::from_utf8(fields.get(index)?).ok();
    let hyphen = fields.iter().position(|field| *field == b"-")?;
    let (_, minor) = text(2)?.split_once(':')?;
    let found = Mounted {
        id: text(0)?.parse().ok()?,
        minor: minor.parse().ok()?,
        kind: text(hyphen + 1)?.to_owned(),
    };
    Some((PathBuf::from(OsString::from_vec(unescaped(fields.get(4)?))), found))
}

/// Blanks, tabs, new lines and backslashes are written as `\` and three octal digits.
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
        assert_eq!(found, Some(Mounted { id: 38, minor: 40, kind: "fuse.bcached".to_owned() }));
        assert_eq!(find(TABLE, Path::new("/mnt")).map(|found| found.kind), Some("ext3".to_owned()));
        assert_eq!(find(TABLE, Path::new("/mnt/071")).map(|found| found.id), Some(39), "digits are digits");
        assert_eq!(find(TABLE, Path::new("/mnt/a")), None);
    }
}
