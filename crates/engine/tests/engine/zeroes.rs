//! Zeroing requests: what they write and where, how devices that cannot zero are handled, and which
//! requests have to wait.

use crate::memory::{OpFault, World};
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeId, VolumeOptions, WriteCause, ZeroingInfo};
use bcached_env::{DiskId, Env, Op};
use bcached_format::CacheMode;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 100_000 };

/// An operation on a backing device that changes its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Write { sector: u64, sectors: u64 },
    Zero { sector: u64, sectors: u64, unmap: bool },
}

type Changes = Rc<RefCell<Vec<Change>>>;

fn options() -> Options {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    Options { volume, parked_delay: Duration::from_millis(2), ..Options::default() }
}

/// The change that an operation makes, in sectors of the volume.
fn change_of(op: &Op) -> Option<Change> {
    let of_volume = |sector: &u64| sector.checked_sub(DATA_OFFSET);
    match op {
        Op::Write { sector, payload, .. } => {
            Some(Change::Write { sector: of_volume(sector)?, sectors: payload.len() as u64 / 512 })
        }
        Op::Zero { sector, sectors, unmap } => {
            Some(Change::Zero { sector: of_volume(sector)?, sectors: *sectors, unmap: *unmap })
        }
        _ => None,
    }
}

/// Records the changes of the backing device's data; `mishap` decides how they end.
fn noted(
    world: &RefCell<World>,
    mut mishap: impl FnMut(DiskId, &Op) -> Option<OpFault> + 'static,
) -> Changes {
    let changes = Changes::default();
    let seen = Rc::clone(&changes);
    world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        let mishap = mishap(disk, op);
        // A waiting operation is passed in again later.
        if disk == BACKING && mishap != Some(OpFault::Waits) {
            seen.borrow_mut().extend(change_of(op));
        }
        mishap
    }));
    changes
}

fn zeroes(sector: u64, sectors: u64, may_unmap: bool) -> Request {
    Request::WriteZeroes { sector, sectors, fua: false, may_unmap }
}

/// Runs `script` on a new set with a volume that holds 64 sectors of 1 at 0, dirty, and 64 of 2 at
/// 1000, cached clean.
fn on_filled_set<F: Future<Output = ()> + 'static>(
    script: impl FnOnce(Env, Rc<RefCell<World>>, CacheSet, VolumeId) -> F + 'static,
) {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, write(1000, 64, 2)).await;
        ask(&set, volume, Request::Flush).await;
        env.sleep(Duration::from_millis(20)).await;
        set.set_cache_mode(volume, CacheMode::Writeback).await.expect("set");
        ask(&set, volume, write(0, 64, 1)).await;
        ask(&set, volume, Request::Flush).await;
        script(env.clone(), world, set.clone(), volume).await;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A zeroing request that may unmap writes no data anywhere. Trimming a file system used to fill
/// its disk: each hole became zeroes, first dirty and later written back.
#[test]
fn a_zeroing_that_may_unmap_writes_no_data_anywhere() {
    for place in [0, 1000, 5000] {
        on_filled_set(move |_, world, set, volume| async move {
            let data = set.written().of(WriteCause::Data);
            let changes = noted(&world, |_, _| None);
            ask(&set, volume, zeroes(place, 64, true)).await;
            let wanted = Change::Zero { sector: place, sectors: 64, unmap: true };
            assert_eq!(*changes.borrow(), [wanted]);
            assert_eq!(set.written().of(WriteCause::Data), data);
            assert_eq!(set.status().dirty_sectors, if place == 0 { 0 } else { 64 });
            assert_eq!(bytes(&set, volume, place, 64).await, [0; 64]);
        });
    }
}

/// The same holds for a part of a block, unless the block is dirty: then its zeroes are in the
/// cache, like the rest of it.
#[test]
fn a_part_of_a_block_is_zeroed_where_the_block_is() {
    for (place, is_dirty) in [(0, true), (1000, false), (5000, false)] {
        on_filled_set(move |_, world, set, volume| async move {
            let data = set.written().of(WriteCause::Data);
            let changes = noted(&world, |_, _| None);
            ask(&set, volume, zeroes(place + 3, 3, true)).await;
            let below = [Change::Zero { sector: place + 3, sectors: 3, unmap: true }];
            assert_eq!(*changes.borrow(), if is_dirty { &[][..] } else { &below });
            assert_eq!(set.written().of(WriteCause::Data) - data, if is_dirty { 4096 } else { 0 });
            let around = bytes(&set, volume, place, 8).await;
            let byte = around[0];
            assert_eq!(around, [byte, byte, byte, 0, 0, 0, byte, byte]);
        });
    }
}

/// Zeroes without permission to unmap are made on the backing device as well. They are data in the
/// cache only where the cache holds dirty data.
#[test]
fn a_zeroing_that_keeps_its_space_is_data_over_dirty_data_alone() {
    on_filled_set(|_, world, set, volume| async move {
        let data = set.written().of(WriteCause::Data);
        let changes = noted(&world, |_, _| None);
        for place in [0, 1000, 5000] {
            ask(&set, volume, zeroes(place, 64, false)).await;
            assert_eq!(bytes(&set, volume, place, 64).await, [0; 64]);
        }
        let below = |sector| Change::Zero { sector, sectors: 64, unmap: false };
        assert_eq!(*changes.borrow(), [below(1000), below(5000)]);
        assert_eq!(set.written().of(WriteCause::Data) - data, 64 * 512);
        assert_eq!(set.status().dirty_sectors, 64);
    });
}

/// Without a cache, the disk is told to zero the range. The volume used to write zeroes although
/// its disk supports that.
#[test]
fn a_volume_without_a_cache_has_its_disk_make_zeroes() {
    on_filled_set(|_, world, set, volume| async move {
        set.detach(volume, &bcached_engine::CancelToken::default()).await.expect("it is written back");
        let changes = noted(&world, |_, _| None);
        for may_unmap in [false, true] {
            ask(&set, volume, zeroes(3, 50, may_unmap)).await;
        }
        let below = |unmap| Change::Zero { sector: 3, sectors: 50, unmap };
        assert_eq!(*changes.borrow(), [below(false), below(true)]);
        assert_eq!(bytes(&set, volume, 0, 56).await, [&[1; 3][..], &[0; 50], &[1; 3]].concat());
    });
}

/// Whether a file system supports holes is known only after trying. One that does not is told to
/// zero the range, and if that fails too, zeroes are written.
#[test]
fn a_device_that_refuses_to_make_zeroes_is_asked_otherwise() {
    for place in [0, 1000, 5000] {
        on_filled_set(move |_, world, set, volume| async move {
            let changes = noted(&world, |_, op| matches!(op, Op::Zero { .. }).then_some(OpFault::Unknown));
            let data = set.written().of(WriteCause::Data);
            ask(&set, volume, zeroes(place, 64, true)).await;
            let told = |unmap| Change::Zero { sector: place, sectors: 64, unmap };
            let written = Change::Write { sector: place, sectors: 64 };
            assert_eq!(*changes.borrow(), [told(true), told(false), written]);
            assert_eq!(set.written().of(WriteCause::Data), data, "nothing of it is cached");
            assert_eq!(bytes(&set, volume, place, 64).await, [0; 64]);
        });
    }
}

/// The disk accepts zeroes only as data, and has not accepted all of them yet: the finished part is
/// usable, and is reported.
#[test]
fn zeroes_are_written_in_pieces_between_which_others_have_their_turn() {
    const PIECE: u64 = 16_384;
    on_filled_set(|env, world, set, volume| async move {
        (world.borrow_mut().write_zeroes, world.borrow_mut().unmap) = (false, false);
        let is_held = Rc::new(Cell::new(true));
        let held = Rc::clone(&is_held);
        let changes = noted(&world, move |disk, op| {
            let is_late = matches!(op, Op::Write { sector, .. } if *sector >= 2 * PIECE);
            (disk == BACKING && is_late && held.get()).then_some(OpFault::Waits)
        });
        let over = Rc::new(Cell::new(false));
        let (client, is_over) = (set.clone(), Rc::clone(&over));
        env.spawn(async move {
            ask(&client, volume, zeroes(0, 90_000, true)).await;
            is_over.set(true);
        });
        env.sleep(Duration::from_secs(1)).await;
        let told = set.status().volumes[0].zeroing.expect("it is under way");
        assert_eq!((told.sectors, told.done), (90_000, 2 * PIECE - DATA_OFFSET));
        assert!(told.since >= Duration::from_secs(1));
        ask(&set, volume, write(16, 8, 3)).await;
        assert_eq!(bytes(&set, volume, 0, 40).await, [&[0; 16][..], &[3; 8], &[0; 16]].concat());
        assert!(!over.get());
        is_held.set(false);
        while !over.get() {
            env.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(set.status().volumes[0].zeroing, None::<ZeroingInfo>);
        let longest = |change: &Change| match change {
            Change::Write { sectors, .. } => *sectors,
            Change::Zero { .. } => u64::MAX,
        };
        assert!(changes.borrow().iter().map(longest).max() <= Some(2048), "{changes:?}");
        assert_eq!(bytes(&set, volume, 1000, 64).await, [0; 64]);
    });
}

/// A flush lies between zeroing the device and the hole over dirty data: no read finds what was
/// below the dirty data. Proves invariant D24.
#[test]
fn dirty_data_gives_way_to_zeroes_that_are_durable() {
    on_filled_set(|_, world, set, volume| async move {
        let order: Rc<RefCell<Vec<&str>>> = Rc::default();
        let seen = Rc::clone(&order);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            seen.borrow_mut().extend(match op {
                Op::Zero { .. } if disk == BACKING => Some("zeroes"),
                Op::Flush if disk == BACKING => Some("flush"),
                Op::Write { fua: true, .. } if disk == CACHE => Some("hole"),
                _ => None,
            });
            None
        }));
        ask(&set, volume, zeroes(0, 64, true)).await;
        let order = order.borrow();
        let flush = order.iter().position(|op| *op == "flush").expect("it is flushed");
        assert!(order[..flush].contains(&"zeroes"), "{order:?}");
        let rest = &order[flush + 1..];
        assert!(!rest.is_empty() && rest.iter().all(|op| *op == "hole"), "{order:?}");
    });
}

/// Bytes that the journal writes when `request` invalidates what is cached at 0.
fn journalled(request: impl Fn() -> Request + 'static) -> u64 {
    let mut rig = Rig::new(Sizes { block: 1, bucket: 128, buckets: 600, backing: 1_000_000 }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        world.borrow_mut().discard = true;
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let before = set.written().of(WriteCause::Journal);
        ask(&set, volume, request()).await;
        ask(&set, volume, Request::Flush).await;
        assert_eq!(set.status().dirty_sectors, 0);
        set.written().of(WriteCause::Journal) - before
    })
}

/// The cost depends on what is cached there. A hole used to be made over the whole range, in pieces
/// of at most 16 MiB.
#[test]
fn a_discard_and_a_zeroing_cost_what_is_cached_there_and_not_their_length() {
    let discards = [
        journalled(|| Request::Discard { sector: 0, sectors: 8 }),
        journalled(|| Request::Discard { sector: 0, sectors: 999_000 }),
    ];
    assert_eq!(discards[0], discards[1]);
    let zeroed = |sectors| Request::WriteZeroes { sector: 0, sectors, fua: false, may_unmap: true };
    assert_eq!(journalled(move || zeroed(8)), journalled(move || zeroed(999_000)));
}
