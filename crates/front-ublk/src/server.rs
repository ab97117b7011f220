//! The ublk devices of all volumes.

use crate::device::Device;
use crate::error::DeviceError;
use crate::table::{
    AfterStateChange, BeforeStateChange, DeviceHandle, DeviceState, DeviceTable, RemovalTimeout, ResultSender,
};
use bcached_port::Export;
use bcached_uring::RingHandle;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How often a missing device is retried.
const RETRY: Duration = Duration::from_secs(5);

/// A volume that is to have a device.
#[derive(Clone)]
pub struct ServedVolume {
    /// The volume.
    pub export: Arc<Export>,
    /// The ring of the engine that serves it.
    pub ring_handle: RingHandle,
    /// The `N` of `/dev/ublkbN`; `None` means any.
    pub number: Option<u32>,
}

/// The devices of one daemon. Dropping it leaves them to the next server.
pub struct UblkServer {
    devices: DeviceTable<Message>,
    /// The process that hands over its devices to this one, while it is alive.
    former: Option<u32>,
}

enum Message {
    Serve(ServedVolume),
    /// The ring has finished with the queues of that number.
    Ended(u64),
    /// Remove the device, and send the result.
    Remove(ResultSender<DeviceError>),
    /// Leave the device to the next server: it is released unchanged once the ring has finished
    /// with its queue. The sender is dropped then.
    Leave(Sender<()>),
}

impl UblkServer {
    /// Creates a server without devices. Devices of the process `former` are taken over while that
    /// process is alive: it has released them, or is about to.
    #[must_use]
    pub fn new(news: BeforeStateChange, changed: AfterStateChange, former: Option<u32>) -> Self {
        Self { devices: DeviceTable::new(news, changed), former }
    }

    /// Gives a volume its device, or tells its existing device the volume's current engine and
    /// size.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn serve(&self, served: ServedVolume) -> std::io::Result<()> {
        let (former, export) = (self.former, Arc::clone(&served.export));
        let run = move |handle, served, messages: &_| DeviceThread::new(handle, served, former).run(messages);
        self.devices.serve(("ublk", &export), served, Message::Serve, run)
    }

    /// Returns the state of a volume's device, or `None` if the volume was never to have one.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<DeviceState> {
        self.devices.state(name)
    }

    /// Leaves all devices to the next server, with their pending requests. The result is to be
    /// waited for after the engines that serve them have ended.
    pub fn leave(&self) -> Handoff {
        Handoff(self.devices.leave(|| {
            let (answer, answered) = channel();
            (Message::Leave(answer), answered)
        }))
    }

    /// Removes the devices of these volumes from the kernel; unanswered requests fail. Waits up to
    /// `limit`.
    ///
    /// # Errors
    /// The devices that still exist, and why. They are removed when that becomes possible.
    pub fn remove(&self, names: &[String], limit: Duration) -> Result<(), RemovalTimeout> {
        self.devices.remove(names, limit, Message::Remove, "the kernel has not released it")
    }
}

/// Devices that are being released.
#[must_use = "the next server can take them up only then"]
pub struct Handoff(Vec<Receiver<()>>);

impl Handoff {
    /// Waits until all of them are released. Returns false if that takes longer than `limit`.
    #[must_use]
    pub fn wait(self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        self.0.iter().all(|gone| gone.recv_timeout(left()) == Err(RecvTimeoutError::Disconnected))
    }
}

/// The state of a device's thread.
struct DeviceThread {
    handle: DeviceHandle<Message>,
    served: ServedVolume,
    device: Option<Device>,
    /// Counts the sets of queues so far, so that the end of older ones is ignored.
    number: u64,
    former: Option<u32>,
    /// Set if the device is left to another server: it is released once the ring has finished with
    /// it.
    leaves: Option<Sender<()>>,
}

impl DeviceThread {
    const fn new(handle: DeviceHandle<Message>, served: ServedVolume, former: Option<u32>) -> Self {
        Self { handle, served, device: None, number: 0, former, leaves: None }
    }

    fn run(mut self, messages: &Receiver<Message>) {
        self.bring();
        loop {
            let message = if self.is_here() {
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                messages.recv_timeout(RETRY)
            };
            match message {
                Ok(Message::Serve(served)) => self.serve(served),
                Ok(Message::Ended(number)) if number == self.number => {
                    // The engine that had it is gone. The volume's next engine is announced here,
                    // or has been already.
                    self.device = None;
                    if self.leaves.is_some() {
                        return;
                    }
                    self.handle.becomes(DeviceState::Creating);
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

    fn serve(&mut self, served: ServedVolume) {
        let before = std::mem::replace(&mut self.served, served);
        let sectors = self.served.export.sectors;
        self.device.iter().for_each(|device| device.is_served_by(&self.served.ring_handle));
        match &self.device {
            _ if !self.is_here() => self.bring(),
            Some(device) if before.export.sectors != sectors => self.resize(device, sectors),
            _ => {}
        }
    }

    /// Continues to bring the device until it can be used.
    fn bring(&mut self) {
        let state = self.try_bring().unwrap_or_else(|error| DeviceState::Missing(error.to_string()));
        self.handle.becomes(state);
    }

    /// Whether the device can be used.
    fn is_here(&self) -> bool {
        self.device.as_ref().is_some_and(Device::is_settled)
    }

    fn try_bring(&mut self) -> Result<DeviceState, DeviceError> {
        let device = match &mut self.device {
            Some(device) => device,
            None => {
                let device = self.begin()?;
                self.device.insert(device)
            }
        };
        device.settle(&self.served.export)?;
        Ok(DeviceState::Ready { path: device.path(), transfer: Some(device.transfer()) })
    }

    fn begin(&mut self) -> Result<Device, DeviceError> {
        self.number += 1;
        let (tell, number) = (self.handle.tell.clone(), self.number);
        let on_end = move || drop(tell.send(Message::Ended(number)));
        let ServedVolume { export, ring_handle, number } = &self.served;
        Device::bring(export, ring_handle, (*number, self.former), on_end)
    }

    fn resize(&self, device: &Device, sectors: u64) {
        match device.resize(sectors) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                event = "ublk-not-resized",
                "{}: this kernel cannot resize {} while it exists; `bcached stop` and `bcached \
                 add` create it again with the new size",
                self.handle.name,
                device.path().display()
            ),
            Err(error) => tracing::error!(event = "ublk-not-resized", "{}: {error}", self.handle.name),
        }
    }
}
