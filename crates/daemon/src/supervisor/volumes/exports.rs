//! Publishes volumes as exports of the front ends that they are configured for.

use crate::supervisor::Supervisor;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use bcached_control::failure::Failure;
use bcached_port::{Export, Frontend, FrontendSet, Route, Uuid, VolumeId};

/// The export of a volume that cannot be used now.
fn unserved(name: &str, uuid: [u8; 16], (read_only, shared): (bool, bool), ways: FrontendSet) -> Export {
    Export {
        name: name.to_owned(),
        uuid: Uuid(uuid),
        label: String::new(),
        sectors: 0,
        block_sectors: 1,
        read_only,
        shared,
        frontends: ways,
        served: None,
    }
}

impl Supervisor {
    /// Registers all configured volumes by name. A client that asks for a volume that is not served
    /// yet gets that as its answer, and the meaning of the empty name does not depend on the order
    /// in which devices appear.
    pub fn name_exports(&self) {
        let entries = self.shared().table.volumes.clone();
        for entry in &entries {
            self.name_export(entry);
        }
        // Flash-only volumes are known by their sections until their caches are open.
        for flash in self.config.flash.iter().filter(|flash| flash.served) {
            let (name, read_only, shared) = (&flash.name, flash.read_only, flash.shared);
            self.exports.insert(unserved(name, flash.uuid.0, (read_only, shared), flash.ways));
        }
    }

    /// Registers the volume with the front ends as unavailable, unless it is served.
    pub fn name_export(&self, entry: &VolumeEntry) {
        let name = entry.display_name();
        // Clients of a volume that is moving wait for it.
        let moves = || self.exports.route(name).is_some_and(|route| route.is_held());
        if name.is_empty() || entry.is_leaving() || matches!(entry.state, VolumeState::Served(_)) || moves() {
            return;
        }
        let uuid = entry.uuid.map_or([0; 16], |uuid| uuid.0);
        self.exports.insert(unserved(name, uuid, (entry.read_only, entry.shared), entry.ways));
    }

    /// Publishes a served volume to the front ends, under its name.
    pub fn export(&self, entry: &VolumeEntry) {
        self.start_fronts_of(entry);
        let name = entry.display_name();
        // A volume that only moves to another engine is served throughout; the end of the job
        // reports that.
        let only_moves = self.shared().jobs.moves(name);
        if self.publish(entry) && !only_moves {
            tracing::info!(event = "volume-served", "{}: served", entry.display_name());
            self.tell_label_of_another(entry);
        }
    }

    /// Tells the front ends the properties of a served volume. Returns false if it is not served.
    pub fn publish(&self, entry: &VolumeEntry) -> bool {
        let (VolumeState::Served(info), Some(name), Some(cache)) = (&entry.state, &entry.name, entry.cache)
        else {
            return false;
        };
        let shared = self.shared();
        let Some(engine) = shared.table.caches[cache].engine() else { return false };
        if let Some(device) = entry.backing.as_ref().filter(|device| *device != name) {
            // Its name before its superblock gave it one.
            self.exports.remove(device);
        }
        let id = VolumeId(info.id.0);
        // Its clients stay on the same route: the volume has another size, or comes from another
        // engine.
        let route = self.exports.route(name);
        let route = route.filter(|route| route.is_held() || route.leads_to(id, &engine.connector));
        let route = route.unwrap_or_else(|| Route::new(id, &engine.connector));
        let ways = self.fronts.decide(name, entry.ways, (&self.config, &self.exports));
        self.fronts.ask_number(name, entry.asked_number());
        self.fronts.reserve((name, Uuid(info.uuid.0), entry.shared), ways, &self.exports);
        // Before it is published: a client that finds it is served in the right place from its
        // first request.
        self.fronts.lead(Uuid(info.uuid.0), &engine.ring_handle);
        self.exports.insert(Export {
            name: name.clone(),
            uuid: Uuid(info.uuid.0),
            label: info.label.to_string(),
            sectors: info.sectors,
            block_sectors: u32::try_from(info.logical_block_sectors()).expect("blocks are at most a page"),
            read_only: entry.read_only,
            shared: entry.shared,
            frontends: ways,
            served: Some(route.clone()),
        });
        route.lead(id, &engine.connector);
        self.fronts.publish(name, ways, (&self.exports, &engine.ring_handle));
        true
    }

    /// Ends the wait of clients for a volume that was to move to another engine and has not
    /// arrived.
    pub fn let_clients_go(&self, entry: &VolumeEntry) {
        if let Some(route) = self.exports.route(entry.display_name()).filter(Route::is_held) {
            route.release();
        }
    }

    /// Removes the export. Its clients lose it: it does not come back by itself.
    pub fn unexport(&self, name: &str) {
        self.exports.remove(name);
        self.fronts.retire(name);
    }

    /// Starts the front ends that are configured for volumes, present or future. If one of them
    /// cannot start, its volumes are not exported by another one instead. With passed sockets NBD
    /// is started in any case: a client of such a socket waits until it is answered.
    pub fn start_fronts(&self) -> Result<(), Failure> {
        // This process continues because no other could take over: a front end that cannot start
        // again now is retried with its volumes.
        let goes_on = !self.is_first && self.predecessor.is_none();
        self.wanted_fronts().try_for_each(|way| match self.start_front(way) {
            Err(failure) if goes_on => {
                tracing::error!(event = "front-not-back", "{failure}");
                Ok(())
            }
            started => started,
        })
    }

    fn wanted_fronts(&self) -> impl Iterator<Item = Frontend> {
        let ways: Vec<_> = {
            let shared = self.shared();
            let said = shared.table.volumes.iter().map(|entry| entry.ways);
            said.chain(self.config.flash.iter().map(|flash| flash.ways)).chain([self.config.ways]).collect()
        };
        let has_sockets = self.fronts.has_sockets();
        let wanted = move |way: &Frontend| {
            ways.iter().any(|ways| ways.has(*way)) || *way == Frontend::Nbd && has_sockets
        };
        Frontend::ALL.into_iter().filter(wanted)
    }

    /// Retries volumes that a front end refused when they came.
    pub fn try_ways_again(&self) {
        for name in self.fronts.refused() {
            let entry =
                self.shared().table.volumes.iter().find(|entry| entry.display_name() == name).cloned();
            if let Some(entry) = entry {
                self.start_fronts_of(&entry);
                self.publish(&entry);
            }
        }
    }

    fn start_front(&self, way: Frontend) -> Result<(), Failure> {
        self.fronts.start(way, &self.config, &self.exports)
    }

    /// Starts the front ends of a volume: one that was added later may be the first of its kind.
    fn start_fronts_of(&self, entry: &VolumeEntry) {
        for way in entry.ways.iter() {
            if let Err(failure) = self.start_front(way) {
                self.fronts.refuse(entry.display_name(), way, &failure);
            }
        }
    }
}
