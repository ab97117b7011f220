//! The clients of each volume, and their ways to it: for the status, and for checks before a volume
//! is taken away.

use crate::supervisor::fronts::FrontendManager;
use bcached_front_dev::DeviceMethod;
use bcached_front_fuse::FuseServer;
use bcached_front_nbd::NbdServer;
use bcached_front_ublk::DriverFeatures;
use bcached_port::Frontend;
use bcached_uring::{DeviceIdentity, Holder};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A client that uses a volume, or could.
pub struct VolumeClient {
    pub peer: String,
    pub volume: Option<String>,
    pub writing: bool,
    /// The client is read-only.
    pub read_only: bool,
    /// The connection is encrypted.
    pub tls: bool,
    pub way: Frontend,
}

impl VolumeClient {
    /// Returns a client of a front end that does not report such details.
    const fn of(way: Frontend, peer: String, volume: Option<String>, writing: bool) -> Self {
        Self { peer, volume, writing, read_only: false, tls: false, way }
    }
}

impl FrontendManager {
    /// Returns all clients that are connected or have a volume open.
    pub fn users(&self) -> Vec<VolumeClient> {
        let running = self.lock();
        let nbd = running.nbd.iter().flat_map(NbdServer::clients).map(|client| VolumeClient {
            peer: client.peer,
            volume: client.export,
            writing: client.writing,
            read_only: client.read_only,
            tls: client.tls,
            way: Frontend::Nbd,
        });
        let vhost = running.vhost.iter().flat_map(|server| server.clients()).map(|client| {
            let peer = "a virtual machine".to_owned();
            VolumeClient::of(Frontend::VhostUser, peer, Some(client.volume), client.is_writing)
        });
        let fuse = running.fuse.iter().flat_map(FuseServer::clients);
        let fuse =
            fuse.map(|client| VolumeClient::of(Frontend::Fuse, client.peer, client.export, client.writing));
        let mut users: Vec<_> = nbd.chain(vhost).chain(fuse).collect();
        let devices: Vec<_> = {
            let here =
                |name: &String| Some((name.clone(), running.way_of_device(name), running.device_path(name)?));
            running.claims.keys().filter_map(here).collect()
        };
        drop(running);
        for user in users.iter_mut().filter(|user| user.way == Frontend::Fuse) {
            with_users(&mut user.peer);
        }
        for (name, way, path) in devices {
            // A process may have it open several times.
            let its = users_of_device(&path).into_iter().collect::<BTreeSet<_>>().into_iter();
            users.extend(its.map(|peer| VolumeClient::of(way, peer, Some(name.clone()), true)));
        }
        users
    }

    /// Returns which client uses which volume, in words.
    pub fn uses(&self) -> Vec<String> {
        let uses = self.users().into_iter();
        let uses = uses.filter_map(|user| user.volume.map(|volume| format!("{} uses {volume}", user.peer)));
        uses.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Checks whether a client of that volume is not told of a new size, as the users of a block
    /// device are.
    pub fn is_size_kept(&self, name: &str) -> bool {
        let is_told = |way| match way {
            Frontend::Dev => true,
            Frontend::Ublk => DriverFeatures::probe().is_ok_and(DriverFeatures::may_resize),
            Frontend::Nbd | Frontend::VhostUser | Frontend::Fuse => false,
        };
        self.users().iter().any(|user| user.volume.as_deref() == Some(name) && !is_told(user.way))
    }

    /// Returns the block device of that volume, if it exists and is told of a new size.
    pub fn told_device(&self, name: &str) -> Option<PathBuf> {
        let (method, path) = {
            let running = self.lock();
            (running.dev.method(name), running.device_path(name)?)
        };
        let is_told = match method {
            Some(DeviceMethod::Nbd | DeviceMethod::Loop) => true,
            Some(DeviceMethod::Ublk) | None => DriverFeatures::probe().is_ok_and(DriverFeatures::may_resize),
        };
        is_told.then_some(path)
    }

    /// Returns the clients of the volume of that name.
    pub fn users_of(&self, name: &str) -> Vec<String> {
        let its = self.users().into_iter().filter(|user| user.volume.as_deref() == Some(name));
        // A client may have several connections.
        its.map(|user| user.peer).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the clients that have files of volumes open, or block devices that end with this
    /// process. They would lose them.
    pub fn users_of_files(&self) -> Vec<String> {
        let ends = |user: &crate::supervisor::fronts::VolumeClient| match (user.way, &user.volume) {
            (Frontend::Fuse, _) => true,
            (Frontend::Dev, Some(volume)) => self.lock().dev.has_device(volume),
            _ => false,
        };
        let users = self.users().into_iter().filter(ends);
        users.filter_map(|user| Some(format!("{} uses {}", user.peer, user.volume?))).collect()
    }
}

/// Returns the users of a block device: mounts, swap, devices on top of it, otherwise processes.
/// This process is left out, since it may have the device open to serve it.
pub fn users_of_device(path: &Path) -> Vec<String> {
    let users = DeviceIdentity::of(path).map_or_else(Vec::new, DeviceIdentity::users).into_iter();
    let own = std::process::id();
    let others = users.filter(|user| !matches!(user, Holder::Process { id, .. } if *id == own));
    others.map(|user| user.to_string()).collect()
}

/// Logs that virtual machines are cut off, with the number of requests in flight of each volume.
pub fn tell_cut_off(volumes: &[(String, usize)]) {
    let requests: Vec<_> = volumes.iter().map(|(name, requests)| format!("{requests} of {name}")).collect();
    let requests = requests.join(", ");
    tracing::warn!(event = "clients-cut", "virtual machines are cut off with requests in flight: {requests}");
}

/// Adds the users of a loop device that has a file open.
fn with_users(peer: &mut String) {
    let users = if peer.starts_with("/dev/") { users_of_device(Path::new(peer)) } else { Vec::new() };
    if !users.is_empty() {
        peer.push_str(&format!(" ({})", users.join(", ")));
    }
}
