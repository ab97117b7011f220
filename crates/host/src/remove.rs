//! Takes a volume from the set, for good or so that another set can serve it.

use crate::Host;
use bcached_engine::{Error, Removed, VolumeId};

impl Host {
    /// Serves the volume no more. Who waits for its backing device hears that now. What was under
    /// it, and why its next flush would have failed, if anything acknowledged may be lost: nobody
    /// has been told of that yet.
    ///
    /// # Errors
    /// As [`bcached_engine::CacheSet::remove_volume`], or the volume is not in the set at this
    /// moment. Nothing has changed.
    pub async fn remove_volume(&self, volume: VolumeId) -> Result<Removed, Error> {
        let set = self.settled(volume)?;
        // A volume of a set that has failed leaves that, if all of its data is on its device.
        let _or_it_stays_attached = set.leave_failed(volume).await;
        let Removed { disk, lost } = set.remove_volume(volume).await?;
        drop(set);
        let owed = self.change(|state| {
            state.absences.forget(volume);
            state.owed_modes.remove(&volume);
            state.owes.remove(&volume).is_some()
        });
        Ok(Removed { disk, lost: lost.or_else(|| owed.then_some(Error::LostWrites)) })
    }

    /// Likewise, for another set. A volume of a set that has failed must have left that: no other
    /// set can serve what is dirty there.
    ///
    /// # Errors
    /// Likewise, or the volume has not left.
    pub async fn hand_over(&self, volume: VolumeId) -> Result<Removed, Error> {
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
