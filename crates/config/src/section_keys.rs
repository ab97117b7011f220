//! Parses the sections of volumes (also `[defaults]`) and caches: their own keys, and one key for
//! each option in the option tables.
//!
//! The `Deserialize` implementations are written by hand, because a derived struct cannot take its
//! keys from a table. Their errors read like derived ones, and list every key.

use super::field_types::{Size, TimeSpan, VolumeNumber};
use super::frontends::ExportSetting;
use crate::options::{OptionDefinition, Scope};
use bcached_control::options::TypedValue;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::fmt;
use std::sync::LazyLock;
use toml::Spanned;

/// The content of a volume's section.
#[derive(Default)]
pub struct RawVolume {
    pub backing: Option<Spanned<String>>,
    pub flash: Option<Spanned<String>>,
    pub cache: Option<Spanned<String>>,
    pub read_only: Option<bool>,
    pub shared: Option<bool>,
    pub served: Option<bool>,
    pub released: Option<bool>,
    pub wait: Option<TimeSpan>,
    pub size: Option<Size>,
    pub export: Option<ExportSetting>,
    pub number: Option<Spanned<VolumeNumber>>,
    /// Options as typed. They are parsed later, by code that knows the line.
    pub options: Vec<(&'static OptionDefinition, Spanned<TypedValue>)>,
}

/// The content of a cache's section.
#[derive(Default)]
pub struct RawCache {
    pub device: Option<Spanned<String>>,
    pub former: Option<Spanned<String>>,
    pub moving: Option<bool>,
    pub imported: Option<bool>,
    pub served: Option<bool>,
    /// As in [`RawVolume`].
    pub options: Vec<(&'static OptionDefinition, Spanned<TypedValue>)>,
}

enum CacheKey {
    Device,
    Former,
    Moving,
    Imported,
    Served,
    Option(&'static OptionDefinition),
}

enum VolumeKey {
    Backing,
    Flash,
    Cache,
    ReadOnly,
    Shared,
    Served,
    Released,
    Wait,
    Size,
    Export,
    Number,
    Option(&'static OptionDefinition),
}

/// Keys that are not options.
const OWN: &[&str] = &[
    "backing",
    "cache",
    "flash",
    "read_only",
    "shared",
    "served",
    "released",
    "wait",
    "size",
    "export",
    "number",
];

/// The same for a cache.
const OWN_OF_CACHE: &[&str] = &["device", "former", "moving", "imported", "served"];

/// All keys of a volume's section.
static KEYS: LazyLock<Vec<&'static str>> = LazyLock::new(|| keys_of(Scope::Volume, OWN));

/// All keys of a cache's section.
static CACHE_KEYS: LazyLock<Vec<&'static str>> = LazyLock::new(|| keys_of(Scope::Cache, OWN_OF_CACHE));

fn keys_of(scope: Scope, own: &'static [&'static str]) -> Vec<&'static str> {
    let options = scope.options().iter().filter(|option| option.not_configured().is_none());
    own.iter().copied().chain(options.map(|option| option.name)).collect()
}

/// Returns the option in `scope` with the key `name`. `keys` are all valid keys, for the error.
fn option_of<E: Error>(
    scope: Scope,
    name: &str,
    keys: &'static [&'static str],
) -> Result<&'static OptionDefinition, E> {
    let option = scope.find(name).ok_or_else(|| E::unknown_field(name, keys))?;
    match option.not_configured() {
        Some(instead) => Err(E::custom(format!("`{name}` cannot be set in the configuration: {instead}"))),
        None => Ok(option),
    }
}

impl<'de> Deserialize<'de> for VolumeKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(match name.as_str() {
            "backing" => Self::Backing,
            "flash" => Self::Flash,
            "cache" => Self::Cache,
            "read_only" => Self::ReadOnly,
            "shared" => Self::Shared,
            "served" => Self::Served,
            "released" => Self::Released,
            "wait" => Self::Wait,
            "size" => Self::Size,
            "export" => Self::Export,
            "number" => Self::Number,
            name => Self::Option(option_of(Scope::Volume, name, &KEYS)?),
        })
    }
}

impl<'de> Deserialize<'de> for RawVolume {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VolumeVisitor;
        impl<'de> Visitor<'de> for VolumeVisitor {
            type Value = RawVolume;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the section of a volume")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawVolume, A::Error> {
                let mut raw = RawVolume::default();
                while let Some(key) = map.next_key()? {
                    match key {
                        VolumeKey::Backing => raw.backing = Some(map.next_value()?),
                        VolumeKey::Flash => raw.flash = Some(map.next_value()?),
                        VolumeKey::Cache => raw.cache = Some(map.next_value()?),
                        VolumeKey::ReadOnly => raw.read_only = Some(map.next_value()?),
                        VolumeKey::Shared => raw.shared = Some(map.next_value()?),
                        VolumeKey::Served => raw.served = Some(map.next_value()?),
                        VolumeKey::Released => raw.released = Some(map.next_value()?),
                        VolumeKey::Wait => raw.wait = Some(map.next_value()?),
                        VolumeKey::Size => raw.size = Some(map.next_value()?),
                        VolumeKey::Export => raw.export = Some(map.next_value()?),
                        VolumeKey::Number => raw.number = Some(map.next_value()?),
                        VolumeKey::Option(option) => raw.options.push((option, map.next_value()?)),
                    }
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_map(VolumeVisitor)
    }
}

impl<'de> Deserialize<'de> for CacheKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(match name.as_str() {
            "device" => Self::Device,
            "former" => Self::Former,
            "moving" => Self::Moving,
            "imported" => Self::Imported,
            "served" => Self::Served,
            name => Self::Option(option_of(Scope::Cache, name, &CACHE_KEYS)?),
        })
    }
}

impl<'de> Deserialize<'de> for RawCache {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CacheVisitor;
        impl<'de> Visitor<'de> for CacheVisitor {
            type Value = RawCache;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the section of a cache")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawCache, A::Error> {
                let mut raw = RawCache::default();
                while let Some(key) = map.next_key()? {
                    match key {
                        CacheKey::Device => raw.device = Some(map.next_value()?),
                        CacheKey::Former => raw.former = Some(map.next_value()?),
                        CacheKey::Moving => raw.moving = Some(map.next_value()?),
                        CacheKey::Imported => raw.imported = Some(map.next_value()?),
                        CacheKey::Served => raw.served = Some(map.next_value()?),
                        CacheKey::Option(option) => raw.options.push((option, map.next_value()?)),
                    }
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_map(CacheVisitor)
    }
}
