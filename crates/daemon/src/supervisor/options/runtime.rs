//! What was said with `--runtime` to the daemon before, for the one that has taken over.

use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::Config;
use bcached_config::options::Scope;
use bcached_config::options::runtime::{Said, Whose};
use std::collections::BTreeMap;

/// Of volumes that are not known before their cache is open, by their UUIDs.
pub type SaidOfLodgers = BTreeMap<String, Said>;

/// Whose that is what is said of a volume. Nobody's if it is not known by what it will be known again.
fn whose(entry: &VolumeEntry) -> Option<Whose> {
    Some(match &entry.backing {
        Some(backing) => Whose::Volume { name: entry.name.clone(), backing: backing.clone() },
        None => Whose::Lodger { uuid: entry.uuid?.to_string() },
    })
}

impl Table {
    /// All that was said, of whatever is there.
    pub fn said(&self) -> Vec<Said> {
        let caches = self.caches.iter().filter(|entry| entry.is_real()).filter_map(|entry| {
            let whose = Whose::Cache { name: entry.name.clone(), device: entry.device.clone() };
            Said::of(whose, &entry.options)
        });
        let volumes = self.volumes.iter().filter(|entry| !entry.is_removed());
        let volumes = volumes.filter_map(|entry| Said::of(whose(entry)?, &entry.options));
        caches.chain(volumes).collect()
    }

    /// As [`Table::of`], with what was said to the process before, which is not there any more.
    pub fn with_said(config: &Config, strict: bool, said: &[Said]) -> Self {
        let mut table = Self::of(config, strict);
        for said in said {
            match &said.whose {
                Whose::Cache { name, device } => {
                    let is_it = |entry: &&mut CacheEntry| {
                        entry.name == *name && entry.device == *device && entry.is_real()
                    };
                    if let Some(entry) = table.caches.iter_mut().find(is_it) {
                        said.add_to(&mut entry.options, Scope::Cache, device);
                    }
                }
                Whose::Volume { name, backing } => {
                    let is_it = |entry: &&mut VolumeEntry| {
                        entry.name == *name && entry.backing.as_ref() == Some(backing)
                    };
                    if let Some(entry) = table.volumes.iter_mut().find(is_it) {
                        let owner = entry.display_name().to_owned();
                        said.add_to(&mut entry.options, Scope::Volume, &owner);
                    }
                }
                Whose::Lodger { uuid } => {
                    table.said_of_lodgers.insert(uuid.clone(), said.clone());
                }
            }
        }
        table
    }
}
