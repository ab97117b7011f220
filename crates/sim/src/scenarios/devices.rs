//! Devices that die, come back, are renamed, truncated or outdated.

use super::bench::{VolumeLocation, quiet};
use super::image::{backing, change_backing};
use super::stage::{
    ANYWHERE, AROUND, BACK, BACK_LAST, FLUSH, assert_not_opened, assert_refused, bench, failure, geometry,
    keep, read, small, stage, warm, write, write_to,
};
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors, WrittenPart};
use crate::driver::Crash;
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::system::{Geometry, Tuning, engine::Engine};
use crate::workload::{Shape, Step};
use bcached_format::{BackingState, Uuid};
use std::rc::Rc;

super::scenarios! {
    include_str!("devices.rs"),
    a_cache_that_dies_while_dirty_and_returns_has_lost_nothing,
    a_clean_cache_that_comes_back_outdated_is_not_believed,
    a_backing_device_of_another_cache_is_refused,
    a_backing_device_that_returns_under_another_name_is_the_same_volume,
    a_set_that_lost_a_backing_device_keeps_its_dirty_data_until_it_returns,
    a_cache_that_takes_no_more_writes_is_still_read_and_clean_volumes_go_on,
    no_failure_of_a_device_leaves_anybody_waiting,
    a_backing_device_that_ends_before_its_dirty_data_is_refused,
}

/// A controller resets, and the SSD with the dirty data disappears until the next boot. A kernel
/// would have detached the disk meanwhile and served it with last week's content. Here the volume
/// refuses requests, and loses nothing.
fn a_cache_that_dies_while_dirty_and_returns_has_lost_nothing() {
    // Proves invariant D37.
    let (mut stage, _) = bench(geometry(vec![16384], BACK), quiet());
    keep(&mut stage, 0..64);
    stage.device(0).gone = true;
    for answer in stage.attempt(vec![read(0..64), write(8..16)]).unwrap() {
        assert!(answer.is_err(), "dirty data must not be bypassed");
    }
    stage.crash(Crash::ProcessDeath, Survivors::Everything);
    assert_refused(&mut stage, "superblock: unreachable");
    stage.crash(Crash::PowerCut, Survivors::Everything);
    assert_eq!(backing(&mut stage, 1).state(), BackingState::Dirty, "it still belongs to the cache");
    stage.device(0).gone = false;
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The SSD was away for repair. Meanwhile a machine served the disk alone, as is allowed with a
/// clean one. The SSD returns with its earlier copies, which are older than what the disk holds
/// now.
fn a_clean_cache_that_comes_back_outdated_is_not_believed() {
    let (mut stage, _) = bench(geometry(vec![16384], AROUND), quiet());
    warm(&mut stage, 0..64);
    stage.stop().unwrap();
    let away = stage.device(0).clone();
    stage.start().unwrap();
    keep(&mut stage, 0..64);
    stage.stop().unwrap();
    // What a machine without the cache leaves: newer data, and the state that records it.
    change_backing(&mut stage, 1, |superblock| superblock.set_state(BackingState::Stale));
    stage.device(0).return_as(&away);
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The volume was attached to another cache and runs there. Then the old cache is started with it.
fn a_backing_device_of_another_cache_is_refused() {
    for (state, words) in [
        (BackingState::Clean, "is attached to another cache set"),
        (BackingState::Dirty, "has dirty data in another cache set"),
    ] {
        let mut stage = stage();
        keep(&mut stage, 0..64);
        stage.stop().unwrap();
        change_backing(&mut stage, 1, |superblock| {
            superblock.set_set_uuid(Uuid([7; 16]));
            superblock.set_state(state);
        });
        let before = backing(&mut stage, 1);
        assert_not_opened(&mut stage, words);
        assert_eq!(backing(&mut stage, 1), before, "it is unchanged");
    }
}

/// A disk is plugged into another port, and the names of two disks are swapped. The dirty data of a
/// disk belongs to the disk and not to its name.
fn a_backing_device_that_returns_under_another_name_is_the_same_volume() {
    let (mut stage, bench) = bench(geometry(vec![4096, 4096], BACK), quiet());
    for volume in [0, 1] {
        stage.ask(write_to(volume, 0..64)).unwrap();
        stage.ask(Step::Flush { volume }).unwrap();
    }
    stage.stop().unwrap();
    stage.rig().world.borrow_mut().devices.swap(1, 2);
    bench.put(0, VolumeLocation::Disk(2));
    bench.put(1, VolumeLocation::Disk(1));
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// One of two disks is not found at boot, and the cache holds dirty data for it. The other volume
/// goes on and fills the cache many times over. The data of the missing disk stays, however little
/// room there is.
fn a_set_that_lost_a_backing_device_keeps_its_dirty_data_until_it_returns() {
    let (mut stage, bench) = bench(small(vec![16384, 4096], BACK), quiet());
    stage.together((0..32).map(|place| write_to(1, place * 64..place * 64 + 16)).collect()).unwrap();
    stage.ask(Step::Flush { volume: 1 }).unwrap();
    stage.stop().unwrap();
    bench.put(1, VolumeLocation::Missing);
    stage.start().unwrap();
    stage.ask(Step::Mode { volume: 0, mode: crate::system::Mode::Writethrough }).unwrap();
    for start in (0..16384).step_by(128) {
        stage.ask(write(start..start + 128)).unwrap();
    }
    stage.ask(FLUSH).unwrap();
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    bench.put(1, VolumeLocation::Disk(2));
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// The SSD is worn out: it fails every write and can still be read. The volume that has dirty data
/// there can still be read, and its writes fail with an error. The volume that has none goes on as
/// if it had no cache.
fn a_cache_that_takes_no_more_writes_is_still_read_and_clean_volumes_go_on() {
    // Proves invariant D36.
    let (mut stage, _) = bench(geometry(vec![4096, 4096], BACK_LAST), quiet());
    for volume in [0, 1] {
        stage.together(vec![write_to(volume, 0..64), write_to(volume, 640..648)]).unwrap();
        stage.ask(Step::Flush { volume }).unwrap();
    }
    failure(&mut stage, 0, OpKind::Write, u32::MAX);
    let answers = stage.attempt(vec![write_to(0, 8..16), write_to(1, 8..16)]).unwrap();
    assert!(answers[1].is_ok(), "the clean volume continues without its cache: {answers:?}");
    // Whatever the first failure was, the journal has met one by now.
    let answers = stage.attempt(vec![Step::Flush { volume: 0 }]).unwrap();
    assert!(answers[0].is_err(), "acknowledged data is not durable");
    let answers = stage.attempt(vec![write_to(0, 16..24), write_to(1, 16..24)]).unwrap();
    assert!(answers[0].is_err() && answers[1].is_ok(), "{answers:?}");
    stage.verify().unwrap();
}

/// A device fails in the middle of everything, permanently or once, and no client may wait forever:
/// every request is answered, whatever the answer, and the set stops.
fn no_failure_of_a_device_leaves_anybody_waiting() {
    // Proves invariant L1.
    // The drawn steps request single sectors.
    let small = Geometry { block_sectors: 1, ..small(vec![4096], BACK) };
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush];
    let cases = (0..2).flat_map(|device| kinds.map(|on| (device, on))).flat_map(|(device, on)| {
        [1, u32::MAX]
            .into_iter()
            .flat_map(move |count| (0..110).step_by(11).map(move |skip| (device, on, count, skip)))
    });
    for (device, on, count, skip) in cases {
        let seed = u64::from(skip);
        let mut stage = ScenarioRig::new(
            Rc::new(Engine),
            Geometry { tuning: Tuning::draw(seed << 32 | 2 << 40), ..small.clone() },
            seed,
        );
        stage.start().unwrap();
        let fault = DiskFault::Fail(WrittenPart::Part);
        stage.device(device).faults.add(FaultRule { on, sectors: ANYWHERE, skip, count, fault });
        let steps = Shape::named("points").expect("a shape").with_steps(120).draw(seed).steps;
        let is_request = |step: &Step| {
            !matches!(step, Step::Pause(_) | Step::Settle | Step::Trouble { .. } | Step::Note { .. })
        };
        let requests = steps.into_iter().filter(is_request);
        let ended = stage.attempt(requests.collect()).map(|_| ()).and_then(|()| stage.stop());
        let is_allowed = matches!(ended, Ok(()) | Err(FailureKind::Stop(_)));
        assert!(is_allowed, "{on:?} {skip} of device {device} fails {count} times: {ended:?}");
    }
}

/// An image file was truncated by a copy that ran out of space, and its cache holds dirty data for
/// the missing part. If the volume were served, that data could never be written back and would be
/// lost silently.
fn a_backing_device_that_ends_before_its_dirty_data_is_refused() {
    let mut stage = stage();
    stage.ask(write(16000..16064)).unwrap();
    stage.ask(FLUSH).unwrap();
    stage.stop().unwrap();
    let whole = stage.device(1).model.sectors;
    stage.device(1).model.sectors = 8192;
    let before = backing(&mut stage, 1);
    assert_not_opened(&mut stage, "the device was truncated");
    assert_eq!(backing(&mut stage, 1), before, "it is unchanged");
    stage.device(1).model.sectors = whole;
    stage.start().unwrap();
    stage.verify().unwrap();
}
