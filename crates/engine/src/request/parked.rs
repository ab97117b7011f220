//! Clean data that is in the cache but not in the tree: the backing device's copy is not durable yet. After a flush
//! of the backing device it enters the tree; the task here flushes when nobody else does.

use crate::request::ranges::Parked;
use crate::request::{Target, flush, insert};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::VolumeId;
use alloc::vec::Vec;
use core::time::Duration;

/// The least time between two flushes of the task: a device that is flushed all the time does nothing else.
const REST: Duration = Duration::from_millis(1);

/// The task: from time to time flushes backing devices that parked data waits for.
pub async fn run(set: CacheSet) {
    loop {
        let until = set.env().now() + set.with(|s| s.options.parked_delay);
        set.env().sleep(REST).await;
        while set.env().now() < until && !set.with(|s| s.stopping || s.failed.is_some() || has_many(s)) {
            set.env().wait_until(&set.signals().parked_work, until).await;
        }
        if set.with(|s| s.stopping || s.failed.is_some()) {
            return;
        }
        let waiting: Vec<VolumeId> = set.with(|s| {
            s.volumes
                .iter()
                .filter(|(_, volume)| volume.ranges.parked_count() > 0)
                .map(|(id, _)| id)
                .collect()
        });
        for volume in waiting {
            if let Some(target) = set.target(volume) {
                // A failure is told to the next client's flush.
                let _ = flush::flush_backing(&set, &target).await;
            }
        }
    }
}

fn has_many(s: &State) -> bool {
    s.volumes.iter().any(|(_, volume)| volume.ranges.parked_count() > s.options.parked_max)
}

/// Puts into the tree what is durable by now, and drops what a failed flush may have lost.
pub async fn settle(set: &CacheSet, target: &Target) {
    let Some(inode) = target.inode else { return };
    let ready: Vec<_> = set.with(|s| {
        let Some(volume) = s.volumes.get_mut(target.id) else { return Vec::new() };
        let Some(epoch) = volume.backing.as_ref().map(|backing| backing.epoch) else { return Vec::new() };
        let lost = volume.ranges.take_parked(|piece| epoch.is_lost(piece.stamp));
        let ready = volume.ranges.take_parked(|piece| epoch.is_durable(piece.stamp));
        let mut claimed = Vec::new();
        let mut dropped: Vec<Parked> = lost.into_iter().map(|(_, piece)| piece).collect();
        for (start, piece) in ready {
            // A write in progress has cut its range out already; this is for the time until the key is in the tree.
            match volume.ranges.begin_fill(start, piece.end) {
                Some(claim) => claimed.push((piece.key(inode, start), claim)),
                None => dropped.push(piece),
            }
        }
        for piece in dropped {
            s.unpin(&piece.pointers);
        }
        claimed
    });
    for (key, claim) in ready {
        if insert::insert_clean(set, target, &key, claim).await.is_err() {
            set.with(|s| s.unpin(&key.pointers));
        }
        insert::release_fill(set, target, claim);
    }
}
