//! What a flush covers, and what is left when it fails or is left out.

use super::bench::{eager, quiet};
use super::image::{as_a_kernel_leaves_it, backing, change_backing, on_disk};
use super::stage::{
    ANYWHERE, BACK, FLUSH, MILLISECOND, THROUGH, assert_not_opened, bench, failure, geometry, keep, pause,
    stage, trouble, write, write_fua,
};
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors, WrittenPart};
use crate::driver::{Crash, OpView};
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::{Geometry, Tuning, engine::Engine};
use crate::workload::Step;
use bcached_format::{BackingState, SUPERBLOCK_SECTOR};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

super::scenarios! {
    include_str!("flushes.rs"),
    write_back_calls_nothing_clean_before_the_backing_device_is_flushed,
    a_state_that_a_dead_process_has_written_is_not_relied_on_before_it_is_durable,
    a_disk_says_dirty_durably_before_anybody_uses_what_is_dirty_on_it,
    a_start_makes_durable_what_it_has_read_before_it_writes_anything,
    a_flush_that_fails_in_a_replay_takes_nothing_from_the_note,
    a_good_flush_after_a_failed_one_brings_nothing_back,
    many_clean_copies_before_the_first_flush_do_not_stop_the_world,
    a_flush_that_fails_in_the_middle_of_write_back_loses_nothing,
    what_a_failed_flush_of_the_cache_took_is_not_read,
}

/// A mail server's fsynced mails are written back at night to a disk with a volatile cache. The set
/// marks them clean, and the power fails before the disk has been flushed. Reads still come from
/// the cache until its buckets are reused; then old blocks appear. (This happens with kernels to
/// this day.)
fn write_back_calls_nothing_clean_before_the_backing_device_is_flushed() {
    let (mut stage, bench) = bench(geometry(vec![16384], BACK), eager(Duration::from_millis(1)));
    keep(&mut stage, 0..64);
    // The keys are clean in the journal, and the volume's superblock is about to say so.
    let says_clean = |op: &OpView| op.disk.0 == 1 && op.sectors == (SUPERBLOCK_SECTOR..SUPERBLOCK_SECTOR + 8);
    let night = vec![Step::Pause(3_000)];
    stage.crash_at(night, says_clean, Crash::PowerCut, Survivors::Nothing).unwrap();
    assert_eq!(on_disk(&mut stage, 0..64), [SectorValue::Written(1); 64], "clean data is on the disk");
    assert_eq!(bench.status().dirty_sectors, 0);
    stage.rig().inspect().unwrap();
}

/// The daemon dies after it has written *dirty* to a disk with a volatile cache, without a flush.
/// The next daemon reads *dirty* there, a database commits, and then the power fails. The disk
/// would say *clean*, and the cache of a clean disk may be removed. Proves invariant D14.
fn a_state_that_a_dead_process_has_written_is_not_relied_on_before_it_is_durable() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    let says_dirty = |op: &OpView| op.disk.0 == 1 && op.sectors.start == SUPERBLOCK_SECTOR && op.completed;
    stage.crash_at(vec![write(0..8)], says_dirty, Crash::ProcessDeath, Survivors::Everything).unwrap();
    stage.start().unwrap();
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty, "in the disk's cache");
    stage.ask(write_fua(8..16)).unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty);
    stage.rig().inspect().unwrap();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A kernel writes *dirty* together with its first dirty data and flushes neither, and the power
/// fails: the set knows of dirty data, and the disk says *clean*. The daemon serves the volume.
/// From then on the disk durably says *dirty*, before the cache can be removed.
/// Proves invariant D14.
fn a_disk_says_dirty_durably_before_anybody_uses_what_is_dirty_on_it() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    keep(&mut stage, 0..8);
    stage.stop().unwrap();
    change_backing(&mut stage, 1, |superblock| superblock.set_state(BackingState::Clean));
    as_a_kernel_leaves_it(&mut stage);
    stage.start().unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty);
}

/// The daemon dies when the SSD has received its newest journal entry and has not made it durable.
/// The next daemon reads that entry, and reuses buckets that nothing refers to according to it.
/// Then the power fails: the entry before is the newest again, and what it refers to, at least the
/// priorities, would have been overwritten.
fn a_start_makes_durable_what_it_has_read_before_it_writes_anything() {
    // Proves invariant D41.
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    stage.together((0..32).map(|at| write(at * 64..at * 64 + 8)).collect()).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    let is_flushed = Rc::new(Cell::new(false));
    let seen = Rc::clone(&is_flushed);
    let first_write = move |op: &OpView| {
        seen.set(seen.get() || (op.disk.0, op.kind, op.completed) == (0, OpKind::Flush, true));
        (op.disk.0, op.kind) == (0, OpKind::Write)
    };
    stage.crash_in_start(first_write, Crash::PowerCut, Survivors::Nothing).unwrap();
    assert!(is_flushed.get(), "the first write comes before the flush has ended");
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The daemon is killed, and what it had acknowledged is only in the note. The next daemon makes
/// the data durable and replays; then a flush of the SSD fails, and it gives up. If the note were
/// void by then, the daemon after that would know nothing of the writes. Proves invariant D32.
fn a_flush_that_fails_in_a_replay_takes_nothing_from_the_note() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    stage.ask(write(0..64)).unwrap();
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    let fault = DiskFault::Fail(WrittenPart::Nothing);
    stage.device(0).faults.add(FaultRule { on: OpKind::Flush, sectors: ANYWHERE, skip: 1, count: 1, fault });
    assert_not_opened(&mut stage, "flush of the cache device");
    stage.rig().world.borrow_mut().heal();
    stage.start().unwrap();
    assert_eq!(stage.values(0, 0..64).unwrap(), [SectorValue::Written(1); 64]);
    stage.stop().unwrap();
}

/// A disk's flush fails and drops what it covered. A database tries again, and the flush succeeds.
/// The data that it wrote in write-through mode is still in the cache: if it were read from there,
/// it would be trusted, and lost when its bucket is reused. Proves invariant D27.
fn a_good_flush_after_a_failed_one_brings_nothing_back() {
    let (mut stage, _) = bench(geometry(vec![16384], THROUGH), quiet());
    stage.ask(FLUSH).unwrap();
    stage.ask(write(0..64)).unwrap();
    failure(&mut stage, 1, OpKind::Flush, 1);
    assert!(stage.attempt(vec![FLUSH]).unwrap()[0].is_err(), "the client gets the error");
    stage.ask(FLUSH).unwrap();
    assert_eq!(stage.values(0, 0..64).unwrap(), [SectorValue::Written(0); 64], "the disk dropped it");
    pause(&mut stage, 10).unwrap();
    stage.stop().unwrap();
}

/// A home server streams films right after its start, before the disk has been flushed. The data
/// read may be only in the disk's volatile cache, so clean copies wait for a flush. When more of
/// them waited than the limit, the task that should have flushed ran in circles and the volume
/// hung.
fn many_clean_copies_before_the_first_flush_do_not_stop_the_world() {
    let mut stage = stage();
    let read = |start| Step::Read { volume: 0, sectors: start..start + 8 };
    for start in (0..16384).step_by(8) {
        stage.ask(read(start)).unwrap();
    }
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// Write-back copies a batch to a slow disk; one copy has arrived and the other has not. A client
/// flushes, the disk's flush fails, and the copy that had arrived is gone. Then the flush of the
/// batch itself succeeds, as a flush after a failed one does. Both keys turned clean, and data that
/// had long been durable was lost.
fn a_flush_that_fails_in_the_middle_of_write_back_loses_nothing() {
    const SECOND: u64 = 1000 * MILLISECOND;
    let mut met = 0;
    for tuning in 0..8 {
        let varied = Geometry { tuning: Tuning::draw(tuning << 32 | 2 << 40), ..geometry(vec![16384], BACK) };
        let mut stage = ScenarioRig::new(Rc::new(Engine), varied, tuning);
        stage.start().expect("the system opens");
        for (sectors, late) in [(16..24, SECOND), (656..664, 2 * SECOND)] {
            trouble(&mut stage, 1, OpKind::Write, sectors, 1, DiskFault::Late(late));
        }
        stage.together(vec![write(0..8), write(640..648)]).unwrap();
        stage.ask(FLUSH).unwrap();
        pause(&mut stage, 1_500).unwrap();
        failure(&mut stage, 1, OpKind::Flush, 1);
        if stage.attempt(vec![FLUSH]).unwrap()[0].is_ok() {
            // With these options nothing is in flight now.
            continue;
        }
        met += 1;
        pause(&mut stage, 10_000).unwrap();
        stage.verify().unwrap();
        // Reads still come from the cache. The checker compares the clean data there with the disk.
        stage.stop().unwrap_or_else(|fault| panic!("tuning {tuning}: {fault}"));
    }
    assert!(met > 0, "no flush failed in the middle of write-back");
}

/// A worn SSD fails a flush and loses what it covered: in place of acknowledged data there is now
/// what was there before, perhaps another volume's data. No client may read that, neither now nor
/// through the note at the next start. Proves invariant D31 and invariant D32.
fn what_a_failed_flush_of_the_cache_took_is_not_read() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    failure(&mut stage, 0, OpKind::Flush, u32::MAX);
    assert!(stage.attempt(vec![FLUSH]).unwrap()[0].is_err());
    let read = stage.attempt(vec![Step::Read { volume: 0, sectors: 0..64 }]).unwrap();
    assert!(read[0].is_err(), "the data is lost");
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    stage.rig().world.borrow_mut().heal();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
