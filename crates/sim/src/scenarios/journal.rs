//! What a crash leaves of the journal and of the note.

use super::bench::quiet;
use super::image::{bytes, journal, nodes, records, sizes};
use super::stage::{
    BACK, DATA_START, FLUSH, assert_refused, bench, geometry, keep, packed, pause, power_cut, small, stage,
    trouble, unstarted, write,
};
use crate::disk::{DiskFault, FaultRules, OpKind, Survivors, WrittenPart};
use crate::driver::{Crash, HaltReason, OpView};
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::Geometry;
use crate::system::engine::Engine;
use crate::workload::Step;
use bcached_check::{NodeRecord, Record};
use bcached_engine::Phase;
use bcached_format::{Jset, JsetHeader, SECTOR_BYTES, jset};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

super::scenarios! {
    include_str!("journal.rs"),
    a_full_journal_is_replayed_though_leaves_and_root_split,
    a_torn_newest_entry_is_no_entry,
    a_damaged_newest_entry_after_a_clean_stop_loses_nothing,
    a_start_does_not_take_a_damaged_entry_for_the_end_of_the_journal,
    a_start_without_an_entry_that_is_needed_is_refused,
    a_start_behind_a_damaged_entry_may_be_cut_short,
    what_somebody_did_not_go_on_with_is_not_brought_back,
    a_set_with_the_uuid_of_a_former_one_believes_none_of_its_entries,
    what_cannot_be_read_of_a_former_journal_keeps_no_new_set_from_starting,
    a_brand_new_set_starts_wherever_its_first_start_was_cut,
    a_note_that_comes_back_after_others_ran_the_set_is_void,
    the_note_of_a_copy_is_not_believed_by_the_original,
    what_is_acknowledged_while_the_note_is_gone_outlives_the_process,
    what_was_acknowledged_before_the_note_went_outlives_the_process,
    acknowledged_writes_are_durable_after_the_journal_delay,
}

/// The keys of a few old files wait in memory until their leaf is worth writing, while thousands of
/// new files are written all over the volume. The journal runs full, and the power fails just as
/// that leaf is finally written to free journal space. The replayed keys are added to leaves that
/// already hold most of them. So many of those split that the root splits too, with no more room in
/// the journal than there was. (Kernels hung here, at every start from then on.)
/// Proves invariant D8.
fn a_full_journal_is_replayed_though_leaves_and_root_split() {
    // Proves invariant L6.
    // Keys under one root, which has room for some twenty more children.
    const KEYS: u64 = 9200;
    // The gap, the reserve for entries that free others, and the free buckets at which leaves are
    // written to free journal space.
    const FREE_MAX: u64 = 3;
    let wide =
        Geometry { bucket_sectors: 8, buckets: 2600, note_records: 2000, ..packed(vec![3 * KEYS], BACK) };
    let (mut stage, _) = bench(wide, quiet());
    stage.together((0..KEYS).map(|place| write(place * 3..place * 3 + 1)).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.stop().unwrap();
    stage.start().unwrap();
    let leaves: Vec<NodeRecord> = nodes(&mut stage).into_iter().filter(|node| node.level == 0).collect();
    let first = leaves[0].sector..leaves[0].sector + u64::from(leaves[0].sectors);
    let written = move |op: &OpView| op.kind == OpKind::Write && op.fua && first.contains(&op.sectors.start);
    // Between the keys that are there: few for the first leaf, and for each other leaf as many as
    // cause it to be written.
    let beside = |from: u64, count| (from..from + count).map(|place| write(place * 3 + 1..place * 3 + 2));
    let mut all: Vec<Step> = beside(0, 10).chain([Step::Settle, Step::Pause(200)]).collect();
    for leaf in &leaves[1..] {
        all.extend(beside((leaf.low.offset - DATA_START) / 3 + 20, 43));
        all.extend([Step::Settle, Step::Pause(150)]);
    }
    stage.crash_at(all, written, Crash::PowerCut, Survivors::Everything).unwrap();
    let (needed, buckets) = (needed_buckets(&mut stage), sizes(&mut stage).journal_buckets);
    assert!(needed + FREE_MAX >= buckets, "{needed} of {buckets} journal buckets are needed");
    let before = splits(&stage);
    stage.start().unwrap();
    stage.verify().unwrap();
    // A stop waits until everything is in its leaves.
    stage.stop().unwrap();
    let after = splits(&stage);
    assert!(after.leaves > before.leaves && after.roots > before.roots, "{before:?}, then {after:?}");
}

/// Returns the number of journal buckets that a replay needs.
fn needed_buckets(stage: &mut ScenarioRig) -> u64 {
    let entry = |record| match record {
        Record::JournalEntry { seq, last_seq, sector, .. } => Some((seq, last_seq, sector)),
        _ => None,
    };
    let entries: Vec<(u64, u64, u64)> = records(stage).into_iter().filter_map(entry).collect();
    let (_, oldest, _) = *entries.iter().max().expect("there are entries");
    let bucket_sectors = sizes(stage).bucket_sectors;
    let needed = entries.iter().filter(|(seq, ..)| *seq >= oldest);
    needed.map(|(_, _, sector)| sector / bucket_sectors).collect::<BTreeSet<u64>>().len() as u64
}

/// Number of node splits so far.
#[derive(Debug)]
struct SplitCounts {
    leaves: u64,
    roots: u64,
}

fn splits(stage: &ScenarioRig) -> SplitCounts {
    let begun = |phase| stage.rig().phases.begun(phase);
    SplitCounts { leaves: begun(Phase::LeafSplit), roots: begun(Phase::RootSplit) }
}

/// The power fails while a journal entry is being written, and half of it is on the device. Its
/// contents were not acknowledged; everything before it was.
fn a_torn_newest_entry_is_no_entry() {
    let (_, whole) = cut_in_an_entry(Survivors::Everything);
    let (_, none) = cut_in_an_entry(Survivors::Nothing);
    let mut torn = 0;
    for seed in 0..16 {
        let (mut stage, left) = cut_in_an_entry(Survivors::Seeded(seed));
        torn += u32::from(left != whole && left != none);
        stage.start().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
    assert!(torn > 1, "one entry in four is torn by a seeded subset");
}

/// Returns a set whose power was cut when the device had received an entry of several sectors, and
/// what is left of that entry.
fn cut_in_an_entry(survivors: Survivors) -> (ScenarioRig, Vec<u8>) {
    let (mut stage, _) = bench(packed(vec![4096], BACK), quiet());
    keep(&mut stage, 0..8);
    let journal = journal(&mut stage);
    let entry: Rc<RefCell<Range<u64>>> = Rc::default();
    let met = Rc::clone(&entry);
    let given = move |op: &OpView| {
        let is_entry = op.kind == OpKind::Write && journal.contains(&op.sectors.start);
        if is_entry {
            *met.borrow_mut() = op.sectors.clone();
        }
        is_entry
    };
    let mut steps: Vec<Step> = (10..90).map(|place| write(place * 2..place * 2 + 1)).collect();
    steps.extend([Step::Settle, FLUSH]);
    stage.crash_at(steps, given, Crash::PowerCut, survivors).unwrap();
    let entry = entry.take();
    assert!(entry.end - entry.start > 1, "one sector cannot be torn");
    let length = usize::try_from((entry.end - entry.start) * SECTOR_BYTES).unwrap();
    let left = bytes(&mut stage, 0, entry.start, length);
    (stage, left)
}

/// A bit of the newest entry flips while the device lies in a drawer. The set was stopped cleanly,
/// so the entry before it says the same. Nothing that the earlier entry refers to may have been
/// reused yet.
fn a_damaged_newest_entry_after_a_clean_stop_loses_nothing() {
    let (mut stage, _) = bench(small(vec![4096], BACK), quiet());
    for round in 0..4 {
        stage.together((0..256).map(|place| write(place * 16..place * 16 + 8 + round)).collect()).unwrap();
        stage.ask(FLUSH).unwrap();
        stage.stop().unwrap();
        let newest = *entries(&mut stage).last().expect("there are entries");
        stage.device(0).rot(newest.1, 800);
        stage.start().unwrap();
        stage.verify().unwrap();
    }
}

/// Returns the sequence number and sector of each journal entry, oldest first.
fn entries(stage: &mut ScenarioRig) -> Vec<(u64, u64)> {
    let entry = |record| match record {
        Record::JournalEntry { seq, sector, .. } => Some((seq, sector)),
        _ => None,
    };
    let mut entries: Vec<(u64, u64)> = records(stage).into_iter().filter_map(entry).collect();
    entries.sort_unstable();
    entries
}

/// A bit has flipped in an entry that was no longer needed, and newer entries follow it in its
/// bucket. A start that took the damaged entry for the end of the journal applied older keys over
/// newer leaves, silently.
fn a_start_does_not_take_a_damaged_entry_for_the_end_of_the_journal() {
    // Proves invariant D42.
    let mut stage = stage();
    // Each process begins in the next bucket.
    for round in 0..8 {
        (0..6).for_each(|_| keep(&mut stage, 0..64));
        stage.stop().unwrap();
        let before = beside_the_newest(&mut stage);
        assert!(before.len() > 4, "{before:?} precede the newest");
        stage.device(0).rot(before[round % before.len()].1, 800);
        stage.start().unwrap();
        stage.verify().unwrap();
    }
}

/// The same with entries that are needed: nothing else tells what one of them contained. The start
/// is refused and changes nothing: with the bit restored, all data is there.
fn a_start_without_an_entry_that_is_needed_is_refused() {
    // Proves invariant D42.
    // Large enough that the journal has room for keys whose leaves are not written yet.
    let (mut stage, _) = bench(Geometry { buckets: 2000, ..geometry(vec![4096], BACK) }, quiet());
    let mut refused = 0;
    for _ in 0..3 {
        (0..6).for_each(|_| keep(&mut stage, 0..64));
        power_cut(&mut stage);
        let needed = needed_from(&mut stage);
        let mut before = beside_the_newest(&mut stage);
        before.retain(|(sequence, _)| *sequence >= needed);
        refused += before.len();
        for (_, sector) in before {
            stage.device(0).rot(sector, 800);
            assert_refused(&mut stage, "behind one that is damaged");
            stage.device(0).rot(sector, 800);
        }
        stage.start().unwrap();
        stage.verify().unwrap();
    }
    assert!(refused > 6, "entries are needed by others: {refused}");
}

/// The power fails during a start behind a damaged entry that is not needed. The needed entries are
/// still behind it, and no longer in the bucket of the newest entry or the next one.
fn a_start_behind_a_damaged_entry_may_be_cut_short() {
    // Proves invariant D42.
    for survivors in [Survivors::Everything, Survivors::Nothing] {
        let ended = (0..40).find(|tenth| {
            let mut stage = behind_damage();
            {
                let mut world = stage.rig().world.borrow_mut();
                let end = world.points() + 1 + tenth * 10;
                world.crash_at(end);
            }
            let is_over = stage.start().is_ok();
            stage.crash(Crash::PowerCut, survivors);
            stage.start().unwrap_or_else(|fault| panic!("cut at {}, {survivors}: {fault}", 1 + tenth * 10));
            stage.verify().unwrap();
            stage.stop().unwrap();
            is_over
        });
        assert!(ended.is_some_and(|tenth| tenth > 2), "a start is more than that");
    }
}

/// Returns a set that was not stopped. Its newest entries need others of their bucket, but not the
/// one before these, which is damaged.
fn behind_damage() -> ScenarioRig {
    let (mut stage, _) = bench(Geometry { buckets: 2000, ..geometry(vec![4096], BACK) }, quiet());
    (0..6).for_each(|_| keep(&mut stage, 0..64));
    // Leaves are written meanwhile.
    (0..40).for_each(|_| pause(&mut stage, 1000).unwrap());
    (0..6).for_each(|place| keep(&mut stage, place * 64..place * 64 + 64));
    power_cut(&mut stage);
    let (needed, before) = (needed_from(&mut stage), beside_the_newest(&mut stage));
    let (_, unneeded) = before.iter().rfind(|(sequence, _)| *sequence < needed).expect("an older entry");
    assert!(before.last().is_some_and(|(sequence, _)| *sequence > needed), "{before:?}, needed {needed}");
    stage.device(0).rot(*unneeded, 800);
    stage
}

/// A kernel, which takes a damaged entry for the end of the journal, has continued before that
/// entry and wrapped around to the same bucket. What it has not overwritten lies directly behind
/// its last entry, and too few sequence numbers are missing to fill the space between them.
fn what_somebody_did_not_go_on_with_is_not_brought_back() {
    let (mut stage, _) = bench(geometry(vec![4096], BACK), quiet());
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    let sizes = sizes(&mut stage);
    let (_, newest) = *entries(&mut stage).last().expect("there are entries");
    let block = bytes(&mut stage, 0, newest, sizes.block_bytes());
    let header = Jset::parse(&block, sizes.magic).expect("the newest entry").header;
    let seq = header.seq + 3;
    let mut left = jset::seal(sizes.magic, &JsetHeader { seq, last_seq: seq, prio_bucket: 0, ..header }, &[]);
    left.resize(sizes.block_bytes(), 0);
    stage.device(0).place(newest + sizes.block_sectors, &left);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Returns the sequence number and sector of the entries before the newest one in its bucket,
/// oldest first.
fn beside_the_newest(stage: &mut ScenarioRig) -> Vec<(u64, u64)> {
    let (mut entries, bucket_sectors) = (entries(stage), sizes(stage).bucket_sectors);
    let (_, newest) = entries.pop().expect("there are entries");
    entries.retain(|(_, sector)| sector / bucket_sectors == newest / bucket_sectors);
    entries
}

/// Returns the oldest entry that the newest one needs.
fn needed_from(stage: &mut ScenarioRig) -> u64 {
    let entry = |record| match record {
        Record::JournalEntry { seq, last_seq, .. } => Some((seq, last_seq)),
        _ => None,
    };
    records(stage).into_iter().filter_map(entry).max().expect("there are entries").1
}

/// A cache is formatted again and the set gets its old uuid. The journal is full of entries of the
/// old set, which look like the new set's own and have higher sequence numbers. The first power cut
/// brought them to life: keys of the old set that pointed into the new one.
fn a_set_with_the_uuid_of_a_former_one_believes_none_of_its_entries() {
    let sizes = geometry(vec![4096], BACK);
    let (mut former, _) = bench(sizes.clone(), quiet());
    (0..40).for_each(|place| keep(&mut former, place * 64..place * 64 + 32));
    former.stop().unwrap();
    let place = journal(&mut former);
    let length = usize::try_from((place.end - place.start) * SECTOR_BYTES).unwrap();
    let left = bytes(&mut former, 0, place.start, length);

    let bucket = |entries: Vec<(u64, u64)>| {
        let (_, sector) = entries.into_iter().max().expect("there are entries");
        (sector - place.start) / u64::from(sizes.bucket_sectors)
    };
    let last = bucket(entries(&mut former));

    let (mut stage, _) = unstarted(sizes.clone(), quiet(), 1);
    stage.device(0).place(place.start, &left);
    stage.start().unwrap();
    // A kernel assumes that the ring is sorted, and looks for newer entries here.
    let buckets = (place.end - place.start) / u64::from(sizes.bucket_sectors);
    assert_eq!(bucket(entries(&mut stage)), (last + 1) % buckets);
    keep(&mut stage, 0..64);
    power_cut(&mut stage);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A thousand new sets are started on a test bench, and the plug is pulled during the first start
/// of each. Whatever was written of a set, it starts the next time.
fn a_brand_new_set_starts_wherever_its_first_start_was_cut() {
    for survivors in [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(1), Survivors::Seeded(2)] {
        let ended = (1..).find(|point| {
            let (mut stage, _) = unstarted(small(vec![4096], BACK), quiet(), 1);
            stage.rig().world.borrow_mut().crash_at(*point);
            let is_over = match stage.start() {
                Err(FailureKind::Waiting { halt: HaltReason::Requested(_), .. }) => false,
                other => other.map(|()| true).unwrap(),
            };
            stage.crash(Crash::PowerCut, survivors);
            stage.start().unwrap_or_else(|fault| panic!("cut at {point}, {survivors}: {fault}"));
            keep(&mut stage, 0..64);
            power_cut(&mut stage);
            stage.start().unwrap();
            stage.verify().unwrap();
            stage.stop().unwrap();
            is_over
        });
        assert!(ended.is_some_and(|point| point > 10), "a first start is more than this");
    }
}

/// An SSD cannot read a sector of the future journal until it is written. No data of the new set is
/// there.
fn what_cannot_be_read_of_a_former_journal_keeps_no_new_set_from_starting() {
    let (mut other, _) = bench(geometry(vec![4096], BACK), quiet());
    let place = journal(&mut other);
    let (mut stage, _) = unstarted(geometry(vec![4096], BACK), quiet(), 1);
    trouble(&mut stage, 0, OpKind::Read, place, 1000, DiskFault::Fail(WrittenPart::Nothing));
    stage.start().unwrap();
    assert!(stage.device(0).faults.failures() > 0, "the sector was read");
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    stage.device(0).faults = FaultRules::default();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The daemon is killed and leaves a note. Before it is started again the set runs without
/// knowledge of that note: under a kernel, or under a daemon with its note elsewhere. New data is
/// written. Then the daemon returns and finds its note. The note belongs to a history that has
/// moved on, and must not put its old data over the new. (Seen with a kernel in between: two
/// hundred sectors reverted by a day.) Proves invariant D7.
fn a_note_that_comes_back_after_others_ran_the_set_is_void() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.ask(write(0..64)).unwrap();
    let left = stage.note().clone();
    assert!(!left.is_empty(), "the second write is in the note alone");
    stage.crash(Crash::PowerCut, Survivors::Everything);

    stage.start().unwrap();
    stage.ask(write(0..64)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);

    *stage.note() = left;
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// All devices of a set are copied after a stop. The copy is served, and its daemon is killed; the
/// original continues independently. Both have been started equally often, and once the note of the
/// copy applied its keys over those of the original. Proves invariant D7.
fn the_note_of_a_copy_is_not_believed_by_the_original() {
    let mut stage = stage();
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    let original = stage.rig().snapshot();
    stage.start().unwrap();
    // The copy is started some seconds later.
    pause(&mut stage, 3000).unwrap();
    (0..8).for_each(|_| keep(&mut stage, 0..64));
    stage.ask(write(0..64)).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    let left = stage.note().clone();
    assert!(!left.is_empty(), "the write is in the note alone");

    stage.rig().world.borrow_mut().devices = original.devices;
    *stage.rig().oracle.borrow_mut() = original.oracle;
    *stage.note() = original.note;
    stage.start().unwrap();
    stage.ask(write(0..64)).unwrap();
    stage.stop().unwrap();
    *stage.note() = left;
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A cleanup job removes the note's file, and the daemon is killed. What was acknowledged since
/// then is still there, and so is everything else once another file has taken its place.
/// Proves invariant D6.
fn what_is_acknowledged_while_the_note_is_gone_outlives_the_process() {
    for is_replaced in [false, true] {
        let mut stage = stage();
        keep(&mut stage, 0..64);
        stage.ask(write(0..32)).unwrap();
        stage.ask(Step::Note { is_there: false }).unwrap();
        stage.ask(write(16..64)).unwrap();
        if is_replaced {
            stage.ask(write(64..72)).unwrap();
            stage.ask(Step::Note { is_there: true }).unwrap();
            stage.ask(write(0..8)).unwrap();
        }
        stage.crash(Crash::ProcessDeath, Survivors::Everything);
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// The same, without writes after the note is gone. The journal waits for a minute, yet what was
/// acknowledged before the note went is there after a second.
fn what_was_acknowledged_before_the_note_went_outlives_the_process() {
    let mut geometry = geometry(vec![16384], BACK);
    geometry.tuning.set.journal_delay_ms = 60_000;
    let mut stage = ScenarioRig::new(Rc::new(Engine), geometry, 1);
    stage.start().unwrap();
    stage.ask(write(0..32)).unwrap();
    stage.ask(Step::Note { is_there: false }).unwrap();
    pause(&mut stage, 1000).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    stage.start().unwrap();
    assert_eq!(stage.values(0, 0..32).unwrap(), [SectorValue::Written(1); 32]);
    stage.stop().unwrap();
}

/// No client asks for durability, and the power fails a while later. The keys have been in the
/// journal since the delay expired for which the set collects more of them, as with a kernel.
fn acknowledged_writes_are_durable_after_the_journal_delay() {
    let mut stage = stage();
    stage.ask(write(0..8)).unwrap();
    pause(&mut stage, 300).unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    stage.start().unwrap();
    assert_eq!(stage.values(0, 0..8).unwrap(), [SectorValue::Written(1); 8]);
}
