//! A thread with a ring, like that of an engine, for connections to be served on.

use bcached_uring::{Backend, DriverOptions, OpenedDriver, RingHandle, open_driver};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

pub struct TestRing {
    pub ring_handle: RingHandle,
    bell: bcached_uring::Bell,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestRing {
    /// Returns `None` where there is no `io_uring`.
    pub fn start() -> Option<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let (tell, told) = channel();
        let must_end = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let OpenedDriver { mut driver, ring_handle, bell, backend, .. } =
                open_driver(&DriverOptions::default()).expect("a driver");
            let is_ring = matches!(backend, Backend::Uring { .. });
            tell.send(is_ring.then_some((ring_handle, bell))).expect("somebody waits");
            let mut events = Vec::new();
            while !must_end.load(Ordering::SeqCst) {
                // Without a timeout, so that a missed wake-up is noticed.
                driver.wait(None, &mut events);
                events.clear();
            }
        });
        let (ring_handle, bell) = told.recv().expect("it tells")?;
        Some(Self { ring_handle, bell, ends, thread: Some(thread) })
    }

    /// Ends the thread, as if the engine went away.
    pub fn end(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it ends well");
        }
    }
}

impl Drop for TestRing {
    fn drop(&mut self) {
        self.end();
    }
}
