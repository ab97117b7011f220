//! The content of a written sector: its stamp, and a filling derived from it.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | sector number in the volume |
//! | 8..16 | sequence number of the write |
//! | 16..24 | volume |
//! | 24..512 | numbers generated from the three above |
//!
//! All integers are little-endian. A sector of zeroes was never written (images start as holes).

use super::Random;

/// Size of a sector, the unit of this module.
pub const SECTOR_BYTES: usize = 512;

/// The identity that a sector carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The sector to which it was written.
    pub sector: u64,
    /// The sequence number of the write.
    pub sequence: u64,
    /// The volume to which it was written.
    pub volume: u64,
}

/// What a sector was found to contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Zeroes.
    Blank,
    /// Written completely by one of our writes.
    Written(Stamp),
    /// Neither: damaged, or foreign data. The stamp is what its first bytes claim.
    Junk(Stamp),
}

impl Stamp {
    /// Fills one sector.
    ///
    /// # Panics
    /// If `sector_bytes` is not one sector long.
    pub fn fill(&self, sector_bytes: &mut [u8]) {
        assert_eq!(sector_bytes.len(), SECTOR_BYTES);
        let name = [self.sector, self.sequence, self.volume];
        let mut random =
            Random::new(self.sector ^ self.sequence.rotate_left(24) ^ self.volume.rotate_left(48));
        let words = name.into_iter().chain(std::iter::repeat_with(|| random.next()));
        for (bytes, word) in sector_bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Identifies the content of one sector.
///
/// # Panics
/// If `sector_bytes` is not one sector long.
#[must_use]
pub fn identify(sector_bytes: &[u8]) -> Seen {
    assert_eq!(sector_bytes.len(), SECTOR_BYTES);
    if sector_bytes.iter().all(|byte| *byte == 0) {
        return Seen::Blank;
    }
    let word = |at: usize| u64::from_le_bytes(sector_bytes[at..at + 8].try_into().expect("eight bytes"));
    let stamp = Stamp { sector: word(0), sequence: word(8), volume: word(16) };
    let mut expected = [0; SECTOR_BYTES];
    stamp.fill(&mut expected);
    if expected == sector_bytes { Seen::Written(stamp) } else { Seen::Junk(stamp) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_names_itself_and_one_flipped_bit_is_seen() {
        let stamp = Stamp { sector: 5, sequence: 77, volume: 2 };
        let mut bytes = [0; SECTOR_BYTES];
        assert_eq!(identify(&bytes), Seen::Blank);
        stamp.fill(&mut bytes);
        assert_eq!(identify(&bytes), Seen::Written(stamp));
        bytes[300] ^= 0x10;
        assert_eq!(identify(&bytes), Seen::Junk(stamp));
    }
}
