//! Volumes: from a name to a backing device that an engine serves.

use super::options::Done;
use super::patience::Unopened;
use super::table::{Step, Unserved, VolumeEntry, VolumeState};
use super::{Event, Supervisor, reasons};
use crate::devices;
use crate::engine_thread::Added;
use crate::options::quiet;
use bcached_engine::Error;
use bcached_format::BackingSuperblock;

impl Supervisor {
    /// Takes the volume's next step: gives its device to the engine, or finds out what it waits for.
    pub(super) fn try_volume(&mut self, index: usize) {
        let Some((device, step)) = self.shared().table.next_step(index) else { return };
        let state = match step {
            Step::Open(cache) => self.open_volume(index, &device, cache),
            Step::Look(cache, reason) => match self.look(index, &device) {
                Ok(superblock) => VolumeState::Waiting(reasons::cache_waits(&superblock, &cache, &reason)),
                Err(reason) => self.without_device(reason),
            },
        };
        self.shared().table.set_volume(index, state);
    }

    fn open_volume(&mut self, index: usize, device: &str, cache: Option<usize>) -> VolumeState {
        // Opened only when somebody takes it: each close after an opening for writing wakes up udev.
        let superblock = match self.look(index, device) {
            Ok(superblock) => superblock,
            Err(reason) => return self.without_device(reason),
        };
        let engine = self.shared().table.engine_for(cache, &superblock);
        let (cache, engine) = match engine {
            Ok(found) => found,
            Err(Unserved::Waits(failure)) => return VolumeState::Waiting(failure),
            Err(Unserved::Failed(failure)) => return VolumeState::Failed(failure),
        };
        let backing = match self.slow_backings.open(device, devices::open_backing) {
            Ok(backing) => backing,
            Err(reason) => return self.without_device(reason),
        };
        let mut shared = self.shared();
        shared.table.name_volume(index, &backing.superblock, cache);
        let entry = &mut shared.table.volumes[index];
        let mode = entry.options.configured_mode();
        entry.told = entry.options.volume_options(quiet::local_minute);
        let sender = self.sender.clone();
        let added = move |result| drop(sender.send(Event::VolumeAdded(index, Box::new(result))));
        engine.add_backing(backing.device, mode, entry.told, Box::new(added));
        VolumeState::Attaching
    }

    fn look(&mut self, index: usize, device: &str) -> Result<BackingSuperblock, Unopened> {
        let superblock = self.slow_looks.open(device, devices::look_at_backing)?;
        let entry = &mut self.shared().table.volumes[index];
        (entry.uuid, entry.label) = (Some(superblock.uuid()), Some(superblock.label()));
        Ok(superblock)
    }

    /// A device that is missing may come, and one in use be given up; of the command line's devices all are meant now.
    fn without_device(&self, reason: Unopened) -> VolumeState {
        let failure = match reason {
            Unopened::Hangs(failure) => return VolumeState::Waiting(failure),
            Unopened::Failed(failure) => failure,
        };
        if failure.may_pass() && !self.strict {
            VolumeState::Waiting(failure)
        } else {
            VolumeState::Failed(failure)
        }
    }

    /// An engine has attached a volume, or says why not.
    pub(super) fn volume_added(&mut self, index: usize, result: Result<Added, Error>) {
        let is_cut_short = result.as_ref().is_ok_and(|added| added.cut_short);
        let result = result.map(|added| added.volume);
        let entry: Option<VolumeEntry> = self.shared().table.volume_added(index, result);
        if let Some(entry) = entry {
            if is_cut_short {
                let (name, device) = (entry.display_name(), entry.backing.as_deref().unwrap_or_default());
                tracing::warn!(
                    event = "volume-cut-short",
                    "volume {name}: data of it is cached behind the end of {device}: was that cut short? It is served as \
                     long as it is now"
                );
            }
            self.export(&entry);
            self.apply_cache_mode(index, Done::nobody());
        }
    }
}
