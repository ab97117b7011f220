//! No command prints an unknown number: tests each damaged structure of a set with each command
//! that reads it.

use crate::common::{self, CommandResult, Daemon, Images, ask, bcached, fill, json, patch, requires};
use serde_json::Value;

const BUCKET: u64 = 64 << 10;

/// The offsets of some structures of a set, in bytes.
struct StructureOffsets {
    journal: (u64, u64),
    prios: u64,
    uuids: u64,
    root: u64,
}

/// Makes a set with a volume `tank`, of which 1 MiB is dirty.
fn dirty_set(images: &Images) -> (String, String) {
    let (fast, tank) = images.configure_pair(36 << 20, 20 << 20, "writeback_running = false\n");
    let daemon = Daemon::configured(images);
    fill(images, &daemon, "tank", &[0x5a; 1 << 20]);
    assert_eq!(daemon.stop().0, 0);
    (fast, tank)
}

/// Returns the records of a part of the set's metadata.
fn dumped(fast: &str, part: &str, record: &str) -> Vec<Value> {
    let ran = bcached(&["dump", "--json", fast, part]);
    let records = ran.out.lines().skip(1).map(json);
    records.filter(|line| line["record"] == record).collect()
}

fn places(fast: &str) -> StructureOffsets {
    let number = |value: &Value| value.as_u64().expect("a number");
    let superblock = &dumped(fast, "superblock", "superblock")[0];
    let first = number(&superblock["first_bucket"]) * BUCKET;
    let journal = number(&superblock["journal_buckets"]) * BUCKET;
    let entries = dumped(fast, "journal", "journal-entry");
    let newest = entries.iter().max_by_key(|entry| number(&entry["seq"])).expect("an entry");
    let pointed = |key: &Value| {
        let text = key["pointers"][0].as_str().expect("a pointer");
        let sector = text.split([':', ' ']).nth(1).expect("a sector");
        sector.parse::<u64>().expect("a number") * 512
    };
    StructureOffsets {
        journal: (first, journal),
        prios: number(&newest["prio_bucket"]) * BUCKET,
        uuids: pointed(&newest["uuids"]),
        root: pointed(&newest["root"]),
    }
}

/// The output has no zero for the dirty data.
#[track_caller]
fn tells_no_number(what: &str, ran: &CommandResult) {
    assert!(!ran.out.contains("0 B dirty") && !ran.err.contains("0 B dirty"), "{what}: {ran:?}");
}

/// A regression: `check`, `status` and others said "0 B dirty" of a set whose root, journal or
/// table could not be read.
#[test]
fn no_command_says_that_nothing_is_dirty_where_nobody_knows() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (fast, tank) = dirty_set(&images);
    let at = places(&fast);
    let whole = common::bytes(&fast);
    let unknown = "Amount of dirty data unknown; tank's superblock says dirty.";
    let nobodys =
        "1 MiB dirty, of volumes that the volume table does not name; tank's superblock says dirty.";
    for (what, (offset, length), verdict, dirty) in [
        ("superblock", (4096 + 100, 64), "superblock unreadable", unknown),
        ("journal", at.journal, "journal unreadable", unknown),
        ("priorities", (at.prios, BUCKET), "generations of the buckets unreadable", unknown),
        ("root", (at.root, 4096), "root node unreadable", unknown),
        ("volume table", (at.uuids, BUCKET), "volume table differs from the one that was written", nobodys),
    ] {
        patch(&fast, offset, &vec![0x5a; usize::try_from(length).expect("small")]);
        let ran = bcached(&["check", &fast, "--backing", &tank]);
        let wanted = format!("{fast}: DAMAGED: {verdict}. {dirty}\n");
        assert_eq!((ran.exit, ran.out.starts_with(&wanted)), (1, true), "{what}: {wanted}{ran:?}");
        tells_no_number(what, &ran);
        tells_no_number(what, &bcached(&["check", &fast]));
        // The output is larger than a pipe's buffer.
        let checked =
            common::program().args(["check", "--json", &fast, "--backing", &tank]).output().expect("it runs");
        let checked = json(&String::from_utf8(checked.stdout).expect("text"));
        let set = &checked["sets"][0];
        assert_eq!((&set["dirty_state"], &set["dirty_bytes"]), (&"unknown".into(), &Value::Null), "{what}");
        let volumes = set["volumes"].as_array().expect("a list");
        assert!(volumes.iter().all(|volume| volume["dirty_sectors"].is_null()), "{what}: {set}");
        assert_eq!(set["backing_claims"][0]["state"], "dirty", "{what}: {set}");
        served(&images, what);
        std::fs::write(&fast, &whole).expect("as before");
    }
}

/// Checks what a daemon reports that is configured to serve the set.
fn served(images: &Images, what: &str) {
    let daemon = Daemon::configured(images);
    let tank = || daemon.status()["volumes"][0].clone();
    if what == "volume table" {
        // All keys can be counted, and the backing device knows the number under which they are its
        // own.
        let is_counted = |volume: &Value| volume["state"] == "served" && volume["dirty_bytes"] == 1 << 20;
        daemon.wait_for("tank with all that is dirty", |status| is_counted(&status["volumes"][0]));
        return;
    }
    assert_eq!((&tank()["state"], &tank()["dirty_bytes"]), (&"failed".into(), &Value::Null), "{what}");
    assert_eq!(tank()["superblock_state"], "dirty", "{what}: {}", tank());
    for words in [&["list"][..], &["wait", "tank", "--for", "clean", "--timeout", "1s"]] {
        tells_no_number(what, &ask(&daemon, words));
    }
    let listed = ask(&daemon, &["list"]).out;
    let line = listed.lines().find(|line| line.starts_with("volume")).expect("it is listed");
    assert!(line.contains("unknown"), "{what}: {line}");
    let metrics = ask(&daemon, &["metrics"]).out;
    assert!(!metrics.contains("bcached_volume_dirty_bytes{"), "{what}: {metrics}");
    let status = ask(&daemon, &["status"]);
    tells_no_number(what, &status);
    assert!(!metrics.contains("bcached_cache_dirty_bytes{"), "{what}: {metrics}");
    if what != "superblock" {
        // Which bytes are invalid is only in the log.
        assert!(!status.out.contains("csum") && !status.out.contains("btree node"), "{what}: {status:?}");
        assert!(daemon.log().contains("event=set-damaged"), "{what}: {}", daemon.log());
    }
    let told = "the backing device's superblock says dirty, so the newest data is in that cache; the amount is \
                unknown";
    assert!(status.out.contains(told), "{what}: {status:?}");
}

/// A regression: each extent had its own line: 942 of them.
#[test]
fn a_finding_that_repeats_is_told_once_with_its_count() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (fast, _) = dirty_set(&images);
    let at = places(&fast);
    // A table without volumes.
    patch(&fast, at.uuids, &vec![0; usize::try_from(BUCKET).expect("small")]);
    let short = bcached(&["check", &fast]);
    let whole = bcached(&["check", "-v", &fast]);
    assert_eq!((short.exit, whole.exit), (1, 1), "{short:?}");
    let counts = json(&bcached(&["check", "--json", &fast]).out)["sets"][0]["counts"].clone();
    let mut kinds = counts.as_array().expect("a list").iter();
    let count = kinds.find(|one| one["kind"] == "nobodys").map_or(&Value::Null, |one| &one["count"]);
    let told = format!("error: {count} extents belong to no volume of the table; 1 MiB of that is dirty\n");
    assert!(count.as_u64() > Some(1) && short.out.contains(&told), "{told}{short:?}");
    assert!(short.out.ends_with("-v lists each finding with its place\n"), "{short:?}");
    // The verdict, the table's mismatch, these extents, and where there is more.
    assert_eq!(short.out.lines().count(), 4, "{short:?}");
    let each = whole.out.matches("belongs to slot 0, which was never used").count();
    assert_eq!(Some(each as u64), count.as_u64(), "{whole:?}");
}

/// A regression: `dump journal` numbered the buckets within the journal, and everything else within
/// the device.
#[test]
fn buckets_are_counted_in_one_way() {
    let images = Images::new();
    let (fast, _) = images.configure_pair(36 << 20, 20 << 20, "");
    assert_eq!(Daemon::configured(&images).stop().0, 0);
    for entry in dumped(&fast, "journal", "journal-entry") {
        let sector = entry["sector"].as_u64().expect("a number");
        assert_eq!(entry["bucket"], sector * 512 / BUCKET, "{entry}");
        let line = format!(" bucket {} sector {sector} ", entry["bucket"]);
        assert!(bcached(&["dump", &fast, "journal"]).out.contains(&line), "{line}");
    }
}
