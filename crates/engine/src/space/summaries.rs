//! Summaries: the list of extents in a bucket of dirty data, written at its end when it is full.
//! With it, emptying the bucket costs one lookup in the tree per extent instead of a walk over the
//! tree.
//!
//! Nothing waits for a summary. It is written without a flush, may be lost, or may describe an
//! earlier generation of its bucket. It says only where to look: what is still in the bucket is
//! looked up in the tree. Only for keys in a damaged node is it taken at its word
//! (`btree::frozen_ranges`).

use crate::cache_writes::WriteCause;
use crate::set::CacheSet;
use crate::space::ClosedBucket;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::summary::{self, Extent};
use bcached_format::{BucketId, Pointer};

/// Runs the task until no request can close a bucket any more.
pub async fn run(set: CacheSet) {
    while set.check_alive().is_ok() {
        write_all(&set).await;
        if set.with(|s| s.settled) {
            return;
        }
        if !set.with(|s| s.open.has_closed()) {
            set.signals().summary_work.wait().await;
        }
    }
}

/// Writes the summaries of all closed buckets. If one cannot be written, the bucket simply has
/// none.
pub async fn write_all(set: &CacheSet) {
    // Only the buckets that are closed now. More may be closed while this runs, and the caller
    // waits for it to end.
    for _ in 0..set.with(|s| s.open.closed()) {
        let Some(ClosedBucket { pointer, id, extents }) = set.with(|s| s.open.take_closed()) else { return };
        let payload = set.with(|s| {
            let sectors = s.open.summary_sectors()?;
            s.work.summary(extents.len());
            let bytes = summary::summary(sectors, s.geometry.magic, id.index, pointer.generation(), &extents);
            Some(Buffer::copied_from(&bytes).freeze())
        });
        if let Some(payload) = payload {
            let _ = set.write_cache(WriteCause::Summaries, pointer.sector(), payload).await;
        }
        // The pin has kept others from writing there until now: invariant D13.
        set.with(|s| {
            s.buckets.unpin(pointer);
            s.open.keep(extents);
        });
        set.signals().allocator_work.notify_all();
    }
}

/// Reads what was written to each of the `ids`, in the same order. `None`: no valid summary that is
/// complete.
pub async fn read(set: &CacheSet, ids: &[BucketId]) -> Vec<Option<Vec<Extent>>> {
    join_all(ids.iter().map(|id| read_one(set, *id))).await
}

async fn read_one(set: &CacheSet, id: BucketId) -> Option<Vec<Extent>> {
    let (pointer, sectors) = set.with(|s| {
        let sectors = s.open.summary_sectors()?;
        let sector = s.buckets.sector(id) + s.open.data_sectors();
        Some((Pointer::new(id.device, sector, s.buckets.get(id).generation), sectors))
    })?;
    let bytes = usize::try_from(sectors * 512).expect("a summary is small");
    let (read, buffer) = set.read_cache(pointer.sector(), Buffer::zeroed(bytes)).await;
    read.ok()?;
    // Others may have completed at the same moment.
    set.env().breathe().await;
    set.with(|s| {
        let found = summary::extents(buffer.as_slice(), s.geometry.magic, id.index, pointer.generation())?;
        s.work.summary(found.len());
        Some(found).filter(|found| summary::says_all(found, sectors))
    })
}
