//! Tests which client may write. On TCP every connection is a client of its own; on the unix socket
//! this process is one client.

mod support;

use bcached_front_nbd::proto::wire::{command, flag};
use bcached_port::ram::Verdict;
use bcached_port::{Operation, Peer, WriterGeneration};
use std::sync::Arc;
use std::sync::mpsc::channel;
use support::{LIMIT, TANK, TestClient, TestServer, serve, serve_with, tank, wait_until};

const OK: u32 = 0;
const EPERM: u32 = 1;

/// Connects on TCP. Returns the connection and whether it was offered writing.
fn connect(served: &TestServer) -> (TestClient, bool) {
    let mut client = served.tcp();
    let (_, flags) = client.enter("tank");
    (client, flags & flag::READ_ONLY == 0)
}

fn write(client: &mut TestClient, fill: u8) -> u32 {
    client.write(0, 1, 0, &[fill; 512]);
    client.result().0
}

#[test]
fn later_clients_see_a_read_only_export_until_the_writer_leaves() {
    let served = serve();
    let (mut writer, _) = connect(&served);
    assert_eq!(write(&mut writer, 1), OK);
    let (mut other, offered) = connect(&served);
    assert!(!offered);
    assert_eq!(write(&mut other, 2), EPERM);
    other.request(command::TRIM, 0, 1, 0, 512);
    assert_eq!(other.result().0, EPERM);
    assert_eq!(other.read(0, 512), [1; 512], "reading is free");
    drop(writer);
    served.wait_for_clients(1);
    let (mut next, offered) = connect(&served);
    assert!(offered);
    assert_eq!(write(&mut next, 3), OK);
    assert_eq!(served.ram.content(TANK, 0, 1), [3; 512]);
}

#[test]
fn looking_takes_writing_from_nobody() {
    let served = serve();
    let (mut looker, _) = connect(&served);
    looker.read(0, 512);
    looker.request(command::FLUSH, 0, 1, 0, 0);
    assert_eq!(looker.result().0, OK);
    let (mut writer, offered) = connect(&served);
    assert!(offered);
    assert_eq!(write(&mut writer, 1), OK);
}

/// Two machines mount the volume. One writes and leaves. The other's cached blocks are now stale,
/// and its next write would put them over the new ones, so it is refused.
#[test]
fn a_client_that_looked_before_another_wrote_must_connect_again() {
    let served = serve();
    let (mut early, offered) = connect(&served);
    assert!(offered);
    early.read(0, 4096);
    let (mut writer, _) = connect(&served);
    assert_eq!(write(&mut writer, 1), OK);
    assert_eq!(write(&mut early, 2), EPERM);
    drop(writer);
    served.wait_for_clients(1);
    assert_eq!(write(&mut early, 2), EPERM, "its view is old");
    let (mut again, _) = connect(&served);
    assert_eq!(write(&mut again, 3), OK);
}

#[test]
fn the_writer_is_gone_only_when_its_last_write_is_done() {
    let hook = |_, operation: &Operation| match operation {
        Operation::Write { .. } => Verdict::Hold,
        _ => Verdict::Serve,
    };
    let served = serve_with(bcached_front_nbd::Limits::default(), Box::new(hook));
    let (mut writer, _) = connect(&served);
    writer.write(0, 1, 0, &[7; 512]);
    wait_until("the write to be with the engine", || {
        served.server().clients().iter().any(|client| client.writing)
    });
    drop(writer);
    // A program that starts right after another, as in a script, is not told that the volume is
    // read-only.
    let (_next, offered) = std::thread::scope(|scope| {
        let next = scope.spawn(|| connect(&served));
        wait_until("the next one to have come", || served.server().clients().len() == 2);
        assert!(!next.is_finished(), "the write is still on its way");
        wait_until("the write to be done", || {
            served.ram.release();
            next.is_finished()
        });
        next.join().expect("a client")
    });
    assert!(offered);
    assert_eq!(served.ram.content(TANK, 0, 1), [7; 512]);
}

#[test]
fn a_client_that_comes_when_a_writer_has_left_waits_until_that_is_done() {
    let served = serve();
    let (writing, file) = (served.exports.writing(), Peer::File(1));
    let claim =
        writing.claim(tank(&served.ram).uuid, file, WriterGeneration::default()).expect("nobody writes");
    let (asked, asks) = channel();
    claim.ends_after(Arc::new(move || asked.send(()).is_ok()));
    let offered = std::thread::scope(|scope| {
        let next = scope.spawn(|| connect(&served).1);
        asks.recv_timeout(LIMIT).expect("whether the writer has left is asked");
        drop(claim);
        next.join().expect("a client")
    });
    assert!(offered);
}

#[test]
fn connections_of_one_process_are_one_client() {
    let served = serve();
    let mut connections = [served.unix(), served.unix(), served.unix()];
    for connection in &mut connections {
        let (_, flags) = connection.enter("tank");
        assert_ne!(flags & flag::CAN_MULTI_CONN, 0);
    }
    for (fill, connection) in (1..).zip(&mut connections) {
        assert_eq!(write(connection, fill), OK);
    }
    assert_eq!(connections[0].read(0, 512), [3; 512], "what one wrote all see");
    assert!(!connect(&served).1, "another client");
    let [first, second, last] = connections;
    drop((first, second));
    served.wait_for_clients(1);
    assert!(!connect(&served).1, "its last connection still stands");
    drop(last);
}

#[test]
fn several_connections_are_announced_only_where_they_are_one_client() {
    let served = serve();
    let multi_conn = |client: &mut TestClient, name: &str| client.enter(name).1 & flag::CAN_MULTI_CONN != 0;
    assert!(multi_conn(&mut served.unix(), "tank"));
    assert!(multi_conn(&mut served.tcp(), "archive"), "readers do not disturb each other");
    assert!(!multi_conn(&mut served.tcp(), "tank"));
    let mut shared = tank(&served.ram);
    shared.shared = true;
    served.exports.insert(shared);
    assert!(multi_conn(&mut served.tcp(), "tank"));
}

#[test]
fn a_shared_volume_has_many_writers() {
    let served = serve();
    let mut shared = tank(&served.ram);
    shared.shared = true;
    served.exports.insert(shared);
    let (mut one, _) = connect(&served);
    assert_eq!(write(&mut one, 1), OK);
    let (mut other, offered) = connect(&served);
    assert!(offered);
    assert_eq!(write(&mut other, 2), OK);
    assert_eq!(write(&mut one, 3), OK);
    assert_eq!(other.read(0, 512), [3; 512]);
}
