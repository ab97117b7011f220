//! Reports when the set fails and when it works again. A caller that polled the status would notice
//! it later, and would notice only one of two failures in quick succession.

use crate::Host;

/// A change of the set's health.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HealthChange {
    /// The set has failed. Its status says why.
    Failed,
    /// The set is open again, and may fail again.
    Works,
}

/// Runs until the host stops. Calls `tell` once for each set that fails, including one that had
/// failed before, and once when the set is open again.
pub async fn run(host: Host, tell: impl Fn(HealthChange)) {
    // The session of the set whose failure has been reported.
    let mut told = None;
    while !host.with(|state| state.is_stopping) {
        let open = host.with(|state| {
            let has_failed = state.main.as_ref()?.failure().is_some();
            Some((state.session, has_failed))
        });
        if let Some((session, has_failed)) = open
            && told != Some(session)
        {
            if told.take().is_some() {
                tell(HealthChange::Works);
            }
            if has_failed {
                told = Some(session);
                tell(HealthChange::Failed);
                host.alarm();
            }
        }
        host.changes().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quiesce::quiesce;
    use crate::reopen::{bring_back, reopen};
    use crate::testing::{TestHost, backing, served_through};
    use bcached_engine::{Error, Settings};
    use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Op, Time, Token};
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::time::Duration;

    /// The disk whose writes fail, if any.
    type FailingDisk = Rc<Cell<Option<DiskId>>>;

    /// The real driver, with that disk.
    struct FailingDriver(Box<dyn Driver>, FailingDisk, RefCell<Vec<Event>>);

    impl Driver for FailingDriver {
        fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
            match op {
                Op::Write { .. } if self.1.get() == Some(disk) => {
                    let result = Err(IoErrorKind::Io);
                    self.2.borrow_mut().push(Event::Done(Completion { token, result, buffer: None }));
                }
                op => self.0.submit(disk, token, op),
            }
        }

        fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
            let failed = self.2.take();
            // Some events have already arrived.
            self.0.wait(if failed.is_empty() { until } else { Some(self.0.now()) }, events);
            events.extend(failed);
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

    /// Makes the set of `host` fail, and leaves it failed.
    async fn fail(host: &Host, full: &FailingDisk) {
        full.set(Some(host.inner().opening.cache.get()));
        let set = host.main().expect("it works");
        let kept = set.keep_settings(Settings { discard: Some(true), replacement: None }).await;
        kept.expect_err("its superblock cannot be written");
        assert!(set.failure().is_some());
    }

    /// Proves that each failure is reported at once. The log once had it up to five seconds later,
    /// at the next poll.
    #[test]
    fn a_failure_is_told_by_itself_and_so_is_the_next() {
        let (file, full) = (backing(3), FailingDisk::default());
        let wrap =
            |driver| Box::new(FailingDriver(driver, Rc::clone(&full), RefCell::default())) as Box<dyn Driver>;
        let (TestHost { mut executor, host, .. }, _volume) = served_through(&file, wrap);
        let (env, told) = (executor.env(), Rc::new(RefCell::new(String::new())));
        let ended = executor.block_on(async move {
            // This set fails before the task looks at it.
            fail(&host, &full).await;
            let writes = Rc::clone(&told);
            env.spawn(run(host.clone(), move |change| {
                writes.borrow_mut().push_str(match change {
                    HealthChange::Failed => "failed ",
                    HealthChange::Works => "works ",
                });
            }));
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed ");
            full.set(None);
            assert!(quiesce(&host).await);
            reopen(&host).await.expect("its device takes writes again");
            assert!(bring_back(&host).await);
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed works ");
            fail(&host, &full).await;
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed works failed ");
            host.stop().await
        });
        assert!(matches!(ended, Some(Err(Error::Failed(_)))), "{ended:?}");
    }
}
