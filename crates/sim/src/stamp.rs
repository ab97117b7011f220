//! Stamps what the simulated clients write: every sector names itself, so that one sector read
//! alone shows which write it came from, whether it is in the right place, and whether it is whole.
//!
//! A stamped sector is one 16-byte record, repeated 32 times:
//!
//! ```text
//! bytes 0..8    number of the write, little endian (0: the content the volume was born with)
//! bytes 8..16   volume (upper 16 bits) and sector (lower 48), exclusive-or MAGIC
//! ```
//!
//! Records that differ within a sector mean that it was torn inside, which no simulated device ever
//! does.

use std::fmt;

/// Bytes per sector.
pub const SECTOR: usize = 512;

/// Bytes per record.
const RECORD: usize = 16;

/// Distinguishes a stamp from zeroes and from small integers.
const MAGIC: u64 = 0x5349_4d53_5441_4d50;

/// The content of one sector.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SectorValue {
    /// All zeroes: never written, zeroed or discarded.
    Zero,
    /// The data of the write with this number; 0 is the initial content of the volume.
    Written(u64),
}

impl fmt::Display for SectorValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => write!(f, "zeroes"),
            Self::Written(0) => write!(f, "its first content"),
            Self::Written(number) => write!(f, "write {number}"),
        }
    }
}

/// Why the content of a sector is not a value for its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StampError {
    /// The records within the sector differ.
    #[error("a torn sector")]
    Torn,
    /// A whole stamp that belongs to another place.
    #[error("data of volume {volume} sector {sector} (write {number})")]
    Misplaced {
        /// Volume it was written to.
        volume: u32,
        /// Sector it was written to.
        sector: u64,
        /// Number of its write.
        number: u64,
    },
}

fn place(volume: u32, sector: u64) -> u64 {
    assert!(volume < 1 << 16, "a volume number fits 16 bits");
    assert!(sector < 1 << 48, "a sector number fits 48 bits");
    (u64::from(volume) << 48 | sector) ^ MAGIC
}

/// Fills `bytes` (whole sectors) with the stamps of write `number` from `sector` of `volume` on.
pub fn fill(bytes: &mut [u8], volume: u32, sector: u64, number: u64) {
    assert!(bytes.len().is_multiple_of(SECTOR), "stamps fill whole sectors");
    for (index, sector_bytes) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        let place = place(volume, sector + index as u64);
        for record in sector_bytes.chunks_exact_mut(RECORD) {
            record[..8].copy_from_slice(&number.to_le_bytes());
            record[8..].copy_from_slice(&place.to_le_bytes());
        }
    }
}

/// Parses the 512 `bytes` read from `sector` of `volume`.
///
/// # Errors
/// If they are neither zeroes nor a whole stamp of that place.
pub fn parse(bytes: &[u8], volume: u32, sector: u64) -> Result<SectorValue, StampError> {
    assert_eq!(bytes.len(), SECTOR, "one sector");
    let (first, rest) = bytes.split_at(RECORD);
    if rest.chunks_exact(RECORD).any(|record| record != first) {
        return Err(StampError::Torn);
    }
    let word = |at: usize| u64::from_le_bytes(first[at..at + 8].try_into().expect("eight bytes"));
    let (number, found) = (word(0), word(8));
    if number == 0 && found == 0 {
        return Ok(SectorValue::Zero);
    }
    if found == place(volume, sector) {
        return Ok(SectorValue::Written(number));
    }
    let found = found ^ MAGIC;
    let volume = u32::try_from(found >> 48).expect("16 bits");
    Err(StampError::Misplaced { volume, sector: found & ((1 << 48) - 1), number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_names_its_write_and_place() {
        let mut bytes = vec![0; 3 * SECTOR];
        fill(&mut bytes, 2, 100, 77);
        assert_eq!(parse(&bytes[SECTOR..2 * SECTOR], 2, 101), Ok(SectorValue::Written(77)));
        let wrong = StampError::Misplaced { volume: 2, sector: 102, number: 77 };
        assert_eq!(parse(&bytes[2 * SECTOR..], 2, 101), Err(wrong));
        assert_eq!(parse(&[0; SECTOR], 2, 101), Ok(SectorValue::Zero));
    }

    #[test]
    fn a_tear_inside_a_sector_is_seen() {
        let mut new = vec![0; SECTOR];
        let mut old = vec![0; SECTOR];
        fill(&mut new, 0, 5, 2);
        fill(&mut old, 0, 5, 1);
        new[256..].copy_from_slice(&old[256..]);
        assert_eq!(parse(&new, 0, 5), Err(StampError::Torn));
        old[511] ^= 1;
        assert_eq!(parse(&old, 0, 5), Err(StampError::Torn));
    }
}
