//! Generations have eight bits: no pointer that a reader can find may become so old that it passes
//! for a current one.

use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, in_flight, open};
use bcached_engine::{CacheSet, Error, ErrorContext, Options, Request, Status, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Op};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Sectors of a bucket.
const BUCKET: u64 = 128;

/// Write-back is off, and leaves are written rarely.
fn options() -> Options {
    Options {
        leaf_delay: Duration::from_secs(30),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn byte_of(number: u64) -> u8 {
    u8::try_from(number % 251).expect("below 251") + 1
}

async fn write(set: &CacheSet, volume: VolumeId, sector: u64, sectors: u64, byte: u8) {
    let bytes = usize::try_from(sectors * 512).expect("small");
    let payload = Buffer::copied_from(&vec![byte; bytes]).freeze();
    ask(set, volume, Request::Write { sector, payload, fua: false }).await;
}

async fn holds(set: &CacheSet, volume: VolumeId, sector: u64, byte: u8) -> bool {
    let reply = ask(set, volume, Request::Read { sector, buffer: Buffer::zeroed(512) }).await;
    reply.buffer.expect("comes back").as_slice().iter().all(|found| *found == byte)
}

/// A database rewrites one small file all day while much dirty data is idle, so a few buckets are
/// reused hundreds of times. The tree's interior nodes still name children that were in them long
/// ago, and only the generation tells that they are dead. (Found as a set that could not be opened
/// after a clean stop.) Proves invariant D12.
#[test]
fn dead_children_stay_dead_however_often_their_buckets_are_reused() {
    const COLD: u64 = 6000;
    const FULL_BUCKETS: u64 = 400;
    const HOT_AT: u64 = 80_000;
    /// Enough for 200 uses of each bucket that is left.
    const REWRITES: u64 = 20_000;
    let sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
    let mut rig = Rig::new(sizes, 1);
    let mut executor = rig.executor();
    let env = executor.env();
    let script = async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let cold = set.clone();
        in_flight(&env, COLD, 8, move |number| {
            let set = cold.clone();
            async move { write(&set, volume, 2 * number, 1, byte_of(number)).await }
        })
        .await;
        for number in 0..FULL_BUCKETS {
            write(&set, volume, 20_000 + number * BUCKET, BUCKET, byte_of(number)).await;
        }
        let hot = set.clone();
        in_flight(&env, REWRITES, 4, move |number| {
            let set = hot.clone();
            async move { write(&set, volume, HOT_AT + (number % 16) * BUCKET, BUCKET, 7).await }
        })
        .await;
        assert!(set.status().tree_depth > 0, "there are interior nodes");
        set.stop().await.expect("it stops");
        let (set, volume) = open(env, options()).await.expect("it opens again");
        for number in 0..COLD {
            assert!(holds(&set, volume, 2 * number, byte_of(number)).await, "sector {}", 2 * number);
        }
        for number in 0..FULL_BUCKETS {
            assert!(holds(&set, volume, 20_000 + number * BUCKET, byte_of(number)).await, "fill {number}");
        }
        set.stop().await.expect("it stops again");
    };
    executor.block_on(script).expect("nobody waits for ever");
}

/// Writes small extents, none adjacent to another: keys for several leaves.
async fn scatter(set: &CacheSet, volume: VolumeId) {
    for number in 0..6000 {
        write(set, volume, 2 * number, 1, 7).await;
    }
}

/// A leaf is permanently unreadable. GC used to never finish a pass, so after 96 uses of each
/// bucket none could be reused. Then every write waited for a bucket forever, although its volume
/// has a backing device.
#[test]
fn a_leaf_that_can_never_be_read_makes_nobody_wait_for_ever() {
    const WRITES: u64 = 14_000;
    let sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
    let mut rig = Rig::new(sizes, 1);
    let world = Rc::clone(&rig.world);
    crate::rig::run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        scatter(&set, volume).await;
        for number in 0..420 {
            write(&set, volume, 20_000 + number * BUCKET, BUCKET, 7).await;
        }
        set.stop().await.expect("it stops");
        let (set, volume) = open(env.clone(), options()).await.expect("it opens again");
        let leaf = Cell::new(None);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { buffer, sector } if disk == CACHE && buffer.len() as u64 == BUCKET * 512 => {
                let leaf = leaf.get().unwrap_or_else(|| {
                    leaf.set(Some(*sector));
                    *sector
                });
                (leaf == *sector).then_some(OpFault::Fails)
            }
            _ => None,
        }));
        let read = Request::Read { sector: 0, buffer: Buffer::zeroed(512) };
        assert!(set.serve(volume, read).await.result.is_err(), "its leaf is the bad one");
        let answered = Rc::new(Cell::new(0));
        let (writer, count) = (set.clone(), Rc::clone(&answered));
        env.spawn(async move {
            for number in 0..WRITES {
                let bytes = usize::try_from(BUCKET * 512).expect("small");
                let payload = Buffer::copied_from(&vec![9; bytes]).freeze();
                let sector = 80_000 + (number % 16) * BUCKET;
                let reply = writer.serve(volume, Request::Write { sector, payload, fua: false }).await;
                assert_eq!(reply.result, Ok(()), "write {number}");
                count.set(number + 1);
            }
        });
        loop {
            let before = answered.get();
            env.sleep(Duration::from_secs(60)).await;
            if answered.get() == before {
                break;
            }
        }
        assert_eq!(answered.get(), WRITES, "the next one waits for ever");
    });
}

/// A small file is rewritten until no bucket may be reused before GC has seen the whole tree.
/// Meanwhile trims cut much other dirty data into ever more keys, for which the tree needs buckets.
/// Reads of nodes fail `failures` times. Returns the set's final status, and the number of refused
/// requests.
fn wants_buckets_while_reads_of_nodes_fail(failures: u64) -> (Status, u64) {
    const COLD: std::ops::Range<u64> = 20_000..71_200;
    const REWRITES: u64 = 15_000;
    let sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
    let mut rig = Rig::new(sizes, 1);
    let world = Rc::clone(&rig.world);
    crate::rig::run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        scatter(&set, volume).await;
        for sector in COLD.step_by(128) {
            write(&set, volume, sector, BUCKET, 7).await;
        }
        assert!(set.status().tree_depth > 0, "there are interior nodes");
        let left = Cell::new(failures);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_node = matches!(op, Op::Read { buffer, .. } if buffer.len() as u64 == BUCKET * 512);
            let fails = disk == CACHE && is_node && left.get() > 0;
            left.set(left.get() - u64::from(fails));
            fails.then_some(OpFault::Fails)
        }));
        let refused = Rc::new(Cell::new(0));
        let (trimmer, count, clock) = (set.clone(), Rc::clone(&refused), env.clone());
        let is_trimmed = Rc::new(Cell::new(false));
        let ended = Rc::clone(&is_trimmed);
        env.spawn(async move {
            for sector in COLD.step_by(2) {
                clock.sleep(Duration::from_micros(50)).await;
                let trimmed = trimmer.serve(volume, Request::Discard { sector, sectors: 1 }).await;
                count.set(count.get() + u64::from(trimmed.result.is_err()));
            }
            ended.set(true);
        });
        let (writer, count) = (set.clone(), Rc::clone(&refused));
        in_flight(&env, REWRITES, 4, move |number| {
            let (set, refused) = (writer.clone(), Rc::clone(&count));
            async move {
                let payload = Buffer::copied_from(&[9; 128 * 512]).freeze();
                let sector = 80_000 + number % 16 * BUCKET;
                let written = set.serve(volume, Request::Write { sector, payload, fua: false }).await;
                refused.set(refused.get() + u64::from(written.result.is_err()));
            }
        })
        .await;
        // Requests that wait for buckets then wait as long as the set expects to get some.
        for _ in 0..100 {
            if !is_trimmed.get() {
                env.sleep(Duration::from_millis(100)).await;
            }
        }
        assert!(is_trimmed.get(), "nobody waits for ever");
        (set.status(), refused.get())
    })
}

/// A pass of GC used to rest after one device error, although no bucket was available before it had
/// finished. After a third of a second the set failed permanently, although the node was readable
/// all the time.
#[test]
fn one_passing_error_of_one_node_does_not_stop_the_set() {
    // Proves invariant L7.
    let (status, refused) = wants_buckets_while_reads_of_nodes_fail(1);
    assert_eq!((status.failed, refused), (None, 0));
    assert!(status.stats.gc_passes > 0, "GC came to its end");
    assert_eq!(
        (status.stats.node_read_failures, status.unreadable),
        (1, Vec::new()),
        "it was met, and was passing"
    );
}

/// If the error persists, no request waits forever: the set fails with it, and names the node.
#[test]
fn an_error_of_a_node_that_does_not_pass_stops_a_set_that_needs_buckets() {
    // Proves invariant L7.
    let (status, refused) = wants_buckets_while_reads_of_nodes_fail(u64::MAX);
    assert!(
        matches!(status.failed, Some(Error::Io { doing: ErrorContext::Node, .. })),
        "{:?}",
        status.failed
    );
    assert!(refused > 0);
    assert_eq!(status.unreadable.len(), 1, "{:?}", status.unreadable);
}
