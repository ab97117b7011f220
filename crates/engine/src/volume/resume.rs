//! Moves the volumes of a failed set to a new handle on the same set, opened once the device
//! answers again.
//!
//! A failed handle stays failed: it is unknown which of its writes have reached the device. So the
//! server of the volumes stops it as far as possible and drops every handle. Then it opens the set
//! again as after a crash, and adds the devices of the volumes under their former numbers. A volume
//! whose data is all on its backing device leaves the cache before that, and need not wait.

use crate::error::{Error, ErrorContext};
use crate::request::{flush, without_cache};
use crate::set::CacheSet;
use crate::volume::VolumeId;
use alloc::rc::Rc;
use bcached_env::sync::Notify;
use bcached_env::{DiskId, IoErrorKind};
use bcached_format::BackingState;

impl Error {
    /// Returns true if the cause of a set's failure may pass, and opening the set again then loses
    /// nothing that was acknowledged.
    ///
    /// False after a failed flush of the cache device (invariant D39): data that was acknowledged
    /// and not flushed may be gone. A reopened set has forgotten it, which a client that has read
    /// it must not see. False also if the metadata is inconsistent, or the device has become
    /// shorter, which the driver never forgets.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Failed(first) => first.may_pass(),
            Self::Io { doing, source } => {
                *doing != ErrorContext::CacheFlush && !matches!(source.kind, IoErrorKind::Shrunk { .. })
            }
            _ => false,
        }
    }

    /// Returns true if a caller that meets this error may wait: it may pass, or another device may
    /// replace one that is gone or was cut short.
    #[must_use]
    pub fn may_be_awaited(&self) -> bool {
        self.may_pass() || self.is_absence()
    }
}

impl CacheSet {
    /// The error because of which nothing is written any more, if any.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.with(|s| s.failed.clone())
    }

    /// Rings `bell` from now on whenever [`CacheSet::failure`] may have changed. A waiter need not
    /// hold the set. Only the first bell counts.
    pub fn rings(&self, bell: Rc<Notify>) {
        let _first = self.signals().outside.set(bell);
    }

    /// Identifies this start of the set: [`bcached_format::CacheSuperblock::session`] of its
    /// superblock.
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

    /// Makes a volume of a failed set independent of it, durably, if all of its data is on its
    /// backing device.
    ///
    /// # Errors
    /// Its superblock cannot be written; the volume is unchanged.
    pub async fn leave_failed(&self, id: VolumeId) -> Result<(), Error> {
        let Some(inode) = self.with(|s| s.volumes.get(id)?.inode) else { return Ok(()) };
        if self.disk_of(id).is_none() || self.failure().is_none() {
            return Ok(());
        }
        // Its device is not exchanged meanwhile.
        self.with(|s| s.begin_background(id));
        let left =
            without_cache::depart(self, id, inode, |superblock| superblock.set_state(BackingState::Stale))
                .await;
        self.let_go(id);
        left.map(drop)
    }

    /// Flushes the backing device of a volume.
    ///
    /// # Errors
    /// This flush has failed, or an earlier one that no client has been told of: acknowledged data
    /// may be lost.
    pub async fn flush_backing_of(&self, id: VolumeId) -> Result<(), Error> {
        let Some(target) = self.target(id) else { return Ok(()) };
        // Its device is not exchanged meanwhile.
        self.with(|s| s.begin_background(id));
        let flushed = flush::last_flush(self, &target).await;
        self.let_go(id);
        flushed
    }

    /// Like [`CacheSet::add_backing`], under a number that no volume of this set has.
    pub async fn add_backing_as(&self, id: VolumeId, disk: DiskId) -> Result<(), Error> {
        self.add(disk, None, false, Some(id)).await.map(drop)
    }

    /// Like [`CacheSet::add_uncached`], under a number that no volume of this set has.
    pub async fn add_uncached_as(&self, id: VolumeId, disk: DiskId) -> Result<(), Error> {
        self.add_past(disk, Some(id)).await.map(drop)
    }

    /// The number of the next volume that does not ask for one. Lower numbers belong to present or
    /// former volumes. A reopened set continues from it, so that a caller with a former number
    /// never meets another volume under it.
    #[must_use]
    pub fn next_number(&self) -> VolumeId {
        self.with(|s| s.volumes.next())
    }

    /// Reserves the numbers below `next` for volumes that ask for one of them.
    pub fn number_from(&self, next: VolumeId) {
        self.with(|s| s.volumes.number_from(next));
    }

    /// Returns true if no other handle exists: dropping this one releases the set's memory and its
    /// note.
    #[must_use]
    pub fn is_last_handle(&self) -> bool {
        Rc::strong_count(&self.inner) == 1
    }
}
