//! Lets a volume continue without the cache: if all its data is on its backing device, it does not
//! fail because its cache does.
//!
//! The volume leaves permanently. Before the first request is served without the cache, its
//! superblock durably says that what the cache holds of it is void. When the volume comes back it
//! gets a new number. So what the cache still holds, readable or not, can never reappear. That is
//! why an unreadable leaf of a working set is handled in the same way as a failed set.
//!
//! While a volume is about to leave, no dirty key of it can be made: this is checked in the
//! transition that inserts. Detaching a volume uses the same code.

use crate::error::{Error, ErrorContext};
use crate::request::ranges::Claim;
use crate::request::{SectorRange, Target, parked, release, write};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{VolumeId, record};
use bcached_format::{BackingState, BackingSuperblock, Inode};

/// Carries out a request that changes a range, when it has its turn: through the cache or, if that
/// fails and the volume can do without, without it. It keeps its turn when it is repeated, because
/// its effects may already have been seen: later writes must stay on top.
pub async fn in_turn<T>(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    flow: impl AsyncFn(&Target) -> Result<T, Error>,
) -> Result<T, Error> {
    let claim = write::queue(set, target, range)?;
    from_queue(set, target, claim, flow).await
}

/// Does the same for a caller that has already queued.
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

/// Carries out `flow` through the cache. If that fails and the volume can do without the cache,
/// `flow` is repeated from its beginning without it. If the volume no longer has the number that
/// the request knows, the request is served without the cache from the start. Otherwise it could
/// take the old content of neighbouring sectors from there.
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

/// Returns whether the cache failed, rather than the backing device or the request.
const fn is_of_cache(error: &Error) -> bool {
    matches!(
        error,
        Error::Failed(_)
            | Error::Node { .. }
            | Error::Inconsistent(_)
            | Error::Io { doing: ErrorContext::Node, .. }
    )
}

/// Waits until no task is making the volume leave the cache any more. Returns the number with which
/// the request continues, if the volume has stayed after all.
async fn where_it_went(set: &CacheSet, target: &Target) -> Option<Inode> {
    while set.with(|s| s.volumes.get(target.id).is_some_and(|volume| volume.leaving > 0)) {
        set.signals().ranges.wait().await;
    }
    kept_number(set, target)
}

/// Returns the number that the request knows, if the volume still has it.
fn kept_number(set: &CacheSet, target: &Target) -> Option<Inode> {
    target.inode.filter(|_| set.with(|s| s.volumes.get(target.id)?.inode) == target.inode)
}

/// Makes a volume independent of the cache, because of `error`; fails with that error if the volume
/// has dirty data there.
async fn leave(set: &CacheSet, target: &Target, error: Error) -> Result<(), Error> {
    let (Some(inode), Some(_)) = (target.inode, &target.backing) else { return Err(error) };
    let has_left =
        depart(set, target.id, inode, |superblock| superblock.set_state(BackingState::Stale)).await?;
    if has_left { Ok(()) } else { Err(error) }
}

/// Makes a volume leave the cache; this is the only way out. If the volume has no dirty data, `say`
/// changes its superblock durably, and from then on requests are served without the cache
/// (invariant D37). Returns false if it has dirty data.
///
/// If the volume has already left, `say` is not called. After an error the volume stays where it
/// was.
pub async fn depart(
    set: &CacheSet,
    id: VolumeId,
    inode: Inode,
    say: impl FnOnce(&mut BackingSuperblock),
) -> Result<bool, Error> {
    let is_there = |s: &State| s.volumes.get(id).is_some_and(|volume| volume.inode == Some(inode));
    let is_clean = set.with(|s| {
        let is_clean = s.is_clean(inode);
        // From here on no dirty key of it is made: invariant D37.
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
        // Only now, when that is durable, may requests do without the cache: invariant D16.
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
