//! Tracks how clients use a backing device. Write-back slows down while clients have to wait, and
//! leaves a disk alone that has been idle for so long that it may sleep.
//!
//! A disk is assumed to sleep from [`VolumeOptions::spindown_after`] after the last client
//! operation on; the disk itself is not queried. Then dirty data gathers in the cache. When a
//! client wakes the disk, all of it is written back at once. Write-back itself wakes the disk only
//! if space is needed, if data has become too old, or if more than twice the target is dirty.
//!
//! [`VolumeOptions::spindown_after`]: crate::VolumeOptions::spindown_after

use crate::options::VolumeOptions;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::VolumeId;
use bcached_env::Time;
use core::future::Future;
use core::time::Duration;

/// How clients use a backing device.
#[derive(Clone, Debug, Default)]
pub struct ClientActivity {
    /// When a client operation last began or ended, or the disk was woken for something else.
    used: Time,
    /// Write-back has not completed a pass since. It continues until it has, or until nothing is
    /// dirty.
    has_work: bool,
    /// Client operations in flight.
    under_way: u64,
    /// The slowest client operation since this was last read.
    slowest: Duration,
}

impl ClientActivity {
    /// Records that the disk is awake.
    pub const fn wakes(&mut self, now: Time) {
        (self.used, self.has_work) = (now, true);
    }

    /// Records that write-back has completed a pass, or is not to run.
    pub const fn rests(&mut self) {
        self.has_work = false;
    }

    /// Returns true if the disk has been idle for so long that it is taken to sleep.
    #[must_use]
    pub fn is_asleep(&self, now: Time, options: &VolumeOptions) -> bool {
        let after = options.spindown_after;
        self.under_way == 0 && !self.has_work && after.is_some_and(|after| now >= self.used + after)
    }

    /// Returns the slowest client operation since the last call.
    pub const fn take_slowest(&mut self) -> Duration {
        core::mem::replace(&mut self.slowest, Duration::ZERO)
    }
}

/// Runs a client's operation on the backing device.
pub async fn beside<T>(set: &CacheSet, target: &Target, operation: impl Future<Output = T>) -> T {
    let begun = set.env().now();
    if set.with(|s| s.client_comes(target.id)) {
        // Gathered dirty data is written back along with it.
        set.signals().writeback_work.notify_all();
    }
    let done = operation.await;
    let taken = set.env().now().since(begun);
    set.with(|s| s.client_goes(target.id, taken));
    done
}

impl State {
    /// Records an operation on the disk that cannot wait.
    pub(crate) fn disk_wakes(&mut self, id: VolumeId) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.client_activity.wakes(now);
        }
    }

    /// Begins a client operation on the backing device. Returns true if the disk was asleep.
    pub(crate) fn client_comes(&mut self, id: VolumeId) -> bool {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(id) else { return false };
        let was_asleep = volume.client_activity.is_asleep(now, &volume.options);
        volume.client_activity.under_way += 1;
        volume.client_activity.wakes(now);
        was_asleep
    }

    /// Ends a client operation that took `taken`.
    pub(crate) fn client_goes(&mut self, id: VolumeId, taken: Duration) {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(id) else { return };
        volume.client_activity.under_way -= 1;
        volume.client_activity.slowest = volume.client_activity.slowest.max(taken);
        volume.client_activity.wakes(now);
    }
}
