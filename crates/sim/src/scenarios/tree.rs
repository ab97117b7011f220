//! Damaged nodes, found while the set is served or at a start, and what a crash leaves of nodes.

use super::bench::{ScenarioSystem, quiet};
use super::clean_modes::CLEAN_MODES;
use super::image::{backing, bytes, node_for, nodes, on_disk, sizes};
use super::stage::{
    BACK, DATA_START, DETACH, FLUSH, THROUGH, assert_refused, bench, packed, pause, power_cut, read, trouble,
    write, write_fua,
};
use crate::disk::{DiskFault, OpKind, Survivors, WrittenPart};
use crate::driver::{Crash, OpView};
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::system::Geometry;
use crate::workload::Step;
use bcached_check::NodeRecord;
use bcached_format::{
    BackingState, Bset, DeviceIndex, Gen, Inode, NodeIdentity, NodeLog, Pointer, SECTOR_BYTES,
};
use std::cell::RefCell;
use std::rc::Rc;

super::scenarios! {
    include_str!("tree.rs"),
    a_leaf_found_damaged_while_it_is_served_is_no_hole,
    a_leaf_found_damaged_in_a_clean_mode_is_not_noticed,
    an_interior_node_found_damaged_while_it_is_served_is_no_hole,
    an_interior_node_found_damaged_in_a_clean_mode_is_not_noticed,
    a_cache_that_answers_with_other_nodes_in_a_clean_mode_is_not_noticed,
    a_root_found_damaged_while_it_is_served_is_served_from_memory,
    a_root_found_damaged_at_the_next_start_is_refused,
    a_set_behind_a_lost_one_is_not_overlooked,
    a_torn_append_to_a_leaf_is_no_set,
    a_torn_append_over_a_former_life_of_the_bucket_is_no_set,
}

/// A write that makes one key: there is a gap between two of them, so they are never merged.
const fn key(place: u64) -> Step {
    write(place * 3..place * 3 + 1)
}

/// Returns a set with `keys` keys that cannot be merged, one for every three sectors of the volume.
/// All are durable, and only the root is in memory.
fn planted(geometry: Geometry, keys: u64) -> (ScenarioRig, Rc<ScenarioSystem>) {
    let (mut stage, bench) = bench(geometry, quiet());
    stage.together((0..keys).map(key).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    pause(&mut stage, 20).unwrap();
    stage.stop().unwrap();
    stage.start().unwrap();
    (stage, bench)
}

/// A leaf with something to write waits half a minute for more.
const UNTIL_LEAVES_ARE_WRITTEN: [Step; 4] = [const { Step::Pause(10_000) }; 4];

/// Number of keys of a tree of two levels.
const KEYS: u64 = 1200;

/// A small tree of two levels in a small cache.
fn forest(mode: u64) -> (ScenarioRig, Rc<ScenarioSystem>) {
    let (stage, bench) = planted(Geometry { buckets: 900, ..packed(vec![4096], mode) }, KEYS);
    assert_eq!(bench.status().tree_depth, 1);
    (stage, bench)
}

/// Size of a volume over which a tree gets three levels.
const TALL_SECTORS: u64 = 48_000;

/// A tree of three levels, with the smallest possible nodes.
fn tall_forest(mode: u64) -> (ScenarioRig, Rc<ScenarioSystem>) {
    let geometry = Geometry { bucket_sectors: 8, buckets: 4000, ..packed(vec![TALL_SECTORS], mode) };
    let (stage, bench) = planted(geometry, TALL_SECTORS / 3);
    assert_eq!(bench.status().tree_depth, 2);
    (stage, bench)
}

/// Returns a sector of the volume that has a key, in the middle of the range of a node.
fn sector_in(node: &NodeRecord, volume_sectors: u64) -> u64 {
    let end = if node.high.inode > Inode(0) { DATA_START + volume_sectors } else { node.high.offset };
    (node.low.offset.max(DATA_START).midpoint(end) - DATA_START) / 3 * 3
}

/// A bit flips in a leaf while the set is served, and the set has dirty data there. The data under
/// that leaf cannot be read. It is not treated as a hole, and the disk's old blocks are not
/// returned for it. All other data is available.
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

/// The same in a clean mode, where the disk has everything: no client gets an error, and what the
/// leaf said never comes back.
fn a_leaf_found_damaged_in_a_clean_mode_is_not_noticed() {
    let (mut stage, _) = forest(THROUGH);
    let leaf = node_for(&mut stage, 0, DATA_START + 3 * 600);
    stage.device(0).rot(leaf.sector, 1000);
    stage.together(vec![read(1500..2100), write_fua(1803..1804), write(1700..1900)]).unwrap();
    stage.verify().unwrap();
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Stale, "it has left the cache");
}

/// The same with an interior node other than the root: the data below it cannot be read, all other
/// data can, and the status names the damaged node. When the bit is restored, everything is there.
fn an_interior_node_found_damaged_while_it_is_served_is_no_hole() {
    let (mut stage, bench) = tall_forest(BACK);
    let interior: Vec<NodeRecord> = nodes(&mut stage).into_iter().filter(|node| node.level == 1).collect();
    let damaged = interior[0].sector;
    stage.device(0).rot(damaged, 1000);
    for node in &interior {
        let sector = sector_in(node, TALL_SECTORS);
        let asked = vec![read(sector..sector + 1), write(sector..sector + 1)];
        let answers = stage.attempt(asked).unwrap();
        let is_served = answers.iter().all(Result::is_ok);
        let is_refused = answers.iter().all(Result::is_err);
        assert!(if node.sector == damaged { is_refused } else { is_served }, "{sector}: {answers:?}");
    }
    let told: Vec<(u64, u8)> =
        bench.status().unreadable.iter().map(|node| (node.sector, node.level)).collect();
    assert_eq!(told, [(damaged, 1)]);
    stage.device(0).rot(damaged, 1000);
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The same in a clean mode: no client gets an error, and what the node said never comes back.
fn an_interior_node_found_damaged_in_a_clean_mode_is_not_noticed() {
    let (mut stage, _) = tall_forest(THROUGH);
    let damaged = node_for(&mut stage, 1, DATA_START + 3 * 600);
    stage.device(0).rot(damaged.sector, 1000);
    stage.together(vec![read(1500..2100), write_fua(1803..1804), write(1700..1900)]).unwrap();
    stage.verify().unwrap();
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Stale, "it has left the cache");
}

/// An SSD with a corrupt block map returns another block than the requested one. In a clean mode no
/// client gets an error while it does so for nodes, whose checksums say where they belong. (With
/// cached data it could not be detected, because that has no checksum.)
fn a_cache_that_answers_with_other_nodes_in_a_clean_mode_is_not_noticed() {
    for mode in CLEAN_MODES {
        let (mut stage, _) = forest(THROUGH);
        stage.ask(Step::Mode { volume: 0, mode }).unwrap();
        let leaves: Vec<NodeRecord> = nodes(&mut stage).into_iter().filter(|node| node.level == 0).collect();
        let contents: Vec<Vec<u8>> = leaves.iter().map(|leaf| content(&mut stage, leaf)).collect();
        for (leaf, other) in leaves.iter().zip(contents.iter().cycle().skip(1)) {
            stage.device(0).place(leaf.sector, other);
        }
        stage.together(vec![read(1500..2100), write_fua(1803..1804), write(1700..1900)]).unwrap();
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        assert_eq!(backing(&mut stage, 1).state(), BackingState::Stale, "it has left the cache");
    }
}

/// A bit flips in the root, which is in memory from the start on. Only GC reads it again, to count
/// the dead pointers in it. The set goes on and its status reports the damage, and the dirty data
/// can be brought to the disk before the next start, which is refused.
fn a_root_found_damaged_while_it_is_served_is_served_from_memory() {
    let (mut stage, bench) = forest(BACK);
    let root = nodes(&mut stage).swap_remove(0);
    stage.device(0).rot(root.sector, 320);
    // Enough data dies that GC runs, in a place without many keys: otherwise leaves would be
    // rewritten, and with them a root.
    for _ in 0..6 {
        stage.ask(write(3600..4096)).unwrap();
    }
    pause(&mut stage, 3_000).unwrap();
    let told: Vec<(u64, u8)> =
        bench.status().unreadable.iter().map(|node| (node.sector, node.level)).collect();
    assert_eq!(told, [(root.sector, 1)]);
    stage.ask(write(0..64)).unwrap();
    stage.verify().unwrap();
    stage.ask(DETACH).unwrap();
    let values = stage.values(0, 0..4096).unwrap();
    power_cut(&mut stage);
    assert_eq!(on_disk(&mut stage, 0..4096), values);
}

/// A bit flips in the root, an interior node, which is in memory: the set goes on. The next start
/// is refused and nothing is written, so that a rescue finds the device as it was.
fn a_root_found_damaged_at_the_next_start_is_refused() {
    let (mut stage, _) = forest(BACK);
    let root = nodes(&mut stage)[0].sector;
    stage.device(0).rot(root, 320);
    stage.ask(write(0..64)).unwrap();
    stage.verify().unwrap();
    // The set has not noticed, but the checker has.
    let Err(FailureKind::Structure(findings)) = stage.stop() else { panic!("the root is intact") };
    assert!(findings.iter().any(|finding| finding.contains(&format!("sector {root}"))), "{findings:?}");
    assert_refused(&mut stage, "is damaged");
}

/// A leaf is appended to twice, each time durably. The power fails, and the SSD has lost the first
/// append although it had flushed it: the second is behind what looks like the end of the log, with
/// the sequence number of this node. If that were taken for the end, the next set would be written
/// there, and some old keys would be back and others not. (A device that keeps its promises never
/// leaves this: a set is durable before the next one of its node is begun.)
fn a_set_behind_a_lost_one_is_not_overlooked() {
    let (mut stage, _) = forest(BACK);
    let leaf = node_for(&mut stage, 0, DATA_START);
    let before = content(&mut stage, &leaf);
    let here = leaf.sector..leaf.sector + u64::from(leaf.sectors);
    let appended: Rc<RefCell<Vec<u64>>> = Rc::default();
    let met = Rc::clone(&appended);
    let twice = move |op: &OpView| {
        let mut met = met.borrow_mut();
        if op.kind == OpKind::Write && op.completed && here.contains(&op.sectors.start) {
            met.push(op.sectors.start);
        }
        met.len() == 2
    };
    let wait = UNTIL_LEAVES_ARE_WRITTEN;
    let steps = [key(0)].into_iter().chain(wait.clone()).chain([key(1)]).chain(wait).collect();
    stage.crash_at(steps, twice, Crash::PowerCut, Survivors::Everything).unwrap();
    let lost = appended.borrow()[0];
    let at = usize::try_from((lost - leaf.sector) * SECTOR_BYTES).unwrap();
    stage.device(0).place(lost, &before[at..at + 512]);
    assert_refused(&mut stage, "is damaged");
}

/// The power fails while a set is appended to a leaf, and only the first half of the write is on
/// the device. That is not a valid set, the leaf can be read, and the keys are in the journal.
/// Proves invariant D2.
fn a_torn_append_to_a_leaf_is_no_set() {
    let (mut stage, _) = forest(BACK);
    for leaf in nodes(&mut stage).into_iter().filter(|node| node.level == 0) {
        let behind_first = leaf.sector + 1..leaf.sector + u64::from(leaf.sectors);
        trouble(&mut stage, 0, OpKind::Write, behind_first, u32::MAX, DiskFault::Fail(WrittenPart::Part));
    }
    let steps = (0..280).map(|place| write(place * 3 + 1..place * 3 + 2)).collect();
    stage.attempt(steps).unwrap();
    pause(&mut stage, 200).unwrap();
    assert!(stage.device(0).faults.failures() > 0, "no leaf was appended to");
    stage.crash(Crash::PowerCut, Survivors::Everything);
    stage.rig().world.borrow_mut().heal();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Leaves come and go, and a new one is in the bucket of an older one, whose sets are still behind
/// its own. The power fails during an append. The first block of the new set is not there yet: in
/// its place is the header of an older set, from another life of the bucket. That is the end of the
/// log, and the keys are in the journal.
fn a_torn_append_over_a_former_life_of_the_bucket_is_no_set() {
    let mut reached = 0;
    let torn = (0..12).map(|seed| (false, Survivors::Seeded(seed)));
    for (is_head, survivors) in [(true, Survivors::Nothing)].into_iter().chain(torn) {
        let geometry = Geometry { buckets: 520, ..packed(vec![4096], BACK) };
        let (mut stage, _) = planted(geometry, KEYS);
        let (leaf, end) = leaf_of_a_second_life(&mut stage);
        let before = content(&mut stage, &leaf);
        let here = leaf.sector..leaf.sector + u64::from(leaf.sectors);
        let append = move |op: &OpView| {
            op.kind == OpKind::Write && op.fua == is_head && !op.completed && here.contains(&op.sectors.start)
        };
        let (first, last) =
            (leaf.low.offset.max(DATA_START) - DATA_START, leaf.high.offset.min(3 * KEYS) - DATA_START);
        let mut steps: Vec<Step> = (first.div_ceil(3)..last / 3).take(50).map(key).collect();
        steps.push(Step::Settle);
        steps.extend(UNTIL_LEAVES_ARE_WRITTEN);
        stage.crash_at(steps, append, Crash::PowerCut, survivors).unwrap();
        let after = content(&mut stage, &leaf);
        let head = usize::try_from(end).unwrap() * 512;
        assert!(before[head..head + 512] == after[head..head + 512], "the new set has a header");
        reached += u32::from(before[head + 512..] != after[head + 512..]);
        stage.start().unwrap_or_else(|fault| panic!("{is_head} {survivors}: {fault}"));
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
    assert!(reached > 1, "the data behind the header reached the device, for some sets: {reached}");
}

/// Overwrites everything until some leaf ends where an older one in its bucket has left a set, with
/// room for three more blocks and the one that a nearly full leaf keeps. Returns that leaf, and the
/// block of its next set.
fn leaf_of_a_second_life(stage: &mut ScenarioRig) -> (NodeRecord, u32) {
    for round in 0..100 {
        // Sets of many lengths, so that a current one ends where an old one did.
        stage.together((0..KEYS).step_by(1 + round % 3).map(key).collect()).unwrap();
        stage.ask(FLUSH).unwrap();
        stage.together(UNTIL_LEAVES_ARE_WRITTEN.to_vec()).unwrap();
        for leaf in nodes(stage).into_iter().filter(|node| node.level == 0) {
            let bytes = content(stage, &leaf);
            let end = NodeLog::parse(&bytes, 512, place(stage, &leaf, leaf.generation)).unwrap().end_block;
            if end <= 10 && former_sets(stage, &leaf).contains(&end) {
                return (leaf, end);
            }
        }
    }
    panic!("no leaf ended where a set of a former leaf began");
}

/// Returns the blocks of a node at which there are sound sets of earlier nodes in its bucket.
fn former_sets(stage: &mut ScenarioRig, node: &NodeRecord) -> Vec<u32> {
    let bytes = content(stage, node);
    let mut blocks = Vec::new();
    for (block, rest) in (0..).zip((0..bytes.len()).step_by(512).map(|at| &bytes[at..])) {
        let mut lives = (0..node.generation).map(|generation| place(stage, node, generation));
        if lives.any(|life| Bset::parse(rest, life).is_ok_and(|set| !set.keys.is_empty())) {
            blocks.push(block);
        }
    }
    blocks
}

/// Returns what the sets of a node with this place and generation were sealed for.
fn place(stage: &mut ScenarioRig, node: &NodeRecord, generation: u8) -> NodeIdentity {
    let pointer = Pointer::new(DeviceIndex(0), node.sector, Gen(generation));
    NodeIdentity { magic: sizes(stage).magic, node: pointer }
}

/// Returns the contents of a node's bucket.
fn content(stage: &mut ScenarioRig, node: &NodeRecord) -> Vec<u8> {
    bytes(stage, 0, node.sector, usize::from(node.sectors) * 512)
}
