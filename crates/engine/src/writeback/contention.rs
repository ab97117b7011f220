//! Who else uses a backing device. Write-back slows down while others have to wait, and leaves a disk alone that has not been used
//! for so long that it may sleep.
//!
//! A disk is taken to sleep from [`VolumeOptions::spindown_after`] after the last operation of a client on; nobody asks it. Then dirty
//! data gathers in the cache. When somebody wakes it all of that leaves at once; write-back does so itself only where room is
//! wanted, where data has become too old, and where more than twice as much is dirty as may be.
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

/// What clients do with a backing device.
#[derive(Clone, Debug, Default)]
pub struct Company {
    /// When one of their operations began or ended last, or the disk had to be woken for something else.
    used: Time,
    /// Write-back has not come past everything since: it goes on until it has, or until nothing is dirty.
    has_work: bool,
    /// Those in flight.
    under_way: u64,
    /// The slowest of them since somebody asked.
    slowest: Duration,
}

impl Company {
    /// The disk is awake.
    pub const fn wakes(&mut self, now: Time) {
        (self.used, self.has_work) = (now, true);
    }

    /// Write-back has come past everything, or is not to.
    pub const fn rests(&mut self) {
        self.has_work = false;
    }

    /// Nobody has used it for long.
    #[must_use]
    pub fn is_asleep(&self, now: Time, options: &VolumeOptions) -> bool {
        let after = options.spindown_after;
        self.under_way == 0 && !self.has_work && after.is_some_and(|after| now >= self.used + after)
    }

    /// The slowest of their operations since this was asked last.
    pub const fn take_slowest(&mut self) -> Duration {
        core::mem::replace(&mut self.slowest, Duration::ZERO)
    }
}

/// Carries out what a client needs of the backing device.
pub async fn beside<T>(set: &CacheSet, target: &Target, operation: impl Future<Output = T>) -> T {
    let begun = set.env().now();
    if set.with(|s| s.client_comes(target.id)) {
        // What has been gathered goes along.
        set.signals().writeback_work.notify_all();
    }
    let done = operation.await;
    let taken = set.env().now().since(begun);
    set.with(|s| s.client_goes(target.id, taken));
    done
}

impl State {
    /// Something is written there that cannot wait.
    pub(crate) fn disk_wakes(&mut self, id: VolumeId) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(id) {
            volume.company.wakes(now);
        }
    }

    /// A client uses the backing device. True if that slept.
    pub(crate) fn client_comes(&mut self, id: VolumeId) -> bool {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(id) else { return false };
        let was_asleep = volume.company.is_asleep(now, &volume.options);
        volume.company.under_way += 1;
        volume.company.wakes(now);
        was_asleep
    }

    /// It has its answer.
    pub(crate) fn client_goes(&mut self, id: VolumeId, taken: Duration) {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(id) else { return };
        volume.company.under_way -= 1;
        volume.company.slowest = volume.company.slowest.max(taken);
        volume.company.wakes(now);
    }
}
