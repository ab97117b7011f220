//! Inspects a note without opening it for use, which would repair or replace a damaged one. Answers
//! yes where it cannot tell.

use super::{APPENDED, FORGOTTEN, GIVEN_UP, HEADER_WORDS, NoteContents, NoteIdentity, inspect, read_words};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

/// Returns whether the note at `path` may hold records for `identity`. It does not if it is empty
/// or void.
#[must_use]
pub fn may_hold_records(path: &Path, identity: &NoteIdentity) -> bool {
    NoteHeader::at(path).is_none_or(|seen| seen.may_hold_records(identity))
}

/// Returns whether the note at `path` may hold anything for `identity`: records, or records that
/// were given up. An empty file counts as well: a note has a length, so something has truncated it.
#[must_use]
pub fn may_hold_anything(path: &Path, identity: &NoteIdentity) -> bool {
    NoteHeader::at(path).is_none_or(|seen| {
        seen.length == 0 || seen.may_hold_records(identity) || seen.header[GIVEN_UP..GIVEN_UP + 3] != [0; 3]
    })
}

/// What can be seen of a note without opening it for use.
struct NoteHeader {
    header: [u64; HEADER_WORDS],
    /// In bytes.
    length: u64,
}

impl NoteHeader {
    /// Returns `None` if it cannot be read or is not a file.
    fn at(path: &Path) -> Option<Self> {
        // Opening a FIFO would block otherwise.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file: File = rustix::fs::open(path, flags, Mode::empty()).ok()?.into();
        let stat = rustix::fs::fstat(&file).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        let length = u64::try_from(stat.st_size).ok()?;
        Some(Self { header: header(&file).ok()?, length })
    }

    fn may_hold_records(&self, identity: &NoteIdentity) -> bool {
        match inspect(&self.header, self.length, identity) {
            Ok(_) => self.header[APPENDED] != self.header[FORGOTTEN],
            Err(NoteContents::Damaged { .. }) => true,
            Err(_) => false,
        }
    }
}

/// Reads the page before the first record.
pub(super) fn header(file: &File) -> Result<[u64; HEADER_WORDS], Errno> {
    read_words(file, 0)
}
