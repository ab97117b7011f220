//! Long work on a volume of an engine, which whoever asked may give up.

use super::{Refusal, Soon, lodger};
use bcached_engine::{CacheSet, Cancel, Error, VolumeId};

/// Takes a volume from the cache.
#[must_use]
pub fn detach(set: &CacheSet, id: VolumeId, cancel: Cancel) -> Soon<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.detach(id, &cancel).await) })
}

/// Puts a volume back behind the cache.
#[must_use]
pub fn attach(set: &CacheSet, id: VolumeId, cancel: Cancel) -> Soon<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.attach(id, &cancel).await) })
}

/// Writes back what is dirty of a volume.
#[must_use]
pub fn clean(set: &CacheSet, id: VolumeId, cancel: Cancel) -> Soon<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { unless_there(set.write_back(id, &cancel).await) })
}

/// Serves so many sectors of a volume and no more, which may be a lodger.
#[must_use]
pub fn shrink(
    set: &CacheSet,
    id: VolumeId,
    cancel: Cancel,
    (sectors, is_lodger): (u64, bool),
) -> Soon<Result<bool, Refusal>> {
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

/// Serves so many sectors of a volume.
#[must_use]
pub fn grow(set: &CacheSet, id: VolumeId, cancel: Cancel, sectors: u64) -> Soon<Result<bool, Refusal>> {
    let set = set.clone();
    Box::pin(async move {
        let before = size(&set, id);
        let done = set.grow(id, sectors, &cancel).await;
        if_it_stays(done, || size(&set, id) == before)
    })
}

/// Who asks for what is so already, or is under way, has not been refused anything, nor who gives it up.
fn unless_there(done: Result<(), Error>) -> Result<(), Refusal> {
    match done {
        Err(Error::NotAttached | Error::Attached | Error::OnItsWay | Error::Cancelled) => Ok(()),
        other => other.map_err(Refusal::from_error),
    }
}

/// How large a volume is, in sectors.
fn size(set: &CacheSet, id: VolumeId) -> Option<u64> {
    set.volumes().iter().find(|volume| volume.id == id).map(|volume| volume.sectors)
}

/// Whether a volume has another size now; it cannot while it is on its way, if there is no room, or if that is given up.
fn if_it_stays(done: Result<(), Error>, is_as_before: impl FnOnce() -> bool) -> Result<bool, Refusal> {
    match done {
        Ok(()) => Ok(true),
        Err(Error::Cancelled) => {
            assert!(is_as_before(), "a change of size that was cancelled has changed it");
            Ok(false)
        }
        Err(Error::OnItsWay | Error::NoRoom { .. }) => Ok(false),
        Err(error) => Err(Refusal::from_error(error)),
    }
}
