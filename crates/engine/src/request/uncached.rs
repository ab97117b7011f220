//! Going on without the cache (decision 10): a volume whose data is all on its backing device does not fail because its
//! cache does.
//!
//! It leaves for good: its superblock says, durably, that what the cache holds of it is void, before the first request
//! goes past it, and the next start gives it a new number. So what the cache still holds, readable or not, can never
//! come back, and that is why a leaf of a working set that cannot be read is dealt with in the same way as a set that
//! has failed. While a volume is about to leave no dirty key of it can be made: asked in the transition that inserts.

use crate::error::{Doing, Error};
use crate::request::{Target, parked};
use crate::set::CacheSet;
use crate::volume::record;
use bcached_format::BackingState;

/// Carries out a request that changes something: through the cache or, if that fails and the volume can do without,
/// without it.
pub async fn or_uncached(
    set: &CacheSet,
    target: &Target,
    flow: impl AsyncFn(&Target) -> Result<(), Error>,
) -> Result<(), Error> {
    match flow(target).await {
        Err(error) if is_of_cache(&error) => {
            leave(set, target, error).await?;
            flow(&Target { inode: None, ..target.clone() }).await
        }
        other => other,
    }
}

/// The cache failed, not the backing device and not the request.
const fn is_of_cache(error: &Error) -> bool {
    matches!(
        error,
        Error::Failed(_) | Error::Node { .. } | Error::Io { doing: Doing::Node, .. } | Error::Uncached
    )
}

/// Makes a volume independent of the cache, because of `error`; refused with that error while it has dirty data there.
async fn leave(set: &CacheSet, target: &Target, error: Error) -> Result<(), Error> {
    let (Some(inode), Some(_)) = (target.inode, &target.backing) else { return Err(error) };
    let is_clean = set.with(|s| {
        let is_clean = s.dirty.of(inode) == 0;
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.leaving += u64::from(is_clean);
        }
        is_clean
    });
    if !is_clean {
        return Err(error);
    }
    let recorded = record::set_state(set, target.id, BackingState::Stale).await;
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.leaving -= 1;
            if recorded.is_ok() {
                volume.inode = None;
            }
        }
        parked::drop_parked(s, target.id);
    });
    recorded
}
