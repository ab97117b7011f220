//! Long work on a volume of an engine, which the requester may cancel.

use super::{BoxFuture, Refusal, lodger};
use bcached_engine::{CacheSet, CancelToken, Error, VolumeId};

/// Detaches a volume from the cache.
#[must_use]
pub fn detach(set: &CacheSet, id: VolumeId, cancel: CancelToken) -> BoxFuture<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.detach(id, &cancel).await) })
}

/// Attaches a volume to the cache.
#[must_use]
pub fn attach(set: &CacheSet, id: VolumeId, cancel: CancelToken) -> BoxFuture<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.attach(id, &cancel).await) })
}

/// Writes back the dirty data of a volume.
#[must_use]
pub fn clean(set: &CacheSet, id: VolumeId, cancel: CancelToken) -> BoxFuture<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.write_back(id, &cancel).await) })
}

/// Shrinks a volume, which may live in the cache alone, to this many sectors.
#[must_use]
pub fn shrink(
    set: &CacheSet,
    id: VolumeId,
    cancel: CancelToken,
    (sectors, is_lodger): (u64, bool),
) -> BoxFuture<Result<bool, Refusal>> {
    let set = set.clone();
    Box::pin(async move {
        let before = size(&set, id);
        let done = match is_lodger {
            true => lodger::shrink(&set, id, sectors, &cancel).await,
            false => set.shrink(id, sectors, &cancel).await,
        };
        if_it_stays(done, || size(&set, id) == before)
    })
}

/// Grows a volume to this many sectors.
#[must_use]
pub fn grow(
    set: &CacheSet,
    id: VolumeId,
    cancel: CancelToken,
    sectors: u64,
) -> BoxFuture<Result<bool, Refusal>> {
    let set = set.clone();
    Box::pin(async move {
        let before = size(&set, id);
        let done = set.grow(id, sectors, &cancel).await;
        if_it_stays(done, || size(&set, id) == before)
    })
}

/// Ignores errors for work that is done already, is in progress, or was cancelled: these are not
/// refusals.
fn unless_there(done: Result<(), Error>) -> Result<(), Refusal> {
    match done {
        Err(Error::NotAttached | Error::Attached | Error::VolumeBusy | Error::Cancelled) => Ok(()),
        other => other.map_err(Refusal::from_error),
    }
}

/// Returns the size of a volume, in sectors.
fn size(set: &CacheSet, id: VolumeId) -> Option<u64> {
    set.volumes().iter().find(|volume| volume.id == id).map(|volume| volume.sectors)
}

/// Returns whether the size changed. It does not if another change is in progress, if there is no
/// room, or if it was cancelled.
fn if_it_stays(done: Result<(), Error>, is_as_before: impl FnOnce() -> bool) -> Result<bool, Refusal> {
    match done {
        Ok(()) => Ok(true),
        Err(Error::Cancelled) => {
            assert!(is_as_before(), "a cancelled resize changed the size");
            Ok(false)
        }
        Err(Error::VolumeBusy | Error::NoRoom { .. }) => Ok(false),
        Err(error) => Err(Refusal::from_error(error)),
    }
}
