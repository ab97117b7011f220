//! What the daemon itself persists: the possible content of its own file.

use super::parse::{CacheSettings, Located, Settings, VolumeSection, VolumeSettings};
use crate::options::layers::ConfiguredOptions;
use crate::options::value::Value;
use indexmap::IndexMap;
use std::collections::BTreeMap;

/// What is persisted of a volume that was changed at run time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PersistedVolume {
    /// Its device, if it was added at run time.
    pub backing: Option<String>,
    /// Its UUID, if it lives in a cache only.
    pub flash: Option<String>,
    /// Its cache, or [`NO_CACHE`](super::NO_CACHE).
    pub cache: Option<String>,
    /// Whether it is to be served, if set.
    pub served: Option<bool>,
    /// It is not served because its cache was released.
    pub released: Option<bool>,
    /// Upper limit of the size that is served, in bytes, if set.
    pub size: Option<u64>,
    /// Its options.
    pub options: PersistedOptions,
}

/// What is persisted of a cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PersistedCache {
    /// Its device, if it differs from the one in its section, or the section has none.
    pub device: Option<String>,
    /// The former device, on which some of the volumes may still be.
    pub former: Option<String>,
    /// Whether the volumes are to move away from the former device, if set. Without a former
    /// device, `true` means that they come from a dead one.
    pub moving: Option<bool>,
    /// It has no other section than this one.
    pub imported: Option<bool>,
    /// Whether it is to be served, if set.
    pub served: Option<bool>,
    /// Its options.
    pub options: PersistedOptions,
}

/// Persisted options, by name.
pub type PersistedOptions = BTreeMap<&'static str, Value>;

impl Settings {
    /// Returns what is persisted of volumes and caches; `None` if the settings hold anything else.
    pub fn into_persisted(
        self,
    ) -> Option<(IndexMap<String, PersistedVolume>, IndexMap<String, PersistedCache>)> {
        let is_empty = self.control.is_none()
            && self.memory.is_none()
            && self.stop_timeout.is_none()
            && self.metrics.is_none()
            && self.places.is_empty()
            && self.defaults.is_empty();
        let values = |options: ConfiguredOptions| -> PersistedOptions {
            options.into_iter().map(|(name, setting)| (name, setting.value)).collect()
        };
        let persisted = |volume: VolumeSection| {
            let VolumeSettings { options, backing, flash, cache, served, released, size, .. } =
                volume.settings.clone();
            let rest = VolumeSettings {
                options: ConfiguredOptions::new(),
                backing: None,
                flash: None,
                cache: None,
                served: None,
                released: None,
                size: None,
                ..volume.settings
            };
            let options = values(options);
            let value = |located: Option<Located<String>>| located.map(|located| located.value);
            let (backing, flash, cache) = (value(backing), value(flash), value(cache));
            rest.is_empty().then_some(PersistedVolume {
                backing,
                flash,
                cache,
                served,
                released,
                size,
                options,
            })
        };
        let volumes = self.volumes.into_iter().map(|(name, volume)| Some((name, persisted(volume)?)));
        let volumes: Option<_> = volumes.collect();
        let persisted = |cache: CacheSettings| {
            let CacheSettings { device, former, moving, imported, served, options, .. } = cache;
            let text = |located: Option<Located<String>>| located.map(|located| located.value);
            let (device, former) = (text(device), text(former));
            PersistedCache { device, former, moving, imported, served, options: values(options) }
        };
        let caches = self.caches.into_iter().map(|(name, cache)| (name, persisted(cache)));
        volumes.filter(|_| is_empty).map(|volumes| (volumes, caches.collect()))
    }
}
