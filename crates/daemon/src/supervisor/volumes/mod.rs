//! Volumes: from a name to a backing device that an engine serves.

pub mod cacheless;
pub mod early_clients;
pub mod explain;
pub mod exports;
pub mod label;
pub mod next_step;
pub mod numbering;
pub mod reconnect;
pub mod rejoin;

use crate::engine_error;
use crate::engine_thread::{Added, Adding, Engine, Way};
use crate::supervisor::devices::open_timeout::Unopened;
use crate::supervisor::report::reasons;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor};
use bcached_config::NO_CACHE;
use bcached_config::options::quiet_hours;
use bcached_control::failure::{Failure, Kind};
use bcached_engine::Error;
use bcached_format::{BackingState, BackingSuperblock};
use bcached_offline::devices;
use next_step::{Step, Unserved};
use reconnect::Absent;

impl Supervisor {
    /// Takes the volume's next step: gives its device to an engine, or finds out what it waits for.
    pub fn try_volume(&mut self, index: usize) {
        let Some((device, step)) = self.shared().table.next_step(index) else { return };
        if !self.shared().table.volumes[index].is_due() {
            return;
        }
        let found = match step {
            Step::Open(cache) => self.open_volume(index, &device, cache),
            Step::Look(cache, reason) => self.without_cache(index, &device, &cache, &reason),
        };
        let state = match found {
            Ok(state) => {
                if !matches!(state, VolumeState::Attaching) {
                    // Its device answers: it waits for something else.
                    self.shared().table.volumes[index].again = None;
                }
                state
            }
            Err(Unopened::Failed(failure)) => self.volume_refused(index, failure),
            Err(Unopened::Hangs(failure)) => {
                self.shared().table.volumes[index].again.iter_mut().for_each(Absent::soon);
                VolumeState::Waiting(failure)
            }
        };
        self.shared().table.set_volume(index, state);
    }

    fn open_volume(
        &mut self,
        index: usize,
        device: &str,
        cache: Option<usize>,
    ) -> Result<VolumeState, Unopened> {
        // Opened only when an engine takes it: each close after an opening for writing wakes up
        // udev.
        let superblock = self.look(index, device)?;
        match self.engine_for(index, cache, &superblock) {
            Ok(server) => self.give_to(index, device, &superblock, server),
            Err(Unserved::Waits(failure)) => Ok(VolumeState::Waiting(failure)),
            Err(Unserved::Missing(failure)) => {
                self.lacks(index, device, None, (&superblock, &failure, failure.clone()))
            }
            Err(Unserved::Failed(failure)) => Ok(VolumeState::Failed(failure)),
        }
    }

    /// Handles a volume whose cache, with this name, is unavailable for this reason.
    fn without_cache(
        &mut self,
        index: usize,
        device: &str,
        cache: &str,
        reason: &Failure,
    ) -> Result<VolumeState, Unopened> {
        let superblock = self.look(index, device)?;
        let waits = match reason.kind {
            Kind::Damaged => reasons::cache_damaged(&superblock, cache, reason),
            Kind::NotBcache => reasons::cache_has_no_superblock(&superblock, reason),
            _ => reasons::cache_waits(&superblock, Some(cache), reason),
        };
        self.lacks(index, device, Some(cache), (&superblock, reason, waits))
    }

    /// Handles a volume whose cache is missing: it waits for the cache, or is served without it.
    fn lacks(
        &mut self,
        index: usize,
        device: &str,
        cache: Option<&str>,
        (superblock, reason, waits): (&BackingSuperblock, &Failure, Failure),
    ) -> Result<VolumeState, Unopened> {
        if !self.goes_without(index, cache, superblock, reason) {
            if matches!(reason.kind, Kind::Damaged | Kind::NotBcache) {
                return Ok(VolumeState::Failed(waits));
            }
            let (lacks, wait) = {
                let entry = &self.shared().table.volumes[index];
                (entry.lack.is_some(), entry.wait)
            };
            let waits = if lacks { reasons::goes_without_soon(waits, wait) } else { waits };
            return Ok(VolumeState::Waiting(waits));
        }
        match self.engine_of_none(superblock.block_sectors()) {
            Ok((none, engine)) => {
                let state = self.give_to(index, device, superblock, (none, engine, true))?;
                if matches!(state, VolumeState::Attaching) {
                    let name = self.shared().table.volumes[index].display_name().to_owned();
                    tracing::warn!(
                        event = "volume-without-cache",
                        "volume {name}: it is served without its cache, and what that holds of it is void: {waits}"
                    );
                }
                Ok(state)
            }
            Err(Unserved::Waits(failure) | Unserved::Missing(failure)) => Ok(VolumeState::Waiting(failure)),
            Err(Unserved::Failed(failure)) => Ok(VolumeState::Failed(failure)),
        }
    }

    /// Opens the device and gives it to an engine.
    fn give_to(
        &mut self,
        index: usize,
        device: &str,
        superblock: &BackingSuperblock,
        (cache, engine, is_uncached): (usize, Engine, bool),
    ) -> Result<VolumeState, Unopened> {
        let backing = self.slow_backings.open(device, devices::open_backing)?;
        let mut shared = self.shared();
        shared.table.name_volume(index, &backing.superblock, cache);
        let is_meant = shared.table.is_to_be_on(index, cache);
        let entry = &mut shared.table.volumes[index];
        let (mode, owes) = (entry.options.configured_mode(), entry.owes);
        (entry.opened, entry.absent) = (Some(backing.device.presence()), None);
        entry.told = entry.options.volume_options(quiet_hours::local_minute);
        let sender = self.sender.clone();
        let added = move |result| drop(sender.send(Event::VolumeAdded(index, Box::new(result))));
        let way = match is_uncached {
            true => Way::Uncached,
            // Its data in another set is invalid, and it is to belong to this set.
            false if superblock.state() == BackingState::Stale && is_meant => Way::Adopted,
            false => Way::Cached,
        };
        let adding = Adding { device: backing.device, mode, options: entry.told, way, owes };
        engine.add_backing(adding, Box::new(added));
        Ok(VolumeState::Attaching)
    }

    /// The engine of a volume's cache, or the one that serves it without a cache (true).
    fn engine_for(
        &self,
        index: usize,
        cache: Option<usize>,
        superblock: &BackingSuperblock,
    ) -> Result<(usize, Engine, bool), Unserved> {
        let (is_said, is_alone) = {
            let shared = self.shared();
            let is_said = shared.table.volumes[index].wanted_cache.as_deref() == Some(NO_CACHE);
            (is_said, shared.table.real_caches().next().is_none())
        };
        let without = || {
            let (index, engine) = self.engine_of_none(superblock.block_sectors())?;
            Ok((index, engine, true))
        };
        let has_none = matches!(superblock.state(), BackingState::None | BackingState::Stale);
        if has_none && (is_said || is_alone) {
            return without();
        }
        let found = self.shared().table.engine_for(cache, superblock);
        match found {
            Ok((index, engine)) => Ok((index, engine, false)),
            // Its cache is not served here, and everything in it is on the backing device, too.
            Err(Unserved::Failed(_)) if is_said && superblock.state() == BackingState::Clean => without(),
            Err(reason) => Err(reason),
        }
    }

    fn look(&mut self, index: usize, device: &str) -> Result<BackingSuperblock, Unopened> {
        let superblock = self.slow_looks.open(device, devices::look_at_backing)?;
        let entry = &mut self.shared().table.volumes[index];
        (entry.uuid, entry.label) = (Some(superblock.uuid()), Some(superblock.label()));
        entry.kept_state = Some(superblock.state());
        (entry.kept_mode, entry.data_offset) =
            (Some(superblock.cache_mode()), Some(superblock.data_offset()));
        Ok(superblock)
    }

    /// Handles an engine's answer: it has attached a volume, or says why not.
    pub fn volume_added(&self, index: usize, result: Result<Added, Error>) {
        let Added { volume, cut_short } = match result {
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
                "volume {name}: data of it is cached behind the end of {device}: was that cut short? It is served as \
                 long as it is now"
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
