//! The cacheless set: a set on a device in memory, which serves volumes without their cache while
//! the cache set is closed. It caches nothing.

use crate::{Host, NullNote};
use bcached_engine::{CacheSet, Error, Options, VolumeId};
use bcached_format::{CacheFormat, CacheSuperblock, ReplacementPolicy, Uuid};

/// Number of buckets of the cacheless set, and their size in sectors. The engine does not run with
/// fewer.
const BUCKETS: u64 = 600;
const BUCKET_SECTORS: u16 = 128;

/// Size of that device, in sectors.
pub const SECTORS: u64 = BUCKETS * BUCKET_SECTORS as u64;

/// Returns the superblock of the cacheless set, for volumes whose devices are written in blocks of
/// `block_sectors` sectors (1 or 8).
#[must_use]
pub fn superblock(block_sectors: u16) -> CacheSuperblock {
    let superblock = CacheSuperblock::format(CacheFormat {
        uuid: Uuid([0xfe; 16]),
        // No device claims to belong to this set.
        set_uuid: Uuid([0xff; 16]),
        device_sectors: SECTORS,
        block_sectors,
        bucket_sectors: BUCKET_SECTORS,
        discard: false,
        replacement: ReplacementPolicy::Lru,
    });
    superblock.expect("sizes that can be run")
}

/// Opens the cacheless set if any volume can do without the cache, so that the cacheless set is
/// available before the cache is closed. Returns false if it is needed but cannot be opened.
pub(crate) async fn is_ready(host: &Host) -> bool {
    let is_needed = host.status().volumes.iter().any(|info| !info.flash_only && !info.may_be_dirty());
    if !is_needed {
        return true;
    }
    let opened = open(host).await;
    if let Err(error) = &opened {
        tracing::warn!(
            event = "cache-not-opened-again",
            "the cache set is not reopened yet, because volumes could not be served without it in the \
             meantime: {error}"
        );
    }
    opened.is_ok()
}

/// Gives the cacheless set all volumes whose data is entirely on their backing devices.
pub(crate) async fn take_volumes(host: &Host) {
    let able: Vec<_> = host.with(|state| {
        let able = state.away.iter().filter(|(_, away)| !away.is_cacheless && !away.info.may_be_dirty());
        able.map(|(id, away)| (*id, away.disk)).collect()
    });
    if able.is_empty() {
        return;
    }
    let cacheless = match open(host).await {
        Ok(cacheless) => cacheless,
        Err(error) => {
            tracing::warn!(event = "no-way-past-the-cache", "clean volumes wait for their cache: {error}");
            return;
        }
    };
    for (id, disk) in able {
        if let Err(error) = cacheless.add_uncached_as(id, disk).await {
            tracing::warn!(
                event = "no-way-past-the-cache",
                "a volume waits for its cache, because it could not be served without it: {error}"
            );
            continue;
        }
        // The options may have been changed in the meantime.
        let options = host.options_of(id);
        let _it_is_there = cacheless.change_volume_options(id, |begun| *begun = options);
        host.change(|state| {
            if let Some(away) = state.away.get_mut(&id) {
                away.is_cacheless = true;
            }
        });
    }
}

/// Takes a volume from the cacheless set, if the cacheless set has it. After that no set has the
/// volume.
///
/// # Errors
/// The cacheless set cannot release the volume now.
pub(crate) async fn give_back(host: &Host, id: VolumeId) -> Result<(), Error> {
    let cacheless = host.change(|state| {
        let away = state.away.get_mut(&id).filter(|away| away.is_cacheless)?;
        away.is_cacheless = false;
        state.cacheless.as_ref().map(|(cacheless, _)| cacheless.clone())
    });
    let Some(cacheless) = cacheless else { return Ok(()) };
    match cacheless.remove_volume(id).await {
        Ok(removed) => {
            if removed.lost.is_some() {
                host.has_lost([id]);
            }
            Ok(())
        }
        Err(error) => {
            // The volume is served as before.
            host.change(|state| state.away.get_mut(&id).map(|away| away.is_cacheless = true));
            Err(error)
        }
    }
}

/// Closes the cacheless set, which has no volumes any more.
pub(crate) async fn close(host: &Host) {
    let Some((cacheless, disk)) = host.change(|state| state.cacheless.take()) else { return };
    let _it_has_nothing_to_lose = cacheless.stop().await;
    host.inner().machine.remove(disk);
}

/// Returns the cacheless set, opened if necessary.
///
/// # Errors
/// It cannot be opened; the error says why.
async fn open(host: &Host) -> Result<CacheSet, String> {
    if let Some((cacheless, _)) = host.with(|state| state.cacheless.clone()) {
        return Ok(cacheless);
    }
    let inner = host.inner();
    // A device cannot be written in blocks smaller than its own; larger blocks cost more.
    let block_sectors = if host.status().block_sectors < 8 { 1 } else { 8 };
    let disk = inner.machine.memory_cache(&superblock(block_sectors))?;
    let nodes = bcached_engine::node_budget_min(u64::from(BUCKET_SECTORS), 1);
    let options = Options { node_budget_bytes: nodes, ..Options::default() };
    let opened = CacheSet::open(inner.env.clone(), disk, Box::new(NullNote), options).await;
    match &opened {
        Ok(cacheless) => host.change(|state| state.cacheless = Some((cacheless.clone(), disk))),
        Err(_) => inner.machine.remove(disk),
    }
    opened.map_err(|error| error.to_string())
}
