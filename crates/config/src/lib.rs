//! The configuration: files, merged in order, and the command line on top. It is checked as a
//! whole, and applied or refused as a whole.
//!
//! Later files override earlier ones key by key, so a file of single settings can follow another.
//!
//! | file | contents |
//! |---|---|
//! | `parse` | a file: its sections and keys, with line numbers |
//! | `section_keys` | the keys of `[volume.*]` and `[cache.*]`, among them all options |
//! | `field_types` | sizes, times, addresses: values of keys that are no options |
//! | `options` | the table of options, their values, and where each comes from |
//! | `entries`, `conflicts`, `findings` | caches and volumes; what contradicts; what is reported |
//! | `frontends`, `tls`, `volume_numbers` | exports, certificates, `/dev/bcacheN` |
//! | `persisted`, `set_file` | what commands have set, and the file that keeps it |
//! | `provenance` | which file has set what |
//! | `read_file`, `unknown_key` | files with a limit; keys that do not exist |
#![forbid(unsafe_code)]

mod conflicts;
mod entries;
mod field_types;
mod findings;
mod frontends;
pub mod options;
mod parse;
mod persisted;
mod provenance;
mod read_file;
mod section_keys;
mod set_file;
mod tls;
mod unknown_key;
mod volume_numbers;

use crate::options::layers::ConfiguredOptions;
use bcached_control::failure::{Failure, Kind};
use bcached_control::paths;
use bcached_control::sizes::typed;
use bcached_format::Uuid;
use bcached_port::{Frontend, FrontendSet};
use entries::{check_device, check_size, in_order, known_cache, required, sense_of_flash};
use parse::{Settings, VolumeSection, VolumeSettings};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use volume_numbers::VolumeNumbers;

pub use bcached_control::options::TypedValue;
pub use conflicts::ResolvedNames;
pub use field_types::{Address, Group, Listener};
pub use frontends::{DISK_BYTES, FrontendConfig};
pub use parse::Origin;
pub use persisted::{PersistedCache, PersistedVolume};
pub use provenance::{MergedConfig, MergedSetting, merged};
pub use set_file::SetFile;
pub use tls::{Certificates, Tls};

/// Default path of the control socket.
pub const CONTROL_DEFAULT: &str = "/run/bcached/control.sock";

/// Default path of the configuration.
pub const FILE_DEFAULT: &str = "/etc/bcached/config.toml";

/// Default of `memory`, and the minimum, which leaves room for nodes and requests.
const MEMORY_DEFAULT: u64 = 256 << 20;
const MEMORY_MIN: u64 = 128 << 20;

/// Default time to wait for a volume's devices before the daemon reports `ready` without it.
pub const WAIT_DEFAULT: Duration = Duration::from_secs(30);

/// Default time for which a stop waits for users.
const STOP_TIMEOUT_DEFAULT: Duration = Duration::from_secs(20);

/// In place of a cache's name: no cache. A cache cannot have this name.
pub const NO_CACHE: &str = "none";

/// The complete configuration of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The control socket. Its directory also holds the NBD socket by default.
    pub control: PathBuf,
    /// Hard limit of the memory for nodes, bucket tables and requests, in bytes.
    pub memory_bytes: u64,
    /// `memory` is configured. If it is not, bucket tables do not count towards the limit.
    pub memory_is_said: bool,
    /// For how long a stop waits for users.
    pub stop_timeout: Duration,
    /// The sockets, addresses and directories of the front ends.
    pub places: FrontendConfig,
    /// The front ends of a volume whose section names none.
    pub ways: FrontendSet,
    /// The loopback address where metrics are served, if configured.
    pub metrics: Option<SocketAddr>,
    /// The caches, in the order of the configuration or the command line.
    pub caches: Vec<Cache>,
    /// The volumes, likewise.
    pub volumes: Vec<Volume>,
    /// Settings of volumes that live in a cache only.
    pub flash: Vec<FlashVolume>,
    /// The first number after the places of all volumes with backing devices, including those that
    /// are not to be served. From here on, only `numbers_asked` are in use.
    pub places_of_volumes: usize,
    /// Numbers that sections ask for, including those of volumes that are not to be served.
    pub numbers_asked: BTreeSet<usize>,
    /// Caches that are configured but not to be served.
    pub released: Vec<ReleasedCache>,
    /// Volumes with backing devices that are configured but not to be served.
    pub not_served: Vec<UnservedVolume>,
    /// The main file, which may not exist; `None` if the command line names devices instead.
    pub main_file: Option<PathBuf>,
    /// The file in which `bcached set` persists values; `None` without a configuration.
    pub set_file: Option<PathBuf>,
    /// Caches whose device is not the one in the other files: the name, that device, this one.
    pub replaced: Vec<(String, String, String)>,
    /// Volumes not configured any more, of which the file of `bcached set` still has options.
    pub set_and_gone: Vec<String>,
}

/// A cache device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// `None`: named after its label or set.
    pub name: Option<String>,
    /// A path or `UUID=..`.
    pub device: String,
    /// The former device, which volumes may still be on, and whether they are to move away.
    pub former: Option<(String, bool)>,
    /// It replaces a dead cache, and not all volumes have joined it yet.
    pub is_awaited: bool,
    /// Its options, as set in the files.
    pub options: ConfiguredOptions,
}

/// A cache that is configured but not to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleasedCache {
    /// Its name.
    pub name: String,
    /// Its device, if configured.
    pub device: Option<String>,
    /// Its former volumes that are not served either, and their devices.
    pub backings: Vec<(String, String)>,
}

/// A volume with a backing device that is configured but not to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedVolume {
    /// Its name.
    pub name: String,
    /// Its device, if configured.
    pub backing: Option<String>,
}

/// Settings of a volume that lives in a cache only. The volume itself is known to the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlashVolume {
    /// Its name in the configuration.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// Whether it is served.
    pub served: bool,
    /// Clients may not write.
    pub read_only: bool,
    /// Several clients may write at once.
    pub shared: bool,
    /// The front ends through which it is available.
    pub ways: FrontendSet,
    /// The N of its `bcacheN`, if its section asks for one.
    pub number: Option<usize>,
    /// How long a client waits for the volume if the cache is not available yet.
    pub wait: Duration,
}

/// A backing device to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// `None`: named after its label or UUID.
    pub name: Option<String>,
    /// The N of its `bcacheN`.
    pub number: usize,
    /// Its section asks for that number.
    pub is_numbered: bool,
    /// A path or `UUID=..`.
    pub backing: String,
    /// Name of its cache, or [`NO_CACHE`]; `None`: the only one, or the one in its superblock.
    pub cache: Option<String>,
    /// Its options, as set in the files.
    pub options: ConfiguredOptions,
    /// Clients may not write.
    pub read_only: bool,
    /// Several clients may write at once.
    pub shared: bool,
    /// The front ends through which it is available.
    pub ways: FrontendSet,
    /// For how long its devices are waited for at the start.
    pub wait: Duration,
    /// Upper limit of the size that is served, in bytes.
    pub size: Option<u64>,
}

/// The command line of `serve`.
#[derive(Clone, Debug, Default)]
pub struct CommandLine {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--cache`.
    pub caches: Vec<String>,
    /// `--backing`.
    pub backings: Vec<String>,
    /// `--export`.
    pub exports: Vec<String>,
    /// `--control`, or the environment variable.
    pub control: Option<PathBuf>,
    /// `--stop-timeout`.
    pub stop_timeout: Option<String>,
}

/// Parses a time: `30s`, `5m`, `2h`.
///
/// # Errors
/// It is not a time; the sentence says what would be.
pub fn time(typed: &str) -> Result<Duration, String> {
    field_types::TimeSpan::try_from(typed.to_owned()).map(|time| time.0)
}

/// Logs that no volume is configured. That is not an error.
fn tell_of_no_volumes(settings: &Settings) {
    if settings.volumes.is_empty() && !settings.caches.is_empty() {
        tracing::debug!(
            event = "nothing-configured",
            "no volume is configured: only flash-only volumes in the caches are served"
        );
    }
}

impl Config {
    /// Loads the configuration that `line` asks for: the devices that it names, else the files.
    /// Opens no device.
    ///
    /// # Errors
    /// [`Kind::Config`] with file and line, or wrong use of the command line.
    pub fn load(line: &CommandLine) -> Result<Self, Failure> {
        Self::load_with(line, None)
    }

    /// Loads the configuration as if the file of `bcached set` already had the content `set_text`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_with(line: &CommandLine, set_text: Option<&str>) -> Result<Self, Failure> {
        let mut findings = Vec::new();
        let config = Self::examine(line, set_text, &mut findings)?;
        // Further errors in a text that is in no file cannot be looked up.
        let more = if set_text.is_none() { findings.len().saturating_sub(1) } else { 0 };
        findings.into_iter().next().map_or(Ok(config), |first| Err(findings::and_more(first, more)))
    }

    /// Returns the valid part of the configuration, and all errors in it. A start is refused with
    /// the first of them.
    ///
    /// # Errors
    /// A file cannot be read, or wrong use of the command line.
    pub fn findings(line: &CommandLine) -> Result<(Self, Vec<Failure>), Failure> {
        let mut findings = Vec::new();
        let config = Self::examine(line, None, &mut findings)?;
        // A start reads the certificates only when it sets up NBD.
        findings.extend(config.places.tls.certificates().and_then(|files| files.read().err()));
        Ok((config, findings))
    }

    fn examine(
        line: &CommandLine,
        set_text: Option<&str>,
        findings: &mut Vec<Failure>,
    ) -> Result<Self, Failure> {
        let named = !line.caches.is_empty() || !line.backings.is_empty();
        if named && line.config.is_some() {
            return Err(Failure::new(Kind::Usage, "both a configuration and devices are given")
                .next("give either --config, or --cache and --backing"));
        }
        // The path is shown to users and programs that may have another working directory.
        let main = line.config.clone().unwrap_or_else(|| paths::of_machine(FILE_DEFAULT));
        let main = &std::path::absolute(&main).unwrap_or(main);
        let (settings, gone) = match named {
            true => (Settings::default(), Vec::new()),
            false => read_files(main, set_text, findings)?,
        };
        let places = conflicts::Origins::of(&settings);
        let places = if line.exports.is_empty() { places } else { places.without_listen() };
        let memory = settings.memory.as_ref().map(|memory| memory.value);
        let mut config = Self::from_settings(settings, line, findings)?;
        config.main_file = (!named).then(|| main.clone());
        config.set_file = (!named).then(|| set_file::path_beside(main));
        config.set_and_gone = gone;
        let plain = |device: &String| Cache {
            name: None,
            device: device.clone(),
            former: None,
            is_awaited: false,
            options: ConfiguredOptions::new(),
        };
        config.caches.extend(line.caches.iter().map(plain));
        let backings = line.backings.iter().enumerate();
        config.volumes.extend(backings.map(|(place, device)| Volume::plain(place, device, config.ways)));
        config.places_of_volumes += line.backings.len();
        config.memory_is_said = memory.is_some();
        config.memory_bytes = memory.unwrap_or_else(|| MEMORY_DEFAULT.max(config.memory_min()));
        config.check(named, &places, findings);
        Ok(config)
    }

    /// Returns warnings about a valid configuration: the id of the event, and a sentence.
    #[must_use]
    pub fn warnings(&self) -> Vec<(&'static str, String)> {
        let gone = self.set_and_gone.iter().map(|name| {
            let what = format!("99-set.toml has options of volume {name}, which is not configured");
            ("set-and-gone", format!("{what}: they have no effect, and stay there"))
        });
        let names = self.caches.iter().map(|cache| &cache.device);
        let names = names.chain(self.volumes.iter().map(|volume| &volume.backing));
        let unstable = names.filter(|name| paths::is_unstable_name(name));
        let unstable =
            unstable.map(|name| ("unstable-name", format!("{name} may be another disk after the next boot")));
        let replaced = self.replaced.iter().map(|(name, said, is)| {
            (
                "cache-moved",
                format!(
                    "cache {name} is on {is} since `bcached replace`: \
                     write that in [cache.{name}] in place of {said}"
                ),
            )
        });
        let key = self.places.tls.certificates().and_then(Certificates::warning);
        let key = key.map(|sentence| ("tls-key-readable", sentence));
        gone.chain(unstable).chain(replaced).chain(key).collect()
    }

    /// Returns what only the devices can decide, which have not been opened yet: one sentence each.
    #[must_use]
    pub fn left_open(&self) -> Vec<String> {
        let nameless = self.volumes.iter().filter(|volume| volume.cache.is_none() && self.caches.len() > 1);
        let sentence = |volume: &Volume| {
            let name = volume.name.as_deref().unwrap_or(&volume.backing);
            format!(
                "[volume.{name}] names none of the {} caches: it is served only if its device is attached \
                 to one of them; name it with `cache = \"NAME\"`",
                self.caches.len()
            )
        };
        nameless.map(sentence).collect()
    }

    /// Returns the memory for B-tree nodes, in bytes: half of `memory`, less what block devices and
    /// disks of virtual machines take. `ways` are the front ends of all volumes.
    #[must_use]
    pub fn memory_of_nodes(&self, ways: impl Iterator<Item = FrontendSet>) -> u64 {
        // Volumes that a reload added may need more than is left.
        let disks: u64 = ways.map(frontends::memory_of).sum();
        (self.memory_bytes / 2).saturating_sub(disks).max(MEMORY_MIN / 2)
    }

    /// Returns the `memory` that leaves `bytes` for sets, beside volumes with these front ends.
    #[must_use]
    pub fn memory_for(&self, bytes: u64, ways: impl Iterator<Item = FrontendSet>) -> u64 {
        let disks: u64 = ways.map(frontends::memory_of).sum();
        bytes.saturating_add(disks).saturating_mul(2)
    }

    /// Returns the minimum of `memory`. What disks take is deducted from the half that nodes have.
    fn memory_min(&self) -> u64 {
        MEMORY_MIN + 2 * self.memory_of_disks()
    }

    fn memory_of_disks(&self) -> u64 {
        let flash = self.flash.iter().map(|flash| flash.ways);
        let ways = self.volumes.iter().map(|volume| volume.ways).chain(flash);
        ways.map(frontends::memory_of).sum()
    }

    /// Returns the volumes of the cache: they name it, or name none and it is the only one.
    pub fn volumes_of(&self, cache: &str) -> Vec<String> {
        let is_only = self.caches.iter().all(|other| other.name.as_deref() == Some(cache));
        let has_it = |volume: &&Volume| volume.cache.as_deref().map_or(is_only, |named| named == cache);
        self.volumes.iter().filter(has_it).filter_map(|volume| volume.name.clone()).collect()
    }

    fn from_settings(
        settings: Settings,
        line: &CommandLine,
        findings: &mut Vec<Failure>,
    ) -> Result<Self, Failure> {
        tell_of_no_volumes(&settings);
        let numbers = VolumeNumbers::of(&settings, findings);
        let control = line.control.clone().or(settings.control);
        let control = control.unwrap_or_else(|| paths::of_machine(CONTROL_DEFAULT));
        let mut places = settings.places.of(&control);
        let told = if line.exports.is_empty() { None } else { Some(places.take_over(&line.exports)?) };
        let ways = told.or(settings.defaults.export).unwrap_or_else(|| Frontend::Nbd.into());
        let stop_timeout = line.stop_timeout.clone().map(field_types::TimeSpan::try_from).transpose();
        let stop_timeout = stop_timeout
            .map_err(|why| Failure::new(Kind::Usage, why).option("--stop-timeout"))?
            .map(|time| time.0);
        let mut config = Self {
            control,
            memory_bytes: settings.memory.map_or(0, |memory| memory.value),
            memory_is_said: false,
            stop_timeout: stop_timeout.or(settings.stop_timeout).unwrap_or(STOP_TIMEOUT_DEFAULT),
            places,
            ways,
            metrics: settings.metrics.map(|metrics| metrics.value),
            caches: Vec::new(),
            volumes: Vec::new(),
            flash: Vec::new(),
            places_of_volumes: 0,
            numbers_asked: BTreeSet::new(),
            released: Vec::new(),
            not_served: Vec::new(),
            main_file: None,
            set_file: None,
            set_and_gone: Vec::new(),
            replaced: settings.replaced,
        };
        for (name, cache) in settings.caches {
            let device = cache.device.as_ref().map(|device| device.value.clone());
            match Cache::of(&name, cache) {
                Ok(Some(cache)) => config.caches.push(cache),
                Ok(None) => config.released.push(ReleasedCache { name, device, backings: Vec::new() }),
                Err(failure) => {
                    findings.push(failure);
                    // A section that names this cache is not wrong.
                    config.released.push(ReleasedCache { name, device, backings: Vec::new() });
                }
            }
        }
        for (name, own) in settings.volumes {
            if let Err(failure) = config.add_volume(name, own, &settings.defaults, told) {
                findings.push(failure);
            }
        }
        for volume in &mut config.volumes {
            volume.number = numbers.at(volume.number);
        }
        (config.places_of_volumes, config.numbers_asked) = (numbers.behind, numbers.asked);
        Ok(config)
    }

    fn add_volume(
        &mut self,
        name: String,
        own: VolumeSection,
        defaults: &VolumeSettings,
        told: Option<FrontendSet>,
    ) -> Result<(), Failure> {
        let (origin, is_refused) = (own.origin.clone(), own.is_refused);
        sense_of_flash(&name, own.said())?;
        let merged = own.over(defaults);
        let ways = told.or(merged.export).unwrap_or(self.ways);
        if merged.flash.is_some() {
            self.flash.push(FlashVolume::of(name, &origin, merged, ways)?);
            return Ok(());
        }
        let place = self.places_of_volumes;
        self.places_of_volumes += 1;
        if merged.served == Some(false) {
            self.add_not_served(name, merged);
            return Ok(());
        }
        if merged.backing.is_none() && is_refused {
            return known_cache(merged.cache, &self.caches, &self.released).map(drop);
        }
        let backing = required(merged.backing, &origin, &format!("[volume.{name}] has no `backing`"))?;
        check_device(&backing)?;
        check_size(&name, &origin, merged.size)?;
        self.volumes.push(Volume {
            cache: known_cache(merged.cache, &self.caches, &self.released)?,
            backing: backing.value,
            options: in_order(merged.options)?,
            read_only: merged.read_only.unwrap_or(false),
            shared: merged.shared.unwrap_or(false),
            ways,
            wait: merged.wait.unwrap_or(WAIT_DEFAULT),
            size: merged.size,
            name: Some(name),
            // Replaced once all sections are known.
            number: place,
            is_numbered: merged.number.is_some(),
        });
        Ok(())
    }

    /// Returns the names of volumes that are configured but not to be served.
    pub fn unserved(&self) -> impl Iterator<Item = &str> {
        let flash = self.flash.iter().filter(|flash| !flash.served).map(|flash| flash.name.as_str());
        self.not_served.iter().map(|removed| removed.name.as_str()).chain(flash)
    }

    /// Returns whether a volume of that name is configured but not to be served.
    pub fn has_unserved(&self, name: &str) -> bool {
        self.unserved().any(|unserved| unserved == name)
    }

    fn add_not_served(&mut self, name: String, said: VolumeSettings) {
        let cache = said.cache.map(|cache| cache.value);
        let mut released = self.released.iter_mut();
        let its = released.find(|its| cache.as_ref().is_none_or(|cache| *cache == its.name));
        let backing = said.backing.map(|backing| backing.value);
        // A volume that was removed by itself does not come back with its cache.
        if let (Some(its), Some(backing), Some(true)) = (its, &backing, said.released) {
            its.backings.push((name.clone(), backing.clone()));
        }
        self.not_served.push(UnservedVolume { name, backing });
    }

    fn check(&self, from_command_line: bool, places: &conflicts::Origins, findings: &mut Vec<Failure>) {
        // Backing devices on the command line get a better error, once their superblocks are read.
        let needs_one = self.volumes.is_empty()
            || self.volumes.iter().any(|volume| volume.cache.as_deref() != Some(NO_CACHE));
        // No volumes at all: the state before an import. Errors in sections are reported already.
        let lacks_one = self.caches.is_empty() && needs_one && !self.volumes.is_empty();
        if lacks_one && !from_command_line && findings.is_empty() {
            findings.push(self.no_cache());
        }
        if self.memory_bytes < MEMORY_MIN {
            findings.push(
                places
                    .refused("memory", "`memory` is too small")
                    .why("B-tree nodes and requests in flight need at least 128M"),
            );
        } else if self.memory_bytes < self.memory_min() {
            findings.push(
                places.refused("memory", "`memory` is too small")
                    .why("it must be at least 128M, plus 16M for each volume with `export = \"ublk\"` and 64M for each with \"vhost-user\"")
                    .next(format!("write \"{}\" or more", typed(self.memory_min()))),
            );
        }
        tls::check(self, places, findings);
        conflicts::check_sockets(self, places, findings);
        conflicts::check_devices(self, places, from_command_line, findings);
    }

    /// The failure if volumes need a cache and none is to be served.
    fn no_cache(&self) -> Failure {
        let failure = |what: &str| Failure::new(Kind::Config, what);
        match self.released.as_slice() {
            [] => failure("no cache is configured")
                .next("add a [cache.NAME] section, or name devices with --cache and --backing"),
            [ReleasedCache { name, .. }] => failure("no cache is served")
                .why(format!("{name} was released (served = false)"))
                .next(format!("`bcached import {name}` serves it again, with its volumes")),
            several => {
                let names: Vec<_> = several.iter().map(|released| released.name.as_str()).collect();
                failure("no cache is served")
                    .why(format!("{} were released (served = false)", names.join(", ")))
                    .next("`bcached import NAME` serves one again, with its volumes")
            }
        }
    }
}

/// Reads the main file, then those in `config.d` beside it, by name, and last the file of
/// `bcached set`, or `set_text` in its place. Also returns the volumes of the last that are not
/// configured.
fn read_files(
    main: &Path,
    set_text: Option<&str>,
    findings: &mut Vec<Failure>,
) -> Result<(Settings, Vec<String>), Failure> {
    let mut settings = parse::read(main, findings)?;
    let set_file = set_file::path_beside(main);
    for path in read_file::bounded(main, more_files)? {
        settings.overlay(parse::read(&path, findings)?);
    }
    let newest = match set_text {
        Some("") => None,
        Some(text) => Some(parse::parse_set_file(&set_file, text, findings)),
        None => parse::read_set_file(&set_file, findings)?,
    };
    let gone = newest.map_or_else(Vec::new, |newest| settings.overlay_set_file(newest));
    Ok((settings, gone))
}

/// Returns the files in `config.d`, by name, except the one that `bcached set` writes.
fn more_files(main: &Path) -> Vec<PathBuf> {
    let set_file = set_file::path_beside(main);
    let mut more: Vec<PathBuf> = std::fs::read_dir(main.with_file_name("config.d"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml") && *path != set_file)
        .collect();
    more.sort();
    more
}

/// Returns all files that are read, in order.
fn files(main: &Path) -> Vec<PathBuf> {
    let set_file = Some(set_file::path_beside(main)).filter(|path| path.exists());
    std::iter::once(main.to_owned()).chain(more_files(main)).chain(set_file).collect()
}

#[cfg(test)]
mod tests;
