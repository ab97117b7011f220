//! Reconnects a backing device that is back as another device of the system. It takes the place of
//! the former device when no request of the volume is in flight, and requests that waited for it
//! proceed.
//!
//! | where the volume is | what is done |
//! |---|---|
//! | in the set, or the cacheless one | that set takes the device, if its state is as it was left |
//! | in no set, waiting for its cache | the volume's next set gets the device, and checks it |

use crate::Host;
use bcached_engine::{CacheSet, Error, RemovedVolume, VolumeId, read_superblock};
use bcached_env::DiskId;
use bcached_format::Superblock;
use std::time::Duration;

/// Why a device does not take the place of the former one. Nothing has changed.
#[derive(Clone, Debug)]
pub enum ReconnectError {
    /// It is the wrong device, or the volume cannot be changed now.
    Refused(Error),
    /// Requests of the volume have stayed in flight for this long.
    Busy(Duration),
}

/// Where a volume is.
enum VolumeLocation {
    Served(CacheSet),
    /// In no set; its backing device is this disk.
    Unserved(DiskId),
}

impl Host {
    /// Serves the volume from `disk` from now on, or as soon as it has its cache again. Returns the
    /// disk that it was served from. If acknowledged data may have been lost with that disk, also
    /// returns the error with which the volume's next flush fails.
    ///
    /// `prepare` is called with the former disk when no request of the volume is in flight any
    /// more, before `disk` is used.
    ///
    /// # Errors
    /// [`ReconnectError`]; `disk` is not used.
    pub async fn take_back(
        &self,
        volume: VolumeId,
        disk: DiskId,
        prepare: impl FnOnce(DiskId),
    ) -> Result<RemovedVolume, ReconnectError> {
        // An attempt to reopen the set moves the volume, and uses its device.
        self.until(|state| !state.is_trying).await;
        let taken = match self.begin_exchange(volume).await {
            true => self.exchange_backing(volume, disk, prepare).await.map_err(ReconnectError::Refused),
            false => Err(ReconnectError::Busy(self.inner().opening.limits.exchange)),
        };
        if let Ok(RemovedVolume { lost: Some(_), .. }) = &taken {
            self.has_lost([volume]);
        }
        self.end_exchange(volume, taken.is_ok());
        if taken.is_ok() {
            self.try_soon();
        }
        taken
    }

    async fn exchange_backing(
        &self,
        volume: VolumeId,
        disk: DiskId,
        prepare: impl FnOnce(DiskId),
    ) -> Result<RemovedVolume, Error> {
        match self.place_of(volume)? {
            VolumeLocation::Served(set) => {
                let former = set.disk_of(volume).ok_or(Error::FlashOnly)?;
                prepare(former);
                let taken = set.take_back(volume, disk).await?;
                self.with(|state| state.away.get_mut(&volume).map(|away| away.disk = disk));
                Ok(taken)
            }
            VolumeLocation::Unserved(former) => {
                prepare(former);
                self.has_its_identity(volume, disk).await?;
                // All acknowledged data was flushed when the set was closed, or its loss is still
                // to be reported.
                self.with(|state| match state.away.get_mut(&volume) {
                    Some(away) if !away.is_cacheless && away.disk == former => {
                        away.disk = disk;
                        Ok(RemovedVolume { disk: Some(former), lost: None })
                    }
                    _ => Err(Error::VolumeBusy),
                })
            }
        }
    }

    fn place_of(&self, volume: VolumeId) -> Result<VolumeLocation, Error> {
        if let Some(set) = self.set_of(volume) {
            return Ok(VolumeLocation::Served(set));
        }
        let nowhere = self.with(|state| state.away.get(&volume).map(|away| away.disk));
        nowhere.map(VolumeLocation::Unserved).ok_or_else(|| self.reason())
    }

    /// Checks that the disk belongs to the volume, as far as that can be told without its cache.
    async fn has_its_identity(&self, volume: VolumeId, disk: DiskId) -> Result<(), Error> {
        let disk = self.inner().env.disk(disk);
        let Superblock::Backing(found) = read_superblock(&disk).await? else {
            return Err(Error::NotABacking);
        };
        let known = self.with(|state| state.away.get(&volume).map(|away| away.info.uuid));
        match known {
            Some(uuid) if uuid == found.uuid() => Ok(()),
            Some(_) => Err(Error::DeviceMismatch("it is a different device")),
            None => Err(Error::VolumeBusy),
        }
    }
}
