//! A volume whose backing device is back as another device: it takes the place of the one that was open, when the requests that the set
//! has are answered, and who waits for the device goes on.

use super::absent::EXCHANGE_LIMIT;
use super::keeper::Keeper;
use super::{Answer, Command, Engine};
use bcached_engine::{CacheSet, Error, Removed, VolumeId};
use bcached_uring::Device;
use std::time::Duration;

/// Why a device does not take the place of the former one. Nothing has changed.
#[derive(Clone, Debug)]
pub enum NotTaken {
    /// It is not what it should be, or the volume cannot be changed now.
    Refused(Error),
    /// Requests of the volume have not ended for so long.
    Busy(Duration),
}

impl Engine {
    /// The volume is served from `device` from now on. What is answered is why its next flush fails, if something that was acknowledged may
    /// have gone with the old one.
    pub fn take_back(
        &self,
        volume: VolumeId,
        device: Device,
        answer: Answer<Result<Option<Error>, NotTaken>>,
    ) {
        self.send(Command::TakeBack(volume, device, answer));
    }
}

pub async fn take_back(
    set: CacheSet,
    keeper: &Keeper,
    volume: VolumeId,
    device: Device,
) -> Result<Option<Error>, NotTaken> {
    let taken = match keeper.begin_exchange(volume).await {
        true => exchange(set, keeper, volume, device).await.map_err(NotTaken::Refused),
        false => Err(NotTaken::Busy(EXCHANGE_LIMIT)),
    };
    keeper.end_exchange(volume, taken.is_ok());
    taken
}

async fn exchange(
    set: CacheSet,
    keeper: &Keeper,
    volume: VolumeId,
    device: Device,
) -> Result<Option<Error>, Error> {
    let disks = &keeper.inner().disks;
    // One that has grown meanwhile is as large as it was until somebody asks for the rest.
    if let Some(former) = set.disk_of(volume).and_then(|disk| disks.device(disk)) {
        let (before, now) = (former.info().sectors, device.info().sectors);
        device.count_on(before.min(now));
    }
    let disk = disks.add(device);
    match set.take_back(volume, disk).await {
        Ok(Removed { disk: former, lost }) => {
            if let Some(former) = former {
                drop(disks.remove(former));
            }
            if lost.is_some() {
                keeper.with(|sets| sets.owes.insert(volume));
            }
            Ok(lost)
        }
        Err(error) => {
            // Nobody uses it: the claim is given up.
            drop(disks.remove(disk));
            Err(error)
        }
    }
}
