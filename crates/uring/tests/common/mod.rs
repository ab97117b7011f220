//! Helpers shared by the tests of both backends.
#![allow(dead_code, reason = "each test binary uses a part")]

use bcached_env::{Driver, Env, Event, Executor, RunOrder};
use bcached_uring::{Access, Backend, BackendChoice, Device, DriverOptions, OpenedDriver, open_driver};
use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// The longest that any test may take before it counts as hung.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns both backends; the ring only if it works, otherwise prints the reason.
pub fn backends() -> Vec<BackendChoice> {
    let ring = open_driver(&DriverOptions { choice: BackendChoice::Uring, ..DriverOptions::default() });
    match ring {
        Ok(opened) => {
            assert!(matches!(opened.backend, Backend::Uring { .. }));
            vec![BackendChoice::Uring, BackendChoice::Threads]
        }
        Err(error) => {
            skip(&format!("the ring's half of this test: {error}"));
            vec![BackendChoice::Threads]
        }
    }
}

/// Opens a driver with one backend.
pub fn open(choice: BackendChoice) -> OpenedDriver {
    open_driver(&DriverOptions { choice, ..DriverOptions::default() }).expect("it was probed")
}

/// Runs `flow` on each backend, in a thread that is abandoned after a time limit.
pub fn on_each<F, R>(flow: F)
where
    F: Fn(Env, DriverHandles) -> R + Send + Sync + Copy + 'static,
    R: Future<Output = ()> + 'static,
{
    for choice in backends() {
        within_limit(move || {
            let OpenedDriver { driver, disks, bell, backend, .. } = open(choice);
            println!("{backend}");
            let mut executor = Executor::new(driver, RunOrder::Fifo, 1);
            let env = executor.env();
            executor.block_on(flow(env, DriverHandles { disks, bell })).expect("this world does not halt");
        });
    }
}

/// What a flow may need beside its [`Env`].
pub struct DriverHandles {
    pub disks: bcached_uring::Disks,
    pub bell: bcached_uring::Bell,
}

/// Runs `work` in a thread and fails if it takes too long.
pub fn within_limit(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    // Named like the test, for `skip`.
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        work();
        let _ = sender.send(());
    });
    let thread = thread.expect("the system has a thread to give");
    let waited = receiver.recv_timeout(LIMIT);
    assert_ne!(waited, Err(mpsc::RecvTimeoutError::Timeout), "hung: nothing after {LIMIT:?}");
    if let Err(reason) = thread.join() {
        std::panic::resume_unwind(reason);
    }
}

/// Prints the one line by which the running test counts as skipped, in part or as a whole; once per
/// test.
pub fn skip(reason: &str) {
    static TESTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    if TESTS.lock().expect("nobody panics in here").insert(name) {
        println!("skipped: {}", reason.replace('\n', " "));
    }
}

/// Makes a file of `bytes` zeroes (sparse).
pub fn image(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file in the temporary directory");
    file.as_file().set_len(bytes).expect("a sparse file");
    file
}

/// Opens a device to own it.
pub fn own(path: &Path) -> Device {
    Device::open(path, Access::Own).expect("nobody else has it")
}

/// Gives the ring clients of a driver a turn or two, without waiting.
pub fn turn(driver: &mut dyn Driver) {
    let mut events: Vec<Event> = Vec::new();
    for _ in 0..3 {
        let now = driver.now();
        driver.wait(Some(now), &mut events);
    }
}

/// Waits until the condition holds; returns whether it did so within `limit`.
pub fn within(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !holds() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}
