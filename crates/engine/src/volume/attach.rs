//! Attaches a volume that is served without the cache, because it was detached or has left.
//!
//! As at a start ([`super::add`]), the UUID table is written first and then the superblock: a
//! superblock that said *clean* about an inode missing from the table would be that of a foreign
//! device. The inode is a new one, so that nothing cached before is ever used again.
//!
//! Requests in flight may not know the inode, and write past the cache without invalidating cached
//! data. So nothing enters the cache under it before they have ended. Until then misses are not
//! filled, and writes bypass the cache, including those of requests that know the inode. Cancelling
//! in that time takes the volume out again the usual way (`depart`), because nothing of it is
//! cached.

use crate::error::Error;
use crate::request::without_cache;
use crate::set::CacheSet;
use crate::volume::detach::say_none;
use crate::volume::{Lifecycle, VolumeId, attachment_record, record};
use crate::writeback::urgent::CancelToken;
use bcached_format::{BackingState, BackingSuperblock, Inode};

impl CacheSet {
    /// Serves a volume through the cache again. *Clean* is durable on its superblock when this
    /// returns. The caller must await the end of this.
    ///
    /// # Errors
    /// After an error, also if cancelled, the volume is served without the cache as before.
    pub async fn attach(&self, id: VolumeId, cancel: &CancelToken) -> Result<(), Error> {
        self.check_alive()?;
        let superblock = self.with(|s| {
            s.begin_lifecycle_change(id, Lifecycle::Attaching)?;
            let backing = s.volumes.get(id).and_then(|volume| volume.backing.as_ref());
            Ok::<_, Error>(backing.ok_or(Error::NoVolume)?.superblock.clone())
        })?;
        let attached = self.take_in(id, &superblock, cancel).await;
        self.with(|s| s.end_lifecycle_change(id));
        self.signals().ranges.notify_all();
        // The write-back task starts counting what it needs.
        self.signals().writeback_work.notify_all();
        attached
    }

    async fn take_in(
        &self,
        id: VolumeId,
        superblock: &BackingSuperblock,
        cancel: &CancelToken,
    ) -> Result<(), Error> {
        let (known, set_uuid) = self.with(|s| (s.uuids.find(superblock.uuid()), s.superblock.set_uuid()));
        let inode = self.take_slot(superblock, known, true, cancel).await?;
        // The table has the new inode durably before the superblock names it: invariant D17.
        record::update(self, id, |s, superblock| {
            superblock.set_set_uuid(set_uuid);
            superblock.set_state(BackingState::Clean);
            superblock.set_attachment(attachment_record::of(s, inode));
        })
        .await?;
        self.forget_former_stamp(inode).await?;
        self.use_number(id, inode);
        // Until earlier requests have ended, nothing enters the cache under the new inode:
        // invariant D17.
        let entered = self.earlier_have_ended(id, cancel).await;
        if entered != Err(Error::Cancelled) {
            return entered;
        }
        // Nothing of the volume has entered the cache.
        if let Ok(true) = without_cache::depart(self, id, inode, say_none).await {
            self.is_not_ours(id, inode).await?;
            return entered;
        }
        // The superblock says that the volume is attached, and cannot be written.
        self.earlier_have_ended(id, &CancelToken::default()).await
    }

    /// Makes new requests use the inode.
    fn use_number(&self, id: VolumeId, inode: Inode) {
        self.with(|s| {
            let Some(volume) = s.volumes.get_mut(id) else { return };
            volume.inode = Some(inode);
            s.uuids.comes_to_life(inode);
            volume.attachment += 1;
            volume.earlier_requests = volume.requests;
            volume.writeback_from = volume.data_offset;
        });
    }
}
