//! Sparse buckets of dirty data are emptied with the help of their summaries.

use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use bcached_format::{SetMagic, Uuid};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Sectors of a bucket; the last one is its summary.
const BUCKET: u64 = BUCKET_SECTORS as u64;
const BUCKET_SECTORS: u16 = 64;
/// Sectors of an extent; as many as fit into a bucket begin in it.
const EXTENT: u64 = LENGTH as u64;
const LENGTH: usize = 4;
const EXTENTS_MAX: u64 = BUCKET.div_ceil(EXTENT);

const fn sizes(buckets: u64) -> Sizes {
    Sizes { block: 1, bucket: BUCKET_SECTORS, buckets, backing: buckets * BUCKET * 2 + 64 }
}

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        reserve: Some(0),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn is_summary(op: &Op) -> bool {
    let magic = SetMagic::of(Uuid([1; 16])).summary();
    matches!(op, Op::Write { payload, .. } if payload.as_slice()[8..16] == magic.to_le_bytes())
}

/// The position of the `n`-th extent: extents written one after the other are far apart.
const fn place(n: u64, buckets: u64) -> u64 {
    let places = buckets * BUCKET / EXTENT;
    n * 7919 % places * EXTENT * 2
}

/// Buckets that nodes may give back soon after.
const GIVEN_BACK: u64 = 16;

/// Writes extents until buckets are scarce, so that sparse ones are emptied, and remain scarce when
/// a few nodes give theirs back. Returns the number of extents.
async fn fill(set: &CacheSet, volume: VolumeId, buckets: u64) -> u64 {
    fill_with(set, volume, buckets, |n| write(place(n, buckets), LENGTH, byte(n))).await
}

/// The same with other writes, by their numbers.
async fn fill_with(set: &CacheSet, volume: VolumeId, buckets: u64, asked: impl Fn(u64) -> Request) -> u64 {
    let mut written = 0;
    while set.status().buckets_available >= buckets / 8 - GIVEN_BACK {
        for _ in 0..16 {
            ask(set, volume, asked(written)).await;
            written += 1;
        }
    }
    ask(set, volume, Request::Flush).await;
    written
}

const fn byte(n: u64) -> u8 {
    (n % 251) as u8 + 1
}

/// Discards all but every fifteenth extent of the range.
async fn thin_out(set: &CacheSet, volume: VolumeId, buckets: u64, range: std::ops::Range<u64>) {
    for n in range.filter(|n| n % 15 > 0) {
        let request = Request::Discard { sector: place(n, buckets), sectors: EXTENT };
        ask(set, volume, request).await;
    }
}

async fn moved(env: &Env, set: &CacheSet) -> u64 {
    for _ in 0..100 {
        env.sleep(Duration::from_millis(100)).await;
        if set.status().stats.moved_bytes > 0 {
            break;
        }
    }
    // Wait for the rounds of moving to end.
    env.sleep(Duration::from_secs(2)).await;
    set.status().stats.moved_bytes
}

async fn check(set: &CacheSet, volume: VolumeId, buckets: u64, range: std::ops::Range<u64>) {
    for n in range {
        let is_kept = n % 15 == 0;
        let found = bytes(set, volume, place(n, buckets), LENGTH).await;
        assert_eq!(found, [if is_kept { byte(n) } else { 0 }; LENGTH], "extent {n}");
    }
}

/// A tree of many nodes, few of which fit into memory. A few sparse buckets are emptied. At most
/// one leaf is read for each extent that was ever in them, however large the tree is.
#[test]
fn emptying_a_bucket_reads_no_more_nodes_than_it_had_extents() {
    const BUCKETS: u64 = 9000;
    const SPARSE: u64 = 3;
    let mut rig = Rig::new(sizes(BUCKETS), 1);
    let (reads, leaves) = run(&mut rig, |env| async move {
        let node_budget_bytes = bcached_engine::node_budget_min(BUCKET, 2);
        let (set, volume) =
            open(env.clone(), Options { node_budget_bytes, ..options() }).await.expect("sound");
        fill(&set, volume, BUCKETS).await;
        let range = 4000..4000 + SPARSE * EXTENTS_MAX;
        thin_out(&set, volume, BUCKETS, range).await;
        let before = set.status().stats.node_reads.count;
        assert_eq!(set.status().stats.moved_bytes, 0);
        let moved = moved(&env, &set).await;
        assert!(moved > 0, "nothing was moved");
        let status = set.status();
        (status.stats.node_reads.count - before, status.buckets_metadata)
    });
    assert!(leaves > 4 * SPARSE * EXTENTS_MAX, "{leaves} leaves at most");
    assert!(reads <= (SPARSE + 1) * EXTENTS_MAX, "{reads} nodes were read, of {leaves}");
}

/// A leaf that cannot be read only keeps its own buckets from being emptied. It used to end each
/// round of moving, and the next round began with the same buckets, so nothing was moved in the
/// whole set.
#[test]
fn a_leaf_that_cannot_be_read_keeps_its_own_buckets_from_being_emptied_and_no_others() {
    const BUCKETS: u64 = 9000;
    let mut rig = Rig::new(sizes(BUCKETS), 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let node_budget_bytes = bcached_engine::node_budget_min(BUCKET, 2);
        let (set, volume) =
            open(env.clone(), Options { node_budget_bytes, ..options() }).await.expect("sound");
        fill(&set, volume, BUCKETS).await;
        thin_out(&set, volume, BUCKETS, 4000..4000 + 8 * EXTENTS_MAX).await;
        // Only the first node that is read from here on fails.
        let bad: Rc<RefCell<Option<u64>>> = Rc::default();
        let (picked, tries) = (Rc::clone(&bad), Rc::new(RefCell::new(0)));
        let counted = Rc::clone(&tries);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { sector, buffer } if disk == CACHE && buffer.len() as u64 == BUCKET * 512 => {
                let is_bad = *picked.borrow_mut().get_or_insert(*sector) == *sector;
                *counted.borrow_mut() += u32::from(is_bad);
                is_bad.then_some(OpFault::Fails)
            }
            _ => None,
        }));
        assert!(moved(&env, &set).await > 0, "others are emptied");
        env.sleep(Duration::from_secs(30)).await;
        assert!(
            bad.borrow().is_some() && set.status().unreadable.len() == 1,
            "{:?}",
            set.status().unreadable
        );
        assert!(*tries.borrow() < 50, "it is looked for {} times in half a minute", tries.borrow());
    });
}

/// Buckets with no summary, or a damaged one, are emptied as well, and none of their data is lost.
#[test]
fn buckets_without_a_summary_are_emptied_by_looking_at_the_tree() {
    const BUCKETS: u64 = 700;
    for summary_share in [0, 64] {
        let mut rig = Rig::new(sizes(BUCKETS), 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let options = Options { summary_share, ..options() };
            let (set, volume) = open(env.clone(), options).await.expect("sound");
            let summaries = Rc::new(RefCell::new(Vec::new()));
            let places = Rc::clone(&summaries);
            world.borrow_mut().fate = Some(Box::new(move |disk, op| {
                if let Op::Write { sector, .. } = op
                    && disk == CACHE
                    && is_summary(op)
                {
                    places.borrow_mut().push(*sector);
                }
                None
            }));
            let written = fill(&set, volume, BUCKETS).await;
            world.borrow_mut().fate = None;
            assert_eq!(summaries.borrow().is_empty(), summary_share == 0);
            for sector in summaries.borrow().iter() {
                world.borrow_mut().place(0, *sector, &[0x5A; 512]);
            }
            thin_out(&set, volume, BUCKETS, 0..written).await;
            assert!(moved(&env, &set).await > 0, "nothing was moved");
            assert!(set.status().buckets_available > BUCKETS / 8, "{}", set.status().buckets_available);
            check(&set, volume, BUCKETS, 0..written).await;
        });
    }
}

/// The device is slow to write the summaries. Meanwhile the data in their buckets is discarded and
/// buckets are reused. None of those may be reused, or the summary would overwrite what was written
/// there since. Proves invariant D13.
#[test]
fn a_bucket_is_not_used_again_before_its_summary_is_written() {
    const BUCKETS: u64 = 600;
    let mut rig = Rig::new(sizes(BUCKETS), 1);
    let world = Rc::clone(&rig.world);
    let held = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let waiting = Rc::new(RefCell::new(BTreeSet::new()));
        let held = Rc::clone(&waiting);
        let again = Rc::new(Cell::new(false));
        let is_again = Rc::clone(&again);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Write { sector, .. } = op else { return None };
            let bucket = sector / BUCKET;
            if disk != CACHE {
                return None;
            }
            if is_summary(op) {
                held.borrow_mut().insert(bucket);
                return Some(OpFault::Waits);
            }
            // The last extents may still be in flight; a new use of the bucket begins with its
            // first sector.
            let is_used = sector % BUCKET == 0 && held.borrow().contains(&bucket);
            is_again.set(is_again.get() || is_used);
            None
        }));
        for n in 0..20 * BUCKETS {
            let sector = place(n, BUCKETS);
            ask(&set, volume, write(sector, LENGTH, byte(n))).await;
            ask(&set, volume, Request::Discard { sector, sectors: EXTENT }).await;
        }
        ask(&set, volume, write(0, LENGTH, 9)).await;
        assert!(!again.get(), "a bucket was written to again while its summary was");
        world.borrow_mut().fate = None;
        world.borrow_mut().pass(Duration::from_secs(1));
        env.sleep(Duration::from_millis(100)).await;
        assert_eq!(bytes(&set, volume, 0, 1).await, [9]);
        waiting.borrow().len()
    });
    assert!(held > 0, "no summary was written");
}

/// An extent whose sectors have distinct contents.
fn numbered(sector: u64) -> Request {
    let content: Vec<u8> = parts(sector).into_iter().flat_map(|byte| [byte; 512]).collect();
    Request::Write { sector, payload: Buffer::copied_from(&content).freeze(), fua: false }
}

fn parts(sector: u64) -> [u8; LENGTH] {
    std::array::from_fn(|at| ((sector + at as u64) % 200) as u8 + 1)
}

/// The second sector of each extent is overwritten while the extent is moved. The other sectors are
/// found at their new places, each separately.
#[test]
fn an_extent_that_is_written_to_while_it_is_moved_is_moved_in_parts() {
    const BUCKETS: u64 = 600;
    const NEWER: u8 = 251;
    let mut rig = Rig::new(sizes(BUCKETS), 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        fill_with(&set, volume, BUCKETS, |n| numbered(place(n, BUCKETS))).await;
        let range = 400..400 + 4 * EXTENTS_MAX;
        thin_out(&set, volume, BUCKETS, range.clone()).await;
        // Moving reads the data first: all these reads wait.
        let reads = Rc::new(Cell::new(0_u64));
        let waiting = Rc::clone(&reads);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_moved =
                disk == CACHE && matches!(op, Op::Read { buffer, .. } if buffer.len() == LENGTH * 512);
            is_moved.then(|| {
                waiting.set(waiting.get() + 1);
                OpFault::Waits
            })
        }));
        for _ in 0..1000 {
            if reads.get() > 0 {
                break;
            }
            env.sleep(Duration::from_millis(100)).await;
        }
        assert!(reads.get() > 0, "nothing is moved");
        let kept = || range.clone().filter(|n| n % 15 == 0).map(|n| place(n, BUCKETS));
        for sector in kept() {
            ask(&set, volume, write(sector + 1, 1, NEWER)).await;
        }
        world.borrow_mut().fate = None;
        world.borrow_mut().pass(Duration::from_secs(1));
        assert!(moved(&env, &set).await > 0, "nothing was moved");
        for sector in kept() {
            let [first, _, third, fourth] = parts(sector);
            let found = bytes(&set, volume, sector, LENGTH).await;
            assert_eq!(found, [first, NEWER, third, fourth], "sector {sector}");
        }
    });
}
