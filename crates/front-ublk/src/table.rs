//! The devices of a server. Each has a thread, on which the kernel is waited for, so that no device waits for another; it is told things by
//! messages, and says what has become of the device.

use bcached_port::Export;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What has become of a volume's device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// It is being made, or taken over.
    Coming,
    /// It can be used.
    Here {
        /// The device's.
        path: PathBuf,
        /// How data comes and goes, of a ublk device.
        transfer: Option<Transfer>,
    },
    /// There is none, for this reason; it is tried again.
    Missing(String),
}

impl DeviceState {
    /// Where the device is, if it can be used.
    #[must_use]
    pub fn path(self) -> Option<PathBuf> {
        match self {
            Self::Here { path, .. } => Some(path),
            Self::Coming | Self::Missing(_) => None,
        }
    }

    /// How its data comes and goes, of a ublk device that can be used.
    #[must_use]
    pub const fn transfer(&self) -> Option<Transfer> {
        match self {
            Self::Here { transfer, .. } => *transfer,
            Self::Coming | Self::Missing(_) => None,
        }
    }
}

/// How the data of requests of a ublk device comes and goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// The engine's devices read and write the memory of whoever asked.
    ZeroCopy,
    /// It is copied from there and to there.
    UserCopy,
}

impl Transfer {
    /// As `status` calls it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero copy",
            Self::UserCopy => "user copy",
        }
    }
}

/// Called on a device's thread when its state is about to change: what is done there is done when others see the new one. It must not wait.
pub type News = Arc<dyn Fn(&str, &DeviceState) + Send + Sync>;

/// Called there when it has.
pub type Changed = Arc<dyn Fn() + Send + Sync>;

/// Devices that could not be taken away in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", names.join(", "))]
pub struct StillThere {
    /// Their volumes, and why.
    pub names: Vec<String>,
}

/// Where a thread answers how something went.
pub type Answer<E> = Sender<Result<(), E>>;

/// By volume. Dropped, it says nothing more to the threads: those that have nothing else to wait for end.
pub struct Table<Message> {
    devices: Mutex<BTreeMap<String, Entry<Message>>>,
    news: News,
    changed: Changed,
}

struct Entry<Message> {
    tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
}

/// A device's thread as the table knows it.
pub struct Seat<Message> {
    /// Its volume.
    pub name: String,
    /// Tells it something.
    pub tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
    news: News,
    changed: Changed,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can panic midway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<Message: Send + 'static> Table<Message> {
    /// Without devices.
    #[must_use]
    pub const fn new(news: News, changed: Changed) -> Self {
        Self { devices: Mutex::new(BTreeMap::new()), news, changed }
    }

    /// Tells the thread of the volume's device how it is `served` now; if there is none one begins, called after its `kind`, and lives `life`.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn serve<Served: Send + 'static>(
        &self,
        (kind, export): (&str, &Export),
        served: Served,
        message: impl FnOnce(Served) -> Message,
        life: impl FnOnce(Seat<Message>, Served, &Receiver<Message>) + Send + 'static,
    ) -> std::io::Result<()> {
        let mut devices = lock(&self.devices);
        let name = export.name.clone();
        if let Some(entry) = devices.get(&name) {
            let _told = entry.tell.send(message(served));
            return Ok(());
        }
        let (tell, messages) = channel();
        let state = Arc::new(Mutex::new(DeviceState::Coming));
        let seat = Seat {
            name: name.clone(),
            tell: tell.clone(),
            state: Arc::clone(&state),
            news: Arc::clone(&self.news),
            changed: Arc::clone(&self.changed),
        };
        let builder = thread::Builder::new().name(format!("{kind} {name}"));
        builder.spawn(move || life(seat, served, &messages))?;
        devices.insert(name, Entry { tell, state });
        Ok(())
    }

    /// What has become of a volume's device; `None` if it was never to have one here.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<DeviceState> {
        lock(&self.devices).get(name).map(|entry| lock(&entry.state).clone())
    }

    /// Tells the thread of a volume's device something; `None`: there is none.
    #[must_use]
    pub fn teller(&self, name: &str) -> Option<Sender<Message>> {
        lock(&self.devices).get(name).map(|entry| entry.tell.clone())
    }

    /// Forgets all of them, and tells their threads each its message; what these have for an answer.
    pub fn leave<T>(&self, message: impl Fn() -> (Message, T)) -> Vec<T> {
        let entries = std::mem::take(&mut *lock(&self.devices));
        let left = entries.into_values().map(|entry| {
            let (message, answered) = message();
            let _told = entry.tell.send(message);
            answered
        });
        left.collect()
    }

    /// Forgets these, and has their threads take them away, which is waited for up to `limit`.
    ///
    /// # Errors
    /// Those that are still there, and why; of what is not over then, that it is `late`. They go when they can.
    pub fn remove<E: Display>(
        &self,
        names: &[String],
        limit: Duration,
        message: impl Fn(Answer<E>) -> Message,
        late: &str,
    ) -> Result<(), StillThere> {
        let deadline = Instant::now() + limit;
        let entries = {
            let mut devices = lock(&self.devices);
            names.iter().filter_map(|name| Some((name, devices.remove(name)?))).collect::<Vec<_>>()
        };
        let asked = entries.into_iter().map(|(name, entry)| {
            let (answer, answered) = channel();
            let _told = entry.tell.send(message(answer));
            (name, answered)
        });
        let mut still = Vec::new();
        for (name, answered) in asked.collect::<Vec<_>>() {
            match answered.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                // Its thread has gone: there was nothing.
                Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => {}
                Ok(Err(error)) => still.push(format!("{name}: {error}")),
                Err(RecvTimeoutError::Timeout) => still.push(format!("{name}: {late}")),
            }
        }
        if still.is_empty() { Ok(()) } else { Err(StillThere { names: still }) }
    }
}

impl<Message> Seat<Message> {
    /// The device has become that, which others hear if it is something else than before.
    pub fn becomes(&self, state: DeviceState) {
        if *lock(&self.state) != state {
            (self.news)(&self.name, &state);
            *lock(&self.state) = state;
            (self.changed)();
        }
    }
}
