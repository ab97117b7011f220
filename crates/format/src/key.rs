//! Keys and pointers (bkey). A key names an extent by its **end**; its pointers name the extent's
//! **start** on the cache device. On disk: a header word, the end offset, and up to six pointer
//! words.
//!
//! Header word: bits 0-19 inode, 20-35 size, 36 dirty, 56-57 csum (always zero), 60-62 pointer
//! count, 63 set. Pointer word: bits 0-7 generation, 8-50 sector, 51-62 device, 63 set only in
//! check pointers.

use crate::units::{DeviceIndex, Gen, Inode, Position};

/// Largest number of pointers that bcached supports in a key. The format allows up to six, but
/// kernels have always written zero or one; two leave room for mirrored dirty data. The parser
/// refuses a key with more.
pub const MAX_POINTERS: usize = 2;

const SIZE_SHIFT: u32 = 20;
const DIRTY_BIT: u64 = 1 << 36;
const COUNT_SHIFT: u32 = 60;
const HIGH_BIT: u64 = 1 << 63;
const INODE_MASK: u64 = 0xF_FFFF;
const SIZE_MASK: u64 = 0xFFFF;
const POINTER_SECTOR_MASK: u64 = (1 << 43) - 1;
const CHECK_DEVICE: u64 = 0xFFF;

/// Largest size of a key, in sectors.
pub const MAX_KEY_SECTORS: u64 = 0xFFFF;

/// One pointer word: where an extent's data starts on a cache device, and the generation of the
/// bucket it was made for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Pointer(u64);

impl Pointer {
    /// Creates a pointer to `sector` (below 2^43) of `device`, made for generation `generation` of
    /// the bucket there.
    #[must_use]
    pub const fn new(device: DeviceIndex, sector: u64, generation: Gen) -> Self {
        assert!(sector <= POINTER_SECTOR_MASK, "a pointer's sector has 43 bits");
        Self(((device.0 as u64) << 51) | (sector << 8) | generation.0 as u64)
    }

    /// Returns the word as stored. It also seeds the checksum of a B-tree node's sets.
    #[must_use]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Creates a pointer from its stored word. Any word is accepted; the user of the pointer checks
    /// whether it makes sense.
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns the first sector of the extent on the device.
    #[must_use]
    pub const fn sector(self) -> u64 {
        (self.0 >> 8) & POINTER_SECTOR_MASK
    }

    /// Returns the bucket generation that the pointer was made for.
    #[must_use]
    pub const fn generation(self) -> Gen {
        Gen((self.0 & 0xFF) as u8)
    }

    /// Returns the raw device number, 0..=0xFFF.
    #[must_use]
    pub const fn device_number(self) -> u16 {
        ((self.0 >> 51) & 0xFFF) as u16
    }

    /// Returns the cache device. The result is meaningful only if this is not a check pointer.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a set has at most eight devices; checked by the parser"
    )]
    pub const fn device(self) -> DeviceIndex {
        DeviceIndex(self.device_number() as u8)
    }

    /// Returns true for a check pointer: a placeholder left by a kernel's cache-miss read. It has
    /// no data; the key is a hole.
    #[must_use]
    pub const fn is_check(self) -> bool {
        (self.0 >> 51) & 0xFFF == CHECK_DEVICE
    }

    /// Returns the pointer moved forward by `sectors`, as is needed when the front of an extent is
    /// cut off. A check pointer points nowhere and is returned unchanged.
    #[must_use]
    pub const fn advanced(self, sectors: u64) -> Self {
        if self.is_check() {
            return self;
        }
        let sector = self.sector().wrapping_add(sectors) & POINTER_SECTOR_MASK;
        Self((self.0 & !(POINTER_SECTOR_MASK << 8)) | (sector << 8))
    }

    /// Returns a pointer to the same sector with another generation.
    #[must_use]
    pub const fn with_generation(self, generation: Gen) -> Self {
        Self((self.0 & !0xFF) | generation.0 as u64)
    }
}

impl core::fmt::Debug for Pointer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.is_check() {
            return write!(f, "check:{:x}", self.0);
        }
        write!(f, "{}:{} gen {}", self.device_number(), self.sector(), self.generation().0)
    }
}

/// The pointers of a key: a short inline list that is copied with the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Pointers {
    words: [Pointer; MAX_POINTERS],
    count: u8,
}

impl Pointers {
    /// No pointer: an explicit hole.
    pub const NONE: Self = Self { words: [Pointer(0); MAX_POINTERS], count: 0 };

    /// Creates a list of one pointer.
    #[must_use]
    pub const fn one(pointer: Pointer) -> Self {
        let mut words = [Pointer(0); MAX_POINTERS];
        words[0] = pointer;
        Self { words, count: 1 }
    }

    /// Creates a list from a slice; `None` if it has more than [`MAX_POINTERS`] pointers.
    #[must_use]
    pub fn from_slice(list: &[Pointer]) -> Option<Self> {
        let mut pointers = Self::NONE;
        pointers.words.get_mut(..list.len())?.copy_from_slice(list);
        pointers.count = u8::try_from(list.len()).ok()?;
        Some(pointers)
    }

    /// Returns the number of pointers.
    #[must_use]
    #[inline]
    pub const fn count(&self) -> usize {
        self.count as usize
    }

    /// Returns the pointers as a slice, in stored order.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[Pointer] {
        &self.words[..usize::from(self.count)]
    }

    /// Returns all pointers moved forward by `sectors`.
    #[must_use]
    #[inline]
    pub fn advanced(self, sectors: u64) -> Self {
        // Usually a key begins exactly where the lookup asked, so nothing moves.
        if sectors == 0 { self } else { self.moved(sectors) }
    }

    fn moved(mut self, sectors: u64) -> Self {
        for pointer in &mut self.words[..usize::from(self.count)] {
            *pointer = pointer.advanced(sectors);
        }
        self
    }
}

impl core::fmt::Debug for Pointers {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// A key: an extent of a volume, or a child in an interior node.
///
/// Covers the sectors `[start(), end)` of volume `inode`. For a backing device these are absolute
/// sectors of the device, counted from its start and not from its data offset.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Key {
    /// Inode of the volume.
    pub inode: Inode,
    /// Sectors covered, 0..=65535. Zero: a leftover without meaning.
    pub size: u16,
    /// Whether the data may be missing on the backing device.
    pub dirty: bool,
    /// End of the extent in sectors, exclusive.
    pub end: u64,
    /// Where the data is. No pointers: an explicit hole.
    pub pointers: Pointers,
}

impl Key {
    /// Returns the first sector covered. Valid only when `size <= end`. That holds for the keys of
    /// a journal and for checked leaf keys, but not for child keys, whose size is that of the node.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.end - self.size as u64
    }

    /// Returns the number of sectors covered, as a `u64`.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.size as u64
    }

    /// Returns the position by which the key sorts: `(inode, end)`.
    #[must_use]
    pub const fn position(&self) -> Position {
        Position { inode: self.inode, offset: self.end }
    }

    /// Returns the position of the key's start.
    #[must_use]
    pub const fn start_position(&self) -> Position {
        Position { inode: self.inode, offset: self.start() }
    }

    /// Returns the number of words the key takes on disk.
    #[must_use]
    #[inline]
    pub const fn words(&self) -> usize {
        2 + self.pointers.count()
    }

    /// Creates a key without pointers over `[start, end)`. It voids whatever older keys map there.
    ///
    /// # Panics
    /// If the range is longer than [`MAX_KEY_SECTORS`].
    #[must_use]
    pub fn hole(inode: Inode, start: u64, end: u64) -> Self {
        let size = u16::try_from(end - start).expect("a hole is cut to the size of a key by its caller");
        Self { inode, size, dirty: false, end, pointers: Pointers::NONE }
    }

    /// Returns the part of the key that lies in `[start, end)`, with its pointers advanced; `None`
    /// if no part does.
    #[inline]
    #[must_use]
    pub fn cut(&self, start: u64, end: u64) -> Option<Self> {
        let is_whole = start <= self.start() && self.end <= end && self.size > 0;
        if is_whole { Some(*self) } else { self.part(start, end) }
    }

    fn part(&self, start: u64, end: u64) -> Option<Self> {
        let from = self.start().max(start);
        let to = self.end.min(end);
        if from >= to {
            return None;
        }
        let size = u16::try_from(to - from).expect("a part is not longer than the whole");
        Some(Self { size, end: to, pointers: self.pointers.advanced(from - self.start()), ..*self })
    }

    /// Returns the header word as stored. Kernels always set bit 63.
    #[must_use]
    pub fn header_word(&self) -> u64 {
        HIGH_BIT
            | (self.pointers.as_slice().len() as u64) << COUNT_SHIFT
            | if self.dirty { DIRTY_BIT } else { 0 }
            | u64::from(self.size) << SIZE_SHIFT
            | u64::from(self.inode.0) & INODE_MASK
    }

    /// Returns the pointer count in a header word, 0..=7.
    #[must_use]
    pub const fn pointer_count_of(header: u64) -> usize {
        ((header >> COUNT_SHIFT) & 7) as usize
    }

    /// Creates a key from its header word, end offset and pointers, without checks.
    #[must_use]
    pub const fn from_words(header: u64, end: u64, pointers: Pointers) -> Self {
        Self {
            inode: Inode((header & INODE_MASK) as u32),
            size: ((header >> SIZE_SHIFT) & SIZE_MASK) as u16,
            dirty: header & DIRTY_BIT != 0,
            end,
            pointers,
        }
    }
}

impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "{}:[{},{}){}{:?}",
            self.inode,
            self.end.saturating_sub(u64::from(self.size)),
            self.end,
            if self.dirty { " dirty " } else { " " },
            self.pointers
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_of_the_format_document_example() {
        // on-disk format, 20.3: `9000001030800000 330 bc1801` is 0:[40,816) dirty at sector 48152,
        // generation 1.
        let pointers = Pointers::one(Pointer::from_word(0xbc_1801));
        let key = Key::from_words(0x9000_0010_3080_0000, 0x330, pointers);
        assert_eq!((key.inode, key.start(), key.end, key.dirty), (Inode(0), 40, 816, true));
        assert_eq!(key.pointers.as_slice()[0].sector(), 48152);
        assert_eq!(key.pointers.as_slice()[0].generation(), Gen(1));
        assert_eq!(key.header_word(), 0x9000_0010_3080_0000);
    }

    #[test]
    fn cutting_the_front_advances_pointers_and_cutting_the_back_does_not() {
        let pointers = Pointers::one(Pointer::new(DeviceIndex(0), 1000, Gen(3)));
        let key = Key { inode: Inode(2), size: 100, dirty: true, end: 300, pointers };
        let tail = key.cut(250, 400).expect("overlaps");
        assert_eq!((tail.start(), tail.end), (250, 300));
        assert_eq!(tail.pointers.as_slice()[0].sector(), 1050);
        let front = key.cut(0, 250).expect("overlaps");
        assert_eq!((front.start(), front.end), (200, 250));
        assert_eq!(front.pointers.as_slice()[0].sector(), 1000);
        assert_eq!(key.cut(300, 400), None);
    }

    #[test]
    fn check_pointers_are_recognised() {
        // 20.3: `fffd968cd43ff38e` is a check pointer.
        assert!(Pointer::from_word(0xfffd_968c_d43f_f38e).is_check());
        let all_ones = Pointer::from_word(u64::MAX);
        assert_eq!(all_ones.advanced(8), all_ones, "cutting the front of a placeholder leaves it one");
        assert!(!Pointer::new(DeviceIndex(0), 48128, Gen(1)).is_check());
        assert_eq!(Pointer::new(DeviceIndex(0), 48128, Gen(1)).word(), 0xbc_0001);
    }
}
