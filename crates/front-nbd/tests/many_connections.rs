//! Hundreds of connections that send nothing, half a message, or bytes that are not NBD, beside
//! clients that work. The working clients are served, and the cost of the others is bounded by
//! their number.

mod support;

use bcached_front_nbd::proto::wire::option;
use bcached_front_nbd::{Limits, TlsConfig};
use bcached_port::ram::Verdict;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::certificates::CertificateAuthority;
use support::{LIMIT, TestClient, TestServer, serve_in};

const CROWD: usize = 400;
/// The descriptors needed: both ends of each connection, and some more.
const DESCRIPTORS: u64 = 2 * 512 + 100;
/// Clients that work, which have a second thread each.
const ENTERED: usize = 3;
/// The most connections beyond the limit that have lost their places and have not ended yet.
const LEAVING: usize = 32;
/// What one connection may cost: its buffer, the TLS state, and the touched part of two stacks.
const CONNECTION_KIB: usize = 96;

/// Takes the lock for one test at a time, because threads, memory and descriptors belong to the
/// process. Raises the limit of descriptors as far as possible. Returns `None`, with a reason, if
/// they are too few.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = getrlimit(Resource::Nofile);
    let _stays_as_it_is = setrlimit(Resource::Nofile, Rlimit { current: limits.maximum, ..limits });
    let enough = getrlimit(Resource::Nofile).current.is_none_or(|current| current >= DESCRIPTORS);
    if !enough {
        println!("skipped: {DESCRIPTORS} open files are needed (ulimit -n)");
    }
    enough.then_some(alone)
}

/// Returns a number from `/proc/self/status`.
fn of_process(what: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("it is there");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("it has that");
    line.trim_matches([':', '\t', ' ', 'k', 'B']).parse().expect("a number")
}

fn serve_crowd(authority: &CertificateAuthority, limits: Limits) -> TestServer {
    let (certificate, key) = authority.server();
    let tls = TlsConfig::new(certificate.as_bytes(), key.as_bytes(), None).expect("they are good");
    serve_in(Some(tls), limits, Box::new(|_, _| Verdict::Serve))
}

/// Checks that a client's requests are served.
fn works(client: &mut TestClient, turn: usize) {
    let byte = turn.to_le_bytes()[0];
    client.write(0, 7, 4096, &[byte; 8192]);
    assert_eq!(client.result(), (0, 7));
    assert_eq!(client.read(4096, 8192), [byte; 8192]);
}

/// Connects one of the idle connections, each of a different kind.
fn bystander(served: &TestServer, turn: usize) -> TestClient {
    let start_tls = || {
        let mut client = served.tcp();
        client.greet(3).send_option(option::STARTTLS, &[]);
        client
    };
    let hello = [&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3][..], &[0xee; 32]].concat();
    let (mut client, bytes) = match turn % 8 {
        0 => (served.unix(), vec![]),
        1 => (served.tcp(), vec![]),
        2 => (served.unix(), vec![0, 0, 0, 3]),
        3 => (served.unix(), [&[0, 0, 0, 3][..], b"IHAVEOPT\0\0\0\x07\0\0\x40\0half of it"].concat()),
        4 => (served.unix(), vec![0xff; 30_000]),
        5 => (start_tls(), vec![]),
        6 => (start_tls(), hello),
        _ => (start_tls(), vec![0xff; 30_000]),
    };
    // Some are closed before they have sent it.
    let _ended_already = client.try_send(&bytes);
    client
}

#[test]
fn hundreds_that_choose_nothing_cost_what_their_places_cost() {
    let Some(_alone) = alone() else { return };
    let authority = CertificateAuthority::new();
    // No connection ends for lack of time: only the number limits them.
    let limits = Limits { handshake: 10 * LIMIT, connections: 200, ..Limits::default() };
    let places = limits.connections;
    let served = serve_crowd(&authority, limits);
    let mut plain = served.unix();
    plain.enter("tank");
    works(&mut plain, 0);
    let (threads, memory) = (of_process("Threads"), of_process("VmRSS"));
    let mut crowd = Vec::new();
    for turn in 0..CROWD {
        crowd.push(bystander(&served, turn));
        if turn % 16 == 0 {
            works(&mut plain, turn);
            assert!(served.server().clients().len() <= places);
        }
        assert!(of_process("Threads") <= threads + places + ENTERED + LEAVING, "those that go are few");
    }
    // A new client that chooses an export is let in, plain or in TLS.
    let mut newcomer = served.unix();
    newcomer.enter("archive");
    assert_eq!(newcomer.read(0, 4096), [0; 4096]);
    let mut encrypted = served.tcp();
    encrypted.greet(3);
    let mut encrypted = encrypted.start_tls(&authority);
    encrypted.go("archive");
    assert_eq!(encrypted.read(0, 4096), [0; 4096]);
    // All connections before these have been accepted by now. Those that lost their places end
    // soon, with their threads.
    let clients = served.server().clients().len();
    assert!(clients <= places && clients > places / 2, "{clients} of {CROWD} have stayed");
    support::wait_until("the threads to be as many as the places", || {
        of_process("Threads") <= threads + places + ENTERED
    });
    let costs = of_process("VmRSS").saturating_sub(memory);
    assert!(costs < places * CONNECTION_KIB, "{costs} KiB for {CROWD}");
    works(&mut plain, CROWD);
    drop(crowd);
    served.wait_for_clients(3);
    works(&mut plain, CROWD + 1);
}

/// The time limit of a handshake applies to each connection: all that do not complete it are ended.
#[test]
fn hundreds_of_handshakes_that_do_not_end_are_ended() {
    let Some(_alone) = alone() else { return };
    let authority = CertificateAuthority::new();
    let limits = Limits { handshake: Duration::from_secs(2), connections: 2 * CROWD, ..Limits::default() };
    let served = serve_crowd(&authority, limits);
    let mut working = served.unix();
    working.enter("tank");
    let mut crowd: Vec<_> = (0..CROWD).map(|turn| bystander(&served, turn)).collect();
    works(&mut working, 1);
    served.wait_for_clients(1);
    crowd.iter_mut().for_each(TestClient::drain);
    works(&mut working, 2);
}

/// Hundreds that have chosen a volume and send no requests keep their places, for as long as they
/// like.
#[test]
fn hundreds_that_are_idle_stay_and_hold_nobody_up() {
    let Some(_alone) = alone() else { return };
    let limits = Limits { connections: CROWD + 1, ..Limits::default() };
    let served = serve_crowd(&CertificateAuthority::new(), limits);
    let enter = || {
        let mut client = served.unix();
        client.enter("tank");
        client
    };
    let mut crowd: Vec<_> = (0..CROWD).map(|_| enter()).collect();
    let mut working = enter();
    for turn in 0..20 {
        works(&mut working, turn);
        assert_eq!(working.read(0, 32 << 20).len(), 32 << 20, "all the memory there is");
    }
    assert_eq!(served.server().clients().len(), CROWD + 1);
    for client in &mut crowd {
        assert_eq!(client.read(4096, 512), [19; 512]);
    }
}
