//! Sizes at the limits, and what does not fit.

use super::bench::{VolumeLocation, quiet};
use super::image::change_table;
use super::stage::{
    AROUND, ATTACH, BACK, DETACH, FLUSH, THROUGH, assert_not_opened, assert_refused, bench, geometry, keep,
    power_cut, read, small, stage, unstarted, warm, write, write_fua,
};
use crate::disk::{OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::failure::FailureKind;
use crate::oracle::Oracle;
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::{Geometry, engine::Engine};
use crate::workload::Step;
use bcached_format::{
    DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid, UuidSlot,
};
use std::rc::Rc;

super::scenarios! {
    include_str!("limits.rs"),
    a_volume_for_which_the_table_has_no_slot_is_refused,
    a_slot_that_is_used_again_holds_nothing_of_before,
    a_slot_is_used_again_beside_requests,
    a_discard_across_dirty_and_clean_data_leaves_one_content,
    what_is_longer_than_a_key_can_say_is_many_keys,
    a_device_that_ends_within_a_block_is_whole_to_its_last_sector,
    a_request_larger_than_a_bucket_is_in_many_and_lost_in_none,
    a_flash_volume_that_was_promised_too_much_is_refused_space_and_loses_nothing,
    sizes_without_room_to_append_are_refused,
}

/// A cache has as many volumes as its table has slots. A new disk is refused with a message, and
/// the existing volumes go on.
fn a_volume_for_which_the_table_has_no_slot_is_refused() {
    let (mut stage, bench) = unstarted(small(vec![4096, 4096], BACK), quiet(), 1);
    bench.put(1, VolumeLocation::Missing);
    stage.start().unwrap();
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    fill_table(&mut stage, 0);
    bench.put(1, VolumeLocation::Disk(2));
    assert_not_opened(&mut stage, "all 64 slots");
    bench.put(1, VolumeLocation::Missing);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Fills all free slots but `left` with other volumes.
fn fill_table(stage: &mut ScenarioRig, left: usize) {
    change_table(stage, |slots| {
        for (slot, number) in slots.iter_mut().filter(|slot| slot.is_free()).skip(left).zip(1..) {
            *slot = UuidSlot { uuid: Uuid([number; 16]), ..UuidSlot::FREE };
        }
    });
}

/// Returns a set whose only volume was detached and has left clean copies under number 0; the disk
/// holds newer data by now. `free` slots are free.
fn left_behind(free: usize) -> ScenarioRig {
    let (mut stage, _) = bench(small(vec![4096], BACK), quiet());
    keep(&mut stage, 0..40);
    warm(&mut stage, 40..80);
    stage.ask(DETACH).unwrap();
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    fill_table(&mut stage, free);
    stage
}

/// Asserts that the volume is complete, now and at the next start.
fn assert_all_there(stage: &mut ScenarioRig) {
    stage.start().unwrap();
    stage.verify().unwrap();
    keep(stage, 32..48);
    stage.stop().unwrap();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Returns a trap for the operation of that number.
fn at_operation(mut left: u32) -> impl FnMut(&OpView) -> bool + 'static {
    move |_| {
        left = left.saturating_sub(1);
        left == 0
    }
}

/// Over the years a cache has had as many volumes as its table has slots. A kernel accepts no more
/// then; bcached reuses the slot of a volume that is gone, whose copies in the cache are older than
/// the disk. The power fails at every moment of that. Proves invariant D18.
fn a_slot_that_is_used_again_holds_nothing_of_before() {
    for survivors in [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(1)] {
        let mut moments = 0;
        loop {
            let mut stage = left_behind(0);
            match stage.crash_in_start(at_operation(moments + 1), Crash::PowerCut, survivors) {
                Ok(()) => assert_all_there(&mut stage),
                Err(FailureKind::Story(_)) => break,
                Err(fault) => unreachable!("at operation {moments}: {fault:?}"),
            }
            moments += 1;
        }
        assert!(moments > 20, "{moments} operations");
    }
}

/// The same with a volume that is served meanwhile: it is detached once more and attached, so that
/// its own slot is reused.
fn a_slot_is_used_again_beside_requests() {
    for survivors in [Survivors::Nothing, Survivors::Everything, Survivors::Seeded(1)] {
        let mut moments = 0;
        loop {
            let mut stage = left_behind(1);
            stage.start().unwrap();
            keep(&mut stage, 56..88);
            stage.ask(DETACH).unwrap();
            let steps = vec![write(64..72), ATTACH, read(0..88), write(32..48), FLUSH];
            match stage.crash_at(steps, at_operation(moments + 1), Crash::PowerCut, survivors) {
                Ok(()) => assert_all_there(&mut stage),
                Err(FailureKind::Story(_)) => break,
                Err(fault) => unreachable!("at operation {moments}: {fault:?}"),
            }
            moments += 1;
        }
        assert!(moments > 20, "{moments} operations");
    }
}

/// A database drops a table: one discard covers dirty, clean and uncached data, and the power fails
/// when the disk has carried it out. A read may then return old data or nothing, but never one of
/// them from the cache and later the other from the disk. Proves invariant D25.
fn a_discard_across_dirty_and_clean_data_leaves_one_content() {
    for (survivors, crash) in [
        (Survivors::Nothing, Crash::PowerCut),
        (Survivors::Everything, Crash::PowerCut),
        (Survivors::Seeded(1), Crash::PowerCut),
        (Survivors::Everything, Crash::ProcessDeath),
    ] {
        let (mut stage, _) = bench(geometry(vec![4096], BACK), quiet());
        stage.device(1).model.discard = true;
        keep(&mut stage, 0..40);
        warm(&mut stage, 40..80);
        let discard = Step::Discard { volume: 0, sectors: 4..100 };
        let carried_out = |op: &OpView| op.disk.0 == 1 && op.kind == OpKind::Discard && op.completed;
        stage.crash_at(vec![discard], carried_out, crash, survivors).unwrap();
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.ask(FLUSH).unwrap();
        stage.stop().unwrap();
        stage.start().unwrap();
        stage.verify().unwrap();
    }
}

/// The length field of a key has sixteen bits. A longer request, or adjacent holes, become many
/// keys.
fn what_is_longer_than_a_key_can_say_is_many_keys() {
    const LONG: u64 = 3 * 65536;
    let (mut stage, bench) = bench(geometry(vec![LONG + 4096], BACK), quiet());
    for start in [0, 32768, 65536, 131_072, LONG] {
        stage.ask(write(start..start + 64)).unwrap();
    }
    stage.ask(Step::Discard { volume: 0, sectors: 32..LONG + 32 }).unwrap();
    assert_eq!(bench.status().dirty_sectors, 64, "the data on both sides of it");
    stage.ask(FLUSH).unwrap();
    power_cut(&mut stage);
    stage.start().unwrap();
    assert_eq!(bench.status().dirty_sectors, 64);
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A partition ends in the middle of a cache block. Its last sectors are written and read like all
/// others, and no key is unaligned.
fn a_device_that_ends_within_a_block_is_whole_to_its_last_sector() {
    for (mode, odd) in [(BACK, 3), (THROUGH, 7), (AROUND, 1)] {
        let geometry = Geometry { block_sectors: 1, torn_sectors: 1, ..geometry(vec![4096 + odd], mode) };
        let end = 4096 + odd;
        let (mut stage, _) = bench(geometry, quiet());
        stage.together(vec![write(4000..end), write(end - 1..end), write(4090..4099.min(end))]).unwrap();
        stage.ask(read(4000..end)).unwrap();
        stage.ask(FLUSH).unwrap();
        power_cut(&mut stage);
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.ask(Step::Zero { volume: 0, sectors: 4093..end, fua: true, may_unmap: false }).unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// A request spans many buckets: once acknowledged it is there completely, and a power cut in the
/// middle leaves each block old or new.
fn a_request_larger_than_a_bucket_is_in_many_and_lost_in_none() {
    for mode in [BACK, THROUGH] {
        let (mut stage, _) = bench(small(vec![4096], mode), quiet());
        stage.ask(write_fua(8..400)).unwrap();
        power_cut(&mut stage);
        stage.start().unwrap();
        stage.verify().unwrap();
        let mut count = 0;
        let tenth = move |op: &OpView| {
            count += u32::from(op.kind == OpKind::Write && op.completed);
            count == 3
        };
        stage.crash_at(vec![write_fua(0..600)], tenth, Crash::PowerCut, Survivors::Seeded(1)).unwrap();
        stage.start().unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// Flash-only volumes were promised more space than there is. When it is used up, a write is
/// refused with a message, and existing data stays; discarding data frees space.
fn a_flash_volume_that_was_promised_too_much_is_refused_space_and_loses_nothing() {
    let geometry = Geometry { buckets: 520, ..small(vec![65536], BACK) };
    let (mut stage, bench) = unstarted(geometry, quiet(), 1);
    bench.put(0, VolumeLocation::Missing);
    stage.start().unwrap();
    stage.stop().unwrap();
    change_table(&mut stage, |slots| {
        slots[0] = UuidSlot { uuid: Uuid([9; 16]), sectors: 65536, ..UuidSlot::FREE };
        slots[0].set_flash_only(true);
    });
    bench.put(0, VolumeLocation::Flash);
    *stage.rig().oracle.borrow_mut() = Oracle::new(vec![SectorValue::Zero]);
    stage.start().unwrap();
    let writes = (0..600).map(|place| write_fua(place * 16..place * 16 + 16));
    let answers: Vec<bool> = writes.map(|step| stage.attempt(vec![step]).unwrap()[0].is_ok()).collect();
    let taken = answers.iter().filter(|answer| **answer).count();
    assert!(answers[0] && !answers[599] && taken > 400, "{taken} buckets of 520 were filled");
    stage.verify().unwrap();
    power_cut(&mut stage);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.ask(Step::Discard { volume: 0, sectors: 0..512 }).unwrap();
    stage.ask(write_fua(60000..60016)).unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Some sizes that a superblock may contain leave no room to append: a bucket of one block (each
/// set of a node needs its own), and a journal without room for the entries that free it. They are
/// refused, instead of leading to an endless wait.
fn sizes_without_room_to_append_are_refused() {
    const WORDS: &str = "a bucket must hold two blocks";
    let one_block = Geometry { bucket_sectors: 8, ..geometry(vec![4096], BACK) };
    assert_refused(&mut ScenarioRig::new(Rc::new(Engine), one_block, 1), WORDS);

    let mut stage = stage();
    stage.stop().unwrap();
    for buckets in 0..4 {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        stage.device(0).read(SUPERBLOCK_SECTOR, &mut bytes).unwrap();
        let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 8 };
        let raw = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts));
        let Ok(Superblock::Cache(mut superblock)) = raw else { panic!("a cache: {raw:?}") };
        superblock.set_journal_buckets(buckets);
        stage.device(0).place(SUPERBLOCK_SECTOR, &superblock.seal()[..]);
        assert_refused(&mut stage, WORDS);
    }
}
