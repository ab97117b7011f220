//! Going on without the cache: a volume whose data is all on its backing device does not fail because its
//! cache does.
//!
//! It leaves for good: its superblock says, durably, that what the cache holds of it is void, before the first request
//! goes past it, and when it comes back it gets a new number. So what the cache still holds, readable or not, can never
//! come back, and that is why a leaf of a working set that cannot be read is dealt with in the same way as a set that
//! has failed. While a volume is about to leave no dirty key of it can be made: asked in the transition that inserts.
//! A volume that is detached leaves by the same door.

use crate::error::{Doing, Error};
use crate::request::ranges::Claim;
use crate::request::{Range, Target, parked, release, write};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{VolumeId, record};
use bcached_format::{BackingState, BackingSuperblock, Inode};

/// Carries out a request that changes a range, when it is its turn: through the cache or, if that fails and the volume can do
/// without, without it. It keeps its turn when it is done again, because others may have seen what it has done: whoever writes
/// after that must stay on top.
pub async fn in_turn<T>(
    set: &CacheSet,
    target: &Target,
    range: Range,
    flow: impl AsyncFn(&Target) -> Result<T, Error>,
) -> Result<T, Error> {
    let claim = write::queue(set, target, range)?;
    from_queue(set, target, claim, flow).await
}

/// The same for who has queued already.
pub async fn from_queue<T>(
    set: &CacheSet,
    target: &Target,
    claim: Claim,
    flow: impl AsyncFn(&Target) -> Result<T, Error>,
) -> Result<T, Error> {
    write::granted(set, target, claim).await;
    let done = or_uncached(set, target, flow).await;
    release(set, target, claim);
    done
}

/// Carries something out through the cache or, if that fails and the volume can do without, without it: `flow` is done again
/// from its beginning then. If the volume has left the number that the request knows it goes without the cache at once, lest it
/// take its neighbours' old content from there.
pub async fn or_uncached<T>(
    set: &CacheSet,
    asked: &Target,
    flow: impl AsyncFn(&Target) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut target = asked.clone();
    target.inode = kept_number(set, &target);
    loop {
        let done = flow(&target).await;
        asked.path.set(target.path.get());
        match done {
            Err(Error::Uncached) => target.inode = where_it_went(set, &target).await,
            Err(error) if is_of_cache(&error) => {
                leave(set, &target, error).await?;
                target.inode = None;
            }
            other => return other,
        }
    }
}

/// The cache failed, not the backing device and not the request.
const fn is_of_cache(error: &Error) -> bool {
    matches!(
        error,
        Error::Failed(_) | Error::Node { .. } | Error::Inconsistent(_) | Error::Io { doing: Doing::Node, .. }
    )
}

/// Waits until nobody makes the volume leave the cache any more; the number that the request goes on with, if the volume
/// has stayed after all.
async fn where_it_went(set: &CacheSet, target: &Target) -> Option<Inode> {
    while set.with(|s| s.volumes.get(target.id).is_some_and(|volume| volume.leaving > 0)) {
        set.signals().ranges.wait().await;
    }
    kept_number(set, target)
}

/// The number that the request knows, if the volume still has it.
fn kept_number(set: &CacheSet, target: &Target) -> Option<Inode> {
    target.inode.filter(|_| set.with(|s| s.volumes.get(target.id)?.inode) == target.inode)
}

/// Makes a volume independent of the cache, because of `error`; refused with that error while it has dirty data there.
async fn leave(set: &CacheSet, target: &Target, error: Error) -> Result<(), Error> {
    let (Some(inode), Some(_)) = (target.inode, &target.backing) else { return Err(error) };
    let has_left =
        depart(set, target.id, inode, |superblock| superblock.set_state(BackingState::Stale)).await?;
    if has_left { Ok(()) } else { Err(error) }
}

/// The one way out of the cache: if nothing of the volume is dirty its superblock says what `say` makes of it, durably,
/// and from then on requests go past the cache. False if something is dirty.
///
/// Who comes when it has left already has nothing to say. After an error the volume is where it was.
pub async fn depart(
    set: &CacheSet,
    id: VolumeId,
    inode: Inode,
    say: impl FnOnce(&mut BackingSuperblock),
) -> Result<bool, Error> {
    let is_there = |s: &State| s.volumes.get(id).is_some_and(|volume| volume.inode == Some(inode));
    let is_clean = set.with(|s| {
        let is_clean = s.is_clean(inode);
        if let Some(volume) = s.volumes.get_mut(id) {
            volume.leaving += u64::from(is_clean);
        }
        is_clean
    });
    if !is_clean {
        return Ok(false);
    }
    let recorded = record::update(set, id, |s, superblock| {
        if is_there(s) {
            say(superblock);
        }
    })
    .await;
    set.with(|s| {
        let has_left = recorded.is_ok() && is_there(s);
        if let Some(volume) = s.volumes.get_mut(id) {
            volume.leaving -= 1;
            if has_left {
                volume.inode = None;
                volume.pace.age.cleaned();
            }
        }
        parked::drop_parked(s, id);
    });
    set.signals().ranges.notify_all();
    recorded.map(|()| true)
}
