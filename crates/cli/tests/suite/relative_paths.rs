//! Relative paths, which may start from a directory other than the daemon's.

use crate::common::{self, CommandResult, Daemon, Images, ask, bcached, done, json, refused, run};

/// Runs a command in the directory of the images.
fn here(images: &Images, daemon: &Daemon, words: &[&str]) -> CommandResult {
    let mut command = common::program();
    run(command.args(words).args(["--control", daemon.control()]).current_dir(images.path("")))
}

/// Makes a cache `nvme` on `ssd`, and its volume `media` on `hdd`.
fn configured() -> (Images, Daemon) {
    let images = Images::new();
    let (ssd, hdd) = (images.blank("ssd", 36 << 20), images.blank("hdd", 20 << 20));
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &ssd, "-B", &hdd]).exit, 0);
    images.configure(&format!(
        "version = 1\n[cache.nvme]\ndevice = {ssd:?}\n[volume.media]\nbacking = {hdd:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

/// A regression: `./ssd` was unknown, although its absolute path was known as the cache.
#[test]
fn every_command_takes_a_path_from_here() {
    let (images, daemon) = configured();
    let works = |words: &[&str]| {
        let ran = here(&images, &daemon, words);
        assert_eq!(ran.exit, 0, "{words:?}: {ran:?}\n{}", daemon.log());
        ran.out
    };
    assert_eq!(
        (works(&["get", "./ssd", "discard"]), works(&["get", "hdd", "writeback_percent"])),
        ("0\n".into(), "10\n".into())
    );
    works(&["set", "ssd", "discard=1", "--runtime", "--dry-run"]);
    for device in ["ssd", "./hdd"] {
        let status = works(&["status", device]);
        assert!(status.contains("cache nvme on ") && status.contains("volume media: "), "{status}");
    }
    works(&["wait", "hdd", "--for", "served"]);
    let explained = here(&images, &daemon, &["explain", "hdd", "0"]);
    assert_eq!(explained.exit, 1, "{explained:?}");
    works(&["flush", "./hdd"]);
    works(&["detach", "hdd"]);
    works(&["attach", "hdd", "--cache", "./ssd"]);
    works(&["release", "./ssd", "--dry-run"]);
    works(&["release", "ssd"]);
    works(&["import", "ssd"]);
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn a_name_is_stronger_than_a_file_of_that_name() {
    let (images, daemon) = configured();
    for name in ["media", "nvme", "other"] {
        images.blank(name, 4096);
    }
    assert!(here(&images, &daemon, &["status", "media"]).out.contains("volume media: served"));
    assert_eq!(here(&images, &daemon, &["get", "nvme", "discard"]).out, "0\n");
    let ran = here(&images, &daemon, &["get", "other"]);
    assert_eq!((ran.exit, ran.err.contains("nothing is called `other`")), (2, true), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: caches have options, too, but were not among the names listed.
#[test]
fn who_asks_for_options_of_nobody_is_told_of_caches_too() {
    let (_images, daemon) = configured();
    for words in [&["get", "nobody"][..], &["set", "nobody", "discard=1"], &["unset", "nobody", "discard"]] {
        refused(&daemon, words, 2, "there are: media, nvme");
    }
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the daemon had another working directory, and the absolute path was unknown.
#[test]
fn devices_of_the_command_line_are_called_from_anywhere() {
    let images = Images::new();
    let ssd = images.blank("ssd", 36 << 20);
    let hdd = images.blank("hdd", 20 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &ssd, "-B", &hdd]).exit, 0);
    let mut command = Daemon::command(&images, "run", &["--cache", "ssd", "--backing", "hdd"]);
    command.current_dir(images.path(""));
    let daemon = Daemon::start_command(&images, command);
    for device in [ssd.as_str(), "ssd", "./ssd"] {
        let status = here(&images, &daemon, &["status", device]);
        assert_eq!((status.exit, status.out.contains("cache ")), (0, true), "{status:?}");
        assert_eq!(here(&images, &daemon, &["get", device, "discard"]).out, "0\n");
    }
    done(&daemon, &["status", &ssd]);
    done(&daemon, &["status", &hdd]);
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: `get` accepted the beginning of a set's UUID, and `status` did not.
#[test]
fn a_set_is_called_by_eight_digits_of_its_uuid() {
    let (_images, daemon) = configured();
    let status = json(&done(&daemon, &["status", "--json"]));
    let uuid = status["caches"][0]["set_uuid"].as_str().expect("it is open").to_owned();
    for typed in [&uuid[..8], &uuid.to_uppercase(), &format!("UUID={uuid}")] {
        let of_set = done(&daemon, &["status", typed]);
        assert!(of_set.contains("cache nvme on "), "{of_set}");
        done(&daemon, &["get", typed, "discard"]);
    }
    assert_eq!(ask(&daemon, &["status", &uuid[..7]]).exit, 2);
    assert_eq!(daemon.stop().0, 0);
}
