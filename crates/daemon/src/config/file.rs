//! One TOML file: parsed against the known keys, every value understood, every error with file and line.

use super::values::{CacheMode, Listen, Size, Time, Way};
use crate::failure::{Failure, Kind};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use toml::Spanned;

/// Keys of the interface that this version does not have, with what happens without them.
const LATER: &[(&str, &str)] = &[
    ("metrics", "`bcached status --json` has the numbers"),
    ("max_dirty_age", "dirty data is written back as soon as the set's rate allows"),
    ("quiet_hours", "write-back runs at any hour"),
    ("ephemeral", "make the cache with `bcached make` before each start"),
    ("format", "make the cache with `bcached make`"),
    ("on_cache_error", "a failed cache stops its volumes' writes"),
    ("freeze_timeout", "a failed cache stops its volumes' writes"),
    ("discard_passdown", "discards only drop cached data"),
    ("number", "volumes are reached by name"),
    ("group", "the NBD socket belongs to the daemon's own group"),
    ("tls", "NBD over TCP is for loopback only"),
    ("sequential_cutoff", "every read fills the cache"),
    ("writeback_percent", "the default of 10 is in force"),
    ("writeback_delay", "the default is in force"),
    ("writeback_rate", "the default is in force"),
];

/// Where a setting stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    file: Rc<Path>,
    line: usize,
}

impl Origin {
    /// A configuration failure here.
    pub fn failure(&self, what: &str) -> Failure {
        Failure::new(Kind::Config, format!("{}:{}: {what}", self.file.display(), self.line))
    }
}

/// A setting and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    /// The setting.
    pub value: T,
    /// Where it stands.
    pub origin: Origin,
}

/// The settings of one file, or of several over each other.
#[derive(Debug, Default)]
pub struct Settings {
    pub control: Option<PathBuf>,
    pub memory: Option<u64>,
    pub stop_timeout: Option<Duration>,
    pub listen: Option<Vec<Listen>>,
    pub caches: BTreeMap<String, CacheSettings>,
    pub defaults: VolumeSettings,
    pub volumes: BTreeMap<String, NamedVolume>,
}

/// `[cache.NAME]`.
#[derive(Debug)]
pub struct CacheSettings {
    pub origin: Origin,
    pub device: Option<Located<String>>,
}

/// `[volume.NAME]`.
#[derive(Debug)]
pub struct NamedVolume {
    pub origin: Origin,
    settings: VolumeSettings,
}

/// What a volume's section and `[defaults]` can hold.
#[derive(Clone, Debug, Default)]
pub struct VolumeSettings {
    pub backing: Option<Located<String>>,
    pub cache: Option<Located<String>>,
    pub cache_mode: Option<CacheMode>,
    pub read_only: Option<bool>,
    pub shared: Option<bool>,
    pub wait: Option<Duration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    version: Spanned<u64>,
    #[serde(default)]
    daemon: RawDaemon,
    #[serde(default)]
    nbd: RawNbd,
    #[serde(default)]
    cache: BTreeMap<Spanned<String>, RawCache>,
    #[serde(default)]
    defaults: RawVolume,
    #[serde(default)]
    volume: BTreeMap<Spanned<String>, RawVolume>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct RawDaemon {
    control: Option<PathBuf>,
    memory: Option<Size>,
    stop_timeout: Option<Time>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct RawNbd {
    listen: Option<Vec<Listen>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCache {
    device: Option<Spanned<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct RawVolume {
    backing: Option<Spanned<String>>,
    cache: Option<Spanned<String>>,
    cache_mode: Option<CacheMode>,
    read_only: Option<bool>,
    shared: Option<bool>,
    wait: Option<Time>,
    /// Checked by its type: this version knows one way.
    #[serde(rename = "export")]
    _export: Option<Way>,
}

/// Reads and understands the file at `path`.
pub fn read(path: &Path) -> Result<Settings, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Kind::Permission,
            _ => Kind::Config,
        };
        Failure::new(kind, format!("cannot read the configuration {}", path.display()))
            .why(error.to_string())
            .next("name another with --config, or devices with --cache and --backing")
    })?;
    parse(path, &text)
}

/// Understands `text`, the content of `path`.
pub fn parse(path: &Path, text: &str) -> Result<Settings, Failure> {
    let source = Source { file: path.into(), text };
    let raw: RawFile = toml::from_str(text).map_err(|error| source.refuse(&error))?;
    if *raw.version.get_ref() != 1 {
        return Err(source
            .origin(raw.version.span().start)
            .failure(&format!("version {} is unknown", raw.version.get_ref()))
            .next("this bcached reads version 1"));
    }
    Ok(Settings {
        control: raw.daemon.control,
        memory: raw.daemon.memory.map(|size| size.0),
        stop_timeout: raw.daemon.stop_timeout.map(|time| time.0),
        listen: raw.nbd.listen,
        caches: source.named(raw.cache, |source, origin, raw| CacheSettings {
            origin,
            device: source.locate(raw.device),
        })?,
        defaults: source.volume(raw.defaults),
        volumes: source
            .named(raw.volume, |source, origin, raw| NamedVolume { origin, settings: source.volume(raw) })?,
    })
}

struct Source<'a> {
    file: Rc<Path>,
    text: &'a str,
}

impl Source<'_> {
    fn origin(&self, offset: usize) -> Origin {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        Origin { file: Rc::clone(&self.file), line: 1 + before.iter().filter(|byte| **byte == b'\n').count() }
    }

    fn locate<T>(&self, spanned: Option<Spanned<T>>) -> Option<Located<T>> {
        spanned.map(|spanned| {
            let origin = self.origin(spanned.span().start);
            Located { value: spanned.into_inner(), origin }
        })
    }

    /// A parser's error. An unknown key that is to come in a later version is named as such.
    fn refuse(&self, error: &toml::de::Error) -> Failure {
        let offset = error.span().map_or(0, |span| span.start);
        let message = error.message().trim().replace('\n', " ");
        let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        let later = LATER.iter().find(|(key, _)| Some(*key) == unknown);
        let mut failure = match later {
            None => self.origin(offset).failure(&message),
            Some((key, without)) => self
                .origin(offset)
                .failure(&format!("`{key}` is not in this version"))
                .next(format!("leave it out: until then, {without}")),
        };
        if later.is_some() {
            failure.kind = Kind::NotInThisVersion;
        }
        failure
    }

    /// The sections with names, each with its place. Names go into paths, NBD and JSON.
    fn named<R, T>(
        &self,
        raw: BTreeMap<Spanned<String>, R>,
        make: impl Fn(&Self, Origin, R) -> T,
    ) -> Result<BTreeMap<String, T>, Failure> {
        let mut named = BTreeMap::new();
        for (name, raw) in raw {
            let origin = self.origin(name.span().start);
            let name = name.into_inner();
            if name.is_empty() || name.chars().any(|letter| letter.is_control() || letter == '/') {
                return Err(origin
                    .failure(&format!("{name:?} cannot be a name"))
                    .why("a name is not empty and has no slash and no control character"));
            }
            named.insert(name, make(self, origin, raw));
        }
        Ok(named)
    }

    fn volume(&self, raw: RawVolume) -> VolumeSettings {
        VolumeSettings {
            backing: self.locate(raw.backing),
            cache: self.locate(raw.cache),
            cache_mode: raw.cache_mode,
            read_only: raw.read_only,
            shared: raw.shared,
            wait: raw.wait.map(|time| time.0),
        }
    }
}

impl Settings {
    /// `newer` over these, key by key.
    pub fn overlay(&mut self, newer: Self) {
        replace(&mut self.control, newer.control);
        replace(&mut self.memory, newer.memory);
        replace(&mut self.stop_timeout, newer.stop_timeout);
        replace(&mut self.listen, newer.listen);
        for (name, cache) in newer.caches {
            match self.caches.get_mut(&name) {
                Some(older) => replace(&mut older.device, cache.device),
                None => drop(self.caches.insert(name, cache)),
            }
        }
        self.defaults.overlay(newer.defaults);
        for (name, volume) in newer.volumes {
            match self.volumes.get_mut(&name) {
                Some(older) => older.settings.overlay(volume.settings),
                None => drop(self.volumes.insert(name, volume)),
            }
        }
    }
}

impl VolumeSettings {
    fn overlay(&mut self, newer: Self) {
        replace(&mut self.backing, newer.backing);
        replace(&mut self.cache, newer.cache);
        replace(&mut self.cache_mode, newer.cache_mode);
        replace(&mut self.read_only, newer.read_only);
        replace(&mut self.shared, newer.shared);
        replace(&mut self.wait, newer.wait);
    }
}

impl NamedVolume {
    /// This volume's own settings over `defaults`.
    pub fn over(self, defaults: &VolumeSettings) -> VolumeSettings {
        let mut merged = defaults.clone();
        merged.overlay(self.settings);
        merged
    }
}

fn replace<T>(older: &mut Option<T>, newer: Option<T>) {
    if newer.is_some() {
        *older = newer;
    }
}
