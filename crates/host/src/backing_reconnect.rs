//! A backing device is back as another device of the system. That takes the place of the former one
//! when no request of the volume is in flight, and requests that waited for it go on.

use crate::Host;
use crate::absence::EXCHANGE_LIMIT;
use bcached_engine::{CacheSet, Error, Removed, VolumeId};
use bcached_env::DiskId;
use std::time::Duration;

/// Why a device does not take the place of the former one. Nothing has changed.
#[derive(Clone, Debug)]
pub enum NotTaken {
    /// It is not the device that it should be, or the volume cannot be changed now.
    Refused(Error),
    /// Requests of the volume have been in flight for this long.
    Busy(Duration),
}

impl Host {
    /// Serves the volume from `disk` from now on: which disk it was served from, and why its next
    /// flush fails, if something that was acknowledged may have gone with that.
    ///
    /// `prepare` is called when no request of the volume is in flight any more, before the set takes
    /// the disk.
    ///
    /// # Errors
    /// [`NotTaken`]; `disk` is not used.
    pub async fn take_back(
        &self,
        volume: VolumeId,
        disk: DiskId,
        prepare: impl FnOnce(&CacheSet),
    ) -> Result<Removed, NotTaken> {
        let set = self.settled(volume).map_err(NotTaken::Refused)?;
        let taken = match self.begin_exchange(volume).await {
            true => {
                prepare(&set);
                set.take_back(volume, disk).await.map_err(NotTaken::Refused)
            }
            false => Err(NotTaken::Busy(EXCHANGE_LIMIT)),
        };
        if let Ok(Removed { lost: Some(_), .. }) = &taken {
            self.with(|state| state.owes.insert(volume));
        }
        self.end_exchange(volume, taken.is_ok());
        taken
    }
}
