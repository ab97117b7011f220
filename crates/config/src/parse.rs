//! Reads one TOML file: checks its keys, parses every value, and reports all errors at once, each
//! with file and line.

use super::field_types::{LoopbackAddress, Size, TimeSpan, VolumeNumber};
use super::frontends::{FrontendSettings, RawFuse, RawNbd, RawVhostUser};
use super::read_file::{MEND_SET_FILE, bounded, content};
use super::section_keys::{RawCache, RawVolume};
use super::{NO_CACHE, findings, unknown_key};
use crate::options::OptionDefinition;
use crate::options::layers::{ConfiguredOptions, OptionSetting};
use crate::options::value::ValueError;
use bcached_control::failure::{Failure, Kind};
use bcached_control::names::can_be_name;
use bcached_control::options::TypedValue;
use bcached_port::FrontendSet;
use indexmap::IndexMap;
use serde::Deserialize;
use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use toml::Spanned;

/// Keys that a later version will have, with the alternative until then.
const LATER: &[(&str, &str)] = &[
    ("ephemeral", "make the cache with `bcached make` before each start"),
    ("format", "make the cache with `bcached make`"),
    ("discard_passdown", "discards are passed down to the backing devices that support them"),
    (
        "recovery_timeout",
        "the kernel holds the requests to a ublk device as long as no daemon serves it; \
         `bcached remove` ends that",
    ),
];

/// The location of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    file: Arc<Path>,
    line: usize,
    /// The file is the one that `bcached set` writes.
    by_set: bool,
}

impl Origin {
    /// Returns the file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the line, from 1.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.line
    }

    /// Returns whether the file is the one that `bcached set` writes.
    #[must_use]
    pub const fn is_by_set(&self) -> bool {
        self.by_set
    }

    /// Creates a configuration failure at this location.
    #[must_use]
    pub fn failure(&self, what: &str) -> Failure {
        Failure::new(Kind::Config, format!("{}:{}: {what}", self.file.display(), self.line))
    }
}

/// A setting and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    /// The setting.
    pub value: T,
    /// Its location.
    pub origin: Origin,
}

/// The settings of one file, or of several merged.
#[derive(Debug, Default)]
pub struct Settings {
    pub control: Option<PathBuf>,
    pub memory: Option<Located<u64>>,
    pub stop_timeout: Option<Duration>,
    pub metrics: Option<Located<SocketAddr>>,
    pub places: FrontendSettings,
    pub caches: IndexMap<String, CacheSettings>,
    pub defaults: VolumeSettings,
    pub volumes: IndexMap<String, VolumeSection>,
    /// Caches whose device differs from the one in the user's files, because it was replaced: the
    /// name, the device in those files, and the present device.
    pub replaced: Vec<(String, String, String)>,
}

/// `[cache.NAME]`.
#[derive(Debug)]
pub struct CacheSettings {
    pub origin: Origin,
    pub device: Option<Located<String>>,
    pub former: Option<Located<String>>,
    pub moving: Option<bool>,
    pub imported: Option<bool>,
    pub served: Option<bool>,
    /// A device is given but was refused, so it is not reported as missing.
    pub is_refused: bool,
    pub options: ConfiguredOptions,
}

/// `[volume.NAME]`.
#[derive(Debug)]
pub struct VolumeSection {
    pub origin: Origin,
    /// A device is given but was refused, so it is not reported as missing.
    pub is_refused: bool,
    pub(super) settings: VolumeSettings,
}

/// The possible content of a volume's section and of `[defaults]`.
#[derive(Clone, Debug, Default)]
pub struct VolumeSettings {
    pub backing: Option<Located<String>>,
    pub flash: Option<Located<String>>,
    pub cache: Option<Located<String>>,
    pub read_only: Option<bool>,
    pub shared: Option<bool>,
    pub served: Option<bool>,
    pub released: Option<bool>,
    pub wait: Option<Duration>,
    pub size: Option<u64>,
    pub export: Option<FrontendSet>,
    pub number: Option<Located<VolumeNumber>>,
    pub options: ConfiguredOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    version: Spanned<u64>,
    #[serde(default)]
    daemon: RawDaemon,
    #[serde(default)]
    nbd: RawNbd,
    #[serde(default, rename = "vhost-user")]
    vhost_user: RawVhostUser,
    #[serde(default)]
    fuse: RawFuse,
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
    memory: Option<Spanned<Size>>,
    stop_timeout: Option<TimeSpan>,
    metrics: Option<Spanned<LoopbackAddress>>,
}

/// Reads and parses the file at `path`. Errors in its content are added to `findings`.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path, findings: &mut Vec<Failure>) -> Result<Settings, Failure> {
    let next = "name another file with --config, or devices with --cache and --backing";
    let text = content(path, next)?;
    Ok(understand(SourceFile::new(path, &text, false), findings))
}

/// Reads and parses the file that `bcached set` writes, in the same way. Returns `None` if it is
/// empty or absent.
pub fn read_set_file(path: &Path, findings: &mut Vec<Failure>) -> Result<Option<Settings>, Failure> {
    let is_there = |path: &Path| path.metadata().is_ok_and(|file| file.len() > 0);
    if !bounded(path, is_there)? {
        return Ok(None);
    }
    let text = content(path, MEND_SET_FILE)?;
    Ok(Some(understand(SourceFile::new(path, &text, true), findings)))
}

/// Parses `text`, the content of the file that `bcached set` writes. Errors in it are added to
/// `findings`.
pub fn parse_set_file(path: &Path, text: &str, findings: &mut Vec<Failure>) -> Settings {
    understand(SourceFile::new(path, text, true), findings)
}

/// Returns the parser's error message for an invalid text.
#[cfg(test)]
pub fn message(text: &str) -> String {
    toml::from_str::<RawFile>(text).err().expect("it is wrong").message().to_owned()
}

fn understand(source: SourceFile<'_>, findings: &mut Vec<Failure>) -> Settings {
    let settings = source.settings();
    let mut found = source.findings.into_inner();
    found.sort_by_key(|(line, _)| *line);
    findings.extend(found.into_iter().map(|(_, failure)| failure));
    settings
}

/// Limit on the total number of bytes parsed. Each error is found by one more parse of the whole
/// file, so in a large file only the first few errors are reported.
const READ_BYTES_MAX: usize = 16 << 20;

/// The text of a file, and the errors in it.
struct SourceFile<'a> {
    file: Arc<Path>,
    text: &'a str,
    /// Offsets of the line ends.
    lines: Vec<usize>,
    by_set: bool,
    /// The errors, with their lines.
    findings: RefCell<Vec<(usize, Failure)>>,
    /// The whole text as an untyped table, including values that are refused.
    whole: OnceCell<Option<toml::Table>>,
}

impl<'a> SourceFile<'a> {
    fn new(path: &Path, text: &'a str, by_set: bool) -> Self {
        let lines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect();
        Self { file: path.into(), text, lines, by_set, findings: RefCell::default(), whole: OnceCell::new() }
    }
}

impl SourceFile<'_> {
    fn settings(&self) -> Settings {
        let Some(raw) = self.raw() else { return Settings::default() };
        if *raw.version.get_ref() != 1 {
            let origin = self.origin(raw.version.span().start);
            let failure = origin.failure(&format!("version {} is unknown", raw.version.get_ref()));
            self.found(&origin, failure.next("this bcached reads version 1"));
            return Settings::default();
        }
        Settings {
            control: raw.daemon.control,
            memory: self
                .locate(raw.daemon.memory)
                .map(|Located { value, origin }| Located { value: value.0, origin }),
            stop_timeout: raw.daemon.stop_timeout.map(|time| time.0),
            metrics: self
                .locate(raw.daemon.metrics)
                .map(|Located { value, origin }| Located { value: value.0, origin }),
            places: FrontendSettings {
                listen: raw
                    .nbd
                    .listen
                    .map(|all| all.into_iter().map(|listen| self.located(listen)).collect()),
                tls: raw.nbd.tls,
                tls_verify_peer: self.locate(raw.nbd.tls_verify_peer),
                nbd_group: raw.nbd.group,
                vhost_user: raw.vhost_user.directory.map(|path| path.0),
                vhost_user_group: raw.vhost_user.group,
                fuse: raw.fuse.directory.map(|path| path.0),
                fuse_allow_other: raw.fuse.allow_other,
            },
            caches: self.named(raw.cache, |source, name, origin, raw| CacheSettings {
                origin,
                is_refused: raw.device.is_none() && source.says("cache", name, &["device"]),
                device: source.locate(raw.device),
                former: source.locate(raw.former),
                moving: raw.moving,
                imported: raw.imported,
                served: raw.served,
                options: source.options(raw.options),
            }),
            defaults: self.volume(raw.defaults),
            volumes: self.named(raw.volume, |source, name, origin, raw| VolumeSection {
                origin,
                is_refused: raw.backing.is_none()
                    && raw.flash.is_none()
                    && source.says("volume", name, &["backing", "flash"]),
                settings: source.volume(raw),
            }),
            replaced: Vec::new(),
        }
    }

    /// Parses the text, leaving out what is refused. `None` if the remaining text cannot be parsed.
    fn raw(&self) -> Option<RawFile> {
        let mut text = Cow::Borrowed(self.text);
        loop {
            let error = match toml::from_str(&text) {
                Ok(raw) => return Some(raw),
                Err(error) => error,
            };
            let origin = self.origin(error.span().map_or(0, |span| span.start));
            self.found(&origin, self.refused(&origin, &error));
            if self.findings.borrow().len() * self.text.len() > READ_BYTES_MAX {
                return None;
            }
            let span = error.span().filter(|_| !error.message().starts_with("missing field"))?;
            text = Cow::Owned(findings::without(&text, span)?);
        }
    }

    /// Converts an error of the parser. An unknown key that a later version will have is reported
    /// as such.
    fn refused(&self, origin: &Origin, error: &toml::de::Error) -> Failure {
        let message = error.message().trim().replace('\n', " ");
        if let Some((key, known)) = unknown_key::unknown_key(&message) {
            return match LATER.iter().find(|(later, _)| *later == key) {
                None => unknown_key::refused(origin, key, &known),
                Some((_, without)) => {
                    let failure = origin.failure(&format!("`{key}` is not in this version"));
                    let next = format!("remove it; in this version, {without}");
                    Failure { kind: Kind::NotInThisVersion, ..failure.next(next) }
                }
            };
        }
        match error.span().and_then(|span| self.text.get(span)).filter(|_| message == "duplicate key") {
            Some(key) => origin.failure(&format!("`{key}` is set twice")).next("remove one of them"),
            None => origin.failure(&message),
        }
    }

    fn found(&self, origin: &Origin, failure: Failure) {
        self.findings.borrow_mut().push((origin.line, failure));
    }

    fn origin(&self, offset: usize) -> Origin {
        let line = 1 + self.lines.partition_point(|end| *end < offset);
        Origin { file: Arc::clone(&self.file), line, by_set: self.by_set }
    }

    fn locate<T>(&self, spanned: Option<Spanned<T>>) -> Option<Located<T>> {
        spanned.map(|spanned| self.located(spanned))
    }

    fn located<T>(&self, spanned: Spanned<T>) -> Located<T> {
        let origin = self.origin(spanned.span().start);
        Located { value: spanned.into_inner(), origin }
    }

    /// Returns the named sections in the order in which they appear, each with its location. Names
    /// become part of paths, NBD exports and JSON, so they are checked.
    fn named<R, T>(
        &self,
        raw: BTreeMap<Spanned<String>, R>,
        make: impl Fn(&Self, &str, Origin, R) -> T,
    ) -> IndexMap<String, T> {
        let mut raw: Vec<_> = raw.into_iter().collect();
        raw.sort_by_key(|(name, _)| name.span().start);
        let mut named = IndexMap::new();
        for (name, raw) in raw {
            let origin = self.origin(name.span().start);
            let name = name.into_inner();
            if !can_be_name(&name) {
                let failure = origin.failure(&format!("{name:?} is not a valid name"));
                self.found(
                    &origin,
                    failure.why("a name must not be empty, nor contain a slash or a control character"),
                );
                continue;
            }
            let made = make(self, &name, origin, raw);
            named.insert(name, made);
        }
        named
    }

    /// Returns whether the section has one of the keys, whether or not its value is valid.
    fn says(&self, sections: &str, name: &str, keys: &[&str]) -> bool {
        // Without errors, every key that is present has been read.
        if self.findings.borrow().is_empty() {
            return false;
        }
        let whole = self.whole.get_or_init(|| self.text.parse().ok());
        let section = whole.as_ref().and_then(|whole| whole.get(sections)?.get(name));
        section.is_some_and(|section| keys.iter().any(|key| section.get(key).is_some()))
    }

    fn volume(&self, raw: RawVolume) -> VolumeSettings {
        VolumeSettings {
            backing: self.locate(raw.backing),
            flash: self.locate(raw.flash),
            cache: self.locate(raw.cache),
            read_only: raw.read_only,
            shared: raw.shared,
            served: raw.served,
            released: raw.released,
            wait: raw.wait.map(|time| time.0),
            options: self.options(raw.options),
            size: raw.size.map(|size| size.0),
            export: raw.export.map(|export| export.0),
            number: self.locate(raw.number),
        }
    }

    fn options(&self, raw: Vec<(&'static OptionDefinition, Spanned<TypedValue>)>) -> ConfiguredOptions {
        raw.into_iter().filter_map(|(option, typed)| self.option(option, typed)).collect()
    }

    /// Parses an option. A value out of range is refused here, because no user would see an
    /// adjustment made in a file.
    fn option(
        &self,
        option: &'static OptionDefinition,
        typed: Spanned<TypedValue>,
    ) -> Option<(&'static str, OptionSetting)> {
        let origin = self.origin(typed.span().start);
        match option.read(&typed.into_inner().0) {
            Ok(value) => Some((option.name, OptionSetting { value, origin })),
            Err(ValueError::NotUnderstood(why) | ValueError::OutOfRange(why, _)) => {
                let failure = origin.failure(&format!("cannot set `{}`", option.name));
                self.found(&origin, failure.why(why).option(option.name));
                None
            }
        }
    }
}

impl Settings {
    /// Merges `newer` over these settings, key by key.
    pub fn overlay(&mut self, newer: Self) {
        replace(&mut self.control, newer.control);
        replace(&mut self.memory, newer.memory);
        replace(&mut self.stop_timeout, newer.stop_timeout);
        replace(&mut self.metrics, newer.metrics);
        self.places.overlay(newer.places);
        for (name, cache) in newer.caches {
            match self.caches.get_mut(&name) {
                Some(older) => {
                    replace(&mut older.device, cache.device);
                    replace(&mut older.former, cache.former);
                    replace(&mut older.moving, cache.moving);
                    replace(&mut older.imported, cache.imported);
                    replace(&mut older.served, cache.served);
                    older.is_refused |= cache.is_refused;
                    older.options.extend(cache.options);
                }
                None => drop(self.caches.insert(name, cache)),
            }
        }
        self.defaults.overlay(newer.defaults);
        for (name, volume) in newer.volumes {
            match self.volumes.get_mut(&name) {
                Some(older) => {
                    older.settings.overlay(volume.settings);
                    older.is_refused |= volume.is_refused;
                }
                None => drop(self.volumes.insert(name, volume)),
            }
        }
    }

    /// Merges the content of the file that `bcached set` writes over these settings, and returns
    /// the names of its volumes that are not configured any more.
    ///
    /// Such volumes, and such caches, are left out: a persisted option must neither bring back a
    /// part of them, without a device, nor prevent a start.
    pub fn overlay_set_file(&mut self, mut newer: Self) -> Vec<String> {
        newer.caches.retain(|name, cache| self.caches.contains_key(name) || cache.imported == Some(true));
        for (name, cache) in &newer.caches {
            let device = |cache: &CacheSettings| cache.device.as_ref().map(|device| device.value.clone());
            if let (Some(said), Some(is)) = (self.caches.get(name).and_then(device), device(cache))
                && said != is
            {
                self.replaced.push((name.clone(), said, is));
            }
        }
        let imported: Vec<_> = newer.caches.keys().cloned().collect();
        let is_whole = |name: &str, volume: &VolumeSection| {
            let VolumeSettings { backing, flash, .. } = &volume.settings;
            self.volumes.contains_key(name) || backing.is_some() || flash.is_some()
        };
        let gone = newer.volumes.iter().filter(|(name, volume)| !is_whole(name, volume));
        let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
        newer.volumes.retain(|name, volume| is_whole(name, volume));
        for (name, volume) in &mut newer.volumes {
            // A size that was persisted for a volume with a backing device does not prevent a start
            // if the name now belongs to a volume that lives in its cache only.
            let said = self.volumes.get(name);
            if volume.settings.flash.is_some() || said.is_some_and(|said| said.settings.flash.is_some()) {
                volume.settings.size = None;
            }
            // A cache that was removed from the configuration does not prevent a start either.
            let is_known = |name: &str| {
                name == NO_CACHE
                    || self.caches.contains_key(name)
                    || imported.iter().any(|cache| cache == name)
            };
            volume.settings.cache = volume.settings.cache.take().filter(|cache| is_known(&cache.value));
        }
        self.overlay(newer);
        gone
    }
}

impl VolumeSettings {
    fn overlay(&mut self, newer: Self) {
        replace(&mut self.backing, newer.backing);
        replace(&mut self.flash, newer.flash);
        replace(&mut self.cache, newer.cache);
        replace(&mut self.read_only, newer.read_only);
        replace(&mut self.shared, newer.shared);
        replace(&mut self.served, newer.served);
        replace(&mut self.released, newer.released);
        replace(&mut self.wait, newer.wait);
        replace(&mut self.size, newer.size);
        replace(&mut self.export, newer.export);
        replace(&mut self.number, newer.number);
        self.options.extend(newer.options);
    }

    pub(super) fn is_empty(&self) -> bool {
        let Self {
            backing,
            flash,
            cache,
            read_only,
            shared,
            served,
            released,
            wait,
            size,
            export,
            number,
            options,
        } = self;
        let is_unsaid =
            backing.is_none() && flash.is_none() && cache.is_none() && wait.is_none() && served.is_none();
        is_unsaid
            && released.is_none()
            && read_only.is_none()
            && shared.is_none()
            && size.is_none()
            && export.is_none()
            && number.is_none()
            && options.is_empty()
    }
}

impl VolumeSection {
    /// Returns the settings in the volume's own section.
    pub const fn said(&self) -> &VolumeSettings {
        &self.settings
    }

    /// Merges the volume's own settings over `defaults`.
    pub fn over(self, defaults: &VolumeSettings) -> VolumeSettings {
        let mut merged = defaults.clone();
        merged.overlay(self.settings);
        merged
    }
}

pub(super) fn replace<T>(older: &mut Option<T>, newer: Option<T>) {
    if newer.is_some() {
        *older = newer;
    }
}
