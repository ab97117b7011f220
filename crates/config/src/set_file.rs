//! Reads and writes `config.d/99-set.toml`, in which the daemon persists what the commands `set`,
//! `attach`, `detach`, `add`, `remove`, `shrink`, `replace`, `release` and `import` change.
//!
//! The daemon creates and rewrites it. It holds options of volumes and caches, the cache of a
//! volume, and the volumes and caches that were added, replaced or removed, and nothing else. If a
//! person wrote a file of that name, it is read like any other and never rewritten.

use super::parse;
use super::persisted::{PersistedCache, PersistedOptions, PersistedVolume};
use super::read_file::{MEND_SET_FILE, bounded, content};
use crate::options::Scope;
use bcached_control::atomic_file;
use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::typed;
use indexmap::IndexMap;
use std::io;
use std::path::{Path, PathBuf};

/// The file's name, in `config.d` beside the configuration. It is read last, whatever other files
/// there are.
const NAME: &str = "99-set.toml";

/// The first line, by which the daemon recognises its own file.
const FIRST_LINE: &str = "# Made by `bcached set`, which rewrites it; `bcached unset` takes lines out of it.";

/// Returns the path of the file beside the configuration `main`.
pub fn path_beside(main: &Path) -> PathBuf {
    main.with_file_name("config.d").join(NAME)
}

/// The content of the file.
#[derive(Debug)]
pub struct SetFile {
    path: PathBuf,
    /// By volume, in the order in which they are written.
    volumes: IndexMap<String, PersistedVolume>,
    /// By cache, likewise.
    caches: IndexMap<String, PersistedCache>,
    /// The content on disk; empty if the file does not exist.
    before: String,
}

impl SetFile {
    /// Reads the file. A file that does not exist counts as empty.
    ///
    /// # Errors
    /// The file cannot be read, or was not written by the daemon.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let is_missing = |path: &Path| path.try_exists().is_ok_and(|is_there| !is_there);
        let before = match bounded(path, is_missing)? {
            true => String::new(),
            false => content(path, MEND_SET_FILE)?,
        };
        let (mut volumes, mut caches) = (IndexMap::new(), IndexMap::new());
        if !before.is_empty() {
            let not_ours = || {
                Failure::new(Kind::Config, format!("cannot rewrite {}", path.display()))
                    .why("it was not made by `bcached set`, or has settings that the command never writes")
                    .next("rename it, for example to 98-local.toml: it is still read")
            };
            if !before.starts_with(FIRST_LINE) {
                return Err(not_ours());
            }
            let mut findings = Vec::new();
            let settings = parse::parse_set_file(path, &before, &mut findings);
            if let Some(first) = findings.into_iter().next() {
                return Err(first);
            }
            (volumes, caches) = settings.into_persisted().ok_or_else(not_ours)?;
        }
        Ok(Self { path: path.to_owned(), volumes, caches, before })
    }

    /// Returns the persisted options of the volume or cache `name`, to be changed.
    pub fn of(&mut self, scope: Scope, name: &str) -> &mut PersistedOptions {
        match scope {
            Scope::Volume => &mut self.volumes.entry(name.to_owned()).or_default().options,
            Scope::Cache => &mut self.caches.entry(name.to_owned()).or_default().options,
        }
    }

    /// Returns everything persisted of the volume `name`, to be changed.
    pub fn kept_of(&mut self, name: &str) -> &mut PersistedVolume {
        self.volumes.entry(name.to_owned()).or_default()
    }

    /// Returns everything persisted of the cache `name`, to be changed.
    pub fn kept_of_cache(&mut self, name: &str) -> &mut PersistedCache {
        self.caches.entry(name.to_owned()).or_default()
    }

    /// Returns the persisted cache of the volume `name`, to be changed.
    pub fn cache_of(&mut self, name: &str) -> &mut Option<String> {
        &mut self.volumes.entry(name.to_owned()).or_default().cache
    }

    /// Prepares an entry for a new volume: it moves to the end unless the volume has a device
    /// already.
    pub fn add(&mut self, name: &str) {
        let is_there = |persisted: &PersistedVolume| persisted.backing.is_some();
        if !self.volumes.get(name).is_some_and(is_there)
            && let Some(persisted) = self.volumes.shift_remove(name)
        {
            self.volumes.insert(name.to_owned(), persisted);
        }
    }

    /// Returns the volumes, with their devices, that only this file configures and that are not to
    /// be served.
    pub fn removed_with_device(&self) -> Vec<(String, String)> {
        let removed = self.volumes.iter().filter(|(_, persisted)| persisted.served == Some(false));
        removed.filter_map(|(name, persisted)| Some((name.clone(), persisted.backing.clone()?))).collect()
    }

    /// Returns the new content of the file.
    pub fn text(&self) -> String {
        let caches = self.caches.iter().filter(|(_, persisted)| **persisted != PersistedCache::default());
        let caches = caches.map(|(name, persisted)| section("cache", name, of_cache(persisted)));
        let volumes = self.volumes.iter().filter(|(_, persisted)| **persisted != PersistedVolume::default());
        let volumes = volumes.map(|(name, persisted)| section("volume", name, of_volume(persisted)));
        let sections: String = caches.chain(volumes).collect();
        if sections.is_empty() && self.before.is_empty() {
            return String::new();
        }
        format!("{FIRST_LINE}\nversion = 1\n{sections}")
    }

    /// Returns whether the new content differs from the one on disk.
    pub fn is_changed(&self) -> bool {
        self.text() != self.before
    }

    /// Checks that the file can be written, as far as that is possible without writing.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn check_writable(&self) -> Result<(), Failure> {
        let place = atomic_file::place(&self.path).map_err(|error| cannot(&self.path, "write", &error))?;
        let folder = place.parent().unwrap_or(Path::new("."));
        let nearest = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
        let may = rustix::fs::access(nearest, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
        may.map_err(|error| cannot(&self.path, "write", &error.into()))
    }

    /// Checks that there is room for the file, by writing it under another name and removing that
    /// again.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn rehearse(&self) -> Result<(), Failure> {
        let made = self.path.parent().map_or(Ok(()), atomic_file::make_folder);
        made.and_then(|()| atomic_file::rehearse(&self.path, &self.text()))
            .map_err(|error| cannot(&self.path, "write", &error))
    }

    /// Writes the file if its content has changed. After a power cut it has the old content or the
    /// new content.
    ///
    /// # Errors
    /// It cannot be written, and is unchanged.
    pub fn write(&self) -> Result<(), Failure> {
        if !self.is_changed() {
            return Ok(());
        }
        let made = self.path.parent().map_or(Ok(()), atomic_file::make_folder);
        made.and_then(|()| atomic_file::write(&self.path, &self.text()))
            .map_err(|error| cannot(&self.path, "write", &error))
    }
}

/// Formats a section as it appears in the file. The order of sections is kept.
fn section(kind: &str, name: &str, says: toml::Table) -> String {
    let table = |key: &str, value| toml::Table::from_iter([(key.to_owned(), toml::Value::Table(value))]);
    format!("\n{}", table(kind, table(name, says)))
}

fn of_volume(persisted: &PersistedVolume) -> toml::Table {
    let PersistedVolume { backing, flash, cache, served, released, size, options } = persisted;
    let size = size.map(typed);
    let own = [
        text("backing", backing.as_ref()),
        text("flash", flash.as_ref()),
        text("cache", cache.as_ref()),
        is("served", *served),
        is("released", *released),
        text("size", size.as_ref()),
    ];
    own.into_iter().flatten().chain(of_options(options)).collect()
}

fn of_cache(persisted: &PersistedCache) -> toml::Table {
    let PersistedCache { device, former, moving, imported, served, options } = persisted;
    let own = [
        text("device", device.as_ref()),
        text("former", former.as_ref()),
        is("moving", *moving),
        is("imported", *imported),
        is("served", *served),
    ];
    own.into_iter().flatten().chain(of_options(options)).collect()
}

fn of_options(persisted: &PersistedOptions) -> impl Iterator<Item = (String, toml::Value)> {
    persisted.iter().map(|(name, value)| ((*name).to_owned(), value.to_toml()))
}

fn text(key: &str, value: Option<&String>) -> Option<(String, toml::Value)> {
    value.map(|value| (key.to_owned(), toml::Value::String(value.clone())))
}

fn is(key: &str, value: Option<bool>) -> Option<(String, toml::Value)> {
    value.map(|is| (key.to_owned(), toml::Value::Boolean(is)))
}

fn cannot(path: &Path, verb: &str, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Kind::Permission,
        _ => Kind::Io,
    };
    Failure::new(kind, format!("cannot {verb} {}", path.display()))
        .why(error.to_string())
        .next("nothing was changed; make sure that the daemon can write there")
}
