//! Finds what else may be on a device: file systems, partition tables, members of arrays, disk
//! images. A device that carries one of these is not overwritten without consent.
//!
//! | file | what |
//! |---|---|
//! | `table` | marks at fixed offsets |
//! | `places` | marks at the end, of two bytes, shared ones, copies |
//! | `partitions` | partition tables |
//! | `installed` | what the machine's libblkid knows beyond that |
//!
//! The table is about marks, not about valid file systems: a damaged file system still belongs to
//! someone. The table is the minimum, and a test compares it with the installed `blkid`, type by
//! type. If util-linux is installed, it is asked as well: what either of the two finds is
//! respected.

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
pub enum SignatureClass {
    /// `--wipe-signature=TYPE` overrides the refusal.
    Content,
    /// Part of an array or volume group: nothing overrides; its own tool removes it.
    Member {
        /// The command that removes the mark, without the device.
        removed_by: &'static str,
    },
}

impl SignatureClass {
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
    pub class: SignatureClass,
    /// Byte offset and length of every mark that must be erased for it to be gone.
    pub marks: Vec<(u64, usize)>,
}

const MDADM: SignatureClass = SignatureClass::Member { removed_by: "mdadm --zero-superblock" };
const PVREMOVE: SignatureClass = SignatureClass::Member { removed_by: "pvremove" };

/// How many bytes at either end of a device are checked for unknown data.
const END_BYTES: u64 = 1 << 20;

/// Returns the signatures on `device` except bcache's own; each type once.
///
/// # Errors
/// The device's, or the installed program fails.
pub fn find(device: &Device) -> Result<Vec<Signature>, Failure> {
    let mut found = own(device)?;
    installed::find(&mut found)?;
    Ok(found.signatures)
}

/// Returns those of bcached's own table.
fn own(device: &Device) -> Result<SignatureScan<'_>, Failure> {
    let mut found = SignatureScan { device, signatures: Vec::new() };
    for (kind, class, offset, magic) in table::FIXED {
        found.mark_if(kind, *class, *offset, magic)?;
    }
    places::find(&mut found)?;
    partitions::find(&mut found)?;
    Ok(found)
}

/// Says, as a clause, what `device` holds although no signature was found: its first or last MiB is
/// not all zeroes, and it has no bcache superblock there. `None` if it holds nothing.
///
/// # Errors
/// The device's.
pub fn unknown(device: &Device) -> Result<Option<String>, Failure> {
    if let Some(set) = superblock::erased(device)? {
        let of_set = set.map_or_else(String::new, |set| format!(", of cache set {set}"));
        return Ok(Some(format!(
            "holds a bcache superblock whose magic number was erased{of_set}: the data behind it \
             may still be there"
        )));
    }
    Ok(holds_unknown(device)?.then(|| UNKNOWN_DATA.to_owned()))
}

fn holds_unknown(device: &Device) -> Result<bool, Failure> {
    if !matches!(superblock::read(device)?, superblock::SuperblockProbe::Absent) {
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

/// Says, as a clause, what is on a device without a bcache superblock; `None` if nothing is.
///
/// # Errors
/// As [`find`].
pub fn described(device: &Device) -> Result<Option<String>, Failure> {
    let found = find(device)?;
    if found.is_empty() {
        return Ok(unknown(device)?.map(|holds| format!("it {holds}")));
    }
    let kinds: Vec<_> = found.iter().map(|signature| signature.kind.as_ref()).collect();
    Ok(Some(format!("it carries the signature of {}", kinds.join(", "))))
}

/// The warning about data of unknown kind on a device that is about to be overwritten.
const UNKNOWN_DATA: &str = "holds data of no known kind";

struct SignatureScan<'a> {
    device: &'a Device,
    signatures: Vec<Signature>,
}

impl SignatureScan<'_> {
    fn mark(
        &mut self,
        kind: impl Into<Cow<'static, str>>,
        class: SignatureClass,
        offset: u64,
        length: usize,
    ) {
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
        class: SignatureClass,
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
        class: SignatureClass,
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

    /// Whether some of these bytes belong to a mark that was found already. Large areas that are
    /// only erased together with a mark do not count.
    fn covers(&self, offset: u64, length: usize) -> bool {
        const MARK_MAX: usize = 4096;
        let marks = self.signatures.iter().flat_map(|signature| &signature.marks);
        marks
            .filter(|(_, bytes)| *bytes <= MARK_MAX)
            .any(|(at, bytes)| offset < at + *bytes as u64 && *at < offset + length as u64)
    }
}
