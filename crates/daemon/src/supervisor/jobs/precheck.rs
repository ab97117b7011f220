//! Checks for a job that need files and devices, on the thread of the caller.
//!
//! The caller's thread looks at them for a limited time before it asks the loop. A device that
//! hangs therefore delays no other request. The loop decides with what was seen, and refuses what
//! is no longer true.

use crate::supervisor::devices::probe::PendingProbes;
use crate::supervisor::jobs::JobRequest;
use crate::supervisor::jobs::import::ImportableSet;
use crate::supervisor::options::owner::{CacheFilter, resolve_cache};
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::{Event, Shared};
use bcached_config::{Config, NO_CACHE, ReleasedCache};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::names::{self, TypedName};
use bcached_format::{Superblock, Uuid};
use bcached_offline::devices;
use bcached_offline::lost_sets::DirtyVolume;
use bcached_uring::DevicePresence;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time a caller waits until its job has begun: less than the client waits for an answer.
const LIMIT: Duration = Duration::from_secs(8);

/// The part of [`LIMIT`] that a look at a device may take.
const LOOK_LIMIT: Duration = Duration::from_secs(4);

/// What was looked at for the loop.
pub enum DeviceCheck {
    /// Nothing, and nothing has to be.
    Nothing,
    /// Nothing yet: the loop says what to look at, and does nothing.
    NotYet,
    /// This backing device, which can be used.
    Backing(String),
    /// A set that is to be imported.
    Set(Box<ImportableSet>),
}

/// One request for a job, with its deadline.
pub struct PendingRequest<'a> {
    shared: &'a Mutex<Shared>,
    events: &'a Sender<Event>,
    probes: &'a PendingProbes,
    uid: Option<u32>,
    until: Instant,
}

impl<'a> PendingRequest<'a> {
    /// Starts the deadline now.
    pub fn new(
        shared: &'a Mutex<Shared>,
        events: &'a Sender<Event>,
        probes: &'a PendingProbes,
        uid: Option<u32>,
    ) -> Self {
        Self { shared, events, probes, uid, until: Instant::now() + LIMIT }
    }

    /// Looks at the devices and files that the request needs, and has the job begun.
    pub fn begin(&self, volume: Option<usize>, begin: JobSpec) -> Result<JobReport, Failure> {
        let begin = self.with_names(begin)?;
        match begin.verb {
            JobKind::Add if begin.size_bytes.is_none() => self.add(&begin),
            JobKind::Import => self.import(&begin),
            JobKind::Remove | JobKind::Stop => {
                if let Some(volume) = volume {
                    self.look_for_dirty(volume);
                }
                self.ask(volume, &begin, DeviceCheck::Nothing)
            }
            _ => self.ask(volume, &begin, DeviceCheck::Nothing),
        }
    }

    fn add(&self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let planned = self.ask(None, begin, DeviceCheck::NotYet)?;
        if planned.state == JobState::Done {
            return Ok(planned);
        }
        let Some(backing) = planned.devices.into_iter().next() else {
            return self.ask(None, begin, DeviceCheck::Nothing);
        };
        let (device, others) = (backing.clone(), self.others(&begin.volume));
        let look = move || {
            let (superblock, presence) = devices::look_where_backing(&device)?;
            others.iter().try_for_each(|other| other.check_not(&device, &presence, superblock.uuid()))
        };
        self.look(begin, &backing, look)?;
        self.ask(None, begin, DeviceCheck::Backing(backing))
    }

    /// Records what the device of a volume that no engine has says about the newest data. A device
    /// that does not answer leaves this unknown.
    fn look_for_dirty(&self, volume: usize) {
        let found = {
            let shared = self.lock();
            let entry = shared.table.volumes.get(volume);
            let is_unserved = |entry: &&VolumeEntry| {
                matches!(entry.state, VolumeState::Waiting(_) | VolumeState::Failed(_) | VolumeState::Stopped)
            };
            let entry = entry.filter(is_unserved);
            entry.and_then(|entry| Some((entry.display_name().to_owned(), entry.backing.clone()?)))
        };
        let Some((name, device)) = found else { return };
        let looked_at = device.clone();
        let until = self.until.min(Instant::now() + LOOK_LIMIT);
        let superblock = self.probes.look(&device, until, move || devices::look_at_backing(&looked_at)).ok();
        let stranded = superblock.map(|superblock| DirtyVolume::of(&name, &device, &superblock));
        let mut shared = self.lock();
        if let Some(entry) =
            shared.table.volumes.get_mut(volume).filter(|entry| entry.backing == Some(device))
        {
            entry.stranded = stranded;
        }
    }

    /// Returns the volumes of other names that have devices.
    fn others(&self, name: &str) -> Vec<OtherVolume> {
        let shared = self.lock();
        let has_one = |entry: &&VolumeEntry| entry.display_name() != name && !entry.is_removed();
        let other = |entry: &VolumeEntry| {
            let is_served = matches!(entry.state, VolumeState::Served(_) | VolumeState::Attaching);
            let is_waiting = matches!(entry.state, VolumeState::Waiting(_));
            Some(OtherVolume {
                name: entry.display_name().to_owned(),
                backing: entry.backing.clone()?,
                opened: entry.opened.filter(|_| is_served),
                uuid: entry.uuid.filter(|_| is_served || is_waiting),
            })
        };
        shared.table.volumes.iter().filter(has_one).filter_map(other).collect()
    }

    fn import(&self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let config = self.config();
        let (typed, all) = (begin.volume.clone(), begin.devices.clone());
        let seen = self.look(begin, &begin.volume, move || ImportableSet::look(config, &typed, &all))?;
        self.ask(None, begin, DeviceCheck::Set(Box::new(seen)))
    }

    /// Replaces the caches' names in the request, however they were typed, by their display names.
    fn with_names(&self, mut begin: JobSpec) -> Result<JobSpec, Failure> {
        let name = |typed: &str| {
            let index = resolve_cache(self.shared, TypedName::by_owner(typed), CacheFilter::Permanent)?;
            Ok(self.lock().table.caches[index].display_name().to_owned())
        };
        // An added volume may be meant to have no cache.
        let is_some = |cache: &String| begin.verb != JobKind::Add || cache != NO_CACHE;
        if let Some(typed) = begin.cache.clone().filter(is_some) {
            begin.cache = Some(name(&typed).map_err(|failure: Failure| failure.option("--cache"))?);
        }
        if matches!(begin.verb, JobKind::Release | JobKind::Import) {
            match name(&begin.volume) {
                Ok(name) => begin.volume = name,
                Err(failure) if failure.kind != Kind::UnknownName => return Err(failure),
                Err(_) if begin.verb == JobKind::Release => {
                    // It may have been released before.
                    let (config, typed) = (self.config(), begin.volume.clone());
                    let look = move || Ok(released_called(&config, &typed).map(|found| found.name.clone()));
                    begin.volume = self.look(&begin, &begin.volume, look)?.unwrap_or(begin.volume);
                }
                Err(_) => {}
            }
        }
        Ok(begin)
    }

    /// Returns what a look at the device `name` finds, if it ends in time.
    fn look<T: Send + 'static>(
        &self,
        begin: &JobSpec,
        name: &str,
        look: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let found = self.probes.look(name, self.until.min(Instant::now() + LOOK_LIMIT), look);
        if let Err(failure) = &found {
            let uid = self.uid.map_or_else(|| "unknown".to_owned(), |uid| uid.to_string());
            tracing::info!(event = "job-refused", uid, "{} {}: {failure}", begin.verb, begin.volume);
        }
        found
    }

    /// Sends the request to the loop and waits for the answer.
    fn ask(
        &self,
        volume: Option<usize>,
        begin: &JobSpec,
        device_check: DeviceCheck,
    ) -> Result<JobReport, Failure> {
        let (answer, answered) = mpsc::channel();
        let asked = JobRequest { volume, begin: begin.clone(), uid: self.uid, device_check, answer };
        let _refused_below =
            self.events.send(Event::Request(crate::supervisor::ClientRequest::Begin(Box::new(asked))));
        match answered.recv_timeout(self.until.saturating_duration_since(Instant::now())) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => {
                let (verb, volume, limit) = (begin.verb, &begin.volume, LIMIT.as_secs());
                let what = format!("{verb} of {volume} has not begun within {limit} s");
                Err(crate::supervisor::late(what).next("try again: a job that has begun by then is joined"))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Failure::new(Kind::Io, "nothing was begun")
                .why("the daemon is stopping")
                .next("try again when it has been started again")),
        }
    }

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.lock().config)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A volume whose device must not be added a second time.
struct OtherVolume {
    name: String,
    backing: String,
    /// The identity of that device, while it is served.
    opened: Option<DevicePresence>,
    /// The UUID that was read from the device, while the volume is served or waits.
    uuid: Option<Uuid>,
}

impl OtherVolume {
    /// Checks that `device` is not this volume's device under another name, and that the two do not
    /// carry the same UUID, which no cache could tell apart.
    fn check_not(&self, device: &str, presence: &DevicePresence, uuid: Uuid) -> Result<(), Failure> {
        let cannot = |why: String| Failure::new(Kind::SameDevice, format!("cannot add {device}")).why(why);
        let name = &self.name;
        let is_it = match self.opened {
            Some(opened) => opened.identity() == presence.identity(),
            None => presence.is_at(Path::new(&self.backing)),
        };
        if is_it {
            return Err(is_there(device, &DeviceOwner::Volume(name.clone()), true));
        }
        let named = self.backing.strip_prefix("UUID=").and_then(Uuid::from_text);
        if self.uuid.or(named) == Some(uuid) {
            return Err(cannot(format!("{name} has the same UUID, {uuid}")).next(
                "one is a copy of the other: serve only the one that was in use, never both with one cache",
            ));
        }
        Ok(())
    }
}

/// The present owner of a device.
pub enum DeviceOwner {
    Volume(String),
    Cache(String),
}

/// Returns the failure for a device that cannot be added because it has an owner.
pub fn is_there(device: &str, owner: &DeviceOwner, by_another_name: bool) -> Failure {
    let (kind, whose, next) = match owner {
        DeviceOwner::Volume(name) => (
            Kind::SameDevice,
            name.clone(),
            format!(
                "one device is one volume; to serve it under another name, `bcached remove {name}` first"
            ),
        ),
        DeviceOwner::Cache(name) => {
            (Kind::NotBcache, format!("the cache {name}"), "name a backing device".to_owned())
        }
    };
    let by = if by_another_name { ", by another name" } else { "" };
    Failure::new(kind, format!("cannot add {device}"))
        .why(format!("it is the device of {whose}{by}"))
        .next(next)
}

/// Returns the failure for what has changed since it was looked at.
pub fn meanwhile(what: &str) -> Failure {
    Failure::new(Kind::InUse, what).why("the configuration has just changed").next("try again")
}

/// A device that was looked at.
pub struct ProbedDevice {
    pub presence: DevicePresence,
    pub uuid: Uuid,
}

impl ProbedDevice {
    /// Checks whether `name` in the configuration means this device. Does not open what the name
    /// leads to.
    pub fn is_called(&self, name: &str) -> bool {
        match name.strip_prefix("UUID=") {
            Some(uuid) => Uuid::from_text(uuid) == Some(self.uuid),
            None => self.presence.is_at(Path::new(name)),
        }
    }
}

/// Finds a set that was released here by its name, its set's UUID (or the beginning of that), or
/// one of its devices. Looks at the devices.
pub fn released_called<'a>(config: &'a Config, typed: &str) -> Option<&'a ReleasedCache> {
    let its = |released: &'a ReleasedCache| {
        released.device.iter().chain(released.backings.iter().map(|(_, device)| device))
    };
    let mut all = config.released.iter();
    if let Some(found) =
        all.find(|released| released.name == typed || its(released).any(|device| device == typed))
    {
        return Some(found);
    }
    if typed.starts_with('/') {
        let (superblock, presence) = devices::look_where(typed).ok()?;
        let at = ProbedDevice { presence, uuid: uuid_of(&superblock) };
        return config.released.iter().find(|released| its(released).any(|device| at.is_called(device)));
    }
    let is_set = |released: &&ReleasedCache| {
        let found = released.device.as_deref().map(devices::look);
        matches!(found, Some(Ok(superblock)) if names::is_uuid(typed, &set_of(&superblock).to_string()))
    };
    let is_digits = |text: &str| text.chars().all(|digit| digit.is_ascii_hexdigit() || digit == '-');
    let may_be = is_digits(typed.strip_prefix("UUID=").unwrap_or(typed));
    may_be.then(|| config.released.iter().find(is_set)).flatten()
}

/// Returns the UUID of a device.
pub fn uuid_of(superblock: &Superblock) -> Uuid {
    match superblock {
        Superblock::Cache(superblock) => superblock.uuid(),
        Superblock::Backing(superblock) => superblock.uuid(),
    }
}

/// Returns the UUID of the set that a device says it belongs to.
fn set_of(superblock: &Superblock) -> Uuid {
    match superblock {
        Superblock::Cache(superblock) => superblock.set_uuid(),
        Superblock::Backing(superblock) => superblock.set_uuid(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_uring::{Access, Device};

    /// While its device is looked for, the name `UUID=..` resolves to nothing. Adding the device
    /// under another name must be refused all the same.
    #[test]
    fn the_device_of_a_volume_that_waits_is_known_by_its_uuid() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("device");
        std::fs::write(&path, [0; 4096]).expect("a file");
        let presence = Device::open(&path, Access::Look).expect("it is there").presence();
        let uuid = Uuid([7; 16]);
        let other = OtherVolume {
            name: "tank".to_owned(),
            backing: format!("UUID={uuid}"),
            opened: None,
            uuid: None,
        };
        let refused = other.check_not("/dev/x", &presence, uuid).expect_err("it is tank's");
        assert_eq!(refused.kind, Kind::SameDevice);
        assert!(refused.to_string().contains("tank has the same UUID"), "{refused}");
        other.check_not("/dev/x", &presence, Uuid([8; 16])).expect("another");
    }
}
