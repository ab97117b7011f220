//! Backing devices that are pulled, and come back as another device of the system.

use super::Client;
use crate::disk::Survivors;
use crate::failure::FailureKind;
use crate::system::{Refusal, ReturnOutcome};

impl Client {
    /// Pulls the device, unless it could not come back: the system must support its return.
    pub(super) fn pull(&self, device: usize, survivors: Survivors) {
        let volume = volume_on(device);
        let can_return = self.shared.running.can_return(volume);
        let mut world = self.shared.world.borrow_mut();
        if can_return && world.is_there(device) {
            let dropped = world.pull(device, survivors);
            let start = world.devices[device].data_start();
            let of_volume = dropped.into_iter().filter_map(|sector| sector.checked_sub(start)).collect();
            self.shared.oracle.borrow_mut().device_goes(volume, of_volume);
        }
    }

    /// Brings the device back. Nothing has used it meanwhile, so the system must accept it.
    pub(super) async fn give_back(&self, device: usize) -> Result<(), Refusal> {
        let volume = volume_on(device);
        if self.shared.world.borrow().is_there(device) || !self.begin_change(volume) {
            return Ok(());
        }
        let disk = self.shared.world.borrow_mut().reopen(device);
        let taken = self.shared.running.take_back(volume, disk).await;
        self.end_change(volume);
        if !matches!(taken, Ok(ReturnOutcome::Accepted)) {
            // The new handle is not in use: another attempt is possible.
            let _nothing = self.shared.world.borrow_mut().pull(device, Survivors::Everything);
        }
        match taken {
            Ok(ReturnOutcome::NotNow) => Ok(()),
            Ok(ReturnOutcome::Accepted) => {
                self.shared.oracle.borrow_mut().device_is_back(volume);
                Ok(())
            }
            Ok(ReturnOutcome::Doubted(refusal)) => {
                self.notice(FailureKind::Refused { request: format!("return {device}"), refusal });
                Ok(())
            }
            Err(refusal) => Err(refusal),
        }
    }
}

/// Returns the volume on a backing device.
fn volume_on(device: usize) -> u32 {
    u32::try_from(device - 1).expect("few volumes")
}
