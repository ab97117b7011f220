//! Removes a volume from a running set: its dirty data stays in the cache, and its device can be
//! used elsewhere, or be added again.
//!
//! From the first step on no request begins. Requests in flight end, then the background users of
//! the volume, and a flush makes durable all that was acknowledged. Then the superblock says
//! *clean* if nothing is dirty. A crash at any moment leaves the same as a crash while the volume
//! is served.

use crate::error::Error;
use crate::journal::writer;
use crate::request::{Target, flush, parked};
use crate::set::{CacheSet, TaskKind};
use crate::state::State;
use crate::volume::{Lifecycle, VolumeId};
use crate::writeback::task;
use bcached_env::{Disk, DiskId};

/// The result of removing a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct RemovedVolume {
    /// Its backing device, if it had one. The set does not use it any more.
    pub disk: Option<DiskId>,
    /// The error because of which an acknowledged write, not flushed by its client, may not be
    /// durable.
    pub lost: Option<Error>,
}

impl CacheSet {
    /// Stops serving a volume. All that was acknowledged is durable when this returns. New requests
    /// are refused at once. Requests in flight end as they would have ended, and may take as long
    /// as their devices do.
    ///
    /// # Errors
    /// There is no such volume, another change of it is under way, or the set is being stopped.
    /// Then nothing has changed.
    pub async fn remove_volume(&self, id: VolumeId) -> Result<RemovedVolume, Error> {
        let target = self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Leaving))?;
        self.quiet(id).await;
        let lost = self.flush_before_leaving(&target).await.err();
        // Parked data that the flush has made durable enters the tree.
        self.idle(id).await;
        // If it cannot be marked clean it stays *dirty*. That loses nothing but the freedom to be
        // used without the cache.
        let _ = task::mark_clean(self, id).await;
        self.with(|s| {
            parked::drop_all(s, id);
            s.volumes.remove(id);
            s.background -= 1;
        });
        self.signals().ranges.notify_all();
        Ok(RemovedVolume { disk: target.backing.as_ref().map(Disk::id), lost })
    }

    /// Flushes like a client's flush, and like the last flush of a stop: reports a failure that no
    /// client has been told of.
    async fn flush_before_leaving(&self, target: &Target) -> Result<(), Error> {
        let committed = if target.inode.is_some() { writer::commit(self).await } else { Ok(()) };
        committed.and(flush::last_flush(self, target).await)
    }

    /// Waits until the requests of a volume that leaves have ended, and then its background users.
    pub(super) async fn quiet(&self, id: VolumeId) {
        // Its workers run until then: a request may wait for room that write-back makes.
        while self.with(|s| s.volumes.get(id).is_some_and(|volume| volume.requests > 0)) {
            self.signals().ranges.wait().await;
        }
        self.signals().writeback_work.notify_all();
        self.signals().parked_work.notify_all();
        self.idle(id).await;
    }

    /// Waits until no task of the set works on the volume any more.
    async fn idle(&self, id: VolumeId) {
        let is_busy = |s: &mut State| s.volumes.get(id).is_some_and(|volume| volume.hands > 0);
        while self.with(is_busy) {
            self.signals().ranges.wait().await;
        }
    }

    /// Spawns a task of a volume. The task ends when the set does or the volume leaves.
    pub(super) fn spawn_worker<F: Future<Output = ()> + 'static>(
        &self,
        id: VolumeId,
        worker: impl FnOnce(Self, VolumeId) -> F + 'static,
    ) {
        self.with(|s| s.lend_hand(id));
        self.spawn(TaskKind::Changing, move |set| async move {
            worker(set.clone(), id).await;
            set.with(|s| s.take_hand_back(id));
            set.signals().ranges.notify_all();
        });
    }

    /// Returns true when the workers of a volume must end.
    pub(crate) fn is_over(&self, id: VolumeId) -> bool {
        let is_leaving = |s: &mut State| {
            s.volumes
                .get(id)
                .is_none_or(|volume| volume.lifecycle == Lifecycle::Leaving && volume.requests == 0)
        };
        self.is_ending() || self.with(is_leaving)
    }

    /// Ends a long operation on a volume; see [`State::hold`].
    pub(crate) fn let_go(&self, id: VolumeId) {
        self.with(|s| s.end_background(id));
        self.signals().ranges.notify_all();
    }
}

impl State {
    /// Begins background work on a volume: until it ends the volume does not leave, and the set
    /// does not stop.
    pub(crate) fn begin_background(&mut self, id: VolumeId) {
        self.background += 1;
        self.lend_hand(id);
    }

    /// Ends background work on a volume. The caller notifies `ranges`.
    pub(crate) fn end_background(&mut self, id: VolumeId) {
        self.background -= 1;
        self.take_hand_back(id);
    }

    /// Begins a long operation that a caller requested, like [`State::begin_background`]. Refused
    /// if the volume leaves or the set stops.
    pub(crate) fn hold(&mut self, id: VolumeId) -> Result<Target, Error> {
        if self.stopping {
            return Err(Error::Stopping);
        }
        let volume = self.volumes.get(id).filter(|volume| volume.lifecycle != Lifecycle::Leaving);
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
