//! Says that the set has failed when it has, and that it works again: whoever only looks now and then, or asks for something, learns that
//! later, or of two failures with a moment between them learns of one.

use super::News;
use super::keeper::Keeper;

/// The task: as long as the engine runs. Calls `tell` once for each set that fails, also one that had when it came, and once when it is open
/// again.
pub async fn run(keeper: Keeper, tell: impl Fn(News)) {
    // The start of a set that is known to have failed.
    let mut told = None;
    while !keeper.with(|sets| sets.is_stopping) {
        let open = keeper.with(|sets| {
            let has_failed = sets.main.as_ref()?.failure().is_some();
            Some((sets.session, has_failed))
        });
        if let Some((session, has_failed)) = open
            && told != Some(session)
        {
            if told.take().is_some() {
                tell(News::Works);
            }
            if has_failed {
                told = Some(session);
                tell(News::Failed);
                keeper.alarm();
            }
        }
        keeper.changes().await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::letting_go::let_go;
    use super::super::revival::tests::{backing, served_through};
    use super::super::revival::{bring_home, open_again};
    use super::*;
    use bcached_engine::{Error, Settings};
    use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Op, Time, Token};
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::time::Duration;

    /// The disk that takes no writes, if any.
    type Full = Rc<Cell<Option<DiskId>>>;

    /// The real driver, and that disk.
    struct Failing(Box<dyn Driver>, Full, RefCell<Vec<Event>>);

    impl Driver for Failing {
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
            // Something has come already.
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

    /// Has the set of `keeper` fail, and leaves it.
    async fn fail(keeper: &Keeper, full: &Full) {
        full.set(Some(keeper.inner().recipe.cache.get()));
        let set = keeper.main().expect("it works");
        let kept = set.keep_settings(Settings { discard: Some(true), replacement: None }).await;
        kept.expect_err("its superblock cannot be written");
        assert!(set.failure().is_some());
    }

    /// The log said it up to five seconds later, when somebody looked.
    #[test]
    fn a_failure_is_told_by_itself_and_so_is_the_next() {
        let (file, full) = (backing(3), Full::default());
        let wrap =
            |driver| Box::new(Failing(driver, Rc::clone(&full), RefCell::default())) as Box<dyn Driver>;
        let (mut executor, keeper, _volume) = served_through(&file, wrap);
        let (env, told) = (executor.env(), Rc::new(RefCell::new(String::new())));
        let ended = executor.block_on(async move {
            // This one has failed before anybody looks.
            fail(&keeper, &full).await;
            let writes = Rc::clone(&told);
            env.spawn(run(keeper.clone(), move |news| {
                writes.borrow_mut().push_str(match news {
                    News::Failed => "failed ",
                    News::Works => "works ",
                    News::Opened(_) | News::Ended => "?",
                });
            }));
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed ");
            full.set(None);
            assert!(let_go(&keeper).await);
            open_again(&keeper).await.expect("its device takes writes again");
            assert!(bring_home(&keeper).await);
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed works ");
            fail(&keeper, &full).await;
            env.sleep(Duration::from_millis(10)).await;
            assert_eq!(*told.borrow(), "failed works failed ");
            keeper.stop().await
        });
        assert!(matches!(ended, Some(Err(Error::Failed(_)))), "{ended:?}");
    }
}
