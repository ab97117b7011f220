//! What the superblock of the cache keeps of the options, as the kernel does: whether freed buckets are discarded, and which clean
//! bucket is given up first. Both can be changed while the set runs, in the superblock or until the set is opened anew.
//!
//! A change of them is no new session ([`bcached_format::CacheSuperblock::session`]): whoever is killed meanwhile finds
//! what it has noted, whichever of the two superblocks has reached the device.

use crate::btree::write;
use crate::cache_writes::Cause;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::record;
use bcached_format::Replacement;

/// What is to stand in the superblock; `None`: what stands there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Buckets are discarded when they hold nothing any more.
    pub discard: Option<bool>,
    /// Which clean bucket is given up first.
    pub replacement: Option<Replacement>,
}

impl Settings {
    /// The same, and what `before` says where this says nothing.
    #[must_use]
    pub fn or(self, before: Self) -> Self {
        Self {
            discard: self.discard.or(before.discard),
            replacement: self.replacement.or(before.replacement),
        }
    }
}

impl State {
    /// The policy in force: what was said, or else what the superblock says.
    #[must_use]
    pub fn replacement(&self) -> Replacement {
        self.options.replacement.unwrap_or(self.superblock.replacement())
    }
}

impl CacheSet {
    /// Writes `settings` into the superblock of the cache; durable when this returns. In force is what the options say, where they say
    /// anything.
    ///
    /// # Errors
    /// The set has failed, or does because the superblock cannot be written: what stands there then is the former or the new one.
    pub async fn keep_settings(&self, settings: Settings) -> Result<(), Error> {
        self.with(State::begin_work)?;
        let kept = self.write_settings(settings).await;
        self.end_work();
        kept
    }

    async fn write_settings(&self, settings: Settings) -> Result<(), Error> {
        // One writer of it at a time; whoever starts a set is alone.
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
        self.count_written(Cause::Superblock, record::placed_bytes(self.cache()));
        let placed = record::place_superblock(self.cache(), &changed.seal()).await;
        placed.map_err(|error| self.fail(error))?;
        write::flush_cache(self).await?;
        self.with(|s| s.superblock = changed);
        self.settings_change();
        Ok(())
    }

    /// What is in force may be something else from now on.
    pub(crate) fn settings_change(&self) {
        let seed = self.env().random();
        self.with(|s| s.buckets.set_replacement(s.replacement(), seed));
        self.signals().discard_work.notify_all();
    }
}
