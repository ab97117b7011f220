//! Serving a volume no more, while the set goes on: its dirty data stays in the cache, and its device can be given to somebody else,
//! or added again.
//!
//! From the first step on no request begins. Those in flight end, then whoever works on the volume beside them, and a flush makes
//! durable whatever was acknowledged; then the superblock says *clean* if nothing is dirty. At every moment a crash leaves what it
//! leaves of a volume that is served.

use crate::error::Error;
use crate::journal::writer;
use crate::request::{Target, flush, parked};
use crate::set::{CacheSet, Duty};
use crate::state::State;
use crate::volume::{Course, VolumeId};
use crate::writeback::task;
use bcached_env::{Disk, DiskId};

/// A volume that is served no more.
#[derive(Clone, Debug, PartialEq)]
pub struct Removed {
    /// What was under it, if anything was. The set uses it no more.
    pub disk: Option<DiskId>,
    /// Something that was acknowledged, and not flushed by who wrote it, may not be durable.
    pub lost: Option<Error>,
}

impl CacheSet {
    /// Serves a volume no more; all that was acknowledged of it is durable when this returns. New requests are refused from the
    /// first moment on; those in flight end as they would have ended, and may take as long as their devices let them.
    ///
    /// # Errors
    /// If there is no such volume, if it is on its way to or from the cache, or if the set is being stopped: then nothing has
    /// changed.
    pub async fn remove_volume(&self, id: VolumeId) -> Result<Removed, Error> {
        let target = self.with(|s| s.begin_course(id, Course::Leaving))?;
        self.quiet(id).await;
        let lost = self.flush_before_leaving(&target).await.err();
        // What that flush has made durable enters the tree.
        self.idle(id).await;
        // It stays *dirty* if it cannot be marked: that costs nothing but the freedom to go without the cache.
        let _ = task::mark_clean(self, id).await;
        self.with(|s| {
            parked::drop_all(s, id);
            s.volumes.remove(id);
            s.background -= 1;
        });
        self.signals().ranges.notify_all();
        Ok(Removed { disk: target.backing.as_ref().map(Disk::id), lost })
    }

    /// As a flush that a client asks for, and as the last one of a stop: a failure that no client has been told of is told.
    async fn flush_before_leaving(&self, target: &Target) -> Result<(), Error> {
        let committed = if target.inode.is_some() { writer::commit(self).await } else { Ok(()) };
        committed.and(flush::last_flush(self, target).await)
    }

    /// Of a volume that leaves: until its requests have ended, and then its workers.
    pub(super) async fn quiet(&self, id: VolumeId) {
        // Its workers go on until then: a request may wait for room that write-back makes.
        while self.with(|s| s.volumes.get(id).is_some_and(|volume| volume.requests > 0)) {
            self.signals().ranges.wait().await;
        }
        self.signals().writeback_work.notify_all();
        self.signals().parked_work.notify_all();
        self.idle(id).await;
    }

    /// Until none of the set's tasks works on the volume any more.
    async fn idle(&self, id: VolumeId) {
        let is_busy = |s: &mut State| s.volumes.get(id).is_some_and(|volume| volume.hands > 0);
        while self.with(is_busy) {
            self.signals().ranges.wait().await;
        }
    }

    /// Starts a task of a volume, which ends when the set does or the volume leaves.
    pub(super) fn spawn_worker<F: Future<Output = ()> + 'static>(
        &self,
        id: VolumeId,
        worker: impl FnOnce(Self, VolumeId) -> F + 'static,
    ) {
        self.with(|s| s.lend_hand(id));
        self.spawn(Duty::Changing, move |set| async move {
            worker(set.clone(), id).await;
            set.with(|s| s.take_hand_back(id));
            set.signals().ranges.notify_all();
        });
    }

    /// True when the workers of a volume end.
    pub(crate) fn is_over(&self, id: VolumeId) -> bool {
        let is_leaving = |s: &mut State| {
            s.volumes.get(id).is_none_or(|volume| volume.course == Course::Leaving && volume.requests == 0)
        };
        self.is_ending() || self.with(is_leaving)
    }

    /// Whoever asked for something is through with it; see [`State::hold`].
    pub(crate) fn let_go(&self, id: VolumeId) {
        self.with(|s| s.end_background(id));
        self.signals().ranges.notify_all();
    }
}

impl State {
    /// Somebody works on the volume in the background: neither does it leave nor the set stop before the end of that.
    pub(crate) fn begin_background(&mut self, id: VolumeId) {
        self.background += 1;
        self.lend_hand(id);
    }

    /// The end of that. The caller rings `ranges`.
    pub(crate) fn end_background(&mut self, id: VolumeId) {
        self.background -= 1;
        self.take_hand_back(id);
    }

    /// Somebody asks for something that takes long: as [`State::begin_background`], unless the volume leaves or the set stops.
    pub(crate) fn hold(&mut self, id: VolumeId) -> Result<Target, Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        let volume = self.volumes.get(id).filter(|volume| volume.course != Course::Leaving);
        let target = Target::of(id, volume.ok_or(Error::NoVolume)?, self.geometry.block_sectors);
        self.begin_background(id);
        Ok(target)
    }

    fn lend_hand(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.hands += 1;
        }
    }

    fn take_hand_back(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.hands -= 1;
        }
    }
}
