//! `export = "dev"`: a block device by the best way that this machine has.
//!
//! The way is chosen when the volume first needs a device, and stays until the volume is retired.
//! By ublk the device is the same as with `ublk`. Otherwise it belongs to the kernel's NBD client,
//! whose server runs here, or it is a loop device over a file of a private mount. These servers
//! show nothing else, and have no other clients.

use crate::supervisor::fronts::directories::start_fuse;
use crate::supervisor::fronts::{Fronts, Running, links, remove_devices, sentence, users_of_device};
use bcached_config::Config;
use bcached_control::failure::{Failure, Kind};
use bcached_front_dev::methods::choose;
use bcached_front_dev::server::Connect;
use bcached_front_dev::{Connection, DevServer, Rung, Served, Under, detach};
use bcached_front_fuse::{self as fuse, FuseServer};
use bcached_front_nbd::{self as nbd, NbdServer};
use bcached_front_ublk::table::{Changed, News, StillThere};
use bcached_front_ublk::{DeviceState, UblkServer};
use bcached_port::{Export, ExportTable, Way, Ways, loop_devices};
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
pub struct Dev {
    /// The kind of each volume's device.
    rungs: BTreeMap<String, Rung>,
    devices: Option<Arc<DevServer>>,
    nbd: Option<Arc<NbdServer>>,
    fuse: Option<FuseServer>,
    /// What a former process left was looked for.
    has_cleared: bool,
}

/// The server of some volumes' devices.
pub enum Devices {
    Ublk(Arc<UblkServer>),
    Dev(Arc<DevServer>),
}

impl Devices {
    pub const fn way(&self) -> Way {
        match self {
            Self::Ublk(_) => Way::Ublk,
            Self::Dev(_) => Way::Dev,
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

    pub fn remove(&self, names: &[String], limit: Duration) -> Result<(), StillThere> {
        match self {
            Self::Ublk(devices) => devices.remove(names, limit),
            Self::Dev(devices) => devices.remove(names, limit),
        }
    }
}

impl Dev {
    /// Returns the kind of a volume's device, if it was chosen.
    pub fn rung(&self, name: &str) -> Option<Rung> {
        self.rungs.get(name).copied()
    }

    /// Checks whether the volume's device ends with this process.
    pub fn has_device(&self, name: &str) -> bool {
        matches!(self.rung(name), Some(Rung::Nbd | Rung::Loop))
    }

    pub fn forget(&mut self, name: &str) {
        self.rungs.remove(name);
    }

    /// Checks whether the volume has a loop device whose mount has ended.
    pub fn is_cut_off(&self, name: &str) -> bool {
        self.rung(name) == Some(Rung::Loop) && self.fuse.as_ref().is_some_and(FuseServer::has_ended)
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

impl Running {
    /// Returns the server that has, or is to have, a volume's block device.
    pub fn devices_of(&self, name: &str) -> Option<Devices> {
        match self.dev.rung(name) {
            Some(Rung::Nbd | Rung::Loop) => self.dev.devices().map(Devices::Dev),
            Some(Rung::Ublk) | None => self.ublk.clone().map(Devices::Ublk),
        }
    }

    pub fn device(&self, name: &str) -> Option<DeviceState> {
        self.devices_of(name)?.state(name)
    }

    pub fn device_path(&self, name: &str) -> Option<PathBuf> {
        self.devices_of(name)?.path(name)
    }

    /// Returns the way of a volume's device, as the configuration calls it.
    pub fn way_of_device(&self, name: &str) -> Way {
        if self.dev.rung(name).is_some() { Way::Dev } else { Way::Ublk }
    }

    /// Gives a volume its device that is not of ublk.
    pub fn serve_dev(&mut self, export: Arc<Export>) {
        let name = export.name.clone();
        let under = match self.dev.rung(&name) {
            Some(Rung::Nbd) => self.dev.nbd.as_ref().map(|server| Under::Nbd(connecting(server))),
            Some(Rung::Loop) => {
                self.dev.fuse.as_ref().map(|server| Under::Loop(server.directory().join("volumes")))
            }
            Some(Rung::Ublk) | None => None,
        };
        let Some((under, devices)) = under.zip(self.dev.devices()) else { return };
        match devices.serve(Served { export, under }) {
            Ok(()) => drop(self.refused.remove(&(name, Way::Dev))),
            Err(error) => self.refuse(&name, Way::Dev, format!("cannot start a thread: {error}")),
        }
    }
}

/// Returns a function that connects to a server, as long as the server exists.
fn connecting(server: &Arc<NbdServer>) -> Connect {
    let server = Arc::downgrade(server);
    Arc::new(move |name| {
        let server = server.upgrade().ok_or("the daemon is stopping")?;
        let handed = server.hand(name).map_err(|error| error.to_string())?;
        Ok(Connection { socket: handed.socket, flags: handed.flags })
    })
}

impl Fronts {
    /// Returns the ways to a volume, with `dev` replaced by what it means here. The choice is made
    /// once for as long as the volume is served. While there is nothing to choose from, it is tried
    /// again.
    pub fn decide(&self, name: &str, ways: Ways, (config, exports): (&Config, &ExportTable)) -> Ways {
        if !ways.has(Way::Dev) || self.lock().has_ended {
            return ways;
        }
        let known = self.lock().dev.rung(name);
        let rung = match known {
            Some(rung) => rung,
            None => match self.choose(name, ways, (config, exports)) {
                Ok(rung) => rung,
                Err(why) => {
                    self.lock().refuse(name, Way::Dev, why);
                    return ways;
                }
            },
        };
        if rung == Rung::Ublk { ways.with_instead(Way::Ublk, Way::Dev) } else { ways }
    }

    fn choose(&self, name: &str, ways: Ways, with: (&Config, &ExportTable)) -> Result<Rung, String> {
        self.clear_what_was_left(&with.0.places.dev);
        // A volume that is a ublk device, too, has one device and not two.
        let (rung, missed) = if ways.has(Way::Ublk) {
            (Rung::Ublk, String::new())
        } else {
            let chosen = choose().map_err(|missing| missing.to_string())?;
            (chosen.rung, chosen.missed())
        };
        self.stand_ready(rung, with).map_err(|failure| failure.to_string())?;
        let mut running = self.lock();
        running.refused.remove(&(name.to_owned(), Way::Dev));
        running.dev.rungs.insert(name.to_owned(), rung);
        drop(running);
        let instead = if missed.is_empty() { missed } else { format!(" ({missed})") };
        tracing::info!(
            event = "device-way-chosen",
            "{name}: its block device is provided by {rung}{instead}"
        );
        Ok(rung)
    }

    /// Starts what a device of that kind needs, unless it runs.
    fn stand_ready(&self, rung: Rung, (config, exports): (&Config, &ExportTable)) -> Result<(), Failure> {
        if rung == Rung::Ublk {
            return self.start(Way::Ublk, config, exports);
        }
        let mut running = self.lock();
        let exports = exports.by_kernel(Way::Dev);
        let (memory, bytes) = running.payloads(config);
        match rung {
            Rung::Nbd if running.dev.nbd.is_none() => {
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
            Rung::Loop if running.dev.fuse.as_ref().is_none_or(FuseServer::has_ended) => {
                running.dev.fuse = Some(start_fuse(
                    (&config.places.dev, false),
                    exports.clone(),
                    (memory, bytes),
                    Vec::new(),
                )?);
            }
            Rung::Ublk | Rung::Nbd | Rung::Loop => {}
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
    pub fn device_news(&self, event: &'static str, exports: ExportTable) -> (News, Changed) {
        let numbers = self.numbers.clone();
        let news = move |name: &str, state: &DeviceState| match state {
            DeviceState::Coming => {}
            DeviceState::Here { path, .. } => {
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
    let devices = &Devices::Dev(dev);
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
