//! What of the settings is kept by the daemon itself: all that its own file may say.

use super::file::{CacheSettings, Located, NamedVolume, Settings, VolumeSettings};
use crate::options::layers::Configured;
use crate::options::value::Value;
use indexmap::IndexMap;
use std::collections::BTreeMap;

/// What is kept of a volume that was changed while the daemon ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    /// Its device, if it was added while the daemon ran.
    pub backing: Option<String>,
    /// Its UUID, if it lives in a cache alone.
    pub flash: Option<String>,
    /// Its cache, or none.
    pub cache: Option<String>,
    /// Whether it is to be served, if that is said.
    pub served: Option<bool>,
    /// It is not because its cache was let go of.
    pub released: Option<bool>,
    /// How much of it is to be served at most, in bytes, if that is said.
    pub size: Option<u64>,
    /// Its options.
    pub options: KeptOptions,
}

/// The same of a cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptCache {
    /// Its device, if that is another one than its section says, or it has none.
    pub device: Option<String>,
    /// The device that it had before and that volumes may still be on.
    pub former: Option<String>,
    /// Whether they leave that, if that is said; without that, that they come from a dead one.
    pub moving: Option<bool>,
    /// It has no section but this.
    pub imported: Option<bool>,
    /// Whether it is to be served, if that is said.
    pub served: Option<bool>,
    /// Its options.
    pub options: KeptOptions,
}

/// Options that are kept, by name.
pub type KeptOptions = BTreeMap<&'static str, Value>;

impl Settings {
    /// What is kept of volumes, and the options of caches, if nothing else stands here.
    pub fn into_kept(self) -> Option<(IndexMap<String, Kept>, IndexMap<String, KeptCache>)> {
        let is_empty = self.control.is_none()
            && self.memory.is_none()
            && self.stop_timeout.is_none()
            && self.metrics.is_none()
            && self.places.is_empty()
            && self.defaults.is_empty();
        let values = |options: Configured| -> KeptOptions {
            options.into_iter().map(|(name, setting)| (name, setting.value)).collect()
        };
        let kept = |volume: NamedVolume| {
            let VolumeSettings { options, backing, flash, cache, served, released, size, .. } =
                volume.settings.clone();
            let rest = VolumeSettings {
                options: Configured::new(),
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
            rest.is_empty().then_some(Kept { backing, flash, cache, served, released, size, options })
        };
        let volumes = self.volumes.into_iter().map(|(name, volume)| Some((name, kept(volume)?)));
        let volumes: Option<_> = volumes.collect();
        let kept = |cache: CacheSettings| {
            let CacheSettings { device, former, moving, imported, served, options, .. } = cache;
            let text = |located: Option<Located<String>>| located.map(|located| located.value);
            let (device, former) = (text(device), text(former));
            KeptCache { device, former, moving, imported, served, options: values(options) }
        };
        let caches = self.caches.into_iter().map(|(name, cache)| (name, kept(cache)));
        volumes.filter(|_| is_empty).map(|volumes| (volumes, caches.collect()))
    }
}
