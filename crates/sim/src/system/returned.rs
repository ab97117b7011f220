//! A volume of the engine whose device was pulled and is back as another device of the system.
//!
//! As in the daemon, the device is not taken back before the former one has answered all its
//! requests.

use super::slot::{LOOK, TRIES};
use super::{Refusal, ReturnOutcome};
use bcached_engine::{Error, VolumeId};
use bcached_env::DiskId;
use bcached_host::Host;
use bcached_host::backing_reconnect::ReconnectError;

/// See [`super::RunningSystem::take_back`].
pub async fn take_back(host: &Host, id: VolumeId, disk: DiskId) -> Result<ReturnOutcome, Refusal> {
    while owes_answers(host, id) {
        host.inner().env.sleep(LOOK).await;
    }
    let mut taken = host.take_back(id, disk, |_| ()).await;
    for _ in 1..TRIES {
        if matches!(taken, Err(ReconnectError::Refused(Error::Io { .. }))) {
            taken = host.take_back(id, disk, |_| ()).await;
        }
    }
    match taken {
        Ok(_) => Ok(ReturnOutcome::Accepted),
        Err(ReconnectError::Busy(_)) => Ok(ReturnOutcome::NotNow),
        Err(ReconnectError::Refused(error)) => match error {
            Error::DeviceMismatch(_) | Error::NotABacking => {
                Ok(ReturnOutcome::Doubted(Refusal::from_error(error)))
            }
            Error::VolumeBusy | Error::Stopping | Error::NoVolume | Error::Failed(_) => {
                Ok(ReturnOutcome::NotNow)
            }
            error => Err(Refusal::from_error(error)),
        },
    }
}

fn owes_answers(host: &Host, id: VolumeId) -> bool {
    let found = host.status().volumes.into_iter().find(|info| info.id == id);
    found.and_then(|info| info.backing_health).is_some_and(|health| health.waiting > 0)
}
