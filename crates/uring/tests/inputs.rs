//! Input that clients of a ring wait for.

mod common;

use bcached_env::{Event, Time};
use bcached_uring::{BackendChoice, Bell, Command, DriverOptions, OpenedDriver, RingClient, open_driver};
use common::{turn, within};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Reads what arrives, one byte at a time.
struct ReadingClient {
    device: Arc<dyn AsFd + Send + Sync>,
    socket: Option<Arc<UnixStream>>,
    seen: Arc<ReaderStatus>,
}

/// What is visible of it from outside, and how it is controlled.
#[derive(Default)]
struct ReaderStatus {
    awaits: AtomicBool,
    bytes: AtomicUsize,
    is_refused: AtomicBool,
    is_over: AtomicBool,
}

impl RingClient for ReadingClient {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        Arc::clone(&self.device)
    }

    fn turn(&mut self, _: &mut dyn FnMut(Command) -> bool) {}

    fn awaits_input(&self) -> bool {
        self.seen.awaits.load(Ordering::Acquire)
    }

    fn input(&mut self) {
        let mut socket = self.socket.as_deref().expect("told of a socket only");
        if socket.read(&mut [0]).expect("there is something") == 1 {
            self.seen.bytes.fetch_add(1, Ordering::Release);
        }
    }

    fn input_refused(&mut self) {
        self.seen.awaits.store(false, Ordering::Release);
        self.seen.is_refused.store(true, Ordering::Release);
    }

    fn completed(&mut self, _: u16, _: i32) {}

    fn is_over(&self) -> bool {
        self.seen.is_over.load(Ordering::Acquire)
    }
}

/// Has a command in the kernel for as long as it lives.
struct BusyClient(Arc<OwnedFd>, bool);

impl RingClient for BusyClient {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.0.clone()
    }

    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool) {
        self.1 = self.1 || push(Command::Readable { tag: 0 });
    }

    fn completed(&mut self, _: u16, _: i32) {}

    fn is_over(&self) -> bool {
        false
    }
}

/// Gives the engine work in every turn.
struct RingingClient(Arc<OwnedFd>, Bell);

impl RingClient for RingingClient {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.0.clone()
    }

    fn turn(&mut self, _: &mut dyn FnMut(Command) -> bool) {
        self.1.ring();
    }

    fn completed(&mut self, _: u16, _: i32) {}

    fn is_over(&self) -> bool {
        false
    }
}

fn open() -> Option<OpenedDriver> {
    let opened = open_driver(&DriverOptions { choice: BackendChoice::Uring, ..DriverOptions::default() });
    opened.map_err(|error| eprintln!("SKIPPED: {error}")).ok()
}

/// Hosts a ring client that reads, and returns the other end of its socket.
fn reading(opened: &OpenedDriver) -> (UnixStream, Arc<ReaderStatus>) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_nonblocking(true).expect("a socket");
    let (ours, seen) = (Arc::new(ours), Arc::new(ReaderStatus::default()));
    seen.awaits.store(true, Ordering::Release);
    let client = ReadingClient { device: ours.clone(), socket: Some(ours), seen: Arc::clone(&seen) };
    opened.ring_handle.host(Box::new(client)).expect("a ring");
    (theirs, seen)
}

/// Opens a driver with such a ring client; if `busy`, something else is in its ring, too.
fn open_reading(busy: bool) -> Option<(OpenedDriver, UnixStream, Arc<ReaderStatus>)> {
    let opened = open()?;
    let (theirs, seen) = reading(&opened);
    if busy {
        opened.ring_handle.host(Box::new(BusyClient(never(), false))).expect("a ring");
    }
    Some((opened, theirs, seen))
}

fn never() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"))
}

/// Sends one byte at a time, with short and long pauses, to a driver that sleeps or busy-polls,
/// with an empty or a busy ring.
#[test]
fn what_can_be_read_is_told_whatever_the_driver_does() {
    for is_busy in [false, true] {
        let Some((mut opened, mut theirs, seen)) = open_reading(is_busy) else { return };
        let bell = opened.bell.clone();
        let sender = thread::spawn({
            let seen = Arc::clone(&seen);
            move || {
                let came = (1..=300).all(|count| {
                    if count % 10 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                    theirs.write_all(&[1]).expect("it reads");
                    within(Duration::from_secs(100), || seen.bytes.load(Ordering::Acquire) == count)
                });
                bell.ring();
                came
            }
        });
        let until = Time(opened.driver.now().0 + 120_000_000_000);
        opened.driver.wait(Some(until), &mut Vec::new());
        assert!(sender.join().expect("no panic"), "with something in the ring: {is_busy}");
    }
}

#[test]
fn a_driver_that_may_not_wait_tells_all_the_same_and_as_long_as_there_is_something() {
    for is_busy in [false, true] {
        let Some((mut opened, mut theirs, seen)) = open_reading(is_busy) else { return };
        turn(&mut *opened.driver);
        theirs.write_all(&[1; 3]).expect("it reads");
        turn(&mut *opened.driver);
        turn(&mut *opened.driver);
        assert_eq!(seen.bytes.load(Ordering::Acquire), 3, "with something in the ring: {is_busy}");
    }
}

/// Each of its turns ends because other work has arrived.
#[test]
fn a_driver_that_always_has_something_to_do_looks_all_the_same() {
    for is_busy in [false, true] {
        let Some((mut opened, mut theirs, seen)) = open_reading(is_busy) else { return };
        opened.ring_handle.host(Box::new(RingingClient(never(), opened.bell.clone()))).expect("a ring");
        for count in 1..=5 {
            theirs.write_all(&[1]).expect("it reads");
            for _ in 0..20 {
                let mut events: Vec<Event> = Vec::new();
                let until = Time(opened.driver.now().0 + 120_000_000_000);
                opened.driver.wait(Some(until), &mut events);
                assert!(!events.is_empty(), "there is a bell in each");
            }
            assert_eq!(seen.bytes.load(Ordering::Acquire), count, "with something in the ring: {is_busy}");
        }
    }
}

#[test]
fn who_does_not_wait_is_not_told_until_it_does() {
    let Some((mut opened, mut theirs, seen)) = open_reading(false) else { return };
    turn(&mut *opened.driver);
    seen.awaits.store(false, Ordering::Release);
    turn(&mut *opened.driver);
    theirs.write_all(&[1]).expect("there is room");
    turn(&mut *opened.driver);
    assert_eq!(seen.bytes.load(Ordering::Acquire), 0);
    seen.awaits.store(true, Ordering::Release);
    turn(&mut *opened.driver);
    assert_eq!(seen.bytes.load(Ordering::Acquire), 1);
}

/// Its number may be reused for the next ring client: input for that number is then the new ring
/// client's.
#[test]
fn nothing_is_told_of_who_has_gone() {
    let Some(mut opened) = open() else { return };
    let (mut first, gone) = reading(&opened);
    turn(&mut *opened.driver);
    gone.is_over.store(true, Ordering::Release);
    turn(&mut *opened.driver);
    let (mut second, seen) = reading(&opened);
    turn(&mut *opened.driver);
    assert!(first.write_all(&[1]).is_err(), "nobody has its socket any more");
    second.write_all(&[1]).expect("it reads");
    turn(&mut *opened.driver);
    assert_eq!((gone.bytes.load(Ordering::Acquire), seen.bytes.load(Ordering::Acquire)), (0, 1));
}

/// A file is always readable, and `epoll` does not accept one.
#[test]
fn who_cannot_be_told_is_told_that() {
    let Some(mut opened) = open() else { return };
    let file: File = tempfile::tempfile().expect("a file");
    let seen = Arc::new(ReaderStatus::default());
    seen.awaits.store(true, Ordering::Release);
    let client = ReadingClient { device: Arc::new(file), socket: None, seen: Arc::clone(&seen) };
    opened.ring_handle.host(Box::new(client)).expect("a ring");
    turn(&mut *opened.driver);
    assert!(seen.is_refused.load(Ordering::Acquire));
}
