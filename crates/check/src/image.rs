//! The devices that a check reads from: a file, a block device, or memory. Nothing here writes.

use bcached_format::SECTOR_BYTES;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// A device or an image of one.
pub trait ReadAt {
    /// Reads from `sector` on, and fills `buffer`.
    ///
    /// # Errors
    /// If not all of it can be read.
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Returns the length in whole sectors.
    fn sectors(&self) -> u64;
}

impl ReadAt for File {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        self.read_exact_at(buffer, offset)
    }

    fn sectors(&self) -> u64 {
        // A block device has no length in its metadata. Reads name their offset, so moving the
        // cursor is harmless.
        let mut cursor = self;
        cursor.seek(SeekFrom::End(0)).unwrap_or(0) / SECTOR_BYTES
    }
}

impl ReadAt for &[u8] {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        let offset = sector.checked_mul(SECTOR_BYTES).and_then(|offset| usize::try_from(offset).ok());
        let offset = offset.ok_or(io::ErrorKind::InvalidInput)?;
        let end = offset.checked_add(buffer.len()).ok_or(io::ErrorKind::InvalidInput)?;
        buffer.copy_from_slice(self.get(offset..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn sectors(&self) -> u64 {
        self.len() as u64 / SECTOR_BYTES
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, sector: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(sector, buffer)
    }

    fn sectors(&self) -> u64 {
        self.as_slice().sectors()
    }
}
