//! Probes whether the devices of a set still work, for a caller that must know before a client
//! finds out.

use crate::error::Error;
use crate::journal::writer;
use crate::request::flush;
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all, join_two};
use bcached_format::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};

impl CacheSet {
    /// Writes a journal entry without keys when there is room for one. If the cache device no
    /// longer accepts writes, the set fails now, not at the next write of a client. Writes nothing
    /// while a replay needs the little room there is.
    ///
    /// # Errors
    /// The set has failed, at the latest because of this write, or is being stopped.
    pub async fn prove_cache(&self) -> Result<(), Error> {
        // A start that has little room in the journal has other problems, and writes anyway.
        if self.with(|s| s.stopping || s.is_replay_pressed()) {
            return Ok(());
        }
        writer::claim_entry(self).await?.commit().await
    }

    /// Probes every device. The cache: as [`CacheSet::prove_cache`]. Each backing device: a flush,
    /// if it was written to since its last one, and a read. A device that hangs blocks the caller.
    /// Errors of a backing device are ignored here: clients still learn of a failed flush as usual.
    ///
    /// # Errors
    /// As [`CacheSet::prove_cache`].
    pub async fn prove_devices(&self) -> Result<(), Error> {
        let volumes: Vec<VolumeId> = self.volumes().iter().map(|info| info.id).collect();
        let backings = join_all(volumes.into_iter().map(|id| self.prove_backing(id)));
        join_two(self.prove_cache(), backings).await.0
    }

    async fn prove_backing(&self, id: VolumeId) {
        // Keeps the volume's device from being replaced during the probe.
        let Ok(target) = self.with(|s| s.hold(id)) else { return };
        if let Some(disk) = &target.backing {
            let _flushed = flush::flush_backing(self, &target).await;
            let _read = disk.read(SUPERBLOCK_SECTOR, Buffer::zeroed(SUPERBLOCK_BYTES)).await;
        }
        self.let_go(id);
    }
}
