//! Closes a failed set with nothing in flight: all requests are answered, and the backing devices
//! of its volumes are flushed.
//!
//! From the first step on no request begins, so a hung device must not block the other volumes. A
//! device that already hangs is detected before the first step. A device that hangs later is waited
//! for only briefly. Then the set, which still serves volumes that can do without the cache, stays
//! open, and the whole procedure is retried later.

use crate::Host;
use crate::host::AwayVolume;
use bcached_engine::{CacheSet, VolumeId};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Interval of the check for other handles on the set.
const LOOK: Duration = Duration::from_millis(1);

/// Progress of flushing the backing devices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushProgress {
    UnderWay,
    Done,
    /// The caller no longer waits for them.
    GivenUp,
}

/// Closes the set if it is open. Returns false if a device hangs or is being added; the set is then
/// as it was.
pub async fn quiesce(host: &Host) -> bool {
    let env = &host.inner().env;
    let Ok(set) = host.main() else { return true };
    if host.is_adding() || a_device_hangs(host, &set) {
        return false;
    }
    let begun = env.now();
    let written = host.take_written();
    // From here on no request begins.
    host.change(|state| {
        let before = set.status();
        state.why.clone_from(&before.failed);
        state.before = Some(Box::new(before));
        state.main = None;
    });
    if !flushed_in_time(host, &set).await {
        tracing::warn!(
            event = "cache-not-opened-again",
            "the cache set cannot be reopened while a backing device of one of its volumes does not answer; \
             bcached tries again"
        );
        host.stays_open(set, begun);
        host.put_written(written);
        return false;
    }
    // This fails, because the set has failed.
    let _failed = set.stop().await;
    part(host, &set);
    host.put_written(written.map(|written| written + set.written().total()));
    while !set.is_last_handle() {
        env.sleep(LOOK).await;
    }
    true
}

fn a_device_hangs(host: &Host, set: &CacheSet) -> bool {
    let disks = set.volumes().into_iter().filter_map(|info| set.disk_of(info.id));
    disks
        .into_iter()
        .any(|disk| host.inner().env.disk(disk).health().longest_wait >= host.inner().opening.limits.hangs)
}

/// Waits until all requests are answered and the backing devices are flushed; returns false if that
/// takes too long.
async fn flushed_in_time(host: &Host, set: &CacheSet) -> bool {
    let env = &host.inner().env;
    let progress = Rc::new(Cell::new(FlushProgress::UnderWay));
    // An operation in flight on a device cannot be cancelled. The task ends when the device
    // completes it, whether or not the caller still waits (invariant L8).
    env.spawn(flush_backings(host.clone(), set.clone(), Rc::clone(&progress)));
    let until = env.now() + host.inner().opening.limits.quiesce;
    while progress.get() == FlushProgress::UnderWay && env.now() < until {
        host.changes_until(until).await;
    }
    progress.replace(FlushProgress::GivenUp) == FlushProgress::Done
}

async fn flush_backings(host: Host, set: CacheSet, progress: Rc<Cell<FlushProgress>>) {
    // A write that completes after the flushes would not be covered by them (invariant D39).
    set.drained().await;
    let volumes: Vec<VolumeId> = set.volumes().iter().map(|info| info.id).collect();
    for id in volumes {
        if progress.get() == FlushProgress::GivenUp {
            return;
        }
        // If the superblock cannot record that the volume has left the cache, the volume waits for
        // the cache like one with dirty data.
        let _stays = set.leave_failed(id).await;
        if set.flush_backing_of(id).await.is_err() {
            host.has_lost([id]);
        }
    }
    if progress.get() == FlushProgress::UnderWay {
        progress.set(FlushProgress::Done);
    }
    host.wake();
}

/// Takes the volumes from the stopped set.
fn part(host: &Host, set: &CacheSet) {
    let mut status = set.status();
    host.change(|state| {
        state.next = Some(set.next_number());
        // The set does not know of changes made while it was being closed.
        for info in &mut status.volumes {
            if let Some(changed) = state.parted(info.id) {
                info.options = changed.options;
            }
            if let Some(mode) = state.new_modes.remove(&info.id) {
                info.mode = mode;
            }
        }
        // By now a more serious failure may have been recorded.
        state.why.clone_from(&status.failed);
        state.is_lost = state.why.as_ref().is_some_and(|error| !error.may_pass());
        for (info, latencies) in status.volumes.iter().zip(&status.latencies) {
            let Some(disk) = set.disk_of(info.id) else { continue };
            let (info, latencies) = (info.clone(), latencies.clone());
            state.away.insert(info.id, AwayVolume { disk, info, latencies, is_cacheless: false });
        }
        state.before = Some(Box::new(status));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reopen::{bring_back, reopen};
    use crate::testing::{TestHost, backing, served_through};
    use bcached_engine::{ClientId, Request};
    use bcached_env::{Buffer, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
    use bcached_format::CacheMode;
    use std::cell::RefCell;
    use std::future::{Future, poll_fn};
    use std::pin::pin;

    /// Nothing here takes a second, except what hangs.
    const TEST_LIMIT: Duration = Duration::from_secs(60);

    /// A disk that hangs, if any, and the operations submitted to it in the meantime.
    #[derive(Default)]
    struct HungDisk {
        disk: Cell<Option<DiskId>>,
        asked: RefCell<Vec<(DiskId, Token, Op)>>,
    }

    /// The real driver, with one disk that does not answer.
    struct HangingDriver(Box<dyn Driver>, Rc<HungDisk>);

    impl Driver for HangingDriver {
        fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
            match self.1.disk.get() == Some(disk) {
                true => self.1.asked.borrow_mut().push((disk, token, op)),
                false => self.0.submit(disk, token, op),
            }
        }

        fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
            if self.1.disk.get().is_none() {
                for (disk, token, op) in self.1.asked.take() {
                    self.0.submit(disk, token, op);
                }
            }
            self.0.wait(until, events);
        }

        fn now(&self) -> Time {
            self.0.now()
        }

        fn wall_seconds(&self) -> u32 {
            self.0.wall_seconds()
        }

        fn info(&self, disk: DiskId) -> DiskInfo {
            self.0.info(disk)
        }
    }

    /// Returns the result of `future`, and panics if it takes too long.
    async fn limited<T>(host: &Host, future: impl Future<Output = T>) -> T {
        let (mut future, mut limit) = (pin!(future), pin!(host.inner().env.sleep(TEST_LIMIT)));
        poll_fn(|context| {
            assert!(limit.as_mut().poll(context).is_pending(), "it hangs");
            future.as_mut().poll(context).map(Some)
        })
        .await
        .expect("only what has come is ready")
    }

    async fn read(set: CacheSet, volume: VolumeId) -> bool {
        let request = Request::Read { sector: 0, buffer: Buffer::zeroed(4096) };
        set.serve_for(ClientId(1), volume, request).await.result.is_ok()
    }

    /// Proves that a hung disk blocks no other volume. It once kept a recovered cache from all
    /// volumes, and kept volumes that need no cache from their disks.
    #[test]
    fn a_disk_that_hangs_keeps_nobody_else_from_being_served() {
        // Proves invariant L8.
        let (files, hung) = ([backing(3), backing(4)], Rc::new(HungDisk::default()));
        let wrap = |driver| Box::new(HangingDriver(driver, Rc::clone(&hung))) as Box<dyn Driver>;
        let (mut rig, well) = served_through(&files[0], wrap);
        let ill = rig.add(&files[1]);
        let TestHost { mut executor, host, .. } = rig;
        let (env, hangs) = (executor.env(), Rc::clone(&hung));
        let ended = executor.block_on(async move {
            let set = host.main().expect("it works");
            hangs.disk.set(set.disk_of(ill));
            env.spawn(async move { assert!(read(set, ill).await, "it is answered at last") });
            while hangs.asked.borrow().is_empty() {
                env.sleep(LOOK).await;
            }
            let said = host.clone();
            env.spawn(async move {
                said.until(|state| state.main.is_none()).await;
                said.change_mode_for_now(well, CacheMode::None).expect("it will be so");
            });
            assert!(!limited(&host, quiesce(&host)).await, "the set stays open");
            let set_of = host.set_of(well).expect("the set has it as before");
            assert!(limited(&host, read(set_of, well)).await, "and serves it");
            assert_eq!(host.status().volumes[0].mode, CacheMode::None, "what was said meanwhile counts");
            assert!(!limited(&host, quiesce(&host)).await, "it hangs for long by now");
            assert!(host.set_of(well).is_some(), "so nobody was kept waiting");

            hangs.disk.set(None);
            while !limited(&host, quiesce(&host)).await {
                env.sleep(LOOK).await;
            }
            reopen(&host).await.expect("nothing has happened to it");
            assert!(bring_back(&host).await);
            host.stop().await
        });
        assert_eq!(ended, Some(Ok(())));
    }
}
