//! The units of the format. A sector is always 512 bytes; only this module converts between sectors
//! and bytes.

use core::cmp::Ordering;
use core::fmt;

/// Bytes in a sector. Every size and address of the format is in sectors unless bytes are named.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes in a word, the unit of the format's `keys` counts.
pub const WORD_BYTES: usize = 8;

/// The page size from which the format's limits were derived (meta area cap, node size steps, block
/// size limit).
pub const PAGE_BYTES: u64 = 4096;

/// Returns the sectors in `bytes`, which must be whole sectors.
#[must_use]
pub const fn sectors_of(bytes: u64) -> u64 {
    debug_assert!(bytes.is_multiple_of(SECTOR_BYTES), "a length in bytes must be whole sectors");
    bytes / SECTOR_BYTES
}

/// Returns the bytes in `sectors`.
#[must_use]
pub const fn bytes_of(sectors: u64) -> u64 {
    sectors * SECTOR_BYTES
}

/// Inode: the number of a volume in the set, and of its slot in the UUID table. Each key carries
/// it. 20 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Inode(pub u32);

impl Inode {
    /// The largest inode a key can hold.
    pub const MAX: Self = Self(0xF_FFFF);
}

impl fmt::Display for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Index of a cache device in its set. Sets made by today's kernels have a single device, whose
/// index is zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceIndex(pub u8);

/// A bucket of a cache device, counted from the start of the device (the superblock's bucket
/// included).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BucketId {
    /// The cache device.
    pub device: DeviceIndex,
    /// Index on that device: sectors `[index * bucket_size, (index + 1) * bucket_size)`.
    pub index: u64,
}

impl fmt::Display for BucketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.device.0, self.index)
    }
}

/// Generation of a bucket, counted modulo 256. A pointer is valid while it carries its bucket's
/// generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Gen(pub u8);

impl Gen {
    /// Returns how far `self` is ahead of `older`, modulo 256. Returns 0 if they are equal, and 0
    /// if `older` is in fact the newer one (which a distance above 128 means).
    #[must_use]
    pub const fn after(self, older: Self) -> u8 {
        let distance = self.0.wrapping_sub(older.0);
        if distance > 128 { 0 } else { distance }
    }

    /// Returns the next generation.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Returns the previous generation.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }
}

/// A position in the key space: inode first, then offset in sectors. A key sorts by the *end* of
/// its extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Position {
    /// Inode of the volume.
    pub inode: Inode,
    /// Sector, 0..=2^63-1.
    pub offset: u64,
}

impl Position {
    /// The start of the key space. As the position of an interior key it marks a freeing key.
    pub const ZERO: Self = Self { inode: Inode(0), offset: 0 };
    /// The largest position; that of the root's key.
    pub const MAX: Self = Self { inode: Inode::MAX, offset: 0x7FFF_FFFF_FFFF_FFFF };

    /// Creates the position `offset` of volume `inode`.
    #[must_use]
    pub const fn new(inode: Inode, offset: u64) -> Self {
        Self { inode, offset }
    }

    /// Returns the position as one number that sorts the same way.
    #[inline]
    const fn rank(self) -> u128 {
        (self.inode.0 as u128) << 64 | self.offset as u128
    }
}

/// By inode, then by offset. Both are compared as one number, so that a search needs no branch.
impl Ord for Position {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for Position {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }

    #[inline]
    fn lt(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }

    #[inline]
    fn le(&self, other: &Self) -> bool {
        self.rank() <= other.rank()
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.inode, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_compare_modulo_256() {
        assert_eq!(Gen(5).after(Gen(5)), 0);
        assert_eq!(Gen(6).after(Gen(5)), 1);
        assert_eq!(Gen(0).after(Gen(255)), 1);
        assert_eq!(Gen(128).after(Gen(0)), 128);
        assert_eq!(Gen(129).after(Gen(0)), 0, "more than 128 behind reads as ahead");
        assert_eq!(Gen(5).after(Gen(6)), 0);
    }

    #[test]
    fn positions_order_by_inode_then_offset() {
        assert!(Position::new(Inode(1), 0) > Position::new(Inode(0), u64::MAX / 2));
        assert!(Position::MAX >= Position::new(Inode::MAX, 1));
    }
}
