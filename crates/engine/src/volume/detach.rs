//! Detaching a volume that is served: it goes on being served, at first through the cache and then without it.
//!
//! The order: while everything dirty is written back nothing new enters the cache, so that this comes to an
//! end however much is written. When nothing is dirty, and durably so, the superblock says *none*; no dirty key can be made
//! any more by then, and nothing goes past the cache before that is durable. The table forgets the volume last. Whoever
//! starts after a crash in between gives the volume a new number, because its superblock says *none*. So a volume is
//! attached with all that is dirty, or detached with all of it on its backing device, at every moment.
//!
//! Its number is not used again by this process, nor while anything is left of it. What the cache still holds under it is
//! clean and goes as it would have gone: by eviction, and by the passes of GC.

use crate::error::Error;
use crate::journal::writer;
use crate::request::{Target, uncached};
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::{Course, VolumeId, record};
use crate::writeback::urgent::{self, Cancel};
use bcached_format::{BackingState, BackingSuperblock, Inode, Uuid};

impl CacheSet {
    /// Takes a volume from the cache: writes everything dirty back, whatever the options of write-back say, and goes on
    /// serving it without the cache. *None* is durable on its superblock when this returns.
    ///
    /// After an error the volume is attached as before, and nothing is lost: if its backing device takes no data, if it is
    /// cancelled, if the set is being stopped or fails, or if there is nothing to detach. Like all that the engine does, this is to be
    /// waited for to its end; it ends by itself.
    pub async fn detach(&self, id: VolumeId, cancel: &Cancel) -> Result<(), Error> {
        let target = self.with(|s| s.begin_course(id, Course::Waiting))?;
        let detached = match target.inode {
            Some(inode) => self.take_out(&target, inode, cancel).await,
            None => Err(Error::NotAttached),
        };
        self.with(|s| s.end_course(id));
        self.signals().ranges.notify_all();
        self.signals().writeback_work.notify_all();
        detached
    }

    async fn take_out(&self, target: &Target, inode: Inode, cancel: &Cancel) -> Result<(), Error> {
        // The longest part of it, if the set was opened just now; requests use the cache meanwhile.
        urgent::walked(self, cancel).await?;
        self.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.course = Course::Detaching));
        self.leave_clean(target, inode, cancel).await?;
        self.is_not_ours(target.id, inode).await
    }

    /// A volume that goes without the cache is nobody's: its superblock says so, durably, and then the table.
    pub(super) async fn is_not_ours(&self, id: VolumeId, inode: Inode) -> Result<(), Error> {
        // If it left for another reason meanwhile, that is what its superblock says.
        record::update(self, id, |_, superblock| say_none(superblock)).await?;
        let seconds = self.env().wall_seconds();
        self.with(|s| {
            if let Some(volume) = s.volumes.get_mut(id) {
                volume.is_rid_of_dirty();
                volume.marking_trouble = None;
            }
            s.uuids.give_up(inode, seconds);
        });
        // The superblock has the last word, whatever the table says. If that cannot be stored the set has failed.
        let _ = uuids::store(self).await;
        Ok(())
    }

    /// Writes back until nothing is dirty, and then leaves. Holds the volume's write-back meanwhile.
    async fn leave_clean(&self, target: &Target, inode: Inode, cancel: &Cancel) -> Result<(), Error> {
        urgent::write_back(self, target, cancel, async || {
            if self.with(|s| !s.is_clean(inode)) {
                return Ok(false);
            }
            // The keys that say so are durable before the superblock does.
            writer::commit(self).await?;
            uncached::depart(self, target.id, inode, say_none).await
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
    /// A volume sets out; refused if it is there already or on its way, or if it has no backing device and is to live on without
    /// the cache. Until it has arrived the set does not stop.
    pub(super) fn begin_course(&mut self, id: VolumeId, course: Course) -> Result<Target, Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        let volume = self.volumes.get_mut(id).ok_or(Error::NoVolume)?;
        match (course, volume.inode) {
            (Course::Waiting | Course::Attaching, _) if volume.backing.is_none() => {
                return Err(Error::FlashOnly);
            }
            _ if volume.course != Course::Steady => return Err(Error::OnItsWay),
            (Course::Waiting, None) => return Err(Error::NotAttached),
            (Course::Attaching, Some(_)) => return Err(Error::Attached),
            _ => {}
        }
        volume.course = course;
        self.background += 1;
        Ok(Target::of(id, volume, self.geometry.block_sectors))
    }

    /// It has arrived, or stays where it was.
    pub(super) fn end_course(&mut self, id: VolumeId) {
        self.background -= 1;
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.course = Course::Steady;
        }
    }
}
