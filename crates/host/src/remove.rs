//! Removes a volume from the set, permanently or so that another set can serve it.

use crate::Host;
use bcached_engine::{Error, RemovedVolume, VolumeId};

impl Host {
    /// Stops serving the volume. Requests that wait for its backing device fail now. Returns the
    /// volume's disk. If acknowledged data may be lost, also returns the error with which the next
    /// flush would have failed: no client has been told yet.
    ///
    /// # Errors
    /// As for [`bcached_engine::CacheSet::remove_volume`], or the volume is not in the set at the
    /// moment. Nothing has changed.
    pub async fn remove_volume(&self, volume: VolumeId) -> Result<RemovedVolume, Error> {
        let set = self.settled(volume)?;
        // A volume of a failed set detaches from it if all of the volume's data is on its device.
        let _or_it_stays_attached = set.leave_failed(volume).await;
        let RemovedVolume { disk, lost } = set.remove_volume(volume).await?;
        drop(set);
        let owed = self.change(|state| {
            state.absences.forget(volume);
            state.owed_modes.remove(&volume);
            state.owes.remove(&volume).is_some()
        });
        Ok(RemovedVolume { disk, lost: lost.or_else(|| owed.then_some(Error::LostWrites)) })
    }

    /// Does the same, so that another set can serve the volume. A volume of a failed set must have
    /// detached from it: no other set can serve the dirty data there.
    ///
    /// # Errors
    /// As above, or the volume has not detached.
    pub async fn hand_over(&self, volume: VolumeId) -> Result<RemovedVolume, Error> {
        let set = self.settled(volume)?;
        set.leave_failed(volume).await?;
        let is_attached = set.volumes().iter().any(|info| info.id == volume && info.attached);
        if is_attached {
            return Err(set.failure().map_or(Error::Attached, |why| Error::Failed(Box::new(why))));
        }
        drop(set);
        self.remove_volume(volume).await
    }
}
