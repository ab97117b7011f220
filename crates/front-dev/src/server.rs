//! The devices of all volumes. Each has a thread of its own, which waits for the kernel and for
//! helper programs, so that no device waits for another.

use crate::loop_devices::LoopDevice;
use crate::nbd::NbdDevice;
use bcached_front_ublk::table::{
    AfterStateChange, BeforeStateChange, DeviceHandle, DeviceState, DeviceTable, RemovalTimeout, ResultSender,
};
use bcached_port::Export;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How often a missing device is retried, and an existing one checked.
const RETRY: Duration = Duration::from_secs(5);

/// The client's end of a connection to an NBD server, ready for requests.
#[derive(Debug)]
pub struct NbdConnection {
    /// The connected socket.
    pub socket: OwnedFd,
    /// NBD's transmission flags: the server's features.
    pub flags: u16,
}

/// Makes a connection for the volume of the given name.
pub type ConnectFn = Arc<dyn Fn(&str) -> Result<NbdConnection, String> + Send + Sync>;

/// What a device is based on.
#[derive(Clone)]
pub enum DeviceBackend {
    /// The kernel's NBD client.
    Nbd(ConnectFn),
    /// A loop device over the file with the volume's name in this directory of a FUSE mount.
    Loop(PathBuf),
}

/// A volume that is to have a device.
#[derive(Clone)]
pub struct ServedVolume {
    /// The volume.
    pub export: Arc<Export>,
    /// What the device is based on.
    pub backend: DeviceBackend,
}

/// The devices of one daemon.
pub struct DevServer {
    devices: DeviceTable<Message>,
}

enum Message {
    Serve(ServedVolume),
    /// The device with that number has ended.
    Ended(u64),
    /// Write out the device's dirty pages in the kernel, and send the result.
    Write(ResultSender<String>),
    /// Remove the device, and send the result.
    Remove(ResultSender<String>),
}

enum Device {
    Nbd(NbdDevice),
    Loop(LoopDevice),
}

impl DevServer {
    /// Creates a server without devices. `news` is called on a device's thread just before its
    /// state changes, `changed` just after.
    #[must_use]
    pub const fn new(news: BeforeStateChange, changed: AfterStateChange) -> Self {
        Self { devices: DeviceTable::new(news, changed) }
    }

    /// Gives a volume its device, or tells its existing device the volume's current size.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn serve(&self, served: ServedVolume) -> std::io::Result<()> {
        let export = Arc::clone(&served.export);
        let run = |handle, served, messages: &_| {
            DeviceThread { handle, served, device: None, number: 0 }.run(messages);
        };
        self.devices.serve(("dev", &export), served, Message::Serve, run)
    }

    /// Returns the state of a volume's device, or `None` if the volume was never to have one here.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<DeviceState> {
        self.devices.state(name)
    }

    /// Writes out the dirty pages that the kernel holds of a volume's device, if closing it would
    /// not do that. Waits up to `limit`.
    ///
    /// # Errors
    /// The pages could not be written, or not within `limit`.
    pub fn write_out(&self, name: &str, limit: Duration) -> Result<(), String> {
        let Some(tell) = self.devices.teller(name) else { return Ok(()) };
        let (answer, answered) = channel();
        let _told = tell.send(Message::Write(answer));
        match answered.recv_timeout(limit) {
            Ok(written) => written,
            Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                Err("the kernel is still writing the dirty pages of its device".to_owned())
            }
        }
    }

    /// Removes the devices of these volumes. Their dirty pages in the kernel that have not been
    /// written are lost: see [`DevServer::write_out`]. Waits up to `limit`.
    ///
    /// # Errors
    /// The devices that still exist, and why. They are removed when that becomes possible.
    pub fn remove(&self, names: &[String], limit: Duration) -> Result<(), RemovalTimeout> {
        self.devices.remove(names, limit, Message::Remove, "its device has not been removed")
    }
}

impl Device {
    fn path(&self) -> &Path {
        match self {
            Self::Nbd(device) => device.path(),
            Self::Loop(device) => device.path(),
        }
    }

    fn is_there(&self) -> bool {
        match self {
            Self::Nbd(device) => !device.has_ended(),
            Self::Loop(device) => device.is_there(),
        }
    }

    fn resize(&self, sectors: u64) -> Result<(), String> {
        match self {
            Self::Nbd(device) => device.resize(sectors),
            Self::Loop(device) => device.resize(),
        }
    }

    fn remove(&self) -> Result<(), String> {
        match self {
            Self::Nbd(device) => device.remove(),
            Self::Loop(device) => device.remove(),
        }
    }
}

/// The state of a device's thread.
struct DeviceThread {
    handle: DeviceHandle<Message>,
    served: ServedVolume,
    device: Option<Device>,
    /// Counts the devices so far, so that the end of an older one is ignored.
    number: u64,
}

impl DeviceThread {
    fn run(mut self, messages: &Receiver<Message>) {
        self.bring();
        loop {
            match messages.recv_timeout(RETRY) {
                Ok(Message::Serve(served)) => self.serve(served),
                Ok(Message::Ended(number)) if number != self.number => {}
                Ok(Message::Ended(_)) | Err(RecvTimeoutError::Timeout) => self.look(),
                Ok(Message::Write(answer)) => {
                    let written = match &self.device {
                        Some(Device::Nbd(device)) => device.write_out(),
                        // This process does not have it open.
                        Some(Device::Loop(_)) | None => Ok(()),
                    };
                    let _heard = answer.send(written);
                }
                Ok(Message::Remove(answer)) => {
                    let gone = self.device.take().map_or(Ok(()), |device| device.remove());
                    let _heard = answer.send(gone);
                    return;
                }
                // The server was dropped without [`DevServer::remove`].
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Checks the device, which a program may have removed, and sets up a new one if so.
    fn look(&mut self) {
        if self.device.as_ref().is_some_and(Device::is_there) {
            return;
        }
        if let Some(device) = self.device.take() {
            let path = device.path().display();
            tracing::warn!(event = "device-gone", "{}: {path} has disappeared", self.handle.name);
            self.handle.becomes(DeviceState::Creating);
        }
        self.bring();
    }

    fn serve(&mut self, served: ServedVolume) {
        let before = std::mem::replace(&mut self.served, served);
        let sectors = self.served.export.sectors;
        match &self.device {
            None => self.bring(),
            Some(device) if before.export.sectors != sectors => {
                if let Err(error) = device.resize(sectors) {
                    let path = device.path().display();
                    tracing::error!(
                        event = "device-not-resized",
                        "{}: {path} keeps its old size until the next start: {error}",
                        self.handle.name
                    );
                }
            }
            Some(_) => {}
        }
    }

    fn bring(&mut self) {
        self.number += 1;
        match self.brought() {
            Ok(device) => {
                let path = device.path().to_owned();
                self.device = Some(device);
                self.handle.becomes(DeviceState::Ready { path, transfer: None });
            }
            Err(why) => {
                // Ignore the end of the device that failed to come up.
                self.number += 1;
                self.handle.becomes(DeviceState::Missing(why));
            }
        }
    }

    fn brought(&self) -> Result<Device, String> {
        let export = &self.served.export;
        match &self.served.backend {
            DeviceBackend::Nbd(connect) => {
                let connection = connect(&self.handle.name)?;
                let (tell, number) = (self.handle.tell.clone(), self.number);
                let on_end: Arc<dyn Fn() + Send + Sync> =
                    Arc::new(move || drop(tell.send(Message::Ended(number))));
                NbdDevice::bring(export, &connection, &on_end).map(Device::Nbd)
            }
            DeviceBackend::Loop(_) if matches!(self.handle.name.as_str(), "." | "..") => {
                Err("no file can have this name".to_owned())
            }
            DeviceBackend::Loop(folder) => {
                LoopDevice::bring(&folder.join(&self.handle.name), export).map(Device::Loop)
            }
        }
    }
}
