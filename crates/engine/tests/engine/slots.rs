//! Slots of the table of volumes that are used again: never while anything of a former owner is left, or under way.

use crate::memory::NoNote;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Cancel, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Env;
use bcached_format::{CacheMode, Inode, Label};

/// A table of 64 slots.
const SIZES: Sizes = Sizes { block: 8, bucket: 16, buckets: 4000, backing: 20_000 };
const SLOTS: u32 = 64;

/// Nothing is written back unasked.
fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn detached(set: &CacheSet, volume: VolumeId) {
    assert_eq!(set.detach(volume, &Cancel::default()).await, Ok(()));
}

fn number(set: &CacheSet, volume: VolumeId) -> Option<u32> {
    set.volumes().iter().find(|info| info.id == volume)?.inode.map(|Inode(number)| number)
}

/// What is read is in the cache from then on.
async fn warm(set: &CacheSet, volume: VolumeId) {
    set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
    ask(set, volume, write(0, 64, 1)).await;
    ask(set, volume, Request::Flush).await;
    assert_eq!(bytes(set, volume, 0, 64).await, [1; 64]);
    set.set_cache_mode(volume, CacheMode::Writeback).await.expect("set");
    ask(set, volume, write(64, 64, 2)).await;
}

/// The table runs full: the number of each attachment is another, until there is none.
async fn run_full(set: &CacheSet, volume: VolumeId) {
    for expected in number(set, volume).expect("it is attached")..SLOTS - 1 {
        assert_eq!(number(set, volume), Some(expected));
        detached(set, volume).await;
        set.attach(volume, &Cancel::default()).await.expect("there are more");
    }
    detached(set, volume).await;
}

/// Number 0 has clean data in the cache, and so have others. In one process none is used twice, and the next one begins with the one that
/// was given up first: it reads what was written past the cache since.
#[test]
fn a_number_is_used_again_by_another_process_when_nothing_of_it_is_left() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        warm(&set, volume).await;
        run_full(&set, volume).await;
        assert_eq!(set.attach(volume, &Cancel::default()).await, Err(Error::NoSlot(SLOTS as usize)));
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
        set.attach(volume, &Cancel::default()).await.expect("there are more");
        assert_eq!(number(&set, volume), Some(2), "not that of just before");
        assert_eq!(bytes(&set, volume, 0, 16).await[..], [[3; 8], [4; 8]].concat());
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A number is looked through before it is used again, by whoever wants one; a table without such a number refuses as it did.
#[test]
fn numbers_of_volumes_that_exist_are_not_taken() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        for _ in 1..SLOTS {
            set.create_flash_only(8, Label::default()).await.expect("there is room");
        }
        detached(&set, volume).await;
        assert_eq!(set.attach(volume, &Cancel::default()).await, Err(Error::NoSlot(SLOTS as usize)));
        set.stop().await.expect("it stops");
    });
    // The one that the volume had.
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

/// The slot of a volume that was served elsewhere meanwhile is given up for another, and there is no other.
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
        // All but the last of the long gone.
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
        // *Stale* is its superblock, and the slot is still its own.
        let volume = set.adopt_backing(BACKING, None).await.expect("there is a slot for it");
        assert_eq!(number(&set, volume), Some(SLOTS - 1));
        assert_eq!(bytes(&set, volume, 0, 8).await, [5; 8], "nothing of before");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
