//! Reads the files again: for a reload, and after a change of `99-set.toml` that adds or removes
//! caches or volumes. Either way the whole configuration is replaced, so that everything in force
//! is from one reading. What only a start can change stays as it is until the next one.

use crate::supervisor::Supervisor;
use crate::supervisor::options::{Completion, check_with};
use crate::supervisor::table::{CacheEntry, Table, VolumeEntry};
use bcached_config::{Certificates, Config, SetFile, Tls};
use bcached_control::failure::Failure;
use bcached_front_nbd as nbd;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Table {
    /// Adopts what is new in `config`. Returns the names of what is no longer in it.
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
                    // Runtime values apply again when the volume comes back. On another device it
                    // is another volume.
                    let is_back = entry.backing.as_ref() == Some(&volume.backing);
                    let said = std::mem::take(&mut entry.options.runtime);
                    *entry = VolumeEntry::numbered(volume, number);
                    entry.options.runtime = Some(said).filter(|_| is_back).unwrap_or_default();
                }
                // A section describes a device, not a flash-only volume that has its name.
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

    /// Reads the certificates. Whether there is TLS at all stays as it is until the next start.
    pub fn read_certificates(
        &self,
        files: &Config,
    ) -> Result<Option<(Certificates, nbd::TlsConfig)>, Failure> {
        let Some(certificates) = files.places.tls.certificates() else { return Ok(None) };
        let tls = certificates.read()?;
        Ok(self.config.places.tls.certificates().map(|_| (certificates.clone(), tls)))
    }

    fn renew(&mut self, certificates: Certificates, tls: nbd::TlsConfig) {
        self.fronts.renew(tls);
        let mut config = (*self.config).clone();
        config.places.tls = Tls::On(certificates);
        self.set_config(config);
    }

    /// Reads the files, with `file` in its new form. Checks that they are consistent with the
    /// runtime values.
    pub fn read_with(&self, file: Option<&SetFile>) -> Result<Config, Failure> {
        let text = file.map(SetFile::text);
        let config = Config::load_with(&self.line, text.as_deref())?;
        check_with(&config, &self.shared().table)?;
        Ok(config)
    }

    /// Serves new caches and volumes, and applies changed options. What is no longer configured
    /// stays until the next start, and so does what cannot be changed before that; each is logged.
    pub fn take_over(&mut self, config: Config) {
        for told in self.not_reloaded(&config) {
            tracing::warn!(event = "reload-kept", "{told}");
        }
        let gone = self.shared().table.adopt(&config);
        for name in gone {
            tracing::warn!(
                event = "reload-kept",
                "{name} is no longer configured, and is served until the next start"
            );
        }
        self.shared().stop_timeout = config.stop_timeout;
        self.set_config(self.within_what_runs(config));
        self.name_exports();
        self.apply_all();
    }

    /// The new files, except for what only a start can change.
    fn within_what_runs(&self, files: Config) -> Config {
        let Config { control, memory_bytes, memory_is_said, places, ways, metrics, .. } =
            (*self.config).clone();
        Config { control, memory_bytes, memory_is_said, places, ways, metrics, ..files }
    }

    /// The configuration for continuing after a failed hand-over. What was set and added since the
    /// start is in the files. If they cannot be read now, the last one read is used.
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

    /// Puts the options of the files into force.
    fn apply_all(&self) {
        self.apply_options();
        let (volumes, caches) = {
            let shared = self.shared();
            (shared.table.volumes.len(), shared.table.caches.len())
        };
        for index in 0..volumes {
            self.apply_cache_mode(index, Completion::nobody());
        }
        for index in 0..caches {
            self.apply_settings(index, Completion::nobody());
        }
    }
}

/// Logs warnings about a valid configuration.
pub fn warn_of(config: &Config) {
    for (event, sentence) in config.warnings() {
        tracing::warn!(event, "{sentence}");
    }
}
