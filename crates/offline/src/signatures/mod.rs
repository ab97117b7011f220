//! What else may live on a device: file systems, partition tables, members of arrays, disk images. A device that
//! carries one of these is not overwritten unasked.
//!
//! | file | what |
//! |---|---|
//! | `table` | marks at fixed offsets |
//! | `places` | marks at the end, of two bytes, shared ones, copies |
//! | `partitions` | partition tables |
//! | `installed` | what the machine's libblkid knows beyond that |
//!
//! The table is about marks, not about valid file systems: a damaged file system is still somebody's. It is the floor,
//! and a test holds it against the installed `blkid`, type by type. Where util-linux is installed that is asked as
//! well: what either of the two names is somebody's.

mod installed;
mod partitions;
mod places;
#[cfg(test)]
mod recipes;
mod table;
#[cfg(test)]
mod tests;

use super::device::{self, Device};
use super::superblock;
use bcached_control::failure::Failure;
use std::borrow::Cow;

/// How a signature is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// `--wipe-signature=TYPE` overrides the refusal.
    Content,
    /// Part of an array or volume group: nothing overrides; its own tool removes it.
    Member {
        /// The command that removes the mark, without the device.
        removed_by: &'static str,
    },
}

impl Class {
    /// The command that removes the mark of a member.
    #[must_use]
    pub const fn removed_by(self) -> Option<&'static str> {
        match self {
            Self::Member { removed_by } => Some(removed_by),
            Self::Content => None,
        }
    }
}

/// One signature found on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Name, as `blkid` prints it.
    pub kind: Cow<'static, str>,
    /// How it is treated.
    pub class: Class,
    /// Byte offset and length of every mark that must be erased for it to be gone.
    pub marks: Vec<(u64, usize)>,
}

const MDADM: Class = Class::Member { removed_by: "mdadm --zero-superblock" };
const PVREMOVE: Class = Class::Member { removed_by: "pvremove" };

/// How much at either end of a device tells whether something is on it.
const END_BYTES: u64 = 1 << 20;

/// The signatures on `device`, bcache's own excepted; each type once.
///
/// # Errors
/// The device's, or the installed program that is asked fails.
pub fn find(device: &Device) -> Result<Vec<Signature>, Failure> {
    let mut found = own(device)?;
    installed::find(&mut found)?;
    Ok(found.signatures)
}

/// Those of our own table.
fn own(device: &Device) -> Result<Found<'_>, Failure> {
    let mut found = Found { device, signatures: Vec::new() };
    for (kind, class, offset, magic) in table::FIXED {
        found.mark_if(kind, *class, *offset, magic)?;
    }
    places::find(&mut found)?;
    partitions::find(&mut found)?;
    Ok(found)
}

/// What `device` holds all the same, on which nothing was found, as a clause: its first or last MiB is not all zeroes, and no
/// bcache superblock stands there. `None`: nothing.
///
/// # Errors
/// The device's.
pub fn unknown(device: &Device) -> Result<Option<String>, Failure> {
    if let Some(set) = superblock::erased(device)? {
        let of_set = set.map_or_else(String::new, |set| format!(", of cache set {set}"));
        return Ok(Some(format!(
            "holds a bcache superblock whose magic number was erased{of_set}: what lies behind it may be there still"
        )));
    }
    Ok(holds_unknown(device)?.then(|| UNKNOWN_DATA.to_owned()))
}

fn holds_unknown(device: &Device) -> Result<bool, Failure> {
    if !matches!(superblock::read(device)?, superblock::Found::Nothing) {
        return Ok(false);
    }
    let end = device::length(device);
    let length = usize::try_from(END_BYTES).expect("1 MiB");
    for start in [0, end.saturating_sub(END_BYTES)] {
        if device::read(device, start, length)?.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What is on a device without a bcache superblock, as a clause; `None`: nothing.
///
/// # Errors
/// As [`find`].
pub fn described(device: &Device) -> Result<Option<String>, Failure> {
    let found = find(device)?;
    if found.is_empty() {
        return Ok(unknown(device)?.map(|holds| format!("it {holds}")));
    }
    let kinds: Vec<_> = found.iter().map(|signature| signature.kind.as_ref()).collect();
    Ok(Some(format!("it has the mark of {}", kinds.join(", "))))
}

/// Of a device that holds something of which no kind is known: for whoever is about to overwrite it.
const UNKNOWN_DATA: &str = "holds data of no known kind";

struct Found<'a> {
    device: &'a Device,
    signatures: Vec<Signature>,
}

impl Found<'_> {
    fn mark(&mut self, kind: impl Into<Cow<'static, str>>, class: Class, offset: u64, length: usize) {
        let kind = kind.into();
        match self.signatures.iter_mut().find(|signature| signature.kind == kind) {
            Some(signature) if signature.marks.contains(&(offset, length)) => {}
            Some(signature) => signature.marks.push((offset, length)),
            None => self.signatures.push(Signature { kind, class, marks: vec![(offset, length)] }),
        }
    }

    fn mark_if(
        &mut self,
        kind: &'static str,
        class: Class,
        offset: u64,
        magic: &[u8],
    ) -> Result<(), Failure> {
        if device::read(self.device, offset, magic.len())? == magic {
            self.mark(kind, class, offset, magic.len());
        }
        Ok(())
    }

    /// The same, `distance` bytes before the end.
    fn mark_before_end(
        &mut self,
        kind: &'static str,
        class: Class,
        distance: u64,
        magic: &[u8],
    ) -> Result<(), Failure> {
        match device::length(self.device).checked_sub(distance) {
            Some(offset) => self.mark_if(kind, class, offset, magic),
            None => Ok(()),
        }
    }

    fn has_any(&self, kinds: &[&str]) -> bool {
        self.signatures.iter().any(|signature| kinds.contains(&signature.kind.as_ref()))
    }

    /// Some of these bytes are a mark of what was found already, and not only in an area that goes with one.
    fn covers(&self, offset: u64, length: usize) -> bool {
        const MARK_MAX: usize = 4096;
        let marks = self.signatures.iter().flat_map(|signature| &signature.marks);
        marks
            .filter(|(_, bytes)| *bytes <= MARK_MAX)
            .any(|(at, bytes)| offset < at + *bytes as u64 && *at < offset + length as u64)
    }
}
