//! Superblock writes that fail or are torn.

use crate::memory::{NoNote, OpFault};
use crate::rig::{Rig, Sizes, ask, backing_superblock, open};
use bcached_engine::{CacheSet, Options, Request, VolumeOptions};
use bcached_env::{Buffer, DiskId, Env, Op};
use bcached_format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use bcached_format::{BackingState, DeviceGeometry, RawSuperblock};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 4096 };

/// The longest time that a test waits for something, in virtual time.
const PATIENCE: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options {
        leaf_delay: Duration::from_millis(1),
        volume: VolumeOptions {
            writeback_percent: 0,
            writeback_delay: Duration::from_secs(1),
            ..VolumeOptions::default()
        },
        ..Options::default()
    }
}

fn write(byte: u8) -> Request {
    Request::Write { sector: 0, payload: Buffer::copied_from(&[byte; 4096]).freeze(), fua: true }
}

async fn wait_for(env: &Env, what: &str, mut is_so: impl FnMut() -> bool) {
    let until = env.now() + PATIENCE;
    while !is_so() {
        assert!(env.now() < until, "{what} never happens");
        env.sleep(Duration::from_millis(1)).await;
    }
}

/// *Clean* reaches the device although its write is reported as failed; then a client writes. A
/// daemon that still trusted the *dirty* it remembers would acknowledge dirty data under a
/// superblock that says *clean*. The next start without the cache would then serve stale data.
#[test]
fn a_failed_write_of_clean_is_not_taken_for_dirty() {
    let mut rig = Rig::new(SIZES, 3);
    let mut executor = rig.executor();
    let env = executor.env();
    let failing = Rc::new(Cell::new(false));
    let failures = Rc::new(Cell::new(0));
    let (is_failing, count) = (Rc::clone(&failing), Rc::clone(&failures));
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        let superblock = matches!(op, Op::Write { sector, .. } if *sector == SUPERBLOCK_SECTOR);
        if !(disk == DiskId(1) && superblock && is_failing.get()) {
            return None;
        }
        count.set(count.get() + 1);
        Some(OpFault::Lands)
    }));
    let set = executor.block_on(async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a sound set");
        ask(&set, volume, write(1)).await;
        failing.set(true);
        // Write-back makes the volume clean and tries to mark it so, in vain.
        wait_for(&env, "write-back", || failures.get() > 0).await;
        // Until the device accepts superblock writes again, no dirty data may be acknowledged.
        let reply = set.serve(volume, write(2)).await;
        assert!(reply.result.is_err(), "acknowledged with the superblock in doubt");
        failing.set(false);
        ask(&set, volume, write(3)).await;
        assert_eq!(set.volumes()[0].dirty_sectors, 8, "it is in the cache only");
        set
    });
    let _set = set.expect("somebody waits for ever");
    assert_eq!(backing_superblock(&rig).state(), BackingState::Dirty);
}

/// The cache device's superblock has one copy, which is longer than a sector once it lists many
/// journal buckets. Whatever part of each write of it reaches the device before a power cut, the
/// result must be readable. A first start used to write all of it at once, and if that was torn the
/// set was lost.
#[test]
fn a_torn_write_of_the_cache_superblock_leaves_one_that_can_be_read() {
    const BUCKETS: u64 = 6000;
    let mut rig = Rig::new(Sizes { block: 8, bucket: 16, buckets: BUCKETS, backing: 4096 }, 3);
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    rig.world.borrow().look(0, SUPERBLOCK_SECTOR, &mut bytes);
    let there = RefCell::new(bytes);
    let writes = Rc::new(Cell::new(0));
    let count = Rc::clone(&writes);
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        let Op::Write { sector, payload, .. } = op else { return None };
        let end = SUPERBLOCK_SECTOR + SUPERBLOCK_BYTES as u64 / 512;
        if disk != DiskId(0) || !(SUPERBLOCK_SECTOR..end).contains(sector) {
            return None;
        }
        count.set(count.get() + 1);
        let from = usize::try_from(sector - SUPERBLOCK_SECTOR).expect("small") * 512;
        let mut there = there.borrow_mut();
        for torn_at in (0..=payload.len()).step_by(512) {
            let (mut front, mut back) = (there.clone(), there.clone());
            front[from..from + torn_at].copy_from_slice(&payload.as_slice()[..torn_at]);
            back[from + torn_at..from + payload.len()].copy_from_slice(&payload.as_slice()[torn_at..]);
            for torn in [front, back] {
                let facts = DeviceGeometry { sectors: BUCKETS * 16, logical_block_sectors: 1 };
                let read = RawSuperblock::from_bytes(&torn).and_then(|raw| raw.check(facts));
                assert!(read.is_ok(), "torn at byte {torn_at} of a write at {sector}: {read:?}");
            }
        }
        there[from..from + payload.len()].copy_from_slice(payload.as_slice());
        None
    }));
    for start in 1..=2 {
        let mut executor = rig.executor();
        let env = executor.env();
        let done = executor.block_on(async move {
            let set = CacheSet::open(env, DiskId(0), Box::new(NoNote), options()).await.expect("sound");
            set.stop().await.expect("it stops");
        });
        done.expect("somebody waits for ever");
        assert!(writes.get() >= start, "it is written at each start");
    }
}
