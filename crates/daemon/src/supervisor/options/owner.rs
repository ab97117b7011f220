//! The owner of options that are read or changed: a volume or a cache.

use crate::engine_thread::Engine;
use crate::supervisor::Shared;
use crate::supervisor::options::{OptionSources, resolve_called, served_by};
use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::options::layers::OptionLayers;
use bcached_config::options::{OptionDefinition, OptionStorage, Scope, cache_options, shown};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names::{self, TypedName};
use bcached_control::options::OptionEntry;
use bcached_engine::{Options, Settings};
use bcached_format::Label;
use std::sync::{Mutex, PoisonError};

/// Stored by a volume's device, or in the volume table of its cache.
pub const LABEL: &str = "label";

/// A volume or a cache, by its index in the table.
#[derive(Clone, Copy, Debug)]
pub enum OptionsOwner {
    Volume(usize),
    Cache(usize),
}

/// A snapshot of a volume or a cache.
pub enum OwnerView {
    Volume(Box<VolumeEntry>),
    Cache(CacheView),
}

/// A snapshot of a cache.
#[derive(Clone)]
pub struct CacheView {
    index: usize,
    /// `None` until its device has been read.
    name: Option<String>,
    display_name: String,
    layers: OptionLayers,
    /// The settings in its superblock; `None` if it has not been read.
    kept: Option<Settings>,
}

impl OptionsOwner {
    /// Finds the volume or cache of this name. May read files, so it must not run on the loop.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn find(shared: &Mutex<Shared>, scope: Scope, called: TypedName<'_>) -> Result<Self, Failure> {
        match scope {
            Scope::Volume => resolve_called(shared, called).map(Self::Volume),
            Scope::Cache => resolve_cache(shared, called, CacheFilter::All).map(Self::Cache),
        }
    }

    /// A snapshot of the owner; `None` if it does not exist.
    pub fn view(self, table: &Table) -> Option<OwnerView> {
        Some(match self {
            Self::Volume(index) => OwnerView::Volume(Box::new(table.volumes.get(index)?.clone())),
            Self::Cache(index) => OwnerView::Cache(CacheView::of(index, table.caches.get(index)?)),
        })
    }

    /// Stores the requested values in the table.
    pub fn take(self, table: &mut Table, layers: OptionLayers) {
        match self {
            Self::Volume(index) => table.volumes[index].options = layers,
            Self::Cache(index) => table.caches[index].options = layers,
        }
    }
}

impl CacheView {
    fn of(index: usize, entry: &CacheEntry) -> Self {
        let (name, layers) = (entry.name.clone(), entry.options.clone());
        Self { index, name, display_name: entry.display_name().to_owned(), layers, kept: entry.kept }
    }

    /// The same once `layers` are in force, and in its superblock.
    fn with(&self, layers: &OptionLayers) -> Self {
        let kept = layers.kept_settings().or(self.kept.unwrap_or_default());
        Self { layers: layers.clone(), kept: Some(kept), ..self.clone() }
    }

    /// The options whose values in its superblock would change if `layers` were in force.
    fn would_write(&self, layers: &OptionLayers) -> Vec<&'static str> {
        let (Some(before), Some(after)) = (self.kept, self.with(layers).kept) else { return Vec::new() };
        let differs = |option: &&OptionDefinition| match option.place {
            OptionStorage::CacheSuperblock { read, .. } => read(&before) != read(&after),
            _ => false,
        };
        cache_options::OPTIONS.iter().filter(differs).map(|option| option.name).collect()
    }
}

impl OwnerView {
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Volume(_) => Scope::Volume,
            Self::Cache(_) => Scope::Cache,
        }
    }

    pub fn display_name(&self) -> &str {
        match self {
            Self::Volume(entry) => entry.display_name(),
            Self::Cache(cache) => &cache.display_name,
        }
    }

    /// The name in the configuration.
    pub const fn name(&self) -> Option<&String> {
        match self {
            Self::Volume(entry) => entry.name.as_ref(),
            Self::Cache(cache) => cache.name.as_ref(),
        }
    }

    pub fn layers(&self) -> &OptionLayers {
        match self {
            Self::Volume(entry) => &entry.options,
            Self::Cache(cache) => &cache.layers,
        }
    }

    /// The engine that writes the superblock, if there is one now.
    pub fn engine(&self, table: &Table) -> Option<Engine> {
        match self {
            Self::Volume(entry) => served_by(entry, &table.caches).map(|(engine, _)| engine),
            Self::Cache(cache) => table.caches.get(cache.index)?.engine(),
        }
    }

    /// The changed options that only a working cache or device can store, if `layers` and `label`
    /// were in force.
    pub fn would_write(&self, layers: &OptionLayers, label: Option<Label>) -> Vec<&'static str> {
        match self {
            Self::Cache(cache) => cache.would_write(layers),
            Self::Volume(_) => label.map(|_| LABEL).into_iter().collect(),
        }
    }

    /// An option as it is, and as it would be if `layers` and `label` were in force.
    pub fn before_and_after(
        &self,
        layers: &OptionLayers,
        label: Option<Label>,
        option: &'static OptionDefinition,
    ) -> (OptionEntry, OptionEntry) {
        match self {
            Self::Volume(entry) => {
                let before = OptionSources::of(entry, None);
                (before.show(option), before.with(layers, entry.kept_mode, label).show(option))
            }
            Self::Cache(cache) => (of_cache(cache, option), of_cache(&cache.with(layers), option)),
        }
    }
}

/// An option of a cache. Its engine has been given the requested values, or will be when it opens.
pub fn of_cache(cache: &CacheView, option: &'static OptionDefinition) -> OptionEntry {
    let mut options = Options::default();
    cache.layers.apply_to_cache(&mut options);
    let said = cache.layers.said(option.name);
    let value = match option.place {
        OptionStorage::CacheEngine { read, .. } => Some(read(&options)),
        OptionStorage::CacheSuperblock { read, .. } => {
            said.map(|(value, _)| value.clone()).or_else(|| cache.kept.as_ref().and_then(read))
        }
        _ => None,
    };
    let mut shown = shown::shown(option, value.as_ref());
    if matches!(option.place, OptionStorage::CacheSuperblock { .. }) {
        "superblock".clone_into(&mut shown.origin);
    }
    shown::say_where_from(&mut shown, said.filter(|(asked, _)| value.as_ref() == Some(asked)));
    shown
}

/// Which caches may be meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CacheFilter {
    /// Also the former device of a replaced cache, until it is released.
    All,
    /// Those that stay, and that volumes can be attached to.
    Permanent,
}

/// Finds the cache with this name, set UUID (or the beginning of one) or device. May read files, so
/// it must not run on the loop.
pub fn resolve_cache(
    shared: &Mutex<Shared>,
    called: TypedName<'_>,
    among: CacheFilter,
) -> Result<usize, Failure> {
    let (indices, known): (Vec<usize>, Vec<names::KnownNames>) = {
        let table = &shared.lock().unwrap_or_else(PoisonError::into_inner).table;
        let known = |(index, cache): (usize, &CacheEntry)| {
            let known = names::KnownNames {
                name: cache.display_name().to_owned(),
                uuid: cache.set().map(|uuid| uuid.to_string()),
                path: Some(cache.device.clone()),
                opened: cache.opened,
                ..names::KnownNames::default()
            };
            (index, known)
        };
        let is_meant = |cache: &CacheEntry| among == CacheFilter::All || cache.former_of.is_none();
        table.real_caches().filter(|(_, cache)| is_meant(cache)).map(known).unzip()
    };
    names::resolve_called(called, &known).map(|at| indices[at]).map_err(|meant| {
        let name = |known: &names::KnownNames| known.name.clone();
        if meant.is_empty() {
            return no_cache(called.typed, &known.iter().map(name).collect::<Vec<_>>());
        }
        let names: Vec<_> = meant.iter().map(|at| name(&known[*at])).collect();
        Failure::new(Kind::AmbiguousName, format!("`{}` matches several caches", called.typed))
            .next(format!("name one of: {}", names.join(", ")))
    })
}

/// The failure: none of the existing caches has this name.
pub fn no_cache(typed: &str, names: &[String]) -> Failure {
    let failure = Failure::new(Kind::UnknownName, format!("no cache is called `{typed}`"));
    if names.is_empty() {
        return failure
            .why("this daemon has no cache at present")
            .next("`bcached import` or `bcached add` brings a released one back; otherwise configure one");
    }
    failure.next(format!("there are: {}", names.join(", ")))
}
