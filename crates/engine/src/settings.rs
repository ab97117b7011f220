//! Options stored in the superblock of the cache, as in the kernel: whether free buckets are
//! discarded, and which clean bucket is evicted first. Both can be changed while the set runs,
//! either in the superblock or until the set is reopened.
//!
//! Changing them does not start a new session ([`bcached_format::CacheSuperblock::session`]). If
//! the process is killed during the change, the next start accepts its note, whichever of the two
//! superblocks has reached the device.

use crate::btree::write;
use crate::cache_writes::WriteCause;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::record;
use bcached_format::ReplacementPolicy;

/// Settings to store in the superblock; `None`: keep the stored value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether empty buckets are discarded.
    pub discard: Option<bool>,
    /// Which clean bucket is evicted first.
    pub replacement: Option<ReplacementPolicy>,
}

impl Settings {
    /// Returns these settings, with those of `before` where a value is `None`.
    #[must_use]
    pub fn or(self, before: Self) -> Self {
        Self {
            discard: self.discard.or(before.discard),
            replacement: self.replacement.or(before.replacement),
        }
    }
}

impl State {
    /// The policy in force: that of the options if set, else that of the superblock.
    #[must_use]
    pub fn replacement(&self) -> ReplacementPolicy {
        self.options.replacement.unwrap_or(self.superblock.replacement())
    }
}

impl CacheSet {
    /// Writes `settings` into the superblock of the cache; durable when this returns. Options that
    /// are set override the superblock.
    ///
    /// # Errors
    /// The set has failed, or fails because the superblock cannot be written: then it holds either
    /// the former or the new settings.
    pub async fn keep_settings(&self, settings: Settings) -> Result<(), Error> {
        self.with(State::begin_work)?;
        let kept = self.write_settings(settings).await;
        self.end_work();
        kept
    }

    async fn write_settings(&self, settings: Settings) -> Result<(), Error> {
        // There is one writer of the superblock at a time. A start of the set has it to itself.
        let _alone = self.inner.metadata.acquire(1).await;
        self.check_alive()?;
        let changed = self.with(|s| {
            let mut changed = s.superblock.clone();
            changed.set_discard(settings.discard.unwrap_or(changed.discard()));
            changed.set_replacement(settings.replacement.unwrap_or(changed.replacement()));
            (changed != s.superblock).then_some(changed)
        });
        let Some(changed) = changed else { return Ok(()) };
        let _phase = self.begin(Phase::CacheRecord);
        self.count_written(WriteCause::Superblock, record::placed_bytes(self.cache()));
        let placed = record::place_superblock(self.cache(), &changed.seal()).await;
        placed.map_err(|error| self.fail(error))?;
        write::flush_cache(self).await?;
        self.with(|s| s.superblock = changed);
        self.settings_change();
        Ok(())
    }

    /// Applies the settings in force, which may have changed.
    pub(crate) fn settings_change(&self) {
        let seed = self.env().random();
        self.with(|s| s.buckets.set_replacement(s.replacement(), seed));
        self.signals().discard_work.notify_all();
    }
}
