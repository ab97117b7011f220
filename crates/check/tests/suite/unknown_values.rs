//! Proves that what a damaged structure hides is reported as unknown, and never as a number. Each
//! structure of a set is damaged in turn.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::common::{
    self, ImageBuilder, PRIO_BUCKET, ROOT_BUCKET, UUID_BUCKET, backing, backing_of, dirty, node_key,
};
use bcached_check::{BackingClaim, Certainty, DirtyCount, HiddenRange, Options, Report, check};
use bcached_format::{Attachment, BackingState, Inode, Key, Position, Uuid, UuidSlot};

/// Creates a tree of three levels. The backed volume has 8 dirty sectors on either side of sector
/// 1000; the flash-only volume has 8 after them.
fn image() -> ImageBuilder {
    let alone = Key { inode: Inode(1), ..dirty(0, 8, 102) };
    let mut image = ImageBuilder::with_tree(&[&[dirty(16, 24, 100)]], &[&[dirty(2000, 2008, 101), alone]]);
    let middle = Position::new(Inode(0), 1000);
    image.node(43, &[&[node_key(41, middle)]]);
    image.node(44, &[&[node_key(42, Position::MAX)]]);
    image.node(ROOT_BUCKET, &[&[node_key(43, middle), node_key(44, Position::MAX)]]);
    image.set_level(2);
    image
}

/// Returns the report on that set after `buckets` were overwritten with `byte`.
fn damaged(buckets: std::ops::Range<u64>, byte: u8) -> Report {
    let mut bytes = image().finish();
    let bucket = usize::try_from(common::BUCKET_SECTORS * 512).unwrap();
    let at = |bucket_number: u64| usize::try_from(bucket_number).unwrap() * bucket;
    bytes[at(buckets.start)..at(buckets.end)].fill(byte);
    check(&bytes, &[&backing(BackingState::Dirty, 0)], Options::default()).report
}

fn one(bucket: u64) -> std::ops::Range<u64> {
    bucket..bucket + 1
}

/// Returns how far the numbers of each volume in the table are known.
fn states(report: &Report) -> Vec<Certainty> {
    report.volumes.iter().map(|volume| volume.dirty_state).collect()
}

const fn numbers(state: Certainty, sectors: u64, alone_sectors: u64, nobodys_sectors: u64) -> DirtyCount {
    DirtyCount { state, sectors, alone_sectors, nobodys_sectors }
}

const fn hidden(inode: u32, start: u64, end: Option<u64>) -> HiddenRange {
    HiddenRange { inode, start, end }
}

#[test]
fn a_sound_set_knows_all_of_its_numbers() {
    let report = damaged(599..600, 0);
    assert_eq!(report.findings, []);
    assert_eq!(report.dirty, numbers(Certainty::Known, 16, 8, 0));
    assert_eq!((states(&report), report.hidden), (vec![Certainty::Known; 2], Vec::new()));
}

/// Proves that numbers are unknown if a structure cannot be read. Each of these was once reported
/// as "0 B dirty", or as the sum of what could be read.
#[test]
fn what_cannot_be_read_is_no_number() {
    use Certainty::{AtLeast, Unknown};
    for byte in [0, 0x5a] {
        for (what, buckets) in
            [("journal", 2..10), ("priorities", one(PRIO_BUCKET)), ("root", one(ROOT_BUCKET))]
        {
            let report = damaged(buckets, byte);
            assert!(!report.is_clean(), "{what}");
            assert_eq!(report.dirty.state, Unknown, "{what}");
            assert!(states(&report).iter().all(|state| *state == Unknown), "{what}");
        }
        let report = damaged(one(0), byte);
        assert_eq!((report.dirty, report.volumes.len()), (DirtyCount::UNKNOWN, 0), "superblock");

        // The leaf, or the node above it: both hide the same range.
        for bucket in [41, 43] {
            let report = damaged(one(bucket), byte);
            assert_eq!(report.dirty, numbers(AtLeast, 8, 8, 0), "{bucket}");
            assert_eq!(states(&report), [AtLeast, Certainty::Known], "{bucket}");
            assert_eq!(report.hidden, [hidden(0, 0, Some(1000))], "{bucket}");
        }
        for bucket in [42, 44] {
            let report = damaged(one(bucket), byte);
            assert_eq!(report.dirty, numbers(AtLeast, 8, 0, 0), "{bucket}");
            assert_eq!(states(&report), [AtLeast, Unknown], "{bucket}: all of the second is in it");
            assert_eq!(report.hidden, [hidden(0, 1000, None), hidden(1, 0, None)], "{bucket}");
        }
    }
}

#[test]
fn dirty_data_of_a_damaged_table_is_nobodys() {
    // Zeroes are a table without volumes.
    let report = damaged(one(UUID_BUCKET), 0);
    assert_eq!((report.dirty, states(&report)), (numbers(Certainty::Unknown, 0, 0, 24), Vec::new()));
    // The table seems to have many slots, all with the same uuid.
    let report = damaged(one(UUID_BUCKET), 0x5a);
    assert_eq!(report.dirty, numbers(Certainty::Unknown, 0, 0, 24));
    assert!(states(&report).iter().all(|state| *state == Certainty::Unknown));
}

/// Proves that a slot's seal confirms the slot, whatever happened to the others.
#[test]
fn a_sealed_slot_names_its_volume_though_the_table_is_another() {
    use Certainty::{AtLeast, Known as Sound};
    let changed = |change: fn(&mut Vec<UuidSlot>)| {
        let mut image = image();
        image.seal_table();
        change(&mut image.slots);
        check(&image.finish(), &[&backing(BackingState::Dirty, 0)], Options::default()).report
    };
    let report = changed(|_| {});
    assert_eq!((report.findings.len(), report.dirty), (0, numbers(Sound, 16, 8, 0)));
    // The second volume is missing.
    let report = changed(|slots| slots[1] = UuidSlot::FREE);
    assert!(report.counts.iter().any(|one| one.kind == "uuid-table-sum"), "{:?}", report.counts);
    assert_eq!((report.dirty, states(&report)), (numbers(AtLeast, 16, 0, 8), vec![Sound]));
    // The slot may belong to another volume. No device claims the inode, so its keys belong to no
    // volume, as in the engine.
    let report = changed(|slots| slots[1].uuid = Uuid([9; 16]));
    assert!(report.counts.iter().any(|one| one.kind == "doubted-slot"), "{:?}", report.counts);
    assert_eq!((report.dirty, states(&report)), (numbers(AtLeast, 16, 0, 8), vec![Sound]));
    let doubts = |inode| report.findings.iter().any(|damage| damage.hides_name_of(inode));
    assert_eq!((doubts(0), doubts(1)), (false, true));
}

/// Proves that a volume missing from the table may be in the damaged part of the index.
#[test]
fn a_table_that_lost_volumes_does_not_say_that_damage_hides_nothing() {
    let alone = Key { inode: Inode(1), ..dirty(0, 8, 102) };
    let mut image = ImageBuilder::with_tree(&[&[dirty(16, 24, 100)]], &[&[alone]]);
    // After the end of the first volume.
    let end = Position::new(Inode(0), 5000);
    image.node(ROOT_BUCKET, &[&[node_key(41, end), node_key(42, Position::MAX)]]);
    image.seal_table();
    image.slots[1] = UuidSlot::FREE;
    let mut bytes = image.finish();
    let bucket = usize::try_from(common::BUCKET_SECTORS * 512).unwrap();
    bytes[42 * bucket..43 * bucket].fill(0);
    let report = check(&bytes, &[&backing(BackingState::Dirty, 0)], Options::default()).report;
    assert_eq!(
        (report.dirty, states(&report)),
        (numbers(Certainty::AtLeast, 8, 0, 0), vec![Certainty::Known])
    );
}

/// Proves that an older copy has no known numbers: a later state of the cache may have had more
/// dirty data, or less.
#[test]
fn an_older_copy_of_a_cache_has_no_numbers() {
    let used_at = |entry| {
        let attachment = Attachment { number: Inode(0), entry, stamp: 0 };
        let backing = backing_of(BackingState::Dirty, 0, Some(attachment));
        check(&image().finish(), &[&backing], Options::default()).report
    };
    assert_eq!(used_at(1).dirty, numbers(Certainty::Known, 16, 8, 0));
    let report = used_at(1000);
    assert!(report.counts.iter().any(|one| one.kind == "older-cache"), "{:?}", report.counts);
    assert_eq!(report.dirty.state, Certainty::Unknown);
}

/// Proves that nothing is known if journal entries are missing: any of them may have made data
/// dirty or clean.
#[test]
fn missing_journal_entries_leave_nothing_known() {
    let mut image = image();
    let some: &[Key] = &[dirty(3000, 3008, 103)];
    image.journal = vec![image.entries(1, &[(8, 8, some)]), image.entries(2, &[(10, 8, some)])];
    let bytes = image.finish();
    let report = check(&bytes, &[], Options::default()).report;
    assert!(report.counts.iter().any(|one| one.kind == "journal-missing"), "{:?}", report.counts);
    assert_eq!(report.dirty.state, Certainty::Unknown);
}

/// Proves that a key that makes no sense, like a cut-off set of a node, puts all keys of the node
/// in doubt.
#[test]
fn a_node_that_lost_keys_is_not_counted_as_whole() {
    let outside = dirty(600, 608, 103);
    let mut image = ImageBuilder::with_tree(&[&[dirty(16, 24, 100)]], &[&[outside, dirty(2000, 2008, 101)]]);
    image.slots.truncate(1);
    let report = check(&image.finish(), &[], Options::default()).report;
    assert_eq!(report.dirty, numbers(Certainty::AtLeast, 16, 0, 0));
    assert_eq!(report.hidden, [hidden(0, 1000, None)]);
}

#[test]
fn backing_superblocks_are_quoted_whatever_the_cache_has_become() {
    let wanted = |claims: &[BackingClaim]| {
        let [claim] = claims else { return false };
        (claim.backing, claim.uuid, claim.set_uuid, claim.state)
            == (0, common::BACKING_UUID, common::SET_UUID, "dirty")
    };
    for bucket in [0, PRIO_BUCKET, UUID_BUCKET, ROOT_BUCKET] {
        let report = damaged(one(bucket), 0x5a);
        assert!(wanted(&report.claims), "{bucket}: {:?}", report.claims);
    }
    let bytes = image().finish();
    let none = check(&bytes, &[&backing(BackingState::None, 0)], Options::default()).report;
    assert_eq!(none.claims, [], "it belongs to no set");
}

/// Proves that a finding is kept if it is the first of its kind, even if another kind has filled
/// the list.
#[test]
fn each_kind_is_counted_and_the_first_of_it_kept() {
    let keys: Vec<Key> =
        (2..40).map(|at| Key { inode: Inode(5), ..dirty(at * 8, at * 8 + 8, 100 + at) }).collect();
    let mut image = ImageBuilder::with_leaf(&[&keys]);
    // Two extents with the same data: found after all of these.
    image.node(ROOT_BUCKET, &[&keys, &[Key { inode: Inode(6), ..dirty(0, 8, 102) }]]);
    let options = Options { findings_max: 3, ..Options::default() };
    let report = check(&image.finish(), &[], options).report;
    let counts: Vec<_> = report.counts.iter().map(|one| (one.kind.as_str(), one.count)).collect();
    assert_eq!(counts, [("sector-twice", 1), ("nobodys", 39)]);
    assert_eq!((report.findings.len(), report.findings_left_out), (4, 36));
}
