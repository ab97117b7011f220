//! The port's promises, against servers driven by hand and by threads.

use bcached_port::ram::{RamServer, Verdict};
use bcached_port::{Buffer, ErrorKind, Operation, Payload, Reply, VolumeId, open};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const VOLUME: VolumeId = VolumeId(7);
/// Nothing here takes a second; a longer wait is a hang.
const LIMIT: Duration = Duration::from_secs(120);

/// A bell that counts.
fn counter() -> (Arc<AtomicU64>, bcached_port::Bell) {
    let rings = Arc::new(AtomicU64::new(0));
    let ringer = Arc::clone(&rings);
    let bell = move || {
        ringer.fetch_add(1, Ordering::SeqCst);
    };
    (rings, Arc::new(bell))
}

/// Runs `body` on a thread and fails instead of hanging.
fn within_limit<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || done.send(body()).is_ok());
    let result = wait.recv_timeout(LIMIT).expect("ends in time and without a panic");
    assert!(thread.join().expect("no panic after the end"));
    result
}

#[test]
fn the_bell_rings_when_the_inbox_begins_to_fill() {
    let (rings, bell) = counter();
    let (connector, mut server) = open(8, bell);
    let (requests, _replies) = connector.connect::<u32>(8);
    requests.submit(1, VOLUME, Operation::Flush);
    requests.submit(2, VOLUME, Operation::Flush);
    assert_eq!(rings.load(Ordering::SeqCst), 1, "the second finds the first still there");
    drop(server.take().expect("two are there"));
    drop(server.take().expect("one is there"));
    assert!(server.take().is_none());
    requests.submit(3, VOLUME, Operation::Flush);
    assert_eq!(rings.load(Ordering::SeqCst), 2, "the engine had emptied it and may sleep");
}

#[test]
fn replies_bring_back_context_and_memory_in_the_order_of_answering() {
    let (connector, mut server) = open(8, Arc::new(|| {}));
    let (requests, mut replies) = connector.connect::<&str>(8);
    requests.submit("first", VOLUME, Operation::Read { sector: 3, buffer: Buffer::zeroed(512) });
    requests.submit("second", VOLUME, Operation::Flush);
    let read = server.take().expect("was submitted");
    let flush = server.take().expect("was submitted");
    flush.reply_to.send(Reply::failed(ErrorKind::Io, None));
    let Operation::Read { sector: 3, buffer } = read.operation else { panic!("{:?}", read.operation) };
    read.reply_to.send(Reply::content(buffer));
    let (context, reply) = replies.next().expect("two are due");
    assert_eq!((context, reply.result), ("second", Err(ErrorKind::Io)));
    let (context, reply) = replies.next().expect("one is due");
    assert_eq!((context, reply.result), ("first", Ok(())));
    assert_eq!(reply.buffer.map(|buffer| buffer.len()), Some(512));
}

#[test]
fn a_full_window_and_a_full_inbox_hold_the_submitter_back() {
    let (connector, mut server) = open(2, Arc::new(|| {}));
    let (narrow, mut replies) = connector.connect::<u32>(1);
    let (wide, _wide_replies) = connector.connect::<u32>(8);
    narrow.try_submit(1, VOLUME, Operation::Flush).expect("room");
    let full = narrow.try_submit(2, VOLUME, Operation::Flush).expect_err("its window is one");
    assert_eq!(full.context, 2);
    wide.try_submit(3, VOLUME, Operation::Flush).expect("room");
    let full = wide.try_submit(4, VOLUME, Operation::Flush).expect_err("two are in the inbox");
    assert_eq!(full.context, 4);
    assert_eq!(wide.outstanding(), 1, "what found no room is not counted");

    server.take().expect("the first").reply_to.send(Reply::done());
    wide.try_submit(4, VOLUME, Operation::Flush).expect("the engine took a batch");
    narrow.try_submit(5, VOLUME, Operation::Flush).expect_err("answered, but the reply was not taken");
    assert_eq!(replies.try_next().map(|(context, _)| context), Some(1));
    narrow.try_submit(5, VOLUME, Operation::Flush).expect("its window is free again");
}

#[test]
fn a_waiting_submitter_is_woken_by_either_room() {
    within_limit(|| {
        let (connector, mut server) = open(1, Arc::new(|| {}));
        let (requests, mut replies) = connector.connect::<u32>(2);
        let submitter =
            thread::spawn(move || (0..50).for_each(|n| requests.submit(n, VOLUME, Operation::Flush)));
        let mut answered = Vec::new();
        while answered.len() < 50 {
            if let Some(request) = server.take() {
                request.reply_to.send(Reply::done());
            }
            answered.extend(replies.try_next().map(|(context, _)| context));
            thread::yield_now();
        }
        assert_eq!(answered, (0..50).collect::<Vec<_>>());
        submitter.join().expect("no panic");
    });
}

#[test]
fn a_server_that_goes_away_answers_everything() {
    within_limit(|| {
        let (connector, mut server) = open(4, Arc::new(|| {}));
        let (requests, mut replies) = connector.connect::<u32>(16);
        for n in 0..4 {
            requests.submit(n, VOLUME, Operation::Flush);
        }
        let taken = server.take().expect("was submitted");
        requests.submit(4, VOLUME, Operation::Flush);
        let blocked = thread::spawn(move || {
            // Fills the inbox and then waits for room that the server never makes.
            (5..12).for_each(|n| requests.submit(n, VOLUME, Operation::Flush));
            requests
        });
        drop(server);
        drop(taken);
        let requests = blocked.join().expect("woken");
        requests.submit(12, VOLUME, Operation::Flush);
        drop(requests);
        let mut gone = Vec::new();
        while let Some((context, reply)) = replies.next() {
            assert_eq!(reply.result, Err(ErrorKind::Gone));
            gone.push(context);
        }
        gone.sort_unstable();
        assert_eq!(gone, (0..13).collect::<Vec<_>>());
        assert!(connector.is_closed());
    });
}

#[test]
fn a_closed_server_finishes_what_is_in_and_refuses_the_rest() {
    let (connector, mut server) = open(4, Arc::new(|| {}));
    let (requests, mut replies) = connector.connect::<u32>(4);
    requests.submit(1, VOLUME, Operation::Flush);
    server.close();
    requests.submit(2, VOLUME, Operation::Flush);
    server.take().expect("came before the close").reply_to.send(Reply::done());
    assert!(server.take().is_none());
    let mut results: Vec<_> =
        std::iter::from_fn(|| replies.try_next()).map(|(n, reply)| (n, reply.result)).collect();
    results.sort_by_key(|(n, _)| *n);
    assert_eq!(results, [(1, Ok(())), (2, Err(ErrorKind::Gone))]);
}

#[test]
fn a_client_that_goes_away_has_its_requests_carried_out() {
    let ram = RamServer::start_with(&[(VOLUME, 64)], 8, Box::new(|_, _| Verdict::Hold));
    let (requests, replies) = ram.connector().connect::<Arc<()>>(8);
    let witness = Arc::new(());
    for n in 0..4u8 {
        let payload = Payload::from(Buffer::copied_from(&[n + 1; 512]));
        let operation = Operation::Write { sector: u64::from(n), payload, fua: false };
        requests.submit(Arc::clone(&witness), VOLUME, operation);
    }
    drop(replies);
    drop(requests);
    within_limit(move || {
        // What was attached to a request is dropped with its reply: then the write is done.
        while Arc::strong_count(&witness) > 1 {
            ram.release();
            thread::yield_now();
        }
        for n in 0..4u8 {
            assert_eq!(ram.content(VOLUME, u64::from(n), 1), [n + 1; 512]);
        }
    });
}

#[test]
fn a_receiver_with_a_bell_misses_no_reply() {
    let ram = RamServer::start(&[(VOLUME, 64)]);
    let (ring, rung) = mpsc::channel();
    let bell: bcached_port::Bell = Arc::new(move || {
        // The test may have ended, with no receiver left.
        let _: Result<(), _> = ring.send(());
    });
    let (requests, mut replies) = ram.connector().connect_with_bell::<u32>(4, bell);
    let submitter =
        thread::spawn(move || (0..1000).for_each(|n| requests.submit(n, VOLUME, Operation::Flush)));
    let mut taken = 0;
    while taken < 1000 {
        rung.recv_timeout(LIMIT).expect("a reply rings if there was none before");
        while replies.try_next().is_some() {
            taken += 1;
        }
    }
    submitter.join().expect("no panic");
}

/// An engine that treats clients according to their earlier requests must not confuse two of them.
#[test]
fn every_client_has_a_number_of_its_own() {
    let (connector, mut server) = open(8, Arc::new(|| {}));
    let (one, _one) = connector.connect::<()>(4);
    let (other, _other) = connector.connect::<()>(4);
    for requests in [&one, &other, &one] {
        requests.submit((), VOLUME, Operation::Flush);
    }
    let clients: Vec<_> = std::iter::from_fn(|| server.take()).map(|request| request.client).collect();
    assert!(clients[0] != clients[1] && clients[0] == clients[2], "{clients:?}");
}

/// Eight clients with small windows, one small inbox, an engine that sleeps until its bell: every
/// wait of the port happens thousands of times. A lost wake-up hangs this, and the limit reports
/// it.
#[test]
fn stress_loses_no_request_no_reply_and_no_wake_up() {
    const CLIENTS: u64 = 8;
    const EACH: u64 = 5_000;
    within_limit(|| {
        let ram = RamServer::start_with(&[(VOLUME, CLIENTS * 8)], 3, Box::new(|_, _| Verdict::Serve));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let connector = ram.connector();
                thread::spawn(move || one_client(&connector, client, EACH))
            })
            .collect();
        for client in clients {
            client.join().expect("every request was answered right");
        }
    });
}

/// Writes and reads back sectors of its own, with one thread for each half.
fn one_client(connector: &bcached_port::Connector, client: u64, each: u64) {
    let window = 1 + usize::try_from(client).expect("small") % 4;
    let (requests, mut replies) = connector.connect::<u64>(window);
    let taker = thread::spawn(move || {
        let (mut sum, mut batch) = (0, VecDeque::new());
        while replies.next_batch(&mut batch) {
            for (context, reply) in batch.drain(..) {
                assert_eq!(reply.result, Ok(()));
                if let Some(buffer) = reply.buffer {
                    assert!(
                        buffer.as_slice().iter().all(|byte| *byte == buffer.as_slice()[0]),
                        "whole writes"
                    );
                }
                sum += context;
            }
        }
        sum
    });
    for n in 0..each {
        let sector = client * 8 + n % 8;
        let operation = if n % 2 == 0 {
            let fill = u8::try_from(n % 251).expect("below 251");
            Operation::Write { sector, payload: Buffer::copied_from(&[fill; 512]).freeze(), fua: false }
        } else {
            Operation::Read { sector, buffer: Buffer::zeroed(512) }
        };
        requests.submit(n, VOLUME, operation);
    }
    drop(requests);
    assert_eq!(taker.join().expect("the taker is content"), each * (each - 1) / 2);
}

/// The engine's thread panics in the middle of its work: clients get errors and none hangs.
#[test]
fn an_engine_that_panics_leaves_errors_not_silence() {
    within_limit(|| {
        let dying = AtomicBool::new(false);
        let hook = Box::new(move |_, _: &Operation| {
            // Once only; unwinding drops the server and what it holds.
            assert!(dying.swap(true, Ordering::SeqCst), "the engine's bug, on purpose");
            Verdict::Serve
        });
        let ram = RamServer::start_with(&[(VOLUME, 8)], 8, hook);
        let (requests, mut replies) = ram.connector().connect::<u32>(4);
        for n in 0..3 {
            requests.submit(n, VOLUME, Operation::Flush);
        }
        drop(requests);
        let results: Vec<_> = std::iter::from_fn(|| replies.next()).map(|(_, reply)| reply.result).collect();
        assert_eq!(results, [Err(ErrorKind::Gone); 3]);
    });
}

#[test]
fn memory_serves_every_operation() {
    within_limit(every_operation);
}

fn every_operation() {
    let ram = RamServer::start(&[(VOLUME, 64)]);
    let (requests, mut replies) = ram.connector().connect::<()>(1);
    let mut ask = |operation| {
        requests.submit((), VOLUME, operation);
        replies.next().expect("one is due").1
    };
    let payload = Buffer::copied_from(&[9; 4096]).freeze();
    assert_eq!(ask(Operation::Write { sector: 8, payload: payload.clone(), fua: true }).result, Ok(()));
    assert_eq!(
        ask(Operation::WriteZeroes { sector: 8, sectors: 2, fua: false, may_discard: false }).result,
        Ok(())
    );
    assert_eq!(ask(Operation::Discard { sector: 14, sectors: 2, fua: false }).result, Ok(()));
    let status = ask(Operation::BlockStatus { sector: 0, sectors: 16, extents_max: 10 }).extents;
    let runs: Vec<_> = status.iter().map(|extent| (extent.sectors, extent.hole)).collect();
    assert_eq!(runs, [(8, true), (6, false), (2, true)]);
    let content = ask(Operation::Read { sector: 9, buffer: Buffer::zeroed(1024) });
    let content = content.buffer.expect("comes back");
    assert_eq!(content.as_slice()[..512], [0; 512]);
    assert_eq!(content.as_slice()[512..], [9; 512]);
    assert_eq!(ask(Operation::Write { sector: 57, payload, fua: false }).result, Err(ErrorKind::Invalid));
    let beyond = Operation::Discard { sector: u64::MAX, sectors: 2, fua: false };
    assert_eq!(ask(beyond).result, Err(ErrorKind::Invalid));
    requests.submit((), VolumeId(8), Operation::Flush);
    assert_eq!(replies.next().expect("one is due").1.result, Err(ErrorKind::Gone));
}
