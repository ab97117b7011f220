//! Checks whether a readable key makes sense in its place: in a leaf, as a child, as the root, or
//! as the key of the uuid table.
//!
//! The checks are those of a kernel, and some that a kernel omits; the comments say which. The
//! functions look at one key (or one list) and the sizes of the set. Checks that need bucket
//! generations or the range of the node are made elsewhere.

use crate::error::{KeyError, KeyListError};
use crate::geometry::Geometry;
use crate::key::{Key, Pointer};
use crate::units::Position;

/// Checks a key of a leaf or of the journal. Keys of size zero mean nothing and may hold anything.
///
/// # Errors
/// [`KeyError`] if the key starts before zero or a pointer names a device, bucket or range that
/// cannot hold data.
#[inline]
pub fn check_leaf_key(geometry: &Geometry, key: &Key) -> Result<(), KeyError> {
    if key.size == 0 {
        return Ok(());
    }
    if u64::from(key.size) > key.end {
        return Err(KeyError::SizeExceedsEnd { size: key.size, end: key.end });
    }
    key.pointers
        .as_slice()
        .iter()
        .filter(|pointer| !pointer.is_check())
        .try_for_each(|pointer| check_pointer(geometry, *pointer, key.size))
}

/// Checks a key of an interior node (child or freeing key), or the root's key in a journal entry.
///
/// # Errors
/// [`KeyError`] if it cannot name a node.
pub fn check_child_key(geometry: &Geometry, key: &Key) -> Result<(), KeyError> {
    let [pointer] = key.pointers.as_slice() else {
        let found = key.pointers.as_slice().len();
        return Err(if found == 0 {
            KeyError::NoPointer
        } else {
            KeyError::TooManyPointers { limit: 1, found }
        });
    };
    if key.size == 0 {
        return Err(KeyError::ZeroSize);
    }
    if key.dirty {
        return Err(KeyError::DirtyChild);
    }
    check_pointer(geometry, *pointer, key.size)?;
    // A kernel does not check the rest; it relies on having written the key itself.
    if !pointer.sector().is_multiple_of(geometry.bucket_sectors) {
        return Err(KeyError::NotAtBucketStart { sector: pointer.sector() });
    }
    if !u64::from(key.size).is_multiple_of(geometry.block_sectors) {
        return Err(KeyError::NotWholeBlocks { size: key.size });
    }
    Ok(())
}

/// Checks the key of the uuid table in a journal entry, by the same rules as for a node.
///
/// # Errors
/// [`KeyError`] if it cannot name a table.
pub fn check_uuid_key(geometry: &Geometry, key: &Key) -> Result<(), KeyError> {
    check_child_key(geometry, key)
}

/// Checks that each key of one leaf set starts at or after the end of the one before. (A kernel
/// does not check.)
///
/// # Errors
/// The first key out of order.
pub fn check_leaf_order(keys: impl IntoIterator<Item = Key>) -> Result<(), KeyListError> {
    check_order(keys, |key| Position::new(key.inode, key.end.saturating_sub(u64::from(key.size))))
}

/// Checks that the positions of the keys of one interior set never decrease, so that the freeing
/// keys come first. (A kernel does not check.)
///
/// # Errors
/// The first key out of order.
pub fn check_child_order(keys: impl IntoIterator<Item = Key>) -> Result<(), KeyListError> {
    check_order(keys, |key| key.position())
}

fn check_order(
    keys: impl IntoIterator<Item = Key>,
    start_of: impl Fn(&Key) -> Position,
) -> Result<(), KeyListError> {
    let (mut previous, mut word) = (Position::ZERO, 0);
    for (index, key) in keys.into_iter().enumerate() {
        let start = start_of(&key);
        if start < previous {
            return Err(KeyListError { index, word, error: KeyError::OutOfOrder { previous, start } });
        }
        previous = key.position();
        word += key.words();
    }
    Ok(())
}

#[inline]
fn check_pointer(geometry: &Geometry, pointer: Pointer, size: u16) -> Result<(), KeyError> {
    // A kernel treats devices 1..=7 as device 0, so data would be read from the wrong place.
    if pointer.device_number() != 0 {
        return Err(KeyError::NoSuchDevice { found: pointer.device_number() });
    }
    let sector = pointer.sector();
    let (found, within) = geometry.bucket_at(sector);
    if !geometry.is_usable(found) {
        return Err(KeyError::BucketOutOfRange {
            first: geometry.first_bucket,
            limit: geometry.buckets,
            found,
        });
    }
    if within + u64::from(size) > geometry.bucket_sectors {
        return Err(KeyError::CrossesBucket { sector, size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::{SetMagic, Uuid};
    use crate::key::Pointers;
    use crate::units::{DeviceIndex, Gen, Inode};

    const GEOMETRY: Geometry = Geometry {
        block_sectors: 8,
        bucket_sectors: 128,
        buckets: 1000,
        first_bucket: 1,
        journal_buckets: 7,
        magic: SetMagic::of(Uuid::NIL),
    };

    fn key(sector: u64, size: u16, end: u64) -> Key {
        let pointers = Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(1)));
        Key { inode: Inode(0), size, dirty: false, end, pointers }
    }

    #[test]
    fn leaf_keys_stay_inside_one_usable_bucket() {
        assert_eq!(check_leaf_key(&GEOMETRY, &key(128 * 999 + 120, 8, 8)), Ok(()));
        let out = |found| Err(KeyError::BucketOutOfRange { first: 1, limit: 1000, found });
        assert_eq!(check_leaf_key(&GEOMETRY, &key(127, 1, 8)), out(0));
        assert_eq!(check_leaf_key(&GEOMETRY, &key(128 * 1000, 1, 8)), out(1000));
        let crosses = Err(KeyError::CrossesBucket { sector: 248, size: 9 });
        assert_eq!(check_leaf_key(&GEOMETRY, &key(248, 9, 9)), crosses);
        let before = Err(KeyError::SizeExceedsEnd { size: 8, end: 0 });
        assert_eq!(check_leaf_key(&GEOMETRY, &key(128, 8, 0)), before);
    }

    #[test]
    fn meaningless_leaf_keys_may_hold_anything() {
        assert_eq!(check_leaf_key(&GEOMETRY, &key(0, 0, 0)), Ok(()), "size zero");
        let check = Key { pointers: Pointers::one(Pointer::from_word(u64::MAX)), ..key(0, 8, 8) };
        assert_eq!(check_leaf_key(&GEOMETRY, &check), Ok(()), "check pointer");
        assert_eq!(check_leaf_key(&GEOMETRY, &Key::hole(Inode(1), 0, 8)), Ok(()), "no pointer");
    }

    #[test]
    fn a_pointer_to_another_device_is_refused() {
        let pointers = Pointers::one(Pointer::new(DeviceIndex(1), 128, Gen(1)));
        let elsewhere = Key { pointers, ..key(0, 8, 8) };
        assert_eq!(check_leaf_key(&GEOMETRY, &elsewhere), Err(KeyError::NoSuchDevice { found: 1 }));
    }

    #[test]
    fn child_keys_name_a_whole_node_at_the_start_of_its_bucket() {
        assert_eq!(check_child_key(&GEOMETRY, &key(128, 128, 0)), Ok(()), "a freeing key");
        assert_eq!(
            check_child_key(&GEOMETRY, &key(136, 8, 0)),
            Err(KeyError::NotAtBucketStart { sector: 136 })
        );
        assert_eq!(check_child_key(&GEOMETRY, &key(128, 12, 0)), Err(KeyError::NotWholeBlocks { size: 12 }));
        assert_eq!(check_child_key(&GEOMETRY, &key(128, 0, 0)), Err(KeyError::ZeroSize));
        assert_eq!(check_child_key(&GEOMETRY, &Key::hole(Inode(0), 0, 8)), Err(KeyError::NoPointer));
        let dirty = Key { dirty: true, ..key(128, 128, 0) };
        assert_eq!(check_child_key(&GEOMETRY, &dirty), Err(KeyError::DirtyChild));
    }

    #[test]
    fn order_is_by_extent_in_leaves_and_by_position_in_interior_nodes() {
        let touching = [key(128, 8, 8), key(136, 8, 16)];
        assert_eq!(check_leaf_order(touching), Ok(()));
        let overlapping = [key(128, 8, 8), key(136, 8, 15)];
        let error = check_leaf_order(overlapping).expect_err("overlap");
        assert_eq!((error.index, error.word), (1, 3));
        assert_eq!(check_child_order(overlapping), Ok(()));
        assert!(check_child_order([key(128, 8, 16), key(136, 8, 8)]).is_err());
    }
}
