//! The clean modes, in which all data is on the backing device: the cache may lose nothing, hide
//! nothing and change nothing.

use super::bench::quiet;
use super::stage::{
    AROUND, ATTACH, BACK, DATA_START, DETACH, FLUSH, MILLISECOND, THROUGH, bench, failure, geometry, keep,
    pause, power_cut, read, trouble, unstarted, warm, write, write_fua,
};
use crate::disk::{DiskFault, OpKind, Survivors};
use crate::driver::Crash;
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::Mode;
use crate::workload::Step;

super::scenarios! {
    include_str!("clean_modes.rs"),
    a_read_miss_overtaken_by_a_bypass_write_leaves_no_old_copy,
    a_read_miss_during_a_bypass_write_leaves_no_old_copy,
    overlapping_write_throughs_leave_cache_and_disk_the_same,
    an_old_clean_copy_does_not_come_back_over_newer_data,
    a_crash_in_a_bypass_write_leaves_no_copy_that_differs_from_the_disk,
    a_write_that_the_cache_refuses_passes_no_dirty_data_that_a_crash_would_forget,
    a_failed_write_to_the_cache_is_not_indexed,
    a_failed_write_to_the_disk_leaves_nothing_new_in_the_cache,
    a_cache_that_dies_in_a_clean_mode_is_not_missed_and_its_copies_never_come_back,
    a_cache_that_cannot_be_read_in_a_clean_mode_is_not_noticed,
    a_cache_that_forgets_all_that_it_flushed_in_a_clean_mode_is_as_good_as_new,
    a_cache_that_went_back_in_time_in_a_clean_mode_can_be_left_without_loss,
}

/// A script writes past the cache while another one reads the same block. The reader has fetched
/// the old block and inserts it into the cache after the write. From then on every read returns the
/// old block, until it is evicted. (A user demonstrated it with two shell scripts, in less than a
/// second.)
fn a_read_miss_overtaken_by_a_bypass_write_leaves_no_old_copy() {
    // Proves invariant D34.
    let (mut stage, _) = bench(geometry(vec![16384], AROUND), quiet());
    let late = DiskFault::Late(100 * MILLISECOND);
    trouble(&mut stage, 1, OpKind::Read, DATA_START..DATA_START + 8, 1, late);
    stage.together(vec![read(0..8), Step::Pause(50), write(0..8)]).unwrap();
    pause(&mut stage, 50).unwrap();
    stage.verify().unwrap();
}

/// The opposite order: a write past the cache is in flight when a read arrives that still finds the
/// old block on the disk.
fn a_read_miss_during_a_bypass_write_leaves_no_old_copy() {
    let mut met = 0;
    for seed in 0..12 {
        let (mut stage, _) = unstarted(geometry(vec![16384], AROUND), quiet(), seed);
        stage.start().unwrap();
        let middle = stage.device(1).model.latency_ns;
        stage.device(1).model.latency_ns = 100 * MILLISECOND;
        let seen = stage.play(move |client| async move {
            client.go(write(0..8)).await;
            client.go(Step::Pause(1)).await;
            client.world().borrow_mut().devices[1].model.latency_ns = middle;
            Ok(client.values(0, 0..8).await)
        });
        met += u32::from(seen.unwrap().unwrap() == [SectorValue::Written(0); 8]);
        pause(&mut stage, 2_000).unwrap();
        stage.verify().unwrap();
    }
    assert!(met > 0, "no read found the old block");
}

/// Two programs write overlapping ranges of one file at once. The disk applies one order and the
/// cache another: what is read depends on what the cache still holds, permanently.
fn overlapping_write_throughs_leave_cache_and_disk_the_same() {
    // Proves invariant D34.
    for seed in 0..8 {
        let (mut stage, _) = unstarted(geometry(vec![16384], THROUGH), quiet(), seed);
        stage.start().unwrap();
        stage.together(vec![write(0..64), write(32..96), write(8..48), write(0..64), write(40..72)]).unwrap();
        stage.ask(FLUSH).unwrap();
        pause(&mut stage, 20).unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
    }
}

/// A volume is in write-around mode, and the cache holds an old clean copy of a block that is now
/// written durably. The power fails. The key of the old copy must not come back with the tree.
/// Proves invariant D22.
fn an_old_clean_copy_does_not_come_back_over_newer_data() {
    let (mut stage, _) = bench(geometry(vec![16384], AROUND), quiet());
    warm(&mut stage, 0..64);
    stage.ask(write_fua(0..64)).unwrap();
    power_cut(&mut stage);
    stage.start().unwrap();
    stage.verify().unwrap();
}

/// The same without a request for durability: the write has just reached the disk. Either content
/// is correct then, but not one in the cache and the other on the disk: the block would change when
/// it is evicted.
fn a_crash_in_a_bypass_write_leaves_no_copy_that_differs_from_the_disk() {
    let (mut stage, _) = bench(geometry(vec![16384], AROUND), quiet());
    warm(&mut stage, 0..64);
    let arrived = |op: &crate::driver::OpView| op.disk.0 == 1 && op.kind == OpKind::Write && op.completed;
    stage.crash_at(vec![write(0..64)], arrived, Crash::PowerCut, Survivors::Everything).unwrap();
    stage.rig().inspect().unwrap();
}

/// The cache holds a clean copy of a block, then newer dirty data whose key is not in the journal
/// yet. The SSD refuses the next write of the block, so the write goes to the disk. A power cut
/// loses both recent keys, and the day-old clean copy would hide the newest data.
/// Proves invariant D23.
fn a_write_that_the_cache_refuses_passes_no_dirty_data_that_a_crash_would_forget() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    warm(&mut stage, 0..64);
    stage.ask(write(0..64)).unwrap();
    failure(&mut stage, 0, OpKind::Write, 1);
    let arrived = |op: &crate::driver::OpView| op.disk.0 == 1 && op.kind == OpKind::Write && op.completed;
    stage.crash_at(vec![write(0..64)], arrived, Crash::PowerCut, Survivors::Everything).unwrap();
    stage.rig().inspect().unwrap();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// An SSD fails to write a block of data, once. If it were indexed all the same, its place would be
/// read, with whatever was there before. In write-back mode the data goes to the disk instead; in
/// write-through mode it is there anyway. Proves invariant D1.
fn a_failed_write_to_the_cache_is_not_indexed() {
    for mode in [THROUGH, BACK] {
        let (mut stage, bench) = bench(geometry(vec![16384], mode), quiet());
        keep(&mut stage, 640..704);
        failure(&mut stage, 0, OpKind::Write, 1);
        stage.ask(write(0..64)).unwrap();
        assert_eq!(stage.device(0).faults.failures(), 1);
        assert_eq!(bench.status().failed, None, "it was the data that failed");
        stage.ask(FLUSH).unwrap();
        pause(&mut stage, 20).unwrap();
        stage.verify().unwrap();
        stage.stop().unwrap();
    }
}

/// A disk fails a write in write-through mode, and the client is told. The cache has accepted the
/// write: read from there, the block is new, and it is old again as soon as it is evicted.
fn a_failed_write_to_the_disk_leaves_nothing_new_in_the_cache() {
    let (mut stage, _) = bench(geometry(vec![16384], THROUGH), quiet());
    stage.ask(FLUSH).unwrap();
    failure(&mut stage, 1, OpKind::Write, 1);
    assert!(stage.attempt(vec![write(0..64)]).unwrap()[0].is_err());
    stage.ask(FLUSH).unwrap();
    pause(&mut stage, 20).unwrap();
    assert_eq!(stage.values(0, 0..64).unwrap(), [SectorValue::Written(0); 64]);
    stage.stop().unwrap();
}

/// The modes in which all data is on the backing device.
pub const CLEAN_MODES: [Mode; 3] = [Mode::Writethrough, Mode::Writearound, Mode::None];

/// Runs `tell` in each clean mode, with copies that the cache already holds.
fn each_clean_mode(mut tell: impl FnMut(&mut ScenarioRig, Mode)) {
    for mode in CLEAN_MODES {
        let (mut stage, _) = bench(geometry(vec![16384], THROUGH), quiet());
        keep(&mut stage, 0..64);
        warm(&mut stage, 64..128);
        stage.ask(Step::Mode { volume: 0, mode }).unwrap();
        tell(&mut stage, mode);
    }
}

/// The SSD dies under a mounted root file system, and holds nothing but clean copies. No client
/// sees an error. The SSD comes back at the next start, and its copies are outdated.
fn a_cache_that_dies_in_a_clean_mode_is_not_missed_and_its_copies_never_come_back() {
    // Proves invariant D38.
    each_clean_mode(|stage, mode| {
        stage.device(0).gone = true;
        stage
            .together(vec![read(0..128), write(0..32), Step::Pause(10), read(0..64), write(64..80), FLUSH])
            .unwrap();
        stage.ask(FLUSH).unwrap();
        stage.verify().unwrap();
        stage.crash(Crash::ProcessDeath, Survivors::Everything);
        stage.device(0).gone = false;
        stage.start().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
    });
}

/// The SSD cannot read back what was written to it. The disk has all the data, so an application
/// must not see an error (with kernels it did).
fn a_cache_that_cannot_be_read_in_a_clean_mode_is_not_noticed() {
    each_clean_mode(|stage, mode| {
        for sector in super::image::cached_at(stage) {
            stage.device(0).make_unreadable(sector..sector + 1);
        }
        stage.together(vec![read(0..64), read(64..128), write(8..16)]).unwrap();
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
    });
}

/// A cheap SSD acknowledges every flush and keeps nothing: after a power cut it is as it was when
/// it was new. In a clean mode that costs nothing but a cold cache.
fn a_cache_that_forgets_all_that_it_flushed_in_a_clean_mode_is_as_good_as_new() {
    for mode in CLEAN_MODES {
        let (mut stage, _) = bench(geometry(vec![16384], THROUGH), quiet());
        stage.ask(Step::Mode { volume: 0, mode }).unwrap();
        let new = stage.device(0).clone();
        keep(&mut stage, 0..64);
        stage.ask(read(64..128)).unwrap();
        pause(&mut stage, 20).unwrap();
        stage.together(vec![write(32..96), write_fua(256..320)]).unwrap();
        stage.ask(FLUSH).unwrap();
        power_cut(&mut stage);
        stage.device(0).return_as(&new);
        stage.start().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        stage.stop().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
    }
}

/// The same SSD held copies when it began to lie, and after the power cut it holds them again, with
/// a tree that calls them valid. The engine cannot detect that, because cached data has neither a
/// checksum nor a date, so such a cache returns old blocks. But only the cache is wrong: the disk
/// has everything, and reads are correct once the volume is detached.
fn a_cache_that_went_back_in_time_in_a_clean_mode_can_be_left_without_loss() {
    each_clean_mode(|stage, mode| {
        let before = stage.device(0).clone();
        stage.together(vec![write(0..48), write(72..128)]).unwrap();
        stage.ask(FLUSH).unwrap();
        power_cut(stage);
        stage.device(0).return_as(&before);
        stage.start().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        stage.ask(DETACH).unwrap();
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
        stage.ask(ATTACH).unwrap();
        stage.verify().unwrap_or_else(|fault| panic!("{mode:?}: {fault}"));
    });
}
