//! Opens what is configured, keeps it served, stops it in order.
//!
//! One loop over one channel of events: devices that come, sets that open, volumes that attach, signals. Each cache
//! and each volume has its own state and its own reason; what is missing is looked for again, what is refused has its
//! final reason. Devices named on the command line are meant now: there the first reason ends the program.

mod exports;
mod health;
mod report;
mod stop;
mod table;

use crate::config::{CommandLine, Config};
use crate::control::{Control, Handlers, Signal};
use crate::devices;
use crate::engine_thread::{self, News, Opened, Start};
use crate::failure::{Failure, Kind};
use crate::log;
use crate::notes;
use bcached_engine::{Error, Options, VolumeInfo};
use bcached_front_nbd::NbdServer;
use bcached_port::ExportTable;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};

/// How often missing devices are looked for.
const RETRY: Duration = Duration::from_secs(2);

/// How often the sets are looked at when nothing else happens.
const HEALTH: Duration = Duration::from_secs(5);

/// What the loop waits for.
enum Event {
    Signal(Signal),
    Cache(usize, News),
    VolumeAdded(usize, Result<VolumeInfo, Error>),
}

/// Where the daemon is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Starting,
    Ready,
    Stopping,
}

/// What the loop changes and the control thread reads.
struct Shared {
    phase: Phase,
    table: Table,
}

struct Supervisor {
    line: CommandLine,
    config: Config,
    /// Devices come from the command line.
    strict: bool,
    notes: PathBuf,
    /// What the log has said of each device.
    said: BTreeMap<String, health::Said>,
    shared: Arc<Mutex<Shared>>,
    exports: ExportTable,
    nbd: Arc<Mutex<Option<NbdServer>>>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    started: Instant,
}

/// Serves what `line` asks for until a signal ends it. Prints `ready` on standard output and tells systemd.
///
/// # Errors
/// Wrong configuration, before any device is opened; with devices on the command line, the first that cannot be
/// served; a stop that could not be orderly.
pub fn serve(line: CommandLine) -> Result<(), Failure> {
    bcached_uring::memory::return_large_blocks();
    log::init();
    let config = Config::load(&line)?;
    let notes = notes::directory()?;
    let control = Control::bind(&config.control)?;
    let (sender, events) = mpsc::channel();
    let strict = !line.caches.is_empty() || !line.backings.is_empty();
    let shared = Arc::new(Mutex::new(Shared { phase: Phase::Starting, table: Table::of(&config, !strict) }));
    let nbd = Arc::new(Mutex::new(None));
    let started = Instant::now();
    let signals = sender.clone();
    control
        .start(Handlers {
            status: report::status_of(Arc::clone(&shared), Arc::clone(&nbd), started),
            signal: Box::new(move |signal| drop(signals.send(Event::Signal(signal)))),
        })
        .map_err(|error| Failure::new(Kind::Io, "cannot start the control thread").why(error.to_string()))?;
    let exports = ExportTable::new();
    let supervisor = Supervisor {
        line,
        config,
        strict,
        notes,
        said: BTreeMap::new(),
        shared,
        exports,
        nbd,
        events,
        sender,
        started,
    };
    supervisor.run()
}

impl Supervisor {
    fn run(mut self) -> Result<(), Failure> {
        warn_of_names(&self.config);
        self.check_strict()?;
        self.advance()?;
        self.start_nbd()?;
        let outcome = self.serve_events();
        let stopped = self.stop();
        outcome.and(stopped)
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until a signal, or until a device of the command line is refused.
    fn serve_events(&mut self) -> Result<(), Failure> {
        loop {
            self.announce_if_ready();
            let pending = self.shared().phase == Phase::Starting || self.shared().table.is_waiting();
            match self.events.recv_timeout(if pending { RETRY } else { HEALTH }) {
                Ok(Event::Signal(Signal::Stop)) => return Ok(()),
                Ok(Event::Signal(Signal::Reload)) => self.reload(),
                Ok(Event::Cache(index, News::Opened(result))) => self.cache_opened(index, result),
                Ok(Event::Cache(index, News::Ended)) => self.cache_ended(index)?,
                Ok(Event::VolumeAdded(index, result)) => self.volume_added(index, result),
                Err(RecvTimeoutError::Timeout) => self.look_after_sets(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the supervisor holds a sender itself"),
            }
            self.advance()?;
        }
    }

    /// A backing device without a cache may hold old data only: that is worth its own sentence, before anything else.
    fn check_strict(&self) -> Result<(), Failure> {
        if !self.config.caches.is_empty() {
            return Ok(());
        }
        let Some(volume) = self.config.volumes.first() else { return Ok(()) };
        let backing = devices::open_backing(&volume.backing)?;
        let what = format!("cannot serve {}", volume.backing);
        if backing.superblock.state() == bcached_format::BackingState::Dirty {
            return Err(Failure::new(Kind::WrongSet, what)
                .why(format!(
                    "its newest data is in the cache set {}, which is not named",
                    backing.superblock.set_uuid()
                ))
                .next("name its cache with --cache; nothing overrides this"));
        }
        Err(Failure::new(Kind::NotInThisVersion, what)
            .why("serving a backing device without a cache is not in this version")
            .next("name a cache with --cache, or read its data through `losetup --offset`"))
    }

    /// Takes every step that can be taken now.
    fn advance(&mut self) -> Result<(), Failure> {
        let (caches, volumes) = {
            let shared = self.shared();
            (shared.table.caches.len(), shared.table.volumes.len())
        };
        for index in 0..caches {
            self.try_cache(index);
        }
        for index in 0..volumes {
            self.try_volume(index);
        }
        if self.strict
            && let Some(failure) = self.shared().table.first_failure()
        {
            return Err(failure);
        }
        Ok(())
    }

    /// Opens the cache's device if it waits for that, and starts its engine.
    fn try_cache(&self, index: usize) {
        let device = match self.shared().table.caches.get(index) {
            Some(CacheEntry { state: CacheState::Waiting(_), device, .. }) => device.clone(),
            _ => return,
        };
        let state = match devices::open_cache(&device) {
            Err(failure) if failure.kind == Kind::NotFound && !self.strict => CacheState::Waiting(failure),
            Err(failure) => CacheState::Failed(failure),
            Ok(cache) => {
                let (label, set) = (cache.superblock.label(), cache.superblock.set_uuid());
                let name = self.shared().table.name_cache(index, label, set);
                let note = self.notes.join(format!("{set}.note"));
                let start = Start { device: cache.device, set_uuid: set, note, options: self.options() };
                let sender = self.sender.clone();
                let news = move |news| drop(sender.send(Event::Cache(index, news)));
                match engine_thread::start(&name, start, news) {
                    Ok(thread) => CacheState::Opening { set, thread },
                    Err(error) => CacheState::Failed(
                        Failure::new(Kind::Io, "cannot start its thread").why(error.to_string()),
                    ),
                }
            }
        };
        self.shared().table.set_cache(index, state);
    }

    /// Half of the memory is for nodes, shared among the sets; the rest is for requests and what surrounds them.
    fn options(&self) -> Options {
        let share = self.config.memory_bytes / 2 / (self.config.caches.len().max(1) as u64);
        Options { node_budget_bytes: usize::try_from(share).unwrap_or(usize::MAX), ..Options::default() }
    }

    fn cache_opened(&mut self, index: usize, result: Result<Opened, String>) {
        match result {
            Err(reason) => {
                let failure = Failure::new(Kind::Io, "cannot open the cache set").why(reason);
                self.shared().table.set_cache(index, CacheState::Failed(failure));
            }
            Ok(opened) => {
                tracing::info!(event = "cache-opened", "{}; {}", opened.backend, opened.note);
                let flash_only = opened.volumes.iter().filter(|volume| volume.flash_only).cloned().collect();
                let entries = self.shared().table.cache_opened(index, opened, flash_only);
                for entry in entries {
                    self.export(&entry);
                }
            }
        }
    }

    /// An engine's thread is gone although nobody stopped it. With the last one the program ends, so that whoever
    /// started it starts it again: the next start recovers the set.
    fn cache_ended(&self, index: usize) -> Result<(), Failure> {
        let mut shared = self.shared();
        if !shared.table.is_open(index) {
            return Ok(());
        }
        let failure = Failure::new(Kind::Io, "the engine of a cache ended unexpectedly")
            .why("a panic; its message stands before this")
            .next("start the daemon again: it recovers the set as after a crash");
        shared.table.set_cache(index, CacheState::Failed(failure.clone()));
        if shared.table.caches.iter().any(|cache| matches!(cache.state, CacheState::Open { .. })) {
            return Ok(());
        }
        Err(failure)
    }

    /// Logs, once, that a set has stopped writing.
    fn look_after_sets(&mut self) {
        let engines = self.shared().table.open_engines();
        for (index, engine) in engines {
            let Some(status) = engine.status() else { continue };
            if let Some(error) = &status.failed
                && let Some(name) = self.shared().table.note_failure(index)
            {
                tracing::error!(event = "cache-stopped-writing", "cache {name}: {}", health::stopped(error));
            }
            let devices = self.shared().table.devices_of(index, &status);
            for (device, found) in devices {
                let said = self.said.entry(device.clone()).or_default();
                match health::news(&device, &found, said) {
                    Some(health::News::Bad(told)) => tracing::error!(event = "device-trouble", "{told}"),
                    Some(health::News::Good(told)) => tracing::info!(event = "device-answers", "{told}"),
                    None => {}
                }
            }
        }
    }

    /// Opens the volume's device if it waits for that and its cache is open, and gives it to the engine.
    fn try_volume(&self, index: usize) {
        let Some((device, mode, cache)) = self.shared().table.wanting_device(index) else { return };
        let opened = devices::open_backing(&device);
        let mut shared = self.shared();
        let state = match opened {
            Err(failure) if failure.kind == Kind::NotFound && !self.strict => VolumeState::Waiting(failure),
            Err(failure) => VolumeState::Failed(failure),
            Ok(backing) => match shared.table.engine_for(cache, &backing.superblock) {
                Err(failure) => VolumeState::Failed(failure),
                Ok(None) => VolumeState::waiting_for_cache(),
                Ok(Some((cache, engine))) => {
                    shared.table.name_volume(index, &backing.superblock, cache);
                    let sender = self.sender.clone();
                    let added = move |result| drop(sender.send(Event::VolumeAdded(index, result)));
                    engine.add_backing(backing.device, mode, Box::new(added));
                    VolumeState::Attaching
                }
            },
        };
        shared.table.set_volume(index, state);
    }

    fn volume_added(&mut self, index: usize, result: Result<VolumeInfo, Error>) {
        let entry: Option<VolumeEntry> = self.shared().table.volume_added(index, result);
        if let Some(entry) = entry {
            self.export(&entry);
        }
    }

    fn announce_if_ready(&mut self) {
        let mut shared = self.shared();
        if shared.phase != Phase::Starting || !shared.table.is_settled(self.started.elapsed()) {
            return;
        }
        shared.phase = Phase::Ready;
        drop(shared);
        // Nobody may be reading, which is no reason to stop.
        let _unread = writeln!(std::io::stdout(), "ready");
        tracing::info!(event = "ready", "ready");
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }

    /// Reads the configuration again: new caches and volumes are served, new cache modes take effect. What is no
    /// longer configured stays until the next start.
    fn reload(&mut self) {
        if self.strict {
            tracing::info!(event = "reload-nothing", "there is no configuration to read again");
            return;
        }
        match Config::load(&self.line) {
            Err(failure) => tracing::error!(event = "reload-refused", "{failure}"),
            Ok(config) => {
                let gone: BTreeSet<_> = self.shared().table.adopt(&config);
                for name in gone {
                    tracing::warn!(event = "reload-kept", "{name} is served until the next start");
                }
                self.config = config;
                tracing::info!(event = "reloaded", "the configuration was read again");
            }
        }
    }
}

fn warn_of_names(config: &Config) {
    let caches = config.caches.iter().map(|cache| &cache.device);
    for name in caches.chain(config.volumes.iter().map(|volume| &volume.backing)) {
        if devices::is_unstable_name(name) {
            tracing::warn!(event = "unstable-name", "{name} may be another disk after the next boot");
        }
    }
}
