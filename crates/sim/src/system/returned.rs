//! A volume of the engine whose device was pulled and is back as another device of the system.
//!
//! As in the daemon, the device is not taken back before the former one has answered all its
//! requests.

use super::seat::{LOOK, TRIES};
use super::{Refusal, Return};
use bcached_engine::{Error, VolumeId};
use bcached_env::DiskId;
use bcached_host::Host;
use bcached_host::backing_reconnect::NotTaken;

/// See [`super::Running::take_back`].
pub async fn take_back(host: &Host, id: VolumeId, disk: DiskId) -> Result<Return, Refusal> {
    while owes_answers(host, id) {
        host.inner().env.sleep(LOOK).await;
    }
    let mut taken = host.take_back(id, disk, |_| ()).await;
    for _ in 1..TRIES {
        if matches!(taken, Err(NotTaken::Refused(Error::Io { .. }))) {
            taken = host.take_back(id, disk, |_| ()).await;
        }
    }
    match taken {
        Ok(_) => Ok(Return::Taken),
        Err(NotTaken::Busy(_)) => Ok(Return::NotNow),
        Err(NotTaken::Refused(error)) => match error {
            Error::NotAsItWas(_) | Error::NotABacking => Ok(Return::Doubted(Refusal::from_error(error))),
            Error::OnItsWay | Error::Stopping | Error::NoVolume | Error::Failed(_) => Ok(Return::NotNow),
            error => Err(Refusal::from_error(error)),
        },
    }
}

fn owes_answers(host: &Host, id: VolumeId) -> bool {
    let found = host.status().volumes.into_iter().find(|info| info.id == id);
    found.and_then(|info| info.backing_health).is_some_and(|health| health.waiting > 0)
}
