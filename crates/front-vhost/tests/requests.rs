//! A guest's requests to its disk, over a complete connection to a volume in memory.

mod support;

use bcached_port::ram::Verdict;
use bcached_port::{ErrorKind, Operation, Peer};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use support::guest::{
    DATA, DISCARD, GET_ID, GuestRequest, IN, IOERR, NEXT, OK, OUT, TestGuest, UNSUPP, WRITE, WRITE_ZEROES,
};
use support::vmm::{BLK_FLUSH, BLK_RO, EVENT_IDX, TestVmm, USUAL, VERSION_1};
use support::{
    ARCHIVE, LIMIT, QUEUES, TANK, TANK_SECTORS, TestServer, holding, pattern, serve, serve_with, tank,
    wait_until, write,
};
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

fn connected(served: &TestServer, volume: &str, features: u64) -> (TestVmm, TestGuest) {
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect(&served.socket(volume));
    vmm.run(&mut guest, features);
    (vmm, guest)
}

#[test]
fn what_is_written_is_read_discarded_and_made_zeroes() {
    let served = serve();
    let (_vmm, mut guest) = connected(&served, "tank", USUAL);
    let queue = &mut guest.queues[0];
    let content = pattern(128 << 10, 7);
    queue.write(1000, &content);
    assert_eq!(served.ram.content(TANK, 1000, 256), content);
    assert_eq!(queue.read(1001, 4096), content[512..4608]);
    assert_eq!(queue.flush(), OK);
    assert_eq!(queue.change(DISCARD, (1000, 8, 0)), OK);
    assert_eq!(queue.change(WRITE_ZEROES, (1016, 8, 0)), OK);
    assert_eq!(queue.change(WRITE_ZEROES, (1032, 8, 1)), OK);
    let found = queue.read(1000, 24 << 10);
    assert!(
        found[..4096].iter().chain(&found[8192..12288]).chain(&found[16384..20480]).all(|byte| *byte == 0)
    );
    assert_eq!((&found[4096..8192], &found[12288..16384]), (&content[4096..8192], &content[12288..16384]));
    let clients = served.server().clients();
    assert_eq!((clients.len(), clients[0].volume.as_str(), clients[0].is_writing), (1, "tank", true));
}

#[test]
fn a_disk_says_what_it_is() {
    let served = serve();
    let (mut vmm, mut guest) = connected(&served, "tank", USUAL);
    assert_eq!(vmm.capacity(), TANK_SECTORS);
    let protocol = vmm.protocol();
    for feature in [
        Protocol::CONFIG,
        Protocol::MQ,
        Protocol::REPLY_ACK,
        Protocol::INFLIGHT_SHMFD,
        Protocol::CONFIGURE_MEM_SLOTS,
        Protocol::BACKEND_REQ,
    ] {
        assert!(protocol.contains(feature), "{feature:?}");
    }
    assert_eq!(vmm.offered & (BLK_RO | BLK_FLUSH | VERSION_1 | EVENT_IDX), BLK_FLUSH | VERSION_1 | EVENT_IDX);
    let identity = guest.queues[0].ask(&GuestRequest { kind: GET_ID, sector: 0, out: &[], into: 20 });
    assert_eq!(
        (identity.status, identity.content.as_slice()),
        (OK, b"tank\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".as_slice())
    );
    let part = guest.queues[0].ask(&GuestRequest { kind: GET_ID, sector: 0, out: &[], into: 3 });
    assert_eq!((part.status, part.content.as_slice()), (OK, b"tan".as_slice()));
}

/// Many requests at once, with each way of notifying and of describing that a driver may use.
#[test]
fn many_at_once_by_every_way_of_notifying_and_describing() {
    let served = serve();
    for features in [USUAL, USUAL | EVENT_IDX] {
        for is_indirect in [false, true] {
            let mut guest = TestGuest::new(QUEUES);
            let mut vmm = TestVmm::connect_again(&served.socket("tank"));
            vmm.run(&mut guest, features);
            guest.queues.iter_mut().for_each(|queue| queue.is_indirect = is_indirect);
            let writers: Vec<_> = std::mem::take(&mut guest.queues)
                .into_iter()
                .map(|mut queue| {
                    std::thread::spawn(move || {
                        let base = u64::from(queue.index) * 16384;
                        for round in 0..20 {
                            for_all_slots(&mut queue, base, round);
                        }
                        queue.kicks
                    })
                })
                .collect();
            let kicks: u64 = writers.into_iter().map(|writer| writer.join().expect("no panic")).sum();
            assert!(kicks > 0);
        }
    }
}

/// Writes 32 blocks at once, then reads them at once.
fn for_all_slots(queue: &mut support::guest::GuestQueue, base: u64, round: u64) {
    for kind in [OUT, IN] {
        let since = queue.available;
        let mut sectors = std::collections::BTreeMap::new();
        for n in 0..32 {
            let content = pattern(4096, base + round * 32 + n);
            let (sector, out, into) =
                (base + 8 * n, if kind == OUT { content.as_slice() } else { &[] }, 4096);
            let into = if kind == OUT { 0 } else { into };
            let slot = queue.submit(&GuestRequest { kind, sector, out, into });
            sectors.insert(slot, n);
        }
        queue.kick(since);
        for _ in 0..32 {
            let answer = queue.answer();
            let n = sectors.remove(&answer.slot).expect("asked for");
            assert_eq!(answer.status, OK);
            if kind == IN {
                assert_eq!(answer.content, pattern(4096, base + round * 32 + n), "block {n} of {base}");
            }
        }
    }
}

/// For a driver without flushes, a write is durable when it is answered.
#[test]
fn writes_of_a_driver_without_flushes_are_durable_when_answered() {
    let durable = Arc::new(Mutex::new(Vec::new()));
    let sees = Arc::clone(&durable);
    let hook = move |_, operation: &Operation| {
        if let Operation::Write { fua, .. }
        | Operation::Discard { fua, .. }
        | Operation::WriteZeroes { fua, .. } = operation
        {
            sees.lock().unwrap().push(*fua);
        }
        Verdict::Serve
    };
    let served = serve_with(bcached_front_vhost::Limits::default(), Box::new(hook));
    for features in [USUAL & !BLK_FLUSH, USUAL] {
        let mut guest = TestGuest::new(1);
        let mut vmm = TestVmm::connect_again(&served.socket("tank"));
        vmm.run(&mut guest, features);
        guest.queues[0].write(0, &[1; 512]);
        assert_eq!(guest.queues[0].change(DISCARD, (0, 8, 0)), OK);
        assert_eq!(guest.queues[0].change(WRITE_ZEROES, (0, 8, 0)), OK);
    }
    assert_eq!(*durable.lock().unwrap(), [true, true, true, false, false, false]);
}

#[test]
fn a_read_only_volume_is_read_and_not_written() {
    let served = serve();
    let (vmm, mut guest) = connected(&served, "archive", USUAL | BLK_RO);
    assert_eq!(vmm.offered & BLK_RO, BLK_RO);
    let queue = &mut guest.queues[0];
    assert_eq!(queue.read(0, 512), [0; 512]);
    assert_eq!(queue.ask(&GuestRequest { kind: OUT, sector: 0, out: &[9; 512], into: 0 }).status, IOERR);
    assert_eq!(queue.change(DISCARD, (0, 8, 0)), IOERR);
    assert_eq!(queue.change(WRITE_ZEROES, (0, 8, 0)), IOERR);
    assert_eq!(queue.flush(), OK);
    assert_eq!(served.ram.content(ARCHIVE, 0, 8), [0; 4096]);
}

/// When machines and programs follow one another, as in a script, none is told that its disk is
/// read-only because the previous one has not finished.
#[test]
fn who_has_left_is_waited_for_by_who_comes_next() {
    let (served, hold, seen) = holding(bcached_front_vhost::Limits::default());
    let (writing, volume) = (served.exports.writing(), tank(&served.ram).uuid);
    let (vmm, mut guest) = connected(&served, "tank", USUAL);
    hold.store(true, Ordering::SeqCst);
    guest.queues[0].send(&write(0, &[1; 512]));
    wait_until("the write to be with the engine", || seen.load(Ordering::SeqCst) > 0);
    let program = Peer::Connection(1);
    writing.await_leavers(volume, program, || unreachable!("the machine is still there"));
    assert!(writing.look(volume, program).1);
    vmm.kill();
    writing.await_leavers(volume, program, || {
        served.ram.release();
        true
    });
    let (now, is_taken) = writing.look(volume, program);
    assert!(!is_taken);
    let claim = writing.claim(volume, program, now).expect("nobody writes");
    let (asked, asks) = channel();
    claim.ends_after(Arc::new(move || asked.send(()).is_ok()));
    let socket = served.socket("tank");
    let next = std::thread::spawn(move || TestVmm::connect_again(&socket).offered);
    asks.recv_timeout(LIMIT).expect("the next machine asks whether it has left");
    drop(claim);
    assert_eq!(next.join().expect("is answered") & BLK_RO, 0);
}

#[test]
fn failures_of_the_engine_reach_the_guest_as_the_status_for_them() {
    let kind = Arc::new(Mutex::new(None));
    let says = Arc::clone(&kind);
    let hook = move |_, _: &Operation| says.lock().unwrap().map_or(Verdict::Serve, Verdict::Fail);
    let served = serve_with(bcached_front_vhost::Limits::default(), Box::new(hook));
    let (_vmm, mut guest) = connected(&served, "tank", USUAL);
    let queue = &mut guest.queues[0];
    for failure in ErrorKind::ALL {
        *kind.lock().unwrap() = Some(failure);
        let wanted = if failure == ErrorKind::Unsupported { UNSUPP } else { IOERR };
        let answer = queue.ask(&GuestRequest { kind: IN, sector: 0, out: &[], into: 512 });
        assert_eq!((answer.status, answer.written), (wanted, 1), "{failure:?}");
        assert_eq!(queue.flush(), wanted, "{failure:?}");
    }
    *kind.lock().unwrap() = None;
    assert_eq!(
        queue.ask(&GuestRequest { kind: IN, sector: TANK_SECTORS, out: &[], into: 512 }).status,
        IOERR
    );
    assert_eq!(
        queue.ask(&GuestRequest { kind: OUT, sector: u64::MAX, out: &[1; 512], into: 0 }).status,
        IOERR
    );
    assert_eq!(queue.read(0, 512), [0; 512], "and goes on");
}

#[test]
fn what_nobody_knows_is_unsupported() {
    let served = serve();
    let (_vmm, mut guest) = connected(&served, "tank", USUAL);
    let queue = &mut guest.queues[0];
    for kind in [2, 3, 14, 16, 0x8000_0000, u32::MAX] {
        assert_eq!(
            queue.ask(&GuestRequest { kind, sector: 0, out: &[], into: 512 }).status,
            UNSUPP,
            "{kind}"
        );
    }
    assert_eq!(queue.change(DISCARD, (0, 8, 1)), UNSUPP, "a flag that is for zeroes");
    assert_eq!(queue.change(WRITE_ZEROES, (0, 8, 2)), UNSUPP, "a flag that nobody knows");
}

/// The largest request that the configuration allows is served, and a larger one is refused.
#[test]
fn large_requests_come_in_pieces_and_too_large_ones_not_at_all() {
    let served = serve();
    let (_vmm, guest) = connected(&served, "tank", USUAL);
    let [mut queue] = <[_; 1]>::try_from(guest.queues).ok().expect("one");
    let (header, status, data) = (DATA, DATA + 32, DATA + (1 << 20));
    let describe = |queue: &mut support::guest::GuestQueue, kind: u32, pieces: u16, bytes: u32| {
        queue.put(header, kind);
        queue.put(header + 8, 0_u64);
        queue.put(status, 0xaa_u8);
        let table = queue.descriptors();
        queue.describe(table, 0, (header, 16, NEXT, 1));
        let flags = NEXT | if kind == IN { WRITE } else { 0 };
        for piece in 0..pieces {
            let at = data + u64::from(piece) * u64::from(bytes);
            queue.describe(table, piece + 1, (at, bytes, flags, piece + 2));
        }
        queue.describe(table, pieces + 1, (status, 1, WRITE, 0));
        let since = queue.available;
        queue.publish(0);
        queue.kick(since);
        (queue.used(), queue.get::<u8>(status))
    };
    let content = pattern(126 * (256 << 10), 3);
    vm_memory::Bytes::write_slice(&*queue.memory, &content, vm_memory::GuestAddress(data)).expect("memory");
    assert_eq!(describe(&mut queue, OUT, 126, 256 << 10), ((0, 1), OK));
    assert_eq!(served.ram.content(TANK, 0, 126 * 512), content);
    let whole = u32::try_from(content.len()).expect("fits");
    assert_eq!(describe(&mut queue, IN, 126, 256 << 10), ((0, whole + 1), OK));
    assert_eq!(describe(&mut queue, IN, 1, (32 << 20) + 512), ((0, 1), IOERR), "more than any may have");
    assert_eq!(describe(&mut queue, IN, 1, 32 << 20), ((0, (32 << 20) + 1), OK));
}

/// While the window, the inbox or the bytes are full, nothing more is taken, nothing is lost, and
/// other queues are served.
#[test]
fn a_full_engine_is_waited_for_without_losing_anything() {
    let holding = Arc::new(AtomicBool::new(true));
    let (holds, seen) = (Arc::clone(&holding), Arc::new(AtomicU64::new(0)));
    let counts = Arc::clone(&seen);
    let hook = move |_, _: &Operation| {
        counts.fetch_add(1, Ordering::SeqCst);
        if holds.load(Ordering::SeqCst) { Verdict::Hold } else { Verdict::Serve }
    };
    let limits = bcached_front_vhost::Limits { requests: 5, ..Default::default() };
    let served = serve_with(limits, Box::new(hook));
    let mut guest = TestGuest::new(2);
    let mut vmm = TestVmm::connect(&served.socket("tank"));
    vmm.run(&mut guest, USUAL | EVENT_IDX);
    let mut slots = [BTreeSet::new(), BTreeSet::new()];
    for n in 0..32 {
        for (queue, slots) in guest.queues.iter_mut().zip(&mut slots) {
            let slot = queue.send(&GuestRequest { kind: OUT, sector: n, out: &pattern(512, n), into: 0 });
            slots.insert(slot);
        }
    }
    support::wait_until("a full window", || seen.load(Ordering::SeqCst) == 5);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(seen.load(Ordering::SeqCst), 5, "no more than the window");
    assert_eq!(vmm.capacity(), TANK_SECTORS, "messages are heard meanwhile");
    holding.store(false, Ordering::SeqCst);
    served.ram.release();
    for (queue, slots) in guest.queues.iter_mut().zip(&mut slots) {
        while !slots.is_empty() {
            let answer = queue.answer();
            assert_eq!((answer.status, slots.remove(&answer.slot)), (OK, true));
        }
    }
}
