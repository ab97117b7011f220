//! Serving the volumes of a set that has failed by another handle on the same set, which is opened once the device answers again.
//!
//! What failed stays failed: nobody can tell which of its writes have landed. So whoever serves the volumes stops it, as far as it
//! can be stopped, lets go of every handle, opens the set again as after a crash, and gives it the devices of the volumes under the
//! numbers that they had. A volume whose data is all on its backing device leaves the cache before that, and need not wait.

use crate::error::{Doing, Error};
use crate::request::{flush, uncached};
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::rc::Rc;
use bcached_env::sync::Notify;
use bcached_env::{DiskId, IoErrorKind};
use bcached_format::BackingState;

impl Error {
    /// Why a set failed may pass, and then opening it again loses nothing that was acknowledged.
    ///
    /// Not after a failed flush of the cache device: what was acknowledged and not flushed may be gone, so that a set that is opened
    /// again has forgotten it, which nobody may see who has read it before. Nor if the metadata contradict each other, or the device
    /// has become shorter, which the driver never forgets.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Failed(first) => first.may_pass(),
            Self::Io { doing, source } => {
                *doing != Doing::CacheFlush && !matches!(source.kind, IoErrorKind::Shrunk { .. })
            }
            _ => false,
        }
    }

    /// Whoever met it may wait: it may pass, or another device may take the place of the one that is gone or was cut short.
    #[must_use]
    pub fn may_be_awaited(&self) -> bool {
        self.may_pass() || self.is_absence()
    }
}

impl CacheSet {
    /// Why nothing is written any more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.with(|s| s.failed.clone())
    }

    /// From now on `bell` rings whenever [`CacheSet::failure`] may say something new; who waits for it need not keep the set. The first
    /// bell counts.
    pub fn rings(&self, bell: Rc<Notify>) {
        let _first = self.signals().outside.set(bell);
    }

    /// What tells this start of the set from all others: [`bcached_format::CacheSuperblock::session`] of what its superblock says.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.with(|s| s.superblock.session())
    }

    /// The backing device of a volume; `None`: it has none, or there is no such volume.
    #[must_use]
    pub fn disk_of(&self, id: VolumeId) -> Option<DiskId> {
        self.with(|s| Some(s.volumes.get(id)?.backing.as_ref()?.disk.id()))
    }

    /// Block size of the set, in sectors.
    #[must_use]
    pub fn block_sectors(&self) -> u64 {
        self.with(|s| s.geometry.block_sectors)
    }

    /// A volume of a set that has failed goes on without it from now on, durably, if all of its data is on its backing device.
    ///
    /// # Errors
    /// Its superblock cannot be written; it is where it was.
    pub async fn leave_failed(&self, id: VolumeId) -> Result<(), Error> {
        let Some(inode) = self.with(|s| s.volumes.get(id)?.inode) else { return Ok(()) };
        if self.disk_of(id).is_none() || self.failure().is_none() {
            return Ok(());
        }
        // Its device is not exchanged meanwhile.
        self.with(|s| s.begin_background(id));
        let left =
            uncached::depart(self, id, inode, |superblock| superblock.set_state(BackingState::Stale)).await;
        self.let_go(id);
        left.map(drop)
    }

    /// Makes durable what is on the backing device of a volume.
    ///
    /// # Errors
    /// That, or a flush before of which no client has been told, has failed: what was acknowledged may be lost.
    pub async fn flush_backing_of(&self, id: VolumeId) -> Result<(), Error> {
        let Some(target) = self.target(id) else { return Ok(()) };
        // Its device is not exchanged meanwhile.
        self.with(|s| s.begin_background(id));
        let flushed = flush::last_flush(self, &target).await;
        self.let_go(id);
        flushed
    }

    /// As [`CacheSet::add_backing`], under a number that no volume of this set has.
    pub async fn add_backing_as(&self, id: VolumeId, disk: DiskId) -> Result<(), Error> {
        self.add(disk, None, false, Some(id)).await.map(drop)
    }

    /// As [`CacheSet::add_uncached`], under a number that no volume of this set has.
    pub async fn add_uncached_as(&self, id: VolumeId, disk: DiskId) -> Result<(), Error> {
        self.add_past(disk, Some(id)).await.map(drop)
    }

    /// The number of the next volume that asks for none: those below are of volumes that are there, or were. A set that is opened again
    /// goes on from it: who still knows such a number must not meet another volume under it.
    #[must_use]
    pub fn next_number(&self) -> VolumeId {
        self.with(|s| s.volumes.next())
    }

    /// Numbers below `next` are kept for who asks for one.
    pub fn number_from(&self, next: VolumeId) {
        self.with(|s| s.volumes.number_from(next));
    }

    /// Nobody else has a handle: dropped, it lets go of its memory and its note.
    #[must_use]
    pub fn is_last_handle(&self) -> bool {
        Rc::strong_count(&self.inner) == 1
    }
}
