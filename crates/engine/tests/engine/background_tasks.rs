//! Background tasks of a test.

use bcached_engine::{CacheSet, Error, Request, VolumeId};
use bcached_env::{Env, Time};
use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// A task that runs beside the test, and its result.
pub struct BackgroundTask<T>(Rc<RefCell<Option<T>>>);

impl<T: 'static> BackgroundTask<T> {
    pub fn start(env: &Env, work: impl Future<Output = T> + 'static) -> Self {
        let result = Rc::new(RefCell::new(None));
        let place = Rc::clone(&result);
        env.spawn(async move {
            let done = work.await;
            *place.borrow_mut() = Some(done);
        });
        Self(result)
    }

    pub fn is_over(&self) -> bool {
        self.0.borrow().is_some()
    }

    pub async fn result(self, env: &Env) -> T {
        let until = Time(env.now().0 + 600_000_000_000);
        while !self.is_over() {
            assert!(env.now() < until, "it never ends");
            env.sleep(Duration::from_micros(50)).await;
        }
        self.0.borrow_mut().take().expect("it is over")
    }
}

/// Starts a request in the background.
pub fn asking(
    env: &Env,
    set: &CacheSet,
    volume: VolumeId,
    request: Request,
) -> BackgroundTask<Result<(), Error>> {
    let set = set.clone();
    BackgroundTask::start(env, async move { set.serve(volume, request).await.result })
}
