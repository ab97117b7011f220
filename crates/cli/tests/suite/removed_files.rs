//! Files that are removed while the daemon runs: it notices, and repairs or reports that.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use crate::common::{Daemon, Images, ask, content, done, pattern, requires, run, tool};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const BACKING_BYTES: u64 = 16 << 20;

fn site() -> (Images, Daemon) {
    let images = Images::new();
    images.configure_pair(64 << 20, BACKING_BYTES, "export = [\"nbd\", \"vhost-user\"]\n");
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

fn warnings(status: &serde_json::Value) -> Vec<String> {
    let all = status["warnings"].as_array().into_iter().flatten();
    all.filter_map(|warning| warning.as_str().map(str::to_owned)).collect()
}

/// The note was removed by a cleaner, and the daemon is killed: acknowledged writes are there.
#[test]
fn a_note_that_was_removed_is_replaced_at_once() {
    if !requires("nbdcopy") {
        return;
    }
    let (images, daemon) = site();
    let note = |images: &Images| {
        let files = std::fs::read_dir(images.path("run")).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|extension| extension == "note")).collect::<Vec<_>>()
    };
    let files = note(&images);
    assert_eq!(files.len(), 1, "{files:?}");
    // The journal waits for a minute: only the note has the keys.
    done(&daemon, &["set", "fast", "journal_delay_ms=60000"]);
    let data = pattern(1 << 20, 7);
    let path = images.path("data");
    std::fs::write(&path, &data).unwrap();
    // Without a flush.
    let ran = run(tool("nbdcopy").arg(&path).arg(daemon.uri("tank")));
    assert_eq!(ran.exit, 0, "{ran:?}");
    std::fs::remove_file(&files[0]).unwrap();
    wait_for("there is another", || note(&images) == files);
    wait_for("it is told", || daemon.log().contains("[event=note-gone]"));
    daemon.wait_for("all is as it should be", |status| warnings(status).is_empty());
    daemon.kill();
    let daemon = Daemon::configured(&images);
    assert!(content(&images, &daemon, "tank")[..data.len()] == data[..]);
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: after a cleaner had removed the sockets, new clients did not reach the daemon
/// until it was restarted.
#[test]
fn sockets_that_were_removed_are_bound_again_and_connections_go_on() {
    let (images, daemon) = site();
    let names = ["run/nbd.sock", "run/control.sock", "run/monitor.sock", "run/vhost-user/tank.sock"];
    let sockets = names.map(|name| images.path(name));
    for (removed, socket) in sockets.iter().enumerate() {
        let connected = (removed == 0).then(|| UnixStream::connect(socket).unwrap());
        std::fs::remove_file(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
        let is_back = || UnixStream::connect(socket).is_ok();
        wait_for("somebody listens there again", is_back);
        if let Some(mut connected) = connected {
            // A client connected before gets an answer: it asks for the list of exports.
            connected.read_exact(&mut [0; 18]).unwrap();
            connected.write_all(b"\0\0\0\x01IHAVEOPT\0\0\0\x03\0\0\0\0").unwrap();
            connected.read_exact(&mut [0; 20]).unwrap();
        }
        let told = format!("{}: the file of this socket is gone", socket.display());
        wait_for("it is told", || daemon.log().contains(&told));
        assert_eq!(daemon.log().matches("[event=socket-gone]").count(), removed + 1, "{}", daemon.log());
    }
    // The socket together with its directory.
    std::fs::remove_dir_all(images.path("run/vhost-user")).unwrap();
    wait_for("somebody listens there again", || UnixStream::connect(&sockets[3]).is_ok());
    daemon.wait_for("all is as it should be", |status| warnings(status).is_empty());
    assert_eq!(daemon.stop().0, 0);
    assert!(sockets.iter().all(|socket| !socket.exists()), "they go with the daemon");
}

/// A regression: a volume that is removed and added has another socket in the same place, which was
/// taken for another program's.
#[test]
fn a_volume_that_is_removed_and_added_has_its_own_socket() {
    let (images, daemon) = site();
    let (nbd, vhost) = (images.path("run/nbd.sock"), images.path("run/vhost-user/tank.sock"));
    let looked = |times| {
        std::fs::remove_file(&nbd).unwrap();
        wait_for("a look", || daemon.log().matches("[event=socket-gone]").count() == times);
    };
    looked(1);
    done(&daemon, &["remove", "tank"]);
    // This file gets the inode of the former socket, if the file system reuses it.
    std::fs::write(images.path("between"), "").unwrap();
    done(&daemon, &["add", "tank"]);
    wait_for("it is served again", || UnixStream::connect(&vhost).is_ok());
    looked(2);
    assert!(!daemon.log().contains("tank.sock"), "{}", daemon.log());
    daemon.wait_for("all is as it should be", |status| warnings(status).is_empty());
    assert_eq!(daemon.stop().0, 0);
}

/// A socket that cannot be bound again is reported for as long as that lasts.
#[test]
fn a_socket_whose_place_somebody_else_has_taken_is_told_of() {
    let (images, daemon) = site();
    let socket = images.path("run/nbd.sock");
    // In one step: a socket that is gone is bound again.
    std::fs::write(images.path("precious"), "precious").unwrap();
    std::fs::rename(images.path("precious"), &socket).unwrap();
    daemon.wait_for("the socket is missed", |status| {
        warnings(status).iter().any(|told| told.contains("nbd.sock"))
    });
    assert!(done_unwell(&daemon).contains("new clients cannot reach the daemon there"));
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
    std::fs::remove_file(&socket).unwrap();
    daemon.wait_for("it is bound again", |status| warnings(status).is_empty());
    UnixStream::connect(&socket).unwrap();
    done(&daemon, &["set", "tank", "writeback_delay=17"]);
    assert_eq!(daemon.stop().0, 0);
}

/// The directory of the note and of the sockets has become a file, and the configuration is gone:
/// all of that is reported, and its end.
#[test]
fn what_cannot_be_mended_is_told_until_it_is() {
    let (images, daemon) = site();
    let (run, away) = (images.path("run"), images.path("run-away"));
    let (config, config_away) = (images.path("config.toml"), images.path("config-away"));
    std::fs::rename(&run, &away).unwrap();
    std::fs::write(&run, "").unwrap();
    std::fs::rename(&config, &config_away).unwrap();
    let events = ["note-not-replaced", "socket-gone", "configuration-gone"];
    for event in events {
        wait_for(event, || daemon.log().contains(&format!("[event={event}]")));
    }
    std::fs::remove_file(&run).unwrap();
    std::fs::rename(&away, &run).unwrap();
    std::fs::rename(&config_away, &config).unwrap();
    daemon.wait_for("all is as it should be", |status| warnings(status).is_empty());
    let note = std::fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "note"));
    let note = note.expect("there is one").display().to_string();
    let socket = run.join("nbd.sock").display().to_string();
    for told in [
        format!("{note}: the note is in its place again"),
        format!("{socket}: bcached listens there again"),
        format!("{}: the configuration is there again", config.display()),
    ] {
        wait_for(&told, || daemon.log().contains(&told));
    }
    UnixStream::connect(&socket).unwrap();
    assert_eq!(daemon.stop().0, 0);
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: it never came");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn done_unwell(daemon: &Daemon) -> String {
    let ran = ask(daemon, &["status"]);
    assert_eq!(ran.exit, 1, "{ran:?}");
    ran.out
}
