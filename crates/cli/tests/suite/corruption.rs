//! Flips bytes in a set with dirty data, structure by structure, and runs the whole program on it.
//!
//! Damage to a structure with a checksum is found: `check` names the structure, `serve` refuses
//! with one sentence, and no byte of a device is written. Damage that the format cannot detect
//! (data, the UUID table, a newest journal entry that a crash may have torn) is here too, with
//! exactly what is promised for it: `docs/format.md`, "What a check cannot notice".

use crate::common::{Daemon, Images, bcached, bytes, json, patch, requires, run, tool};
use serde_json::Value;
use std::ops::RangeInclusive;

/// What `check` says about a UUID table that differs from the one written.
const TABLE_DIFFERS: &str = "table is not the one that was written";

/// Small buckets: a few hundred extents make a tree of two levels.
const BUCKET: &str = "8k";
const BUCKET_SECTORS: u64 = 16;
const EXTENTS: u64 = 420;
/// The distance between extents of 4 KiB: none can merge with its neighbour.
const STRIDE: u64 = 16 << 10;
const EXTENT: u64 = 4 << 10;
const FILL: u8 = 7;
const CACHE_BYTES: u64 = 20 << 20;
/// The backing device's data lies past the end of the cache's offsets, so that writes to it alone
/// can be made to fail.
const DATA_OFFSET: u64 = 22 << 20;
const BACKING_BYTES: u64 = 30 << 20;

/// How the daemon that wrote the set ended.
#[derive(Clone, Copy, PartialEq, Debug)]
enum WriterEnd {
    Stop,
    /// A power cut, as far as it can be simulated: the process is killed and its note is missing.
    Crash,
}

/// A set: its devices, and where its structures are (sectors of the cache).
struct SetLayout {
    cache: String,
    backing: String,
    newest_entry: u64,
    /// The number of keys in the newest entry.
    newest_keys: usize,
    /// Another entry that a replay needs besides the newest one; there is none after a stop.
    needed_entry: Option<u64>,
    priorities: u64,
    uuids: u64,
    root: u64,
    leaf: u64,
    /// The data of the leaf's first extent.
    data: u64,
}

impl SetLayout {
    fn new(images: &Images, name: &str, end: WriterEnd) -> Self {
        let cache = images.blank(&format!("{name} cache"), CACHE_BYTES);
        let backing = images.blank(&format!("{name} backing"), BACKING_BYTES);
        let offset = (DATA_OFFSET / 512).to_string();
        let made = bcached(&[
            "make",
            "-b",
            BUCKET,
            "-o",
            &offset,
            "--writeback",
            "--label",
            "tank",
            "-C",
            &cache,
            "-B",
            &backing,
        ]);
        assert_eq!(made.exit, 0, "{made:?}");
        let daemon = Daemon::start(images, &["--cache", &cache, "--backing", &backing]);
        // On a loaded machine the cache would count as congested, and requests that bypass it would
        // fail below (`No space left on device`).
        let never =
            ["set", &cache, "congested_write_threshold_us=0", "--runtime", "--control", daemon.control()];
        assert_eq!(bcached(&never).exit, 0);
        // Write-back fails, so nothing is written back however long this takes.
        daemon.fail_writes_beyond(CACHE_BYTES);
        let mut writing = tool("qemu-io");
        writing.args(["-f", "raw"]);
        for extent in 0..EXTENTS {
            writing.arg("-c").arg(format!("write -q -P {FILL} {} {EXTENT}", extent * STRIDE));
        }
        let written = run(writing.args(["-c", "flush"]).arg(daemon.uri("tank")));
        assert_eq!(written.exit, 0, "{written:?}");
        match end {
            WriterEnd::Stop => assert_eq!(daemon.stop().0, 0),
            WriterEnd::Crash => daemon.kill(),
        }
        Self::locate(cache, backing)
    }

    fn locate(cache: String, backing: String) -> Self {
        let records = |part: &str| -> Vec<Value> {
            let dumped = bcached(&["dump", "--json", &cache, part]);
            assert_eq!(dumped.exit, 0, "{dumped:?}");
            dumped.out.lines().skip(1).map(json).collect()
        };
        let entries = records("journal");
        let newest = entries.iter().max_by_key(|entry| entry["seq"].as_u64()).expect("an entry");
        let (seq, last_seq) = (number(newest, "seq"), number(newest, "last_seq"));
        // One from the middle: a careless reader would not miss the first or the last of a run.
        let wanted = u64::midpoint(last_seq, seq);
        let needed = entries.iter().find(|entry| number(entry, "seq") == wanted && wanted < seq);
        let nodes = records("tree");
        let node = |level| nodes.iter().find(|node| number(node, "level") == level).expect("two levels");
        let (root, leaf) = (node(1), node(0));
        let newest_keys = newest["keys"].as_array().expect("a list").len();
        let (newest_entry, needed_entry) =
            (number(newest, "sector"), needed.map(|entry| number(entry, "sector")));
        let priorities = number(newest, "prio_bucket") * BUCKET_SECTORS;
        let uuids = pointer(&newest["uuids"]);
        let data = pointer(&leaf["sets"][0]["keys"][0]);
        let (root, leaf) = (number(root, "sector"), number(leaf, "sector"));
        Self { cache, backing, newest_entry, newest_keys, needed_entry, priorities, uuids, root, leaf, data }
    }
}

fn number(record: &Value, field: &str) -> u64 {
    record[field].as_u64().expect(field)
}

/// Returns the sector that a key points to: "0:704 gen 1".
fn pointer(key: &Value) -> u64 {
    let text = key["pointers"][0].as_str().expect("a pointer");
    let sector = text.split([':', ' ']).nth(1).expect("a sector");
    sector.parse().expect("a number")
}

/// Which device's bytes are flipped.
#[derive(Clone, Copy, Debug)]
enum FlippedDevice {
    Cache,
    Backing,
}

/// The required result.
#[derive(Debug)]
enum ExpectedOutcome {
    /// `check` answers no and names the structure; `serve` ends with this exit status and sentence;
    /// nothing is written.
    Found { structure: &'static str, exit: i32, sentence: &'static str },
    /// The set is served, and so many bytes differ from what was written. `check` says this, and at
    /// most warns.
    Served { check: &'static str, differ: RangeInclusive<usize> },
}

/// [`FLIPPED`] bytes to flip, from `offset` in `sector` on, and the required result.
struct ByteFlip<'a> {
    what: &'static str,
    set: &'a SetLayout,
    on: FlippedDevice,
    sector: u64,
    offset: u64,
    outcome: ExpectedOutcome,
}

const FLIPPED: usize = 4;

/// Returns copies of the set's devices, with the bytes flipped.
fn flipped(images: &Images, flip: &ByteFlip<'_>) -> (String, String) {
    let copy = |from: &str, name: &str| {
        let to = images.path(name);
        std::fs::copy(from, &to).expect("a copy");
        to.to_str().expect("text").to_owned()
    };
    let (cache, backing) = (copy(&flip.set.cache, "cache"), copy(&flip.set.backing, "backing"));
    let image = match flip.on {
        FlippedDevice::Cache => &cache,
        FlippedDevice::Backing => &backing,
    };
    let offset = flip.sector * 512 + flip.offset;
    let start = usize::try_from(offset).expect("small");
    let turned: Vec<u8> = bytes(image)[start..start + FLIPPED].iter().map(|byte| !byte).collect();
    patch(image, offset, &turned);
    (cache, backing)
}

fn prove(flip: &ByteFlip<'_>) {
    let what = flip.what;
    // A directory of its own, so that it has no note of another case.
    let images = Images::new();
    let (cache, backing) = flipped(&images, flip);
    let devices = ["--cache", cache.as_str(), "--backing", &backing];
    let before = (bytes(&cache), bytes(&backing));
    let checked = bcached(&["check", "-v", &cache, "--backing", &backing]);
    match flip.outcome {
        ExpectedOutcome::Found { structure, exit, sentence } => {
            let is_named = checked.out.contains("error: ") && checked.out.contains(structure);
            assert_eq!((checked.exit, is_named), (1, true), "{what}: {checked:?}");
            let ran = run(&mut Daemon::command(&images, "run", &devices));
            assert_eq!((ran.exit, ran.out.as_str()), (exit, ""), "{what}: {ran:?}");
            // Apart from log events there is only the sentence; for damage the log has the details.
            let said: Vec<_> = ran.err.lines().filter(|line| !line.contains(" [event=")).collect();
            assert!(
                said.len() == 1 && said[0].starts_with("bcached: ") && ran.err.contains(sentence),
                "{what}: {ran:?}"
            );
            assert!(!ran.err.contains("panicked"), "{what}: {ran:?}");
            assert!((bytes(&cache), bytes(&backing)) == before, "{what}: a device was written");
        }
        ExpectedOutcome::Served { check, ref differ } => {
            // bcached seals the table that it writes. A volume that can prove its number is served
            // all the same.
            let exit = i32::from(check == TABLE_DIFFERS);
            assert_eq!((checked.exit, checked.out.contains(check)), (exit, true), "{what}: {checked:?}");
            assert!((bytes(&cache), bytes(&backing)) == before, "{what}: the check wrote");
            let daemon = Daemon::start(&images, &devices);
            let differing = differing(&images, &daemon);
            assert!(differ.contains(&differing), "{what}: {differing} bytes differ, not {differ:?}");
            let (exit, log) = daemon.stop();
            assert_eq!(exit, 0, "{what}: {log}");
        }
    }
}

/// Returns the number of bytes in the extents that differ from what was written.
fn differing(images: &Images, daemon: &Daemon) -> usize {
    let back = images.path("back");
    let copied = run(tool("nbdcopy").arg(daemon.uri("tank")).arg(&back));
    assert_eq!(copied.exit, 0, "{copied:?}");
    let content = bytes(&back);
    let starts = (0..EXTENTS).map(|extent| usize::try_from(extent * STRIDE).expect("small"));
    let length = usize::try_from(EXTENT).expect("small");
    starts.flat_map(|start| &content[start..start + length]).filter(|byte| **byte != FILL).count()
}

#[test]
fn flipped_bytes_are_named_refused_or_survived() {
    if !requires("qemu-io") || !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let stopped = SetLayout::new(&images, "stopped", WriterEnd::Stop);
    let crashed = SetLayout::new(&images, "crashed", WriterEnd::Crash);
    for flip in sealed(&stopped, &crashed).iter().chain(&passing(&stopped, &crashed)) {
        prove(flip);
    }
    unnamed_volume(&stopped);
}

/// Structures with a checksum.
fn sealed<'a>(stopped: &'a SetLayout, crashed: &'a SetLayout) -> [ByteFlip<'a>; 6] {
    let found = |structure, sentence| ExpectedOutcome::Found { structure, exit: 4, sentence };
    let cache = |what, set, sector, outcome| ByteFlip {
        what,
        set,
        on: FlippedDevice::Cache,
        sector,
        offset: 100,
        outcome,
    };
    let superblock = "its superblock is not usable: bad checksum";
    let node = "is damaged: btree node";
    let needed = crashed.needed_entry.expect("a crash leaves entries to replay");
    [
        cache("cache superblock", stopped, 8, found("cache device, superblock", superblock)),
        ByteFlip {
            on: FlippedDevice::Backing,
            ..cache("backing superblock", stopped, 8, found("backing device 0, superblock", superblock))
        },
        cache("needed entry", crashed, needed, found("cache device, journal", "journal entries")),
        cache(
            "priorities",
            stopped,
            stopped.priorities,
            found("cache device, priorities", "priority set: bad csum"),
        ),
        cache("root", stopped, stopped.root, found("btree node at sector", node)),
        cache("leaf", stopped, stopped.leaf, found("btree node at sector", node)),
    ]
}

/// Damage that the format cannot detect.
fn passing<'a>(stopped: &'a SetLayout, crashed: &'a SetLayout) -> [ByteFlip<'a>; 5] {
    let cache = |what, set, sector, offset, check, differ| ByteFlip {
        what,
        set,
        on: FlippedDevice::Cache,
        sector,
        offset,
        outcome: ExpectedOutcome::Served { check, differ },
    };
    let torn = "is incomplete: torn by a crash, or damaged";
    let lost = crashed.newest_keys * usize::try_from(EXTENT).expect("small");
    [
        // It says the same as the entries before it, and that nothing is left to replay.
        cache("last entry of a stop", stopped, stopped.newest_entry, 100, torn, 0..=0),
        // A crash cannot tear an entry that was flushed, but that cannot be told apart. What only
        // this entry holds is lost.
        cache("newest entry", crashed, crashed.newest_entry, 100, torn, 0..=lost),
        cache("data", stopped, stopped.data, 100, ": sound", FLIPPED..=FLIPPED),
        cache("label in the uuid table", stopped, stopped.uuids, 20, TABLE_DIFFERS, 0..=0),
        // The backing device records the number under which its data is kept.
        cache("uuid in the table", stopped, stopped.uuids, 4, TABLE_DIFFERS, 0..=0),
    ]
}

/// Neither the UUID table nor the backing device says which number the volume has. The set is
/// opened, which writes to it. The backing device says that its newest data is in the set, and is
/// not served without it.
fn unnamed_volume(stopped: &SetLayout) {
    let images = Images::new();
    let outcome = ExpectedOutcome::Found { structure: "", exit: 3, sentence: "" };
    let (on, sector) = (FlippedDevice::Cache, stopped.uuids);
    let flip = ByteFlip { what: "uuid in the table", set: stopped, on, sector, offset: 4, outcome };
    let (cache, backing) = flipped(&images, &flip);
    // bcached's record of the attachment.
    patch(&backing, 4096 + 448, &[0; 40]);
    let before = bytes(&backing);
    let checked = bcached(&["check", "-v", &cache, "--backing", &backing]);
    assert_eq!((checked.exit, checked.out.contains("is not in the uuid table")), (1, true), "{checked:?}");
    let ran = run(&mut Daemon::command(&images, "run", &["--cache", &cache, "--backing", &backing]));
    let said = ran.err.lines().last().unwrap_or_default();
    let sentence = "the backing device is marked dirty for this set, but the set does not know it";
    assert_eq!((ran.exit, said.contains(sentence)), (3, true), "{ran:?}");
    assert!(bytes(&backing) == before, "the backing device was written");
}
