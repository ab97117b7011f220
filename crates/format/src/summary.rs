//! The summary in the last blocks of a filled data bucket. It is an extension of bcached: no key
//! points to it, and no kernel looks at it.
//!
//! It lists the extents that were written into the bucket, in the order in which they lie there. To
//! empty the bucket, bcached looks up those extents instead of walking the whole tree. The summary
//! is a hint: only the tree knows what is still in the bucket. If a bucket has no summary, or holds
//! more than its summary lists, bcached walks all keys to empty it.

use crate::checksum::{CHECKSUM_BYTES, checksum};
use crate::identity::SetMagic;
use crate::layout::{Field, Structure};
use crate::units::{Gen, Inode, Position, SECTOR_BYTES};
use alloc::vec::Vec;

const CSUM: Field = Field::new(0, 8, "csum", "standard checksum of bytes 8 .. end of the extents");
const MAGIC: Field = Field::new(8, 8, "magic", "0x8B1D47F2E09C35A6 xor set magic");
const BUCKET: Field = Field::new(16, 8, "bucket", "its index");
const COUNT: Field = Field::new(24, 4, "extents", "how many");
const GENERATION: Field = Field::new(28, 1, "gen", "its generation");
const PAD: Field = Field::new(29, 3, "pad", "0");
const FIRST: Field = Field::new(32, 16, "data", "of each extent u64 first sector, u32 inode, u32 sectors");

/// Layout table of a summary.
pub const STRUCTURE: Structure = Structure {
    name: "Summary of a bucket of data",
    fields: &[CSUM, MAGIC, BUCKET, COUNT, GENERATION, PAD, FIRST],
};

const HEADER_BYTES: usize = FIRST.offset;
const ENTRY_BYTES: usize = FIRST.size;

/// A usual extent, in sectors: the summary has room for a bucket full of extents of this size.
const USUAL_SECTORS: u64 = 8;

/// One extent as it was written into a bucket.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Extent {
    /// Inode of the volume.
    pub inode: Inode,
    /// First sector in the volume.
    pub start: u64,
    /// Length in sectors; not 0.
    pub sectors: u32,
}

impl Extent {
    /// Returns the position of the extent's start; its keys end after that.
    #[must_use]
    pub const fn position(&self) -> Position {
        Position { inode: self.inode, offset: self.start }
    }

    /// Returns the end of the extent, in sectors.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start + self.sectors as u64
    }
}

/// Returns the number of sectors that a summary takes at the end of a bucket of `bucket_sectors`,
/// in whole blocks of `block_sectors`.
#[must_use]
pub fn sectors(bucket_sectors: u64, block_sectors: u64) -> u64 {
    let bytes = HEADER_BYTES as u64 + bucket_sectors / USUAL_SECTORS * ENTRY_BYTES as u64;
    bytes.div_ceil(SECTOR_BYTES).next_multiple_of(block_sectors)
}

/// Returns the number of extents that fit in a summary of `sectors`.
#[must_use]
pub fn extents_in(sectors: u64) -> usize {
    bytes_in(sectors).saturating_sub(HEADER_BYTES) / ENTRY_BYTES
}

/// Returns whether `extents`, read from a summary of `sectors`, are all that was written. A full
/// summary may lack some.
#[must_use]
pub fn says_all(extents: &[Extent], sectors: u64) -> bool {
    extents.len() < extents_in(sectors)
}

fn bytes_in(sectors: u64) -> usize {
    usize::try_from(sectors * SECTOR_BYTES).expect("a bucket fits in memory")
}

/// Builds the summary of `bucket` at `generation`, in `sectors` sectors whose rest is zero.
///
/// # Panics
/// If there are more extents than [`extents_in`] these sectors.
#[must_use]
pub fn summary(sectors: u64, magic: SetMagic, bucket: u64, generation: Gen, extents: &[Extent]) -> Vec<u8> {
    assert!(extents.len() <= extents_in(sectors), "more extents than there is room for");
    let mut bytes = alloc::vec![0; bytes_in(sectors)];
    MAGIC.set_u64(&mut bytes, magic.summary());
    BUCKET.set_u64(&mut bytes, bucket);
    COUNT.set_u32(&mut bytes, u32::try_from(extents.len()).expect("a bucket is small"));
    GENERATION.slice_mut(&mut bytes)[0] = generation.0;
    let (entries, _) = bytes[HEADER_BYTES..].as_chunks_mut::<ENTRY_BYTES>();
    for (entry, extent) in entries.iter_mut().zip(extents) {
        entry[..8].copy_from_slice(&extent.start.to_le_bytes());
        entry[8..12].copy_from_slice(&extent.inode.0.to_le_bytes());
        entry[12..].copy_from_slice(&extent.sectors.to_le_bytes());
    }
    let sum = checksum(&bytes[CHECKSUM_BYTES..HEADER_BYTES + extents.len() * ENTRY_BYTES]);
    CSUM.set_u64(&mut bytes, sum);
    bytes
}

/// Returns the extents of `bucket` if `bytes`, the last ones of it, are its summary at
/// `generation`; `None` for any other bytes.
#[must_use]
pub fn extents(bytes: &[u8], magic: SetMagic, bucket: u64, generation: Gen) -> Option<Vec<Extent>> {
    let header = bytes.get(..HEADER_BYTES)?;
    let count = usize::try_from(COUNT.u32(header)).ok()?;
    let is_it = MAGIC.u64(header) == magic.summary()
        && BUCKET.u64(header) == bucket
        && GENERATION.slice(header)[0] == generation.0;
    let end = count.checked_mul(ENTRY_BYTES)?.checked_add(HEADER_BYTES)?;
    let summed = bytes.get(CHECKSUM_BYTES..end).filter(|_| is_it)?;
    if checksum(summed) != CSUM.u64(header) {
        return None;
    }
    let (entries, _) = bytes[HEADER_BYTES..end].as_chunks::<ENTRY_BYTES>();
    entries.iter().map(extent).collect()
}

/// Parses one extent; `None` if no key could describe it.
fn extent(entry: &[u8; ENTRY_BYTES]) -> Option<Extent> {
    let start = u64::from_le_bytes(entry[..8].try_into().ok()?);
    let inode = Inode(u32::from_le_bytes(entry[8..12].try_into().ok()?));
    let sectors = u32::from_le_bytes(entry[12..].try_into().ok()?);
    let is_sound = sectors > 0 && inode <= Inode::MAX && start.checked_add(u64::from(sectors)).is_some();
    is_sound.then_some(Extent { inode, start, sectors })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Uuid;

    fn some() -> Vec<Extent> {
        (0..40_u32)
            .map(|n| Extent { inode: Inode(3), start: u64::from(n) * 1000, sectors: 8 + (n & 7) })
            .collect()
    }

    #[test]
    fn a_summary_is_of_one_set_bucket_and_generation() {
        let (set, other) = (SetMagic::of(Uuid([7; 16])), SetMagic::of(Uuid([8; 16])));
        let bytes = summary(8, set, 77, Gen(250), &some());
        assert_eq!(bytes.len(), 4096);
        assert_eq!(extents(&bytes, set, 77, Gen(250)), Some(some()));
        assert_eq!(extents(&bytes, other, 77, Gen(250)), None);
        assert_eq!(extents(&bytes, set, 78, Gen(250)), None);
        assert_eq!(extents(&bytes, set, 77, Gen(251)), None, "the bucket has been used since");
    }

    #[test]
    fn torn_and_foreign_bytes_are_none() {
        let set = SetMagic::of(Uuid([7; 16]));
        let bytes = summary(8, set, 77, Gen(250), &some());
        for byte in (0..29).chain(HEADER_BYTES..HEADER_BYTES + 40 * ENTRY_BYTES) {
            let mut torn = bytes.clone();
            torn[byte] ^= 1;
            assert_eq!(extents(&torn, set, 77, Gen(250)), None, "byte {byte}");
        }
        for length in 0..HEADER_BYTES + 40 * ENTRY_BYTES {
            assert_eq!(extents(&bytes[..length], set, 77, Gen(250)), None, "{length} bytes");
        }
        let impossible = [
            Extent { inode: Inode(3), start: 0, sectors: 0 },
            Extent { inode: Inode(3), start: u64::MAX, sectors: 8 },
            Extent { inode: Inode(u32::MAX), start: 0, sectors: 8 },
        ];
        for extent in impossible {
            let sealed = summary(8, set, 77, Gen(250), &[extent]);
            assert_eq!(extents(&sealed, set, 77, Gen(250)), None, "{extent:?}");
        }
    }

    #[test]
    fn there_is_room_for_all_extents_of_the_usual_size() {
        for (bucket, block) in [(1024, 8), (1024, 1), (4096, 8), (128, 8), (65_536, 16)] {
            let taken = sectors(bucket, block);
            assert_eq!(taken % block, 0);
            let usual = usize::try_from(bucket / 8).expect("small");
            assert!(extents_in(taken) >= usual, "{bucket}, {block}");
        }
        assert_eq!(sectors(1024, 8), 8);
    }
}
