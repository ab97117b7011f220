//! A backing device that comes back with old content while its cache is current: it was restored
//! from a snapshot, or a lower layer lost its last flushes.
//!
//! The kernel's format has nothing that dates a backing device. Its superblock holds the set that
//! it belongs to and its state, and the state stays the same for months. bcached dates the device
//! at each start and at each clean stop, so an old copy from before one of those is refused
//! (`engine/src/volume/attachment.rs`). A copy from the same run of the set, if that run ended in a
//! crash, is taken for the newest. The scenarios show what is read in that case, and what gives an
//! old copy away after all.

use super::bench::quiet;
use super::image::{backing, change_backing};
use super::stage::{
    ATTACH, BACK, DETACH, FLUSH, assert_not_opened, bench, geometry, keep, minutes, pause, power_cut, write,
};
use crate::disk::Device;
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::Mode;
use crate::system::engine::DeviceImage;
use crate::workload::Step;
use bcached_check::{ReadAt, Severity};
use bcached_format::BackingState;
use std::ops::Range;

super::scenarios! {
    include_str!("outdated.rs"),
    an_old_copy_of_a_disk_shows_wherever_the_cache_holds_nothing,
    an_old_copy_of_a_disk_that_had_no_cache_is_mixed_with_nothing,
    an_old_dirty_copy_of_a_disk_that_was_detached_since_is_refused,
}

/// Content of a sector that was never written.
const FIRST: SectorValue = SectorValue::Written(0);

/// Writes durably in this mode, and leaves the volume in it.
fn keep_in(stage: &mut ScenarioRig, mode: Mode, sectors: Range<u64>) {
    stage.ask(Step::Mode { volume: 0, mode }).unwrap();
    keep(stage, sectors);
    // Parked keys enter the tree.
    pause(stage, 20).unwrap();
}

/// Writes three parts: clean in the cache (0 to 64), dirty in the cache (64 to 128), and on the
/// disk alone (128 to 192).
fn write_newer(stage: &mut ScenarioRig) {
    keep_in(stage, Mode::Writethrough, 0..64);
    keep_in(stage, Mode::Writearound, 128..192);
    keep_in(stage, Mode::Writeback, 64..128);
}

/// Returns the disk as in yesterday's snapshot. The volume was attached then as it is today, with
/// or without dirty data elsewhere.
fn yesterday(stage: &mut ScenarioRig, state: BackingState) -> Device {
    if state == BackingState::Dirty {
        keep(stage, 640..648);
    }
    let old = stage.device(1).clone();
    assert_eq!(backing(stage, 1).state(), state);
    old
}

/// Returns whether the offline checker finds errors in cache and disk as they are.
fn is_noticed(stage: &ScenarioRig, compare_clean: bool) -> bool {
    let world = stage.rig().world.borrow();
    let (cache, disk) = (DeviceImage(&world.devices[0]), DeviceImage(&world.devices[1]));
    let disks: [&dyn ReadAt; 1] = [&disk];
    let options = bcached_check::Options { compare_clean, ..Default::default() };
    let checked = bcached_check::check(&cache, &disks, options);
    checked.report.findings.iter().any(|finding| finding.severity >= Severity::Error)
}

/// The disk alone is restored from a snapshot that was made while the volume was served. If the set
/// was stopped afterwards, the disk is refused: the stop has dated both devices. If the power
/// failed, the disk is refused if it says *clean* where the cache has dirty data. Otherwise nothing
/// gives it away, and there is no warning. Dirty data in the cache reads correctly, and stays
/// correct when it is written back. Clean data in the cache reads correctly as long as it is
/// cached. Everything else is yesterday's, and so is the clean part once the volume is detached.
/// Only a check that compares each clean copy with the disk detects that before the start.
fn an_old_copy_of_a_disk_shows_wherever_the_cache_holds_nothing() {
    for (state, stops) in [
        (BackingState::Clean, true),
        (BackingState::Clean, false),
        (BackingState::Dirty, true),
        (BackingState::Dirty, false),
    ] {
        let (mut stage, bench) = bench(geometry(vec![16384], BACK), quiet());
        let old = yesterday(&mut stage, state);
        write_newer(&mut stage);
        if stops {
            stage.stop().unwrap();
        } else {
            power_cut(&mut stage);
            stage.rig().inspect().unwrap();
        }
        stage.device(1).return_as(&old);
        assert!(is_noticed(&stage, true), "{state:?}: the full check compares everything");
        assert_eq!(
            is_noticed(&stage, false),
            stops || state == BackingState::Clean,
            "what an ordinary check notices"
        );
        if stops || state == BackingState::Clean {
            // The stop has dated both devices, and the disk carries an older date; or the disk says
            // that nothing was dirty.
            assert_not_opened(&mut stage, "an older copy of itself");
            continue;
        }
        stage.start().unwrap();
        assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty, "the cache knows the dirty data");
        assert_eq!(bench.status().dirty_sectors, 72);
        stage.values(0, 0..128).expect("the cache has it, newer than the disk");
        assert_eq!(stage.unjudged(0, 128..192).unwrap(), [FIRST; 64], "{state:?}: only the disk had it");
        stage.ask(DETACH).unwrap();
        stage.values(0, 64..128).expect("it was dirty, and was written back");
        assert_eq!(stage.unjudged(0, 0..64).unwrap(), [FIRST; 64], "{state:?}: only the cache hid it");
    }
}

/// The snapshot is of a time when the volume was not attached, or its disk was served alone: its
/// superblock says so, and that is detected. The cached copies belong to another history, and none
/// of them is read, neither clean nor dirty ones. The dirty ones are given up silently, as kernels
/// do. The whole volume reads as in the snapshot.
fn an_old_copy_of_a_disk_that_had_no_cache_is_mixed_with_nothing() {
    for state in [BackingState::None, BackingState::Stale] {
        let (mut stage, bench) = bench(geometry(vec![16384], BACK), quiet());
        let ours = backing(&mut stage, 1).set_uuid();
        stage.ask(DETACH).unwrap();
        stage.together(vec![write(0..16), write(72..80)]).unwrap();
        stage.ask(FLUSH).unwrap();
        let snapshot = stage.values(0, 0..192).unwrap();
        let old = stage.device(1).clone();
        stage.ask(ATTACH).unwrap();
        write_newer(&mut stage);
        stage.stop().unwrap();
        stage.device(1).return_as(&old);
        assert_eq!(backing(&mut stage, 1).state(), BackingState::None);
        if state == BackingState::Stale {
            change_backing(&mut stage, 1, |superblock| {
                superblock.set_set_uuid(ours);
                superblock.set_state(state);
            });
        }
        stage.start().unwrap();
        for _ in 0..2 {
            assert_eq!(stage.unjudged(0, 0..192).unwrap(), snapshot, "{state:?}");
            minutes(&mut stage, 1);
        }
        assert_eq!(bench.status().dirty_sectors, 0, "the dirty data was dropped");
        stage.stop().unwrap();
    }
}

/// The snapshot is of a time when the disk had dirty data in the cache. Since then the volume was
/// detached, with all of its data on the disk, and the table has forgotten it. The snapshot says
/// that its newest data is in a set that no longer knows the volume: it is refused, and left as it
/// is. The disk in its current state is served.
fn an_old_dirty_copy_of_a_disk_that_was_detached_since_is_refused() {
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    keep(&mut stage, 0..64);
    let old = yesterday(&mut stage, BackingState::Dirty);
    stage.ask(DETACH).unwrap();
    keep(&mut stage, 32..96);
    stage.stop().unwrap();
    let newest = stage.device(1).clone();
    stage.device(1).return_as(&old);
    let before = backing(&mut stage, 1);
    assert_not_opened(&mut stage, "the set does not know it");
    assert_eq!(backing(&mut stage, 1), before, "it is unchanged");
    stage.device(1).return_as(&newest);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
