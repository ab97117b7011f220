//! A cache device that goes away while its set is open, and comes back as another device: as [`crate::supervisor::volumes::reconnect`], for caches. Its engine
//! opens the set again on it (`bcached_host::cache_reconnect`); what waited goes on, and the claims of backing devices are held all the time.

use crate::engine_error;
use crate::engine_thread::Engine;
use crate::supervisor::devices::open_timeout::{Patience, Unopened};
use crate::supervisor::table::CacheEntry;
use crate::supervisor::volumes::reconnect::{Absent, fails};
use crate::supervisor::{Event, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_engine::{Error, Status};
use bcached_format::Uuid;
use bcached_offline::devices::{self, CacheDevice, Found};
use bcached_uring::Presence;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// What the loop knows of cache devices whose sets have failed.
#[derive(Default)]
pub struct CacheReturns {
    /// By cache, those that are looked for.
    absent: BTreeMap<usize, Absent>,
    /// Those that are gone, whose sets do not know it yet and are about to find out.
    proving: BTreeSet<usize>,
    /// Those that their engines are about to take up.
    returning: BTreeMap<usize, (Presence, PathBuf)>,
    /// Looks that hang.
    slow: Patience<Found<CacheDevice>>,
}

impl CacheReturns {
    /// There is something to look at soon.
    pub fn is_busy(&self) -> bool {
        !self.absent.is_empty() || !self.returning.is_empty()
    }
}

/// What is known of a cache that is open.
struct Known {
    name: String,
    device: String,
    /// The device's own.
    uuid: Uuid,
    presence: Presence,
    engine: Engine,
}

impl Known {
    fn of(entry: &CacheEntry) -> Option<Self> {
        let (name, device) = (entry.display_name().to_owned(), entry.device.clone());
        Some(Self { name, device, uuid: entry.uuid?, presence: entry.opened?, engine: entry.engine()? })
    }
}

impl Supervisor {
    /// Looks for the device of a cache whose set has failed, if it is gone, or fails and its name leads to another one by now.
    pub fn look_for_absent_cache(&mut self, cache: usize, status: &Status) {
        if self.cache_returns.returning.contains_key(&cache) {
            return;
        }
        let Some(known) = self.shared().table.caches.get(cache).and_then(Known::of) else { return };
        let is_gone = known.presence.is_gone();
        if is_gone && status.failed.is_none() {
            self.prove_cache(cache, &known.engine);
        }
        if status.failed.is_none() || !is_gone && !fails(&status.cache_health) {
            if self.cache_returns.absent.remove(&cache).is_some() {
                self.shared().table.caches[cache].absent = None;
            }
            return;
        }
        let absent = self.cache_returns.absent.entry(cache).or_insert_with(Absent::since_now);
        let gone = format!(
            "{} is gone: the system has it no more; the cache is opened again when a device with its UUID comes",
            known.device
        );
        if is_gone && absent.goes() {
            tracing::error!(event = "device-gone", "cache {}: {gone}", known.name);
            self.shared().table.caches[cache].absent = Some(gone.as_str().into());
        }
        // What it has not answered yet it may still do.
        let absent = self.cache_returns.absent.get_mut(&cache);
        if status.cache_health.waiting > 0 || !absent.is_some_and(Absent::is_due) {
            return;
        }
        let (uuid, presence) = (known.uuid, known.presence);
        let open = move |device: &str| devices::open_returned_cache(device, uuid, presence);
        match self.cache_returns.slow.open(&known.device, open) {
            Ok(Found::Back(found)) => self.begin_cache_return(cache, &known.engine, found),
            Ok(Found::Another(failure)) => self.cache_not_taken(cache, failure, Absent::tells),
            Err(Unopened::Hangs(_)) => {}
            Err(Unopened::Failed(failure)) if failure.kind != Kind::NotFound => {
                self.cache_not_taken(cache, failure, Absent::refused);
            }
            Ok(Found::Nothing) | Err(Unopened::Failed(_)) => {
                if self.cache_returns.absent.get_mut(&cache).is_some_and(Absent::is_away) {
                    self.shared().table.caches[cache].absent = is_gone.then(|| gone.into());
                }
            }
        }
    }

    /// The device is gone, and its set will only find out by a write: the next may be half a minute away, or never come.
    fn prove_cache(&mut self, cache: usize, engine: &Engine) {
        if self.cache_returns.proving.insert(cache) {
            let sender = self.sender.clone();
            engine.prove_cache(Box::new(move |_set_knows| drop(sender.send(Event::CacheProved(cache)))));
        }
    }

    /// It knows by now; if not, it is asked again at the next look.
    pub fn cache_proved(&mut self, cache: usize) {
        self.cache_returns.proving.remove(&cache);
    }

    /// Its engine has it.
    fn begin_cache_return(&mut self, cache: usize, engine: &Engine, found: CacheDevice) {
        let (presence, path) = (found.device.presence(), found.device.path().to_owned());
        self.cache_returns.returning.insert(cache, (presence, path));
        let sender = self.sender.clone();
        let answer = move |taken| drop(sender.send(Event::CacheReturned(cache, Box::new(taken))));
        engine.take_back_cache(found, Box::new(answer));
    }

    /// Its engine has taken it up, or says why not. What is lost is what the next flush of a client says.
    pub fn cache_returned(&mut self, cache: usize, taken: Result<bool, Error>) {
        let Some((presence, path)) = self.cache_returns.returning.remove(&cache) else { return };
        let Some(Known { name, device, .. }) = self.shared().table.caches.get(cache).and_then(Known::of)
        else {
            return;
        };
        match taken {
            Err(error) => {
                let failure = engine_error::of_cache_return(&name, &path, &error);
                self.cache_not_taken(cache, failure, Absent::refused);
            }
            Ok(may_have_lost) => {
                self.cache_returns.absent.remove(&cache);
                // The log knows nothing of this one yet.
                self.said.remove(&device);
                {
                    let entry = &mut self.shared().table.caches[cache];
                    (entry.opened, entry.absent) = (Some(presence), None);
                }
                tracing::info!(
                    event = "device-returned",
                    "cache {name}: its device is back as {}",
                    path.display()
                );
                if may_have_lost {
                    tracing::error!(
                        event = "flush-failed",
                        "cache {name}: what was not flushed by who wrote it may be lost with the power of its device: the next flush of \
                         each volume with dirty data says so"
                    );
                }
            }
        }
    }

    /// Forgets those that are open no more.
    pub fn look_after_cache_returns(&mut self) {
        let open: Vec<_> = self.shared().table.open_engines().into_iter().map(|(index, _)| index).collect();
        self.cache_returns.absent.retain(|cache, _| open.contains(cache));
        self.cache_returns.proving.retain(|cache| open.contains(cache));
        self.cache_returns.returning.retain(|cache, _| open.contains(cache));
    }

    /// As of a volume.
    fn cache_not_taken(&mut self, cache: usize, failure: Failure, note: fn(&mut Absent, &Failure) -> bool) {
        let Some(absent) = self.cache_returns.absent.get_mut(&cache) else { return };
        if !note(absent, &failure) {
            return;
        }
        let entry = &mut self.shared().table.caches[cache];
        tracing::error!(event = "device-not-taken", "cache {}: {failure}", entry.display_name());
        entry.absent = Some(failure.to_string().into());
    }
}
