//! The units of the format. A sector is always 512 bytes; conversions between sectors and bytes live here only.

use core::cmp::Ordering;
use core::fmt;

/// Bytes in a sector. Every size and address of the format is in sectors unless bytes are named.
pub const SECTOR_BYTES: u64 = 512;

/// Bytes in a word, the unit of the format's `keys` counts.
pub const WORD_BYTES: usize = 8;

/// The page size that the format's limits were derived from (meta area cap, node size steps, block size limit).
pub const PAGE_BYTES: u64 = 4096;

/// Sectors in `bytes`, which must be whole sectors.
#[must_use]
pub const fn sectors_of(bytes: u64) -> u64 {
    debug_assert!(bytes.is_multiple_of(SECTOR_BYTES), "a length in bytes must be whole sectors");
    bytes / SECTOR_BYTES
}

/// Bytes in `sectors`.
#[must_use]
pub const fn bytes_of(sectors: u64) -> u64 {
    sectors * SECTOR_BYTES
}

/// Number of a slot in the UUID table: which volume a key belongs to. 20 bits.
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

/// Which cache device of a set. Sets made by today's kernels have exactly one, number 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceIndex(pub u8);

/// A bucket of a cache device, counted from the start of the device (the superblock's bucket included).
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

/// Generation of a bucket, counted modulo 256. A pointer is valid while it carries its bucket's generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Gen(pub u8);

impl Gen {
    /// How far `self` is after `older`, modulo 256: 0 when equal, and 0 when `older` is really the newer one
    /// (a distance above 128 is taken as "ahead").
    #[must_use]
    pub const fn after(self, older: Self) -> u8 {
        let distance = self.0.wrapping_sub(older.0);
        if distance > 128 { 0 } else { distance }
    }

    /// The next generation.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The generation before.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }
}

/// A place in the key space: inode first, then offset in sectors. A key stands at the *end* of its extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Position {
    /// The volume.
    pub inode: Inode,
    /// Sector, 0..=2^63-1.
    pub offset: u64,
}

impl Position {
    /// The start of the key space. As the position of an interior key it marks a freeing key.
    pub const ZERO: Self = Self { inode: Inode(0), offset: 0 };
    /// The largest position; the root's own.
    pub const MAX: Self = Self { inode: Inode::MAX, offset: 0x7FFF_FFFF_FFFF_FFFF };

    /// The position `offset` of volume `inode`.
    #[must_use]
    pub const fn new(inode: Inode, offset: u64) -> Self {
        Self { inode, offset }
    }

    /// One number in the same order.
    #[inline]
    const fn rank(self) -> u128 {
        (self.inode.0 as u128) << 64 | self.offset as u128
    }
}

/// By inode, then by offset: as one number, which a search compares without a branch.
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
