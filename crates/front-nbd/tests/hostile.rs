//! Clients that break off, stall, flood and lie, and a server that stops. Everything stays bounded,
//! all other clients are served, and nothing half received is written.

mod support;

use bcached_front_nbd::proto::wire::command;
use bcached_front_nbd::{Limits, ShutdownTimeout};
use bcached_port::Operation;
use bcached_port::ram::Verdict;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use support::{LIMIT, TANK, TestClient, TestServer, request, serve, serve_with, wait_until};

const SHORT: Duration = Duration::from_millis(60);
/// Enough for an honest client to do its part of a handshake, even on a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(2);

fn entered(served: &TestServer) -> TestClient {
    let mut client = served.unix();
    client.enter("tank");
    client
}

fn serve_all(limits: Limits) -> TestServer {
    serve_with(limits, Box::new(|_, _| Verdict::Serve))
}

#[test]
fn a_handshake_has_a_deadline() {
    let served = serve_all(Limits { handshake: HANDSHAKE, ..Limits::default() });
    let mut silent = served.unix();
    let mut halfway = served.unix();
    halfway.greet(3).send(b"IHAVEOPT\0\0");
    let mut waiting = served.tcp();
    waiting.greet(3);
    silent.receive(18);
    for client in [&mut silent, &mut halfway, &mut waiting] {
        client.assert_closed();
    }
}

/// The client always sends the next question before the last is answered, so that the server never
/// waits for it.
#[test]
fn questions_without_end_have_a_deadline_too() {
    let served = serve_all(Limits { handshake: HANDSHAKE, ..Limits::default() });
    let mut talker = served.unix();
    talker.greet(3);
    let listener = talker.read_elsewhere();
    let question = [&b"IHAVEOPT"[..], &[0, 0, 0, 99, 0, 0, 0, 0]].concat();
    let questions = question.repeat(1000);
    wait_until("the talker to be cut off", || talker.try_send(&questions).is_err());
    drop(talker);
    listener.join().expect("the listener saw the end");
}

#[test]
fn idle_connections_stay() {
    let served = serve_all(Limits { handshake: HANDSHAKE, stall: SHORT, ..Limits::default() });
    let mut client = entered(&served);
    thread::sleep(HANDSHAKE + 4 * SHORT);
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn a_payload_that_stops_halfway_ends_the_connection_and_is_not_written() {
    let served = serve_all(Limits { stall: SHORT, ..Limits::default() });
    for sent in [0, 100, 40_000, 65_535] {
        let mut client = entered(&served);
        client.request(command::WRITE, 0, 1, 0, 65_536);
        client.send(&vec![0xee; sent]);
        client.assert_closed();
    }
    let mut client = entered(&served);
    client.send(&request(command::READ, 0, 1, 0, 512)[..20]);
    client.assert_closed();
    assert_eq!(served.ram.content(TANK, 0, 128), [0; 65_536]);
}

/// A payload that trickles in is ended by a deadline. (It used to hold its bytes of the budget for
/// as long as the client liked, since each drop was progress.)
#[test]
fn a_payload_that_trickles_has_a_deadline() {
    let served = serve_all(Limits { stall: Duration::from_secs(1), ..Limits::default() });
    let mut client = entered(&served);
    client.request(command::WRITE, 0, 1, 0, 1 << 20);
    let started = Instant::now();
    while client.try_send(&[0xee]).is_ok() {
        assert!(started.elapsed() < LIMIT, "it is still served");
        thread::sleep(Duration::from_millis(5));
    }
    served.wait_for_clients(0);
    assert_eq!(served.ram.content(TANK, 0, 128), [0; 65_536]);
}

#[test]
fn a_break_in_a_payload_loses_only_that_write() {
    let served = serve();
    for sent in [0, 100, 40_000, 65_535] {
        let mut client = entered(&served);
        client.write(0, 1, 1 << 20, &vec![0x11; 65_536]);
        client.request(command::WRITE, 0, 2, 0, 65_536);
        client.send(&vec![0xee; sent]);
        drop(client);
    }
    served.wait_for_clients(0);
    assert_eq!(served.ram.content(TANK, 0, 128), [0; 65_536]);
    assert_eq!(served.ram.content(TANK, 2048, 128), [0x11; 65_536], "what came whole was carried out");
}

#[test]
fn writes_in_flight_are_carried_out_when_their_client_vanishes() {
    let hook = |_, operation: &Operation| match operation {
        Operation::Write { .. } => Verdict::Hold,
        _ => Verdict::Serve,
    };
    let served = serve_with(Limits::default(), Box::new(hook));
    let mut client = entered(&served);
    for cookie in 0..32 {
        client.write(0, cookie, cookie * 512, &[0x5a; 512]);
    }
    drop(client);
    wait_until("the writes to be done", || {
        served.ram.release();
        served.server().clients().is_empty()
    });
    assert_eq!(served.ram.content(TANK, 0, 32), [0x5a; 32 * 512]);
}

#[test]
fn garbage_ends_the_connection_after_what_came_before_it() {
    let served = serve();
    let mut client = entered(&served);
    let mut bytes = request(command::FLUSH, 0, 1, 0, 0);
    bytes.extend_from_slice(&[0xff; 28]);
    client.send(&bytes);
    assert_eq!(client.result(), (0, 1));
    client.assert_closed();
    assert_eq!(entered(&served).read(0, 512), [0; 512]);
}

/// A client that asks for two hundred megabytes and reads none of them is limited to its own
/// budget.
#[test]
fn a_client_that_does_not_read_fills_its_own_budget_only() {
    const ASKED: usize = 200;
    let reads = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&reads);
    let hook = move |_, operation: &Operation| {
        if matches!(operation, Operation::Read { buffer, .. } if buffer.len() == 1 << 20) {
            counts.fetch_add(1, Ordering::SeqCst);
        }
        Verdict::Serve
    };
    let served =
        serve_with(Limits { requests: 256, total_bytes: 256 << 20, ..Limits::default() }, Box::new(hook));
    let mut flooding = entered(&served);
    for cookie in 0..ASKED {
        flooding.request(command::READ, 0, cookie as u64, 0, 1 << 20);
    }
    wait_until("the budget to fill", || reads.load(Ordering::SeqCst) >= 32);
    thread::sleep(SHORT);
    // 32 MiB in memory, and what the kernel's socket buffers took.
    let begun = reads.load(Ordering::SeqCst);
    assert!(begun <= 40, "{begun} MiB were read for a client that takes none");
    assert_eq!(entered(&served).read(0, 4 << 20).len(), 4 << 20, "others are served");
    for _ in 0..ASKED {
        assert_eq!(flooding.chunk().payload.len(), 8 + (1 << 20));
    }
}

/// A client that reads nothing, like a stopped virtual machine, may hold all the memory for a
/// minute. Others are served meanwhile.
#[test]
fn clients_that_never_read_do_not_stop_the_others() {
    let served = serve_all(Limits { total_bytes: 32 << 20, ..Limits::default() });
    let mut flooding = [entered(&served), entered(&served)];
    for client in &mut flooding {
        for cookie in 0..64 {
            client.request(command::READ, 0, cookie, 0, 1 << 20);
        }
    }
    let mut other = entered(&served);
    for _ in 0..200 {
        assert_eq!(other.read(0, 4096).len(), 4096);
    }
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    let limits = Limits { stall: SHORT, total_bytes: 32 << 20, ..Limits::default() };
    let served = serve_all(limits);
    let mut flooding = entered(&served);
    for cookie in 0..64 {
        flooding.request(command::READ, 0, cookie, 0, 1 << 20);
    }
    served.wait_for_clients(0);
    assert_eq!(entered(&served).read(0, 32 << 20).len(), 32 << 20, "all of the budget is free again");
}

#[test]
fn too_many_connections_are_turned_away() {
    let served = serve_all(Limits { connections: 2, ..Limits::default() });
    let mut first = entered(&served);
    let second = entered(&served);
    // Every client that has been told that it entered is registered.
    assert!(served.server().clients().iter().all(|client| client.export.is_some()));
    served.unix().assert_closed();
    served.tcp().assert_closed();
    assert_eq!(first.read(0, 512), [0; 512]);
    drop(second);
    served.wait_for_clients(1);
    assert_eq!(entered(&served).read(0, 512), [0; 512]);
}

/// Silent connections hold every place, and a client that chooses a volume is served immediately.
#[test]
fn connections_without_an_export_keep_nobody_out() {
    let served = serve_all(Limits { connections: 2, ..Limits::default() });
    let (mut idle, mut patient) = (served.unix(), served.tcp());
    idle.greet(0);
    patient.greet(0);
    let mut client = entered(&served);
    assert_eq!(client.read(0, 512), [0; 512]);
    idle.assert_closed();
    let mut other = entered(&served);
    patient.assert_closed();
    served.unix().assert_closed();
    assert_eq!((client.read(0, 512), other.read(0, 512)), (vec![0; 512], vec![0; 512]));
}

#[test]
fn an_engine_that_goes_away_leaves_errors() {
    let served = serve();
    let mut client = entered(&served);
    let other = bcached_port::ram::RamServer::start(&[]);
    // The volume is unknown to this engine, and then the engine itself is gone.
    let mut moved = support::tank(&served.ram);
    moved.served = Some(bcached_port::Route::new(TANK, &other.connector()));
    served.exports.insert(moved);
    let mut late = entered(&served);
    for _ in 0..2 {
        late.request(command::FLUSH, 0, 1, 0, 0);
        assert_eq!(late.result(), (108, 1), "ESHUTDOWN");
    }
    drop(other);
    late.write(0, 2, 0, &[1; 512]);
    assert_eq!(late.result(), (108, 2));
    assert_eq!(client.read(0, 512), [0; 512], "the other engine serves on");
}

#[test]
fn a_stop_answers_what_was_asked_and_says_who_is_left() {
    let held = Arc::new(AtomicUsize::new(0));
    let holds = Arc::clone(&held);
    let hook = move |_, operation: &Operation| match operation {
        Operation::Write { .. } => {
            holds.fetch_add(1, Ordering::SeqCst);
            Verdict::Hold
        }
        _ => Verdict::Serve,
    };
    let mut served = serve_with(Limits::default(), Box::new(hook));
    let (mut busy, mut idle, mut undecided) = (entered(&served), entered(&served), served.tcp());
    undecided.receive(18);
    busy.write(0, 1, 0, &[9; 512]);
    busy.write(0, 2, 512, &[9; 512]);
    wait_until("both writes to be with the engine", || held.load(Ordering::SeqCst) == 2);

    let server = served.server.take().expect("runs");
    assert_eq!(
        server.shutdown(SHORT),
        Err(ShutdownTimeout { connections: 1 }),
        "the engine owes one its replies"
    );
    assert!(!served.path.exists());
    idle.assert_closed();
    undecided.assert_closed();
    served.ram.release();
    wait_until("the writes to be done", || served.ram.content(TANK, 0, 2) == [9; 1024]);
}

#[test]
fn a_stop_waits_for_replies_that_come_in_time() {
    let held = Arc::new(AtomicUsize::new(0));
    let holds = Arc::clone(&held);
    let hook = move |_, _: &Operation| {
        holds.fetch_add(1, Ordering::SeqCst);
        Verdict::Hold
    };
    let mut served = serve_with(Limits::default(), Box::new(hook));
    let (mut client, mut idle) = (entered(&served), entered(&served));
    client.write(0, 1, 0, &[9; 512]);
    wait_until("the write to be with the engine", || held.load(Ordering::SeqCst) == 1);
    let server = served.server.take().expect("runs");
    let stopping = thread::spawn(move || server.shutdown(2 * LIMIT));
    idle.assert_closed();
    assert!(!stopping.is_finished(), "one reply is still due");
    served.ram.release();
    assert_eq!(stopping.join().expect("no panic"), Ok(()));
    assert_eq!(client.result(), (0, 1));
    client.assert_closed();
}
