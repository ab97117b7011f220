//! Attaching a volume that is served without the cache, because it was detached or has left.
//!
//! As at a start ([`super::attach`]) the table comes first and then the superblock, which says whose it is: a superblock
//! that said *clean* of a number that is not in the table would be that of a stranger. The number is a new one, so that
//! nothing that the cache holds from before is ever believed.
//!
//! Requests may be in flight that do not know the number, and write past the cache without making void what is there. So
//! nothing enters the cache under it before they have ended: until then misses are not filled, and writes go past it,
//! also those of requests that do know it. Who gives it up in that time takes the volume out again by the one door: nothing of it is there.

use crate::error::Error;
use crate::request::uncached;
use crate::set::CacheSet;
use crate::volume::detach::say_none;
use crate::volume::{Course, VolumeId, attachment, record};
use crate::writeback::urgent::Cancel;
use bcached_format::{BackingState, BackingSuperblock, Inode};

impl CacheSet {
    /// Serves a volume through the cache again. *Clean* is durable on its superblock when this returns.
    ///
    /// After an error, or if it is cancelled, it is served without the cache as before. To be waited for to its end.
    pub async fn attach(&self, id: VolumeId, cancel: &Cancel) -> Result<(), Error> {
        self.check_alive()?;
        let superblock = self.with(|s| {
            s.begin_course(id, Course::Attaching)?;
            let backing = s.volumes.get(id).and_then(|volume| volume.backing.as_ref());
            Ok::<_, Error>(backing.ok_or(Error::NoVolume)?.superblock.clone())
        })?;
        let attached = self.take_in(id, &superblock, cancel).await;
        self.with(|s| s.end_course(id));
        self.signals().ranges.notify_all();
        // It counts what it needs to.
        self.signals().writeback_work.notify_all();
        attached
    }

    async fn take_in(
        &self,
        id: VolumeId,
        superblock: &BackingSuperblock,
        cancel: &Cancel,
    ) -> Result<(), Error> {
        let (known, set_uuid) = self.with(|s| (s.uuids.find(superblock.uuid()), s.superblock.set_uuid()));
        let inode = self.take_slot(superblock, known, true, cancel).await?;
        record::update(self, id, |s, superblock| {
            superblock.set_set_uuid(set_uuid);
            superblock.set_state(BackingState::Clean);
            superblock.set_attachment(attachment::of(s, inode));
        })
        .await?;
        self.forget_former_stamp(inode).await?;
        self.use_number(id, inode);
        let entered = self.earlier_have_ended(id, cancel).await;
        if entered != Err(Error::Cancelled) {
            return entered;
        }
        // Nothing of it has entered the cache.
        if let Ok(true) = uncached::depart(self, id, inode, say_none).await {
            self.is_not_ours(id, inode).await?;
            return entered;
        }
        // Its superblock cannot be written, which says that it is here.
        self.earlier_have_ended(id, &Cancel::default()).await
    }

    /// From now on requests know the number.
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
