//! Handles flushes: everything acknowledged before becomes durable. Two devices may hold it: the
//! cache (keys in the journal, whose pre-flush covers the data) and the backing device (only if it
//! was written to since its last flush).
//!
//! A backing device runs one flush at a time. Callers that arrive during a flush wait for its end.
//! If it does not cover what they need, one more flush serves all of them. A flush that fails is
//! the answer to every caller that waits.

use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::request::{Target, parked};
use crate::set::CacheSet;
use crate::volume::VolumeId;
use crate::volume::backing_flushes::{BackingFlushAction, BackingFlushes, FlushScope, FlushStamp};
use bcached_env::Time;

/// Runs a client's flush, which `answers` for what was acknowledged before it was requested.
pub async fn flush(set: &CacheSet, target: &Target, answers: Option<FlushScope>) -> Result<(), Error> {
    if target.inode.is_some() {
        writer::commit(set).await?;
    }
    let flushed = flush_backing(set, target).await;
    let lost = answers.is_some_and(|answers| report(set, target, answers) == Some(true));
    // A loss does not depend on whether the device comes back: no client may wait for the device
    // without being told of the loss.
    let flushed = if lost && flushed.as_ref().is_err_and(Error::is_absence) { Ok(()) } else { flushed };
    flushed?;
    // An earlier flush, run by another caller, failed. What it covered may be lost, although this
    // one claims success: invariant D28.
    if lost { Err(Error::LostWrites) } else { Ok(()) }
}

/// Makes durable what was written to the backing device, if anything was since its last flush.
/// Fails if any flush has failed meanwhile, whichever caller ran it. Parked clean data then enters
/// the tree; after a failure it is dropped instead.
pub async fn flush_backing(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let Some(disk) = &target.backing else { return Ok(()) };
    let Some(wanted) = flushes(set, target.id, |flushes| flushes.wants_flush()).flatten() else {
        return Ok(());
    };
    loop {
        match flushes(set, target.id, |flushes| flushes.turn(wanted)).ok_or(Error::NoVolume)? {
            BackingFlushAction::Durable => return Ok(()),
            BackingFlushAction::Lost => return Err(Error::LostWrites),
            BackingFlushAction::Wait => set.signals().flushed.wait().await,
            BackingFlushAction::Run => {
                let flushed = disk.flush().await;
                ended(set, target, flushed);
                flushed.map_err(Error::io(ErrorContext::BackingFlush))?;
            }
        }
    }
}

/// Makes one write to the backing device durable, or reports that it may be lost.
pub async fn prove(set: &CacheSet, target: &Target, stamp: FlushStamp) -> Result<(), Error> {
    flush_backing(set, target).await?;
    match flushes(set, target.id, |flushes| flushes.is_durable(stamp)) {
        Some(true) => Ok(()),
        _ => Err(Error::LostWrites),
    }
}

/// Flushes the backing device when a set ends, and reports a failure that no client's flush has
/// reported.
pub async fn last_flush(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let flushed = flush_backing(set, target).await;
    // No more flushes will be requested, so this one answers for every change: invariant D33.
    let answers = flushes(set, target.id, |flushes| flushes.answers(Time::MAX));
    let lost = answers.and_then(|answers| report(set, target, answers));
    flushed?;
    if lost == Some(true) { Err(Error::LostWrites) } else { Ok(()) }
}

/// Ends a flush. Returns whether it must report that something it answers for may be lost.
fn report(set: &CacheSet, target: &Target, answers: FlushScope) -> Option<bool> {
    let now = set.env().now();
    flushes(set, target.id, |flushes| flushes.report(answers, now))
}

/// Asks `ask` of the flushes of a volume's backing device; returns `None` if there is none.
pub fn flushes<T>(set: &CacheSet, volume: VolumeId, ask: impl FnOnce(&mut BackingFlushes) -> T) -> Option<T> {
    set.with(|s| Some(ask(&mut s.volumes.get_mut(volume)?.backing.as_mut()?.flushes)))
}

/// Handles the end of the flush that was running.
fn ended(set: &CacheSet, target: &Target, flushed: Result<(), bcached_env::IoError>) {
    let is_absent = flushed.is_err_and(|error| error.kind.is_final());
    set.with(|s| {
        if let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) {
            match is_absent {
                true => backing.flushes.flush_finds_nobody(),
                false => backing.flushes.flush_ends(flushed.is_ok()),
            }
        }
        // From here on data that may be lost is not read any more. Nothing can become proven any
        // more on a device that is gone.
        match is_absent {
            true => parked::drop_all(s, target.id),
            false => parked::drop_parked(s, target.id),
        }
    });
    set.signals().flushed.notify_all();
    // Durable data enters the tree in the background, because a flush does not wait for nodes to be
    // read. Without a cache, or in write-back mode, there is none.
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
