//! Bytes whose sums are right and whose content cannot be: refused at open with a typed error, and nothing is written.
//!
//! Each test lets a set store two buckets full of dirty data, stops it, and changes something, mostly by an entry that is
//! appended to its journal.

use crate::memory::NoNote;
use crate::rig::{open, run};
use crate::stopped::{CACHE_SECTORS, DATA_OFFSET, key, options, stopped};
use bcached_engine::Error;
use bcached_env::{Note, NoteRecord};
use bcached_format::{DeviceIndex, Gen, Inode, Key, Pointer, Pointers, PrioSet, prio};

/// What the other tests are worth: a sensible entry is replayed.
#[test]
fn an_entry_that_makes_sense_is_replayed() {
    let mut stopped = stopped();
    let part = stopped.data.cut(DATA_OFFSET + 8, DATA_OFFSET + 16).expect("inside");
    stopped.append(&[stopped.data, part, Key::hole(Inode(0), DATA_OFFSET, DATA_OFFSET + 4)]);
    assert_eq!(stopped.reopened(Box::new(NoNote)), Ok(252));
}

/// A number at the end of all numbers: the entry after it would have none.
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

/// The same, and an old entry stands behind it: no number follows the last one.
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

/// The same for the priorities: the next chain that is stored counts on from there.
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

/// Keys that cannot be in a leaf. A pointer to another device was once taken for one to the only device, and one across
/// the end of a bucket counted more in it than there is room for, which stopped the process.
#[test]
fn journal_keys_that_no_leaf_could_hold_are_refused() {
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

/// Data in the buckets of the journal, the tree, the table of volumes and the priorities.
#[test]
fn journal_keys_that_point_into_metadata_are_refused() {
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

/// Two ranges of a volume that claim the same sectors of the cache, and one range with both its copies there.
#[test]
fn journal_keys_that_share_sectors_are_refused() {
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

/// The same, when the other key is in the tree: its bucket would count more live sectors than it has.
#[test]
fn a_journal_that_contradicts_the_tree_is_refused() {
    let mut stopped = stopped();
    let sector = stopped.data.pointers.as_slice()[0].sector();
    stopped.append(&[key(0, sector, 64, 4096)]);
    let error = stopped.reopened(Box::new(NoNote)).expect_err("taken");
    assert!(matches!(error, Error::Inconsistent(_)), "{error}");
}

/// A note that says these things of every session.
struct Says(Vec<NoteRecord>);

impl Note for Says {
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
}

/// The note is a file: its records are no better than a journal's. One that is no key was once passed over, and with it
/// what was acknowledged.
#[test]
fn notes_that_no_leaf_could_hold_are_refused() {
    let record = |key: &Key, count| {
        let words = [key.header_word(), key.end, key.pointers.as_slice()[0].word(), 0];
        Says(vec![NoteRecord { sequence: 1, words, count }])
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

/// The table of volumes has no sum. The size of a flash-only volume was believed whatever it said, and the count of its bytes
/// overflowed where it was told to clients. Now such a volume is not served, and the others are.
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
