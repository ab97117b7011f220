//! Clients that hold memory and make no progress: they read no replies, or read them in drops, or
//! announce payloads that do not arrive. Small requests of all other clients continue immediately,
//! and large ones once a stuck client has been disconnected.

mod support;

use bcached_front_nbd::Limits;
use bcached_front_nbd::proto::wire::command;
use bcached_port::Operation;
use bcached_port::ram::Verdict;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use support::{LIMIT, TestClient, TestServer, serve_with, wait_until};

const SHORT: Duration = Duration::from_millis(60);
const MIB: u32 = 1 << 20;
const LARGEST: u32 = 32 * MIB;

fn entered(served: &TestServer) -> TestClient {
    let mut client = served.unix();
    client.enter("tank");
    client
}

/// Serves with the memory that the daemon grants by default, and counts the MiB that were read.
fn serve_counting(limits: Limits) -> (TestServer, Arc<AtomicUsize>) {
    let read = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&read);
    let hook = move |_, operation: &Operation| {
        if let Operation::Read { buffer, .. } = operation {
            counts.fetch_add(buffer.len() >> 20, Ordering::SeqCst);
        }
        Verdict::Serve
    };
    (serve_with(Limits { total_bytes: 64 << 20, ..limits }, Box::new(hook)), read)
}

/// Two clients that ask for the largest replies and so hold all the memory there is.
fn hold_everything(served: &TestServer, read: &AtomicUsize) -> [TestClient; 2] {
    let mut stuck = [entered(served), entered(served)];
    for client in &mut stuck {
        client.request(command::READ, 0, 1, 0, LARGEST);
    }
    wait_until("the memory to be full", || read.load(Ordering::SeqCst) == 64);
    stuck
}

/// Eight stopped virtual machines do not hold up the other clients. (These used to stand still
/// until the stuck ones were given up, a minute later.)
#[test]
fn many_clients_that_never_read_do_not_stop_the_others() {
    let (served, read) = serve_counting(Limits::default());
    let mut stuck: [TestClient; 8] = std::array::from_fn(|_| entered(&served));
    for client in &mut stuck {
        for cookie in 0..64 {
            client.request(command::READ, 0, cookie, 0, MIB);
        }
    }
    wait_until("the memory to fill", || read.load(Ordering::SeqCst) >= 32);
    let mut other = entered(&served);
    for size in [4096, 64 << 10, MIB, 2 * MIB] {
        for _ in 0..20 {
            assert_eq!(other.read(0, size).len(), size as usize);
        }
    }
    assert_eq!(served.server().clients().len(), 9, "and nobody had to go");
}

#[test]
fn small_requests_go_on_while_everything_is_held() {
    let (served, read) = serve_counting(Limits { give_way: 10 * LIMIT, ..Limits::default() });
    let mut stuck: [TestClient; 10] = std::array::from_fn(|_| entered(&served));
    for (bytes, clients, filled) in [(MIB, 0..8, 8), (LARGEST, 8..10, 40)] {
        for client in &mut stuck[clients] {
            client.request(command::READ, 0, 1, 0, bytes);
        }
        wait_until("the memory to fill", || read.load(Ordering::SeqCst) >= filled);
    }
    let mut small: [TestClient; 20] = std::array::from_fn(|_| entered(&served));
    for _ in 0..20 {
        for client in &mut small {
            assert_eq!(client.read(0, 64 << 10).len(), 64 << 10);
        }
    }
}

#[test]
fn who_takes_no_replies_goes_when_another_waits_for_its_memory() {
    let (served, read) = serve_counting(Limits { give_way: SHORT, ..Limits::default() });
    let mut stuck = hold_everything(&served, &read);
    thread::sleep(4 * SHORT);
    assert_eq!(served.server().clients().len(), 2, "nobody waits, nobody has to go");
    let mut other = entered(&served);
    assert_eq!(other.read(0, LARGEST).len(), LARGEST as usize);
    drop(other);
    // Replies sent before the disconnection still arrive.
    assert!(stuck.iter_mut().any(|client| {
        let mut rest = vec![0; LARGEST as usize];
        client.try_receive(&mut rest).is_err()
    }));
}

/// A client that reads a few bytes now and then is disconnected, too. (That used to count as
/// progress, and it kept all the memory indefinitely.)
#[test]
fn who_takes_replies_in_drops_goes_too() {
    let (served, read) = serve_counting(Limits { give_way: SHORT, ..Limits::default() });
    let stuck = hold_everything(&served, &read);
    let is_over = Arc::new(AtomicBool::new(false));
    let dripping = stuck.map(|mut client| {
        let is_over = Arc::clone(&is_over);
        thread::spawn(move || {
            let mut drop = [0; 512];
            while !is_over.load(Ordering::SeqCst) && client.try_receive(&mut drop).is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
        })
    });
    let mut other = entered(&served);
    assert_eq!(other.read(0, LARGEST).len(), LARGEST as usize);
    is_over.store(true, Ordering::SeqCst);
    for thread in dripping {
        thread.join().expect("it only reads");
    }
}

/// A client that holds memory for a payload that does not arrive is disconnected as well.
#[test]
fn who_sends_no_payload_goes_when_another_waits_for_its_memory() {
    let (served, _) = serve_counting(Limits { give_way: SHORT, ..Limits::default() });
    let mut stuck = [entered(&served), entered(&served)];
    for client in &mut stuck {
        client.request(command::WRITE, 0, 1, 0, LARGEST);
        client.send(&[0xee; 1000]);
    }
    let mut other = entered(&served);
    assert_eq!(other.read(0, LARGEST), vec![0; LARGEST as usize]);
    assert_eq!(other.read(0, LARGEST), vec![0; LARGEST as usize], "nothing half received is written");
}
