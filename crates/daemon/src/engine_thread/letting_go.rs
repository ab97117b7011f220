//! Letting go of a set that has failed, before it is opened again: by then all that was asked of it is answered, and what its volumes have
//! on their backing devices is flushed.
//!
//! From the first step on nobody is served, so a device that hangs must not keep the others waiting: it is looked whether one does before the
//! first step, and one that begins to hang meanwhile is waited for a moment only. Then the set, which still serves whoever can do without
//! the cache, has its volumes back, and all of it is tried again later.

use super::keeper::{Away, Keeper};
use bcached_engine::{CacheSet, VolumeId};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A device that has not answered for so long hangs: a disk under load may take a second.
const HANGS: Duration = Duration::from_secs(2);

/// How long all volumes may stand still for one.
const LIMIT: Duration = Duration::from_secs(5);

/// How often who waits for the last handle on a set looks.
const LOOK: Duration = Duration::from_millis(1);

/// How far the last words with the backing devices have come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Goes,
    Ended,
    /// Nobody waits for it any more.
    GivenUp,
}

/// Stops the set, if that has not been done, until nobody has a handle on it. False if a device hangs: the set is where it was.
pub async fn let_go(keeper: &Keeper) -> bool {
    let env = &keeper.inner().env;
    let Ok(set) = keeper.main() else { return true };
    if keeper.is_adding() || a_device_hangs(keeper, &set) {
        return false;
    }
    let begun = env.now();
    // From here on no request begins.
    keeper.change(|sets| {
        let before = set.status();
        sets.why.clone_from(&before.failed);
        sets.before = Some(Box::new(before));
        sets.main = None;
    });
    if !comes_to_rest(keeper, &set).await {
        tracing::warn!(
            event = "cache-not-opened-again",
            "the cache set cannot be opened again while a backing device of its volumes does not answer: it is tried again"
        );
        keeper.is_not_let_go(set, begun);
        return false;
    }
    // That it has failed is known.
    let _failed = set.stop().await;
    // Nobody has told this set since it was let go of. The next one reads the note by its path.
    let _or_it_is_lost = set.renew_note();
    leave(keeper, &set);
    while !set.is_last_handle() {
        env.sleep(LOOK).await;
    }
    true
}

fn a_device_hangs(keeper: &Keeper, set: &CacheSet) -> bool {
    let disks = set.volumes().into_iter().filter_map(|info| set.disk_of(info.id));
    disks.into_iter().any(|disk| keeper.inner().env.disk(disk).health().longest_wait >= HANGS)
}

/// All that was asked is answered, and flushed after that; false if that takes too long.
async fn comes_to_rest(keeper: &Keeper, set: &CacheSet) -> bool {
    let env = &keeper.inner().env;
    let course = Rc::new(Cell::new(Course::Goes));
    // What a device has been asked cannot be taken back: that ends by itself, also if nobody waits for it any more.
    env.spawn(last_words(keeper.clone(), set.clone(), Rc::clone(&course)));
    let until = env.now() + LIMIT;
    while course.get() == Course::Goes && env.now() < until {
        keeper.changes_until(until).await;
    }
    course.replace(Course::GivenUp) == Course::Ended
}

async fn last_words(keeper: Keeper, set: CacheSet, course: Rc<Cell<Course>>) {
    // What is answered after the flushes below would not be covered by them.
    set.drained().await;
    let volumes: Vec<VolumeId> = set.volumes().iter().map(|info| info.id).collect();
    for id in volumes {
        if course.get() == Course::GivenUp {
            return;
        }
        // One whose backing device cannot be told that waits like one with dirty data.
        let _stays = set.leave_failed(id).await;
        if set.flush_backing_of(id).await.is_err() {
            keeper.with(|sets| sets.owes.insert(id));
        }
    }
    if course.get() == Course::Goes {
        course.set(Course::Ended);
    }
    keeper.look_again();
}

/// Its volumes are nobody's from now on.
fn leave(keeper: &Keeper, set: &CacheSet) {
    let mut status = set.status();
    keeper.change(|sets| {
        // Whoever comes to the set when it is open again has this number.
        sets.next = Some(set.next_number());
        // What somebody has changed meanwhile the set did not hear of.
        for info in &mut status.volumes {
            if let Some(changed) = sets.left(info.id) {
                info.options = changed.options;
            }
            if let Some(said) = sets.said_modes.remove(&info.id) {
                info.mode = said;
            }
        }
        // It may have failed in a worse way by now.
        sets.why.clone_from(&status.failed);
        sets.is_lost = sets.why.as_ref().is_some_and(|error| !error.may_pass());
        for (info, latencies) in status.volumes.iter().zip(&status.latencies) {
            let Some(disk) = set.disk_of(info.id) else { continue };
            let (info, latencies) = (info.clone(), latencies.clone());
            sets.away.insert(info.id, Away { disk, info, latencies, is_aboard: false });
        }
        sets.before = Some(Box::new(status));
    });
}

#[cfg(test)]
mod tests {
    use super::super::revival::tests::{added, backing, served_through};
    use super::super::revival::{bring_home, open_again};
    use super::*;
    use bcached_engine::{Client, Request};
    use bcached_env::{Buffer, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
    use bcached_format::CacheMode;
    use std::cell::RefCell;
    use std::future::{Future, poll_fn};
    use std::pin::pin;

    /// Nothing here takes a second, what hangs apart.
    const TEST_LIMIT: Duration = Duration::from_secs(60);

    /// A disk that hangs, if any, and what it was asked meanwhile.
    #[derive(Default)]
    struct Hung {
        disk: Cell<Option<DiskId>>,
        asked: RefCell<Vec<(DiskId, Token, Op)>>,
    }

    /// The real driver, and one disk that does not answer.
    struct Hanging(Box<dyn Driver>, Rc<Hung>);

    impl Driver for Hanging {
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

    /// What comes of it, unless it takes too long.
    async fn limited<T>(keeper: &Keeper, future: impl Future<Output = T>) -> T {
        let (mut future, mut limit) = (pin!(future), pin!(keeper.inner().env.sleep(TEST_LIMIT)));
        poll_fn(|context| {
            assert!(limit.as_mut().poll(context).is_pending(), "it hangs");
            future.as_mut().poll(context).map(Some)
        })
        .await
        .expect("only what has come is ready")
    }

    async fn read(set: CacheSet, volume: VolumeId) -> bool {
        let request = Request::Read { sector: 0, buffer: Buffer::zeroed(4096) };
        set.serve_for(Client(1), volume, request).await.result.is_ok()
    }

    /// One disk that hung kept a cache that was well again from all volumes, and those that need none from their disks.
    #[test]
    fn a_disk_that_hangs_keeps_nobody_else_from_being_served() {
        let (files, hung) = ([backing(3), backing(4)], Rc::new(Hung::default()));
        let wrap = |driver| Box::new(Hanging(driver, Rc::clone(&hung))) as Box<dyn Driver>;
        let (mut executor, keeper, well) = served_through(&files[0], wrap);
        let ill = added(&mut executor, &keeper, &files[1]);
        let (env, hangs) = (executor.env(), Rc::clone(&hung));
        let ended = executor.block_on(async move {
            let set = keeper.main().expect("it works");
            hangs.disk.set(set.disk_of(ill));
            env.spawn(async move { assert!(read(set, ill).await, "it is answered at last") });
            while hangs.asked.borrow().is_empty() {
                env.sleep(LOOK).await;
            }
            let said = keeper.clone();
            env.spawn(async move {
                said.until(|sets| sets.main.is_none()).await;
                said.change_mode_for_now(well, CacheMode::None).expect("it will be so");
            });
            assert!(!limited(&keeper, let_go(&keeper)).await, "the set is not let go of");
            let home = keeper.home(well).expect("the set has it as before");
            assert!(limited(&keeper, read(home, well)).await, "and serves it");
            assert_eq!(keeper.status().volumes[0].mode, CacheMode::None, "what was said meanwhile counts");
            assert!(!limited(&keeper, let_go(&keeper)).await, "it hangs for long by now");
            assert!(keeper.home(well).is_some(), "so nobody was kept waiting");

            hangs.disk.set(None);
            while !limited(&keeper, let_go(&keeper)).await {
                env.sleep(LOOK).await;
            }
            open_again(&keeper).await.expect("nothing has happened to it");
            assert!(bring_home(&keeper).await);
            keeper.stop().await
        });
        assert_eq!(ended, Some(Ok(())));
    }
}
