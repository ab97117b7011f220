//! A backing device that comes back with old content: one restored from a snapshot, or by a layer beneath that forgot its
//! last flushes, while its cache is as it was.
//!
//! A kernel's format holds nothing that dates a backing device: its superblock says whose it is, and in which state, and the
//! state is the same for months. bcached dates it at each start and each orderly stop, so an old copy from before
//! one of those is refused (`engine/src/volume/attachment.rs`). One from the same run of the set that ended in a crash is taken for
//! the newest. The stories tell which data reads how then, and what tells an old copy apart after all.

use super::bench::quiet;
use super::image::{backing, change_backing};
use super::stage::{
    ATTACH, BACK, DETACH, FLUSH, assert_not_opened, bench, geometry, keep, minutes, pause, power_cut, write,
};
use crate::disk::Device;
use crate::scenario::Stage;
use crate::stamp::Value;
use crate::system::Mode;
use crate::system::engine::Image;
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

/// What a sector holds that nobody has written.
const FIRST: Value = Value::Written(0);

/// Writes durably in this mode, and leaves the volume in it.
fn keep_in(stage: &mut Stage, mode: Mode, sectors: Range<u64>) {
    stage.ask(Step::Mode { volume: 0, mode }).unwrap();
    keep(stage, sectors);
    // What was parked enters the tree.
    pause(stage, 20).unwrap();
}

/// Writes a third each that is clean in the cache, dirty in the cache, and on the disk alone: 0 to 64, to 128 and to 192.
fn write_newer(stage: &mut Stage) {
    keep_in(stage, Mode::Writethrough, 0..64);
    keep_in(stage, Mode::Writearound, 128..192);
    keep_in(stage, Mode::Writeback, 64..128);
}

/// The disk as a snapshot of yesterday has it, on which the volume was attached as it is today, with dirty data elsewhere or
/// without.
fn yesterday(stage: &mut Stage, state: BackingState) -> Device {
    if state == BackingState::Dirty {
        keep(stage, 640..648);
    }
    let old = stage.device(1).clone();
    assert_eq!(backing(stage, 1).state(), state);
    old
}

/// Whether the offline checker finds fault with cache and disk as they are.
fn is_noticed(stage: &Stage, compare_clean: bool) -> bool {
    let world = stage.rig().world.borrow();
    let (cache, disk) = (Image(&world.devices[0]), Image(&world.devices[1]));
    let disks: [&dyn ReadAt; 1] = [&disk];
    let options = bcached_check::Options { compare_clean, ..Default::default() };
    let checked = bcached_check::check(&cache, &disks, options);
    checked.report.findings.iter().any(|finding| finding.severity >= Severity::Error)
}

/// The disk alone is restored from a snapshot that was made while the volume was served. If the set was stopped afterwards it is
/// refused: the stop has dated both. If the power went, it is refused if it says *clean* where the cache has dirty data; else nothing tells,
/// and nobody is warned. What is dirty in the cache reads right, and stays right when it is written back. What the cache holds clean
/// reads right as long as it holds it; what it does not hold is yesterday's, and so is the rest when the volume leaves the cache. Only a
/// check that compares each clean copy with the disk sees that before the start.
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
        assert!(is_noticed(&stage, true), "{state:?}: it compares all there is");
        assert_eq!(
            is_noticed(&stage, false),
            stops || state == BackingState::Clean,
            "what an ordinary check sees"
        );
        if stops || state == BackingState::Clean {
            // The stop has dated both devices, and this one says what was before; or it says that nothing was dirty.
            assert_not_opened(&mut stage, "an older copy of itself");
            continue;
        }
        stage.start().unwrap();
        assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty, "the cache knows what is dirty");
        assert_eq!(bench.status().dirty_sectors, 72);
        stage.values(0, 0..128).expect("the cache has it, newer than the disk");
        assert_eq!(stage.unjudged(0, 128..192).unwrap(), [FIRST; 64], "{state:?}: only the disk had it");
        stage.ask(DETACH).unwrap();
        stage.values(0, 64..128).expect("it was dirty, and was written back");
        assert_eq!(stage.unjudged(0, 0..64).unwrap(), [FIRST; 64], "{state:?}: only the cache hid it");
    }
}

/// The snapshot is of a time when the volume was not attached, or its disk was served alone: its superblock says so. That is
/// seen. The cache's copies belong to another past, and none of it is read: not what is clean, and not what is dirty either,
/// which is given up without a word, as kernels do. All of the volume reads as in the snapshot.
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
        assert_eq!(bench.status().dirty_sectors, 0, "what was dirty is void");
        stage.stop().unwrap();
    }
}

/// The snapshot is of a time when the disk had dirty data in the cache. Since then the volume was detached, with all of it
/// on the disk, and the table has forgotten it. The snapshot says that its newest data is where nobody knows of it: it is
/// refused, and left as it is. The disk as it was since is served.
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
    assert_eq!(backing(&mut stage, 1), before, "it is left as it was");
    stage.device(1).return_as(&newest);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
