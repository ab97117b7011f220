//! The orderly end: users, then exports, then engines. Dirty data is never written back here; it is named instead.

use super::table::{CacheEntry, CacheState, VolumeEntry, VolumeState};
use super::{Event, Phase, Supervisor, health};
use crate::control::Signal;
use crate::failure::{Failure, Kind};
use crate::sizes::human;
use bcached_front_nbd::NbdServer;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How often the users are looked at while a stop waits for them.
const LOOK: Duration = Duration::from_millis(100);

/// How long replies that are due may take to go out.
const REPLIES_LIMIT: Duration = Duration::from_secs(5);

/// How long an engine may take to write what a stop writes: leaves and one journal entry, no dirty data.
const ENGINE_LIMIT: Duration = Duration::from_secs(30);

impl Supervisor {
    /// Stops everything.
    pub(super) fn stop(self) -> Result<(), Failure> {
        self.shared().phase = Phase::Stopping;
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        tracing::info!(event = "stopping", "stopping");
        let server = self.nbd.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            self.wait_for_users(&server);
            if let Err(busy) = server.shutdown(REPLIES_LIMIT) {
                tracing::warn!(event = "clients-cut", "{busy}");
            }
        }
        let mut outcome = Ok(());
        let (caches, volumes) = {
            let mut shared = self.shared();
            let caches: Vec<_> = shared.table.caches.drain(..).collect();
            (caches, std::mem::take(&mut shared.table.volumes))
        };
        for (index, cache) in caches.into_iter().enumerate() {
            let own: Vec<_> = volumes.iter().filter(|volume| volume.cache == Some(index)).collect();
            outcome = outcome.and(stop_cache(cache, &own));
        }
        if outcome.is_ok() {
            tracing::info!(event = "stopped", "stopped");
        }
        outcome
    }

    /// Gives users the time to go; a second signal shortens it.
    fn wait_for_users(&self, server: &NbdServer) {
        let deadline = Instant::now() + self.config.stop_timeout;
        let mut named = false;
        loop {
            let users: BTreeSet<_> = server
                .clients()
                .into_iter()
                .filter_map(|client| client.export.map(|export| format!("{} uses {export}", client.peer)))
                .collect();
            let now = Instant::now();
            if users.is_empty() || now >= deadline {
                return;
            }
            if !named {
                let users: Vec<_> = users.into_iter().collect();
                let limit = self.config.stop_timeout.as_secs();
                tracing::info!(event = "stop-waits", "up to {limit} s for: {}", users.join(", "));
                named = true;
            }
            if let Ok(Event::Signal(Signal::Stop)) = self.events.recv_timeout(LOOK) {
                return;
            }
        }
    }
}

/// Stops one engine. One that is still opening is left: whatever it writes then, the next start recovers.
fn stop_cache(cache: CacheEntry, volumes: &[&VolumeEntry]) -> Result<(), Failure> {
    let CacheEntry { state: CacheState::Open { engine, thread, .. }, device, .. } = cache else {
        return Ok(());
    };
    if let Some(status) = engine.status() {
        name_dirty_data(&device, volumes, &status);
        name_stuck_devices(&device, volumes, &status);
    }
    let failed = |why: String| {
        Failure::new(Kind::Io, format!("the cache on {device} could not be stopped in order"))
            .why(why)
            .next("the next start recovers it as after a crash")
    };
    match engine.stop(ENGINE_LIMIT) {
        Some(Ok(())) => {
            // It has answered and does nothing more but return.
            let _ended = thread.join();
            Ok(())
        }
        Some(Err(error)) => Err(failed(error.to_string())),
        None => Err(failed(format!("no answer for {} s", ENGINE_LIMIT.as_secs()))),
    }
}

/// A stop waits for operations in flight: a device that hangs is why it takes long, and somebody should know.
fn name_stuck_devices(device: &str, volumes: &[&VolumeEntry], status: &bcached_engine::Status) {
    let backings = volumes.iter().filter_map(|entry| {
        let VolumeState::Served(served) = &entry.state else { return None };
        let info = status.volumes.iter().find(|info| info.id == served.id)?;
        Some((entry.backing.as_deref()?, info.backing_health?))
    });
    for (device, found) in std::iter::once((device, status.cache_health)).chain(backings) {
        if let Some(told) = health::stuck(device, &found) {
            let limit = ENGINE_LIMIT.as_secs();
            tracing::warn!(event = "stop-waits", "up to {limit} s for a device: {told}");
        }
    }
}

fn name_dirty_data(device: &str, volumes: &[&VolumeEntry], status: &bcached_engine::Status) {
    let device = device.rsplit('/').next().unwrap_or(device);
    for info in status.volumes.iter().filter(|info| info.dirty_sectors > 0 && !info.flash_only) {
        let entry = volumes
            .iter()
            .find(|entry| matches!(&entry.state, VolumeState::Served(served) if served.id == info.id));
        let name = entry.and_then(|entry| entry.name.clone()).unwrap_or_else(|| info.uuid.to_string());
        let dirty = human(info.dirty_sectors * 512);
        tracing::info!(event = "dirty-stays", "{name}: {dirty} dirty stays on {device}; keep them together");
    }
}
