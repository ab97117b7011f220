//! The devices of a server. Each has a thread of its own, which waits for the kernel, so that no
//! device waits for another. The thread gets messages, and reports the state of the device.

use bcached_port::Export;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The state of a volume's device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// It is being created, or taken over.
    Creating,
    /// It can be used.
    Ready {
        /// The device's path.
        path: PathBuf,
        /// For a ublk device: how data is transferred.
        transfer: Option<DataTransfer>,
    },
    /// There is none, for this reason; it is being retried.
    Missing(String),
}

impl DeviceState {
    /// The path of the device, if it can be used.
    #[must_use]
    pub fn path(self) -> Option<PathBuf> {
        match self {
            Self::Ready { path, .. } => Some(path),
            Self::Creating | Self::Missing(_) => None,
        }
    }

    /// For a ublk device that can be used: how its data is transferred.
    #[must_use]
    pub const fn transfer(&self) -> Option<DataTransfer> {
        match self {
            Self::Ready { transfer, .. } => *transfer,
            Self::Creating | Self::Missing(_) => None,
        }
    }
}

/// How the data of a ublk device's requests is transferred.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataTransfer {
    /// The engine's devices access the memory of the submitting process directly.
    ZeroCopy,
    /// The data is copied from and to that memory.
    UserCopy,
}

impl DataTransfer {
    /// Its name in the output of `status`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero copy",
            Self::UserCopy => "user copy",
        }
    }
}

/// Called on a device's thread just before its state changes: what it does is done when others see
/// the new state. It must not wait.
pub type BeforeStateChange = Arc<dyn Fn(&str, &DeviceState) + Send + Sync>;

/// Called on the same thread just after the change.
pub type AfterStateChange = Arc<dyn Fn() + Send + Sync>;

/// Devices that could not be removed in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", names.join(", "))]
pub struct RemovalTimeout {
    /// The names of their volumes, each with the reason.
    pub names: Vec<String>,
}

/// For a thread to send a result.
pub type ResultSender<E> = Sender<Result<(), E>>;

/// The devices by volume. Dropping it closes its channels to the threads: those that wait for
/// nothing else end.
pub struct DeviceTable<Message> {
    devices: Mutex<BTreeMap<String, DeviceEntry<Message>>>,
    news: BeforeStateChange,
    changed: AfterStateChange,
}

struct DeviceEntry<Message> {
    tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
}

/// What a device's thread shares with the table.
pub struct DeviceHandle<Message> {
    /// The name of its volume.
    pub name: String,
    /// Sends messages to the thread.
    pub tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
    news: BeforeStateChange,
    changed: AfterStateChange,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Code that holds one of these locks cannot panic midway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<Message: Send + 'static> DeviceTable<Message> {
    /// Creates an empty table.
    #[must_use]
    pub const fn new(news: BeforeStateChange, changed: AfterStateChange) -> Self {
        Self { devices: Mutex::new(BTreeMap::new()), news, changed }
    }

    /// Tells the thread of the volume's device how it is `served` now. If there is none, starts
    /// one, named after its `kind`, which runs `run`.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn serve<Volume: Send + 'static>(
        &self,
        (kind, export): (&str, &Export),
        served: Volume,
        message: impl FnOnce(Volume) -> Message,
        run: impl FnOnce(DeviceHandle<Message>, Volume, &Receiver<Message>) + Send + 'static,
    ) -> std::io::Result<()> {
        let mut devices = lock(&self.devices);
        let name = export.name.clone();
        if let Some(entry) = devices.get(&name) {
            let _told = entry.tell.send(message(served));
            return Ok(());
        }
        let (tell, messages) = channel();
        let state = Arc::new(Mutex::new(DeviceState::Creating));
        let handle = DeviceHandle {
            name: name.clone(),
            tell: tell.clone(),
            state: Arc::clone(&state),
            news: Arc::clone(&self.news),
            changed: Arc::clone(&self.changed),
        };
        let builder = thread::Builder::new().name(format!("{kind} {name}"));
        builder.spawn(move || run(handle, served, &messages))?;
        devices.insert(name, DeviceEntry { tell, state });
        Ok(())
    }

    /// Returns the state of a volume's device, or `None` if the volume was never to have one here.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<DeviceState> {
        lock(&self.devices).get(name).map(|entry| lock(&entry.state).clone())
    }

    /// Returns the sender to the thread of a volume's device, or `None` if there is none.
    #[must_use]
    pub fn teller(&self, name: &str) -> Option<Sender<Message>> {
        lock(&self.devices).get(name).map(|entry| entry.tell.clone())
    }

    /// Removes all devices from the table, and sends each thread its message. Returns what belongs
    /// to the messages.
    pub fn leave<T>(&self, message: impl Fn() -> (Message, T)) -> Vec<T> {
        let entries = std::mem::take(&mut *lock(&self.devices));
        let left = entries.into_values().map(|entry| {
            let (message, answered) = message();
            let _told = entry.tell.send(message);
            answered
        });
        left.collect()
    }

    /// Removes these devices from the table, and has their threads remove them. Waits up to
    /// `limit`.
    ///
    /// # Errors
    /// The devices that still exist, and why: for those not removed in time, the reason is `late`.
    /// They are removed when that becomes possible.
    pub fn remove<E: Display>(
        &self,
        names: &[String],
        limit: Duration,
        message: impl Fn(ResultSender<E>) -> Message,
        late: &str,
    ) -> Result<(), RemovalTimeout> {
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
                // Disconnected means that its thread has ended: there was no device.
                Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => {}
                Ok(Err(error)) => still.push(format!("{name}: {error}")),
                Err(RecvTimeoutError::Timeout) => still.push(format!("{name}: {late}")),
            }
        }
        if still.is_empty() { Ok(()) } else { Err(RemovalTimeout { names: still }) }
    }
}

impl<Message> DeviceHandle<Message> {
    /// Sets the state of the device. If it has changed, the observers are notified.
    pub fn becomes(&self, state: DeviceState) {
        if *lock(&self.state) != state {
            (self.news)(&self.name, &state);
            *lock(&self.state) = state;
            (self.changed)();
        }
    }
}
