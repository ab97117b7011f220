//! Flush: everything acknowledged before becomes durable. Two devices may hold it: the cache (keys in the journal,
//! whose pre-flush covers the data) and the backing device (only if it was written to since its last flush).

use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::request::{Target, parked};
use crate::set::CacheSet;

/// A client's flush.
pub async fn flush(set: &CacheSet, target: &Target) -> Result<(), Error> {
    if target.inode.is_some() {
        writer::commit(set).await?;
    }
    let flushed = flush_backing(set, target).await;
    let lost = set.with(|s| {
        let backing = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut());
        backing.is_some_and(|backing| backing.epoch.take_lost())
    });
    flushed?;
    // An earlier flush of ours failed: what it covered may be gone, though this one claims success.
    if lost { Err(Error::LostWrites) } else { Ok(()) }
}

/// Makes what was written to the backing device durable, if anything was since its last flush. Clean data that
/// waited for it enters the tree; after a failure it is dropped instead.
pub async fn flush_backing(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let Some(disk) = &target.backing else { return Ok(()) };
    let number = set.with(|s| {
        let epoch = &mut s.volumes.get_mut(target.id)?.backing.as_mut()?.epoch;
        epoch.has_unflushed().then(|| epoch.flush_begins())
    });
    let Some(number) = number else { return Ok(()) };
    let flushed = disk.flush().await;
    set.with(|s| {
        let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) else {
            return;
        };
        match &flushed {
            Ok(()) => backing.epoch.flush_succeeded(number),
            Err(_) => backing.epoch.flush_failed(number),
        }
    });
    let (task, its_target) = (set.clone(), target.clone());
    // The keys enter the tree behind the caller's back: a flush does not wait for nodes to be read.
    set.with(|s| s.background += 1);
    set.env().spawn(async move {
        parked::settle(&task, &its_target).await;
        task.with(|s| s.background -= 1);
        task.signals().ranges.notify_all();
    });
    flushed.map_err(Error::io(Doing::BackingFlush))
}
