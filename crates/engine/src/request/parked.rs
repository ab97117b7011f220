//! Keeps clean data that is in the cache but not in the tree yet, because the backing device's copy
//! is not durable. It enters the tree after a flush of the backing device; the task here flushes
//! when no client does.

use crate::cpu_cost::PARKED_PIECE;
use crate::request::insert::Chunk;
use crate::request::ranges::{Claim, ParkedPiece};
use crate::request::{Target, flush, insert, release};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::VolumeId;
use crate::volume::backing_flushes::FlushStamp;
use alloc::vec::Vec;
use bcached_format::{Inode, Key};
use core::time::Duration;

/// The shortest time between two flushes by the task: a device that is flushed all the time does
/// nothing else.
const REST: Duration = Duration::from_millis(1);

/// Runs the task of one volume: flushes its backing device from time to time, if parked data waits
/// for that. Each volume has its own task, so that a device that hangs delays only its own data.
pub async fn run(set: CacheSet, id: VolumeId) {
    loop {
        let until = set.env().now() + set.with(|s| s.options.parked_delay);
        set.env().sleep(REST).await;
        while set.env().now() < until && !set.is_over(id) && !set.with(|s| has_many(s, id)) {
            set.env().wait_until(&set.signals().parked_work, until).await;
        }
        if set.is_over(id) {
            return;
        }
        let waits = set.with(|s| s.volumes.get(id).is_some_and(|volume| volume.ranges.parked_count() > 0));
        if let Some(target) = set.target(id).filter(|_| waits) {
            // The next client's flush reports a failure.
            let _ = flush::flush_backing(&set, &target).await;
        }
    }
}

fn has_many(s: &State, id: VolumeId) -> bool {
    let most = if s.parked_is_in_the_way { 0 } else { s.options.parked_max };
    s.volumes.get(id).is_some_and(|volume| volume.ranges.parked_count() > most)
}

/// What becomes of clean data that has been written to the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CleanOutcome {
    /// The backing device's copy is durable: the data may enter the tree.
    Ready,
    /// It waits here. The parked piece takes over the pin.
    Parked,
    /// It is of no use: a failed flush may have lost the backing device's copy, or the volume has
    /// left the cache.
    Void,
}

/// Parks clean data if it must wait for a flush of the backing device. `stamp` is that of the
/// backing device's write or read of the data.
pub fn park(s: &mut State, target: &Target, chunk: &Chunk, stamp: FlushStamp) -> CleanOutcome {
    let Some(volume) = s.volumes.get_mut(target.id).filter(|volume| volume.may_cache(target.inode)) else {
        return CleanOutcome::Void;
    };
    let Some(backing) = &volume.backing else { return CleanOutcome::Void };
    // Until the backing device's copy is durable, the clean key stays out of the tree: invariant
    // D27.
    if backing.flushes.is_durable(stamp) {
        return CleanOutcome::Ready;
    }
    if backing.flushes.is_lost(stamp) {
        return CleanOutcome::Void;
    }
    volume.ranges.park(chunk.start, ParkedPiece { end: chunk.end(), pointers: chunk.space.pointers, stamp });
    CleanOutcome::Parked
}

/// Drops the parked pieces that are of no use any more.
pub fn drop_parked(s: &mut State, volume: VolumeId) {
    let Some(volume) = s.volumes.get_mut(volume) else { return };
    let Some(flushes) = volume.backing.as_ref().map(|backing| backing.flushes) else { return };
    let keeps = volume.may_cache(volume.inode);
    for (_, piece) in volume.ranges.take_parked(usize::MAX, |piece| !keeps || flushes.is_lost(piece.stamp)) {
        s.unpin(&piece.pointers);
    }
}

/// Drops all parked pieces of a volume that is no longer served, or whose backing device can prove
/// nothing any more.
pub fn drop_all(s: &mut State, volume: VolumeId) {
    let Some(volume) = s.volumes.get_mut(volume) else { return };
    for (_, piece) in volume.ranges.take_parked(usize::MAX, |_| true) {
        s.unpin(&piece.pointers);
    }
}

/// Puts durable pieces into the tree, a batch at a time. Reads still find the remaining ones here
/// meanwhile.
pub async fn settle(set: &CacheSet, target: &Target) {
    let Some(inode) = target.inode else { return };
    loop {
        set.env().breathe().await;
        let Some(ready) = set.with(|s| claim_durable(s, target, inode)) else { return };
        for (key, claim) in ready {
            insert::insert_clean(set, target, &key, claim).await;
            release(set, target, claim);
        }
    }
}

/// Takes some of the pieces that are durable by now, with a claim that lasts until their keys are
/// in the tree; `None` if there are none.
fn claim_durable(s: &mut State, target: &Target, inode: Inode) -> Option<Vec<(Key, Claim)>> {
    // Data parked under another number belongs to another attachment by now.
    let volume = s.volumes.get_mut(target.id).filter(|volume| volume.inode == Some(inode))?;
    let flushes = volume.backing.as_ref().map(|backing| backing.flushes)?;
    let ready = volume.ranges.take_parked(PARKED_PIECE, |piece| flushes.is_durable(piece.stamp));
    let count = ready.len();
    let (mut claimed, mut dropped) = (Vec::new(), Vec::new());
    for (start, piece) in ready {
        // A write in progress has already cut its range out.
        match volume.ranges.begin_fill(start, piece.end) {
            Some(claim) => claimed.push((piece.key(inode, start), claim)),
            None => dropped.push(piece),
        }
    }
    s.work.parked(count);
    dropped.iter().for_each(|piece| s.unpin(&piece.pointers));
    (count > 0).then_some(claimed)
}
