//! Provides a new cache on a device: makes it, or takes an existing one that was never used.

use super::device::{self, Access, Device};
use super::lost_sets::LostSets;
use super::overwrite;
use super::superblock::{self, SuperblockProbe};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::Overrides;
use bcached_control::sizes::human;
use bcached_format::superblock::BUCKETS_MIN;
use bcached_format::units::bytes_of;
use bcached_format::{CacheFormat, CacheSuperblock, ReplacementPolicy, Superblock, Uuid};
use std::path::Path;

/// What the cache must suit, in sectors.
#[derive(Clone, Copy, Debug)]
pub struct RequiredGeometry {
    /// The largest block size.
    pub block_sectors: u16,
    /// The bucket size if the cache is made; smaller if there is too little room for such buckets.
    pub bucket_sectors: u16,
}

/// The smallest bucket that is chosen for lack of room, in sectors: smaller ones make B-tree nodes
/// and the journal slow. A cache that was made beforehand may have smaller ones.
const BUCKET_MIN: u16 = 64;

/// A cache that was never used.
pub struct UnusedCache {
    /// Its claim.
    pub device: Device,
    /// Its superblock.
    pub superblock: CacheSuperblock,
    /// It existed already.
    pub was_made: bool,
    /// What was overwritten, or will be, without confirmation.
    pub warning: Option<String>,
}

/// Makes the cache. With `dry_run` nothing is written, and the device is not claimed.
///
/// # Errors
/// The device cannot be opened, carries something that the user did not release, or does not suit.
pub fn cache(
    path: &Path,
    suits: RequiredGeometry,
    (overrides, lost): (&Overrides, &LostSets),
    dry_run: bool,
) -> Result<UnusedCache, Failure> {
    let device = device::open(path, if dry_run { Access::Check } else { Access::Own })?;
    // An unused cache may have been made over the cache of a missing set: as long as it stays
    // unused, that set can be recovered.
    overwrite::refuse_lost_cache(&device, lost)?;
    let refuse =
        |why: String| Failure::new(Kind::Geometry, format!("cannot use {}", path.display())).why(why);
    if let SuperblockProbe::Valid(Superblock::Cache(superblock)) = superblock::read(&device)?
        && !superblock.is_synchronous()
        && !overrides.wipe_bcache
    {
        if superblock.block_sectors() > u64::from(suits.block_sectors) {
            return Err(refuse(format!(
                "it has blocks of {} bytes, but a volume that it is to serve has blocks of {} \
                 bytes",
                bytes_of(superblock.block_sectors()),
                u32::from(suits.block_sectors) * 512
            ))
            .next("--wipe-bcache overwrites it with a new cache")
            .option("--wipe-bcache"));
        }
        return Ok(UnusedCache { device, superblock, was_made: true, warning: None });
    }
    let cleared = overwrite::check(&device, overrides, lost)?;
    if let Some(kind) = overrides
        .wipe_signature
        .iter()
        .find(|kind| cleared.erase.iter().all(|found| found.kind != kind.as_str()))
    {
        return Err(Failure::new(
            Kind::Usage,
            format!("{} does not carry the signature `{kind}`", path.display()),
        )
        .next("leave out the option, or check the device's name")
        .option("--wipe-signature"));
    }
    let logical = device.info().logical_block_sectors;
    if logical > u32::from(suits.block_sectors) {
        return Err(refuse(format!(
            "it has blocks of {} bytes, but a backing device that it is to serve has blocks of {} \
             bytes",
            logical * 512,
            u32::from(suits.block_sectors) * 512
        ))
        .next("use another device, or detach that volume first"));
    }
    let bucket_sectors = bucket_sectors(device.info().sectors, suits).map_err(|least| {
        refuse(format!(
            "it is too small: a set needs at least {BUCKETS_MIN} buckets, and the smallest that \
             are chosen automatically have {}",
            human(u64::from(least) * 512)
        ))
        .next(
            "name a larger device, or first make it a cache with smaller buckets (`bcached make`): \
             such a cache is used as it is",
        )
    })?;
    let superblock = CacheSuperblock::format(CacheFormat {
        uuid: random_uuid()?,
        set_uuid: random_uuid()?,
        device_sectors: device.info().sectors,
        block_sectors: suits.block_sectors,
        bucket_sectors,
        discard: false,
        replacement: ReplacementPolicy::Lru,
    })
    .map_err(|error| refuse(error.to_string()))?;
    if !dry_run {
        overwrite::write(&device, &cleared.erase, &superblock.seal())?;
    }
    Ok(UnusedCache { device, superblock, was_made: false, warning: cleared.warning(path) })
}

/// Returns the bucket size for a cache device of `sectors` sectors, in sectors. If the device is
/// too small for a set, the error is the smallest size that was tried.
fn bucket_sectors(sectors: u64, suits: RequiredGeometry) -> Result<u16, u16> {
    // In any case, a node must have room for a set of keys beside its first one.
    let wanted = suits.bucket_sectors.max(2 * suits.block_sectors);
    let least = wanted.min(BUCKET_MIN);
    let buckets = std::iter::successors(Some(wanted), |bucket| Some(bucket / 2));
    let mut able = buckets.take_while(|bucket| *bucket >= least);
    able.find(|bucket| sectors / u64::from(*bucket) >= BUCKETS_MIN).ok_or(least)
}

/// Returns a random UUID, marked as such (version 4).
///
/// # Errors
/// The kernel returns no random bytes.
pub fn random_uuid() -> Result<Uuid, Failure> {
    let mut bytes = [0; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(16) => {}
        Ok(_) => return Err(Failure::new(Kind::Io, "the kernel returned too few random bytes")),
        Err(error) => return Err(Failure::new(Kind::Io, "cannot get random numbers").why(error.to_string())),
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(Uuid(bytes))
}
