//! Write-back and other users of the same backing device.

use crate::memory::OpFault;
use crate::rig::{BACKING, DATA_OFFSET, Rig, Sizes, ask, backing_superblock, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use bcached_format::BackingState;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

async fn dirty(set: &CacheSet, volume: VolumeId, count: u64) {
    for n in 0..count {
        ask(set, volume, write(n * 7 % count * 16, 8, 1)).await;
    }
}

/// Reads a sector that is not in the cache.
async fn miss(set: &CacheSet, volume: VolumeId, sector: u64) {
    ask(set, volume, Request::Read { sector, buffer: Buffer::zeroed(512) }).await;
}

/// Counts the operations of the backing device.
fn operations(rig: &Rig) -> Rc<Cell<u64>> {
    let operations = Rc::new(Cell::new(0));
    let seen = Rc::clone(&operations);
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, _| {
        seen.set(seen.get() + u64::from(disk == BACKING));
        None
    }));
    operations
}

/// Writes a little every ten minutes for `hours` hours, starting when the disk is asleep.
async fn write_now_and_then(env: &Env, set: &CacheSet, volume: VolumeId, hours: u64) {
    for n in 0..hours * 6 {
        ask(set, volume, write(n * 64, 8, 1)).await;
        env.sleep(10 * MINUTE).await;
    }
}

fn sleepy(volume: VolumeOptions) -> Options {
    let volume = VolumeOptions { spindown_after: Some(5 * MINUTE), ..volume };
    Options { volume, ..Options::default() }
}

/// An unused disk stays asleep until a client needs it. Each small write used to wake it, for the
/// data and for the superblock's state, and nothing let it sleep.
#[test]
fn a_disk_that_nobody_uses_is_left_asleep_until_somebody_does() {
    let mut rig = Rig::new(SIZES, 1);
    let operations = operations(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), sleepy(VolumeOptions::default())).await.expect("sound");
        dirty(&set, volume, 100).await;
        env.sleep(MINUTE).await;
        assert_eq!(set.status().dirty_sectors, 0, "it is awake: all of it leaves, and not at the least rate");
        let info = set.volumes().remove(0);
        assert_eq!((info.state, info.oldest_dirty), (Some(BackingState::Dirty), None));
        env.sleep(10 * MINUTE).await;
        let before = operations.get();
        write_now_and_then(&env, &set, volume, 8).await;
        assert_eq!((operations.get(), set.status().dirty_sectors), (before, 48 * 8), "it slept");
        miss(&set, volume, 150_000).await;
        env.sleep(SECOND).await;
        assert_eq!(set.status().dirty_sectors, 0, "all of it goes along");
        env.sleep(10 * MINUTE).await;
        write_now_and_then(&env, &set, volume, 1).await;
        set.write_back(volume, &CancelToken::default()).await.expect("it was asked for");
        assert_eq!(set.volumes()[0].state, Some(BackingState::Clean), "and says so");
    });
}

/// Write-back wakes a disk for data that is too old, and when more than twice the dirty target is
/// dirty.
#[test]
fn a_disk_that_sleeps_is_woken_for_what_cannot_wait() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let options = VolumeOptions { writeback_percent: 1, ..VolumeOptions::default() };
        let (set, volume) = open(env.clone(), sleepy(options)).await.expect("sound");
        dirty(&set, volume, 1).await;
        env.sleep(20 * MINUTE).await;
        dirty(&set, volume, 190).await;
        env.sleep(10 * MINUTE).await;
        let info = set.volumes().remove(0);
        assert_eq!((info.dirty_target_sectors, info.dirty_sectors), (768, 190 * 8));
        dirty(&set, volume, 200).await;
        env.sleep(10 * SECOND).await;
        assert_eq!(set.status().dirty_sectors, 0, "all of it, and not what is too much alone");
        env.sleep(20 * MINUTE).await;
        dirty(&set, volume, 10).await;
        let limit = |options: &mut VolumeOptions| options.max_dirty_age = Some(2 * HOUR);
        set.change_volume_options(volume, limit).expect("it is served");
        env.sleep(55 * MINUTE).await;
        assert_eq!(set.status().dirty_sectors, 80);
        env.sleep(10 * MINUTE).await;
        assert_eq!(set.status().dirty_sectors, 0, "half of its time is over");
    });
}

/// A stop marks a volume clean even if its disk was left asleep. Its superblock used to say *dirty*
/// after an orderly stop although it had no dirty data, so it could not have been served without
/// its cache.
#[test]
fn a_stop_marks_a_volume_clean_whose_disk_was_left_asleep() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), sleepy(VolumeOptions::default())).await.expect("sound");
        dirty(&set, volume, 10).await;
        env.sleep(MINUTE).await;
        assert_eq!(set.volumes()[0].state, Some(BackingState::Dirty));
        set.stop().await.expect("it stops");
    });
    assert_eq!(backing_superblock(&rig).state(), BackingState::Clean);
}

/// Returns how many of 2000 pieces are written back in 20 seconds, at 100 a second at most.
/// Meanwhile a client reads from the same disk, and each read takes `read_takes`.
fn left_beside_reads(limit: Option<Duration>, read_takes: Duration) -> u64 {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let still = VolumeOptions {
            writeback_running: false,
            writeback_percent: 0,
            writeback_rate_maximum: Some(800),
            writeback_latency: limit,
            ..VolumeOptions::default()
        };
        let (set, volume) =
            open(env.clone(), Options { volume: still, ..Options::default() }).await.expect("sound");
        dirty(&set, volume, 2000).await;
        let (holds, is_held) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let held = Rc::clone(&holds);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_read = matches!(op, Op::Read { sector, .. } if *sector >= DATA_OFFSET);
            (disk == BACKING && is_read && held.get()).then_some(OpFault::Waits)
        }));
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        let began = env.now();
        for n in 0.. {
            if env.now().since(began) >= 20 * SECOND {
                break;
            }
            holds.set(true);
            let (reader, ended) = (set.clone(), Rc::clone(&is_held));
            ended.set(true);
            env.spawn(async move {
                miss(&reader, volume, 100_000 + n * 8).await;
                ended.set(false);
            });
            env.sleep(read_takes).await;
            holds.set(false);
            env.sleep(Duration::from_millis(300)).await;
            assert!(!is_held.get(), "it has its answer");
        }
        2000 - set.status().dirty_sectors / 8
    })
}

/// Write-back yields to clients that wait for the same disk. It used to consider only its own
/// writes, so readers of the same disk waited as long as write-back liked.
#[test]
fn write_back_gives_way_to_clients_who_wait_for_the_same_disk() {
    let limit = Duration::from_millis(20);
    let (quick, slow) = (Duration::from_millis(5), Duration::from_millis(60));
    assert!(left_beside_reads(None, slow) > 1900, "nobody asks for it");
    assert!(left_beside_reads(Some(limit), quick) > 1900, "nobody waits too long");
    let left = left_beside_reads(Some(limit), slow);
    assert!((100..1000).contains(&left), "{left}: it slows down, and does not stop");
}

/// While data is too old, write-back yields to no client. Writers that waited for room, or for old
/// data to be written back, used to wait for a disk that got one write at a time.
#[test]
fn nobody_is_spared_while_data_is_too_old() {
    const POLLS: u32 = 400;
    const PIECES: u64 = 12_000;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let still = VolumeOptions {
            writeback_running: false,
            writeback_percent: 0,
            writeback_latency: Some(Duration::from_micros(200)),
            ..VolumeOptions::default()
        };
        let (set, volume) =
            open(env.clone(), Options { volume: still, ..Options::default() }).await.expect("sound");
        for piece in 0..PIECES {
            ask(&set, volume, write(16 * piece, 1, 1)).await;
        }
        // Each write takes too long. Record the largest number in flight at once.
        let (polls, most) = (RefCell::new(BTreeMap::<u64, u32>::new()), Rc::new(Cell::new(0)));
        let seen = Rc::clone(&most);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Write { sector, .. } if disk == BACKING && *sector >= DATA_OFFSET => {
                let mut polls = polls.borrow_mut();
                let times = polls.entry(*sector).or_default();
                *times += 1;
                if *times < POLLS {
                    seen.set(seen.get().max(polls.len()));
                    return Some(OpFault::Waits);
                }
                polls.remove(sector);
                None
            }
            _ => None,
        }));
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        let mut at_once = Vec::new();
        while at_once.last() != Some(&1) {
            env.sleep(Duration::from_millis(20)).await;
            at_once.push(most.take());
            assert!(set.status().dirty_sectors > 0, "it never slows down: {at_once:?}");
        }
        let limit = |options: &mut VolumeOptions| options.max_dirty_age = Some(Duration::from_millis(1));
        set.change_volume_options(volume, limit).expect("it is served");
        env.sleep(5 * SECOND).await;
        assert_eq!(most.get(), 32);
    });
}
