//! Volumes that a set forgets: their backing device is gone, or they are flash-only.

use crate::background_tasks::BackgroundTask;
use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{CacheSet, Error, LostRange, Options, PendingForget, Request, VolumeOptions};
use bcached_env::rng::Rng;
use bcached_env::{Buffer, Op};
use bcached_format::{CacheMode, Label, Uuid};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 200_000 };
const VOLUME: Uuid = Uuid([3; 16]);

/// Write-back is off.
fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn label(text: &str) -> Label {
    Label::from_text(text).expect("short")
}

/// All that would be lost, in sectors of the backing device.
async fn lost(set: &CacheSet, of: &PendingForget) -> Vec<(u64, u64)> {
    let (mut all, mut at) = (Vec::new(), Some(0));
    while let Some(from) = at {
        let (some, rest) = set.lost(of, from).await.expect("the index is sound");
        all.extend(some.into_iter().map(|LostRange { start, end }| (start, end)));
        at = rest;
    }
    all
}

fn dirty(set: &CacheSet) -> Vec<u64> {
    set.status().unserved.iter().map(|left| left.dirty_sectors).collect()
}

/// The loss is reported to the sector, all buckets are freed, and the volume is no longer known,
/// not even after a restart.
#[test]
fn a_forgotten_volume_leaves_nothing_behind() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        let available = set.status().buckets_available;
        // Two adjacent pieces are one loss; a discarded one is none.
        for (start, sectors) in [(0, 8), (8, 120), (1024, 16), (4096, 8)] {
            ask(&set, volume, write(start, sectors, 1)).await;
        }
        for piece in 0..600 {
            ask(&set, volume, write(100_000 + piece * 64, 8, 2)).await;
        }
        ask(&set, volume, Request::Discard { sector: 4096, sectors: 8 }).await;
        ask(&set, volume, Request::Read { sector: 50_000, buffer: Buffer::zeroed(4096) }).await;
        assert_eq!(set.begin_forgetting(VOLUME), Err(Error::Served));
        set.remove_volume(volume).await.expect("it is there");

        let forgetting = set.begin_forgetting(VOLUME).expect("it is not served");
        assert_eq!((forgetting.dirty_sectors, forgetting.flash_only), (128 + 16 + 4800, false));
        let lost = lost(&set, &forgetting).await;
        assert_eq!(lost[..3], [(16, 144), (1040, 1056), (100_016, 100_024)]);
        assert_eq!(lost.len(), 602);
        assert_eq!(dirty(&set), [4944], "nothing has changed");
        set.forget(forgetting).await.expect("the cache is well");
        assert_eq!(set.status().unserved, []);
        let status = set.status();
        assert_eq!((status.dirty_sectors, status.buckets_clean, status.buckets_dirty), (0, 0, 0));
        // A node that was split off may still exist, and the table is in another bucket.
        assert!(status.buckets_available + 4 >= available, "{} of {available}", status.buckets_available);
        assert_eq!(set.begin_forgetting(VOLUME), Err(Error::NoVolume));
        assert_eq!(set.add_backing(BACKING, None).await, Err(Error::DirtyUnknown), "its data is gone");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let opened = open(env, options()).await;
        assert_eq!(opened.map(|_| ()), Err(Error::DirtyUnknown));
    });
}

/// The process dies at an arbitrary moment. Either the volume is still known, and the same command
/// completes the job, or it is unknown and nothing of it is left.
#[test]
fn a_death_in_the_middle_leaves_less_to_forget() {
    let mut met = [0, 0];
    for writes in 1..16 {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("sound");
            for piece in 0..300 {
                ask(&set, volume, write(piece * 64, 8, 2)).await;
            }
            set.remove_volume(volume).await.expect("it is there");
            let forgetting = set.begin_forgetting(VOLUME).expect("it is not served");
            let mut left = writes;
            world.borrow_mut().fate = Some(Box::new(move |_, op| {
                let is_write = matches!(op, Op::Write { .. });
                left -= u32::from(is_write && left > 0);
                (is_write && left == 0).then_some(OpFault::Waits)
            }));
            let other = set.clone();
            let forgetting = BackgroundTask::start(&env, async move { other.forget(forgetting).await });
            env.sleep(Duration::from_secs(1)).await;
            drop(forgetting);
        });
        rig.world.borrow_mut().fate = None;
        let is_known = run(&mut rig, |env| async move {
            let set =
                CacheSet::open(env, CACHE, Box::new(crate::memory::NoNote), options()).await.expect("sound");
            let is_known = match set.begin_forgetting(VOLUME) {
                Ok(forgetting) => {
                    set.forget(forgetting).await.expect("the cache is well");
                    true
                }
                Err(Error::NoVolume) => false,
                Err(error) => unreachable!("{error}"),
            };
            assert_eq!((set.status().dirty_sectors, set.status().unserved.len()), (0, 0));
            set.stop().await.expect("it stops");
            set.assert_invariants();
            is_known
        });
        met[usize::from(is_known)] += 1;
    }
    assert!(met[0] > 0 && met[1] > 0, "both ends were met: {met:?}");
}

/// Adding a volume while it is being forgotten is refused, even if the add began before.
#[test]
fn a_volume_that_is_being_forgotten_is_not_served() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        set.remove_volume(volume).await.expect("it is there");
        let forgetting = set.begin_forgetting(VOLUME).expect("it is not served");
        assert_eq!(set.begin_forgetting(VOLUME), Err(Error::BeingForgotten));
        assert_eq!(set.add_backing(BACKING, None).await, Err(Error::BeingForgotten));
        set.keep(forgetting);
        let volume = set.add_backing(BACKING, None).await.expect("it is known");
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        set.remove_volume(volume).await.expect("it is there");

        // The device is slow to store its new mode.
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == BACKING && matches!(op, Op::Write { .. })).then_some(OpFault::Waits)
        }));
        let other = set.clone();
        let mode = Some(CacheMode::Writearound);
        let adding = BackgroundTask::start(&env, async move { other.add_backing(BACKING, mode).await });
        env.sleep(Duration::from_secs(1)).await;
        let forgetting = set.begin_forgetting(VOLUME).expect("it is not served yet");
        set.forget(forgetting).await.expect("the cache is well");
        world.borrow_mut().fate = None;
        assert_eq!(adding.result(&env).await, Err(Error::BeingForgotten));
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A flash-only volume survives a restart, is removed and added again, and is forgotten.
#[test]
fn a_volume_in_the_cache_alone_lives_and_is_forgotten() {
    let mut rig = Rig::new(SIZES, 1);
    let uuid = run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let scratch = set.create_flash_only(8000, label("scratch")).await.expect("there is room");
        let info = set.volumes().into_iter().find(|info| info.id == scratch).expect("it is served");
        assert_eq!((info.flash_only, info.sectors, info.label), (true, 8000, label("scratch")));
        assert_eq!(bytes(&set, scratch, 7992, 8).await, [0; 8]);
        ask(&set, scratch, write(7992, 8, 5)).await;
        set.stop().await.expect("it stops");
        info.uuid
    });
    run(&mut rig, move |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let scratch = set.volumes().into_iter().find(|info| info.uuid == uuid).expect("it is there").id;
        assert_eq!(bytes(&set, scratch, 7984, 16).await[7..9], [0, 5]);
        assert_eq!(set.add_flash_only(uuid), Err(Error::Served));
        assert_eq!(set.begin_forgetting(uuid), Err(Error::Served));
        let removed = set.remove_volume(scratch).await.expect("it is there");
        assert_eq!((removed.disk, removed.lost), (None, None));
        let left = set.status().unserved;
        assert_eq!((left[0].flash_sectors, left[0].dirty_sectors), (Some(8000), 8));
        let scratch = set.add_flash_only(uuid).expect("it is known");
        assert_eq!(bytes(&set, scratch, 7992, 8).await, [5; 8]);
        set.remove_volume(scratch).await.expect("it is there");

        let forgetting = set.begin_forgetting(uuid).expect("it is not served");
        assert_eq!(set.add_flash_only(uuid), Err(Error::BeingForgotten));
        assert_eq!(lost(&set, &forgetting).await, [(7992, 8000)]);
        set.forget(forgetting).await.expect("the cache is well");
        assert_eq!(set.add_flash_only(uuid), Err(Error::NoVolume));
        assert_eq!((set.status().dirty_sectors, set.status().unserved), (0, Vec::new()));
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Promised room can be used: the largest volume takes writes of any size anywhere, indefinitely,
/// beside another volume that fills the cache. No second volume is promised what is left.
#[test]
fn the_largest_volume_can_be_filled() {
    let sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
    let mut rig = Rig::new(sizes, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let writes_back = Options { volume: VolumeOptions::default(), ..options() };
        let (set, volume) = open(env.clone(), writes_back).await.expect("sound");
        let room = set.status().flash_room_sectors;
        let too_large = set.create_flash_only(room + 1, label("scratch")).await;
        assert_eq!(too_large, Err(Error::NoRoom { sectors: room + 1, sectors_max: room }));
        let scratch = set.create_flash_only(room, label("scratch")).await.expect("there is room");
        assert!(room > 20_000, "{room} of {} sectors", 600 * 128);
        assert!(set.status().flash_room_sectors < 128);
        let second = set.create_flash_only(128, label("second")).await;
        assert!(matches!(second, Err(Error::NoRoom { .. })), "{second:?}");
        let rng = Rng::new(7);
        let sectors_max = usize::try_from(room).expect("small");
        for at in (0..room).step_by(64) {
            ask(&set, scratch, write(at, 64.min(sectors_max - usize::try_from(at).expect("small")), 1)).await;
        }
        // At first the cache serves no reads of data that could be moved, only of nodes, until
        // there is no space.
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_data = matches!(op, Op::Read { buffer, .. } if buffer.len() < 128 * 512);
            (disk == CACHE && is_data).then_some(OpFault::Waits)
        }));
        let (clock, seen) = (env.clone(), set.clone());
        env.spawn(async move {
            let until = clock.now() + Duration::from_secs(5);
            while seen.status().buckets_available > 14 && clock.now() < until {
                clock.sleep(Duration::from_millis(1)).await;
            }
            clock.sleep(Duration::from_secs(1)).await;
            assert!(seen.status().buckets_available <= 14, "somebody waits for nothing");
            world.borrow_mut().fate = None;
        });
        let rng = Rc::new(RefCell::new(rng));
        let busy = set.clone();
        in_flight(&env, 40_000, 32, move |turn| {
            let (set, rng) = (busy.clone(), Rc::clone(&rng));
            async move {
                let at = rng.borrow_mut().below(room - 3);
                ask(&set, scratch, write(at, 1 + usize::try_from(turn % 3).expect("small"), 2)).await;
                if turn % 4 == 0 && turn > 20_000 {
                    let at = rng.borrow_mut().below(150_000);
                    ask(&set, volume, write(at, 16, 3)).await;
                }
            }
        })
        .await;
        assert!(set.status().stats.moved_bytes > 0, "nothing had to be moved");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Impossible sizes are refused and take no slot.
#[test]
fn sizes_that_cannot_be_are_refused() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        for sectors in [0, 4, 12] {
            let refused = set.create_flash_only(sectors, label("odd")).await;
            assert_eq!(refused, Err(Error::NotWholeBlocks { sectors, block_sectors: 8 }));
        }
        let room = set.status().flash_room_sectors;
        for piece in 0..100 {
            ask(&set, volume, write(piece * 128, 128, 1)).await;
        }
        let dirty = set.status().dirty_sectors;
        assert!(set.status().flash_room_sectors + dirty <= room, "what is dirty may stay for ever");
        assert_eq!(set.status().unserved, []);
        set.stop().await.expect("it stops");
        assert_eq!(set.create_flash_only(8, label("late")).await, Err(Error::Stopping));
    });
}
