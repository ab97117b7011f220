//! Tests which client may write: one open file at a time, where NBD clients count too.

mod support;

use bcached_port::ram::Verdict;
use bcached_port::{Operation, Peer, WriterGeneration};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::mpsc::channel;
use support::{EPERM, EROFS, LIMIT, TANK, can_mount, errno, open, serve, serve_hooked, tank, wait_until};

#[test]
fn a_second_writer_is_told_to_read_only_until_the_first_leaves() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let writer = served.open();
    writer.write_all_at(&[1; 512], 0).expect("is written");
    assert!(served.server().clients().iter().any(|client| client.writing));
    assert_eq!(errno(open(&served.tank())), EROFS);
    let reader = std::fs::File::open(served.tank()).expect("reading is free");
    let mut read = [0; 512];
    reader.read_exact_at(&mut read, 0).expect("is read");
    assert_eq!(read, [1; 512]);
    drop(writer);
    served.open().write_all_at(&[2; 512], 0).expect("is written");
    assert_eq!(served.ram.content(TANK, 0, 1), [2; 512]);
    drop(reader);
    served.end();
}

/// A file that was opened before another client wrote cannot write: what it has read may be stale.
/// It stays so after the writer has left.
#[test]
fn who_opened_before_another_wrote_must_open_again() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let early = served.open();
    early.read_exact_at(&mut [0; 512], 0).expect("looking takes writing from nobody");
    let writer = served.open();
    writer.write_all_at(&[1; 512], 0).expect("is written");
    assert_eq!(errno(early.write_at(&[2; 512], 0)), EPERM);
    assert_eq!(errno(early.write_at(&[2; 5], 0)), EPERM);
    drop(writer);
    let writing = served.exports.writing();
    wait_until("the writer to be gone", || !writing.look(tank(&served.ram).uuid, Peer::Connection(0)).1);
    assert_eq!(errno(early.write_at(&[2; 512], 0)), EPERM, "its view is old");
    served.open().write_all_at(&[3; 512], 0).expect("is written");
    drop(early);
    served.end();
}

/// A new writer waits until the requests of an NBD client that has left are complete, and not just
/// for a moment.
#[test]
fn a_program_that_opens_after_a_client_has_left_waits_until_that_is_done() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let (writing, client) = (served.exports.writing(), Peer::Connection(1));
    let claim =
        writing.claim(tank(&served.ram).uuid, client, WriterGeneration::default()).expect("nobody writes");
    let (asked, asks) = channel();
    claim.ends_after(Arc::new(move || asked.send(()).is_ok()));
    let path = served.tank();
    let opened = std::thread::spawn(move || open(&path));
    asks.recv_timeout(LIMIT).expect("whether the writer has left is asked");
    drop(claim);
    let file = opened.join().expect("a thread").expect("it may write");
    file.write_all_at(&[1; 512], 0).expect("is written");
    drop(file);
    served.end();
}

/// `close` returns before the server is told of it, but the next program can write nevertheless.
#[test]
fn programs_that_write_one_after_the_other_do_not_shut_each_other_out() {
    if !can_mount() {
        return;
    }
    let served = serve();
    for turn in 0..200u8 {
        served.open().write_all_at(&[turn; 512], 0).expect("is written");
    }
    served.end();
}

#[test]
fn the_writer_is_gone_only_when_its_last_write_is_done() {
    if !can_mount() {
        return;
    }
    let served = serve_hooked(Box::new(|_, operation: &Operation| match operation {
        Operation::Write { .. } => Verdict::Hold,
        _ => Verdict::Serve,
    }));
    let writer = served.open();
    let thread = std::thread::spawn(move || writer.write_all_at(&[7; 512], 0));
    wait_until("the write to be with the engine", || {
        served.server().clients().iter().any(|client| client.writing)
    });
    assert_eq!(errno(open(&served.tank())), EROFS, "the write is still on its way");
    wait_until("the write to be done", || {
        served.ram.release();
        thread.is_finished()
    });
    thread.join().expect("no panic").expect("is written");
    drop(open(&served.tank()).expect("nobody writes"));
    served.end();
}

#[test]
fn an_nbd_client_and_an_open_file_shut_each_other_out() {
    if !can_mount() {
        return;
    }
    let served = serve();
    let (writing, volume) = (served.exports.writing(), tank(&served.ram).uuid);
    let nbd = Peer::Connection(0);
    let (since, _) = writing.look(volume, nbd);
    let early = served.open();
    let claim = writing.claim(volume, nbd, since).expect("nobody writes");
    assert_eq!(errno(open(&served.tank())), EROFS);
    assert_eq!(errno(early.write_at(&[1; 512], 0)), EPERM);
    drop((claim, early));
    let file = served.open();
    file.write_all_at(&[1; 512], 0).expect("is written");
    let (since, taken) = writing.look(volume, nbd);
    assert!(taken && writing.claim(volume, nbd, since).is_none());
    drop(file);
    wait_until("the file to be closed", || !writing.look(volume, nbd).1);
    served.end();
}

#[test]
fn a_shared_volume_has_many_writers() {
    if !can_mount() {
        return;
    }
    let served = serve();
    served.exports.insert(bcached_port::Export { shared: true, ..tank(&served.ram) });
    let (one, other) = (served.open(), served.open());
    one.write_all_at(&[1; 512], 0).expect("is written");
    other.write_all_at(&[2; 100], 0).expect("is written");
    served.open().write_all_at(&[3; 100], 50).expect("is written");
    let expected = [vec![2; 50], vec![3; 100], vec![1; 362]].concat();
    assert_eq!(served.ram.content(TANK, 0, 1), expected);
    drop((one, other));
    served.end();
}
