//! Reads and writes superblocks, the durable record of a device: identity, state, mode. Only this
//! file knows where they are.
//!
//! A superblock has one copy, and a torn write of it loses the device. All that changes lies within
//! its first 512 bytes. So only these are written (or one logical block, if larger), alone, and
//! then flushed. The exception is the list of journal buckets, which is written once:
//! [`write_new_superblock`].

use crate::error::{Error, ErrorContext};
use crate::phases::Phase;
use crate::request::flush;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::VolumeId;
use crate::volume::attachment_record;
use crate::volume::backing_flushes::BackingFlushes;
use bcached_env::{Buffer, Disk};
use bcached_format::{
    BackingState, BackingSuperblock, DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR,
    Superblock,
};

/// Reads and checks the superblock of any device of a set.
///
/// # Errors
/// It cannot be read, or is not a valid superblock.
pub async fn read_superblock(disk: &Disk) -> Result<Superblock, Error> {
    let info = disk.info();
    let (result, buffer) = disk.read(SUPERBLOCK_SECTOR, Buffer::zeroed(SUPERBLOCK_BYTES)).await;
    result.map_err(Error::io(ErrorContext::Superblock))?;
    let facts = DeviceGeometry {
        sectors: info.sectors,
        logical_block_sectors: u64::from(info.logical_block_sectors),
    };
    let raw = RawSuperblock::from_bytes(buffer.as_slice()).and_then(|raw| raw.check(facts));
    raw.map_err(|source| Error::Format { doing: ErrorContext::Superblock, source: source.into() })
}

/// The number of bytes that [`place_superblock`] writes.
pub fn placed_bytes(disk: &Disk) -> usize {
    let length = usize::try_from(disk.info().logical_block_sectors).expect("a block is small") * 512;
    length.clamp(512, SUPERBLOCK_BYTES)
}

/// Writes a superblock in place: one logical block. It is not durable yet.
pub async fn place_superblock(disk: &Disk, bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<(), Error> {
    let payload = Buffer::copied_from(&bytes[..placed_bytes(disk)]).freeze();
    disk.write(SUPERBLOCK_SECTOR, payload).await.map_err(Error::io(ErrorContext::Superblock))
}

/// Writes a superblock durably, on a device without concurrent flushes: the cache at its first
/// start, or a backing device that is not served yet.
pub async fn write_superblock(disk: &Disk, bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<(), Error> {
    place_superblock(disk, bytes).await?;
    disk.flush().await.map_err(Error::io(ErrorContext::Superblock))
}

/// Writes the superblock of a volume's backing device, durably. Its flush counts like any other: if
/// it fails, it may have dropped what clients wrote.
async fn write_while_served(
    set: &CacheSet,
    volume: VolumeId,
    disk: &Disk,
    bytes: &[u8; SUPERBLOCK_BYTES],
) -> Result<(), Error> {
    let target = set.target(volume).ok_or(Error::NoVolume)?;
    let begun = flush::flushes(set, volume, BackingFlushes::write_begins).ok_or(Error::NoVolume)?;
    set.with(|s| s.disk_wakes(volume));
    let placed = place_superblock(disk, bytes).await;
    let stamp = flush::flushes(set, volume, |flushes| flushes.write_ends(begun));
    placed?;
    flush::prove(set, &target, stamp.ok_or(Error::NoVolume)?).await
}

/// Like [`write_superblock`], for a superblock that lists journal buckets for the first time. The
/// list extends beyond the first block, so its end is made durable before the first block records
/// its length. Until then no checksum covers it.
pub async fn write_new_superblock(disk: &Disk, bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<(), Error> {
    let block = u64::from(disk.info().logical_block_sectors).max(1);
    let first = usize::try_from(block * 512).expect("a block is small");
    if let Some(rest) = bytes.get(first..).filter(|rest| !rest.is_empty()) {
        let written = disk.write(SUPERBLOCK_SECTOR + block, Buffer::copied_from(rest).freeze()).await;
        written.map_err(Error::io(ErrorContext::Superblock))?;
        disk.flush().await.map_err(Error::io(ErrorContext::Superblock))?;
    }
    write_superblock(disk, bytes).await
}

/// Changes the superblock of a volume's backing device with `change`, which runs under the lock and
/// sees the state. Durable when this returns. Changes are serialised.
///
/// Also maintains [`crate::volume::Volume::dirty_marked`]. It is true only while *dirty* is durable
/// and no change is under way, so that no dirty key can be created while the superblock is about to
/// say *clean*. After a failed write the device may hold either superblock, and a failed flush may
/// have dropped what was there. Then the superblock is written even if `change` leads to the one
/// that is remembered.
pub async fn update(
    set: &CacheSet,
    volume: VolumeId,
    change: impl FnOnce(&State, &mut BackingSuperblock),
) -> Result<(), Error> {
    let found = set.with(|s| {
        let backing = s.volumes.get(volume)?.backing.as_ref()?;
        Some((backing.disk.clone(), backing.record_lock.clone()))
    });
    let (disk, lock) = found.ok_or(Error::NoVolume)?;
    let _alone = lock.acquire(1).await;
    let changed = set.with(|s| {
        let backing = s.volumes.get(volume)?.backing.as_ref()?;
        let current = backing.superblock.clone();
        let in_doubt = backing.in_doubt;
        let mut changed = current.clone();
        change(s, &mut changed);
        let to_write = in_doubt || changed != current;
        if to_write {
            attachment_record::renew(s, &mut changed);
        }
        let entry = s.volumes.get_mut(volume)?;
        entry.dirty_marked = !to_write && current.state() == BackingState::Dirty;
        Some((current, changed, to_write))
    });
    let (before, changed, to_write) = changed.ok_or(Error::NoVolume)?;
    if !to_write {
        return Ok(());
    }
    let _phase = set.begin(phase_of(&before, &changed));
    let written = write_while_served(set, volume, &disk, &changed.seal()).await;
    set.with(|s| {
        let Some(entry) = s.volumes.get_mut(volume) else { return };
        // Not before *dirty* is durable: invariant D14.
        entry.dirty_marked = written.is_ok() && changed.state() == BackingState::Dirty;
        if let Some(backing) = entry.backing.as_mut() {
            backing.in_doubt = written.is_err();
            if written.is_ok() {
                backing.superblock = changed;
                backing.attempted.clear();
            } else if !backing.attempted.iter().any(|attempted| says_the_same(attempted, &changed)) {
                backing.attempted.push(changed);
            }
        }
    });
    written
}

/// Returns true if two superblocks written by this set to one device differ at most in the journal
/// entry that they name.
pub(super) fn says_the_same(one: &BackingSuperblock, other: &BackingSuperblock) -> bool {
    let attached = |superblock: &BackingSuperblock| superblock.attachment().map(|of| (of.number, of.stamp));
    let said = |superblock: &BackingSuperblock| {
        let mut said = superblock.clone();
        said.set_attachment(None);
        said.seal()
    };
    attached(one) == attached(other) && said(one) == said(other)
}

/// The phase of the change from `before` to `after`.
pub(super) fn phase_of(before: &BackingSuperblock, after: &BackingSuperblock) -> Phase {
    match after.state() {
        _ if before.state() == after.state() => Phase::BackingRecord,
        BackingState::Dirty => Phase::BackingDirty,
        BackingState::Clean if before.state() == BackingState::Dirty => Phase::BackingClean,
        BackingState::Clean => Phase::BackingAttached,
        BackingState::Stale => Phase::BackingStale,
        BackingState::None => Phase::BackingDetached,
    }
}
