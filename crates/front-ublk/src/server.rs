//! The devices of all volumes. Each has a thread, on which the kernel is waited for, so that no device waits for another.

use crate::device::Device;
use crate::error::DeviceError;
use bcached_port::Export;
use bcached_uring::Guests;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a device that is not there is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// A volume that is to have a device.
#[derive(Clone)]
pub struct Served {
    /// The volume.
    pub export: Arc<Export>,
    /// The ring of the engine that serves it.
    pub guests: Guests,
    /// `N` of `/dev/ublkbN`; `None`: any.
    pub number: Option<u32>,
}

/// What has become of a volume's device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// It is being made, or taken over.
    Coming,
    /// It can be used.
    Here(PathBuf),
    /// There is none, for this reason; it is tried again.
    Missing(String),
}

/// Called on a device's thread when its state is about to change: what is done there is done when others see the new one. It must not wait.
pub type News = Arc<dyn Fn(&str, &DeviceState) + Send + Sync>;

/// Called there when it has.
pub type Changed = Arc<dyn Fn() + Send + Sync>;

/// The devices of one daemon. Dropped, it leaves them to the next server.
pub struct UblkServer {
    devices: Mutex<BTreeMap<String, Entry>>,
    news: News,
    changed: Changed,
    /// The process whose devices go over to this one while it lives.
    former: Option<u32>,
}

struct Entry {
    tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
}

enum Message {
    Serve(Served),
    /// The ring is done with the queue of that life.
    Ended(u64),
    /// Away with it; the answer is how that went.
    Remove(Sender<Result<(), DeviceError>>),
    /// The next server has it: it is let go of as it is when the ring is done with its queue. The answer is dropped then.
    Leave(Sender<()>),
}

/// Devices that could not be taken away in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", names.join(", "))]
pub struct StillThere {
    /// Their volumes, and why.
    pub names: Vec<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can panic midway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UblkServer {
    /// Without devices. Those of the process `former` go over to this one while that lives: it has let go of them, or is about to.
    #[must_use]
    pub fn new(news: News, changed: Changed, former: Option<u32>) -> Self {
        Self { devices: Mutex::default(), news, changed, former }
    }

    /// Gives a volume its device, or tells the one that it has where the volume is served now and how large it is.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn serve(&self, served: Served) -> std::io::Result<()> {
        let mut devices = lock(&self.devices);
        let name = served.export.name.clone();
        if let Some(entry) = devices.get(&name) {
            let _told = entry.tell.send(Message::Serve(served));
            return Ok(());
        }
        let (tell, messages) = channel();
        let state = Arc::new(Mutex::new(DeviceState::Coming));
        let life = Life {
            name: name.clone(),
            served,
            device: None,
            number: 0,
            tell: tell.clone(),
            state: Arc::clone(&state),
            news: Arc::clone(&self.news),
            changed: Arc::clone(&self.changed),
            former: self.former,
            leaves: None,
        };
        thread::Builder::new().name(format!("ublk {name}")).spawn(move || life.run(&messages))?;
        devices.insert(name, Entry { tell, state });
        Ok(())
    }

    /// What has become of a volume's device; `None` if it was never to have one.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<DeviceState> {
        lock(&self.devices).get(name).map(|entry| lock(&entry.state).clone())
    }

    /// Where a volume's device is, if it can be used.
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        match self.state(name)? {
            DeviceState::Here(path) => Some(path),
            DeviceState::Coming | DeviceState::Missing(_) => None,
        }
    }

    /// Leaves all devices to the next server, with what has been asked of them. It is to be waited for after the engines that serve them
    /// have ended.
    pub fn leave(&self) -> Leaving {
        let entries = std::mem::take(&mut *lock(&self.devices));
        let left = entries.into_values().map(|entry| {
            let (answer, answered) = channel();
            let _told = entry.tell.send(Message::Leave(answer));
            answered
        });
        Leaving(left.collect())
    }

    /// Takes the devices of these volumes from the kernel; what they have not answered fails. Waits for that up to `limit`.
    ///
    /// # Errors
    /// Those that are still there, and why. They go when they can.
    pub fn remove(&self, names: &[String], limit: Duration) -> Result<(), StillThere> {
        let deadline = Instant::now() + limit;
        let entries = {
            let mut devices = lock(&self.devices);
            names.iter().filter_map(|name| Some((name, devices.remove(name)?))).collect::<Vec<_>>()
        };
        let asked = entries.into_iter().map(|(name, entry)| {
            let (answer, answered) = channel();
            let _told = entry.tell.send(Message::Remove(answer));
            (name, answered)
        });
        let mut still = Vec::new();
        for (name, answered) in asked.collect::<Vec<_>>() {
            match answered.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                // Its thread has gone: there was nothing.
                Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => {}
                Ok(Err(error)) => still.push(format!("{name}: {error}")),
                Err(RecvTimeoutError::Timeout) => {
                    still.push(format!("{name}: the kernel does not let go of it"));
                }
            }
        }
        if still.is_empty() { Ok(()) } else { Err(StillThere { names: still }) }
    }
}

/// Devices that are being let go of.
#[must_use = "the next server can take them up only then"]
pub struct Leaving(Vec<Receiver<()>>);

impl Leaving {
    /// Waits until nobody here has them; false if that takes longer than `limit`.
    #[must_use]
    pub fn wait(self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        self.0.iter().all(|gone| gone.recv_timeout(left()) == Err(RecvTimeoutError::Disconnected))
    }
}

/// A device's thread.
struct Life {
    name: String,
    served: Served,
    device: Option<Device>,
    /// Counts the queues that it has had: the end of an older one is no news.
    number: u64,
    tell: Sender<Message>,
    state: Arc<Mutex<DeviceState>>,
    news: News,
    changed: Changed,
    former: Option<u32>,
    /// It is another server's as soon as the ring is done with it.
    leaves: Option<Sender<()>>,
}

impl Life {
    fn run(mut self, messages: &Receiver<Message>) {
        self.bring();
        loop {
            let message = if self.device.is_some() {
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                messages.recv_timeout(RETRY)
            };
            match message {
                Ok(Message::Serve(served)) => self.serve(served),
                Ok(Message::Ended(number)) if number == self.number => {
                    // The engine that had it has gone. Whoever serves the volume next is told here, or has been.
                    self.device = None;
                    if self.leaves.is_some() {
                        return;
                    }
                    self.becomes(DeviceState::Coming);
                    self.bring();
                }
                Ok(Message::Ended(_)) => {}
                Ok(Message::Remove(answer)) => {
                    let gone = match self.device.take() {
                        Some(device) => device.remove(),
                        None => Device::remove_left(&self.served.export),
                    };
                    let _heard = answer.send(gone);
                    return;
                }
                Ok(Message::Leave(answer)) if self.device.is_some() => self.leaves = Some(answer),
                Ok(Message::Leave(_)) => return,
                Err(RecvTimeoutError::Timeout) => self.bring(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn serve(&mut self, served: Served) {
        let before = std::mem::replace(&mut self.served, served);
        let sectors = self.served.export.sectors;
        match &self.device {
            None => self.bring(),
            Some(device) if before.export.sectors != sectors => self.resize(device, sectors),
            Some(_) => {}
        }
    }

    fn bring(&mut self) {
        self.number += 1;
        let (tell, number) = (self.tell.clone(), self.number);
        let on_end = move || drop(tell.send(Message::Ended(number)));
        let Served { export, guests, number } = &self.served;
        match Device::bring(export, guests, (*number, self.former), on_end) {
            Ok(device) => {
                let path = device.path();
                self.device = Some(device);
                self.becomes(DeviceState::Here(path));
            }
            Err(error) => self.becomes(DeviceState::Missing(error.to_string())),
        }
    }

    fn resize(&self, device: &Device, sectors: u64) {
        match device.resize(sectors) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                event = "ublk-not-resized",
                "{}: this kernel cannot resize {} while it is there; the one that `bcached stop` and `bcached add` make has the new size",
                self.name,
                device.path().display()
            ),
            Err(error) => tracing::error!(event = "ublk-not-resized", "{}: {error}", self.name),
        }
    }

    fn becomes(&self, state: DeviceState) {
        if *lock(&self.state) != state {
            (self.news)(&self.name, &state);
            *lock(&self.state) = state;
            (self.changed)();
        }
    }
}
