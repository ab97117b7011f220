//! Requests and replies, through a real socket.

mod support;

use bcached_front_nbd::Limits;
use bcached_front_nbd::proto::wire::{command, command_flag};
use bcached_port::ram::{Hook, Verdict};
use bcached_port::{ErrorKind, Operation};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use support::{TANK, TANK_SECTORS, TestClient, TestServer, request, serve, serve_with, wait_until};

const END: u64 = TANK_SECTORS * 512;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;

fn entered(served: &TestServer) -> TestClient {
    let mut client = served.unix();
    client.enter("tank");
    client
}

/// A hook that holds all operations until told to serve, and counts them.
fn gate() -> (Arc<AtomicBool>, Arc<AtomicUsize>, Hook) {
    let (open, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (is_open, sees) = (Arc::clone(&open), Arc::clone(&seen));
    let hook = Box::new(move |_, _: &Operation| {
        sees.fetch_add(1, Ordering::SeqCst);
        if is_open.load(Ordering::SeqCst) { Verdict::Serve } else { Verdict::Hold }
    });
    (open, seen, hook)
}

#[test]
fn a_plain_client_reads_what_it_wrote() {
    let served = serve();
    let mut client = served.tcp();
    client.enter_plainly("tank");
    let pattern: Vec<u8> = (0..1 << 20).map(|at: u32| (at >> 9).to_le_bytes()[0]).collect();
    client.write(0, 1, 4096, &pattern);
    assert_eq!(client.simple(), (0, 1));
    assert_eq!(client.read(4096, 1 << 20), pattern);
    client.request(command::FLUSH, 0, 2, 0, 0);
    assert_eq!(client.simple(), (0, 2));
    client.request(command::READ, command_flag::DF, 3, 0, 512);
    assert_eq!(client.simple(), (EINVAL, 3), "DF belongs to structured replies");
    client.request(command::BLOCK_STATUS, 0, 4, 0, 512);
    assert_eq!(client.simple(), (EINVAL, 4));
    client.request(command::DISC, 0, 5, 0, 0);
    client.assert_closed();
}

#[test]
fn every_command_reaches_the_engine_as_it_was_meant() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sees = Arc::clone(&seen);
    let hook = Box::new(move |volume, operation: &Operation| {
        assert_eq!(volume, TANK);
        let text = match operation {
            Operation::Read { sector, buffer } => format!("read {sector}+{}", buffer.len()),
            Operation::Write { sector, payload, fua } => format!("write {sector}+{} {fua}", payload.len()),
            other => format!("{other:?}"),
        };
        sees.lock().expect("not poisoned").push(text);
        Verdict::Serve
    });
    let served = serve_with(Limits::default(), hook);
    let mut client = entered(&served);
    let (fua, no_hole) = (command_flag::FUA, command_flag::NO_HOLE);
    client.write(0, 1, 512, &[1; 512]);
    client.write(fua, 2, 512, &[1; 1024]);
    let others = [
        (command::FLUSH, 0, 0, 0),
        (command::FLUSH, fua, 0, 0),
        (command::TRIM, fua, 1024, 1 << 20),
        (command::WRITE_ZEROES, 0, 1024, 512),
        (command::WRITE_ZEROES, fua | no_hole, 1024, 512),
    ];
    for (command, flags, offset, length) in others {
        client.request(command, flags, 3, offset, length);
    }
    for cookie in [1, 2, 3, 3, 3, 3, 3] {
        assert_eq!(client.result(), (0, cookie));
    }
    client.request(command::READ, command_flag::DF | fua, 4, END - 512, 512);
    assert_eq!(client.chunk().payload[..8], (END - 512).to_be_bytes());
    client.request(command::BLOCK_STATUS, command_flag::REQ_ONE | fua, 5, 0, 8192);
    assert_eq!(client.chunk().kind, 5);
    client.request(command::BLOCK_STATUS, 0, 6, 0, 8192);
    assert_eq!(client.chunk().kind, 5);
    let wanted = [
        "write 1+512 false",
        "write 1+1024 true",
        "Flush",
        "Flush",
        "Discard { sector: 2, sectors: 2048, fua: true }",
        "WriteZeroes { sector: 2, sectors: 1, fua: false, may_discard: true }",
        "WriteZeroes { sector: 2, sectors: 1, fua: true, may_discard: false }",
        "read 131071+512",
        "BlockStatus { sector: 0, sectors: 16, extents_max: 1 }",
        "BlockStatus { sector: 0, sectors: 16, extents_max: 1024 }",
    ];
    assert_eq!(*seen.lock().expect("not poisoned"), wanted);
}

#[test]
fn what_is_malformed_is_refused_and_the_connection_goes_on() {
    let served = serve_with(
        Limits::default(),
        Box::new(|_, operation| match operation {
            // None of the requests below may reach the engine.
            Operation::Read { sector: 0, .. } => Verdict::Serve,
            _ => Verdict::Fail(ErrorKind::Io),
        }),
    );
    let mut client = entered(&served);
    let unknown_flag = 1 << 9;
    let refused = [
        (command::CACHE, 0, 0, 4096, EINVAL),
        (command::READ, 0, 1, 512, EINVAL),
        (command::READ, 0, 0, 511, EINVAL),
        (command::READ, 0, 0, 0, EINVAL),
        (command::READ, 0, END, 512, EINVAL),
        (command::READ, 0, END - 512, 1024, EINVAL),
        (command::READ, 0, u64::MAX - 511, 512, EINVAL),
        (command::READ, 0, 0, (32 << 20) + 512, EINVAL),
        (command::READ, unknown_flag, 0, 512, EINVAL),
        (command::READ, command_flag::NO_HOLE, 0, 512, EINVAL),
        (command::FLUSH, 0, 512, 0, EINVAL),
        (command::FLUSH, 0, 0, 512, EINVAL),
        (command::TRIM, 0, END, 512, EINVAL),
        (command::TRIM, command_flag::DF, 0, 512, EINVAL),
        (command::WRITE_ZEROES, 0, END, 512, ENOSPC),
        (command::WRITE_ZEROES, command_flag::FAST_ZERO, 0, 512, ENOTSUP),
        (command::CACHE, 0, END, 512, EINVAL),
        (command::BLOCK_STATUS, 0, END, 512, EINVAL),
        (8, 0, 0, 512, EINVAL),
        (0xffff, 0, 0, 512, EINVAL),
    ];
    for (command, flags, offset, length, error) in refused {
        client.request(command, flags, 9, offset, length);
        assert_eq!(client.result(), (error, 9), "command {command} flags {flags} at {offset}+{length}");
    }
    let writes = [(END, 512, 0, ENOSPC), (1, 512, 0, EINVAL), (0, 100, 0, EINVAL), (0, 512, 1 << 5, EINVAL)];
    for (offset, length, flags, error) in writes {
        client.write(flags, 10, offset, &vec![0xee; length]);
        assert_eq!(client.result(), (error, 10), "write at {offset}+{length}");
    }
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn a_payload_that_is_too_large_is_read_over_and_an_absurd_one_ends_it() {
    let served = serve();
    let mut client = entered(&served);
    client.write(0, 1, 0, &vec![0xee; (32 << 20) + 512]);
    assert_eq!(client.result(), (EINVAL, 1));
    assert_eq!(client.read(0, 512), [0; 512], "nothing of it was written");
    client.write(0, 2, 0, &vec![0xdd; 32 << 20]);
    assert_eq!(client.result(), (0, 2), "exactly the announced maximum");
    assert_eq!(client.read(0, 32 << 20), vec![0xdd; 32 << 20]);
    client.request(command::WRITE, 0, 3, 0, (64 << 20) + 512);
    client.assert_closed();
}

#[test]
fn a_read_only_export_takes_no_writes() {
    let served = serve();
    let mut client = served.unix();
    client.enter("archive");
    client.write(0, 1, 0, &[1; 4096]);
    assert_eq!(client.result(), (EPERM, 1));
    for command in [command::TRIM, command::WRITE_ZEROES] {
        client.request(command, 0, 2, 0, 512);
        assert_eq!(client.result(), (EPERM, 2));
    }
    client.request(command::FLUSH, 0, 3, 0, 0);
    assert_eq!(client.result(), (0, 3));
    assert_eq!(client.read(0, 1 << 20), vec![0; 1 << 20]);
}

#[test]
fn errors_of_the_engine_keep_their_kind() {
    for kind in ErrorKind::ALL {
        let served = serve_with(Limits::default(), Box::new(move |_, _| Verdict::Fail(kind)));
        let mut client = entered(&served);
        client.request(command::READ, 0, 1, 0, 4096);
        client.request(command::BLOCK_STATUS, 0, 2, 0, 4096);
        client.write(0, 3, 0, &[0; 512]);
        client.request(command::FLUSH, 0, 4, 0, 0);
        for cookie in 1..=4 {
            assert_eq!(client.result(), (kind.codes().nbd, cookie), "{kind:?}");
        }
    }
}

#[test]
fn replies_come_as_the_engine_gives_them() {
    let (open, seen, hook) = gate();
    let served = serve_with(Limits::default(), hook);
    let mut client = entered(&served);
    for cookie in 0..64 {
        client.write(0, cookie, cookie * 4096, &[u8::try_from(cookie).expect("small"); 4096]);
    }
    wait_until("64 requests in flight", || seen.load(Ordering::SeqCst) == 64);
    open.store(true, Ordering::SeqCst);
    served.ram.release();
    for cookie in (0..64).rev() {
        assert_eq!(client.result(), (0, cookie), "the newest first, as this server releases them");
    }
    for cookie in 0..64 {
        assert_eq!(client.read(cookie * 4096, 4096), [u8::try_from(cookie).expect("small"); 4096]);
    }
}

#[test]
fn a_full_window_stops_the_reading() {
    let (open, seen, hook) = gate();
    let limits = Limits { requests: 4, ..Limits::default() };
    let served = serve_with(limits, hook);
    let mut client = entered(&served);
    for cookie in 0..20 {
        client.request(command::FLUSH, 0, cookie, 0, 0);
    }
    wait_until("the window to fill", || seen.load(Ordering::SeqCst) == 4);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(seen.load(Ordering::SeqCst), 4, "the fifth waits in the socket");
    open.store(true, Ordering::SeqCst);
    served.ram.release();
    let mut cookies: Vec<u64> = (0..20).map(|_| client.result().1).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..20).collect::<Vec<_>>());
}

#[test]
fn half_a_hang_up_still_gets_its_replies() {
    let served = serve();
    let mut client = entered(&served);
    let requests: Vec<u8> = (0..32).flat_map(|cookie| request(command::FLUSH, 0, cookie, 0, 0)).collect();
    client.send(&requests);
    client.hang_up_halfway();
    for cookie in 0..32 {
        assert_eq!(client.result(), (0, cookie));
    }
    client.assert_closed();
}

#[test]
fn block_status_is_exact_and_bounded() {
    let served = serve();
    let mut client = entered(&served);
    // Every other sector: more extents than one answer holds.
    for sector in (0..4096).step_by(2) {
        client.write(0, 1, sector * 512, &[1; 512]);
        assert_eq!(client.result(), (0, 1));
    }
    client.request(command::BLOCK_STATUS, 0, 2, 0, 2 << 20);
    let chunk = client.chunk();
    assert_eq!((chunk.flags, chunk.kind, &chunk.payload[..4]), (1, 5, &[0, 0, 0, 1][..]));
    assert_eq!(chunk.payload.len(), 4 + 1024 * 8);
    for (index, extent) in chunk.payload[4..].chunks_exact(8).enumerate() {
        let state = if index % 2 == 0 { 0 } else { 3 };
        assert_eq!(extent, [0, 0, 2, 0, 0, 0, 0, state]);
    }
    client.request(command::BLOCK_STATUS, command_flag::REQ_ONE, 3, 4096 * 512, 4 << 20);
    assert_eq!(client.chunk().payload[4..], [0, 0x40, 0, 0, 0, 0, 0, 3]);
}
