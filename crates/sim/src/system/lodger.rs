//! Flash-only volumes of the engine, which live in the cache alone: creates them, finds them by
//! label at each start, and deletes them.

use super::Refusal;
use super::slot::{VolumeSlot, gone, uuid_of};
use bcached_engine::{CacheSet, CancelToken, Error, RemovedVolume, VolumeId, VolumeInfo};
use bcached_format::Label;
use bcached_host::Host;

/// Returns the label of the volume with this number.
fn label(volume: u32) -> Label {
    Label::from_text(&format!("lodger-{volume}")).expect("it is short")
}

/// Returns the volume with this number, if the set serves it.
pub fn find(set: &CacheSet, volume: u32) -> Option<VolumeInfo> {
    set.volumes().into_iter().find(|info| info.flash_only && info.label == label(volume))
}

/// See [`super::RunningSystem::create`].
pub async fn create(host: &Host, slot: &VolumeSlot, volume: u32, sectors: u64) -> Result<bool, Refusal> {
    let set = host.main().map_err(Refusal::from_error)?;
    slot.leave();
    let made = set.create_flash_only(sectors, label(volume)).await;
    drop(set);
    slot.back(made.as_ref().ok().copied());
    match made {
        Ok(_) => Ok(true),
        Err(Error::NoRoom { .. }) => Ok(false),
        Err(error) => Err(Refusal::from_error(error)),
    }
}

/// See [`super::RunningSystem::delete`].
pub async fn delete(host: &Host, slot: &VolumeSlot) -> Result<bool, Refusal> {
    let Some(id) = slot.leave() else {
        slot.back(None);
        return Err(gone());
    };
    let uuid = uuid_of(host, id);
    let removed = match (uuid, host.remove_volume(id).await) {
        (_, Err(Error::VolumeBusy)) => {
            slot.back(Some(id));
            return Ok(false);
        }
        // Data of it that is not durable need not become durable any more.
        (Some(uuid), Ok(RemovedVolume { disk: None, .. })) => Ok(uuid),
        (_, outcome) => Err(outcome.err().unwrap_or(Error::NoVolume)),
    };
    let deleted = match removed.and_then(|uuid| Ok((uuid, host.main()?))) {
        Ok((uuid, set)) => forget(&set, uuid).await,
        Err(error) => Err(error),
    };
    slot.back(None);
    deleted.map(|()| true).map_err(Refusal::from_error)
}

/// Shrinks the volume; it loses the data after the new end.
pub async fn shrink(set: &CacheSet, id: VolumeId, sectors: u64, cancel: &CancelToken) -> Result<(), Error> {
    let shrinking = set.begin_shrinking(id, sectors, cancel).await?;
    set.shrink_flash_only(shrinking).await
}

async fn forget(set: &CacheSet, uuid: bcached_format::Uuid) -> Result<(), Error> {
    set.walked().await?;
    let forgetting = set.begin_forgetting(uuid)?;
    set.forget(forgetting).await
}
