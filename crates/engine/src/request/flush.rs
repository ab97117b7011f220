//! Flush: everything acknowledged before becomes durable. Two devices may hold it: the cache (keys in the journal,
//! whose pre-flush covers the data) and the backing device (only if it was written to since its last flush).
//!
//! A backing device runs one flush at a time. Who comes meanwhile waits, and then one flush serves all who waited; a
//! failure is the answer to all of them.

use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::request::{Target, parked};
use crate::set::CacheSet;
use crate::volume::VolumeId;
use crate::volume::epoch::{Answers, Epoch, Stamp, Turn};
use bcached_env::Time;

/// A client's flush, which `answers` for what was acknowledged before it was asked for.
pub async fn flush(set: &CacheSet, target: &Target, answers: Option<Answers>) -> Result<(), Error> {
    if target.inode.is_some() {
        writer::commit(set).await?;
    }
    let flushed = flush_backing(set, target).await;
    let lost = answers.is_some_and(|answers| report(set, target, answers) == Some(true));
    // That something is lost is no matter of whether the device comes back: nobody may wait for that, and not hear of it.
    let flushed = if lost && flushed.as_ref().is_err_and(Error::is_absence) { Ok(()) } else { flushed };
    flushed?;
    // A flush that was not ours failed: what it covered may be gone, though ours claims success.
    if lost { Err(Error::LostWrites) } else { Ok(()) }
}

/// Makes durable what was written to the backing device, if anything was since its last flush. An error if any flush
/// failed meanwhile, whoever ran it. Clean data that waited enters the tree; after a failure it is dropped instead.
pub async fn flush_backing(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let Some(disk) = &target.backing else { return Ok(()) };
    let Some(wanted) = epoch(set, target.id, |epoch| epoch.wants_flush()).flatten() else { return Ok(()) };
    loop {
        match epoch(set, target.id, |epoch| epoch.turn(wanted)).ok_or(Error::NoVolume)? {
            Turn::Durable => return Ok(()),
            Turn::Lost => return Err(Error::LostWrites),
            Turn::Wait => set.signals().flushed.wait().await,
            Turn::Run => {
                let flushed = disk.flush().await;
                ended(set, target, flushed);
                flushed.map_err(Error::io(Doing::BackingFlush))?;
            }
        }
    }
}

/// Makes one write to the backing device durable, or says that it may be lost.
pub async fn prove(set: &CacheSet, target: &Target, stamp: Stamp) -> Result<(), Error> {
    flush_backing(set, target).await?;
    match epoch(set, target.id, |epoch| epoch.is_durable(stamp)) {
        Some(true) => Ok(()),
        _ => Err(Error::LostWrites),
    }
}

/// At the end of a set: everything on the backing device becomes durable, and a failure that no client's flush has
/// reported is reported now.
pub async fn last_flush(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let flushed = flush_backing(set, target).await;
    // Nothing is asked any more: whatever was answered, this tells of it.
    let answers = epoch(set, target.id, |epoch| epoch.answers(Time::MAX));
    let lost = answers.and_then(|answers| report(set, target, answers));
    flushed?;
    if lost == Some(true) { Err(Error::LostWrites) } else { Ok(()) }
}

/// A flush ends: whether it must say that something it answers for may be gone.
fn report(set: &CacheSet, target: &Target, answers: Answers) -> Option<bool> {
    let now = set.env().now();
    epoch(set, target.id, |epoch| epoch.report(answers, now))
}

/// Asks the epoch of a volume's backing device; `None` if there is none.
pub fn epoch<T>(set: &CacheSet, volume: VolumeId, ask: impl FnOnce(&mut Epoch) -> T) -> Option<T> {
    set.with(|s| Some(ask(&mut s.volumes.get_mut(volume)?.backing.as_mut()?.epoch)))
}

/// The flush that was running has ended.
fn ended(set: &CacheSet, target: &Target, flushed: Result<(), bcached_env::IoError>) {
    let is_absent = flushed.is_err_and(|error| error.kind.is_final());
    set.with(|s| {
        if let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) {
            match is_absent {
                true => backing.epoch.flush_finds_nobody(),
                false => backing.epoch.flush_ends(flushed.is_ok()),
            }
        }
        // What may be lost is not read any more from here on. Nothing proves it any more on a device that is gone.
        match is_absent {
            true => parked::drop_all(s, target.id),
            false => parked::drop_parked(s, target.id),
        }
    });
    set.signals().flushed.notify_all();
    // What is durable enters the tree behind the caller's back: a flush does not wait for nodes to be read. Without cache, or in write-back,
    // nothing does.
    let has_parked = set.with(|s| {
        let has_parked = s.volumes.get(target.id).is_some_and(|volume| volume.ranges.parked_count() > 0);
        if has_parked {
            s.begin_background(target.id);
        }
        has_parked
    });
    if !has_parked {
        return;
    }
    let (task, its_target) = (set.clone(), target.clone());
    set.env().spawn(async move {
        parked::settle(&task, &its_target).await;
        task.let_go(its_target.id);
    });
}
