//! Partition tables. The boot sector of a file system has the mark of one, too.

use super::{SignatureClass, SignatureScan};
use crate::device;
use bcached_control::failure::Failure;

use SignatureClass::Content;

const BOOT_MARK_AT: u64 = 510;

/// Finds all of them, after the file systems.
pub(super) fn find(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    let sector = device::read(found.device, 0, 512)?;
    gpt(found)?;
    mac(found, &sector)?;
    sun(found, &sector);
    atari(found, &sector);
    boot_mark(found, &sector);
    Ok(())
}

/// Finds the first header and the second one, which is at the end, or where the end was when the
/// table was written.
fn gpt(found: &mut SignatureScan<'_>) -> Result<(), Failure> {
    const MAGIC: &[u8] = b"EFI PART";
    const OTHER: usize = 32;
    let end = device::length(found.device);
    for block in [512, 4096] {
        let header = device::read(found.device, block, 512)?;
        if header.starts_with(MAGIC) {
            found.mark("gpt", Content, block, MAGIC.len());
            let other = header.get(OTHER..OTHER + 8).and_then(|bytes| bytes.try_into().ok());
            let other = other.map(u64::from_le_bytes).and_then(|other| other.checked_mul(block));
            if let Some(other) = other.filter(|other| *other > block && *other < end && *other != end - block)
            {
                found.mark_if("gpt", Content, other, MAGIC)?;
            }
        }
        if end > 2 * block {
            found.mark_if("gpt", Content, end - block, MAGIC)?;
        }
    }
    Ok(())
}

/// The block of the driver descriptor has the block size; the map begins in the next block.
fn mac(found: &mut SignatureScan<'_>, sector: &[u8]) -> Result<(), Failure> {
    if !sector.starts_with(b"ER") {
        return Ok(());
    }
    let block = u64::from(u16::from_be_bytes([sector[2], sector[3]]));
    let entry = device::read(found.device, if block == 0 { 512 } else { block }, 2)?;
    if entry == b"PM" || entry == b"TS" {
        found.mark("mac", Content, 0, 2);
    }
    Ok(())
}

/// Two bytes, and a checksum over the sector.
fn sun(found: &mut SignatureScan<'_>, sector: &[u8]) {
    const MARK: usize = 508;
    let sum = sector.chunks_exact(2).fold(0, |sum, word| sum ^ u16::from_be_bytes([word[0], word[1]]));
    if sector.get(MARK..MARK + 2) == Some(&[0xDA, 0xBE]) && sum == 0 {
        found.mark("sun", Content, MARK as u64, 2);
    }
}

/// There is no mark: only the size of the disk, and partitions with a flag and a name of three
/// letters that lie within the disk.
fn atari(found: &mut SignatureScan<'_>, sector: &[u8]) {
    const SIZE: usize = 0x1C2;
    const FIRST: usize = 0x1C6;
    const ENTRY: usize = 12;
    const KINDS: [&[u8; 3]; 6] = [b"GEM", b"BGM", b"LNX", b"SWP", b"RAW", b"XGM"];
    let word = |at: usize| sector.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes).map(u64::from);
    let sectors = found.device.info().sectors;
    let Some(size) = word(SIZE).filter(|size| *size > 0 && *size <= sectors) else { return };
    for at in (0..4).map(|entry| FIRST + entry * ENTRY) {
        let (Some(start), Some(length)) = (word(at + 4), word(at + 8)) else { return };
        let is_named = KINDS.iter().any(|kind| sector[at + 1..at + 4] == kind[..]);
        if sector[at] & 1 == 1 && is_named && start > 0 && length > 0 && start + length <= size {
            found.mark("atari", Content, at as u64, 4);
        }
    }
}

/// The mark of a boot sector: with a GPT it belongs to its protective table, with some file systems
/// to their boot sector. Alone it is that of a table with four entries.
fn boot_mark(found: &mut SignatureScan<'_>, sector: &[u8]) {
    if sector.get(510..512) != Some(&[0x55, 0xAA]) {
        return;
    }
    let owner = ["gpt", "vfat", "ntfs", "exfat", "BitLocker"]
        .into_iter()
        .find(|kind| found.has_any(&[kind]))
        .unwrap_or("dos");
    found.mark(owner, Content, BOOT_MARK_AT, 2);
}
