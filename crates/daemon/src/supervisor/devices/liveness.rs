//! Checks that all devices answer before everything is handed over to another process. A pending
//! request keeps its engine from ending, and so keeps both processes from the device. From the
//! first step of a hand-over on no client is served, so all of this is checked before.

use crate::engine_thread::Engine;
use crate::supervisor::Shared;
use crate::supervisor::handover::cannot;
use crate::supervisor::jobs::api::lock;
use crate::supervisor::report::health;
use crate::supervisor::table::{VolumeEntry, VolumeState};
use bcached_control::failure::{Failure, Kind};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long the devices may take to answer. A disk under load takes a second, and a client that
/// waits for such a disk does not notice this check beside it.
const LIMIT: Duration = Duration::from_secs(4);

/// When that limit is over, devices with a request pending at least this long are named. Younger
/// requests may have been submitted by others since.
const SILENT: Duration = Duration::from_secs(1);

/// How often to check whether earlier requests have been answered.
const LOOK: Duration = Duration::from_millis(10);

/// What keeps an engine from ending in order, in sentences.
struct HandOverBlockers {
    /// Devices that do not answer.
    silent: Vec<String>,
    /// Caches that have stopped writing, and backing devices that are gone. A client that waits for
    /// one cannot be handed over. A volume that is served without its device would not be served by
    /// a process that has to open it.
    stopped: Vec<String>,
}

impl HandOverBlockers {
    /// Collects it. A device is silent if a request has been pending on it for at least `age`.
    fn now(shared: &Mutex<Shared>, age: Duration) -> Self {
        let (indices, engines): (Vec<_>, Vec<_>) = lock(shared)
            .table
            .open_engines()
            .into_iter()
            .map(|(index, engine)| (index, Some(engine)))
            .unzip();
        let (mut silent, mut stopped) = (Vec::new(), Vec::new());
        for (index, status) in indices.into_iter().zip(Engine::status_of_all(&engines)) {
            let Some(status) = status else { continue };
            let table = &lock(shared).table;
            silent.extend(health::silent_of(table, index, &status, age));
            let name = table.caches[index].display_name();
            stopped.extend(status.failed.map(|error| format!("cache {name} has stopped writing: {error}")));
            let is_without = |entry: &&VolumeEntry| match &entry.state {
                VolumeState::Served(info) => {
                    entry.cache == Some(index) && status.without_backing.contains(&info.id)
                }
                _ => false,
            };
            let without = table.volumes.iter().filter(is_without).map(VolumeEntry::display_name);
            stopped.extend(without.map(|name| format!("the backing device of volume {name} is gone")));
        }
        Self { silent, stopped }
    }

    fn refuse(&self) -> Result<(), Failure> {
        let Self { silent, stopped } = self;
        let (why, next) = match (silent.is_empty(), stopped.is_empty()) {
            (true, true) => return Ok(()),
            (false, _) => (silent.join("; "), "try again when it answers; `bcached status` shows that"),
            (true, false) => (
                stopped.join("; "),
                "try again when it works (`bcached status` shows that), or stop this daemon and start the other",
            ),
        };
        Err(cannot(Kind::Busy, why).next(next))
    }
}

/// Checks that no device is known to hang and no set has stopped writing.
pub fn check(shared: &Mutex<Shared>) -> Result<(), Failure> {
    HandOverBlockers::now(shared, health::SLOW).refuse()
}

/// Checks the same, and waits until every device has answered, including earlier requests.
pub fn prove(shared: &Mutex<Shared>) -> Result<(), Failure> {
    check(shared)?;
    let begun = Instant::now();
    let until = begun + LIMIT;
    if !have_answered(shared, until) {
        HandOverBlockers::now(shared, SILENT).refuse()?;
        let late = format!("not every device has answered within {} s", LIMIT.as_secs());
        return Err(
            cannot(Kind::Busy, late).next("try again later; `bcached status` shows which does not answer")
        );
    }
    loop {
        let trouble = HandOverBlockers::now(shared, begun.elapsed());
        if trouble.silent.is_empty() || !trouble.stopped.is_empty() || Instant::now() >= until {
            return trouble.refuse();
        }
        std::thread::sleep(LOOK);
    }
}

/// Sends a request to each device. Returns whether all have answered by `until`.
fn have_answered(shared: &Mutex<Shared>, until: Instant) -> bool {
    let engines = lock(shared).table.open_engines();
    let (send, receive) = mpsc::channel();
    for (_, engine) in engines {
        let send = send.clone();
        // The status of a set reports how it fared.
        engine.prove_devices(Box::new(move |_fared| {
            let _nobody_waits_any_more = send.send(());
        }));
    }
    drop(send);
    loop {
        match receive.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => {}
            // All have answered, or are gone.
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}
