//! What lies in a bucket of dirty data, written behind it when it is full: so that emptying it costs as many looks into the tree
//! as it has extents, and not a walk over the tree.
//!
//! Nothing waits for a summary. It is written without a flush, may be lost or be of another life of its bucket, and says only
//! where to look: what is still in the bucket, the tree is asked. Only of what a damaged node names it is taken at its word (`btree::frozen`).

use crate::cache_writes::Cause;
use crate::set::CacheSet;
use crate::space::Closed;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::summary::{self, Extent};
use bcached_format::{BucketId, Pointer};

/// The task. It ends when the last bucket has been closed by a request.
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

/// Writes the summaries of all buckets that have been closed. One that cannot be written is missed by nobody.
pub async fn write_all(set: &CacheSet) {
    // Those that are there now: others are closed meanwhile, and somebody waits for the end of this.
    for _ in 0..set.with(|s| s.open.closed()) {
        let Some(Closed { pointer, id, extents }) = set.with(|s| s.open.take_closed()) else { return };
        let payload = set.with(|s| {
            let sectors = s.open.summary_sectors()?;
            s.work.summary(extents.len());
            let bytes = summary::summary(sectors, s.geometry.magic, id.index, pointer.generation(), &extents);
            Some(Buffer::copied_from(&bytes).freeze())
        });
        if let Some(payload) = payload {
            let _ = set.write_cache(Cause::Summaries, pointer.sector(), payload).await;
        }
        // Until now nobody else could write there.
        set.with(|s| {
            s.buckets.unpin(pointer);
            s.open.keep(extents);
        });
        set.signals().allocator_work.notify_all();
    }
}

/// What was written to each of the `ids`, of which a summary says all; in the same order.
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
    // Others may have come at the same moment.
    set.env().breathe().await;
    set.with(|s| {
        let found = summary::extents(buffer.as_slice(), s.geometry.magic, id.index, pointer.generation())?;
        s.work.summary(found.len());
        Some(found).filter(|found| summary::says_all(found, sectors))
    })
}
