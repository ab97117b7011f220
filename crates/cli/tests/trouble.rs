//! `bcached serve` and `status` when something is wrong: what is in use, what is missing, what does not answer.

mod common;

use common::{Daemon, Images, bcached, bytes, json, patch, run};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

/// A cache and a backing device, made and never served.
fn set(images: &Images) -> (String, String) {
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
    let made =
        bcached(&["make", "-b", "64k", "--writeback", "--label", "tank", "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{made:?}");
    (cache, backing)
}

/// The engine had begun to write before it turned out that nobody could be served.
#[test]
fn a_socket_in_use_is_found_before_a_device_is_written() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let before = (bytes(&cache), bytes(&backing));
    std::fs::create_dir(images.path("run")).expect("a folder");
    let _somebody = UnixListener::bind(images.path("run/nbd.sock")).expect("a socket");
    // The second has no device that could be opened: it ends by the socket only if that comes first.
    for devices in [&["--cache", cache.as_str(), "--backing", &backing][..], &["--cache", "/nonexistent"]] {
        let ran = run(&mut Daemon::command(&images, "run", devices));
        assert_eq!(
            (ran.exit, ran.err.contains("nbd.sock is in use by another server")),
            (3, true),
            "{ran:?}"
        );
    }
    assert!((bytes(&cache), bytes(&backing)) == before, "a device was written");
}

/// Every reason for which a set does not open was an I/O error.
#[test]
fn a_set_that_is_served_already_is_in_use() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let copy = images.path("copy");
    std::fs::copy(&cache, &copy).expect("a copy");
    let _daemon = Daemon::start(&images, &["--cache", &cache]);
    let mut second = Daemon::command(&images, "other", &["--cache", copy.to_str().expect("text")]);
    let ran = run(&mut second);
    let sentence = "another daemon serves this cache set; stop the other daemon";
    assert_eq!((ran.exit, ran.err.contains(sentence)), (3, true), "{ran:?}");
}

/// "Acknowledged writes may be lost" stood among the information that nobody reads.
#[test]
fn a_damaged_note_is_a_warning() {
    let images = Images::new();
    let (cache, _) = set(&images);
    Daemon::start(&images, &["--cache", &cache]).kill();
    let shown = json(&bcached(&["show", "--json", &cache]).out);
    let note = format!("run/{}.note", shown["set_uuid"].as_str().expect("a uuid"));
    patch(images.path(&note), 0, b"nonsense");
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    let log = daemon.log();
    assert!(log.contains("bcached: warning: the note is damaged"), "{log}");
}

/// A daemon that was stopped was "no daemon", and one whose backlog was full held up whoever asked, for ever.
#[test]
fn a_daemon_that_does_not_answer_is_no_missing_daemon() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    daemon.signal(Signal::STOP);
    let waiting = std::thread::scope(|scope| {
        let text = bcached(&["status", "--control", daemon.control()]);
        // More than fit the backlog: connecting itself waits from here on.
        let crowd: Vec<_> = (0..40).map(|_| knock(daemon.control())).collect();
        let object = scope.spawn(|| bcached(&["--json", "status", "--control", daemon.control()]));
        let second = run(&mut Daemon::command(&images, "run", &["--cache", &cache]));
        assert_eq!((second.exit, second.err.contains("another daemon answers")), (3, true), "{second:?}");
        let object = object.join().expect("no panic");
        drop(crowd);
        (text, object)
    });
    daemon.signal(Signal::CONT);
    let (text, object) = waiting;
    assert!(text.err.contains("has not answered for 10 s: its process is stopped"), "{text:?}");
    assert!(text.err.contains("kill -CONT"), "{text:?}");
    assert_eq!((text.exit, text.err.lines().count()), (6, 1), "{text:?}");
    assert_eq!((object.exit, json(&object.err)["error"]["kind"].as_str()), (6, Some("time-limit")));
    assert_eq!(daemon.status()["state"], "ready", "it goes on");
}

/// Connects if that needs no waiting.
fn knock(path: &str) -> Option<OwnedFd> {
    let address = SocketAddrUnix::new(path).expect("a path");
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.expect("a socket");
    rustix::net::connect(&socket, &address).is_ok().then_some(socket)
}
