//! Edge cases of the handshake, through a real socket.

mod support;

use bcached_front_nbd::proto::wire::{flag, info, option, option_reply};
use support::{
    TANK, TANK_SECTORS, TestClient, TestServer, context_question, export_question, serve, serve_closed, tank,
};

const ACK: (u32, Vec<u8>) = (option_reply::ACK, Vec::new());

fn greeted(served: &TestServer) -> TestClient {
    let mut client = served.unix();
    client.greet(3);
    client
}

fn kinds(replies: &[(u32, Vec<u8>)]) -> Vec<u32> {
    replies.iter().map(|reply| reply.0).collect()
}

#[test]
fn what_is_not_known_is_refused_and_the_haggling_goes_on() {
    let served = serve();
    let mut client = greeted(&served);
    assert_eq!(kinds(&client.option(4711, b"whatever")), [option_reply::ERR_UNSUP]);
    assert_eq!(kinds(&client.option(11, &[])), [option_reply::ERR_UNSUP], "extended headers");
    assert_eq!(kinds(&client.option(option::STARTTLS, &[])), [option_reply::ERR_UNSUP]);
    for without_data in [option::LIST, option::STARTTLS, option::STRUCTURED_REPLY] {
        assert_eq!(kinds(&client.option(without_data, &[0])), [option_reply::ERR_INVALID]);
    }
    assert_eq!(kinds(&client.option(option::GO, &[0, 0, 0, 9, 1])), [option_reply::ERR_INVALID]);
    let endless = vec![0; 5000];
    let too_long = export_question(&"x".repeat(4097), &[]);
    assert_eq!(kinds(&client.option(option::GO, &too_long)), [option_reply::ERR_TOO_BIG]);
    assert_eq!(kinds(&client.option(option::LIST, &endless)), [option_reply::ERR_INVALID]);
    let (unknown, text) = client.option(option::GO, &export_question("nothing", &[])).remove(0);
    assert_eq!(unknown, option_reply::ERR_UNKNOWN);
    assert_eq!(String::from_utf8_lossy(&text), "no volume is called \"nothing\"");
    assert_eq!(client.go("tank").0, TANK_SECTORS * 512);
    assert_eq!(client.read(0, 512), [0; 512]);
}

#[test]
fn a_long_option_is_read_over_and_an_absurd_one_ends_it() {
    let served = serve();
    let mut client = greeted(&served);
    for bytes in [(16 << 10) + 1, 1 << 20] {
        assert_eq!(kinds(&client.option(option::INFO, &vec![0; bytes])), [option_reply::ERR_TOO_BIG]);
    }
    assert_eq!(
        client.option(option::STRUCTURED_REPLY, &[]),
        [ACK],
        "nothing of the data was taken for an option"
    );
    client.send(&[&0x4948_4156_454f_5054_u64.to_be_bytes()[..], &[0, 0, 0, 6], &[0, 0x10, 0, 1]].concat());
    client.assert_closed();
}

/// A connection that waits at a socket which is replaced is still served: closing that socket would
/// drop it.
#[test]
fn who_has_connected_to_a_socket_that_is_bound_again_is_served() {
    let served = serve_closed();
    let mut early = served.unix();
    std::fs::remove_file(&served.path).unwrap();
    served.server().bind_again(&served.path).unwrap();
    let mut late = served.unix();
    served.server().open();
    for client in [&mut early, &mut late] {
        client.greet(3);
        assert_eq!(client.go("tank").0, TANK_SECTORS * 512);
    }
}

#[test]
fn a_list_names_what_is_served() {
    let served = serve();
    let mut client = greeted(&served);
    let listed = |names: &[&str]| {
        let entry = |name: &&str| {
            let length = u32::try_from(name.len()).expect("short").to_be_bytes();
            (option_reply::SERVER, [&length[..], name.as_bytes()].concat())
        };
        names.iter().map(entry).chain([ACK]).collect::<Vec<_>>()
    };
    assert_eq!(client.option(option::LIST, &[]), listed(&["archive", "tank"]));
    let mut waiting = tank(&served.ram);
    waiting.served = None;
    served.exports.insert(waiting);
    assert_eq!(client.option(option::LIST, &[]), listed(&["archive"]));
    let (kind, text) = client.option(option::GO, &export_question("tank", &[])).remove(0);
    assert_eq!(kind, option_reply::ERR_UNKNOWN);
    assert_eq!(String::from_utf8_lossy(&text), "the volume \"tank\" is not served at present");
}

#[test]
fn the_empty_name_is_the_only_volume() {
    let served = serve();
    let mut client = greeted(&served);
    let question = export_question("", &[]);
    assert_eq!(kinds(&client.option(option::INFO, &question)), [option_reply::ERR_UNKNOWN]);
    served.exports.remove("archive");
    assert_eq!(client.go("").0, TANK_SECTORS * 512);
}

#[test]
fn facts_are_told_whether_asked_for_or_not() {
    let served = serve();
    let mut client = greeted(&served);
    let facts = client.option(option::INFO, &export_question("tank", &[]));
    let writer =
        flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
    let writer = writer | flag::SEND_FAST_ZERO | flag::CAN_MULTI_CONN;
    let size = [&info::EXPORT.to_be_bytes()[..], &(TANK_SECTORS * 512).to_be_bytes(), &writer.to_be_bytes()]
        .concat();
    let blocks =
        [&[0, 3][..], &512u32.to_be_bytes(), &8192u32.to_be_bytes(), &(32u32 << 20).to_be_bytes()].concat();
    let both = [(option_reply::INFO, size), (option_reply::INFO, blocks), ACK];
    assert_eq!(facts, both);

    client.option(option::STRUCTURED_REPLY, &[]);
    let all = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, info::EXPORT, 999];
    let facts = client.option(option::INFO, &export_question("fast", &all));
    assert_eq!(facts.len(), 5);
    assert_eq!(facts[0].1[10..], (writer | flag::SEND_DF).to_be_bytes(), "DF comes with structured replies");
    assert_eq!(facts[2].1, b"\0\x01tank", "its own name, though asked for by label");
    let description = b"\0\x02bcache volume 01010101-0101-0101-0101-010101010101, label fast";
    assert_eq!(facts[3].1, description);
    let (_, flags) = client.go("archive");
    assert_eq!(flags & (flag::READ_ONLY | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES), flag::READ_ONLY);
}

#[test]
fn the_oldest_way_in_works_with_and_without_its_zeroes() {
    let served = serve();
    for (client_flags, zeroes) in [(0, 124), (1, 124), (2, 0), (3, 0)] {
        let mut client = served.unix();
        client.greet(client_flags).send_option(option::EXPORT_NAME, b"tank");
        assert_eq!(client.u64(), TANK_SECTORS * 512);
        assert_eq!(client.u16() & flag::READ_ONLY, 0);
        assert_eq!(client.receive(zeroes), vec![0; zeroes]);
        assert_eq!(client.read(512, 512), [0; 512]);
    }
    let mut client = greeted(&served);
    client.send_option(option::EXPORT_NAME, b"nothing");
    client.assert_closed();
    let mut client = served.unix();
    client.greet(0).send_option(option::LIST, &[]);
    client.assert_closed();
}

#[test]
fn goodbye_is_answered() {
    let served = serve();
    let mut client = greeted(&served);
    assert_eq!(client.option(option::ABORT, &[]), [ACK]);
    client.assert_closed();
}

#[test]
fn what_is_no_handshake_ends_it() {
    let served = serve();
    let mut client = served.unix();
    client.greet(3 | 1 << 7);
    client.assert_closed();
    let mut client = greeted(&served);
    client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    client.assert_closed();
    assert_eq!(greeted(&served).go("tank").0, TANK_SECTORS * 512, "others are served");
}

#[test]
fn kinds_of_block_status_are_listed_and_chosen() {
    let served = serve();
    let mut client = greeted(&served);
    let exact = context_question("tank", &["base:allocation"]);
    assert_eq!(
        kinds(&client.option(option::SET_META_CONTEXT, &exact)),
        [option_reply::ERR_INVALID],
        "too early"
    );
    client.option(option::STRUCTURED_REPLY, &[]);
    let told = |id: u32| (option_reply::META_CONTEXT, [&id.to_be_bytes()[..], b"base:allocation"].concat());
    for queries in [&[][..], &["base:"], &["base:allocation"], &["qemu:dirty-bitmap:x", "base:allocation"]] {
        let question = context_question("tank", queries);
        assert_eq!(client.option(option::LIST_META_CONTEXT, &question), [told(0), ACK], "{queries:?}");
    }
    assert_eq!(client.option(option::LIST_META_CONTEXT, &context_question("tank", &["x:"])), [ACK]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &context_question("tank", &["base:"])), [ACK]);
    let nowhere = context_question("nothing", &["base:allocation"]);
    assert_eq!(kinds(&client.option(option::SET_META_CONTEXT, &nowhere)), [option_reply::ERR_UNKNOWN]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &exact), [told(1), ACK]);
}

#[test]
fn a_choice_of_block_status_ends_with_the_next_and_with_another_name() {
    let served = serve();
    let status_after = |choices: &[(&str, &[&str])], enter: &str| {
        let mut client = greeted(&served);
        client.option(option::STRUCTURED_REPLY, &[]);
        client.structured = true;
        for (name, queries) in choices {
            client.option(option::SET_META_CONTEXT, &context_question(name, queries));
        }
        client.go(enter);
        client.request(7, 0, 5, 0, 4096);
        client.chunk().kind
    };
    let exact: &[&str] = &["base:allocation"];
    let (status, error) = (5, 0x8001);
    assert_eq!(status_after(&[("tank", exact)], "tank"), status);
    assert_eq!(status_after(&[("tank", exact)], "archive"), error);
    assert_eq!(status_after(&[("tank", exact)], "fast"), error, "the name counts, not the volume");
    assert_eq!(status_after(&[("tank", exact), ("tank", &[])], "tank"), error);
    assert_eq!(status_after(&[("tank", exact), ("nothing", exact)], "tank"), error);
    assert_eq!(status_after(&[], "tank"), error);
    assert_eq!(served.ram.content(TANK, 0, 1), [0; 512]);
}
