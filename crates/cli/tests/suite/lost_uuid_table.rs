//! A cache's UUID table is lost, as when the SSD drops a write: no volume shows, or gets, another
//! one's data.

#![allow(clippy::panic, reason = "a test fails where it cannot go on")]

use crate::common::{Daemon, Images, ask, bcached, bytes, content, done, fill, patch, pattern, requires};

const SIZE: usize = 4 << 20;
const BUCKET: u64 = 512 << 10;

/// Makes a cache with dirty data of `first`, and only clean data of `second`; the daemon is
/// stopped.
fn two_volumes(images: &Images) -> (String, String, String) {
    let cache = images.blank("fast", 600 * BUCKET);
    assert_eq!(bcached(&["make", "-C", &cache]).exit, 0);
    let mut text = format!(
        "version = 1\n[defaults]\nwriteback_running = false\nsequential_cutoff = 0\nwait = \"1s\"\n[cache.fast]\n\
         device = {cache:?}\ncongested_read_threshold_us = 0\ncongested_write_threshold_us = 0\n"
    );
    let mut backings = Vec::new();
    for (name, mode) in [("first", "writeback"), ("second", "writethrough")] {
        let backing = images.blank(name, SIZE as u64 + (1 << 20));
        assert_eq!(bcached(&["make", "--label", name, "-B", &backing]).exit, 0);
        text += &format!("[volume.{name}]\nbacking = {backing:?}\ncache_mode = {mode:?}\n");
        backings.push(backing);
    }
    images.configure(&text);
    let daemon = Daemon::configured(images);
    fill(images, &daemon, "first", &pattern(SIZE, 1));
    fill(images, &daemon, "second", &pattern(SIZE, 2));
    assert_eq!(daemon.stop().0, 0);
    let second = backings.pop().expect("two");
    (cache, backings.pop().expect("two"), second)
}

/// Overwrites the bucket of the table with zeroes.
fn lose_table(cache: &str) {
    let dumped = bcached(&["dump", cache, "journal"]);
    let newest = dumped.out.lines().rfind(|line| line.contains(" uuids ")).expect("an entry");
    let at = newest.split(" uuids ").nth(1).and_then(|rest| rest.trim_start_matches('[').strip_prefix("0:"));
    let sector = at.and_then(|rest| rest.split(' ').next()).and_then(|number| number.parse::<u64>().ok());
    let at = sector.unwrap_or_else(|| panic!("no table in {newest}")) * 512;
    patch(cache, at, &vec![0; usize::try_from(BUCKET).expect("small")]);
}

fn disk(path: &str) -> Vec<u8> {
    bytes(path)[8192..][..SIZE].to_vec()
}

#[test]
fn each_volume_finds_its_own_though_the_table_is_lost() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, first, second) = two_volumes(&images);
    lose_table(&cache);
    let checked = bcached(&["check", &cache, "--backing", &first, "--backing", &second]);
    assert_eq!(
        (checked.exit, checked.out.contains("table is not the one that was written")),
        (1, true),
        "{checked:?}"
    );
    let daemon = Daemon::configured(&images);
    assert!(content(&images, &daemon, "first")[..SIZE] == pattern(SIZE, 1));
    assert!(content(&images, &daemon, "second")[..SIZE] == pattern(SIZE, 2));
    daemon.wait_for("the word on it", |_| daemon.log().contains("event=table-damaged"));
    done(&daemon, &["set", "first", "writeback_running=true"]);
    done(&daemon, &["flush", "first"]);
    assert_eq!(daemon.stop().0, 0);
    assert!(disk(&first) == pattern(SIZE, 1) && disk(&second) == pattern(SIZE, 2));
    let checked = bcached(&["check", &cache, "--backing", &first, "--backing", &second]);
    assert_eq!(checked.exit, 0, "the table is sound again: {checked:?}");
}

/// The volume with clean data is served alone, and a flush writes back all of its own dirty data:
/// none. The other volume is served later.
#[test]
fn a_volume_that_comes_alone_does_not_get_the_number_of_another() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, first, second) = two_volumes(&images);
    lose_table(&cache);
    let away = images.path("away");
    std::fs::rename(&first, &away).expect("it can be renamed");
    // As if bcached had never recorded it: only the table says which number it had.
    patch(&second, 4096 + 448, &[0; 64]);
    let alone = ["--cache", &cache, "--backing", &second];
    let daemon = Daemon::start(&images, &alone);
    assert!(content(&images, &daemon, "second")[..SIZE] == pattern(SIZE, 2));
    daemon.wait_for("the walk", |status| status["caches"][0]["ownerless_dirty_bytes"] == SIZE as u64);
    let status = ask(&daemon, &["status"]);
    assert!(status.out.contains("4 MiB of dirty data belongs to no known volume, and is kept"), "{status:?}");
    assert_eq!(status.exit, 1, "all volumes are served, and yet it is not well: {status:?}");
    done(&daemon, &["set", "second", "--runtime", "writeback_running=true"]);
    done(&daemon, &["flush", "second"]);
    assert_eq!(daemon.stop().0, 0);
    assert!(disk(&second) == pattern(SIZE, 2), "nothing of the other one was written to it");
    std::fs::rename(&away, &first).expect("it can be renamed");
    let daemon = Daemon::configured(&images);
    assert!(content(&images, &daemon, "first")[..SIZE] == pattern(SIZE, 1), "all of it is there");
    assert_eq!(daemon.stop().0, 0);
}

/// The disk as a kernel alone would have left it: only the table said whose the dirty data is. No
/// command leads to its loss.
#[test]
fn a_cache_with_data_of_no_known_volume_is_not_let_go_of() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, first, _second) = two_volumes(&images);
    lose_table(&cache);
    patch(&first, 4096 + 448, &[0; 64]);
    let daemon = Daemon::configured(&images);
    daemon.wait_for("the walk", |status| status["caches"][0]["ownerless_dirty_bytes"] == SIZE as u64);
    let status = ask(&daemon, &["status"]).out;
    assert!(status.contains("keep both devices as they are"), "{status}");
    let new = images.blank("new", 64 << 20);
    let name = daemon.status()["caches"][0]["name"].as_str().expect("text").to_owned();
    for more in [&["--dry-run"][..], &[]] {
        let ran = ask(&daemon, &[&["replace", &name, "--with", &new], more].concat());
        assert_eq!(ran.exit, 3, "{ran:?}");
        assert!(ran.err.contains("4 MiB dirty of no known volume"), "{ran:?}");
    }
    done(&daemon, &["remove", "first"]);
    assert_eq!(daemon.stop().0, 0);
    let config = images.path("config.toml").display().to_string();
    let ran = bcached(&["make", "-C", &cache, "--wipe-bcache", "--dry-run", "--config", &config]);
    assert_eq!(ran.exit, 3, "{ran:?}");
    assert!(ran.err.contains("first") && !ran.err.contains("wipefs"), "{ran:?}");
}
