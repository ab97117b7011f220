//! A damaged part of a cache's index is frozen; everything else keeps working.

use crate::common::{
    self, Daemon, Images, ask, bcached, bytes, content, done, fill, patch, pattern, requires, run, tool,
};

/// Buckets of 32 KiB: a cache of so many is served before its index has been read.
const BUCKETS: u64 = 24_000;
const SIZE: usize = 48 << 20;

/// Makes a cache whose index has several leaves, and two volumes all of whose data is dirty in it.
fn filled(images: &Images) -> String {
    let cache = images.blank("fast", BUCKETS * (32 << 10));
    assert_eq!(bcached(&["make", "-b", "32k", "-C", &cache]).exit, 0);
    // A busy machine makes the cache look congested, and data that bypasses it is not in its index.
    let mut text = format!(
        "version = 1\n[defaults]\nwriteback_running = false\nsequential_cutoff = 0\n[cache.fast]\ndevice = {cache:?}\n\
        congested_read_threshold_us = 0\ncongested_write_threshold_us = 0\n"
    );
    for name in ["first", "second"] {
        let backing = images.blank(name, SIZE as u64 + (1 << 20));
        assert_eq!(bcached(&["make", "--writeback", "--label", name, "-B", &backing]).exit, 0);
        text += &format!("[volume.{name}]\nbacking = {backing:?}\n");
    }
    images.configure(&text);
    let daemon = Daemon::configured(images);
    fill(images, &daemon, "first", &pattern(SIZE, 1));
    fill(images, &daemon, "second", &pattern(SIZE, 2));
    assert_eq!(daemon.stop().0, 0);
    cache
}

/// Returns the last leaf's first byte on the device, and its first sector in its volume.
fn last_leaf(cache: &str) -> (u64, u64) {
    // The output is larger than a pipe's buffer.
    let dumped = common::program().args(["dump", cache, "tree"]).output();
    let dumped = String::from_utf8(dumped.expect("it runs").stdout).expect("text");
    let leaf = dumped.lines().rfind(|line| line.starts_with("node level 0 ")).expect("a leaf");
    let word = |name: &str| {
        let mut words = leaf.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).expect("a value").to_owned()
    };
    let from = word("from");
    let (inode, start) = from.split_once(':').expect("a position");
    assert_eq!(inode, "1", "it is of the second volume alone: {leaf}");
    (word("sector").parse::<u64>().expect("a number") * 512, start.parse().expect("a number"))
}

#[test]
fn a_damaged_leaf_freezes_what_it_is_the_index_of() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let images = Images::new();
    let cache = filled(&images);
    let (at, start) = last_leaf(&cache);
    let sound = bytes(&cache)[usize::try_from(at).expect("small")..][..64].to_vec();
    patch(&cache, at, &[0x5A; 64]);
    let daemon = Daemon::configured(&images);
    daemon.wait_for("the leaf to be passed by", |status| status["caches"][0]["walked_percent"] == 100);
    daemon.wait_for("the word on it", |_| {
        let log = daemon.log();
        log.contains("event=node-unreadable") && log.contains("index node damaged; second ")
    });
    assert_eq!(volume(&daemon, "first")["state"], "served");
    assert_eq!(volume(&daemon, "second")["state"], "degraded");
    assert!(content(&images, &daemon, "first")[..SIZE] == pattern(SIZE, 1), "the other volume");
    // Reads of the frozen sectors do not return the backing device's old data.
    assert_eq!([0, start, start + 64].map(|sector| reads(&daemon, sector)), [true, false, false]);
    done(&daemon, &["set", "first", "writeback_running=true"]);
    done(&daemon, &["set", "second", "writeback_running=true"]);
    done(&daemon, &["flush", "first"]);
    done(&daemon, &["detach", "first"]);
    let flushed = ask(&daemon, &["flush", "second"]);
    assert_eq!(
        (flushed.exit, flushed.err.contains("not all dirty data of second could be written back")),
        (4, true),
        "{flushed:?}"
    );
    // All known dirty data is written back; a zero would claim that there is no more.
    let second = volume(&daemon, "second");
    assert_eq!(
        (&second["dirty_bytes"], &second["dirty_state"]),
        (&serde_json::Value::Null, &"unknown".into())
    );
    assert_eq!(ask(&daemon, &["detach", "second"]).exit, 4);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    // Readable again, it has all of its data.
    patch(&cache, at, &sound);
    let daemon = Daemon::configured(&images);
    assert!(content(&images, &daemon, "second")[..SIZE] == pattern(SIZE, 2));
    done(&daemon, &["detach", "second"]);
    assert!(content(&images, &daemon, "second")[..SIZE] == pattern(SIZE, 2));
}

/// Returns whether a block of the second volume can be read.
fn reads(daemon: &Daemon, sector: u64) -> bool {
    let read = format!("read {} 4k", sector * 512);
    let ran = run(tool("qemu-io").args(["-f", "raw", "-r", "-c", &read, &daemon.uri("second")]));
    assert!(ran.exit == 0 || ran.out.contains("read failed: Input/output error"), "{ran:?}");
    ran.exit == 0
}

fn volume(daemon: &Daemon, name: &str) -> serde_json::Value {
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes");
    volumes.iter().find(|volume| volume["name"] == name).expect("served").clone()
}
