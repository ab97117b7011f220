//! Slots of the UUID table are reused, but never while anything of a former owner is left or in
//! flight.

use crate::memory::NoNote;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Env;
use bcached_format::{CacheMode, Inode, Label};

/// A table of 64 slots.
const SIZES: Sizes = Sizes { block: 8, bucket: 16, buckets: 4000, backing: 20_000 };
const SLOTS: u32 = 64;

/// Write-back is off.
fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn detached(set: &CacheSet, volume: VolumeId) {
    assert_eq!(set.detach(volume, &CancelToken::default()).await, Ok(()));
}

fn number(set: &CacheSet, volume: VolumeId) -> Option<u32> {
    set.volumes().iter().find(|info| info.id == volume)?.inode.map(|Inode(number)| number)
}

/// Fills the cache with clean data and with dirty data.
async fn warm(set: &CacheSet, volume: VolumeId) {
    set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
    ask(set, volume, write(0, 64, 1)).await;
    ask(set, volume, Request::Flush).await;
    assert_eq!(bytes(set, volume, 0, 64).await, [1; 64]);
    set.set_cache_mode(volume, CacheMode::Writeback).await.expect("set");
    ask(set, volume, write(64, 64, 2)).await;
}

/// Fills the table: each attachment gets another inode, until none is left.
async fn run_full(set: &CacheSet, volume: VolumeId) {
    for expected in number(set, volume).expect("it is attached")..SLOTS - 1 {
        assert_eq!(number(set, volume), Some(expected));
        detached(set, volume).await;
        set.attach(volume, &CancelToken::default()).await.expect("there are more");
    }
    detached(set, volume).await;
}

/// Inode 0 has clean data in the cache, and so have others. One process uses none twice. The next
/// process begins with the one that was released first; the volume reads what was written past the
/// cache since then. Proves invariant D18.
#[test]
fn a_number_is_used_again_by_another_process_when_nothing_of_it_is_left() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        warm(&set, volume).await;
        run_full(&set, volume).await;
        assert_eq!(set.attach(volume, &CancelToken::default()).await, Err(Error::NoSlot(SLOTS as usize)));
        let made = set.create_flash_only(64, Label::default()).await;
        assert_eq!(made, Err(Error::NoSlot(SLOTS as usize)));
        ask(&set, volume, write(0, 128, 3)).await;
        ask(&set, volume, Request::Flush).await;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("there is a slot for it");
        assert_eq!(number(&set, volume), Some(0), "the first that was given up");
        assert_eq!(bytes(&set, volume, 0, 128).await, [3; 128], "nothing of before");
        assert_eq!(set.status().dirty_sectors, 0);
        ask(&set, volume, write(8, 8, 4)).await;
        let made = set.create_flash_only(64, Label::default()).await.expect("there are more");
        assert_eq!((number(&set, made), bytes(&set, made, 0, 64).await), (Some(1), vec![0; 64]));
        detached(&set, volume).await;
        set.attach(volume, &CancelToken::default()).await.expect("there are more");
        assert_eq!(number(&set, volume), Some(2), "not that of just before");
        assert_eq!(bytes(&set, volume, 0, 16).await[..], [[3; 8], [4; 8]].concat());
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// An inode is scanned before it is reused, for whatever volume; a table without a reusable inode
/// still refuses.
#[test]
fn numbers_of_volumes_that_exist_are_not_taken() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        for _ in 1..SLOTS {
            set.create_flash_only(8, Label::default()).await.expect("there is room");
        }
        detached(&set, volume).await;
        assert_eq!(set.attach(volume, &CancelToken::default()).await, Err(Error::NoSlot(SLOTS as usize)));
        set.stop().await.expect("it stops");
    });
    // The inode that the volume had.
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("there is a slot for it");
        assert_eq!(number(&set, volume), Some(0));
        let made = set.create_flash_only(64, Label::default()).await;
        assert_eq!(made, Err(Error::NoSlot(SLOTS as usize)));
        set.stop().await.expect("it stops");
    });
}

async fn reopened(env: Env) -> CacheSet {
    CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("sound")
}

/// The slot of a volume that was served elsewhere in the meantime is to be replaced by another one,
/// but no other is free.
#[test]
fn a_volume_that_was_away_gets_its_own_number_if_there_is_no_other() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        warm(&set, volume).await;
        run_full(&set, volume).await;
        set.stop().await.expect("it stops");
    });
    run(&mut rig, |env| async move {
        let set = reopened(env).await;
        // All but the last of those that were released long ago.
        for _ in 1..SLOTS {
            set.create_flash_only(8, Label::default()).await.expect("there is room");
        }
        let volume = set.add_backing(BACKING, None).await.expect("there is a slot for it");
        assert_eq!(number(&set, volume), Some(SLOTS - 1));
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        set.stop().await.expect("it stops");
    });
    run(&mut rig, |env| async move {
        let set = reopened(env).await;
        let volume = set.add_uncached(BACKING).await.expect("it is clean");
        ask(&set, volume, write(0, 8, 5)).await;
        set.stop().await.expect("it stops");
    });
    run(&mut rig, |env| async move {
        let set = reopened(env).await;
        // Its superblock says *stale*, and the slot is still its own.
        let volume = set.adopt_backing(BACKING, None).await.expect("there is a slot for it");
        assert_eq!(number(&set, volume), Some(SLOTS - 1));
        assert_eq!(bytes(&set, volume, 0, 8).await, [5; 8], "nothing of before");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
