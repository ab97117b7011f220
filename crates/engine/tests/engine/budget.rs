//! The hard memory limit for nodes, tested with much larger trees.

use crate::rig::{Rig, Sizes, ask, in_flight, open};
use bcached_engine::{CacheSet, Error, Options, Request, Status, VolumeId, VolumeOptions, node_budget_min};
use bcached_env::{Buffer, Env};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Requests in flight.
const DEPTH: u64 = 64;

/// A block of the sets in this file, in sectors.
const BLOCK: u64 = 4;
/// The same in bytes.
const BLOCK_BYTES: usize = 4 * 512;

/// The content that a test writes to a volume's block.
fn content(block: u64) -> u8 {
    u8::try_from(block % 251).expect("small") + 1
}

/// Write-back is off, so that every key stays, and the cache may be filled completely.
fn options(budget: usize) -> Options {
    Options {
        node_budget_bytes: budget,
        leaf_delay: Duration::from_millis(50),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn assert_within(status: &Status, budget: usize) {
    assert_eq!(status.node_budget_bytes, budget as u64);
    assert!(status.node_bytes_max <= status.node_budget_bytes, "{status:?}");
    assert!(status.node_bytes <= status.node_bytes_max, "{status:?}");
}

async fn write(set: &CacheSet, volume: VolumeId, block: u64) {
    let payload = Buffer::copied_from(&[content(block); BLOCK_BYTES]).freeze();
    ask(set, volume, Request::Write { sector: block * BLOCK, payload, fua: false }).await;
}

/// Reads the byte that fills the block at `sector`.
async fn read(set: &CacheSet, volume: VolumeId, sector: u64) -> u8 {
    let buffer = Buffer::zeroed(BLOCK_BYTES);
    let reply = ask(set, volume, Request::Read { sector, buffer }).await;
    let buffer = reply.buffer.expect("a read gives its memory back");
    assert!(buffer.as_slice().iter().all(|byte| *byte == buffer.as_slice()[0]), "sector {sector} and on");
    buffer.as_slice()[0]
}

/// Runs `script` as one process.
fn run<T: 'static, F: Future<Output = T> + 'static>(rig: &mut Rig, script: impl FnOnce(Env) -> F) -> T {
    let mut executor = rig.executor();
    let env = executor.env();
    executor.block_on(script(env)).expect("somebody waits for ever")
}

/// Grows a tree that would take 40 MiB, with its root at level 3, under a budget of 2 MiB and with
/// 64 requests in flight. Then reads with an even smaller budget, and discards the whole volume
/// beside reads. The node cache asserts at every change that the budget is kept.
#[test]
fn a_tree_twenty_times_the_budget_is_grown_and_discarded() {
    // Proves invariant L2.
    const BUDGET: usize = 2 << 20;
    const BUCKET: u64 = 8;
    /// A request fills this many buckets, each of which is a key. Requests come in falling order: a
    /// node has two blocks and is divided when its keys fill more than one, and the part that is
    /// later in the order then stays as it is.
    const BUCKETS: u64 = 4;
    const REQUEST: u64 = BUCKETS * BUCKET;
    const REQUESTS: u64 = 117_000;
    const VOLUME: u64 = REQUESTS * REQUEST;
    const REQUEST_BYTES: usize = 4 * 8 * 512;
    let sizes = Sizes { block: 4, bucket: 8, buckets: 520_000, backing: VOLUME + 64 };
    let mut rig = Rig::new(sizes, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(BUDGET)).await.expect("a sound set");
        let before = set.status().buckets_metadata;
        let writer = set.clone();
        in_flight(&env, REQUESTS, DEPTH, move |number| {
            let (set, request) = (writer.clone(), REQUESTS - 1 - number);
            async move {
                let payload = Buffer::copied_from(&[content(request); REQUEST_BYTES]).freeze();
                ask(&set, volume, Request::Write { sector: request * REQUEST, payload, fua: false }).await;
                if number % 20_000 == 0 {
                    set.assert_invariants();
                }
            }
        })
        .await;
        let status = set.status();
        assert_within(&status, BUDGET);
        // All nodes, at the average size of those in memory.
        let nodes = status.buckets_metadata - before;
        assert!(nodes * status.node_bytes / status.nodes >= 20 * BUDGET as u64, "{status:?}");
        assert!(status.tree_depth >= 3, "{status:?}");
        assert_eq!(status.dirty_sectors, VOLUME);
        set.stop().await.expect("it stops");
    });

    // With the minimum budget, reads that each need a path of their own, many more than there is
    // room for.
    run(&mut rig, |env| async move {
        let least = node_budget_min(BUCKET, 3);
        let (set, volume) = open(env.clone(), options(least)).await.expect("just enough");
        let reading = set.clone();
        in_flight(&env, 4_000, 4 * DEPTH, move |number| {
            let (set, request) = (reading.clone(), number * 0x9E37_79B9 % REQUESTS);
            async move { assert_eq!(read(&set, volume, request * REQUEST).await, content(request)) }
        })
        .await;
        assert_within(&set.status(), least);
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });

    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(BUDGET)).await.expect("a sound set");
        let discarding = set.clone();
        in_flight(&env, 5_000, DEPTH, move |number| {
            let (set, request) = (discarding.clone(), number * 0x9E37_79B9 % REQUESTS);
            async move {
                if number == 0 {
                    ask(&set, volume, Request::Discard { sector: 0, sectors: VOLUME }).await;
                    return;
                }
                let found = read(&set, volume, request * REQUEST).await;
                assert!(found == 0 || found == content(request), "request {request} reads {found}");
            }
        })
        .await;
        let status = set.status();
        assert_within(&status, BUDGET);
        assert_eq!(status.dirty_sectors, 0, "nothing is left of a discarded volume");
        assert_eq!(read(&set, volume, VOLUME / 2).await, 0);
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}

/// With the minimum budget for a set, 64 concurrent requests still complete. With a smaller one,
/// opening fails and reports the budget that is needed.
#[test]
fn the_least_budget_suffices_and_less_is_refused() {
    // Proves invariant L2.
    const SPAN: u64 = 12_000;
    let sizes = Sizes { block: 4, bucket: 8, buckets: 8_000, backing: SPAN * BLOCK + 64 };
    let least = node_budget_min(8, 0);
    let mut rig = Rig::new(sizes, 2);

    let refused = run(&mut rig, |env| async move { open(env, options(least - 1)).await.err() });
    assert_eq!(refused, Some(Error::NodeBudget { budget: least - 1, needed: least }));

    let grown = run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(least)).await.expect("just enough");
        let model = Rc::new(RefCell::new(vec![0; usize::try_from(SPAN).expect("small")]));
        let (worker, written) = (set.clone(), Rc::clone(&model));
        in_flight(&env, SPAN, DEPTH, move |number| {
            let (set, model) = (worker.clone(), Rc::clone(&written));
            // Every block once, in an order that jumps from leaf to leaf.
            let block = number * 7_919 % SPAN;
            async move {
                write(&set, volume, block).await;
                model.borrow_mut()[usize::try_from(block).expect("small")] = content(block);
                let other = number * 104_729 % SPAN;
                let wanted = model.borrow()[usize::try_from(other).expect("small")];
                let found = read(&set, volume, other * BLOCK).await;
                assert!(found == wanted || found == content(other), "block {other} reads {found}");
            }
        })
        .await;
        set.assert_invariants();
        let status = set.status();
        assert_within(&status, least);
        assert!(status.tree_depth >= 2, "{status:?}");
        assert!(status.stats.btree_rewrites > 100, "{status:?}");
        set.stop().await.expect("it stops");
        status.tree_depth
    });

    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(least)).await.expect("the tree fits as before");
        assert_eq!(set.status().tree_depth, grown);
        for block in (0..SPAN).step_by(97) {
            assert_eq!(read(&set, volume, block * BLOCK).await, content(block));
        }
        assert_within(&set.status(), least);
        set.stop().await.expect("it stops");
    });
}

/// Another cache needs some of the memory and later returns it. Meanwhile requests continue that
/// each need a path of their own, more of them than there is room for. The node cache asserts that
/// no more memory is used than there is at each moment, and in the end that every task allowed to
/// hold nodes gets the memory for them.
#[test]
fn memory_is_given_up_and_taken_back_under_requests() {
    // Proves invariant L3.
    const SPAN: u64 = 12_000;
    const BUDGET: usize = 2 << 20;
    let sizes = Sizes { block: 4, bucket: 8, buckets: 8_000, backing: SPAN * BLOCK + 64 };
    let mut rig = Rig::new(sizes, 3);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(BUDGET)).await.expect("a sound set");
        let writer = set.clone();
        in_flight(&env, SPAN, DEPTH, move |number| {
            let (set, block) = (writer.clone(), number * 7_919 % SPAN);
            async move { write(&set, volume, block).await }
        })
        .await;
        let depth = set.status().tree_depth;
        assert!(depth >= 2, "{:?}", set.status());
        // Less than any tree needs: the budget becomes as small as this tree allows. Even that does
        // not block readers.
        for wanted in [BUDGET / 2, 0, 1, BUDGET, 0, BUDGET + 7] {
            let (resizing, reading) = (set.clone(), set.clone());
            let has = Rc::new(RefCell::new(None));
            let heard = Rc::clone(&has);
            env.spawn(async move {
                *heard.borrow_mut() = Some(resizing.set_node_budget(wanted).await.expect("it works"));
            });
            in_flight(&env, 4_000, 8 * DEPTH, move |number| {
                let (set, block) = (reading.clone(), number * 104_729 % SPAN);
                async move { assert_eq!(read(&set, volume, block * BLOCK).await, content(block)) }
            })
            .await;
            let has = has.borrow().expect("it has come to its end beside them");
            assert_eq!(has, wanted.max(node_budget_min(8, depth)), "of {wanted}");
            assert_within(&set.status(), has);
            set.assert_invariants();
        }
        set.stop().await.expect("it stops");
    });
}
