//! Whose options somebody looks at or changes: a volume's or a cache's.

use crate::engine_thread::Engine;
use crate::supervisor::Shared;
use crate::supervisor::options::{Facts, resolve_called, served_by};
use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::options::layers::Layers;
use bcached_config::options::{Definition, Place, Scope, cache_options, shown};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names::{self, Called};
use bcached_control::options::Shown;
use bcached_engine::{Options, Settings};
use bcached_format::Label;
use std::sync::{Mutex, PoisonError};

/// What the device of a volume keeps, or the table of its cache.
pub const LABEL: &str = "label";

/// One of them, by its place in the table.
#[derive(Clone, Copy, Debug)]
pub enum Owner {
    Volume(usize),
    Cache(usize),
}

/// It as it is at one moment.
pub enum View {
    Volume(Box<VolumeEntry>),
    Cache(CacheView),
}

/// A cache as it is at one moment.
#[derive(Clone)]
pub struct CacheView {
    index: usize,
    /// `None` until its device tells.
    name: Option<String>,
    display_name: String,
    layers: Layers,
    /// What its superblock says; `None`: nobody has looked.
    kept: Option<Settings>,
}

impl Owner {
    /// Who is called so. May look at files, so it is not for the loop.
    ///
    /// # Errors
    /// Nobody, or several.
    pub fn find(shared: &Mutex<Shared>, scope: Scope, called: Called<'_>) -> Result<Self, Failure> {
        match scope {
            Scope::Volume => resolve_called(shared, called).map(Self::Volume),
            Scope::Cache => resolve_cache(shared, called, Among::All).map(Self::Cache),
        }
    }

    /// It as it is now; `None`: there is no such.
    pub fn view(self, table: &Table) -> Option<View> {
        Some(match self {
            Self::Volume(index) => View::Volume(Box::new(table.volumes.get(index)?.clone())),
            Self::Cache(index) => View::Cache(CacheView::of(index, table.caches.get(index)?)),
        })
    }

    /// Takes over what was said.
    pub fn take(self, table: &mut Table, layers: Layers) {
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
    fn with(&self, layers: &Layers) -> Self {
        let kept = layers.kept_settings().or(self.kept.unwrap_or_default());
        Self { layers: layers.clone(), kept: Some(kept), ..self.clone() }
    }

    /// The options of which its superblock is to say something else, with `layers` in force.
    fn would_write(&self, layers: &Layers) -> Vec<&'static str> {
        let (Some(before), Some(after)) = (self.kept, self.with(layers).kept) else { return Vec::new() };
        let differs = |option: &&Definition| match option.place {
            Place::Kept { read, .. } => read(&before) != read(&after),
            _ => false,
        };
        cache_options::OPTIONS.iter().filter(differs).map(|option| option.name).collect()
    }
}

impl View {
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

    /// As in the configuration.
    pub const fn name(&self) -> Option<&String> {
        match self {
            Self::Volume(entry) => entry.name.as_ref(),
            Self::Cache(cache) => cache.name.as_ref(),
        }
    }

    pub fn layers(&self) -> &Layers {
        match self {
            Self::Volume(entry) => &entry.options,
            Self::Cache(cache) => &cache.layers,
        }
    }

    /// Who writes its superblock, if anybody does now.
    pub fn engine(&self, table: &Table) -> Option<Engine> {
        match self {
            Self::Volume(entry) => served_by(entry, &table.caches).map(|(engine, _)| engine),
            Self::Cache(cache) => table.caches.get(cache.index)?.engine(),
        }
    }

    /// The options that nothing but a working cache can keep and that are to be something else, with `layers` in force, and this label.
    pub fn would_write(&self, layers: &Layers, label: Option<Label>) -> Vec<&'static str> {
        match self {
            Self::Cache(cache) => cache.would_write(layers),
            Self::Volume(_) => label.map(|_| LABEL).into_iter().collect(),
        }
    }

    /// An option as it is, and as it would be if `layers` and `label` were in force.
    pub fn before_and_after(
        &self,
        layers: &Layers,
        label: Option<Label>,
        option: &'static Definition,
    ) -> (Shown, Shown) {
        match self {
            Self::Volume(entry) => {
                let before = Facts::of(entry, None);
                (before.show(option), before.with(layers, entry.kept_mode, label).show(option))
            }
            Self::Cache(cache) => (of_cache(cache, option), of_cache(&cache.with(layers), option)),
        }
    }
}

/// An option of a cache. Its engine has been told of what was said, or will be when it opens.
pub fn of_cache(cache: &CacheView, option: &'static Definition) -> Shown {
    let mut options = Options::default();
    cache.layers.apply_to_cache(&mut options);
    let said = cache.layers.said(option.name);
    let value = match option.place {
        Place::Set { read, .. } => Some(read(&options)),
        Place::Kept { read, .. } => {
            said.map(|(value, _)| value.clone()).or_else(|| cache.kept.as_ref().and_then(read))
        }
        _ => None,
    };
    let mut shown = shown::shown(option, value.as_ref());
    if matches!(option.place, Place::Kept { .. }) {
        "superblock".clone_into(&mut shown.origin);
    }
    shown::say_where_from(&mut shown, said.filter(|(asked, _)| value.as_ref() == Some(asked)));
    shown
}

/// Which caches may be meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Among {
    /// Also what one was before it became another device, until that is let go of.
    All,
    /// Those that are to stay, and that volumes can come to.
    Lasting,
}

/// The cache that is called so: by its name, its set's UUID (or the beginning of it), or its device. May look at files, so it is not for
/// the loop.
pub fn resolve_cache(shared: &Mutex<Shared>, called: Called<'_>, among: Among) -> Result<usize, Failure> {
    let (indices, known): (Vec<usize>, Vec<names::Known>) = {
        let table = &shared.lock().unwrap_or_else(PoisonError::into_inner).table;
        let known = |(index, cache): (usize, &CacheEntry)| {
            let known = names::Known {
                name: cache.display_name().to_owned(),
                uuid: cache.set().map(|uuid| uuid.to_string()),
                path: Some(cache.device.clone()),
                opened: cache.opened,
                ..names::Known::default()
            };
            (index, known)
        };
        let is_meant = |cache: &CacheEntry| among == Among::All || cache.former_of.is_none();
        table.real_caches().filter(|(_, cache)| is_meant(cache)).map(known).unzip()
    };
    names::resolve_called(called, &known).map(|at| indices[at]).map_err(|meant| {
        let name = |known: &names::Known| known.name.clone();
        if meant.is_empty() {
            return no_cache(called.typed, &known.iter().map(name).collect::<Vec<_>>());
        }
        let names: Vec<_> = meant.iter().map(|at| name(&known[*at])).collect();
        Failure::new(Kind::AmbiguousName, format!("several caches may be meant by `{}`", called.typed))
            .next(format!("name one of: {}", names.join(", ")))
    })
}

/// No cache is called so, of those that there are.
pub fn no_cache(typed: &str, names: &[String]) -> Failure {
    let failure = Failure::new(Kind::UnknownName, format!("no cache is called `{typed}`"));
    if names.is_empty() {
        return failure
            .why("this daemon has none at present")
            .next("`bcached import` or `bcached add` brings back what was released; else configure one");
    }
    failure.next(format!("there are: {}", names.join(", ")))
}
