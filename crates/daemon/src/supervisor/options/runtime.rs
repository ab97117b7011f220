//! Passes runtime values (set with `--runtime`) from the previous daemon to the one that has taken
//! over.

use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::Config;
use bcached_config::options::Scope;
use bcached_config::options::runtime::{OptionOwner, RuntimeOptions};
use std::collections::BTreeMap;

/// Runtime values of volumes that are unknown until their cache is open, by UUID.
pub type FlashRuntimeOptions = BTreeMap<String, RuntimeOptions>;

/// The owner of a volume's runtime values; `None` if the volume has nothing by which it will be
/// recognised.
fn whose(entry: &VolumeEntry) -> Option<OptionOwner> {
    Some(match &entry.backing {
        Some(backing) => OptionOwner::Volume { name: entry.name.clone(), backing: backing.clone() },
        None => OptionOwner::Lodger { uuid: entry.uuid?.to_string() },
    })
}

impl Table {
    /// All runtime values of the caches and volumes in the table.
    pub fn said(&self) -> Vec<RuntimeOptions> {
        let caches = self.caches.iter().filter(|entry| entry.is_real()).filter_map(|entry| {
            let whose = OptionOwner::Cache { name: entry.name.clone(), device: entry.device.clone() };
            RuntimeOptions::of(whose, &entry.options)
        });
        let volumes = self.volumes.iter().filter(|entry| !entry.is_removed());
        let volumes = volumes.filter_map(|entry| RuntimeOptions::of(whose(entry)?, &entry.options));
        caches.chain(volumes).collect()
    }

    /// As [`Table::of`], with the runtime values of the previous process, which has ended.
    pub fn with_said(config: &Config, strict: bool, said: &[RuntimeOptions]) -> Self {
        let mut table = Self::of(config, strict);
        for said in said {
            match &said.whose {
                OptionOwner::Cache { name, device } => {
                    let is_it = |entry: &&mut CacheEntry| {
                        entry.name == *name && entry.device == *device && entry.is_real()
                    };
                    if let Some(entry) = table.caches.iter_mut().find(is_it) {
                        said.add_to(&mut entry.options, Scope::Cache, device);
                    }
                }
                OptionOwner::Volume { name, backing } => {
                    let is_it = |entry: &&mut VolumeEntry| {
                        entry.name == *name && entry.backing.as_ref() == Some(backing)
                    };
                    if let Some(entry) = table.volumes.iter_mut().find(is_it) {
                        let owner = entry.display_name().to_owned();
                        said.add_to(&mut entry.options, Scope::Volume, &owner);
                    }
                }
                OptionOwner::Lodger { uuid } => {
                    table.flash_runtime_options.insert(uuid.clone(), said.clone());
                }
            }
        }
        table
    }
}
