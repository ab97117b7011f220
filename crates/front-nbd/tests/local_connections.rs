//! Connections within the process: they have no handshake, and otherwise behave like all others.

mod support;

use bcached_front_nbd::LocalConnectionError;
use bcached_front_nbd::proto::wire::{command, flag};
use std::os::unix::net::UnixStream;
use support::{ClientStream, LIMIT, TANK_SECTORS, TestClient, serve};

fn client_of(served: &support::TestServer, name: &str) -> (TestClient, u16) {
    let handed = served.server().hand(name).expect("handed");
    let stream = UnixStream::from(handed.socket);
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
    (TestClient { stream: ClientStream::Unix(stream), structured: false }, handed.flags)
}

#[test]
fn who_is_handed_a_connection_asks_at_once() {
    let served = serve();
    let (mut client, flags) = client_of(&served, "tank");
    let can = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM | flag::CAN_MULTI_CONN;
    assert_eq!((flags & can, flags & flag::READ_ONLY), (can, 0));
    let pattern: Vec<u8> = (0..1 << 20).map(|at: u32| (at >> 9).to_le_bytes()[0]).collect();
    client.write(0, 1, 4096, &pattern);
    assert_eq!(client.simple(), (0, 1));
    assert_eq!(client.read(4096, 1 << 20), pattern);
    client.request(command::FLUSH, 0, 2, 0, 0);
    assert_eq!(client.simple(), (0, 2));
    client.request(command::READ, 0, 3, TANK_SECTORS * 512, 512);
    assert_eq!(client.simple(), (22, 3), "behind the end");
    let seen = served.server().clients();
    assert_eq!((seen.len(), seen[0].export.as_deref(), seen[0].writing), (1, Some("tank"), true));
    // No other client can write meanwhile. The connection ends like any other.
    let mut other = served.unix();
    let (_, offered) = other.enter("tank");
    assert_ne!(offered & flag::READ_ONLY, 0);
    drop(other);
    client.request(command::DISC, 0, 4, 0, 0);
    client.assert_closed();
    served.wait_for_clients(0);
}

#[test]
fn nobody_is_handed_what_is_not_served_or_more_than_he_may_do() {
    let served = serve();
    assert!(matches!(served.server().hand("attic"), Err(LocalConnectionError::NoExport(_))));
    let (mut client, flags) = client_of(&served, "archive");
    assert_eq!(flags & (flag::READ_ONLY | flag::SEND_TRIM), flag::READ_ONLY);
    client.write(0, 1, 0, &[1; 512]);
    assert_eq!(client.simple(), (1, 1), "EPERM");
    assert_eq!(client.read(0, 512), [0; 512]);
}
