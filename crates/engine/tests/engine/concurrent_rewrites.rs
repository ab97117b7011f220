//! Leaves that are rewritten while other tasks write into them.

use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, VolumeId, VolumeOptions};
use bcached_env::{Env, Op};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A node has 128 blocks of a sector: 8192 words, for which 64 late keys are allowed.
const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 4000, backing: 100_000 };
/// Number of sectors that are written, every other one.
const KEYS: u64 = 6000;
/// Number of keys that a leaf is certain to accept just after it was closed.
const LATE: u64 = 12;
/// More late keys than a leaf accepts.
const TOO_MANY: u64 = 100;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn byte_of(number: u64) -> u8 {
    u8::try_from(number % 251).expect("below 251") + 1
}

async fn put(set: &CacheSet, volume: VolumeId, number: u64) {
    ask(set, volume, write(2 * number, 1, byte_of(number))).await;
}

/// A set with a tree of leaves, one of which receives keys one after the other.
struct FillingSet {
    env: Env,
    set: CacheSet,
    volume: VolumeId,
    next: u64,
    ended: Rc<Cell<u64>>,
}

impl FillingSet {
    async fn begin(env: &Env) -> Self {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        for number in 0..KEYS {
            put(&set, volume, number).await;
        }
        assert!(set.status().tree_depth > 0, "leaves below a root");
        Self { env: env.clone(), set, volume, next: KEYS, ended: Rc::new(Cell::new(KEYS)) }
    }

    /// Starts the next write, without waiting for it.
    fn begin_next(&mut self) {
        let (set, volume, number) = (self.set.clone(), self.volume, self.next);
        let ended = Rc::clone(&self.ended);
        self.next += 1;
        self.env.spawn(async move {
            put(&set, volume, number).await;
            ended.set(ended.get() + 1);
        });
    }

    /// Counts the writes that are still pending after 2 ms; those are blocked.
    async fn under_way(&self) -> u64 {
        self.env.sleep(Duration::from_millis(2)).await;
        self.next - self.ended.get()
    }

    /// Asserts that all written data is readable.
    async fn check(&self) {
        for number in 0..self.next {
            assert_eq!(bytes(&self.set, self.volume, 2 * number, 1).await, [byte_of(number)], "{number}");
        }
        self.set.assert_invariants();
    }
}

/// While the rewrite of a leaf is stalled halfway, the leaf accepts as many keys as allowed, and
/// further ones wait. None is lost, not even after a restart. Proves invariant D4.
#[test]
fn keys_enter_a_leaf_whose_successors_are_being_written() {
    let mut rig = Rig::new(SIZES, 1);
    let (is_stopped, stands) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
    {
        let (is_stopped, stands) = (Rc::clone(&is_stopped), Rc::clone(&stands));
        // First sets begin at the start of a bucket, behind those of the journal, and are smaller
        // than the bucket.
        let node = u64::from(SIZES.bucket);
        let is_first_set = move |op: &Op| match op {
            Op::Write { sector, payload, .. } => {
                sector.is_multiple_of(node)
                    && *sector > 32 * node
                    && (8 << 10..60 << 10).contains(&payload.len())
            }
            _ => false,
        };
        rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let waits = is_stopped.get() && disk == CACHE && is_first_set(op);
            stands.set(stands.get() || waits);
            waits.then_some(OpFault::Waits)
        }));
    }
    let written = run(&mut rig, move |env| async move {
        let mut filling = FillingSet::begin(&env).await;
        is_stopped.set(true);
        while !stands.get() {
            filling.begin_next();
            let under_way = filling.under_way().await;
            assert!(under_way == 0 || stands.get(), "nothing else keeps a write waiting");
        }
        (0..LATE).for_each(|_| filling.begin_next());
        assert_eq!(filling.under_way().await, 0, "they do not wait for the rewrite");
        filling.set.assert_invariants();
        (0..TOO_MANY).for_each(|_| filling.begin_next());
        let under_way = filling.under_way().await;
        assert!(0 < under_way && under_way < TOO_MANY, "{under_way} wait for it");
        assert_eq!(bytes(&filling.set, filling.volume, 0, 1).await, [byte_of(0)], "reads go on");
        is_stopped.set(false);
        assert_eq!(filling.under_way().await, 0, "it is over");
        filling.check().await;
        filling.set.stop().await.expect("it stops");
        filling.next
    });
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens again");
        let ended = Rc::new(Cell::new(written));
        FillingSet { env, set: set.clone(), volume, next: written, ended }.check().await;
        set.stop().await.expect("it stops again");
    });
}
