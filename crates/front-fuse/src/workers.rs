//! A few threads for calls to trees. These calls may wait for the daemon, which session threads
//! must not.

use crate::shutdown::Lifecycle;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct WorkerPool {
    state: Mutex<WorkerState>,
    changed: Condvar,
}

/// At most as many jobs as there are programs waiting.
#[derive(Default)]
struct WorkerState {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

impl WorkerPool {
    pub(crate) fn start(lifecycle: &Arc<Lifecycle>, count: usize) -> io::Result<Arc<Self>> {
        let workers = Arc::new(Self::default());
        for index in 0..count {
            let worker = Arc::clone(&workers);
            let started = lifecycle.spawn(format!("fuse-tree-{index}"), move || worker.run());
            started.inspect_err(|_| workers.close())?;
        }
        Ok(workers)
    }

    /// Queues a job; jobs run in order of arrival.
    pub(crate) fn run_soon(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.jobs.push_back(Box::new(job));
        drop(state);
        self.changed.notify_one();
    }

    /// Makes the threads end once the queued jobs are done.
    pub(crate) fn close(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            // A panicking job drops its reply, which answers the program. The thread goes on with
            // the next job.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!(event = "fuse-tree-failed", "the code of a control file panicked");
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
