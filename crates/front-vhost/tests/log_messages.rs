//! The log messages about VMMs that break the protocol: one sentence each, and no more of them than
//! people can read.

#[path = "support/log_lines.rs"]
mod log_lines;
mod support;

use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use support::guest::TestGuest;
use support::open_resources::{descriptors, mappings};
use support::vmm::{TestVmm, USUAL};
use support::{LIMIT, serve, wait_until};

/// Sends the start of a message with a descriptor of the guest's memory, and disconnects.
fn breaks_off(socket: &Path, guest: &TestGuest) {
    let mut stream = UnixStream::connect(socket).expect("somebody listens");
    // SET_MEM_TABLE, version 1, with a payload of 40 bytes, of which eight are sent.
    let words = [5_u32, 1, 40, 1, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [guest.file.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).expect("is sent");
    stream.shutdown(std::net::Shutdown::Write).expect("ours");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
    let _ended = stream.read_to_end(&mut Vec::new());
}

/// Sends data that is not vhost-user, and waits for the end.
fn babbles(socket: &Path) {
    let mut stream = UnixStream::connect(socket).expect("somebody listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("is sent");
    let _ended = stream.read_to_end(&mut Vec::new());
}

#[test]
fn who_breaks_the_protocol_is_told_of_once() {
    let lines = log_lines::listen();
    let served = serve();
    let socket = served.socket("tank");
    let guest = TestGuest::new(1);
    for _ in 0..20 {
        breaks_off(&socket, &guest);
        babbles(&socket);
    }
    served.wait_for_clients(0);
    // The guest's memory and its mapping.
    assert_eq!((descriptors(&guest.file), mappings(&guest.file)), (2, 1), "nothing is kept of it");
    wait_until("the line", || !lines.lock().expect("no panic").is_empty());
    let told = lines.lock().expect("no panic").clone();
    assert_eq!(told.len(), 1, "{told:#?}");
    assert_eq!(told[0]["event"], "\"vhost-broke-off\"");
    assert_eq!((told[0]["volume"].as_str(), told[0]["count"].as_str()), ("\"tank\"", "1"));
    assert!(told[0]["error"].starts_with("the VMM violated the protocol: "), "{told:#?}");

    // The next VMM is served.
    let mut guest = TestGuest::new(1);
    let mut vmm = TestVmm::connect_again(&socket);
    vmm.run(&mut guest, USUAL);
    guest.queues[0].write(0, &[1; 512]);
}
