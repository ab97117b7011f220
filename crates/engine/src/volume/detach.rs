//! Detaches a volume while it is served: first it is served through the cache, and then without it.
//!
//! The order:
//!
//! 1. All dirty data is written back. Meanwhile nothing new enters the cache, so that this ends
//!    however much is written.
//! 2. When nothing is dirty, durably, the superblock says *none*. By then no dirty key can be
//!    created any more, and no request is served without the cache before *none* is durable.
//! 3. The UUID table forgets the volume.
//!
//! After a crash between steps 2 and 3, the next start gives the volume a new inode, because its
//! superblock says *none*. So at every moment the volume is attached with all of its dirty data, or
//! detached with all of its data on its backing device.
//!
//! Its inode is not reused by this process, nor while any keys remain under it. What the cache
//! still holds under it is clean and is dropped as usual: by eviction, and by GC passes.

use crate::error::Error;
use crate::journal::writer;
use crate::request::{Target, without_cache};
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::{Lifecycle, VolumeId, record};
use crate::writeback::urgent::{self, CancelToken};
use bcached_format::{BackingState, BackingSuperblock, Inode, Uuid};

impl CacheSet {
    /// Detaches a volume from the cache: writes all dirty data back, whatever the write-back
    /// options say, and continues to serve the volume without the cache. *None* is durable on its
    /// superblock when this returns. The caller must await the end of this; it always ends.
    ///
    /// # Errors
    /// The backing device refuses data, the work is cancelled, the set is being stopped or fails,
    /// or the volume is not attached. Then the volume is attached as before, and nothing is lost.
    pub async fn detach(&self, id: VolumeId, cancel: &CancelToken) -> Result<(), Error> {
        let target = self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Waiting))?;
        let detached = match target.inode {
            Some(inode) => self.take_out(&target, inode, cancel).await,
            None => Err(Error::NotAttached),
        };
        self.with(|s| s.end_lifecycle_change(id));
        self.signals().ranges.notify_all();
        self.signals().writeback_work.notify_all();
        detached
    }

    async fn take_out(&self, target: &Target, inode: Inode, cancel: &CancelToken) -> Result<(), Error> {
        // The longest part, if the set was opened just now; requests use the cache meanwhile.
        urgent::walked(self, cancel).await?;
        self.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.lifecycle = Lifecycle::Detaching));
        self.leave_clean(target, inode, cancel).await?;
        self.is_not_ours(target.id, inode).await
    }

    /// Ends the ownership of a volume that is served without the cache: first on its superblock,
    /// durably, and then in the UUID table.
    pub(super) async fn is_not_ours(&self, id: VolumeId, inode: Inode) -> Result<(), Error> {
        // *None* is durable before the table forgets the volume: invariant D16. `depart` has
        // written it, unless the volume had left for another reason: then the superblock still
        // says that.
        record::update(self, id, |_, superblock| say_none(superblock)).await?;
        let seconds = self.env().wall_seconds();
        self.with(|s| {
            if let Some(volume) = s.volumes.get_mut(id) {
                volume.is_rid_of_dirty();
                volume.marking_trouble = None;
            }
            s.uuids.give_up(inode, seconds);
        });
        // The superblock is authoritative, whatever the table says. If the table cannot be stored,
        // the set has failed.
        let _ = uuids::store(self).await;
        Ok(())
    }

    /// Writes back until nothing is dirty, and then leaves the cache. Holds the volume's write-back
    /// lock meanwhile.
    async fn leave_clean(&self, target: &Target, inode: Inode, cancel: &CancelToken) -> Result<(), Error> {
        urgent::write_back(self, target, cancel, async || {
            if self.with(|s| !s.is_clean(inode)) {
                return Ok(false);
            }
            // The clean keys become durable before the superblock says *none*: invariant D16.
            writer::commit(self).await?;
            without_cache::depart(self, target.id, inode, say_none).await
        })
        .await
    }
}

pub(super) fn say_none(superblock: &mut BackingSuperblock) {
    superblock.set_state(BackingState::None);
    superblock.set_set_uuid(Uuid::NIL);
    superblock.set_attachment(None);
}

impl State {
    /// Begins a change of a volume. Refused if another change is under way or the volume is already
    /// in the state that the change leads to, or if the volume is flash-only and the change would
    /// detach or attach it. The set does not stop before the change has ended.
    pub(super) fn begin_lifecycle_change(
        &mut self,
        id: VolumeId,
        lifecycle: Lifecycle,
    ) -> Result<Target, Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        let volume = self.volumes.get_mut(id).ok_or(Error::NoVolume)?;
        match (lifecycle, volume.inode) {
            (Lifecycle::Waiting | Lifecycle::Attaching, _) if volume.backing.is_none() => {
                return Err(Error::FlashOnly);
            }
            _ if volume.lifecycle != Lifecycle::Steady => return Err(Error::VolumeBusy),
            (Lifecycle::Waiting, None) => return Err(Error::NotAttached),
            (Lifecycle::Attaching, Some(_)) => return Err(Error::Attached),
            _ => {}
        }
        volume.lifecycle = lifecycle;
        self.background += 1;
        Ok(Target::of(id, volume, self.geometry.block_sectors))
    }

    /// Ends a change of a volume, successful or not.
    pub(super) fn end_lifecycle_change(&mut self, id: VolumeId) {
        self.background -= 1;
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.lifecycle = Lifecycle::Steady;
        }
    }
}
