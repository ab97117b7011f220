//! The pass over all leaves that rewrites those with much that is dead, and learns how old the oldest pointer to each
//! bucket is. It gates nobody and may be repeated or left out at will, except that generations must not get more than
//! 96 ahead of a pointer in the tree: then buckets wait for a pass before they are reused.

use crate::btree::split;
use crate::error::Error;
use crate::gc::Visited;
use crate::set::CacheSet;
use crate::work::BUCKETS_MAX;
use alloc::vec::Vec;
use bcached_format::{Gen, Position};
use core::time::Duration;

/// How often to ask whether a pass is due.
const PAUSE: Duration = Duration::from_secs(1);
/// Leaves between two yields to requests.
const LEAVES_A_TURN: u32 = 8;

/// The task.
pub async fn run(set: CacheSet) {
    while !set.with(|s| s.stopping || s.failed.is_some()) {
        if set.with(|s| s.buckets.take_gc_wanted()) {
            // A node that cannot be read is reported to whoever needs it.
            let _ = pass(&set).await;
            continue;
        }
        let until = set.env().now() + PAUSE;
        set.env().wait_until(&set.signals().gc_work, until).await;
    }
}

/// One pass.
pub async fn pass(set: &CacheSet) -> Result<(), Error> {
    // A bucket that no key names is as young as it was when the pass began.
    let count = set.with(|s| usize::try_from(s.buckets.count()).expect("a table length"));
    let mut oldest: Vec<Gen> = Vec::with_capacity(count);
    while oldest.len() < count {
        set.env().breathe().await;
        set.with(|s| {
            let before = oldest.len();
            oldest.extend(s.buckets.part(before).map(|(_, bucket)| bucket.generation));
            s.work.buckets(oldest.len() - before);
        });
    }
    let mut at = Position::ZERO;
    let mut leaves = 0;
    loop {
        if set.with(|s| s.stopping) {
            return Ok(());
        }
        let mut seen: Vec<(u64, Gen)> = Vec::new();
        let Visited { end, wants_rewrite } = visit(set, at, &mut seen).await?;
        let mut end = end;
        if wants_rewrite {
            split::compact(set, at).await?;
            seen.clear();
            end = visit(set, at, &mut seen).await?.end;
        }
        set.with(|s| {
            s.work.visit(seen.len());
            for (index, generation) in seen {
                let now = s.buckets.get(s.buckets.id(index)).generation;
                let place = &mut oldest[usize::try_from(index).expect("a table index")];
                if now.after(generation) > now.after(*place) {
                    *place = generation;
                }
            }
        });
        if end == Position::MAX {
            break;
        }
        at = end;
        leaves += 1;
        if leaves % LEAVES_A_TURN == 0 {
            set.env().yield_now().await;
        }
    }
    for (part, generations) in oldest.chunks(BUCKETS_MAX).enumerate() {
        set.env().breathe().await;
        set.with(|s| {
            s.work.buckets(generations.len());
            for (index, generation) in generations.iter().enumerate() {
                let id = s.buckets.id((part * BUCKETS_MAX + index) as u64);
                s.buckets.set_oldest(id, *generation);
            }
        });
    }
    set.with(|s| s.stats.gc_passes += 1);
    set.signals().allocator_work.notify_all();
    Ok(())
}

async fn visit(set: &CacheSet, at: Position, seen: &mut Vec<(u64, Gen)>) -> Result<Visited, Error> {
    set.attempt(|s| {
        seen.clear();
        s.visit_leaf(at, &mut |buckets, key| {
            for pointer in key.pointers.as_slice() {
                seen.extend(buckets.of(*pointer).map(|id| (id.index, pointer.generation())));
            }
        })
    })
    .await
}
