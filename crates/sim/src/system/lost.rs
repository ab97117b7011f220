//! A volume of the engine whose disk dies: what is reported as lost, what the cache forgets, and
//! the disk that takes its place.

use super::engine::{DATA_START, DeviceImage};
use super::slot::{VolumeSlot, add, gone};
use super::{DeviceLoss, Refusal};
use crate::digest::mix;
use crate::disk::{Device, WriteContent};
use bcached_check::ReadAt;
use bcached_engine::{CacheSet, PendingForget, RemovedVolume};
use bcached_format::{
    BackingState, BackingSuperblock, DeviceGeometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR,
    Superblock, Uuid,
};
use bcached_host::Host;
use std::ops::Range;

/// See [`super::RunningSystem::begin_forget`]. For a detached volume there is nothing to forget.
pub async fn begin(host: &Host, slot: &VolumeSlot) -> Result<Option<DeviceLoss>, Refusal> {
    let Some(id) = slot.id().await.filter(|_| host.works() && !slot.is_away()) else { return Ok(None) };
    let found = host.status().volumes.into_iter().find(|info| info.id == id);
    let Some(info) = found.filter(|info| info.attached) else { return Ok(None) };
    slot.leave();
    let Ok(removed) = host.remove_volume(id).await else {
        slot.back(Some(id));
        return Ok(None);
    };
    let found = match (removed, host.main()) {
        (RemovedVolume { lost: None, disk: Some(disk) }, Ok(set)) => {
            set_out(&set, info.uuid).await.map(|all| (disk, all))
        }
        (RemovedVolume { lost: Some(error), .. }, _) | (_, Err(error)) => Err(Refusal::from_error(error)),
        _ => Err(gone()),
    };
    match found {
        Ok((disk, (ranges, forgetting))) => Ok(Some(DeviceLoss { ranges, forgetting, disk })),
        Err(refusal) => {
            slot.back(None);
            Err(refusal)
        }
    }
}

/// Returns everything that is lost with a volume, as sectors of the volume.
async fn set_out(set: &CacheSet, uuid: Uuid) -> Result<(Vec<Range<u64>>, PendingForget), Refusal> {
    set.walked().await.map_err(Refusal::from_error)?;
    let forgetting = set.begin_forgetting(uuid).map_err(Refusal::from_error)?;
    let (mut ranges, mut next) = (Vec::new(), Some(0));
    while let Some(at) = next {
        let (some, rest) = set.lost(&forgetting, at).await.map_err(Refusal::from_error)?;
        ranges.extend(some.into_iter().map(|lost| lost.start - DATA_START..lost.end - DATA_START));
        next = rest;
    }
    let told: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    if told != forgetting.dirty_sectors {
        let counted = forgetting.dirty_sectors;
        return Err(Refusal(format!("{told} sectors are reported as lost, but {counted} were counted")));
    }
    Ok((ranges, forgetting))
}

/// See [`super::RunningSystem::forget`].
pub async fn end(host: &Host, slot: &VolumeSlot, lost: DeviceLoss) -> Result<(), Refusal> {
    let forgotten = match host.main() {
        Ok(set) => set.forget(lost.forgetting).await,
        Err(error) => Err(error),
    };
    let added = add(host, lost.disk).await;
    slot.back(added.as_ref().ok().copied());
    forgotten.and(added.map(drop)).map_err(Refusal::from_error)
}

/// See [`super::RunningSystem::exchange`].
pub fn exchange(device: &mut Device) {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    DeviceImage(device).read_at(SUPERBLOCK_SECTOR, &mut bytes).expect("it lies on the device");
    let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 1 };
    let Ok(Superblock::Backing(former)) = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts))
    else {
        unreachable!("a volume was served from it");
    };
    assert_eq!(former.data_offset(), device.data_start(), "the judge looks for the volume where it is");
    let mut another = former.uuid();
    let first = u64::from_le_bytes(another.0[..8].try_into().expect("eight bytes"));
    another.0[..8].copy_from_slice(&mix(&[first, 1]).to_le_bytes());
    let superblock = renamed(&former, another, device.model.sectors);
    let end = SUPERBLOCK_SECTOR + (SUPERBLOCK_BYTES as u64).div_ceil(512);
    let bytes = superblock.seal()[..].to_vec();
    device.overwrite(SUPERBLOCK_SECTOR..end, WriteContent::Data(bytes.into_boxed_slice().into()));
}

fn renamed(former: &BackingSuperblock, uuid: Uuid, device_sectors: u64) -> BackingSuperblock {
    let superblock = BackingSuperblock::format(bcached_format::BackingFormat {
        uuid,
        set_uuid: former.set_uuid(),
        block_sectors: u16::try_from(former.block_sectors()).expect("blocks are small"),
        // The bucket size of a backing device is never read.
        bucket_sectors: 128,
        data_offset: None,
        cache_mode: former.cache_mode(),
        device_sectors,
    });
    let superblock = superblock.expect("as it was made");
    assert_eq!(superblock.state(), BackingState::None, "it belongs to no set");
    superblock
}
