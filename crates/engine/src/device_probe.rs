//! Whether the devices of a set still do what they are for, asked by somebody who has to know before a client finds out.

use crate::error::Error;
use crate::journal::writer;
use crate::request::flush;
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all, join_two};
use bcached_format::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};

impl CacheSet {
    /// Writes a journal entry without keys, when there is room for one: if the cache device takes no writes any more the set fails now, and not
    /// when a client has something written the next time. Nothing is written while a replay needs what room there is.
    ///
    /// # Errors
    /// The set has failed, by then at the latest, or is being stopped.
    pub async fn prove_cache(&self) -> Result<(), Error> {
        // A start that has little room in the journal has trouble of its own, and writes.
        if self.with(|s| s.stopping || s.is_replay_pressed()) {
            return Ok(());
        }
        writer::claim_entry(self).await?.commit().await
    }

    /// Has every device answer: the cache as [`CacheSet::prove_cache`] says, each backing device a flush, if something was written to it since
    /// its last one, and a read. One that hangs keeps whoever waits for this. What a backing device answers is no matter here: clients hear of a
    /// flush that has failed as ever.
    ///
    /// # Errors
    /// As [`CacheSet::prove_cache`].
    pub async fn prove_devices(&self) -> Result<(), Error> {
        let volumes: Vec<VolumeId> = self.volumes().iter().map(|info| info.id).collect();
        let backings = join_all(volumes.into_iter().map(|id| self.prove_backing(id)));
        join_two(self.prove_cache(), backings).await.0
    }

    async fn prove_backing(&self, id: VolumeId) {
        // Its device is not exchanged meanwhile.
        let Ok(target) = self.with(|s| s.hold(id)) else { return };
        if let Some(disk) = &target.backing {
            let _flushed = flush::flush_backing(self, &target).await;
            let _read = disk.read(SUPERBLOCK_SECTOR, Buffer::zeroed(SUPERBLOCK_BYTES)).await;
        }
        self.let_go(id);
    }
}
