//! How fast dirty data is written back, and in what pieces.

use crate::memory::OpFault;
use crate::rig::{BACKING, DATA_OFFSET, Rig, Sizes, ask, open, run, write};
use bcached_engine::{CacheSet, DirtyAge, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

const SECOND: Duration = Duration::from_secs(1);

fn options(volume: VolumeOptions) -> Options {
    Options { volume, ..Options::default() }
}

/// Writes `count` pieces of eight sectors, `apart` sectors from each other, in an order that is not
/// that of their addresses.
async fn dirty(set: &CacheSet, volume: VolumeId, count: u64, apart: u64) {
    for n in 0..count {
        // Seven is coprime to 2^k and to 100.
        ask(set, volume, write(n * 7 % count * apart, 8, 1)).await;
    }
}

/// Lets time pass without the set being idle.
async fn pass(env: &Env, set: &CacheSet, volume: VolumeId, seconds: u64) {
    for _ in 0..seconds {
        ask(set, volume, Request::Read { sector: 150_000, buffer: Buffer::zeroed(512) }).await;
        env.sleep(SECOND).await;
    }
}

/// Records the writes of data to the backing device, by sector and length in sectors, in order of
/// completion.
fn data_writes(rig: &Rig) -> Rc<RefCell<Vec<(u64, usize)>>> {
    let writes = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&writes);
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        if let Op::Write { sector, payload, .. } = op
            && disk == BACKING
            && *sector >= DATA_OFFSET
        {
            seen.borrow_mut().push((*sector - DATA_OFFSET, payload.len() / 512));
        }
        None
    }));
    writes
}

/// Below the target, dirty data is written back at the minimum rate while clients are active, and
/// at once when the set is idle.
#[test]
fn little_dirty_data_leaves_slowly_until_nobody_works() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(VolumeOptions::default())).await.expect("sound");
        dirty(&set, volume, 512, 16).await;
        // The first sweep has found little, and a pause follows each sweep.
        pass(&env, &set, volume, 40).await;
        let before = set.volumes()[0].dirty_sectors;
        assert_eq!(set.volumes()[0].writeback_rate.rate, Some(8));
        pass(&env, &set, volume, 100).await;
        let after = set.volumes()[0].dirty_sectors;
        assert!((85 * 8..=115 * 8).contains(&(before - after)), "{before} {after}: eight sectors a second");
        env.sleep(40 * SECOND).await;
        assert_eq!(set.volumes()[0].dirty_sectors, 0, "nobody asked for anything for 30 s");
    });
}

/// The first dirty data wakes write-back before the controller's next step.
#[test]
fn the_first_dirty_data_wakes_write_back() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let at_once = VolumeOptions {
            writeback_percent: 0,
            writeback_delay: Duration::ZERO,
            writeback_rate_update: 60 * SECOND,
            ..VolumeOptions::default()
        };
        let (set, volume) = open(env.clone(), options(at_once)).await.expect("sound");
        env.sleep(100 * SECOND).await;
        for _ in 0..3 {
            dirty(&set, volume, 1, 16).await;
            env.sleep(2 * SECOND).await;
            assert_eq!(set.volumes()[0].dirty_sectors, 0);
        }
    });
}

/// A rate that is set by hand is in force at once, also below a ceiling, until the controller's
/// next step.
#[test]
fn a_rate_that_is_said_holds_until_the_next_step() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(VolumeOptions::default())).await.expect("sound");
        let rate = || set.volumes()[0].writeback_rate.rate;
        let dirty_now = || set.volumes()[0].dirty_sectors;
        assert_eq!(set.set_writeback_rate(VolumeId(99), 400), Err(Error::NoVolume));
        dirty(&set, volume, 1024, 16).await;
        pass(&env, &set, volume, 40).await;
        assert_eq!(rate(), Some(8));
        // The moment after a step.
        let change = |update| {
            set.change_volume_options(volume, |options| options.writeback_rate_update = update)
                .expect("served");
        };
        change(60 * SECOND);
        let before = dirty_now();
        set.set_writeback_rate(volume, 400).expect("served");
        assert_eq!(rate(), Some(400));
        pass(&env, &set, volume, 10).await;
        assert!((3000..=5000).contains(&(before - dirty_now())), "{before} {}", dirty_now());
        assert_eq!(rate(), Some(400), "there was no step");
        set.change_volume_options(volume, |options| options.writeback_rate_maximum = Some(50))
            .expect("served");
        set.set_writeback_rate(volume, 500).expect("served");
        assert_eq!(rate(), Some(50));
        change(SECOND);
        pass(&env, &set, volume, 3).await;
        assert_eq!(rate(), Some(8), "a step was taken");
    });
}

/// A request ends the fast write-back of an idle set.
#[test]
fn a_request_ends_the_hurry_of_an_idle_set() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(VolumeOptions::default())).await.expect("sound");
        env.sleep(60 * SECOND).await;
        dirty(&set, volume, 512, 16).await;
        pass(&env, &set, volume, 20).await;
        let left = set.volumes()[0].dirty_sectors;
        assert!(left > 500, "{left}: at the least rate after the first step");
        let oldest = set.volumes()[0].oldest_dirty.and_then(DirtyAge::known).expect("there is some");
        assert!((20 * SECOND..25 * SECOND).contains(&oldest), "{oldest:?}");
    });
}

/// Adjacent data is written back in one write and in address order, whatever the order and size in
/// which it arrived.
#[test]
fn neighbours_leave_together_in_the_order_of_their_addresses() {
    let mut rig = Rig::new(SIZES, 1);
    let writes = data_writes(&rig);
    run(&mut rig, move |env| async move {
        let still =
            VolumeOptions { writeback_running: false, writeback_percent: 0, ..VolumeOptions::default() };
        let (set, volume) = open(env.clone(), options(still)).await.expect("sound");
        dirty(&set, volume, 100, 8).await;
        for n in 0..4 {
            ask(&set, volume, write(100_000 - 1000 * n, 8, 2)).await;
        }
        env.sleep(SECOND).await;
        assert_eq!(*writes.borrow(), [], "it does not run");
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        env.sleep(SECOND).await;
        assert_eq!(set.volumes()[0].dirty_sectors, 0);
        let mut writes = writes.borrow_mut();
        // They complete in any order.
        writes.sort_unstable();
        assert_eq!(*writes, [(0, 800), (97_000, 8), (98_000, 8), (99_000, 8), (100_000, 8)]);
    });
}

/// One sector in the middle of adjacent data cannot be written: only the data there stays dirty.
#[test]
fn a_bad_place_keeps_only_what_lies_there() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let eager = VolumeOptions { writeback_percent: 0, ..VolumeOptions::default() };
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let Op::Write { sector, payload, .. } = op else { return None };
            let (start, end) = (*sector, *sector + payload.len() as u64 / 512);
            let is_bad = (start..end).contains(&(DATA_OFFSET + 404));
            (disk == BACKING && is_bad).then_some(OpFault::Fails)
        }));
        let (set, volume) = open(env.clone(), options(eager)).await.expect("sound");
        dirty(&set, volume, 100, 8).await;
        env.sleep(60 * SECOND).await;
        let info = set.volumes().remove(0);
        assert_eq!(info.dirty_sectors, 8);
        let trouble = info.writeback_trouble.expect("it is named");
        assert_eq!((trouble.sector, trouble.sectors), (400, 8));
        assert!(
            info.oldest_dirty.and_then(DirtyAge::known).expect("there is some") >= 59 * SECOND,
            "the sweeps have passed by it"
        );
    });
}

/// No data stays dirty longer than the limit even if the rate would allow it, and it is written
/// back no faster than needed.
#[test]
fn data_leaves_before_it_is_older_than_it_may_be() {
    let limit = 100 * SECOND;
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let aged = VolumeOptions { max_dirty_age: Some(limit), ..VolumeOptions::default() };
        let (set, volume) = open(env.clone(), options(aged)).await.expect("sound");
        pass(&env, &set, volume, 6).await;
        let (mut oldest, mut most) = (Duration::ZERO, 0);
        for round in 0..400 {
            ask(&set, volume, write(round * 7919 % 140_000, 64, 1)).await;
            pass(&env, &set, volume, 1).await;
            let info = set.volumes().remove(0);
            oldest = oldest.max(info.oldest_dirty.and_then(DirtyAge::known).unwrap_or_default());
            most = most.max(info.dirty_sectors);
        }
        assert!(oldest <= limit, "{oldest:?}");
        assert!(most > 30 * 64, "{most}: what may wait does");
    });
}

/// In quiet hours only what must be written back is.
#[test]
fn quiet_hours_are_quiet_until_data_is_too_old() {
    let mut rig = Rig::new(SIZES, 1);
    let writes = data_writes(&rig);
    run(&mut rig, move |env| async move {
        let quiet = VolumeOptions {
            writeback_percent: 0,
            writeback_quiet: true,
            max_dirty_age: Some(600 * SECOND),
            ..VolumeOptions::default()
        };
        let (set, volume) = open(env.clone(), options(quiet)).await.expect("sound");
        dirty(&set, volume, 10, 80).await;
        env.sleep(290 * SECOND).await;
        assert_eq!(*writes.borrow(), [], "also when the set is idle");
        env.sleep(20 * SECOND).await;
        assert_eq!(writes.borrow().len(), 10, "half of its time is over");
        ask(&set, volume, write(0, 8, 1)).await;
        env.sleep(100 * SECOND).await;
        assert_eq!(writes.borrow().len(), 10);
        set.change_volume_options(volume, |options| options.writeback_quiet = false).expect("it is served");
        env.sleep(SECOND).await;
        assert_eq!(writes.borrow().len(), 11, "the hours are over");
    });
}

/// A rate ceiling holds whatever else asks for speed.
#[test]
fn a_ceiling_is_not_exceeded() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let slow = VolumeOptions {
            writeback_percent: 0,
            writeback_rate_maximum: Some(100),
            ..VolumeOptions::default()
        };
        let (set, volume) = open(env.clone(), options(slow)).await.expect("sound");
        dirty(&set, volume, 512, 16).await;
        let before = set.volumes()[0].dirty_sectors;
        env.sleep(30 * SECOND).await;
        let after = set.volumes()[0].dirty_sectors;
        assert!((2800..=3300).contains(&(before - after)), "{before} {after}: 100 sectors a second");
    });
}

/// Even without a pause between two sweeps, the task waits for something. It used to spin.
#[test]
fn a_delay_of_nothing_is_no_reason_to_spin() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let restless = VolumeOptions { writeback_delay: Duration::ZERO, ..VolumeOptions::default() };
        let (set, volume) = open(env.clone(), options(restless)).await.expect("sound");
        env.sleep(10 * SECOND).await;
        dirty(&set, volume, 10, 16).await;
        env.sleep(60 * SECOND).await;
        assert_eq!(set.volumes()[0].dirty_sectors, 0);
    });
}

/// A batch begins while the set is idle, and a request ends that. Writes that have not started by
/// then are left for later. At the reduced rate they would otherwise hold their ranges, and block a
/// discard of one of them, for minutes.
#[test]
fn a_batch_that_has_become_slow_holds_nobody_up() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let still = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
        let (set, volume) = open(env.clone(), options(still)).await.expect("sound");
        dirty(&set, volume, 512, 16).await;
        env.sleep(60 * SECOND).await;
        let holds = Rc::new(Cell::new(true));
        let is_held = Rc::clone(&holds);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_data = matches!(op, Op::Write { sector, .. } if *sector >= DATA_OFFSET);
            (disk == BACKING && is_data && is_held.get()).then_some(OpFault::Waits)
        }));
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        env.sleep(Duration::from_millis(1)).await;
        ask(&set, volume, Request::Read { sector: 150_000, buffer: Buffer::zeroed(512) }).await;
        holds.set(false);
        let began = env.now();
        for n in 0..512 {
            ask(&set, volume, Request::Discard { sector: 16 * n, sectors: 8 }).await;
        }
        let taken = env.now().since(began);
        assert!(taken < 10 * SECOND, "{taken:?}");
    });
}

/// Data left by a former process counts as too old for any limit, since its age is unknown, and the
/// status says so. Ages used to be counted from the last start: with a restart every ten hours, a
/// limit of twelve had no effect.
#[test]
fn what_a_former_process_has_left_is_too_old() {
    const HOUR: Duration = Duration::from_secs(3600);
    let mut rig = Rig::new(SIZES, 1);
    let quiet =
        |limit| VolumeOptions { writeback_quiet: true, max_dirty_age: limit, ..VolumeOptions::default() };
    let writes = data_writes(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options(quiet(Some(24 * HOUR)))).await.expect("sound");
        dirty(&set, volume, 10, 80).await;
        env.sleep(10 * HOUR).await;
        let age = set.volumes()[0].oldest_dirty.and_then(DirtyAge::known).expect("it is of this process");
        assert!(age >= 10 * HOUR && writes.borrow().is_empty(), "{age:?}: it is not too old yet");
        set.stop().await.expect("it stops");
    });
    let writes = data_writes(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options(quiet(None))).await.expect("sound");
        ask(&set, volume, write(0, 8, 2)).await;
        env.sleep(HOUR).await;
        assert_eq!(set.volumes()[0].oldest_dirty, Some(DirtyAge::Unknown), "not the hour of this process");
        assert!(writes.borrow().is_empty(), "nobody has set a limit");
        let limit = |options: &mut VolumeOptions| options.max_dirty_age = Some(24 * HOUR);
        set.change_volume_options(volume, limit).expect("it is served");
        env.sleep(10 * SECOND).await;
        assert_eq!((set.volumes()[0].dirty_sectors, set.volumes()[0].oldest_dirty), (0, None));
        assert_eq!(writes.borrow().len(), 10);
        // Data that becomes dirty from here on may take the full time.
        ask(&set, volume, write(0, 8, 3)).await;
        env.sleep(10 * HOUR).await;
        assert_eq!((set.volumes()[0].dirty_sectors, writes.borrow().len()), (8, 10));
    });
}
