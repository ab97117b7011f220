//! Backing devices that go away while they are served and come back as another device, because of a
//! cable, a bus reset or a SAN.
//!
//! The old open device never works again. While it fails, a replacement is looked for, as at a
//! start: where the configuration says, or, once the system no longer has the device, anywhere by
//! its UUID. Meanwhile requests that need the device wait in the engine, or fail, as
//! `on_backing_error` says; those that need only the cache continue. When a replacement appears,
//! the engine closes the old device and takes the new one, and the waiting requests continue. A
//! device that fails but is not gone is never looked for by its UUID: another device with that UUID
//! is a copy.

use crate::engine_error;
use crate::engine_thread::ReconnectError;
use crate::supervisor::devices::open_timeout::{OpenError, PendingOpens};
use crate::supervisor::options::Completion;
use crate::supervisor::table::{CacheEntry, VolumeEntry, VolumeState};
use crate::supervisor::volumes::VolumeEvent;
use crate::supervisor::{Event, RETRY, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_engine::{DiskHealth, Error, Status, VolumeInfo};
use bcached_offline::devices::{self, BackingDevice, Reconnection};
use bcached_uring::DevicePresence;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The longest pause before a device that was not taken up is tried again.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Backing devices that fail.
#[derive(Default)]
pub struct BackingReconnects {
    /// Those that are looked for, by volume.
    absent: BTreeMap<usize, RetryState>,
    /// Those that their engines are about to take up.
    returning: BTreeMap<usize, ReturningDevice>,
    /// Looks that hang.
    slow: PendingOpens<Reconnection<BackingDevice>>,
}

/// The retry state of a device that is looked for.
#[derive(Clone)]
pub struct RetryState {
    /// When it is looked for next.
    next: Instant,
    pause: Duration,
    /// The log has reported that it is gone.
    is_gone: bool,
    /// Why it is not taken up, as last reported in the log.
    told: Option<Failure>,
}

impl RetryState {
    /// Starts looking now.
    pub fn since_now() -> Self {
        Self { next: Instant::now(), pause: RETRY, is_gone: false, told: None }
    }

    /// Marks it as gone; returns true the first time.
    pub fn goes(&mut self) -> bool {
        let is_first = !std::mem::replace(&mut self.is_gone, true);
        if is_first {
            // Earlier reports have to be repeated.
            self.told = None;
        }
        is_first
    }

    /// Returns true if it is to be looked for now; the next look is then due after a pause.
    pub fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.next <= now;
        if is_due {
            self.next = now + self.pause;
        }
        is_due
    }

    /// Makes the next look due at once.
    pub fn soon(&mut self) {
        self.next = Instant::now();
    }

    /// Records that there is no device to take up. Returns true if there was one before that was
    /// not taken up.
    pub fn is_away(&mut self) -> bool {
        let is_news = self.told.take().is_some();
        if is_news {
            self.pause = RETRY;
        }
        is_news
    }

    /// Records that it was not taken up, and backs off. Returns true if the reason is news for the
    /// log.
    pub fn refused(&mut self, failure: &Failure) -> bool {
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.next = Instant::now() + self.pause;
        self.tells(failure)
    }

    /// Records why it is missing or not taken up. Returns true if that is news for the log.
    pub fn tells(&mut self, failure: &Failure) -> bool {
        let is_news = self.told.as_ref() != Some(failure);
        if is_news {
            self.told = Some(failure.clone());
        }
        is_news
    }
}

struct ReturningDevice {
    served: Box<VolumeInfo>,
    presence: DevicePresence,
    path: PathBuf,
}

impl BackingReconnects {
    /// Returns true if there is something to check soon.
    pub fn is_busy(&self) -> bool {
        !self.absent.is_empty() || !self.returning.is_empty()
    }
}

/// Returns true if no operation has succeeded since the last failure.
pub fn fails(health: &DiskHealth) -> bool {
    health.last_error.is_some() && health.successes_since == 0
}

impl Supervisor {
    /// Looks for the backing devices of this cache's volumes that are gone or fail.
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
                if self.backing_reconnects.absent.remove(&volume).is_some() {
                    self.shared().table.volumes[volume].absent = None;
                }
            } else if health.waiting == 0 {
                // Only if nothing is pending: a pending request may still complete, and clients of
                // the volume would wait for that.
                self.look_for(volume, &entry, known, is_gone);
            }
        }
    }

    fn look_for(&mut self, volume: usize, entry: &VolumeEntry, known: DevicePresence, is_gone: bool) {
        let (Some(device), Some(uuid)) = (&entry.backing, entry.uuid) else { return };
        let absent = self.backing_reconnects.absent.entry(volume).or_insert_with(RetryState::since_now);
        let gone = format!(
            "{device} is gone: the system no longer has it; it is used again when a device with its UUID appears"
        );
        if is_gone && absent.goes() {
            tracing::error!(event = "device-gone", "volume {}: {gone}", entry.display_name());
            self.shared().table.volumes[volume].absent = Some(gone.as_str().into());
        }
        if !self.backing_reconnects.absent.get_mut(&volume).is_some_and(RetryState::is_due) {
            return;
        }
        let found = self
            .backing_reconnects
            .slow
            .open(device, move |device| devices::open_returned(device, uuid, known));
        match found {
            Ok(Reconnection::Reopened(backing)) => self.begin_return(volume, backing),
            Ok(Reconnection::Rejected(failure)) => self.not_taken(volume, failure, RetryState::tells),
            Err(OpenError::NoAnswer(_)) => {}
            Err(OpenError::Failed(failure)) if failure.kind != Kind::NotFound => {
                self.not_taken(volume, failure, RetryState::refused);
            }
            Ok(Reconnection::Missing) | Err(OpenError::Failed(_)) => {
                if self.backing_reconnects.absent.get_mut(&volume).is_some_and(RetryState::is_away) {
                    self.shared().table.volumes[volume].absent = is_gone.then(|| gone.into());
                }
            }
        }
    }

    /// Gives the device to the volume's engine, which takes it up once all requests in flight of
    /// the volume have completed. New requests wait in the engine.
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
            // Nothing is begun with the volume meanwhile.
            shared.table.volumes[volume].state = VolumeState::Attaching;
            found
        };
        let device = backing.device;
        let (presence, path) = (device.presence(), device.path().to_owned());
        let id = served.id;
        self.backing_reconnects.returning.insert(volume, ReturningDevice { served, presence, path });
        let sender = self.sender.clone();
        let answer =
            move |taken| drop(sender.send(Event::Volume(volume, VolumeEvent::Returned(Box::new(taken)))));
        engine.take_back(id, device, Box::new(answer));
    }

    /// Handles the engine's answer: it has taken the device up, or says why not. The next flush of
    /// a client reports a loss.
    pub fn returned(&mut self, volume: usize, taken: Result<Option<Error>, ReconnectError>) {
        let Some(ReturningDevice { served, presence, path, .. }) =
            self.backing_reconnects.returning.remove(&volume)
        else {
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
            Err(ReconnectError::Refused(error)) => {
                self.not_taken(volume, engine_error::of_return(name, &path, error), RetryState::refused);
            }
            Err(ReconnectError::Busy(limit)) => {
                let why = format!("its requests in flight have not completed for {} s", limit.as_secs());
                let failure = engine_error::not_taken_up(name, &path).why(why);
                self.not_taken(volume, failure, RetryState::refused);
            }
            Ok(lost) => {
                self.backing_reconnects.absent.remove(&volume);
                // The log has reported nothing of this device yet.
                entry.backing.as_ref().map(|device| self.said.remove(device));
                let path = path.display();
                tracing::info!(event = "device-returned", "volume {name}: its device is back as {path}");
                if let Some(error) = lost {
                    tracing::error!(
                        event = "flush-failed",
                        "{name}: writes that its clients have not flushed may be lost: {error}"
                    );
                }
            }
        }
        self.publish(&entry);
        // A cache mode may have been requested while the device was being exchanged.
        self.apply_cache_mode(volume, Completion::nobody());
    }

    /// Forgets volumes that are no longer served, also because their engine has ended.
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
        self.backing_reconnects.absent.retain(|volume, _| is(volume).0);
        self.backing_reconnects.returning.retain(|volume, _| is(volume).1);
    }

    /// Records and logs why a device was not taken up; `note` is [`RetryState::refused`] if it
    /// backs off.
    fn not_taken(&mut self, volume: usize, failure: Failure, note: fn(&mut RetryState, &Failure) -> bool) {
        let Some(absent) = self.backing_reconnects.absent.get_mut(&volume) else { return };
        if !note(absent, &failure) {
            return;
        }
        let entry = &mut self.shared().table.volumes[volume];
        tracing::error!(event = "device-not-taken", "volume {}: {failure}", entry.display_name());
        entry.absent = Some(failure.to_string().into());
    }
}
