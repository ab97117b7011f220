//! A client that got no answer repeats its command: what is done already succeeds with exit status
//! 0, and nothing stored is lost by repeating.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use crate::common::{self, CommandResult, Daemon, Images, ask, bcached, done};
use std::os::unix::fs::{PermissionsExt as _, symlink};

const BACKING_BYTES: u64 = 16 << 20;

/// Starts a daemon with the caches `fast` and `spare` and the volume `tank`; makes a device `pond`
/// for another volume.
fn site() -> (Images, Daemon) {
    let images = Images::new();
    let (fast, tank) = images.pair(64 << 20, BACKING_BYTES);
    let spare = images.blank("spare", 64 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &spare]).exit, 0);
    let pond = images.blank("pond", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &pond]).exit, 0);
    let volume = format!("[volume.tank]\nbacking = {tank:?}\ncache = \"fast\"\n");
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[cache.spare]\ndevice = {spare:?}\n{volume}"
    ));
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

/// Runs six at once.
fn many(daemon: &Daemon, words: &[&str]) -> Vec<CommandResult> {
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..6).map(|_| scope.spawn(|| ask(daemon, words))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Every command that changes something, in an order in which each has something to do, with a part
/// of the output of its second run.
#[test]
fn every_changing_command_can_be_repeated() {
    let (images, daemon) = site();
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let (pond, next) = (text(images.path("pond")), images.blank("next", 64 << 20));
    let table: &[(&[&str], &str)] = &[
        (&["add", "pond", "--backing", &pond, "--cache", "spare"], "pond: it is there already"),
        (&["set", "pond", "cache_mode=writeback"], ""),
        (&["unset", "pond", "cache_mode"], ""),
        (&["set", "pond", "cache_mode=writearound"], ""),
        (&["set", "fast", "discard=true"], ""),
        (&["unset", "fast", "discard"], ""),
        (&["detach", "pond"], "pond: it is detached already"),
        (&["attach", "pond", "--cache", "spare"], "pond: it is attached already"),
        (&["flush", "pond"], "pond: it has no dirty data"),
        (&["shrink", "pond", "--size", "8M"], "pond: its size is 8 MiB already"),
        (&["grow", "pond"], "already"),
        (&["stop", "pond"], "pond: it is stopped already"),
        (&["add", "pond"], "pond: it is there already"),
        (&["remove", "pond"], "pond: it is removed already"),
        (&["add", "pond"], "pond: it is there already"),
        (&["add", "lake", "--size", "8M", "--cache", "fast"], "lake: it is there already"),
        (&["remove", "lake"], "lake: it is removed already"),
        (&["add", "lake"], "lake: it is there already"),
        (&["remove", "lake"], "lake: it is removed already"),
        (&["replace", "spare", "--with", &next], "spare: it is on that device already"),
        (&["release", "spare"], "spare: it is released already"),
        (&["import", "spare"], "spare: it is served already"),
    ];
    for (words, again) in table {
        done(&daemon, words);
        let said = done(&daemon, words);
        assert!(said.contains(again), "{words:?}: {said}");
    }
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn what_commands_have_added_is_kept_when_it_is_removed() {
    let (images, daemon) = site();
    let pond = images.path("pond").to_str().unwrap().to_owned();
    let add = ["add", "pond", "--backing", &pond, "--cache", "spare"];
    for ran in many(&daemon, &add) {
        assert_eq!(ran.exit, 0, "{ran:?}");
    }
    done(&daemon, &["set", "pond", "cache_mode=writearound", "writeback_delay=17"]);
    for ran in many(&daemon, &["remove", "pond"]) {
        assert_eq!(ran.exit, 0, "{ran:?}");
    }
    assert_eq!(daemon.stop().0, 0);

    // Repeated on the next daemon, which has never served it.
    let daemon = Daemon::configured(&images);
    assert_eq!(done(&daemon, &["remove", "pond"]), "pond: it is removed already\n");
    for words in [&["flush", "pond"][..], &["grow", "pond"], &["attach", "pond"], &["get", "pond"]] {
        common::refused(&daemon, words, 2, "`pond` is not served: it was removed");
    }
    common::refused(&daemon, &["remove", "nosuch"], 2, "nothing is called `nosuch`");
    for ran in many(&daemon, &["add", "pond"]) {
        assert_eq!(ran.exit, 0, "{ran:?}");
    }
    let options = done(&daemon, &["get", "pond"]);
    for option in ["writearound", "17"] {
        assert!(options.contains(option), "{options}");
    }
    let kept = images.kept();
    assert!(kept.contains("cache = \"spare\"") && !kept.contains("served"), "{kept}");

    // Its device under another name, and its name for another device: options of one do not apply
    // to the other.
    done(&daemon, &["remove", "pond"]);
    done(&daemon, &["add", "brook", "--backing", &pond]);
    assert!(!images.kept().contains("pond]"), "{}", images.kept());
    done(&daemon, &["set", "brook", "cache_mode=writearound"]);
    done(&daemon, &["remove", "brook"]);
    let other = images.blank("other", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &other]).exit, 0);
    done(&daemon, &["add", "brook", "--backing", &other, "--cache", "spare"]);
    assert!(!images.kept().contains("writearound"), "{}", images.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// The volume could not be served, and its device has been repaired by now.
#[test]
fn add_looks_again_at_what_could_not_be_served() {
    let (images, daemon) = site();
    let (pond, away) = (images.path("pond"), images.path("away"));
    std::fs::rename(&pond, &away).unwrap();
    std::fs::write(&pond, "").unwrap();
    let add = ["add", "pond", "--backing", pond.to_str().unwrap(), "--cache", "spare"];
    for _ in 0..2 {
        let ran = ask(&daemon, &add);
        assert!(ran.exit != 0 && ran.err.contains("it is empty"), "{ran:?}");
    }
    std::fs::rename(&away, &pond).unwrap();
    done(&daemon, &add);
    daemon.wait_for("it is served", |status| {
        let volumes = status["volumes"].as_array().unwrap();
        volumes.iter().any(|volume| volume["name"] == "pond" && volume["state"] == "served")
    });
    assert_eq!(daemon.stop().0, 0);
}

/// A repeated `remove` must not remove another volume that has the name as its label.
#[test]
fn a_name_that_was_removed_is_no_label_for_the_next_daemon() {
    let (images, daemon) = site();
    let labelled = images.blank("labelled", BACKING_BYTES);
    assert_eq!(bcached(&["make", "--label", "pond", "-B", &labelled]).exit, 0);
    done(&daemon, &["add", "other", "--backing", &labelled, "--cache", "spare"]);
    let pond = images.path("pond").to_str().unwrap().to_owned();
    done(&daemon, &["add", "pond", "--backing", &pond, "--cache", "spare"]);
    done(&daemon, &["remove", "pond"]);
    assert_eq!(daemon.stop().0, 0);
    let daemon = Daemon::configured(&images);
    done(&daemon, &["remove", "pond"]);
    let status = daemon.status();
    let names: Vec<_> = status["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    assert!(names.iter().any(|name| *name == "other"), "{status}");
    assert_eq!(daemon.stop().0, 0);
}

/// A configuration in a repository, linked from where it is read: the links are kept.
#[test]
fn files_behind_links_are_replaced_where_they_are() {
    let images = Images::new();
    images.configure_pair(64 << 20, BACKING_BYTES, "");
    std::fs::create_dir(images.path("config.d")).unwrap();
    std::fs::create_dir(images.path("far")).unwrap();
    symlink("../far/set.toml", images.path("config.d/99-set.toml")).unwrap();
    symlink("far/numbers.prom", images.path("numbers.prom")).unwrap();
    std::fs::write(images.path("far/numbers.prom"), "old").unwrap();
    let mode = std::fs::Permissions::from_mode(0o604);
    std::fs::set_permissions(images.path("far/numbers.prom"), mode).unwrap();
    let daemon = Daemon::configured(&images);
    done(&daemon, &["set", "tank", "writeback_delay=17"]);
    done(&daemon, &["set", "tank", "writeback_delay=18"]);
    let textfile = images.path("numbers.prom");
    done(&daemon, &["metrics", &format!("--textfile={}", textfile.display())]);
    for link in ["config.d/99-set.toml", "numbers.prom"] {
        assert!(images.path(link).symlink_metadata().unwrap().is_symlink(), "{link}");
    }
    assert!(std::fs::read_to_string(images.path("far/set.toml")).unwrap().contains("18"));
    let numbers = images.path("far/numbers.prom");
    assert!(std::fs::read_to_string(&numbers).unwrap().contains("node_bcache"));
    assert_eq!(numbers.metadata().unwrap().permissions().mode() & 0o777, 0o604);
    assert_eq!(std::fs::read_dir(images.path("far")).unwrap().count(), 2, "nothing unfinished is left");
    let ran = ask(&daemon, &["metrics", "--textfile=/dev/null"]);
    assert_eq!(ran.exit, 4, "{ran:?}");
    assert!(ran.err.contains("it is not a regular file"), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}
