//! A server hands over its connections to another: clients notice nothing but a pause.

mod support;

use bcached_front_nbd::Limits;
use bcached_front_nbd::proto::wire::command;
use bcached_port::Operation;
use bcached_port::ram::Verdict;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::{LIMIT, TestClient, request, serve_on_a_ring, serve_with, wait_until};

const EPERM: u32 = 1;

/// Writes and reads its own part of the volume, several requests at a time, until told to stop.
/// Returns the number of rounds.
fn works(mut client: TestClient, part: usize, ends: &AtomicBool) -> u32 {
    const BYTES: usize = 1 << 20;
    let start = part * BYTES;
    let mut model = vec![0; BYTES];
    let mut round = 0_u32;
    while !ends.load(Ordering::SeqCst) {
        round += 1;
        let sizes = [512, 4096, 20 << 10, 200 << 10];
        let mut due = Vec::new();
        for turn in 0..12_usize {
            let bytes = sizes[(turn + round as usize) % sizes.len()];
            let at = turn * (BYTES / 12) / 512 * 512;
            let bytes = bytes.min(BYTES / 12 / 512 * 512);
            model[at..at + bytes].fill(u8::try_from((round as usize + turn + part) % 251).expect("a byte"));
            client.write(0, turn as u64, (start + at) as u64, &model[at..at + bytes]);
            due.push(turn as u64);
        }
        while !due.is_empty() {
            let (error, cookie) = client.simple();
            assert_eq!(error, 0);
            let found = due.iter().position(|due| *due == cookie).expect("it is due, once");
            due.swap_remove(found);
        }
        if round.is_multiple_of(4) {
            let length = u32::try_from(BYTES).expect("small");
            assert!(client.read(start as u64, length) == model, "part {part}, round {round}");
        }
    }
    round
}

#[test]
fn clients_at_work_notice_nothing() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|part| {
                let mut client = served.unix();
                client.enter_plainly("tank");
                let ends = &ends;
                scope.spawn(move || works(client, part, ends))
            })
            .collect();
        for turn in 0..20 {
            std::thread::sleep(Duration::from_millis(10 + turn));
            assert_eq!(served.go_over(LIMIT), 0, "all of them go on");
            assert_eq!(served.server().clients().len(), 4);
        }
        ends.store(true, Ordering::SeqCst);
        for client in clients {
            assert!(client.join().expect("it has noticed nothing") > 0);
        }
    });
}

/// A kept connection that had written gets its write claim back before a new client is offered the
/// volume. (A new client could get it first.)
#[test]
fn who_is_kept_goes_on_before_anybody_else_is_offered_the_volume() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let mut kept = served.unix();
    kept.enter_plainly("tank");
    kept.write(0, 1, 0, &[7; 512]);
    assert_eq!(kept.simple(), (0, 1));
    let (ended, tank) = served.go_over_but_for(Some("tank"), LIMIT);
    assert_eq!((ended, served.server().awaited().len(), served.server().clients().len()), (0, 1, 0));
    served.exports.insert(tank.expect("it was served"));
    let mut newcomer = served.tcp();
    newcomer.enter_plainly("tank");
    assert!(served.server().awaited().is_empty(), "it has gone on");
    newcomer.write(0, 2, 512, &[8; 512]);
    assert_eq!(newcomer.simple(), (EPERM, 2));
    kept.write(0, 3, 0, &[9; 512]);
    assert_eq!(kept.simple(), (0, 3));

    let (_, tank) = served.go_over_but_for(Some("tank"), LIMIT);
    let uuid = tank.expect("it was served").uuid.to_string();
    assert!(served.server().give_up(|volume| volume != uuid).is_empty());
    assert_eq!(served.server().give_up(|volume| volume == uuid).len(), 2);
    kept.assert_closed();
    newcomer.assert_closed();
}

/// Part of a request that has been received is handed over, too.
#[test]
fn a_request_in_two_pieces_is_one() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let mut client = served.unix();
    client.enter("tank");
    let mut sent = request(command::WRITE, 0, 7, 4096, 512);
    sent.extend_from_slice(&[5; 512]);
    for cut in [1, 27, 28, 300] {
        client.send(&sent[..cut]);
        // By now the ring has usually received it.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(served.go_over(LIMIT), 0);
        client.send(&sent[cut..]);
        assert_eq!(client.result(), (0, 7), "structured replies, as was agreed");
    }
    let mut next = served.tcp();
    next.enter_plainly("tank");
    assert_eq!(next.read(4096, 512), [5; 512]);
}

/// The writer keeps its write claim, clients without it stay denied, and a client that connects
/// meanwhile waits and is not refused.
#[test]
fn the_right_to_write_goes_along() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let [mut early, mut writer, mut other] = [served.tcp(), served.tcp(), served.tcp()];
    for client in [&mut early, &mut writer] {
        client.enter_plainly("tank");
    }
    other.enter_plainly("archive");
    writer.write(0, 1, 0, &[1; 512]);
    assert_eq!(writer.simple(), (0, 1));
    for _ in 0..2 {
        assert_eq!(served.go_over(LIMIT), 0);
        assert_eq!(served.server().clients().iter().filter(|client| client.writing).count(), 1);
        let (_, flags) = served.tcp().enter_plainly("tank");
        assert_ne!(flags & 2, 0, "another client is told that it may not write");
        early.write(0, 2, 0, &[2; 512]);
        assert_eq!(early.simple(), (EPERM, 2), "it has read what is no longer there");
        writer.write(0, 3, 0, &[3; 512]);
        assert_eq!(writer.simple(), (0, 3));
        other.write(0, 4, 0, &[4; 512]);
        assert_eq!(other.simple(), (EPERM, 4), "the volume is read-only");
        assert_eq!(early.read(0, 512), [3; 512]);
    }
    drop(writer);
    wait_until("its end", || served.server().clients().iter().all(|client| !client.writing));
    assert_eq!(served.go_over(LIMIT), 0);
    early.write(0, 2, 0, &[2; 512]);
    assert_eq!(early.simple(), (EPERM, 2), "for good");
    let mut next = served.tcp();
    assert_eq!(next.enter_plainly("tank").1 & 2, 0);
    assert_eq!(served.go_over(LIMIT), 0);
    next.write(0, 5, 0, &[5; 512]);
    assert_eq!(next.simple(), (0, 5), "nobody else has begun");
}

/// A client that has just chosen a volume is handed over like all others, and one that has just
/// left does not count as cut off.
#[test]
fn who_has_only_just_come_goes_along() {
    let Some(mut served) = serve_on_a_ring() else { return };
    for round in 0..200 {
        drop(served.unix());
        served.unix().enter_plainly("archive");
        let mut client = served.unix();
        client.enter_plainly("tank");
        assert_eq!(served.go_over(LIMIT), 0, "round {round}");
        assert_eq!(client.read(0, 512).len(), 512, "round {round}");
    }
}

/// A client that stalls within a request, one that does not read replies and one that never chose a
/// volume delay the hand-over at most for the limit. The others continue.
#[test]
fn who_is_not_through_in_time_is_cut_off() {
    let Some(mut served) = serve_on_a_ring() else { return };
    let [mut half, mut deaf, mut idle, mut well] =
        [served.unix(), served.unix(), served.unix(), served.unix()];
    for client in [&mut half, &mut deaf, &mut well] {
        client.enter_plainly("tank");
    }
    half.send(&request(command::WRITE, 0, 1, 0, 1 << 20));
    half.send(&[1; 4096]);
    for cookie in 0..100 {
        deaf.request(command::READ, 0, cookie, 0, 1 << 20);
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(served.go_over(Duration::from_secs(3)), 2);
    assert_eq!(well.read(0, 512), [0; 512]);
    half.assert_closed();
    idle.receive(18);
    idle.assert_closed();
    assert_eq!(well.read(1 << 20, 512), [0; 512], "nothing of the half was written");
}

/// Pending requests are answered before a connection is handed over, however long that takes.
#[test]
fn what_is_under_way_is_answered_first() {
    let (tell, told) = std::sync::mpsc::channel();
    let hook = move |_, _: &Operation| {
        told.recv_timeout(LIMIT).expect("somebody tells");
        Verdict::Serve
    };
    let mut served = serve_with(Limits::default(), Box::new(hook));
    if served.ring.is_none() {
        return eprintln!("SKIPPED: no io_uring here");
    }
    let mut client = served.unix();
    client.enter_plainly("tank");
    client.write(0, 1, 0, &[9; 512]);
    client.request(command::READ, 0, 2, 1 << 20, 512);
    // Both are in flight.
    std::thread::sleep(Duration::from_millis(50));
    let are_served = Arc::new(AtomicBool::new(false));
    let serves = Arc::clone(&are_served);
    let slow = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        serves.store(true, Ordering::SeqCst);
        (0..2).for_each(|_| tell.send(()).expect("somebody waits"));
    });
    assert_eq!(served.go_over(LIMIT), 0);
    assert!(are_served.load(Ordering::SeqCst), "they have been waited for");
    slow.join().expect("it told");
    assert_eq!(client.simple(), (0, 1));
    assert_eq!(client.simple(), (0, 2));
    assert_eq!(client.receive(512), [0; 512]);
}
