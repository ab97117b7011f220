//! Tests with images built by hand: the content of a good one, and each broken invariant with the
//! finding that names it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

use crate::common::{self, ImageBuilder, backing, clean, dirty, node_key, pointer};
use bcached_check::{
    BucketUse, CheckResult, DamageKind as Kind, DataSource, Options, ReadAt, Severity, SourceRange,
    Structure, check,
};
use bcached_format::error::{BsetError, KeyError, NodeError, PrioError};
use bcached_format::{BackingState, Inode, Key, Pointer, Pointers, Position, Uuid, UuidSlot, prio};

/// Returns the findings of an image without backing devices.
#[track_caller]
fn kinds(image: ImageBuilder) -> Vec<Kind> {
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    checked.report.findings.into_iter().map(|damage| damage.kind).collect()
}

#[track_caller]
fn only(image: ImageBuilder, wanted: Kind) {
    assert_eq!(kinds(image), [wanted]);
}

#[track_caller]
fn with_backing(image: ImageBuilder, backing: &[u8], options: Options, see: impl FnOnce(&CheckResult<'_>)) {
    let (cache, backing) = (image.finish(), backing);
    let backings: [&dyn ReadAt; 1] = [&backing];
    see(&check(&cache, &backings, options));
}

fn cache(start: u64, sectors: u64, sector: u64, dirty: bool) -> SourceRange {
    SourceRange { start, sectors, source: DataSource::Cache { sector, dirty } }
}

fn below(start: u64, sectors: u64) -> SourceRange {
    SourceRange { start, sectors, source: DataSource::Backing }
}

#[test]
fn newer_sets_and_the_journal_override_older_keys() {
    // A hole and a stale key must hide what is below them; a key of size zero must not.
    let stale = Key { pointers: Pointers::one(pointer(103, 0, 255)), ..clean(60, 64, 0) };
    let zero = Key { size: 0, ..dirty(16, 16, 104) };
    let mut image = ImageBuilder::with_leaf(&[
        &[clean(16, 32, 100), clean(48, 64, 101)],
        &[zero, Key::hole(Inode(0), 20, 24), stale],
    ]);
    image.journal = vec![image.entries(1, &[(10, 9, &[]), (9, 9, &[dirty(30, 36, 102)])])];
    image.journal[0].1.reverse();
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings, []);
    let pieces = checked.view.as_ref().unwrap().content(Inode(0), 0, 80);
    assert_eq!(
        pieces,
        [
            below(0, 16),
            cache(16, 4, 1600, false),
            below(20, 4),
            cache(24, 6, 1608, false),
            cache(30, 6, 1632, true),
            below(36, 12),
            cache(48, 12, 1616, false),
            below(60, 20),
        ]
    );
    let bucket = checked.buckets[100];
    assert_eq!((bucket.usage, bucket.live_sectors, bucket.dirty_sectors), (BucketUse::Data, 10, 0));
    assert_eq!(checked.buckets[102].dirty_sectors, 6);
    let volume = &checked.report.volumes[0];
    assert_eq!((volume.live_sectors, volume.dirty_sectors), (28, 6));
    assert_eq!(checked.report.journal.unwrap().keys_to_replay, 1);
}

#[test]
fn a_volume_without_backing_device_reads_as_zero_where_it_has_no_data() {
    let key = Key { inode: Inode(1), ..dirty(8, 16, 100) };
    let mut image = ImageBuilder::with_leaf(&[&[key]]);
    image.put(1600, &[7; 8 * 512]);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert!(checked.report.is_clean());
    let mut buffer = vec![1; 24 * 512];
    checked.view.unwrap().read(Inode(1), 0, &mut buffer).unwrap();
    assert!(buffer[..8 * 512].iter().all(|byte| *byte == 0));
    assert!(buffer[8 * 512..16 * 512].iter().all(|byte| *byte == 7));
    assert!(buffer[16 * 512..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_freeing_key_makes_the_child_it_frees_void() {
    // The left leaf was rewritten from bucket 41 to 43: its old key is below, the freeing key and
    // the new key above.
    let mut image = ImageBuilder::with_tree(&[&[]], &[&[dirty(2000, 2008, 100)]]);
    let position = Position::new(Inode(0), 1000);
    let old = [node_key(41, position), node_key(42, Position::MAX)];
    let freeing = Key { pointers: Pointers::one(pointer(41, 0, 1)), ..node_key(41, Position::ZERO) };
    image.node(common::ROOT_BUCKET, &[&old, &[freeing, node_key(43, position)]]);
    image.node(43, &[&[dirty(16, 24, 101)]]);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings, []);
    let usage = |bucket: usize| (checked.buckets[bucket].usage, checked.buckets[bucket].generation);
    assert_eq!((usage(41), usage(43)), ((BucketUse::Free, 1), (BucketUse::Node, 0)));
    assert_eq!(checked.report.tree.unwrap().leaves, 2);
}

#[test]
fn children_must_cover_their_node_once() {
    let mut short = ImageBuilder::with_tree(&[&[]], &[&[]]);
    let left = node_key(41, Position::new(Inode(0), 1000));
    short.node(common::ROOT_BUCKET, &[&[left]]);
    only(short, Kind::ChildrenEnd { found: Some(left.position()) });

    let mut twice = ImageBuilder::with_tree(&[&[]], &[&[]]);
    twice.node(43, &[&[]]);
    let other = node_key(43, left.position());
    twice.node(common::ROOT_BUCKET, &[&[left, other, node_key(42, Position::MAX)]]);
    only(twice, Kind::TwoChildren { position: left.position() });

    let mut same = ImageBuilder::with_tree(&[&[]], &[&[]]);
    same.node(common::ROOT_BUCKET, &[&[left, node_key(41, Position::MAX)]]);
    only(same, Kind::BucketTwice { bucket: 41, first: BucketUse::Node, second: BucketUse::Node });
}

#[test]
fn a_node_may_be_larger_than_its_position() {
    let mut image = ImageBuilder::with_tree(&[&[dirty(16, 24, 100)]], &[&[]]);
    let left = node_key(41, Position::new(Inode(1), 8));
    image.node(common::ROOT_BUCKET, &[&[left, node_key(42, Position::MAX)]]);
    assert_eq!(kinds(image), []);
}

#[test]
fn a_tree_that_bites_its_tail_is_not_walked_for_ever() {
    let mut image = ImageBuilder::with_tree(&[&[]], &[&[]]);
    image.node(common::ROOT_BUCKET, &[&[node_key(common::ROOT_BUCKET, Position::MAX)]]);
    image.set_level(u16::MAX);
    let bucket = common::ROOT_BUCKET;
    only(image, Kind::BucketTwice { bucket, first: BucketUse::Node, second: BucketUse::Node });
}

#[test]
fn keys_belong_into_their_leaf_in_order() {
    let outside = dirty(996, 1004, 100);
    let image = ImageBuilder::with_tree(&[&[outside]], &[&[]]);
    only(image, Kind::KeyOutsideNode { block: 0, key: outside });

    let image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 100), dirty(20, 28, 101)]]);
    assert!(matches!(kinds(image)[..], [Kind::KeyOrder { block: 0, .. }]));

    let far = dirty(16, 24, common::BUCKETS);
    let error = KeyError::BucketOutOfRange { first: 2, limit: 600, found: 600 };
    only(ImageBuilder::with_leaf(&[&[], &[far]]), Kind::Key { block: 1, key: far, error });
}

#[test]
fn a_bucket_has_one_use_and_a_sector_one_extent() {
    let over_leaf = dirty(16, 24, common::ROOT_BUCKET);
    let first = BucketUse::Node;
    let bucket = common::ROOT_BUCKET;
    only(
        ImageBuilder::with_leaf(&[&[over_leaf]]),
        Kind::BucketTwice { bucket, first, second: BucketUse::Data },
    );
    let over_journal = dirty(16, 24, 3);
    let kind = Kind::BucketTwice { bucket: 3, first: BucketUse::Journal, second: BucketUse::Data };
    only(ImageBuilder::with_leaf(&[&[over_journal]]), kind);

    let shared = Key { pointers: Pointers::one(pointer(100, 4, 0)), ..dirty(100, 108, 100) };
    let image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 100), shared]]);
    only(image, Kind::SectorTwice { sector: 1604, end: 1608 });
}

#[test]
fn void_dirty_data_and_wide_generations_are_named() {
    let key = dirty(16, 24, 100);
    let mut image = ImageBuilder::with_leaf(&[&[key]]);
    image.generations[100] = 1;
    only(image, Kind::DirtyStale { key });

    let key = clean(16, 24, 100);
    for (generation, wanted) in [(96, None), (97, Some(Kind::TooStale { key, by: 97 }))] {
        let mut image = ImageBuilder::with_leaf(&[&[key]]);
        image.generations[100] = generation;
        assert_eq!(kinds(image).into_iter().next(), wanted, "{generation}");
    }
}

#[test]
fn a_dead_child_whose_bucket_was_reused_too_often_is_named() {
    let position = Position::new(Inode(0), 1000);
    let dead = node_key(44, position);
    for (generation, wanted) in [(96, None), (97, Some(Kind::TooStale { key: dead, by: 97 }))] {
        let mut image = ImageBuilder::with_tree(&[&[]], &[&[]]);
        let living = [node_key(41, position), node_key(42, Position::MAX)];
        image.node(common::ROOT_BUCKET, &[&[dead], &living]);
        image.generations[44] = generation;
        assert_eq!(kinds(image).into_iter().next(), wanted, "{generation}");
    }
}

#[test]
fn a_pointer_ahead_of_its_bucket_pulls_the_generation_forward() {
    let ahead = Key { pointers: Pointers::one(pointer(100, 0, 1)), ..dirty(16, 24, 0) };
    // Another leaf still points to the bucket's older content, which was clean and is now void.
    let image = ImageBuilder::with_tree(&[&[ahead]], &[&[clean(2000, 2008, 100)]]);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings, []);
    assert_eq!(checked.buckets[100].generation, 1);
    let view = checked.view.unwrap();
    assert_eq!(view.content(Inode(0), 16, 8), [cache(16, 8, 1600, true)]);
    assert_eq!(view.content(Inode(0), 2000, 8), [below(2000, 8)]);
}

#[test]
fn extents_belong_to_volumes() {
    let nobodys = Key { inode: Inode(5), ..dirty(16, 24, 100) };
    only(ImageBuilder::with_leaf(&[&[nobodys]]), Kind::Nobodys { key: nobodys, inode: Inode(5) });

    let mut image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 100)]]);
    image.slots[0].release(7);
    only(image, Kind::DirtyOfGivenUp { key: dirty(16, 24, 100) });

    let key = Key { inode: Inode(1), ..clean(16, 24, 100) };
    only(ImageBuilder::with_leaf(&[&[key]]), Kind::CleanFlashOnly { key });

    // A kernel shrinks a flash-only volume by changing only its size.
    let key = Key { inode: Inode(1), ..dirty(4092, 4100, 100) };
    only(ImageBuilder::with_leaf(&[&[key]]), Kind::BehindEnd { key, end: 4096 });
    let bytes = ImageBuilder::with_leaf(&[&[key]]).finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings[0].severity, Severity::Warning);

    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.slots[1].uuid = image.slots[0].uuid;
    only(image, Kind::DuplicateUuid { uuid: common::BACKING_UUID, first: 0, second: 1 });
}

#[test]
fn whole_blocks_only() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.superblock = {
        let mut bytes = image.superblock.seal().to_vec();
        bytes[192] = 8;
        let sum = bcached_format::checksum::checksum(&bytes[8..208 + 64]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        let facts = bcached_format::DeviceGeometry { sectors: 9600, logical_block_sectors: 1 };
        match bcached_format::RawSuperblock::from_bytes(&bytes).unwrap().check(facts).unwrap() {
            bcached_format::Superblock::Cache(superblock) => superblock,
            bcached_format::Superblock::Backing(_) => panic!("a cache"),
        }
    };
    let key = dirty(16, 20, 100);
    image.node(common::ROOT_BUCKET, &[&[key]]);
    only(image, Kind::Unaligned { key });
}

#[test]
fn a_backing_device_is_compared_with_what_the_cache_says() {
    let filled = |key: Key, fill: u8| {
        let mut image = ImageBuilder::with_leaf(&[&[key]]);
        image.put(1600, &[fill; 8 * 512]);
        image
    };
    let (dirty, clean) = (dirty(16, 24, 100), clean(16, 24, 100));
    let find = |key: Key, fill: u8, state: BackingState, compare_clean: bool| {
        let mut found = Vec::new();
        let options = Options { compare_clean, ..Options::default() };
        with_backing(filled(key, fill), &backing(state, 9), options, |checked| {
            found = checked.report.findings.iter().map(|damage| damage.kind.clone()).collect();
        });
        found
    };
    assert_eq!(find(dirty, 7, BackingState::Dirty, false), []);
    assert_eq!(find(dirty, 9, BackingState::Clean, false), [], "cleaned in memory only, then a crash");
    assert_eq!(find(dirty, 7, BackingState::Clean, false), [Kind::DirtyDiffers { key: dirty }]);
    assert_eq!(find(dirty, 7, BackingState::Stale, false), [Kind::DirtyButStale { sectors: 8 }]);
    assert_eq!(find(clean, 7, BackingState::Clean, false), []);
    assert_eq!(find(clean, 7, BackingState::Clean, true), [Kind::CleanDiffers { key: clean }]);
    assert_eq!(find(clean, 9, BackingState::Clean, true), []);
    assert_eq!(find(clean, 7, BackingState::Stale, true), [], "no copy is read any more");

    let before = Key { ..common::dirty(8, 16, 100) };
    for state in [BackingState::Dirty, BackingState::Clean] {
        let wanted = Kind::OutsideVolume { key: before, start: 16, end: 4096 };
        assert_eq!(find(before, 9, state, false), [wanted]);
    }
    let stale = find(before, 7, BackingState::Stale, false);
    assert_eq!(stale, [Kind::DirtyButStale { sectors: 8 }], "it may have been cut since");
}

#[test]
fn a_dirty_backing_device_must_be_known() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.slots[0].uuid = Uuid([9; 16]);
    with_backing(image, &backing(BackingState::Dirty, 0), Options::default(), |checked| {
        let kinds: Vec<_> = checked.report.findings.iter().map(|damage| damage.kind.clone()).collect();
        assert_eq!(kinds, [Kind::DirtyButUnknown { uuid: common::BACKING_UUID }]);
    });
}

#[test]
fn content_of_a_stale_backing_device_is_its_own() {
    let image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 100)]]);
    with_backing(image, &backing(BackingState::Stale, 9), Options::default(), |checked| {
        assert_eq!(checked.view.as_ref().unwrap().content(Inode(0), 16, 8), [below(16, 8)]);
    });
}

#[test]
fn a_damaged_node_freezes_its_range_and_is_not_a_hole() {
    let mut image = ImageBuilder::with_tree(&[&[dirty(16, 24, 100)]], &[&[dirty(2000, 2008, 101)]]);
    image.put(41 * common::BUCKET_SECTORS, &[0; 512]);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    let [damage] = &checked.report.findings[..] else { panic!("{:?}", checked.report.findings) };
    assert_eq!(damage.kind, Kind::Node(NodeError { block: 0, error: BsetError::ZeroSeq }));
    assert_eq!((damage.place.structure, damage.place.sector), (Structure::Node, Some(656)));
    let view = checked.view.unwrap();
    assert_eq!(
        view.content(Inode(0), 990, 1018),
        [
            SourceRange { start: 990, sectors: 10, source: DataSource::Lost },
            below(1000, 1000),
            cache(2000, 8, 1616, true)
        ]
    );
    assert!(view.read(Inode(0), 16, &mut [0; 512]).is_err());
}

#[test]
fn the_last_set_of_a_node_is_missed_though_nothing_follows_it() {
    let image = ImageBuilder::with_leaf(&[&[clean(16, 24, 100)], &[dirty(16, 24, 101)]]);
    let mut bytes = image.finish();
    bytes[(40 * 16 + 1) * 512 + 16] ^= 4;
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings[0].kind, Kind::NodeSetLost { block: 1 });
}

#[test]
fn a_node_is_as_long_as_the_priorities_of_bcached_say() {
    let two_sets = |is_ours: bool, generation: u8, blocks: u16| {
        let mut image = ImageBuilder::with_leaf(&[&[clean(16, 24, 100)], &[dirty(16, 24, 101)]]);
        image.header.marks_reserve = is_ours;
        image.journal = vec![image.entries(1, &[(10, 10, &[])])];
        image.generations[40] = generation;
        image.prios[40] = prio::prio_of_node(blocks);
        image
    };
    let is_named = |image: ImageBuilder| {
        let kind = Kind::NodeShorter { wanted: 3, found: 2 };
        kinds(image).contains(&kind)
    };
    assert!(is_named(two_sets(true, 0, 3)), "a set was lost");
    assert!(!is_named(two_sets(true, 0, 2)), "nothing was");
    assert!(!is_named(two_sets(true, 0, 1)), "one was added since");
    assert!(!is_named(two_sets(true, 255, 3)), "it was of another node");
    assert!(!is_named(two_sets(false, 0, 3)), "a kernel's say nothing");
}

#[test]
fn priorities_must_be_whole() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.header.prio_bucket = 1;
    image.journal = vec![image.entries(1, &[(10, 10, &[])])];
    only(image, Kind::PrioBucket { index: 0, found: 1 });
    let mut bytes = ImageBuilder::with_leaf(&[&[]]).finish();
    bytes[20 * 16 * 512 + 8000] ^= 1;
    let checked = check(&bytes, &[], Options::default());
    assert!(matches!(checked.report.findings[0].kind, Kind::PrioSet(PrioError::BadChecksum { .. })));
}

#[test]
fn journal_entries_that_are_needed_must_be_there() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(1, &[(5, 5, &[]), (8, 5, &[])]), image.entries(2, &[(10, 5, &[])])];
    let missing = |first, last| Kind::JournalMissing { first, last, last_seq: 5, newest: 10 };
    let found = kinds(image);
    assert_eq!(found[..2], [missing(6, 7), missing(9, 9)]);

    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(1, &[(9, 9, &[]), (10, 7, &[])])];
    assert!(kinds(image).contains(&Kind::JournalLastSeqFalls { seq: 10, last_seq: 7, previous: 9 }));

    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(1, &[(10, 10, &[])]), image.entries(2, &[(10, 10, &[])])];
    assert!(matches!(kinds(image)[..], [Kind::JournalDuplicate { seq: 10, .. }]));

    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal.clear();
    only(image, Kind::NoJournalEntries);
}

#[test]
fn a_journal_that_a_kernel_would_not_find_is_reported() {
    // The bisection ends below the newest entry, and the walk down from there reaches an empty
    // bucket first.
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(0, &[(9, 9, &[])]), image.entries(5, &[(10, 10, &[])])];
    only(image, Kind::JournalSearch { wanted: 10, found: Some(9) });
}

#[test]
fn a_damaged_entry_with_newer_ones_behind_it_is_not_a_crash() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(1, &[(10, 10, &[]), (11, 11, &[]), (12, 12, &[])])];
    let mut bytes = image.finish();
    let second = (3 * 16 + 1) * 512;
    bytes[second + 100] ^= 1;
    let checked = check(&bytes, &[], Options::default());
    let kinds: Vec<_> = checked.report.findings.iter().map(|damage| damage.kind.name()).collect();
    assert_eq!(kinds, ["journal-torn", "journal-hidden"]);
    assert!(!checked.report.is_clean());
}

#[test]
fn a_torn_newest_entry_is_a_warning_only() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.journal = vec![image.entries(1, &[(10, 10, &[]), (11, 10, &[dirty(16, 24, 100)])])];
    let mut bytes = image.finish();
    bytes[(3 * 16 + 1) * 512 + 250] ^= 1;
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings.len(), 1);
    assert_eq!(checked.report.findings[0].severity, Severity::Warning);
    assert!(matches!(checked.report.findings[0].kind, Kind::JournalTorn { newest: 10, .. }));
    assert!(checked.report.is_clean());
}

#[test]
fn the_newest_entry_is_missed_though_its_number_or_magic_is_damaged() {
    // Byte 8 is the first byte of the magic, byte 16 that of the sequence number: 11 becomes 3, as
    // if the entry were of an older lap.
    for at in [8, 16] {
        let mut image = ImageBuilder::with_leaf(&[&[]]);
        image.journal = vec![image.entries(1, &[(10, 10, &[]), (11, 10, &[dirty(16, 24, 100)])])];
        let mut bytes = image.finish();
        bytes[(3 * 16 + 1) * 512 + at] ^= 8;
        let checked = check(&bytes, &[], Options::default());
        assert_eq!(checked.report.findings.len(), 1, "byte {at}");
        assert!(matches!(checked.report.findings[0].kind, Kind::JournalTorn { newest: 10, .. }));
    }
}

#[test]
fn a_range_over_several_leaves_has_the_content_of_each() {
    let bytes = ImageBuilder::with_tree(&[&[dirty(992, 1000, 100)]], &[&[dirty(1000, 1008, 101)]]).finish();
    let checked = check(&bytes, &[], Options::default());
    assert!(checked.report.is_clean());
    let pieces = checked.view.unwrap().content(Inode(0), 990, 20);
    let wanted = [below(990, 2), cache(992, 8, 1600, true), cache(1000, 8, 1616, true), below(1008, 2)];
    assert_eq!(pieces, wanted);
}

#[test]
fn slots_that_were_given_up_all_look_alike() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.slots.iter_mut().for_each(|slot| slot.release(7));
    assert_eq!(kinds(image), []);
}

#[test]
fn a_void_journal_key_is_a_hole() {
    // The data was written to bucket 101 and then to bucket 100, which was written back, became
    // clean and was reused. The process died before the leaf was written: the leaf's data is older
    // than that of the backing device.
    let later = dirty(16, 24, 100);
    let mut image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 101)]]);
    image.generations[100] = 1;
    image.journal = vec![image.entries(1, &[(10, 10, &[later])])];
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings, []);
    let pieces = checked.view.unwrap().content(Inode(0), 16, 8);
    assert_eq!(pieces, [below(16, 8)]);

    // The same, but the leaf's older key is void as well: nothing is lost that the journal does not
    // account for.
    let mut image = ImageBuilder::with_leaf(&[&[dirty(16, 24, 101)]]);
    (image.generations[100], image.generations[101]) = (1, 1);
    image.journal = vec![image.entries(1, &[(10, 10, &[later])])];
    assert_eq!(kinds(image), []);
}

#[test]
fn the_root_must_be_one() {
    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.header.root.dirty = true;
    image.journal = vec![image.entries(1, &[(10, 10, &[])])];
    let key = image.header.root;
    only(image, Kind::BadRoot { key, error: KeyError::DirtyChild });

    let mut image = ImageBuilder::with_leaf(&[&[]]);
    image.generations[40] = 1;
    let key = image.header.root;
    only(image, Kind::StaleMetadata { key });
}

#[test]
fn a_set_that_was_never_started_holds_nothing() {
    let mut image = ImageBuilder::new();
    image.superblock.set_synchronous(false);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert!(checked.report.is_clean() && checked.report.journal.is_none());
    assert!(!checked.report.set.unwrap().started);
}

#[test]
fn what_is_no_cache_is_said_in_a_sentence() {
    for bytes in [Vec::new(), vec![0; 4096], vec![0; 1 << 20], backing(BackingState::Clean, 0)] {
        let checked = check(&bytes, &[], Options::default());
        let [damage] = &checked.report.findings[..] else { panic!("{:?}", checked.report.findings) };
        assert_eq!(damage.place.structure, Structure::Superblock);
        assert!(!damage.to_string().is_empty());
    }
}

#[test]
fn check_pointers_and_pointers_nowhere_are_holes() {
    let check_key = Key { pointers: Pointers::one(Pointer::from_word(u64::MAX)), ..clean(16, 24, 0) };
    let image = ImageBuilder::with_leaf(&[&[clean(16, 24, 100)], &[check_key]]);
    let bytes = image.finish();
    let checked = check(&bytes, &[], Options::default());
    assert_eq!(checked.report.findings, []);
    assert_eq!(checked.view.unwrap().content(Inode(0), 16, 8), [below(16, 8)]);
}

#[test]
fn findings_are_bounded() {
    let keys: Vec<Key> =
        (2..40).map(|at| Key { inode: Inode(5), ..dirty(at * 8, at * 8 + 8, 100 + at) }).collect();
    let bytes = ImageBuilder::with_leaf(&[&keys]).finish();
    let checked = check(&bytes, &[], Options { findings_max: 3, ..Options::default() });
    assert_eq!((checked.report.findings.len(), checked.report.findings_left_out), (3, 35));
    let checked = check(&bytes, &[], Options { findings_max: 0, ..Options::default() });
    assert!(!checked.report.is_clean(), "what was left out may have been an error");
}

/// Proves that a uuid table that is lost, or has a foreign slot, is detected: bcached's journal
/// entries record what the table must be.
#[test]
fn a_table_that_is_not_what_was_written_is_told() {
    let sealed = |change: fn(&mut Vec<UuidSlot>)| {
        let mut image = ImageBuilder::with_leaf(&[&[]]);
        image.seal_table();
        change(&mut image.slots);
        kinds(image)
    };
    assert_eq!(sealed(|_| {}), []);
    let is_sum = |kind: &Kind| matches!(kind, Kind::UuidTableSum { .. });
    let lost = sealed(|slots| slots.iter_mut().for_each(|slot| *slot = UuidSlot::FREE));
    assert!(matches!(&lost[..], [sum] if is_sum(sum)), "{lost:?}");
    let swapped = sealed(|slots| slots.swap(0, 1));
    let doubted = swapped.iter().filter(|kind| matches!(kind, Kind::DoubtedSlot { .. })).count();
    assert!(swapped.iter().any(is_sum) && doubted == 2, "{swapped:?}");
}
