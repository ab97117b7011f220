//! A thread with a ring, like that of an engine, for connections to be served on.

use bcached_uring::{Backend, DriverOptions, Guests, Opened, open_driver};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

pub struct Ring {
    pub guests: Guests,
    bell: bcached_uring::Bell,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ring {
    /// Returns `None` where there is no `io_uring`.
    pub fn start() -> Option<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let (tell, told) = channel();
        let must_end = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let Opened { mut driver, guests, bell, backend, .. } =
                open_driver(&DriverOptions::default()).expect("a driver");
            let is_ring = matches!(backend, Backend::Uring { .. });
            tell.send(is_ring.then_some((guests, bell))).expect("somebody waits");
            let mut events = Vec::new();
            while !must_end.load(Ordering::SeqCst) {
                // Without a timeout, so that a missed wake-up is noticed.
                driver.wait(None, &mut events);
                events.clear();
            }
        });
        let (guests, bell) = told.recv().expect("it tells")?;
        Some(Self { guests, bell, ends, thread: Some(thread) })
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

impl Drop for Ring {
    fn drop(&mut self) {
        self.end();
    }
}
