//! Compares what runs with what the files say now. They differ if the files were changed without a
//! reload, or if values were set with `--runtime`.

use crate::control_server::ConfigDiffHandler;
use crate::supervisor::options::owner::{OptionsOwner, OwnerView};
use crate::supervisor::table::{CacheEntry, VolumeEntry};
use crate::supervisor::{Event, Supervisor};
use bcached_config::options::Scope;
use bcached_config::options::layers::{ConfiguredOptions, OptionLayers};
use bcached_config::options::value::Value;
use bcached_config::{Config, FlashVolume, Group, Tls, Volume};
use bcached_control::config_diff::{ConfigDifference, ConfigDifferences};
use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::typed;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

/// How long the client waits here: less than it waits for an answer.
const LIMIT: Duration = Duration::from_secs(8);

/// The client that waits for the answer.
pub type DiffReply = Sender<Result<ConfigDifferences, Failure>>;

const RESTART: &str = "the next start";
const OF_DEVICE: &str = "the next start; `bcached replace` moves its volumes to another device now";
const OF_CACHE: &str = "the next start, or `bcached attach` and `detach`";
const OF_SIZE: &str = "the next start, or `bcached grow` and `shrink`";
const OF_NAME: &str = "the next start, when the flash-only volume that has this name gets another one";
const RUNTIME: &str = "`bcached unset` or the next start: it was set with --runtime";
const RELOAD: &str = "a reload or the next start";

/// The handler for the control thread.
pub fn ask(events: Sender<Event>) -> ConfigDiffHandler {
    Box::new(move || {
        let (answer, answered) = mpsc::channel();
        let _refused_below =
            events.send(Event::Request(crate::supervisor::ClientRequest::ConfigDiff(answer)));
        answered.recv_timeout(LIMIT).unwrap_or_else(|_| {
            Err(crate::supervisor::late("the daemon has not compared its files yet").next("try again later"))
        })
    })
}

impl Supervisor {
    /// Answers the client.
    pub fn differs(&self, answer: &DiffReply) {
        let _gone = answer.send(self.differences());
    }

    fn differences(&self) -> Result<ConfigDifferences, Failure> {
        if self.strict {
            return Err(Failure::new(Kind::Usage, "there is nothing to compare")
                .why("the daemon serves devices of its command line, without a configuration"));
        }
        let differences = self.differences_from(&Config::load(&self.line)?);
        Ok(ConfigDifferences { differences })
    }

    /// What a reload of `files` leaves unchanged, and until when, a sentence each.
    pub fn not_reloaded(&self, files: &Config) -> Vec<String> {
        let all = self.differences_from(files).into_iter();
        let left = all.filter(|difference| difference.mends.starts_with(RESTART));
        let sentence = |difference: ConfigDifference| {
            let ConfigDifference { section, key, running, mends, .. } = difference;
            match (key, running) {
                (Some(key), running) => {
                    let runs = running.unwrap_or_else(|| "unset".to_owned());
                    Some(format!("`{key}` of [{section}] stays {runs} until {mends}"))
                }
                (None, None) => Some(format!("[{section}] is not served until {mends}")),
                (None, Some(_)) => None,
            }
        };
        // Sections that are gone entirely are reported as such.
        left.filter_map(sentence).collect()
    }

    fn differences_from(&self, files: &Config) -> Vec<ConfigDifference> {
        let mut found = DifferenceList(Vec::new());
        found.of_daemon(&self.config, files);
        found.of_flash(&self.config, files);
        let shared = self.shared();
        let running: Vec<_> = shared.table.lasting_caches().collect();
        for (index, cache) in &running {
            let said = files.caches.iter().find(|said| said.name == cache.name);
            let section = format!("cache.{}", cache.display_name());
            // A cache that is not in the files is reported as a section.
            let Some(said) = said else {
                found.section(&section, true, RESTART);
                continue;
            };
            let devices = [&cache.device, &said.device].map(|device| Some(device.clone()));
            let [runs, device] = devices;
            found.value(&section, "device", runs, device, OF_DEVICE);
            if let Some(view) = OptionsOwner::Cache(*index).view(&shared.table) {
                found.of_options(&view, &said.options);
            }
        }
        for said in
            files.caches.iter().filter(|said| !running.iter().any(|(_, cache)| cache.name == said.name))
        {
            let section = format!("cache.{}", said.name.as_deref().unwrap_or_default());
            found.value(&section, "device", None, Some(said.device.clone()), RELOAD);
        }
        for (index, entry) in shared.table.volumes.iter().enumerate().filter(|(_, entry)| !entry.is_removed())
        {
            let Some(view) = OptionsOwner::Volume(index).view(&shared.table) else { continue };
            match files.volumes.iter().find(|said| said.name == entry.name) {
                // No options of a flash-only volume are stored.
                _ if entry.is_flash_only() => found.of_options(&view, &ConfiguredOptions::new()),
                Some(said) => {
                    found.of_volume(entry, said);
                    let only = [lasting_name(&running), only_name(files)];
                    found.of_cache(entry, said, only);
                    found.of_options(&view, &said.options);
                }
                None => found.section(&format!("volume.{}", entry.display_name()), true, RESTART),
            }
        }
        for said in &files.volumes {
            let is_it = |entry: &&VolumeEntry| entry.name == said.name && !entry.is_removed();
            let section = format!("volume.{}", said.name.as_deref().unwrap_or_default());
            match shared.table.volumes.iter().find(is_it) {
                None => found.section(&section, false, RELOAD),
                Some(entry) if entry.is_flash_only() => found.section(&section, false, OF_NAME),
                Some(_) => {}
            }
        }
        found.0
    }
}

/// The only running cache.
fn lasting_name<'a>(running: &[(usize, &'a CacheEntry)]) -> Option<&'a str> {
    match running {
        [(_, only)] => only.name.as_deref(),
        _ => None,
    }
}

/// The only cache of the files.
fn only_name(files: &Config) -> Option<&str> {
    match files.caches.as_slice() {
        [only] => only.name.as_deref(),
        _ => None,
    }
}

struct DifferenceList(Vec<ConfigDifference>);

impl DifferenceList {
    fn value(
        &mut self,
        section: &str,
        key: &str,
        running: Option<String>,
        files: Option<String>,
        mends: &str,
    ) {
        if running != files {
            let (section, key, mends) = (section.to_owned(), Some(key.to_owned()), mends.to_owned());
            self.0.push(ConfigDifference { section, key, running, files, mends });
        }
    }

    /// Adds a section that runs and is not in the files, or the reverse.
    fn section(&mut self, section: &str, runs: bool, mends: &str) {
        let there = |is: bool| is.then(|| "a section".to_owned());
        let (running, files) = (there(runs), there(!runs));
        self.0.push(ConfigDifference {
            section: section.to_owned(),
            key: None,
            running,
            files,
            mends: mends.to_owned(),
        });
    }

    fn of_daemon(&mut self, running: &Config, files: &Config) {
        let group = |group: Option<&Group>| group.map(ToString::to_string);
        let each = |config: &Config| {
            let listen: Vec<_> = config.places.listen.iter().map(ToString::to_string).collect();
            [
                ("daemon", "control", Some(config.control.display().to_string())),
                ("daemon", "memory", Some(typed(config.memory_bytes))),
                ("daemon", "metrics", config.metrics.map(|address| address.to_string())),
                ("nbd", "listen", Some(listen.join(", "))),
                ("nbd", "group", group(config.places.nbd_group.as_ref())),
                ("vhost-user", "directory", Some(config.places.vhost_user.display().to_string())),
                ("vhost-user", "group", group(config.places.vhost_user_group.as_ref())),
                ("fuse", "directory", Some(config.places.fuse.display().to_string())),
                ("fuse", "allow_other", Some(config.places.fuse_allow_other.to_string())),
            ]
        };
        for ((section, key, runs), (.., said)) in each(running).into_iter().zip(each(files)) {
            self.value(section, key, runs, said, RESTART);
        }
        self.of_tls(&running.places.tls, &files.places.tls);
        let timeout = |config: &Config| Some(Value::Time(config.stop_timeout).to_string());
        self.value("daemon", "stop_timeout", timeout(running), timeout(files), RELOAD);
    }

    /// A reload takes new certificates, but does not turn TLS on or off.
    fn of_tls(&mut self, running: &Tls, files: &Tls) {
        let mends =
            if running.certificates().is_some() && files.certificates().is_some() { RELOAD } else { RESTART };
        let tls = |tls: &Tls| match tls {
            Tls::Unset => None,
            Tls::Off => Some("off".to_owned()),
            Tls::On(certificates) => Some(certificates.directory.display().to_string()),
        };
        self.value("nbd", "tls", tls(running), tls(files), mends);
        let verify_peer = |tls: &Tls| tls.certificates().map(|its| its.verify_peer.to_string());
        self.value("nbd", "tls_verify_peer", verify_peer(running), verify_peer(files), mends);
    }

    fn of_flash(&mut self, running: &Config, files: &Config) {
        for said in &files.flash {
            let Some(runs) = running.flash.iter().find(|runs| runs.uuid == said.uuid) else { continue };
            let section = format!("volume.{}", runs.name);
            let of = |is: bool| Some(is.to_string());
            self.value(&section, "read_only", of(runs.read_only), of(said.read_only), RESTART);
            self.value(&section, "shared", of(runs.shared), of(said.shared), RESTART);
            self.value(&section, "export", Some(runs.ways.to_string()), Some(said.ways.to_string()), RESTART);
            let number = |flash: &FlashVolume| flash.number.map(|number| number.to_string());
            self.value(&section, "number", number(runs), number(said), RESTART);
        }
    }

    /// Compares the options in force with those that would be in force from the files alone.
    fn of_options(&mut self, view: &OwnerView, configured: &ConfiguredOptions) {
        let section = match view.scope() {
            Scope::Volume => format!("volume.{}", view.display_name()),
            Scope::Cache => format!("cache.{}", view.display_name()),
        };
        let files = OptionLayers { configured: configured.clone(), ..OptionLayers::default() };
        for option in view.scope().options().iter().filter(|option| option.not_configured().is_none()) {
            let is_runtime = view.layers().runtime.contains_key(option.name);
            let (running, said) = view.before_and_after(&files, None, option);
            self.value(
                &section,
                option.name,
                running.value,
                said.value,
                if is_runtime { RUNTIME } else { RELOAD },
            );
        }
    }

    /// Compares the cache of a volume. If there is only one, naming it or not is the same. `only`:
    /// the only running cache, and the only one of the files.
    fn of_cache(&mut self, entry: &VolumeEntry, said: &Volume, only: [Option<&str>; 2]) {
        let (running, files) = (entry.wanted_cache.clone(), said.cache.clone());
        let [runs, says] = only;
        if running.as_deref().or(runs) != files.as_deref().or(says) {
            let section = format!("volume.{}", entry.display_name());
            self.value(&section, "cache", running, files, OF_CACHE);
        }
    }

    fn of_volume(&mut self, entry: &VolumeEntry, said: &Volume) {
        let section = format!("volume.{}", entry.display_name());
        let of = |is: bool| Some(is.to_string());
        self.value(&section, "backing", entry.backing.clone(), Some(said.backing.clone()), RESTART);
        self.value(&section, "read_only", of(entry.read_only), of(said.read_only), RESTART);
        self.value(&section, "shared", of(entry.shared), of(said.shared), RESTART);
        self.value(&section, "export", Some(entry.ways.to_string()), Some(said.ways.to_string()), RESTART);
        let number = |number: usize| number.to_string();
        let said_number = said.is_numbered.then(|| number(said.number));
        self.value(&section, "number", entry.asked_number().map(number), said_number, RESTART);
        self.value(&section, "size", entry.limit.map(typed), said.size.map(typed), OF_SIZE);
        let time = |wait| Some(Value::Time(wait).to_string());
        self.value(&section, "wait", time(entry.wait), time(said.wait), RESTART);
    }
}
