//! Rules for extents: how a newer extent overrides older ones, and when two adjacent extents merge.
//!
//! The rules apply to the view and to the pending keys alike. For keys already on disk they apply
//! at the next read.

use alloc::vec::Vec;

use bcached_format::key::MAX_KEY_SECTORS;
use bcached_format::{Inode, Key, Position};

use crate::merge::KeySource;
use crate::sorted_keys::{KeyCursor, SPLICE_KEYS, SortedKeys};

/// Returns whether a key is a hole: it has no pointer, or only the placeholder of a kernel's cache
/// miss.
pub(crate) fn is_hole(key: &Key) -> bool {
    let pointers = key.pointers.as_slice();
    pointers.is_empty() || pointers.iter().any(|pointer| pointer.is_check())
}

/// Returns the keys of `keys` that share a sector with `[start, end)` of `inode`, in order and
/// uncut.
#[inline]
pub(crate) fn overlapping(
    keys: &SortedKeys,
    inode: Inode,
    start: u64,
    end: u64,
) -> impl Iterator<Item = &Key> + Clone {
    overlapping_from(keys, keys.after(Position::new(inode, start)), inode, end)
}

/// As [`overlapping`], with the place of the first key that ends after the range's start already
/// known.
#[inline]
pub(crate) fn overlapping_from(
    keys: &SortedKeys,
    place: KeyCursor,
    inode: Inode,
    end: u64,
) -> impl Iterator<Item = &Key> + Clone {
    keys.iter_from(place).take_while(move |key| key.inode == inode && key.start() < end)
}

/// Merges two adjacent keys into one if the format allows it.
#[inline]
pub(crate) fn merged(left: &Key, right: &Key, bucket_sectors: u64) -> Option<Key> {
    // The check comes first because few keys are adjacent, and this runs for each key that is read.
    let adjacent = left.inode == right.inode && left.end == right.start();
    if adjacent { merged_adjacent(left, right, bucket_sectors) } else { None }
}

fn merged_adjacent(left: &Key, right: &Key, bucket_sectors: u64) -> Option<Key> {
    let size = left.sectors() + right.sectors();
    if left.dirty != right.dirty || size > MAX_KEY_SECTORS {
        return None;
    }
    if right.pointers != left.pointers.advanced(left.sectors())
        || left.pointers.as_slice().iter().any(|p| p.is_check())
    {
        return None;
    }
    let bucket = |key: &Key, index: usize| key.pointers.as_slice()[index].sector() / bucket_sectors;
    if (0..left.pointers.as_slice().len()).any(|index| bucket(left, index) != bucket(right, index)) {
        return None;
    }
    let size = u16::try_from(size).expect("the size was compared above");
    Some(Key { size, end: right.end, ..*left })
}

/// Appends `key` to a list of extents in order, merged into the last one where possible.
pub(crate) fn push_merged(list: &mut Vec<Key>, key: Key, bucket_sectors: u64) {
    if let Some(last) = list.last_mut()
        && let Some(both) = merged(last, &key, bucket_sectors)
    {
        *last = both;
        return;
    }
    list.push(key);
}

/// Replaces the contents of `[start, end)` of `inode` by `new` (a key over exactly that range), or
/// by nothing.
///
/// `removed` is called with each replaced part of an older key, cut to the range.
pub(crate) fn put(
    keys: &mut SortedKeys,
    range: &Key,
    new: Option<&Key>,
    bucket_sectors: u64,
    removed: &mut dyn FnMut(Key),
) {
    let place = keys.after(range.start_position());
    put_from(keys, place, range, new, bucket_sectors, removed);
}

/// As [`put`], with the place of the first key that ends after the range's start already known.
pub(crate) fn put_from(
    keys: &mut SortedKeys,
    place: KeyCursor,
    range: &Key,
    new: Option<&Key>,
    bucket_sectors: u64,
    removed: &mut dyn FnMut(Key),
) {
    if !new.is_some_and(|new| put_plainly(keys, place, new, bucket_sectors, removed)) {
        put_in_parts(keys, place, range, new, bucket_sectors, removed);
    }
}

/// Puts `new` between two keys, or in the place of one that covers the same range, unless it would
/// merge with a neighbour. This is the common case. Returns false, with nothing changed, if it does
/// not apply.
fn put_plainly(
    keys: &mut SortedKeys,
    place: KeyCursor,
    new: &Key,
    bucket_sectors: u64,
    removed: &mut dyn FnMut(Key),
) -> bool {
    let at = keys.get(place);
    let old = at.filter(|old| old.inode == new.inode && old.start() < new.end);
    if old.is_some_and(|old| old.end != new.end || old.size != new.size) {
        return false;
    }
    let behind = if old.is_some() { keys.get(keys.next(place)) } else { at };
    let before = keys.before(place).and_then(|before| keys.get(before));
    let is_one = |left: &Key, right: &Key| merged(left, right, bucket_sectors).is_some();
    if before.is_some_and(|left| is_one(left, new)) || behind.is_some_and(|right| is_one(new, right)) {
        return false;
    }
    let count = usize::from(old.is_some());
    if let Some(old) = old {
        removed(*old);
    }
    keys.splice(place, count, core::slice::from_ref(new));
    true
}

fn put_in_parts(
    keys: &mut SortedKeys,
    mut place: KeyCursor,
    range: &Key,
    new: Option<&Key>,
    bucket_sectors: u64,
    removed: &mut dyn FnMut(Key),
) {
    let (inode, start, end) = (range.inode, range.start(), range.end);
    let (mut count, mut front, mut tail) = (0, None, None);
    for old in overlapping_from(keys, place, inode, end) {
        count += 1;
        if old.start() >= start && old.end <= end {
            removed(*old);
            continue;
        }
        front = front.or(old.cut(0, start));
        tail = old.cut(end, u64::MAX);
        removed(old.cut(start, end).expect("the key overlaps the range"));
    }
    let mut list = SpliceKeys::default();
    if let Some(new) = new {
        // An uncut neighbour may merge with the new key.
        if front.is_none()
            && let Some(before) = keys.before(place)
            && let Some(both) = keys.get(before).and_then(|left| merged(left, new, bucket_sectors))
        {
            (place, count) = (before, count + 1);
            list.push(both, bucket_sectors);
        } else {
            front.into_iter().for_each(|front| list.push(front, bucket_sectors));
            list.push(*new, bucket_sectors);
        }
        if tail.is_none()
            && let Some(right) = keys.iter_from(place).nth(count)
            && merged(list.last(), right, bucket_sectors).is_some()
        {
            count += 1;
            tail = Some(*right);
        }
    } else {
        front.into_iter().for_each(|front| list.push(front, bucket_sectors));
    }
    tail.into_iter().for_each(|tail| list.push(tail, bucket_sectors));
    keys.splice(place, count, list.as_slice());
}

/// The keys that replace the overlapped ones: the rest of the first, the new key, the rest of the
/// last.
#[derive(Default)]
struct SpliceKeys {
    keys: [Key; SPLICE_KEYS],
    len: usize,
}

impl SpliceKeys {
    fn push(&mut self, key: Key, bucket_sectors: u64) {
        if self.len > 0
            && let Some(both) = merged(self.last(), &key, bucket_sectors)
        {
            self.keys[self.len - 1] = both;
            return;
        }
        self.keys[self.len] = key;
        self.len += 1;
    }

    fn last(&self) -> &Key {
        &self.keys[self.len - 1]
    }

    fn as_slice(&self) -> &[Key] {
        &self.keys[..self.len]
    }
}

/// The extents of an older set overlaid by newer ones, in one pass. Both inputs and
/// the output are in order and free of overlap.
pub(crate) struct Overlay<O, N> {
    older: O,
    newer: N,
    /// What is left of the current older key. `None` if the older keys have ended, or if the next
    /// one is due.
    old: Option<Key>,
    new: Option<Key>,
    is_old_due: bool,
    is_new_due: bool,
}

impl<O: KeySource, N: KeySource> Overlay<O, N> {
    pub(crate) const fn new(older: O, newer: N) -> Self {
        Self { older, newer, old: None, new: None, is_old_due: true, is_new_due: true }
    }

    /// Takes the keys that are due; returns whether none is due any more.
    #[inline]
    fn take_due(&mut self, left: &mut usize) -> bool {
        if self.is_old_due {
            self.old = self.older.next(left);
            self.is_old_due = self.old.is_none() && *left == 0;
        }
        if self.is_new_due {
            self.new = self.newer.next(left);
            self.is_new_due = self.new.is_none() && *left == 0;
        }
        !self.is_old_due && !self.is_new_due
    }
}

impl<O: KeySource, N: KeySource> KeySource for Overlay<O, N> {
    #[inline]
    fn next(&mut self, left: &mut usize) -> Option<Key> {
        while self.take_due(left) {
            let (Some(old), Some(new)) = (&self.old, &self.new) else {
                // At least one side has ended.
                (self.is_old_due, self.is_new_due) = (self.new.is_none(), self.old.is_none());
                return self.new.or(self.old);
            };
            if old.position() <= new.start_position() {
                self.is_old_due = true;
                return self.old;
            }
            if old.start_position() > new.position() {
                self.is_new_due = true;
                return self.new;
            }
            // The two overlap, or the older one begins where the newer one ends. Either way they
            // are in one volume.
            if let Some(front) = old.cut(0, new.start()) {
                self.old = old.cut(new.start(), u64::MAX);
                return Some(front);
            }
            if let Some(behind) = old.cut(new.end, u64::MAX) {
                *left = left.saturating_sub(1);
                self.old = Some(behind);
                self.is_new_due = true;
                return self.new;
            }
            self.is_old_due = true;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::tests::all;
    use bcached_format::{DeviceIndex, Gen, Pointer, Pointers};
    use std::vec;

    const BUCKET: u64 = 1024;

    fn extent(start: u64, end: u64, sector: u64) -> Key {
        let size = u16::try_from(end - start).expect("small");
        let pointers = Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(1)));
        Key { inode: Inode(0), size, dirty: true, end, pointers }
    }

    #[test]
    fn neighbours_merge_only_when_one_pointer_says_it_all() {
        let left = extent(16, 24, 48128);
        assert_eq!(merged(&left, &extent(24, 32, 48136), BUCKET), Some(extent(16, 32, 48128)));
        assert_eq!(merged(&left, &extent(25, 32, 48137), BUCKET), None, "a gap between");
        assert_eq!(merged(&left, &extent(24, 32, 48137), BUCKET), None, "data elsewhere");
        assert_eq!(merged(&left, &Key { dirty: false, ..extent(24, 32, 48136) }, BUCKET), None);
        assert_eq!(merged(&left, &Key { inode: Inode(1), ..extent(24, 32, 48136) }, BUCKET), None);
        let regenerated = Pointers::one(Pointer::new(DeviceIndex(0), 48136, Gen(2)));
        assert_eq!(merged(&left, &Key { pointers: regenerated, ..extent(24, 32, 0) }, BUCKET), None);
    }

    #[test]
    fn neighbours_do_not_merge_across_a_bucket_end_or_beyond_the_largest_size() {
        let left = extent(0, 8, 2048 - 8);
        assert_eq!(merged(&left, &extent(8, 16, 2048), BUCKET), None, "2048 begins a bucket");
        assert_eq!(merged(&left, &extent(8, 16, 2048), 4096), Some(extent(0, 16, 2040)));
        let long = extent(0, 0xFFF8, 0);
        assert_eq!(merged(&long, &extent(0xFFF8, 0x1_0000, 0xFFF8), 1 << 20), None);
        assert!(merged(&long, &extent(0xFFF8, 0xFFFF, 0xFFF8), 1 << 20).is_some());
    }

    #[test]
    fn holes_merge_with_holes_and_check_pointers_with_nothing() {
        let (left, right) = (Key::hole(Inode(0), 0, 8), Key::hole(Inode(0), 8, 16));
        assert_eq!(merged(&left, &right, BUCKET), Some(Key::hole(Inode(0), 0, 16)));
        let check = Pointers::one(Pointer::from_word(0xfffd_968c_d43f_0000));
        let left = Key { pointers: check, ..extent(0, 8, 0) };
        let right = Key { pointers: check.advanced(8), ..extent(8, 16, 0) };
        assert_eq!(merged(&left, &right, BUCKET), None);
    }

    #[test]
    fn a_newer_set_leaves_front_and_tail_of_older_keys() {
        // older   0[------100)    200[--300)   400[-450)
        // newer      20[30)  60[-----250)    350[--------500)
        let older = vec![extent(0, 100, 1000), extent(200, 300, 2000), extent(400, 450, 3000)];
        let newer = vec![extent(20, 30, 5000), extent(60, 250, 6000), extent(350, 500, 7000)];
        let expected = vec![
            extent(0, 20, 1000),
            extent(20, 30, 5000),
            extent(30, 60, 1030),
            extent(60, 250, 6000),
            extent(250, 300, 2050),
            extent(350, 500, 7000),
        ];
        assert_eq!(all(Overlay::new(older.into_iter(), newer.into_iter())), expected);
    }

    #[test]
    fn sets_overlay_only_within_a_volume() {
        let other = Key { inode: Inode(1), ..extent(0, 50, 9000) };
        let older = vec![extent(0, 100, 1000), other];
        let newer = vec![Key { inode: Inode(1), ..extent(40, 60, 500) }];
        let expected = vec![extent(0, 100, 1000), other.cut(0, 40).expect("front"), newer[0]];
        assert_eq!(all(Overlay::new(older.into_iter(), newer.into_iter())), expected);
    }
}
