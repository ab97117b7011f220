//! Bytes with a correct checksum but impossible content: opening fails with a typed error, and
//! nothing is written.
//!
//! Each test lets a set store two buckets of dirty data, stops it, and then changes something,
//! mostly by appending an entry to its journal.

use crate::forged_set::{CACHE_SECTORS, DATA_OFFSET, key, options, stopped};
use crate::memory::NoNote;
use crate::rig::{open, run};
use bcached_engine::Error;
use bcached_env::{Note, NoteRecord};
use bcached_format::{DeviceIndex, Gen, Inode, Key, Pointer, Pointers, PrioSet, prio};

/// Control for the other tests: a sensible entry is replayed.
#[test]
fn an_entry_that_makes_sense_is_replayed() {
    let mut stopped = stopped();
    let part = stopped.data.cut(DATA_OFFSET + 8, DATA_OFFSET + 16).expect("inside");
    stopped.append(&[stopped.data, part, Key::hole(Inode(0), DATA_OFFSET, DATA_OFFSET + 4)]);
    assert_eq!(stopped.reopened(Box::new(NoNote)), Ok(252));
}

/// A sequence number at the end of the range: the entry after it would have none.
#[test]
fn a_number_that_cannot_be_counted_on_from_is_refused() {
    let mut stopped = stopped();
    stopped.header.seq = u64::MAX - 1;
    stopped.begin_bucket();
    let data = stopped.data;
    stopped.append(&[data]);
    let error = stopped.refused(Box::new(NoNote));
    assert!(matches!(error, Error::Inconsistent(_)), "{error}");
}

/// The same with an old entry behind it: no number follows the last one.
#[test]
fn nothing_is_counted_on_from_the_last_number_of_all() {
    let mut stopped = stopped();
    let data = stopped.data;
    stopped.header.seq = u64::MAX - 1;
    stopped.begin_bucket();
    stopped.append(&[data]);
    stopped.header.seq = 1;
    stopped.end += stopped.geometry.block_sectors;
    stopped.append(&[data]);
    let error = stopped.refused(Box::new(NoNote));
    assert!(matches!(error, Error::Inconsistent(_)), "{error}");
}

/// The same for the priorities: the next stored chain continues from their number.
#[test]
fn a_number_of_the_priorities_that_cannot_be_counted_on_from_is_refused() {
    for (number, is_possible) in [(u64::MAX / 2, true), (u64::MAX / 2 + 1, false), (u64::MAX, false)] {
        let mut stopped = stopped();
        let sector = stopped.header.prio_bucket * 128;
        let magic = stopped.geometry.magic;
        let mut bytes = vec![0; stopped.geometry.meta_bytes()];
        stopped.rig.world.borrow().look(0, sector, &mut bytes);
        let stored = PrioSet::parse(&bytes, magic).expect("as the set stored it");
        let mut forged = vec![0; bytes.len()];
        prio::seal(&mut forged, magic, number, stored.next_bucket, stored.entries());
        stopped.rig.world.borrow_mut().place(0, sector, &forged);
        if is_possible {
            assert_eq!(stopped.reopened(Box::new(NoNote)), Ok(256));
        } else {
            let error = stopped.refused(Box::new(NoNote));
            assert!(matches!(error, Error::Inconsistent(_)), "{number}: {error}");
        }
    }
}

/// Keys that cannot be in a leaf. A pointer to another device used to be taken for one to the only
/// device. One across the end of a bucket added more live sectors to it than it has, which aborted
/// the process.
#[test]
fn journal_keys_that_no_leaf_could_hold_are_refused() {
    // Proves invariant D40.
    let end = CACHE_SECTORS;
    for (what, key) in [
        ("another device", key(1, 128 * 500, 8, 4096)),
        ("no such bucket", key(0, end, 8, 4096)),
        ("the superblock's bucket", key(0, 64, 8, 4096)),
        ("across the end of a bucket", key(0, 128 * 500 + 64, 128, 4096)),
    ] {
        let mut stopped = stopped();
        stopped.append(&[key]);
        let error = stopped.refused(Box::new(NoNote));
        assert!(matches!(error, Error::Format { .. }), "{what}: {error}");
    }
}

/// Keys that point to data in the buckets of the journal, the tree, the UUID table and the
/// priorities.
#[test]
fn journal_keys_that_point_into_metadata_are_refused() {
    // Proves invariant D40.
    let sound = stopped();
    let pointer = |key: &Key| key.pointers.as_slice()[0].sector();
    let places = [
        sound.geometry.sector_of(sound.geometry.journal_bucket(0)),
        pointer(&sound.header.root),
        pointer(&sound.header.uuids),
        sound.header.prio_bucket * 128,
    ];
    for sector in places {
        let mut stopped = stopped();
        stopped.append(&[key(0, sector, 8, 4096)]);
        let error = stopped.refused(Box::new(NoNote));
        assert!(matches!(error, Error::Inconsistent(_)), "sector {sector}: {error}");
    }
}

/// Two ranges of a volume that claim the same sectors of the cache, and one range whose two copies
/// overlap there.
#[test]
fn journal_keys_that_share_sectors_are_refused() {
    // Proves invariant D40.
    let place = 128 * 500;
    let copies =
        [Pointer::new(DeviceIndex(0), place, Gen(0)), Pointer::new(DeviceIndex(0), place + 8, Gen(0))];
    let doubled = Key { pointers: Pointers::from_slice(&copies).expect("two"), ..key(0, place, 16, 4096) };
    for keys in [
        &[key(0, place, 100, 4096), key(0, place + 99, 8, 5000)][..],
        &[key(0, place, 100, 4096), Key { inode: Inode(3), ..key(0, place, 100, 4096) }],
        &[doubled],
    ] {
        let mut stopped = stopped();
        stopped.append(keys);
        let error = stopped.refused(Box::new(NoNote));
        assert!(matches!(error, Error::Inconsistent(_)), "{keys:?}: {error}");
    }
}

/// The same, with the other key in the tree: its bucket would count more live sectors than it has.
#[test]
fn a_journal_that_contradicts_the_tree_is_refused() {
    // Proves invariant D40.
    let mut stopped = stopped();
    let sector = stopped.data.pointers.as_slice()[0].sector();
    stopped.append(&[key(0, sector, 64, 4096)]);
    let error = stopped.reopened(Box::new(NoNote)).expect_err("taken");
    assert!(matches!(error, Error::Inconsistent(_)), "{error}");
}

/// A note that returns these records for every session.
struct FixedNote(Vec<NoteRecord>);

impl Note for FixedNote {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn append(&mut self, _record: NoteRecord) {}

    fn forget_through(&mut self, _sequence: u64) {}

    fn give_up(&mut self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn recovered(&mut self, _session: u64) -> Vec<NoteRecord> {
        self.0.clone()
    }

    fn begin(&mut self, _session: u64) {}

    fn reopen(&mut self) {}
}

/// The note is a file, so its records are no more trusted than a journal's. An invalid record used
/// to be skipped, and with it an acknowledged write.
#[test]
fn notes_that_no_leaf_could_hold_are_refused() {
    // Proves invariant D40.
    let record = |key: &Key, count| {
        let words = [key.header_word(), key.end, key.pointers.as_slice()[0].word(), 0];
        FixedNote(vec![NoteRecord { sequence: 1, words, count }])
    };
    let good = key(0, 128 * 500, 8, 4096);
    let mut sound = stopped();
    assert_eq!(sound.reopened(Box::new(record(&good, 3))), Ok(256 + 8));
    for (what, key, count) in [
        ("across the end of a bucket", key(0, 128 * 500 + 64, 128, 4096), 3),
        ("before the start of the volume", Key { end: 7, ..good }, 3),
        ("of size zero", Key { size: 0, ..good }, 3),
        ("fewer words than it says", good, 2),
        ("more words than there are", good, 5),
    ] {
        let error = stopped().refused(Box::new(record(&key, count)));
        let typed = matches!(error, Error::Format { .. } | Error::Inconsistent(_));
        assert!(typed, "{what}: {error}");
    }
}

/// The UUID table has no checksum. The size of a flash-only volume used to be trusted, and its size
/// in bytes overflowed when it was reported to clients. Now such a volume is not served, and the
/// others are.
#[test]
fn a_flash_only_volume_of_impossible_size_is_not_served() {
    for (sectors, is_possible) in [(1 << 30, true), (1 << 54, false), (u64::MAX, false)] {
        let mut stopped = stopped();
        stopped.add_flash_only(sectors);
        run(&mut stopped.rig, move |env| async move {
            let (set, _) = open(env, options()).await.expect("the other volume is sound");
            let flash = set.volumes().iter().filter(|info| info.flash_only).count();
            assert_eq!((flash, set.status().doubted.len()), if is_possible { (1, 0) } else { (0, 1) });
            set.stop().await.expect("it stops");
        });
    }
}
