//! `config.d/99-set.toml`: what `bcached set`, `attach`, `detach`, `add`, `remove`, `shrink`, `replace`, `release` and `import` keep. It is made
//! and rewritten by the daemon and holds options of volumes and caches, which cache a volume has, and which volumes and caches were added,
//! replaced or removed, nothing else; a file of that name that a person wrote is read like any other, and never rewritten.

use super::file;
use super::persisted::{Kept, KeptCache, KeptOptions};
use super::read_file::{MEND_SET_FILE, bounded, content};
use crate::options::Scope;
use bcached_control::atomic_file;
use bcached_control::failure::{Failure, Kind};
use bcached_control::sizes::typed;
use indexmap::IndexMap;
use std::io;
use std::path::{Path, PathBuf};

/// Its name, in `config.d` beside the configuration. Whatever other names there are, it is read last.
const NAME: &str = "99-set.toml";

/// Its first line, by which it is known.
const FIRST_LINE: &str = "# Made by `bcached set`, which rewrites it; `bcached unset` takes lines out of it.";

/// Where it lies beside the configuration `main`.
pub fn path_beside(main: &Path) -> PathBuf {
    main.with_file_name("config.d").join(NAME)
}

/// The file's content.
#[derive(Debug)]
pub struct SetFile {
    path: PathBuf,
    /// By volume, in the order in which they are written.
    volumes: IndexMap<String, Kept>,
    /// Options of caches, likewise.
    caches: IndexMap<String, KeptCache>,
    /// As it lies on the disk; empty if it does not.
    before: String,
}

impl SetFile {
    /// Reads it; a file that does not exist is an empty one.
    ///
    /// # Errors
    /// It cannot be read, or is not ours.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let is_missing = |path: &Path| path.try_exists().is_ok_and(|is_there| !is_there);
        let before = match bounded(path, is_missing)? {
            true => String::new(),
            false => content(path, MEND_SET_FILE)?,
        };
        let (mut volumes, mut caches) = (IndexMap::new(), IndexMap::new());
        if !before.is_empty() {
            let not_ours = || {
                Failure::new(Kind::Config, format!("{} is not rewritten", path.display()))
                    .why("it was not made by `bcached set`, or holds more than options and caches of volumes")
                    .next("give it another name, as 98-local.toml: it is read all the same")
            };
            if !before.starts_with(FIRST_LINE) {
                return Err(not_ours());
            }
            let mut findings = Vec::new();
            let settings = file::parse_set_file(path, &before, &mut findings);
            if let Some(first) = findings.into_iter().next() {
                return Err(first);
            }
            (volumes, caches) = settings.into_kept().ok_or_else(not_ours)?;
        }
        Ok(Self { path: path.to_owned(), volumes, caches, before })
    }

    /// The options that it holds of the volume or cache called `name`, to be changed.
    pub fn of(&mut self, scope: Scope, name: &str) -> &mut KeptOptions {
        match scope {
            Scope::Volume => &mut self.volumes.entry(name.to_owned()).or_default().options,
            Scope::Cache => &mut self.caches.entry(name.to_owned()).or_default().options,
        }
    }

    /// All that it says of the volume called `name`, to be changed.
    pub fn kept_of(&mut self, name: &str) -> &mut Kept {
        self.volumes.entry(name.to_owned()).or_default()
    }

    /// All that it says of the cache called `name`, to be changed.
    pub fn kept_of_cache(&mut self, name: &str) -> &mut KeptCache {
        self.caches.entry(name.to_owned()).or_default()
    }

    /// Which cache it says that the volume called `name` has, to be changed.
    pub fn cache_of(&mut self, name: &str) -> &mut Option<String> {
        &mut self.volumes.entry(name.to_owned()).or_default().cache
    }

    /// A volume of that name is added. It comes last, unless it has its place already.
    pub fn add(&mut self, name: &str) {
        let is_there = |kept: &Kept| kept.backing.is_some();
        if !self.volumes.get(name).is_some_and(is_there)
            && let Some(kept) = self.volumes.shift_remove(name)
        {
            self.volumes.insert(name.to_owned(), kept);
        }
    }

    /// The volumes that it alone knows, and that are not to be served, with their devices.
    pub fn removed_with_device(&self) -> Vec<(String, String)> {
        let removed = self.volumes.iter().filter(|(_, kept)| kept.served == Some(false));
        removed.filter_map(|(name, kept)| Some((name.clone(), kept.backing.clone()?))).collect()
    }

    /// What the file is to say.
    pub fn text(&self) -> String {
        let caches = self.caches.iter().filter(|(_, kept)| **kept != KeptCache::default());
        let caches = caches.map(|(name, kept)| section("cache", name, of_cache(kept)));
        let volumes = self.volumes.iter().filter(|(_, kept)| **kept != Kept::default());
        let volumes = volumes.map(|(name, kept)| section("volume", name, of_volume(kept)));
        let sections: String = caches.chain(volumes).collect();
        if sections.is_empty() && self.before.is_empty() {
            return String::new();
        }
        format!("{FIRST_LINE}\nversion = 1\n{sections}")
    }

    /// Whether it is to say anything else than it says.
    pub fn is_changed(&self) -> bool {
        self.text() != self.before
    }

    /// Sees, as far as one can without writing, that it can be written.
    ///
    /// # Errors
    /// It cannot.
    pub fn check_writable(&self) -> Result<(), Failure> {
        let place = atomic_file::place(&self.path).map_err(|error| cannot(&self.path, "write", &error))?;
        let folder = place.parent().unwrap_or(Path::new("."));
        let nearest = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
        let may = rustix::fs::access(nearest, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
        may.map_err(|error| cannot(&self.path, "write", &error.into()))
    }

    /// Sees whether there is room for it, by writing it under another name, which is removed again.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn rehearse(&self) -> Result<(), Failure> {
        let made = self.path.parent().map_or(Ok(()), atomic_file::make_folder);
        made.and_then(|()| atomic_file::rehearse(&self.path, &self.text()))
            .map_err(|error| cannot(&self.path, "write", &error))
    }

    /// Writes it, if it is to say anything else than it says: after a power cut it is the old one or the new one.
    ///
    /// # Errors
    /// It cannot be written, and is what it was.
    pub fn write(&self) -> Result<(), Failure> {
        if !self.is_changed() {
            return Ok(());
        }
        let made = self.path.parent().map_or(Ok(()), atomic_file::make_folder);
        made.and_then(|()| atomic_file::write(&self.path, &self.text()))
            .map_err(|error| cannot(&self.path, "write", &error))
    }
}

/// As it stands in the file, which keeps the order of sections.
fn section(kind: &str, name: &str, says: toml::Table) -> String {
    let table = |key: &str, value| toml::Table::from_iter([(key.to_owned(), toml::Value::Table(value))]);
    format!("\n{}", table(kind, table(name, says)))
}

fn of_volume(kept: &Kept) -> toml::Table {
    let Kept { backing, flash, cache, served, released, size, options } = kept;
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

fn of_cache(kept: &KeptCache) -> toml::Table {
    let KeptCache { device, former, moving, imported, served, options } = kept;
    let own = [
        text("device", device.as_ref()),
        text("former", former.as_ref()),
        is("moving", *moving),
        is("imported", *imported),
        is("served", *served),
    ];
    own.into_iter().flatten().chain(of_options(options)).collect()
}

fn of_options(kept: &KeptOptions) -> impl Iterator<Item = (String, toml::Value)> {
    kept.iter().map(|(name, value)| ((*name).to_owned(), value.to_toml()))
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
        .next("nothing was changed; see to it that the daemon can write there")
}
