//! Volumes that move from one engine to another while clients use them.

use bcached_port::ram::{RamServer, Verdict};
use bcached_port::{Buffer, Operation, Payload, Route, VolumeId, open};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const HERE: VolumeId = VolumeId(3);
const THERE: VolumeId = VolumeId(5);
const LIMIT: Duration = Duration::from_secs(120);

/// Requests already in complete where they are; those that arrive while the route is held go where
/// it leads afterwards. Proves invariant D21.
#[test]
fn requests_wait_while_their_volume_moves() {
    let bell = || -> bcached_port::Bell { Arc::new(|| {}) };
    let (one, mut first) = open(8, bell());
    let (other, mut second) = open(8, bell());
    let route = Route::new(HERE, &one);
    let (requests, mut replies) = route.connect::<u32>(8);
    requests.submit_by(1, &route, Operation::Flush);

    let (idle, is_idle) = mpsc::channel();
    route.hold(move || idle.send(()).expect("somebody waits"));
    assert!(is_idle.try_recv().is_err(), "one is under way");
    let waiting = route.clone();
    let submitter = thread::spawn(move || {
        requests.submit_by(2, &waiting, Operation::Flush);
        requests
    });
    thread::sleep(Duration::from_millis(50));
    let request = first.take().expect("it was in before");
    assert!(first.take().is_none(), "the second waits");
    request.reply_to.send(bcached_port::Reply::done());
    is_idle.recv_timeout(LIMIT).expect("nothing is under way any more");
    assert_eq!(replies.next().map(|(n, _)| n), Some(1), "the answer was there first");

    route.lead(THERE, &other);
    let requests = submitter.join().expect("no panic");
    let request = second.take().expect("it went where the route leads");
    assert_eq!((request.volume, first.take().is_none()), (THERE, true));
    drop(request);
    drop(requests);
    assert!(!route.is_held() && route.leads_to(THERE, &other) && !route.leads_to(HERE, &one));
}

/// A holder that releases a route before it was idle is not notified of that any more.
#[test]
fn a_route_that_was_let_go_of_leads_where_it_did() {
    let (engine, mut server) = open(8, Arc::new(|| {}));
    let route = Route::new(HERE, &engine);
    let (requests, _replies) = route.connect::<()>(8);
    requests.submit_by((), &route, Operation::Flush);
    let called = Arc::new(AtomicBool::new(false));
    let sees = Arc::clone(&called);
    route.hold(move || sees.store(true, Ordering::SeqCst));
    route.release();
    requests.submit_by((), &route, Operation::Flush);
    assert_eq!(std::iter::from_fn(|| server.take()).count(), 2);
    assert!(!called.load(Ordering::SeqCst));
}

/// Writers continue while their volume moves back and forth a hundred times; each engine sees only
/// volumes that it has. Proves invariant D21.
#[test]
fn stress_no_request_meets_an_engine_that_does_not_have_its_volume() {
    let (here, there) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
    let engine = |volume, has: &Arc<AtomicBool>| {
        let has = Arc::clone(has);
        let hook = move |_, _: &Operation| {
            assert!(has.load(Ordering::SeqCst), "it does not have the volume");
            Verdict::Serve
        };
        RamServer::start_with(&[(volume, 64)], 3, Box::new(hook))
    };
    let (one, other) = (engine(HERE, &here), engine(THERE, &there));
    let route = Route::new(HERE, &one.connector());
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let route = route.clone();
            thread::spawn(move || {
                let (requests, mut replies) = route.connect::<u64>(4);
                let taker = thread::spawn(move || {
                    std::iter::from_fn(|| replies.next()).filter(|(_, reply)| reply.result.is_ok()).count()
                });
                for n in 0..3000 {
                    let payload: Payload = Buffer::zeroed(512).freeze();
                    requests.submit_by(n, &route, Operation::Write { sector: n % 64, payload, fua: false });
                }
                drop(requests);
                taker.join().expect("no panic")
            })
        })
        .collect();
    for turn in 0..100 {
        let (idle, is_idle) = mpsc::channel();
        route.hold(move || idle.send(()).expect("somebody waits"));
        is_idle.recv_timeout(LIMIT).expect("becomes idle");
        let goes = turn % 2 == 0;
        here.store(!goes, Ordering::SeqCst);
        there.store(goes, Ordering::SeqCst);
        if goes {
            route.lead(THERE, &other.connector());
        } else {
            route.lead(HERE, &one.connector());
        }
    }
    assert_eq!(writers.into_iter().map(|writer| writer.join().expect("no panic")).sum::<usize>(), 12_000);
}

/// A bell that sends a message.
fn bell() -> (bcached_port::Bell, mpsc::Receiver<()>) {
    let (rings, rung) = mpsc::channel();
    // The receiver may be gone.
    (
        Arc::new(move || {
            let _heard = rings.send(());
        }),
        rung,
    )
}

/// A client that must not sleep gets its request back while the route is held, is rung when it
/// opens, and has nothing in flight.
#[test]
fn who_does_not_wait_for_a_held_route_is_rung_when_it_opens() {
    let (engine, mut server) = open(8, Arc::new(|| {}));
    let route = Route::new(HERE, &engine);
    let (bell, rung) = bell();
    let (requests, mut replies) = route.connect_with_bell::<u32>(8, bell);
    route.hold(|| {});
    for _ in 0..3 {
        let full = requests.try_submit_by(1, &route, Operation::Flush).expect_err("it is held");
        assert_eq!(full.context, 1);
    }
    assert_eq!((requests.outstanding(), rung.try_recv().is_err()), (0, true));
    route.release();
    rung.recv_timeout(LIMIT).expect("it leads somewhere");
    assert!(rung.try_recv().is_err(), "once, however often it asked");
    requests.try_submit_by(1, &route, Operation::Flush).expect("room");
    let (idle, is_idle) = mpsc::channel();
    route.hold(move || idle.send(()).expect("somebody waits"));
    assert!(is_idle.try_recv().is_err(), "it is under way");
    server.take().expect("it is in").reply_to.send(bcached_port::Reply::done());
    is_idle.recv_timeout(LIMIT).expect("nothing is under way");
    assert_eq!(replies.try_next().map(|(n, _)| n), Some(1));
    route.lead(HERE, &engine);
}

/// An inbox that others have filled: no replies are pending whose arrival would ring.
#[test]
fn who_does_not_wait_for_a_full_inbox_is_rung_when_it_is_emptied_or_closed() {
    let (engine, mut server) = open(1, Arc::new(|| {}));
    let route = Route::new(HERE, &engine);
    let (bell, rung) = bell();
    let (requests, mut replies) = route.connect_with_bell::<u32>(2, bell);
    let (others, _others_replies) = route.connect::<()>(8);
    others.submit_by((), &route, Operation::Flush);
    requests.try_submit_by(1, &route, Operation::Flush).expect_err("the other's is in");
    let (idle, is_idle) = mpsc::channel();
    let other = server.take().expect("the other's");
    rung.recv_timeout(LIMIT).expect("there is room");
    requests.try_submit_by(1, &route, Operation::Flush).expect("room");
    requests.try_submit_by(2, &route, Operation::Flush).expect_err("full again");
    server.close();
    rung.recv_timeout(LIMIT).expect("never again");
    requests.try_submit_by(2, &route, Operation::Flush).expect("answered at once");
    route.hold(move || idle.send(()).expect("somebody waits"));
    drop(other);
    drop(server);
    is_idle.recv_timeout(LIMIT).expect("what did not go in is not under way");
    let answered: Vec<u32> = std::iter::from_fn(|| replies.try_next()).map(|(n, _)| n).collect();
    assert_eq!(answered, [2, 1]);
}
