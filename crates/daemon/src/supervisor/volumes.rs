//! Volumes: from a name to a backing device that an engine serves.

use super::table::{VolumeEntry, VolumeState};
use super::{Event, Supervisor};
use crate::devices;
use crate::failure::Kind;
use bcached_engine::{Error, VolumeInfo};

impl Supervisor {
    /// Opens the volume's device if it waits for that and its cache is open, and gives it to the engine.
    pub(super) fn try_volume(&self, index: usize) {
        let Some((device, mode, cache)) = self.shared().table.wanting_device(index) else { return };
        let opened = devices::open_backing(&device);
        let mut shared = self.shared();
        let state = match opened {
            Err(failure) if failure.kind == Kind::NotFound && !self.strict => VolumeState::Waiting(failure),
            Err(failure) => VolumeState::Failed(failure),
            Ok(backing) => match shared.table.engine_for(cache, &backing.superblock) {
                Err(failure) => VolumeState::Failed(failure),
                Ok(None) => VolumeState::waiting_for_cache(),
                Ok(Some((cache, engine))) => {
                    shared.table.name_volume(index, &backing.superblock, cache);
                    let sender = self.sender.clone();
                    let added = move |result| drop(sender.send(Event::VolumeAdded(index, result)));
                    engine.add_backing(backing.device, mode, Box::new(added));
                    VolumeState::Attaching
                }
            },
        };
        shared.table.set_volume(index, state);
    }

    /// An engine has attached a volume, or says why not.
    pub(super) fn volume_added(&mut self, index: usize, result: Result<VolumeInfo, Error>) {
        let entry: Option<VolumeEntry> = self.shared().table.volume_added(index, result);
        if let Some(entry) = entry {
            self.export(&entry);
        }
    }
}
