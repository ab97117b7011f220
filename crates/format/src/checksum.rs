//! Computes the one checksum of the format: CRC-64/WE (polynomial `0x42F0E1EBA9EA3693`, not
//! reflected, final XOR all ones).
//!
//! It is always stored in the first eight bytes of a structure and covers the bytes from the ninth
//! on. There are two forms. The standard one starts from all ones. The sets of a B-tree node start
//! from the pointer of the node's own key, so that a node read from the wrong place, or of the
//! wrong generation, fails its check.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a checksum field; the summed bytes start after it.
pub const CHECKSUM_BYTES: usize = 8;

/// Returns the checksum of `bytes` in the standard form.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64We, bytes)
}

/// Returns the checksum of `bytes` in the form of a B-tree set of version 1: `seed` is the pointer
/// word of the node's own key.
#[must_use]
pub fn checksum_seeded(seed: u64, bytes: &[u8]) -> u64 {
    let mut sum = Checksum::seeded(seed);
    sum.add(bytes);
    sum.value()
}

/// Computes either form in pieces, so that a task that sums many bytes can yield to others in
/// between.
#[derive(Clone, Debug)]
pub struct Checksum(Digest);

impl Default for Checksum {
    /// Starts a sum in the standard form.
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64We))
    }
}

impl Checksum {
    /// Starts a sum in the form of a B-tree set: see [`checksum_seeded`].
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc64We, seed))
    }

    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes added.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc::{CRC_64_WE, Crc};
    use proptest::prelude::*;

    const CHECK_INPUT: &[u8] = b"123456789";

    #[test]
    fn values_of_the_format_document() {
        assert_eq!(checksum(CHECK_INPUT), 0x62EC_59E3_F1A4_F00A);
        assert_eq!(!checksum_seeded(0, CHECK_INPUT), 0x6C40_DF5F_0B49_7347, "start 0, without the final XOR");
    }

    #[test]
    fn table_entries_of_the_format_document() {
        // Entry i of a byte-wise table is the state after one byte i from state 0.
        for (byte, entry) in
            [(1, 0x42F0_E1EB_A9EA_3693), (2, 0x85E1_C3D7_53D4_6D26), (255, 0x9AFC_E626_CE85_B507)]
        {
            assert_eq!(!checksum_seeded(0, &[byte]), entry);
        }
    }

    #[test]
    fn seeded_sum_of_the_first_set_of_the_worked_example() {
        // An empty first set under pointer 0x900001.
        let from_offset_8 = [
            0x3f, 0xbf, 0x89, 0xf7, 0x47, 0xb3, 0x53, 0x67, 0x1b, 0x7f, 0x4a, 0x0d, 0xe3, 0x52, 0x75, 0x9e,
            1, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(checksum_seeded(0x0090_0001, &from_offset_8), 0x6D3C_2031_3D17_81B1);
    }

    proptest! {
        /// Proves that two implementations without shared code agree, for every length around the
        /// block sizes of the wide kernels.
        #[test]
        fn agrees_with_a_second_implementation(
            bytes in proptest::collection::vec(any::<u8>(), 0..2048), seed in any::<u64>(),
        ) {
            let oracle = Crc::<u64>::new(&CRC_64_WE);
            prop_assert_eq!(checksum(&bytes), oracle.checksum(&bytes));
            let mut digest = oracle.digest_with_initial(seed);
            digest.update(&bytes);
            prop_assert_eq!(checksum_seeded(seed, &bytes), digest.finalize());
        }
    }
}
