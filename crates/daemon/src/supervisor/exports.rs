//! Volumes as exports, and the NBD server that serves them.

use super::Supervisor;
use super::table::{VolumeEntry, VolumeState};
use crate::config::Listen;
use crate::failure::{Failure, Kind};
use bcached_front_nbd::{Endpoint, Limits, ListenError, NbdServer, Options, StartError};
use bcached_port::socket::SocketError;
use bcached_port::{Export, Route, Uuid, VolumeId};
use std::sync::PoisonError;

impl Supervisor {
    /// Makes all that is configured known by name: whoever asks for what is not served yet is told so, and what the
    /// empty name means does not change with the order in which devices come.
    pub(super) fn name_exports(&self) {
        let entries = self.shared().table.volumes.clone();
        for entry in &entries {
            self.name_export(entry);
        }
    }

    /// The front ends know the volume and cannot use it, unless it is served.
    pub(super) fn name_export(&self, entry: &VolumeEntry) {
        let name = entry.display_name();
        // Who uses a volume that moves waits for it.
        let moves = || self.exports.route(name).is_some_and(|route| route.is_held());
        if name.is_empty() || entry.is_leaving() || matches!(entry.state, VolumeState::Served(_)) || moves() {
            return;
        }
        self.exports.insert(Export {
            name: name.to_owned(),
            uuid: Uuid([0; 16]),
            label: String::new(),
            sectors: 0,
            block_sectors: 1,
            read_only: entry.read_only,
            shared: entry.shared,
            served: None,
        });
    }

    /// Makes a served volume known to the front ends, under its name.
    pub(super) fn export(&self, entry: &VolumeEntry) {
        if self.publish(entry) {
            tracing::info!(event = "volume-served", "{}: served", entry.display_name());
        }
    }

    /// Tells the front ends what a served volume is. False if it is not served.
    pub(super) fn publish(&self, entry: &VolumeEntry) -> bool {
        let (VolumeState::Served(info), Some(name), Some(cache)) = (&entry.state, &entry.name, entry.cache)
        else {
            return false;
        };
        let shared = self.shared();
        let Some(engine) = shared.table.caches[cache].engine() else { return false };
        if let Some(device) = entry.backing.as_ref().filter(|device| *device != name) {
            // What it was known by before its superblock had given it a name.
            self.exports.remove(device);
        }
        let id = VolumeId(info.id.0);
        // Who uses it already goes on: it has another size, or comes from another engine.
        let route = self.exports.route(name);
        let route = route.filter(|route| route.is_held() || route.leads_to(id, &engine.connector));
        let route = route.unwrap_or_else(|| Route::new(id, &engine.connector));
        self.exports.insert(Export {
            name: name.clone(),
            uuid: Uuid(info.uuid.0),
            label: info.label.to_string(),
            sectors: info.sectors,
            block_sectors: u32::try_from(info.block_sectors).expect("blocks are at most a page"),
            read_only: entry.read_only,
            shared: entry.shared,
            served: Some(route.clone()),
        });
        route.lead(id, &engine.connector);
        true
    }

    /// Nobody waits any more for a volume that was to go to another engine, and has not come there.
    pub(super) fn let_clients_go(&self, entry: &VolumeEntry) {
        if let Some(route) = self.exports.route(entry.display_name()).filter(Route::is_held) {
            route.release();
        }
    }

    /// Listens. Volumes are added as they come.
    pub(super) fn start_nbd(&self) -> Result<(), Failure> {
        let endpoints = self.config.listen.iter().map(|listen| match listen {
            Listen::Unix(path) => Endpoint::Unix { path: path.clone(), group: None },
            Listen::Tcp(address) => Endpoint::Tcp { address: *address, anywhere: false },
        });
        // A quarter of the memory is for payloads of requests; the least that the largest request needs is in it,
        // because the memory's own least is four times that.
        let limits = Limits { total_bytes: self.config.memory_bytes / 4, ..Limits::default() };
        let options = Options { endpoints: endpoints.collect(), limits };
        let server = NbdServer::start(options, self.exports.clone()).map_err(|error| {
            let kind = match &error {
                StartError::Listen(ListenError::InUse(_) | ListenError::Unix(SocketError::InUse(_))) => {
                    Kind::InUse
                }
                StartError::Listen(
                    ListenError::NotLoopback(_)
                    | ListenError::Unix(SocketError::NotSocket(_) | SocketError::TooLong(_)),
                ) => Kind::Usage,
                StartError::Listen(ListenError::Unix(SocketError::NoDirectory(_))) => Kind::NotFound,
                _ => Kind::Io,
            };
            let why =
                std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            Failure::new(kind, "cannot serve NBD").why(format!("{error}{why}")).option("--export")
        })?;
        for bound in server.bound() {
            tracing::info!(event = "nbd-listening", "NBD on {bound}");
        }
        *self.nbd.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        Ok(())
    }
}
