//! The stamp in the first block of a bucket of the reserve. It is an extension of bcached; no
//! kernel looks at it.
//!
//! A stamp says that nothing points into the bucket at this generation. Any user of the bucket
//! overwrites its first block before something durable names the bucket. So a stamp with the
//! generation that the priorities give to the bucket is conclusive: at start-up the bucket may be
//! handed out before the tree has been read. The priority chain says which buckets to look at
//! ([`PRIO_RESERVE`](crate::prio::PRIO_RESERVE)), if the newest journal entry vouches for the
//! chain.

use crate::checksum::{CHECKSUM_BYTES, checksum};
use crate::identity::SetMagic;
use crate::layout::{Field, Structure};
use crate::units::Gen;
use alloc::vec::Vec;

const CSUM: Field = Field::new(0, 8, "csum", "standard checksum of bytes 8 .. 25");
const MAGIC: Field = Field::new(8, 8, "magic", "0x3C5DE4B11F9A6E87 xor set magic");
const BUCKET: Field = Field::new(16, 8, "bucket", "its index");
const GENERATION: Field = Field::new(24, 1, "gen", "its generation");

/// Layout table of a stamp.
pub const STRUCTURE: Structure =
    Structure { name: "Stamp of a bucket of the reserve", fields: &[CSUM, MAGIC, BUCKET, GENERATION] };

const STAMP_BYTES: usize = GENERATION.end();

/// Builds the stamp of `bucket` at `generation`, in a block of `block_bytes` whose rest is zero.
///
/// # Panics
/// If the block is shorter than a stamp.
#[must_use]
pub fn stamp(block_bytes: usize, magic: SetMagic, bucket: u64, generation: Gen) -> Vec<u8> {
    let mut bytes = alloc::vec![0; block_bytes];
    MAGIC.set_u64(&mut bytes, magic.stamp());
    BUCKET.set_u64(&mut bytes, bucket);
    GENERATION.slice_mut(&mut bytes)[0] = generation.0;
    let sum = checksum(&bytes[CHECKSUM_BYTES..STAMP_BYTES]);
    CSUM.set_u64(&mut bytes, sum);
    bytes
}

/// Returns whether `block`, the first one of `bucket`, holds its stamp for `generation`.
#[must_use]
pub fn is_stamped(block: &[u8], magic: SetMagic, bucket: u64, generation: Gen) -> bool {
    let found = block.get(..STAMP_BYTES);
    found.is_some_and(|found| found == &stamp(STAMP_BYTES, magic, bucket, generation)[..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Uuid;

    #[test]
    fn a_stamp_is_of_one_set_bucket_and_generation() {
        let (set, other) = (SetMagic::of(Uuid([7; 16])), SetMagic::of(Uuid([8; 16])));
        let bytes = stamp(4096, set, 77, Gen(250));
        assert_eq!(bytes.len(), 4096);
        assert!(is_stamped(&bytes, set, 77, Gen(250)));
        assert!(!is_stamped(&bytes, other, 77, Gen(250)) && !is_stamped(&bytes, set, 78, Gen(250)));
        assert!(!is_stamped(&bytes, set, 77, Gen(251)), "the bucket has been used since");
        for byte in 0..STAMP_BYTES {
            let mut torn = bytes.clone();
            torn[byte] ^= 1;
            assert!(!is_stamped(&torn, set, 77, Gen(250)), "byte {byte}");
        }
        assert!(!is_stamped(&[], set, 0, Gen(0)) && !is_stamped(&[0; 512], set, 0, Gen(0)));
    }
}
