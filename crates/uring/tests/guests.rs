//! The life of a client of a ring, as the client sees it.

mod common;

use bcached_env::{Driver, Time};
use bcached_uring::{BackendChoice, Bell, Command, DriverOptions, OpenedDriver, RingClient, open_driver};
use common::{turn, within};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Waits for an eventfd again and again.
struct WaitingClient {
    eventfd: Arc<OwnedFd>,
    /// It has a dedicated ring.
    ends_at_rest: bool,
    seen: Arc<ClientStatus>,
    is_waiting: bool,
}

/// What is visible of it from outside.
#[derive(Default)]
struct ClientStatus {
    is_waiting: AtomicBool,
    ended: AtomicUsize,
    is_over: AtomicBool,
    /// How many waits had ended when it was dropped.
    at_the_end: Mutex<Option<usize>>,
}

fn ring(eventfd: &OwnedFd) {
    rustix::io::write(eventfd, &1_u64.to_ne_bytes()).expect("an eventfd");
}

impl RingClient for WaitingClient {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.eventfd.clone()
    }

    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool) {
        if !self.is_waiting && !self.is_over() {
            self.is_waiting = push(Command::Readable { tag: 7 });
            self.seen.is_waiting.store(self.is_waiting, Ordering::Release);
        }
    }

    fn completed(&mut self, tag: u16, result: i32) {
        assert!(tag == 7 && result > 0, "{tag}: {result}");
        rustix::io::read(&self.eventfd, &mut [0; 8]).expect("rung");
        self.is_waiting = false;
        self.seen.ended.fetch_add(1, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        self.seen.is_over.load(Ordering::Acquire)
    }

    fn ends_at_rest(&self) -> Option<u16> {
        self.ends_at_rest.then_some(1)
    }

    fn leaves_first(&self) -> bool {
        // Only called when the ring is about to end: what arrives now is in flight during that.
        ring(&self.eventfd);
        false
    }
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        *self.seen.at_the_end.lock().expect("no panic") = Some(self.seen.ended.load(Ordering::Acquire));
    }
}

/// A driver with one ring client.
struct DriverWithClient {
    driver: Box<dyn Driver>,
    seen: Arc<ClientStatus>,
    eventfd: Arc<OwnedFd>,
    bell: Bell,
}

/// Opens a driver with one ring client whose command is in the kernel; `None`: `io_uring` is
/// unavailable here.
fn with_one(ends_at_rest: bool) -> Option<DriverWithClient> {
    let options = DriverOptions { choice: BackendChoice::Uring, ..DriverOptions::default() };
    let Ok(OpenedDriver { mut driver, ring_handle, bell, .. }) = open_driver(&options) else {
        eprintln!("SKIPPED: no io_uring here");
        return None;
    };
    let seen = Arc::new(ClientStatus::default());
    let eventfd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
    let client = WaitingClient {
        eventfd: Arc::clone(&eventfd),
        ends_at_rest,
        seen: Arc::clone(&seen),
        is_waiting: false,
    };
    ring_handle.host(Box::new(client)).expect("a ring");
    turn(&mut *driver);
    assert!(seen.is_waiting.load(Ordering::Acquire) && seen.ended.load(Ordering::Acquire) == 0);
    Some(DriverWithClient { driver, seen, eventfd, bell })
}

fn at_the_end(seen: &ClientStatus) -> Option<usize> {
    *seen.at_the_end.lock().expect("no panic")
}

#[test]
fn what_is_on_its_way_to_a_guest_that_needs_rest_comes_before_the_ring_ends() {
    let Some(DriverWithClient { driver, seen, .. }) = with_one(true) else { return };
    drop(driver);
    assert_eq!(at_the_end(&seen), Some(1));
}

#[test]
fn no_ring_waits_for_other_guests() {
    let Some(DriverWithClient { driver, seen, .. }) = with_one(false) else { return };
    drop(driver);
    assert_eq!(at_the_end(&seen), Some(0));
}

#[test]
fn what_comes_to_a_guest_wakes_a_driver_that_sleeps() {
    for ends_at_rest in [false, true] {
        let Some(DriverWithClient { mut driver, seen, eventfd, bell }) = with_one(ends_at_rest) else {
            return;
        };
        let ringer = thread::spawn({
            let (seen, eventfd) = (Arc::clone(&seen), Arc::clone(&eventfd));
            move || {
                let came = (1..=20).all(|round| {
                    thread::sleep(Duration::from_millis(2));
                    ring(&eventfd);
                    within(Duration::from_secs(100), || seen.ended.load(Ordering::Acquire) == round)
                });
                bell.ring();
                came
            }
        });
        let until = Time(driver.now().0 + 120_000_000_000);
        driver.wait(Some(until), &mut Vec::new());
        assert!(ringer.join().expect("no panic"), "with a ring of its own: {ends_at_rest}");
    }
}

#[test]
fn a_guest_with_a_ring_of_its_own_goes_when_it_is_over() {
    let Some(DriverWithClient { mut driver, seen, eventfd, .. }) = with_one(true) else { return };
    seen.is_over.store(true, Ordering::Release);
    turn(&mut *driver);
    assert_eq!(at_the_end(&seen), None, "its command is with the kernel");
    ring(&eventfd);
    turn(&mut *driver);
    assert_eq!(at_the_end(&seen), Some(1));
}
