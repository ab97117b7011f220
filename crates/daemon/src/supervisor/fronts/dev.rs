//! `export = "dev"`: a block device by the best way that this machine has.
//!
//! The way is chosen when the volume first needs a device, and stays until the volume is retired.
//! By ublk the device is the same as with `ublk`. Otherwise it belongs to the kernel's NBD client,
//! whose server runs here, or it is a loop device over a file of a private mount. These servers
//! show nothing else, and have no other clients.

use crate::supervisor::fronts::directories::start_fuse;
use crate::supervisor::fronts::{
    FrontendManager, FrontendServers, links, remove_devices, sentence, users_of_device,
};
use bcached_config::Config;
use bcached_control::failure::{Failure, Kind};
use bcached_front_dev::methods::choose;
use bcached_front_dev::server::ConnectFn;
use bcached_front_dev::{DevServer, DeviceBackend, DeviceMethod, NbdConnection, ServedVolume, detach};
use bcached_front_fuse::{self as fuse, FuseServer};
use bcached_front_nbd::{self as nbd, NbdServer};
use bcached_front_ublk::table::{AfterStateChange, BeforeStateChange, RemovalTimeout};
use bcached_front_ublk::{DeviceState, UblkServer};
use bcached_port::{Export, ExportTable, Frontend, FrontendSet, loop_devices};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The kernel is never cut off because other clients wait: requests to a block device would be
/// lost.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Longest time that a request to give up a volume waits for the kernel to write out the device's
/// cached data.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// The state of this front end.
#[derive(Default)]
pub struct DevFrontend {
    /// The kind of each volume's device.
    methods: BTreeMap<String, DeviceMethod>,
    devices: Option<Arc<DevServer>>,
    nbd: Option<Arc<NbdServer>>,
    fuse: Option<FuseServer>,
    /// What a former process left was looked for.
    has_cleared: bool,
}

/// The server of some volumes' devices.
pub enum DeviceServer {
    Ublk(Arc<UblkServer>),
    Dev(Arc<DevServer>),
}

impl DeviceServer {
    pub const fn way(&self) -> Frontend {
        match self {
            Self::Ublk(_) => Frontend::Ublk,
            Self::Dev(_) => Frontend::Dev,
        }
    }

    fn state(&self, name: &str) -> Option<DeviceState> {
        match self {
            Self::Ublk(devices) => devices.state(name),
            Self::Dev(devices) => devices.state(name),
        }
    }

    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.state(name)?.path()
    }

    pub fn remove(&self, names: &[String], limit: Duration) -> Result<(), RemovalTimeout> {
        match self {
            Self::Ublk(devices) => devices.remove(names, limit),
            Self::Dev(devices) => devices.remove(names, limit),
        }
    }
}

impl DevFrontend {
    /// Returns the kind of a volume's device, if it was chosen.
    pub fn method(&self, name: &str) -> Option<DeviceMethod> {
        self.methods.get(name).copied()
    }

    /// Checks whether the volume's device ends with this process.
    pub fn has_device(&self, name: &str) -> bool {
        matches!(self.method(name), Some(DeviceMethod::Nbd | DeviceMethod::Loop))
    }

    pub fn forget(&mut self, name: &str) {
        self.methods.remove(name);
    }

    /// Checks whether the volume has a loop device whose mount has ended.
    pub fn is_cut_off(&self, name: &str) -> bool {
        self.method(name) == Some(DeviceMethod::Loop) && self.fuse.as_ref().is_some_and(FuseServer::has_ended)
    }

    /// Returns the server of the devices that are not of ublk.
    pub fn devices(&self) -> Option<Arc<DevServer>> {
        self.devices.clone()
    }

    /// Ends the servers. Their devices were removed before.
    pub fn shutdown(self, left: Duration) {
        // Another thread may be about to make a device.
        let nbd = self.nbd.and_then(Arc::into_inner).map(|server| server.shutdown(left));
        if let Some(Err(busy)) = nbd {
            tracing::warn!(event = "clients-cut", "{busy}");
        }
        if let Some(Err(busy)) = self.fuse.map(|server| server.shutdown(left)) {
            tracing::warn!(event = "clients-cut", "{busy}");
        }
    }
}

impl FrontendServers {
    /// Returns the server that has, or is to have, a volume's block device.
    pub fn devices_of(&self, name: &str) -> Option<DeviceServer> {
        match self.dev.method(name) {
            Some(DeviceMethod::Nbd | DeviceMethod::Loop) => self.dev.devices().map(DeviceServer::Dev),
            Some(DeviceMethod::Ublk) | None => self.ublk.clone().map(DeviceServer::Ublk),
        }
    }

    pub fn device(&self, name: &str) -> Option<DeviceState> {
        self.devices_of(name)?.state(name)
    }

    pub fn device_path(&self, name: &str) -> Option<PathBuf> {
        self.devices_of(name)?.path(name)
    }

    /// Returns the way of a volume's device, as the configuration calls it.
    pub fn way_of_device(&self, name: &str) -> Frontend {
        if self.dev.method(name).is_some() { Frontend::Dev } else { Frontend::Ublk }
    }

    /// Gives a volume its device that is not of ublk.
    pub fn serve_dev(&mut self, export: Arc<Export>) {
        let name = export.name.clone();
        let backend = match self.dev.method(&name) {
            Some(DeviceMethod::Nbd) => {
                self.dev.nbd.as_ref().map(|server| DeviceBackend::Nbd(connecting(server)))
            }
            Some(DeviceMethod::Loop) => {
                self.dev.fuse.as_ref().map(|server| DeviceBackend::Loop(server.directory().join("volumes")))
            }
            Some(DeviceMethod::Ublk) | None => None,
        };
        let Some((backend, devices)) = backend.zip(self.dev.devices()) else { return };
        match devices.serve(ServedVolume { export, backend }) {
            Ok(()) => drop(self.refused.remove(&(name, Frontend::Dev))),
            Err(error) => self.refuse(&name, Frontend::Dev, format!("cannot start a thread: {error}")),
        }
    }
}

/// Returns a function that connects to a server, as long as the server exists.
fn connecting(server: &Arc<NbdServer>) -> ConnectFn {
    let server = Arc::downgrade(server);
    Arc::new(move |name| {
        let server = server.upgrade().ok_or("the daemon is stopping")?;
        let handed = server.hand(name).map_err(|error| error.to_string())?;
        Ok(NbdConnection { socket: handed.socket, flags: handed.flags })
    })
}

impl FrontendManager {
    /// Returns the ways to a volume, with `dev` replaced by what it means here. The choice is made
    /// once for as long as the volume is served. While there is nothing to choose from, it is tried
    /// again.
    pub fn decide(
        &self,
        name: &str,
        ways: FrontendSet,
        (config, exports): (&Config, &ExportTable),
    ) -> FrontendSet {
        if !ways.has(Frontend::Dev) || self.lock().has_ended {
            return ways;
        }
        let known = self.lock().dev.method(name);
        let method = match known {
            Some(method) => method,
            None => match self.choose(name, ways, (config, exports)) {
                Ok(method) => method,
                Err(why) => {
                    self.lock().refuse(name, Frontend::Dev, why);
                    return ways;
                }
            },
        };
        if method == DeviceMethod::Ublk { ways.with_instead(Frontend::Ublk, Frontend::Dev) } else { ways }
    }

    fn choose(
        &self,
        name: &str,
        ways: FrontendSet,
        with: (&Config, &ExportTable),
    ) -> Result<DeviceMethod, String> {
        self.clear_what_was_left(&with.0.places.dev);
        // A volume that is a ublk device, too, has one device and not two.
        let (method, missed) = if ways.has(Frontend::Ublk) {
            (DeviceMethod::Ublk, String::new())
        } else {
            let chosen = choose().map_err(|missing| missing.to_string())?;
            (chosen.method, chosen.missed())
        };
        self.stand_ready(method, with).map_err(|failure| failure.to_string())?;
        let mut running = self.lock();
        running.refused.remove(&(name.to_owned(), Frontend::Dev));
        running.dev.methods.insert(name.to_owned(), method);
        drop(running);
        let instead = if missed.is_empty() { missed } else { format!(" ({missed})") };
        tracing::info!(
            event = "device-way-chosen",
            "{name}: its block device is provided by {method}{instead}"
        );
        Ok(method)
    }

    /// Starts what a device of that kind needs, unless it runs.
    fn stand_ready(
        &self,
        method: DeviceMethod,
        (config, exports): (&Config, &ExportTable),
    ) -> Result<(), Failure> {
        if method == DeviceMethod::Ublk {
            return self.start(Frontend::Ublk, config, exports);
        }
        let mut running = self.lock();
        let exports = exports.by_kernel(Frontend::Dev);
        let (memory, bytes) = running.payloads(config);
        match method {
            DeviceMethod::Nbd if running.dev.nbd.is_none() => {
                let limits = nbd::Limits {
                    total_bytes: bytes,
                    stall: PATIENCE,
                    give_way: PATIENCE,
                    ..nbd::Limits::default()
                };
                let rings = self.rings.clone();
                let options = nbd::Options { endpoints: Vec::new(), closed: false, limits, tls: None, rings };
                let server = NbdServer::start_sharing(options, exports.clone(), memory);
                let cannot = |error| {
                    Failure::new(Kind::Io, "cannot serve the kernel's NBD client").why(sentence(&error))
                };
                running.dev.nbd = Some(Arc::new(server.map_err(cannot)?));
            }
            DeviceMethod::Loop if running.dev.fuse.as_ref().is_none_or(FuseServer::has_ended) => {
                running.dev.fuse = Some(start_fuse(
                    (&config.places.dev, false),
                    exports.clone(),
                    (memory, bytes),
                    Vec::new(),
                )?);
            }
            DeviceMethod::Ublk | DeviceMethod::Nbd | DeviceMethod::Loop => {}
        }
        if running.dev.devices.is_none() {
            running.dev.devices = Some(Arc::new(self.dev_server(exports)));
        }
        Ok(())
    }

    fn dev_server(&self, exports: ExportTable) -> DevServer {
        let (news, changed) = self.device_news("dev-device", exports);
        DevServer::new(news, changed)
    }

    /// Returns the callbacks for servers of block devices. A device that has appeared gets its
    /// links and is logged as `event`; one that is missing is logged with the reason.
    pub fn device_news(
        &self,
        event: &'static str,
        exports: ExportTable,
    ) -> (BeforeStateChange, AfterStateChange) {
        let numbers = self.numbers.clone();
        let news = move |name: &str, state: &DeviceState| match state {
            DeviceState::Creating => {}
            DeviceState::Ready { path, .. } => {
                if let Some(export) = exports.by_name(name) {
                    links::make(&export, path);
                    numbers.link(name, export.uuid, path);
                }
                tracing::info!(event, "{name}: available as the block device {}", path.display());
            }
            DeviceState::Missing(why) => {
                tracing::error!(
                    event = "volume-not-exported",
                    "{name}: not available as a block device: {why}"
                );
            }
        };
        let wake = self.wake.clone();
        (Arc::new(news), Arc::new(move || wake.iter().for_each(|wake| wake())))
    }

    /// Has the kernel write out the cached data of a volume's device. Called before a volume that
    /// is not in use is given up.
    ///
    /// # Errors
    /// The data cannot be written, or not within the limit.
    pub fn write_out(&self, name: &str) -> Result<(), String> {
        let devices = self.lock().dev.devices();
        devices.map_or(Ok(()), |devices| devices.write_out(name, WRITE_LIMIT))
    }

    /// Removes the loop devices of a process that was killed, and its mount. They cannot belong to
    /// another process: the control socket beside the mount is ours.
    fn clear_what_was_left(&self, mount: &Path) {
        let is_first = !std::mem::replace(&mut self.lock().dev.has_cleared, true);
        if !is_first {
            return;
        }
        let Ok(mount) = fuse::absolute(mount) else { return };
        // Looked for first, because the end of the mount takes its name from them.
        let left = loop_devices::over(&mount);
        if let Err(error) = fuse::clear_stale(&mount) {
            tracing::warn!(event = "device-left", "{}: {}", mount.display(), sentence(&error));
            return;
        }
        for device in left {
            links::remove(&device);
            let (path, users) = (device.display(), users_of_device(&device));
            match detach(&device) {
                Ok(()) if users.is_empty() => {
                    tracing::info!(event = "device-left", "detached {path}, which a killed bcached had left");
                }
                Ok(()) => tracing::warn!(
                    event = "device-left",
                    "{path}, which a killed bcached had left, is dead, but still in use by {}: it is removed when it \
                     is no longer in use",
                    users.join(", ")
                ),
                Err(why) => tracing::warn!(
                    event = "device-left",
                    "cannot detach {path}, which a killed bcached had left: {why}"
                ),
            }
        }
    }
}

/// Removes these volumes' devices, even if they are in use.
pub fn cut(dev: Arc<DevServer>, names: &[String], limit: Duration) {
    for name in names {
        if let Err(why) = dev.write_out(name, limit) {
            tracing::error!(event = "device-not-written", "{name}: cannot write out its block device: {why}");
        }
    }
    let devices = &DeviceServer::Dev(dev);
    for name in names {
        let Some(path) = devices.path(name) else { continue };
        let users = users_of_device(&path);
        if !users.is_empty() {
            tracing::warn!(
                event = "device-cut",
                "{name}: {} is removed while in use by {}: requests to it fail from now on",
                path.display(),
                users.join(", ")
            );
        }
    }
    remove_devices(devices, names, limit);
}
