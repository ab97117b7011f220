//! Finds resources that are configured twice: a socket, a port, a device. Otherwise a start would
//! fail on them later, with an error that names no section.
//!
//! Names are compared by what they resolve to: `/a/../b`, a link to `/b` and `/b` are the same, and
//! so are two spellings of a UUID. No device is opened, so a path is not compared with a UUID, nor
//! one hard link with another. Such duplicates are reported when the devices are served.

use super::field_types::{Address, Listener};
use super::parse::{Origin, Settings};
use super::read_file::bounded;
use super::{Config, Volume};
use bcached_control::failure::{Failure, Kind};
use bcached_format::Uuid;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};

/// The locations of unique resources in the files. A resource from the command line has no
/// location.
#[derive(Default)]
pub struct Origins(BTreeMap<String, Origin>);

impl Origins {
    /// Collects the locations, before the command line is applied.
    pub fn of(settings: &Settings) -> Self {
        let mut places = BTreeMap::new();
        let mut add = |key: String, origin: Option<&Origin>| {
            places.extend(origin.map(|origin| (key, origin.clone())));
        };
        add("metrics".to_owned(), settings.metrics.as_ref().map(|located| &located.origin));
        add("memory".to_owned(), settings.memory.as_ref().map(|located| &located.origin));
        let verify_peer = settings.places.tls_verify_peer.as_ref();
        add("tls_verify_peer".to_owned(), verify_peer.map(|located| &located.origin));
        for (index, listen) in settings.places.listen.iter().flatten().enumerate() {
            add(format!("listen {index}"), Some(&listen.origin));
        }
        for (name, cache) in &settings.caches {
            add(format!("cache {name}"), cache.device.as_ref().map(|located| &located.origin));
            add(format!("former {name}"), cache.former.as_ref().map(|located| &located.origin));
        }
        for (name, volume) in &settings.volumes {
            let said = volume.said();
            let device = said.backing.as_ref().or(said.flash.as_ref());
            add(format!("volume {name}"), device.map(|located| &located.origin));
        }
        Self(places)
    }

    /// Drops the locations of NBD addresses, because the command line sets these.
    pub fn without_listen(mut self) -> Self {
        self.0.retain(|key, _| !key.starts_with("listen "));
        self
    }

    /// Returns whether the files set it.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Creates a failure, with the location of the resource if it has one.
    pub fn refused(&self, key: &str, what: &str) -> Failure {
        self.0.get(key).map_or_else(|| Failure::new(Kind::Config, what), |origin| origin.failure(what))
    }
}

/// Checks that each socket and each port has a single use.
pub fn check_sockets(config: &Config, places: &Origins, findings: &mut Vec<Failure>) {
    let monitor = config.control.with_file_name("monitor.sock");
    let names = |path: &Path| path.to_string_lossy().into_owned();
    let paths = config.places.listen.iter().filter_map(|listen| listen.at.unix_path());
    let real = ResolvedNames::of([&*config.control, &*monitor].into_iter().chain(paths).map(names));
    let is_same = |one: &Listener, other: &Listener| match (&one.at, &other.at) {
        (Address::Unix(one), Address::Unix(other)) => real.is_same(&names(one), &names(other)),
        // With port 0 each address gets a port of its own, but the same line given twice is a
        // mistake.
        (Address::Tcp(one), Address::Tcp(other)) => one == other || is_same_port(*one, *other),
        _ => false,
    };
    for (index, listen) in config.places.listen.iter().enumerate() {
        let refused = |why: &str| places.refused(&format!("listen {index}"), &format!("{} {why}", listen.at));
        let is =
            |path: &Path| listen.at.unix_path().is_some_and(|own| real.is_same(&names(own), &names(path)));
        if let Some(other) = config.places.listen[..index].iter().find(|other| is_same(other, listen)) {
            let failure = refused("is configured twice").next("name it once in `listen`");
            findings.push(if other.at == listen.at {
                failure
            } else {
                failure.why(format!("{} is the same address", other.at))
            });
        } else if is(&config.control) {
            findings.push(refused("is the control socket").next("name another address in `listen`"));
        } else if is(&monitor) {
            findings.push(refused("is the monitor socket").next("name another address in `listen`"));
        }
    }
    let Some(metrics) = config.metrics else { return };
    let is_taken = |listen: &&Listener| matches!(listen.at, Address::Tcp(nbd) if is_same_port(nbd, metrics));
    if let Some(nbd) = config.places.listen.iter().find(is_taken) {
        let failure = places.refused("metrics", &format!("`metrics` cannot be on {metrics}"));
        findings
            .push(failure.why(format!("NBD is served on {}", nbd.at)).next("give one of them another port"));
    }
}

/// Port 0 means any free port, so two such addresses do not conflict.
fn is_same_port(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() != 0 && one.port() == other.port() && one.ip().to_canonical() == other.ip().to_canonical()
}

/// A device and its use.
struct DeviceUse<'a> {
    device: &'a str,
    /// The use, for a sentence.
    name: String,
    /// The key of its location in [`Origins`].
    key: String,
}

/// Checks that each device is a single cache or volume.
pub fn check_devices(
    config: &Config,
    places: &Origins,
    from_command_line: bool,
    findings: &mut Vec<Failure>,
) {
    if from_command_line {
        // Devices on the command line are opened at once, which reports duplicates. For volumes
        // only equal names are found here.
        for (index, Volume { backing, .. }) in config.volumes.iter().enumerate() {
            if config.volumes[..index].iter().any(|other| other.backing == *backing) {
                findings.push(
                    Failure::new(Kind::Config, format!("{backing} is named twice"))
                        .next("name each backing device once"),
                );
            }
        }
        return;
    }
    let all = roles(config);
    let real = ResolvedNames::of(all.iter().map(|role| role.device.to_owned()));
    let mut first: BTreeMap<&str, &DeviceUse<'_>> = BTreeMap::new();
    for role in &all {
        let one = *first.entry(real.name(role.device)).or_insert(role);
        if one.key != role.key {
            findings.push(twice(places, one, role));
        }
    }
    let mut first: BTreeMap<_, &str> = BTreeMap::new();
    for flash in &config.flash {
        let (uuid, name) = (flash.uuid, flash.name.as_str());
        let one = *first.entry(uuid.0).or_insert(name);
        if one != name {
            let what = format!("UUID={uuid} is configured twice");
            findings.push(
                places.refused(&format!("volume {name}"), &what).why(format!("as {one} and as {name}")),
            );
        }
    }
}

/// Returns the caches, then their former devices, then the volumes.
fn roles(config: &Config) -> Vec<DeviceUse<'_>> {
    let named = |cache: &Option<String>| cache.clone().unwrap_or_default();
    let caches = config.caches.iter().map(|cache| {
        let name = named(&cache.name);
        DeviceUse { device: &cache.device, key: format!("cache {name}"), name: format!("the cache {name}") }
    });
    let formers = config.caches.iter().filter_map(|cache| {
        let (device, _) = cache.former.as_ref()?;
        let name = named(&cache.name);
        Some(DeviceUse {
            device,
            key: format!("former {name}"),
            name: format!("the former device (`former`) of the cache {name}"),
        })
    });
    let volumes = config.volumes.iter().map(|volume| {
        let name = named(&volume.name);
        DeviceUse { device: &volume.backing, key: format!("volume {name}"), name }
    });
    caches.chain(formers).chain(volumes).collect()
}

fn twice(places: &Origins, one: &DeviceUse<'_>, other: &DeviceUse<'_>) -> Failure {
    let failure = places.refused(&other.key, &format!("{} is configured twice", other.device));
    failure.why(match one.device == other.device {
        true => format!("as {} and as {}", one.name, other.name),
        false => format!("as {} (by the name {}) and as {}", one.name, one.device, other.name),
    })
}

/// The names of devices and sockets, and what they resolve to.
pub struct ResolvedNames(BTreeMap<String, String>);

impl ResolvedNames {
    /// Resolves the names. If their file system does not answer, they are compared as text.
    pub fn of(names: impl IntoIterator<Item = String>) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        let by_name = names.iter().map(|name| (name.clone(), written(name))).collect();
        let look = move |_: &Path| {
            names.into_iter().map(|name| (leads_to(&name), name)).map(|(to, name)| (name, to)).collect()
        };
        Self(bounded(Path::new("/"), look).unwrap_or(by_name))
    }

    /// Returns the resolved form of a name, or the name itself if it is not among those given.
    fn name<'a>(&'a self, of: &'a str) -> &'a str {
        self.0.get(of).map_or(of, String::as_str)
    }

    /// Returns whether both names resolve to the same thing.
    pub fn is_same(&self, one: &str, other: &str) -> bool {
        self.name(one) == self.name(other)
    }
}

/// Returns a canonical spelling of a name, without access to the file system.
fn written(name: &str) -> String {
    match name.strip_prefix("UUID=") {
        Some(uuid) => {
            Uuid::from_text(uuid).map_or_else(|| name.to_lowercase(), |uuid| format!("UUID={uuid}"))
        }
        None => plain(Path::new(name)).to_string_lossy().into_owned(),
    }
}

fn leads_to(name: &str) -> String {
    if name.starts_with("UUID=") {
        written(name)
    } else {
        real(Path::new(name)).to_string_lossy().into_owned()
    }
}

/// Resolves a path. A socket does not exist before a process listens on it; until then its folder
/// is resolved.
fn real(path: &Path) -> PathBuf {
    if let Ok(real) = std::fs::canonicalize(path) {
        return real;
    }
    let plain = plain(path);
    match (plain.parent(), plain.file_name()) {
        (Some(folder), Some(name)) => real(folder).join(name),
        _ => plain,
    }
}

/// Returns the absolute path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut plain = PathBuf::new();
    for part in whole.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}
