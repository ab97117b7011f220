//! What a crash leaves of the journal and of the note.

use super::bench::quiet;
use super::image::{nodes, records, sizes};
use super::stage::{BACK, DATA_START, FLUSH, bench, keep, pause, power_cut, small, stage, unstarted, write};
use crate::disk::{OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::scenario::Stage;
use crate::stamp::Value;
use crate::system::Geometry;
use crate::workload::Step;
use bcached_check::{NodeRecord, Record};
use std::ops::Range;

super::scenarios! {
    include_str!("journal.rs"),
    a_full_journal_is_replayed_though_leaves_split,
    a_torn_newest_entry_is_no_entry,
    a_damaged_newest_entry_after_a_clean_stop_loses_nothing,
    a_brand_new_set_starts_wherever_its_first_start_was_cut,
    a_note_that_comes_back_after_others_ran_the_set_is_void,
    acknowledged_writes_are_durable_after_the_journal_delay,
}

/// The keys of a few old files wait in memory for their leaf to be worth writing, while new files come by the hundred:
/// the journal runs full, and the power goes just as that leaf is written at last for the sake of its room. What is replayed comes on top of leaves
/// that hold most of it: they split, with no more room in the journal than there was. (Kernels hung here, at every start
/// from then on.)
fn a_full_journal_is_replayed_though_leaves_split() {
    let (mut stage, _) = bench(packed(), quiet());
    stage.together((0..1200).map(|place| write(place * 3..place * 3 + 1)).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.stop().unwrap();
    stage.start().unwrap();
    let leaves: Vec<NodeRecord> = nodes(&mut stage).into_iter().filter(|node| node.level == 0).collect();
    let first = leaves[0].sector..leaves[0].sector + u64::from(leaves[0].sectors);
    let written = move |op: &OpView| op.kind == OpKind::Write && op.fua && first.contains(&op.sectors.start);
    // Between the keys that are there: few for the first leaf, as many for the next as make it be written, then for a
    // third, each durable.
    let beside = |place: u64, fua| Step::Write { volume: 0, sectors: place * 3 + 1..place * 3 + 2, fua };
    let mut all: Vec<Step> = (0..10).map(|place| beside(place, false)).collect();
    all.extend([Step::Settle, Step::Pause(200)]);
    let next = (leaves[1].low.offset - DATA_START) / 3 + 20;
    all.extend((next..next + 90).map(|place| beside(place, false)));
    all.extend([Step::Settle, Step::Pause(200)]);
    let third = (leaves[2].low.offset - DATA_START) / 3 + 20;
    all.extend((third..third + 400).map(|place| beside(place, true)));
    stage.crash_at(all, written, Crash::PowerCut, Survivors::Everything).unwrap();
    let before = nodes(&mut stage).len();
    stage.start().unwrap();
    assert!(nodes(&mut stage).len() > before, "no leaf has split in the replay");
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The power goes while an entry of the journal is being written, and half of it is there. What stood in it was not
/// acknowledged; everything before it was.
fn a_torn_newest_entry_is_no_entry() {
    for seed in 0..8 {
        let (mut stage, _) = bench(packed(), quiet());
        keep(&mut stage, 0..8);
        let journal = journal(&mut stage);
        let torn = move |op: &OpView| op.kind == OpKind::Write && journal.contains(&op.sectors.start);
        let mut steps: Vec<Step> = (10..90).map(|place| write(place * 2..place * 2 + 1)).collect();
        steps.extend([Step::Settle, FLUSH]);
        stage.crash_at(steps, torn, Crash::PowerCut, Survivors::Seeded(seed)).unwrap();
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// A bit of the newest entry has changed in a drawer. The set was stopped in order, so the entry before it says the same;
/// nothing that it names may have been given to others yet.
fn a_damaged_newest_entry_after_a_clean_stop_loses_nothing() {
    let (mut stage, _) = bench(small(vec![4096], BACK), quiet());
    for round in 0..4 {
        stage.together((0..256).map(|place| write(place * 16..place * 16 + 8 + round)).collect()).unwrap();
        stage.ask(FLUSH).unwrap();
        stage.stop().unwrap();
        let entry = |record| match record {
            Record::JournalEntry { seq, sector, .. } => Some((seq, sector)),
            _ => None,
        };
        let newest = records(&mut stage).into_iter().filter_map(entry).max().expect("there are entries");
        stage.device(0).rot(newest.1, 800);
        stage.start().unwrap();
        stage.verify().unwrap();
    }
}

/// A test bench starts a thousand new sets and pulls the plug during the first start of each. Whatever was written of
/// one, it is started the next time.
fn a_brand_new_set_starts_wherever_its_first_start_was_cut() {
    for survivors in [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(1), Survivors::Seeded(2)] {
        let ended = (1..).find(|point| {
            let (mut stage, _) = unstarted(small(vec![4096], BACK), quiet(), 1);
            stage.rig().world.borrow_mut().crash_at(*point);
            let started = stage.start();
            stage.crash(Crash::PowerCut, survivors);
            stage.start().unwrap_or_else(|fault| panic!("cut at {point}, {survivors}: {fault}"));
            keep(&mut stage, 0..64);
            power_cut(&mut stage);
            stage.start().unwrap();
            stage.verify().unwrap();
            stage.stop().unwrap();
            started.is_ok()
        });
        assert!(ended.is_some_and(|point| point > 10), "a first start is more than this");
    }
}

/// Buckets of 8 KiB and sectors for blocks: a small tree, entries of one sector, and room for many of them.
fn packed() -> Geometry {
    let (buckets, note_records) = (700, 2000);
    Geometry {
        block_sectors: 1,
        set_block_sectors: 1,
        torn_sectors: 1,
        buckets,
        note_records,
        ..small(vec![4096], BACK)
    }
}

/// Where the journal lies on the cache device.
fn journal(stage: &mut Stage) -> Range<u64> {
    let sizes = sizes(stage);
    let first = sizes.first_bucket * sizes.bucket_sectors;
    first..first + sizes.journal_buckets * sizes.bucket_sectors
}

/// The daemon is killed and leaves a note. Before it is started again somebody else runs the set, who knows nothing of
/// that note: a kernel, or a daemon with its note elsewhere. He writes. Then the daemon returns and finds its note: it
/// is of a history that others have gone on with, and must not put its old data over theirs. (Seen with a kernel in
/// between: two hundred sectors went back by a day.)
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

/// Nobody asks for durability, and the power goes a while later: the keys have been in the journal since the time was
/// over that the set waits for more of them, as with a kernel.
fn acknowledged_writes_are_durable_after_the_journal_delay() {
    let mut stage = stage();
    stage.ask(write(0..8)).unwrap();
    pause(&mut stage, 300).unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    stage.start().unwrap();
    assert_eq!(stage.values(0, 0..8).unwrap(), [Value::Written(1); 8]);
}
