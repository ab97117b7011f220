//! Backing devices that go away while they are served, and come back as another device: a cable, a bus that was reset, a SAN.
//!
//! What is open never works again. While it fails its like is looked for, as at a start: where the configuration says, or, once the system
//! has it no more, anywhere by its UUID. Requests that need it wait for it in the engine, or fail, as `on_backing_error` says; those that
//! need only the cache go on. When it is there the engine lets go of the old device and has the new one, and who waited goes on. A device that is ill and not gone is never looked for by its UUID: what else carries that is a copy.

use crate::engine_error;
use crate::engine_thread::NotTaken;
use crate::supervisor::devices::open_timeout::{Patience, Unopened};
use crate::supervisor::options::Done;
use crate::supervisor::table::{CacheEntry, VolumeEntry, VolumeState};
use crate::supervisor::{Event, RETRY, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_engine::{DiskHealth, Error, Status, VolumeInfo};
use bcached_offline::devices::{self, BackingDevice, Found};
use bcached_uring::Presence;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a device that was not taken up is left alone at most.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What the loop knows of backing devices that fail.
#[derive(Default)]
pub struct Returns {
    /// By volume, those that are looked for.
    absent: BTreeMap<usize, Absent>,
    /// Those that their engines are about to take up.
    returning: BTreeMap<usize, Returning>,
    /// Looks that hang.
    slow: Patience<Found<BackingDevice>>,
}

/// A device that is looked for.
#[derive(Clone)]
pub struct Absent {
    /// When it is looked for next.
    next: Instant,
    pause: Duration,
    /// The log has said that it is gone.
    is_gone: bool,
    /// Why it is not taken up, as the log was told.
    told: Option<Failure>,
}

impl Absent {
    /// From now on.
    pub fn since_now() -> Self {
        Self { next: Instant::now(), pause: RETRY, is_gone: false, told: None }
    }

    /// True for the first who says that it is gone.
    pub fn goes(&mut self) -> bool {
        let is_first = !std::mem::replace(&mut self.is_gone, true);
        if is_first {
            // Whatever was told of it before has to be told again.
            self.told = None;
        }
        is_first
    }

    /// Whether it is to be looked for now; if so, next after a pause.
    pub fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.next <= now;
        if is_due {
            self.next = now + self.pause;
        }
        is_due
    }

    /// It is looked for as soon as somebody can.
    pub fn soon(&mut self) {
        self.next = Instant::now();
    }

    /// Nothing is there that could be taken up; true if something was that was not.
    pub fn is_away(&mut self) -> bool {
        let is_news = self.told.take().is_some();
        if is_news {
            self.pause = RETRY;
        }
        is_news
    }

    /// It was not taken up, and is left alone for a while; true if that is news for the log.
    pub fn refused(&mut self, failure: &Failure) -> bool {
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.next = Instant::now() + self.pause;
        self.tells(failure)
    }

    /// Why it is not there, or not taken up; true if that is news for the log.
    pub fn tells(&mut self, failure: &Failure) -> bool {
        let is_news = self.told.as_ref() != Some(failure);
        if is_news {
            self.told = Some(failure.clone());
        }
        is_news
    }
}

struct Returning {
    served: Box<VolumeInfo>,
    presence: Presence,
    path: PathBuf,
}

impl Returns {
    /// There is something to look at soon.
    pub fn is_busy(&self) -> bool {
        !self.absent.is_empty() || !self.returning.is_empty()
    }
}

/// Nothing has succeeded since it failed last.
pub fn fails(health: &DiskHealth) -> bool {
    health.last_error.is_some() && health.successes_since == 0
}

impl Supervisor {
    /// Looks for the backing devices of the volumes of this cache that are gone, or fail.
    pub fn look_for_absent(&mut self, cache: usize, status: &Status) {
        let served: Vec<_> = {
            let shared = self.shared();
            let all = shared.table.volumes.iter().enumerate();
            let is_idle = |(volume, entry): &(usize, &VolumeEntry)| {
                entry.cache == Some(cache) && shared.jobs.running(*volume).is_none()
            };
            all.filter(is_idle).map(|(volume, entry)| (volume, entry.clone())).collect()
        };
        for (volume, entry) in served {
            let (Some(known), VolumeState::Served(info)) = (entry.opened, &entry.state) else { continue };
            let now = status.volumes.iter().find(|now| now.id == info.id);
            let Some(health) = now.and_then(|now| now.backing_health) else { continue };
            let is_gone = known.is_gone();
            if !is_gone && !fails(&health) {
                if self.returns.absent.remove(&volume).is_some() {
                    self.shared().table.volumes[volume].absent = None;
                }
            } else if health.waiting == 0 {
                // What it has not answered yet it may still do, and who uses the volume would wait for that.
                self.look_for(volume, &entry, known, is_gone);
            }
        }
    }

    fn look_for(&mut self, volume: usize, entry: &VolumeEntry, known: Presence, is_gone: bool) {
        let (Some(device), Some(uuid)) = (&entry.backing, entry.uuid) else { return };
        let absent = self.returns.absent.entry(volume).or_insert_with(Absent::since_now);
        let gone = format!(
            "{device} is gone: the system has it no more; it is taken up again when a device with its UUID comes"
        );
        if is_gone && absent.goes() {
            tracing::error!(event = "device-gone", "volume {}: {gone}", entry.display_name());
            self.shared().table.volumes[volume].absent = Some(gone.as_str().into());
        }
        if !self.returns.absent.get_mut(&volume).is_some_and(Absent::is_due) {
            return;
        }
        let found = self.returns.slow.open(device, move |device| devices::open_returned(device, uuid, known));
        match found {
            Ok(Found::Back(backing)) => self.begin_return(volume, backing),
            Ok(Found::Another(failure)) => self.not_taken(volume, failure, Absent::tells),
            Err(Unopened::Hangs(_)) => {}
            Err(Unopened::Failed(failure)) if failure.kind != Kind::NotFound => {
                self.not_taken(volume, failure, Absent::refused);
            }
            Ok(Found::Nothing) | Err(Unopened::Failed(_)) => {
                if self.returns.absent.get_mut(&volume).is_some_and(Absent::is_away) {
                    self.shared().table.volumes[volume].absent = is_gone.then(|| gone.into());
                }
            }
        }
    }

    /// Its engine has it, when all that it was asked of the volume has ended; what is asked from now on waits there.
    fn begin_return(&mut self, volume: usize, backing: BackingDevice) {
        let (engine, served) = {
            let mut shared = self.shared();
            let entry = &shared.table.volumes[volume];
            let cache = entry.cache.and_then(|cache| shared.table.caches.get(cache));
            let (Some(engine), VolumeState::Served(served)) =
                (cache.and_then(CacheEntry::engine), &entry.state)
            else {
                return;
            };
            let found = (engine, served.clone());
            // Nobody begins anything with it meanwhile.
            shared.table.volumes[volume].state = VolumeState::Attaching;
            found
        };
        let device = backing.device;
        let (presence, path) = (device.presence(), device.path().to_owned());
        let id = served.id;
        self.returns.returning.insert(volume, Returning { served, presence, path });
        let sender = self.sender.clone();
        let answer = move |taken| drop(sender.send(Event::Returned(volume, Box::new(taken))));
        engine.take_back(id, device, Box::new(answer));
    }

    /// Its engine has taken it up, or says why not. What is lost is what the next flush of a client says.
    pub fn returned(&mut self, volume: usize, taken: Result<Option<Error>, NotTaken>) {
        let Some(Returning { served, presence, path, .. }) = self.returns.returning.remove(&volume) else {
            return;
        };
        let entry = {
            let entry = &mut self.shared().table.volumes[volume];
            entry.state = VolumeState::Served(served);
            if taken.is_ok() {
                (entry.opened, entry.absent) = (Some(presence), None);
            }
            entry.clone()
        };
        let name = entry.display_name();
        match &taken {
            Err(NotTaken::Refused(error)) => {
                self.not_taken(volume, engine_error::of_return(name, &path, error), Absent::refused);
            }
            Err(NotTaken::Busy(limit)) => {
                let why = format!("requests of it have not ended for {} s", limit.as_secs());
                let failure = engine_error::not_taken_up(name, &path).why(why);
                self.not_taken(volume, failure, Absent::refused);
            }
            Ok(lost) => {
                self.returns.absent.remove(&volume);
                // The log knows nothing of this one yet.
                entry.backing.as_ref().map(|device| self.said.remove(device));
                let path = path.display();
                tracing::info!(event = "device-returned", "volume {name}: its device is back as {path}");
                if let Some(error) = lost {
                    tracing::error!(
                        event = "flush-failed",
                        "{name}: what was not flushed by who wrote it may be lost: {error}"
                    );
                }
            }
        }
        self.publish(&entry);
        // It may have been said while the device was being exchanged.
        self.apply_cache_mode(volume, Done::nobody());
    }

    /// Forgets those that are served no more, also because their engine has ended.
    pub fn look_after_returns(&mut self) {
        let states: Vec<_> = {
            let state = |entry: &VolumeEntry| match entry.state {
                VolumeState::Served(_) => (true, false),
                VolumeState::Attaching => (true, true),
                _ => (false, false),
            };
            self.shared().table.volumes.iter().map(state).collect()
        };
        let is = |volume: &usize| states.get(*volume).copied().unwrap_or_default();
        self.returns.absent.retain(|volume, _| is(volume).0);
        self.returns.returning.retain(|volume, _| is(volume).1);
    }

    /// Why not; `note` is [`Absent::refused`] if it is left alone for a while.
    fn not_taken(&mut self, volume: usize, failure: Failure, note: fn(&mut Absent, &Failure) -> bool) {
        let Some(absent) = self.returns.absent.get_mut(&volume) else { return };
        if !note(absent, &failure) {
            return;
        }
        let entry = &mut self.shared().table.volumes[volume];
        tracing::error!(event = "device-not-taken", "volume {}: {failure}", entry.display_name());
        entry.absent = Some(failure.to_string().into());
    }
}
