//! Bytes whose sums are right and whose content cannot be: refused at open with a typed error, and nothing is written.
//!
//! Each test lets a set store two buckets full of dirty data, stops it, and appends an entry to its journal, as somebody
//! might who makes an image by hand.

use crate::memory::NoNote;
use crate::rig::{Rig, Sizes, ask, open};
use bcached_engine::{CacheSet, Error, Options, Request};
use bcached_env::{Buffer, DiskId, Note, NoteRecord};
use bcached_format::jset::{Jset, JsetHeader, seal};
use bcached_format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use bcached_format::{
    DeviceFacts, DeviceIndex, Gen, Geometry, Inode, Key, Pointer, Pointers, RawSuperblock, Superblock,
};
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 8192 };
const CACHE_SECTORS: u64 = SIZES.buckets * SIZES.bucket as u64;

/// Where the data begins on the backing device, and with it in the key space.
const DATA_OFFSET: u64 = 16;

fn options() -> Options {
    Options { writeback_running: false, leaf_delay: Duration::from_millis(1), ..Options::default() }
}

/// A set that has been stopped, and what an entry behind its newest one needs to say.
struct Stopped {
    rig: Rig,
    geometry: Geometry,
    header: JsetHeader,
    /// Where the next entry goes, in sectors.
    end: u64,
    /// Key of the first bucket of data, as it stands in the tree.
    data: Key,
}

/// Runs a set that stores dirty data from the volume's start on, and stops it.
fn stopped() -> Stopped {
    let mut rig = Rig::new(SIZES, 5);
    let mut executor = rig.executor();
    let env = executor.env();
    let done = executor.block_on(async move {
        let (set, volume) = open(env, options()).await.expect("a sound set");
        let payload = Buffer::copied_from(&[0x77; 2 * 128 * 512]).freeze();
        ask(&set, volume, Request::Write { sector: 0, payload, fua: true }).await;
        assert_eq!(set.status().dirty_sectors, 256);
        set.stop().await.expect("it stops");
    });
    done.expect("somebody waits for ever");
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    rig.world.borrow().look(0, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceFacts { sectors: CACHE_SECTORS, logical_block_sectors: 1 };
    let Ok(Superblock::Cache(superblock)) =
        RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts))
    else {
        unreachable!("the set wrote its superblock")
    };
    let geometry = Geometry::of(&superblock);
    let (header, end) = newest_entry(&rig, &geometry);
    let full = usize::from(SIZES.bucket) * 512;
    let first = geometry.first_bucket + geometry.journal_buckets;
    let bucket = (first..SIZES.buckets).find(|bucket| {
        let mut bytes = vec![0; full];
        rig.world.borrow().look(0, bucket * u64::from(SIZES.bucket), &mut bytes);
        bytes.iter().all(|byte| *byte == 0x77)
    });
    let bucket = bucket.expect("the data fills a bucket");
    let data = key(0, bucket * 128, 128, DATA_OFFSET);
    Stopped { rig, geometry, header, end, data }
}

/// The newest entry's header and where it ends, in sectors.
fn newest_entry(rig: &Rig, geometry: &Geometry) -> (JsetHeader, u64) {
    let mut found: Option<(JsetHeader, u64)> = None;
    for index in 0..geometry.journal_buckets {
        let start = geometry.sector_of(geometry.journal_bucket(index));
        let mut bytes = vec![0; usize::try_from(geometry.bucket_sectors).expect("small") * 512];
        rig.world.borrow().look(0, start, &mut bytes);
        let mut at = 0;
        while let Ok(entry) = Jset::parse(&bytes[at..], geometry.magic) {
            at += geometry.whole_blocks(entry.byte_len());
            if found.is_none_or(|(newest, _)| newest.seq < entry.header.seq) {
                found = Some((entry.header, start + at as u64 / 512));
            }
        }
    }
    found.expect("a set that was started has a journal")
}

/// A dirty key of volume 0 and generation 0, `size` sectors from `start`.
fn key(device: u8, sector: u64, size: u16, start: u64) -> Key {
    let pointers = Pointers::one(Pointer::new(DeviceIndex(device), sector, Gen(0)));
    Key { inode: Inode(0), size, dirty: true, end: start + u64::from(size), pointers }
}

impl Stopped {
    /// Appends an entry with these keys, which is all that the journal needs.
    fn append(&mut self, keys: &[Key]) {
        let seq = self.header.seq + 1;
        let header = JsetHeader { seq, last_seq: seq, ..self.header };
        let mut bytes = seal(self.geometry.magic, &header, keys);
        bytes.resize(self.geometry.whole_blocks(bytes.len()), 0);
        assert!(self.end % 128 + bytes.len() as u64 / 512 <= 128, "the entry fits in its bucket");
        self.rig.world.borrow_mut().place(0, self.end, &bytes);
    }

    fn device(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(CACHE_SECTORS).expect("small") * 512];
        self.rig.world.borrow().look(0, 0, &mut bytes);
        bytes
    }

    fn reopened(&mut self, note: Box<dyn Note>) -> Result<u64, Error> {
        let mut executor = self.rig.executor();
        let env = executor.env();
        let opened = executor.block_on(async move {
            let set = CacheSet::open(env, DiskId(0), note, options()).await?;
            let dirty = set.status().dirty_sectors;
            set.stop().await?;
            Ok(dirty)
        });
        opened.expect("somebody waits for ever")
    }

    /// Opens the set, which must be refused and left as it was.
    fn refused(&mut self, note: Box<dyn Note>) -> Error {
        let before = self.device();
        let error = self.reopened(note).expect_err("taken");
        assert!(before == self.device(), "refused ({error}), but written to");
        error
    }
}

/// What the other tests are worth: a sensible entry is replayed.
#[test]
fn an_entry_that_makes_sense_is_replayed() {
    let mut stopped = stopped();
    let part = stopped.data.cut(DATA_OFFSET + 8, DATA_OFFSET + 16).expect("inside");
    stopped.append(&[stopped.data, part, Key::hole(Inode(0), DATA_OFFSET, DATA_OFFSET + 4)]);
    assert_eq!(stopped.reopened(Box::new(NoNote)), Ok(252));
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
