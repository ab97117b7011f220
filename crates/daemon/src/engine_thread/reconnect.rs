//! Devices that return as other devices of the system.

use super::machine::LocalMachine;
use super::{Command, Engine, ReconnectError, ReplyCallback};
use bcached_engine::{Error, RemovedVolume, VolumeId};
use bcached_env::DiskId;
use bcached_host::Host;
use bcached_offline::devices::CacheDevice;
use bcached_uring::Device;

impl Engine {
    /// Serves the volume from `device` from now on. The answer is why its next flush fails, if
    /// something that was acknowledged may have been lost with the former device.
    pub fn take_back(
        &self,
        volume: VolumeId,
        device: Device,
        answer: ReplyCallback<Result<Option<Error>, ReconnectError>>,
    ) {
        self.send(Command::TakeBack(volume, device, answer));
    }

    /// Reopens the set, which has failed, on this device, which must be the one that it was on. The
    /// answer comes before that has ended: whether something that was acknowledged and not flushed
    /// may have been lost.
    pub fn take_back_cache(&self, cache: CacheDevice, answer: ReplyCallback<Result<bool, Error>>) {
        self.send(Command::TakeBackCache(Box::new(cache), answer));
    }
}

pub async fn take_back(
    host: &Host,
    machine: &LocalMachine,
    volume: VolumeId,
    device: Device,
) -> Result<Option<Error>, ReconnectError> {
    let disks = &machine.disks;
    let disk = disks.add(device);
    let prepare = |former: DiskId| {
        // A device that has grown meanwhile counts as large as it was, until the rest is asked for.
        if let Some((former, new)) = disks.device(former).zip(disks.device(disk)) {
            new.count_on(former.info().sectors.min(new.info().sectors));
        }
    };
    match host.take_back(volume, disk, prepare).await {
        Ok(RemovedVolume { disk: former, lost }) => {
            if let Some(former) = former {
                drop(disks.remove(former));
            }
            Ok(lost)
        }
        Err(error) => {
            // Its claim is released.
            drop(disks.remove(disk));
            Err(error)
        }
    }
}

pub fn take_back_cache(
    host: &Host,
    machine: &LocalMachine,
    cache: CacheDevice,
    answer: ReplyCallback<Result<bool, Error>>,
) {
    let disks = machine.disks.clone();
    let disk = disks.add(cache.device);
    let answer = move |taken: Result<bool, Error>| {
        if taken.is_err() {
            drop(disks.remove(disk));
        }
        answer(taken);
    };
    host.take_back_cache(disk, &cache.superblock, Box::new(answer));
}
