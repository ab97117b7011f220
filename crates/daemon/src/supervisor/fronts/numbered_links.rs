//! `/dev/bcacheN`: links to block devices of volumes whose sections ask for a number.
//!
//! They are made with the device, and looked after while it exists: the kernel's bcache may be
//! loaded at any time, and then they are removed.

use crate::supervisor::fronts::{FrontendManager, links};
use bcached_control::names::in_control_files;
use bcached_control::paths;
use bcached_port::{ExportTable, Uuid};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The numbers that sections ask for, and what has become of them, by volume.
#[derive(Clone, Default)]
pub struct NumberedLinks(Arc<Mutex<BTreeMap<String, NumberedLink>>>);

struct NumberedLink {
    number: usize,
    /// What was logged last: the link exists, or why it does not. `None`: the device or its other
    /// links do not exist.
    told: Option<Result<(), String>>,
}

impl NumberedLink {
    fn path(&self) -> String {
        paths::of_machine(Path::new("/dev").join(in_control_files(self.number))).display().to_string()
    }

    /// Logs what has changed.
    fn note(&mut self, name: &str, found: Option<Result<bool, String>>) {
        let link = self.path();
        match (&found, &self.told) {
            (Some(Ok(true)), _) | (Some(Ok(false)), None | Some(Err(_))) => {
                tracing::info!(event = "number-linked", "{name}: also available as {link}");
            }
            (Some(Err(why)), told) if told.as_ref() != Some(&Err(why.clone())) => {
                tracing::warn!(event = "number-not-linked", "{name}: not available as {link}: {why}");
            }
            _ => {}
        }
        self.told = found.map(|found| found.map(drop));
    }
}

impl NumberedLinks {
    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<String, NumberedLink>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the link of a device that has appeared.
    pub fn link(&self, name: &str, uuid: Uuid, path: &Path) {
        self.with(|all| {
            let asked = all.get_mut(name);
            let found = links::number(uuid, asked.as_ref().map(|asked| asked.number), path);
            if let Some(asked) = asked {
                asked.note(name, found);
            }
        });
    }

    /// Looks after the link of a device that still exists.
    fn keep(&self, name: &str, uuid: Uuid, path: &Path) {
        self.with(|all| {
            if let Some(asked) = all.get_mut(name) {
                asked.note(name, links::keep_number(uuid, asked.number, path));
            }
        });
    }

    pub fn forget(&self, name: &str) {
        self.with(|all| all.remove(name));
    }

    /// Returns the link to a volume's device, or which one is missing and why, if its section asks
    /// for one.
    pub fn of(&self, name: &str) -> Option<Result<String, String>> {
        self.with(|all| {
            let asked = all.get(name)?;
            let told = asked.told.clone()?;
            Some(match told {
                Ok(()) => Ok(asked.path()),
                Err(why) => Err(format!("not {}: {why}", asked.path())),
            })
        })
    }
}

impl FrontendManager {
    /// Sets the number that a volume's section asks for, if any. Called before the volume has its
    /// device.
    pub fn ask_number(&self, name: &str, number: Option<usize>) {
        self.numbers.with(|all| match (number, all.get(name)) {
            (None, _) => drop(all.remove(name)),
            (Some(number), Some(asked)) if asked.number == number => {}
            (Some(number), _) => drop(all.insert(name.to_owned(), NumberedLink { number, told: None })),
        });
    }

    /// Removes links that cannot exist any more, and makes those that now can.
    pub fn look_after_numbers(&self, exports: &ExportTable) {
        let names: Vec<_> = self.numbers.with(|all| all.keys().cloned().collect());
        for name in names {
            let path = {
                let running = self.lock();
                running.claims.contains_key(&name).then(|| running.device_path(&name)).flatten()
            };
            match path.zip(exports.by_name(&name)) {
                Some((path, export)) => self.numbers.keep(&name, export.uuid, &path),
                None => self.numbers.with(|all| {
                    all.entry(name).and_modify(|asked| asked.told = None);
                }),
            }
        }
    }
}
