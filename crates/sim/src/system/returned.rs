//! A volume of the engine whose device was pulled and is back, as another device of the system.
//!
//! It is done as the daemon does it: the device is not looked for before the former one has answered all that it was asked,
//! and requests that come while it is exchanged wait.

use super::berth::Berth;
use super::seat::{Seat, tried};
use super::{Refusal, Return};
use bcached_engine::{CacheSet, Error, Removed, VolumeId};
use bcached_env::DiskId;

/// See [`super::Running::take_back`].
pub async fn take_back(berth: &Berth, seat: &Seat, id: VolumeId, disk: DiskId) -> Result<Return, Refusal> {
    let owes_answers = |set: &CacheSet| {
        let found = set.volumes().into_iter().find(|info| info.id == id);
        found.and_then(|info| info.backing_health).is_some_and(|health| health.waiting > 0)
    };
    while berth.set().is_some_and(|set| owes_answers(&set)) {
        berth.before_the_next_look().await;
    }
    let Some(set) = berth.set().filter(|_| seat.served_as() == Some(id)) else { return Ok(Return::NotNow) };
    seat.leave();
    // Its superblock may not be read at once.
    let taken = tried(async || set.take_back(id, disk).await).await;
    seat.back(Some(id));
    match taken {
        Ok(Removed { lost, .. }) => Ok(Return::Taken { lost: lost.is_some() }),
        Err(Error::OnItsWay | Error::Stopping | Error::NoVolume) => Ok(Return::NotNow),
        Err(error @ (Error::NotAsItWas(_) | Error::NotABacking)) => {
            Ok(Return::Doubted(Refusal::from_error(error)))
        }
        Err(error) => Err(Refusal::from_error(error)),
    }
}
