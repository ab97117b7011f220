//! The files are read again: by a reload, and by whoever keeps something in `99-set.toml` by which the daemon has other caches or volumes than
//! before. Either way what was read is taken over whole, so that all that runs is from one reading. What has to wait for the next start stays as it is.

use crate::supervisor::Supervisor;
use crate::supervisor::options::{Done, check_with};
use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::{Certificates, Config, SetFile, Tls};
use bcached_control::failure::Failure;
use bcached_front_nbd as nbd;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Table {
    /// Takes over what is new in `config`; the names of what is not in it any more.
    pub fn adopt(&mut self, config: &Config) -> BTreeSet<String> {
        let mut gone = BTreeSet::new();
        for cache in &config.caches {
            match self.caches.iter_mut().find(|entry| entry.name == cache.name && entry.is_real()) {
                None => self.caches.push(CacheEntry::of(cache)),
                Some(entry) => entry.options.configured.clone_from(&cache.options),
            }
        }
        for (_, cache) in self.lasting_caches() {
            if !config.caches.iter().any(|configured| configured.name == cache.name) {
                gone.extend(cache.name.clone());
            }
        }
        for volume in &config.volumes {
            match self.volumes.iter().position(|entry| entry.name == volume.name) {
                None => {
                    let number = self.number_of(volume, None, config);
                    self.volumes.push(VolumeEntry::numbered(volume, number));
                }
                Some(place) if self.volumes[place].is_removed() => {
                    let number = self.number_of(volume, Some(self.volumes[place].number), config);
                    let entry = &mut self.volumes[place];
                    // What was said until the daemon stops holds when it comes back; another device is another volume.
                    let is_back = entry.backing.as_ref() == Some(&volume.backing);
                    let said = std::mem::take(&mut entry.options.runtime);
                    *entry = VolumeEntry::numbered(volume, number);
                    entry.options.runtime = Some(said).filter(|_| is_back).unwrap_or_default();
                }
                // A section is of a device: it is not of what has its name and lives in a cache alone.
                Some(place) if self.volumes[place].is_flash_only() => {}
                Some(place) => self.volumes[place].options.configured = volume.options.clone(),
            }
        }
        let stays = |volume: &&VolumeEntry| volume.backing.is_some() && !volume.is_leaving();
        for volume in self.volumes.iter().filter(stays) {
            if !config.volumes.iter().any(|configured| configured.name == volume.name) {
                gone.extend(volume.name.clone());
            }
        }
        gone
    }
}

impl Supervisor {
    /// Reads the configuration again. One that cannot be applied changes nothing.
    pub fn reload(&mut self) {
        if self.strict {
            tracing::info!(event = "reload-nothing", "there is no configuration to read again");
            return;
        }
        let read = self.read_with(None).and_then(|config| Ok((self.read_certificates(&config)?, config)));
        match read {
            Err(failure) => tracing::error!(event = "reload-refused", "{failure}"),
            Ok((certificates, config)) => {
                warn_of(&config);
                self.take_over(config);
                if let Some((certificates, tls)) = certificates {
                    self.renew(certificates, tls);
                }
                tracing::info!(event = "reloaded", "the configuration was read again");
            }
        }
    }

    /// Whether there is TLS at all stays as it is until the next start.
    pub fn read_certificates(&self, files: &Config) -> Result<Option<(Certificates, nbd::Tls)>, Failure> {
        let Some(certificates) = files.places.tls.certificates() else { return Ok(None) };
        let tls = certificates.read()?;
        Ok(self.config.places.tls.certificates().map(|_| (certificates.clone(), tls)))
    }

    fn renew(&mut self, certificates: Certificates, tls: nbd::Tls) {
        self.fronts.renew(tls);
        let mut config = (*self.config).clone();
        config.places.tls = Tls::With(certificates);
        self.set_config(config);
    }

    /// What the files say, with `file` as it is to be. It fits what was said to the running daemon.
    pub fn read_with(&self, file: Option<&SetFile>) -> Result<Config, Failure> {
        let text = file.map(SetFile::text);
        let config = Config::load_with(&self.line, text.as_deref())?;
        check_with(&config, &self.shared().table)?;
        Ok(config)
    }

    /// New caches and volumes are served, changed options take effect. What is no longer configured stays until the next start, and so does
    /// what cannot be changed before that: the log says so of each.
    pub fn take_over(&mut self, config: Config) {
        for told in self.not_reloaded(&config) {
            tracing::warn!(event = "reload-kept", "{told}");
        }
        let gone = self.shared().table.adopt(&config);
        for name in gone {
            tracing::warn!(event = "reload-kept", "{name} is served until the next start");
        }
        self.shared().stop_timeout = config.stop_timeout;
        self.set_config(self.within_what_runs(config));
        self.name_exports();
        self.apply_all();
    }

    /// What the files say, but for what only a start can change.
    fn within_what_runs(&self, files: Config) -> Config {
        let Config { control, memory_bytes, memory_is_said, places, ways, metrics, .. } =
            (*self.config).clone();
        Config { control, memory_bytes, memory_is_said, places, ways, metrics, ..files }
    }

    /// What this process goes on with if nobody takes over from it: what was set and added since the start stands in the files. If they
    /// cannot be read now it is what it read last.
    pub fn config_to_go_on_with(&self) -> Config {
        match self.read_with(None) {
            Ok(files) => self.within_what_runs(files),
            Err(failure) => {
                tracing::warn!(event = "reload-refused", "{failure}");
                (*self.config).clone()
            }
        }
    }

    pub fn set_config(&mut self, config: Config) {
        self.config = Arc::new(config);
        self.shared().config = Arc::clone(&self.config);
    }

    /// What the files say of options takes effect.
    fn apply_all(&self) {
        self.apply_options();
        let (volumes, caches) = {
            let shared = self.shared();
            (shared.table.volumes.len(), shared.table.caches.len())
        };
        for index in 0..volumes {
            self.apply_cache_mode(index, Done::nobody());
        }
        for index in 0..caches {
            self.apply_settings(index, Done::nobody());
        }
    }
}

/// The log is told what a person should know of a configuration that is right.
pub fn warn_of(config: &Config) {
    for (event, sentence) in config.warnings() {
        tracing::warn!(event, "{sentence}");
    }
}
