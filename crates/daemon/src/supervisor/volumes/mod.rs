//! Volumes: from a name to a backing device that an engine serves.

pub mod early_clients;
pub mod explain;
pub mod exports;
pub mod label;
pub mod numbering;
pub mod placement;
pub mod reconnect;
pub mod rejoin;
pub mod without_cache;

use crate::engine_error;
use crate::engine_thread::{AddRequest, AddedVolume, Engine, ReconnectError, ServeMode};
use crate::supervisor::devices::open_timeout::OpenError;
use crate::supervisor::options::pending_settings::RequestId;
use crate::supervisor::report::reasons;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::{Event, Phase, Supervisor};
use bcached_config::options::quiet_hours;
use bcached_control::failure::Failure;
use bcached_engine::Error;
use bcached_format::BackingSuperblock;
use bcached_offline::devices;
use bcached_placement::Verdict;
use placement::UnservedReason;
use reconnect::RetryState;
use std::time::Duration;

/// An event of a volume.
pub enum VolumeEvent {
    /// An engine serves it, or says why not.
    Added(Box<Result<AddedVolume, Error>>),
    /// Its engine has set the cache mode to this requested value, or has refused it (true).
    ModeSettled(RequestId, bool),
    /// Its engine has taken up the returned backing device, or says why not.
    Returned(Box<Result<Option<Error>, ReconnectError>>),
}

impl Supervisor {
    /// Handles an event of the volume of this index.
    pub fn volume_event(&mut self, index: usize, event: VolumeEvent) {
        match event {
            VolumeEvent::Added(result) => self.volume_added(index, *result),
            VolumeEvent::ModeSettled(request, refused) => self.mode_settled(index, &request, refused),
            VolumeEvent::Returned(taken) => self.returned(index, *taken),
        }
    }

    /// Takes the volume's next step: gives its device to an engine, or finds out what it waits for.
    pub fn try_volume(&mut self, index: usize) {
        let Some(device) = self.shared().table.device_to_read(index) else { return };
        if !self.shared().table.volumes[index].is_due() {
            return;
        }
        let state = match self.place_volume(index, &device) {
            Ok(state) => {
                if !matches!(state, VolumeState::Attaching) {
                    // Its device answers: it waits for something else.
                    self.shared().table.volumes[index].again = None;
                }
                state
            }
            Err(OpenError::Failed(failure)) => self.volume_refused(index, failure),
            Err(OpenError::NoAnswer(failure)) => {
                self.shared().table.volumes[index].again.iter_mut().for_each(RetryState::soon);
                VolumeState::Waiting(failure)
            }
        };
        self.shared().table.set_volume(index, state);
    }

    /// Reads the volume's device and carries out what follows from that.
    fn place_volume(&mut self, index: usize, device: &str) -> Result<VolumeState, OpenError> {
        // Opened only when an engine takes it: each close after an opening for writing wakes up
        // udev.
        let superblock = self.look(index, device)?;
        let decision = {
            let shared = self.shared();
            let now = self.started.elapsed();
            // While the daemon starts, all devices are waited for from its start on.
            let since = if shared.phase == Phase::Starting { Duration::ZERO } else { now };
            shared.table.place(index, &superblock, (now, since))
        };
        if decision.misses_set
            && let Some(why) = decision.verdict.why()
        {
            let trouble = self.shared().table.trouble_for(&superblock, why);
            self.note_lack(index, &superblock, decision.lacks_since, trouble);
        }
        let why = |why| self.shared().table.why(&superblock, why);
        match decision.verdict {
            Verdict::Serve { cache, adopts } => {
                let engine = self.shared().table.caches[cache].engine();
                let Some(engine) = engine else {
                    return Ok(VolumeState::Waiting(reasons::its_cache_opens()));
                };
                let serve_mode = if adopts { ServeMode::Adopted } else { ServeMode::Cached };
                self.give_to(index, device, (cache, engine, serve_mode))
            }
            Verdict::Without(lacked) => {
                let lacked = lacked.map(why);
                self.serve_without(index, device, &superblock, lacked)
            }
            Verdict::Wait(reason) => {
                let soon = self.shared().table.volumes[index].wait;
                let lacks = decision.misses_set && decision.lacks_since.is_some();
                let waits = why(reason);
                Ok(VolumeState::Waiting(if lacks { reasons::goes_without_soon(waits, soon) } else { waits }))
            }
            Verdict::Refuse(reason) => Ok(VolumeState::Failed(why(reason))),
        }
    }

    /// Gives the volume to the engine that serves volumes without a cache; `lacked` says why it
    /// does not have the one that it should have.
    fn serve_without(
        &mut self,
        index: usize,
        device: &str,
        superblock: &BackingSuperblock,
        lacked: Option<Failure>,
    ) -> Result<VolumeState, OpenError> {
        let (none, engine) = match self.engine_of_none(superblock.block_sectors()) {
            Ok(found) => found,
            Err(UnservedReason::Waiting(failure)) => return Ok(VolumeState::Waiting(failure)),
            Err(UnservedReason::Failed(failure)) => return Ok(VolumeState::Failed(failure)),
        };
        let state = self.give_to(index, device, (none, engine, ServeMode::Uncached))?;
        if let (Some(lacked), VolumeState::Attaching) = (lacked, &state) {
            let name = self.shared().table.volumes[index].display_name().to_owned();
            tracing::warn!(
                event = "volume-without-cache",
                "volume {name} is served without its cache, and its data there is no longer valid: {lacked}"
            );
        }
        Ok(state)
    }

    /// Opens the device and gives it to an engine.
    fn give_to(
        &mut self,
        index: usize,
        device: &str,
        (cache, engine, serve_mode): (usize, Engine, ServeMode),
    ) -> Result<VolumeState, OpenError> {
        let backing = self.slow_backings.open(device, devices::open_backing)?;
        let mut shared = self.shared();
        shared.table.name_volume(index, &backing.superblock, cache);
        let entry = &mut shared.table.volumes[index];
        let (mode, owes) = (entry.options.configured_mode(), entry.owes);
        (entry.opened, entry.absent) = (Some(backing.device.presence()), None);
        entry.told = entry.options.volume_options(quiet_hours::local_minute);
        let sender = self.sender.clone();
        let added =
            move |result| drop(sender.send(Event::Volume(index, VolumeEvent::Added(Box::new(result)))));
        let adding = AddRequest { device: backing.device, mode, options: entry.told, serve_mode, owes };
        engine.add_backing(adding, Box::new(added));
        Ok(VolumeState::Attaching)
    }

    fn look(&mut self, index: usize, device: &str) -> Result<BackingSuperblock, OpenError> {
        let superblock = self.slow_looks.open(device, devices::look_at_backing)?;
        let entry = &mut self.shared().table.volumes[index];
        (entry.uuid, entry.label) = (Some(superblock.uuid()), Some(superblock.label()));
        entry.kept_state = Some(superblock.state());
        (entry.kept_mode, entry.data_offset) =
            (Some(superblock.cache_mode()), Some(superblock.data_offset()));
        Ok(superblock)
    }

    /// Handles an engine's answer: it has attached a volume, or says why not.
    pub fn volume_added(&self, index: usize, result: Result<AddedVolume, Error>) {
        let AddedVolume { volume, cut_short } = match result {
            Ok(added) => added,
            Err(error) => {
                let failure = self.shared().table.volumes[index].not_attached(&error);
                let state = self.volume_refused(index, failure);
                return self.shared().table.set_volume(index, state);
            }
        };
        let entry = self.shared().table.volume_added(index, volume);
        if cut_short {
            let (name, device) = (entry.display_name(), entry.backing.as_deref().unwrap_or_default());
            tracing::warn!(
                event = "volume-cut-short",
                "volume {name}: the cache has data beyond the end of {device}: was the device cut short? The volume \
                 is served with the device's present size"
            );
        }
        self.export(&entry);
        self.settle_volume(index);
    }
}

impl VolumeEntry {
    /// The failure for a volume that an engine has not attached.
    fn not_attached(&self, error: &Error) -> Failure {
        // Two devices have one UUID: the volume's names may stand for either, only the path for
        // this one.
        let path = self.backing.as_ref().filter(|_| matches!(error, Error::Duplicate));
        let name = path.or(self.name.as_ref()).map_or("", String::as_str);
        engine_error::of_attach(name, error)
    }
}
