//! Damaged nodes, priorities and superblocks.

use super::bench::{Bench, quiet};
use super::image::{backing, node_for, nodes, records};
use super::stage::{
    AROUND, BACK, DATA_START, FLUSH, THROUGH, assert_refused, bench, keep, pause, read, small, trouble,
    unstarted, write, write_fua,
};
use crate::disk::{Fault as DiskFault, Landed, OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::scenario::Stage;
use crate::system::{Geometry, Mode};
use crate::workload::Step;
use bcached_check::Record;
use bcached_engine::Options;
use bcached_format::{BackingState, SUPERBLOCK_SECTOR};
use std::rc::Rc;
use std::time::Duration;

super::scenarios! {
    include_str!("metadata.rs"),
    a_leaf_found_damaged_while_it_is_served_is_no_hole,
    a_leaf_found_damaged_in_a_clean_mode_is_not_noticed,
    a_root_found_damaged_at_the_next_start_is_refused,
    a_set_behind_a_torn_one_is_not_overlooked,
    a_torn_append_to_a_leaf_is_no_set,
    a_set_that_lost_its_priorities_is_refused,
    no_power_cut_tears_a_superblock,
}

/// A small tree of two levels in a small cache: many keys that cannot be joined.
fn forest(mode: u64) -> (Stage, Rc<Bench>) {
    let geometry = Geometry {
        block_sectors: 1,
        set_block_sectors: 1,
        torn_sectors: 1,
        buckets: 900,
        ..small(vec![4096], mode)
    };
    let (mut stage, bench) = bench(geometry, quiet());
    stage.together((0..1200).map(|place| write(place * 3..place * 3 + 1)).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    pause(&mut stage, 20).unwrap();
    stage.stop().unwrap();
    stage.start().unwrap();
    assert!(bench.status().tree_depth > 0, "the tree is no single leaf");
    (stage, bench)
}

/// A bit changes in a leaf while the set is served, and the set has dirty data there. What lies in that leaf cannot be
/// read; it is no hole, and the disk's old blocks are not shown for it. All else is there.
fn a_leaf_found_damaged_while_it_is_served_is_no_hole() {
    let (mut stage, _) = forest(BACK);
    let leaf = node_for(&mut stage, 0, DATA_START + 3 * 600);
    stage.device(0).rot(leaf.sector, 1000);
    let first = leaf.low.offset.saturating_sub(DATA_START).next_multiple_of(3);
    let last = (leaf.high.offset - 1 - DATA_START) / 3 * 3;
    for inside in [first + 3, last - 3] {
        let asked = vec![read(inside..inside + 1), write(inside..inside + 1), read(0..1)];
        let answers = stage.attempt(asked).unwrap();
        assert!(answers[0].is_err() && answers[1].is_err() && answers[2].is_ok(), "{answers:?}");
    }
}

/// The same in a clean mode, where the disk has everything: nobody is told, and what the leaf said never comes back.
fn a_leaf_found_damaged_in_a_clean_mode_is_not_noticed() {
    let (mut stage, _) = forest(THROUGH);
    let leaf = node_for(&mut stage, 0, DATA_START + 3 * 600);
    stage.device(0).rot(leaf.sector, 1000);
    stage.together(vec![read(1500..2100), write_fua(1803..1804), write(1700..1900)]).unwrap();
    stage.verify().unwrap();
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Stale, "it has left the cache");
}

/// A bit changes in the root, an interior node, which is in memory: the set goes on. At the next start it is refused, and nothing is
/// written: whoever can still save it finds it as it was.
fn a_root_found_damaged_at_the_next_start_is_refused() {
    let (mut stage, _) = forest(BACK);
    let root = nodes(&mut stage)[0].sector;
    stage.device(0).rot(root, 320);
    stage.ask(write(0..64)).unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap_or_else(|fault| println!("the checker has seen it: {fault}"));
    assert_refused(&mut stage, "is damaged");
}

/// A node's third set was torn by a device that promised more than it kept, and the fourth stands behind it with the same
/// number: the end of the log is not where it seems to be. Taken for the end, the next set would be written there, and
/// some old keys would be back and others not.
fn a_set_behind_a_torn_one_is_not_overlooked() {
    let (mut stage, _) = forest(BACK);
    stage.stop().unwrap();
    let leaf = nodes(&mut stage).into_iter().find(|node| node.level == 0 && node.sets.len() > 2);
    let leaf = leaf.expect("some leaf was written more than twice");
    let torn = &leaf.sets[leaf.sets.len() - 2];
    stage.device(0).place(leaf.sector + u64::from(torn.block), &[0; 512]);
    assert_refused(&mut stage, "is damaged");
}

/// The power fails while a set is appended to a leaf, and the first half of what the device was given is there. It is no
/// set then, the leaf can be read, and the keys are in the journal.
fn a_torn_append_to_a_leaf_is_no_set() {
    let (mut stage, _) = forest(BACK);
    for leaf in nodes(&mut stage).into_iter().filter(|node| node.level == 0) {
        let behind_first = leaf.sector + 1..leaf.sector + u64::from(leaf.sectors);
        trouble(&mut stage, 0, OpKind::Write, behind_first, u32::MAX, DiskFault::Fail(Landed::Part));
    }
    let steps = (0..290).map(|place| write(place * 3 + 1..place * 3 + 2)).collect();
    stage.attempt(steps).unwrap();
    pause(&mut stage, 200).unwrap();
    assert!(stage.device(0).faults.struck() > 0, "no leaf was appended to");
    stage.crash(Crash::PowerCut, Survivors::Everything);
    stage.rig().world.borrow_mut().heal();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The buckets with the generations cannot be read any more. Without them nobody knows which pointers are of now; a guess
/// would show one file's blocks in another. (A kernel went on with zeroes and said so in its log.)
fn a_set_that_lost_its_priorities_is_refused() {
    let (mut stage, _) = bench(small(vec![4096], BACK), quiet());
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    let chain = records(&mut stage).into_iter().find_map(|record| match record {
        Record::PriorityChain { buckets } => Some(buckets),
        _ => None,
    });
    let bucket = *chain.expect("there is one").last().expect("it has a bucket");
    let whole = stage.device(0).clone();
    stage.device(0).rot(bucket * 16 + 3, 77);
    assert_refused(&mut stage, "priorities");
    stage.device(0).return_as(&whole);
    stage.device(0).make_unreadable(bucket * 16..bucket * 16 + 1);
    assert_refused(&mut stage, "priorities");
    *stage.device(0) = whole;
    stage.start().unwrap();
    stage.verify().unwrap();
}

/// What changes a superblock, and of which device.
const CHANGES: [(usize, &str); 6] = [
    (0, "first start"),
    (1, "attach"),
    (1, "first dirty data"),
    (1, "nothing dirty any more"),
    (1, "another mode"),
    (1, "the cache has died"),
];

/// There is one copy of each superblock, and the power goes while it is written: of a cache at its first start, of a
/// disk at each change of its state. A torn one would be a device that nobody knows any more.
fn no_power_cut_tears_a_superblock() {
    for (device, change) in CHANGES {
        for (completed, survivors) in [
            (false, Survivors::Nothing),
            (false, Survivors::Everything),
            (false, Survivors::Seeded(1)),
            (false, Survivors::Seeded(2)),
            (true, Survivors::Nothing),
            (true, Survivors::Seeded(3)),
        ] {
            let mut stage = superblock_story(device, change, completed, survivors);
            stage.device(0).gone = false;
            stage.start().unwrap_or_else(|fault| panic!("{change}, {completed} {survivors}: {fault}"));
            stage.verify().unwrap();
            stage.stop().unwrap();
        }
    }
}

/// Plays up to the change and cuts the power when the superblock is written.
fn superblock_story(device: usize, change: &str, completed: bool, survivors: Survivors) -> Stage {
    let eager = Options { writeback_delay: Duration::from_millis(1), ..Options::default() };
    let options = if change == "nothing dirty any more" { eager } else { quiet() };
    let mode = if change == "the cache has died" { AROUND } else { BACK };
    let geometry = Geometry { block_sectors: 1, torn_sectors: 1, ..small(vec![4096], mode) };
    let (mut stage, _) = unstarted(geometry, options, 1);
    let written = move |op: &OpView| {
        let here = op.disk.0 as usize == device && op.kind == OpKind::Write && op.completed == completed;
        here && (SUPERBLOCK_SECTOR..SUPERBLOCK_SECTOR + 8).contains(&op.sectors.start)
    };
    if matches!(change, "first start" | "attach") {
        stage.rig().world.borrow_mut().set_trap(Box::new(written));
        assert!(stage.start().is_err(), "{change}: it was never written");
        stage.crash(Crash::PowerCut, survivors);
        return stage;
    }
    stage.start().unwrap();
    let steps = match change {
        "first dirty data" => vec![write(0..64)],
        "nothing dirty any more" => {
            keep(&mut stage, 0..64);
            vec![Step::Pause(3_000)]
        }
        "another mode" => vec![Step::Mode { volume: 0, mode: Mode::Writethrough }],
        _ => {
            keep(&mut stage, 0..64);
            stage.ask(read(0..64)).unwrap();
            stage.ask(FLUSH).unwrap();
            pause(&mut stage, 20).unwrap();
            stage.device(0).gone = true;
            vec![write(0..64), FLUSH]
        }
    };
    let cut = stage.crash_at(steps, written, Crash::PowerCut, survivors);
    cut.unwrap_or_else(|fault| panic!("{change}: {fault}"));
    stage
}
