//! `bcached make` against the installed `make-bcache`: the same options give the same bytes and the
//! same output, except for random UUIDs and the checksum over them.

use crate::common::{self, Images, bcached, bytes, json, patch, requires, run, tool};

const CACHE_BYTES: u64 = 36 << 20;

/// The superblock's offset, and its fields that are random or depend on random ones.
const SUPERBLOCK: usize = 4096;
const CHECKSUM: std::ops::Range<usize> = SUPERBLOCK..SUPERBLOCK + 8;
const UUID: std::ops::Range<usize> = SUPERBLOCK + 40..SUPERBLOCK + 56;
const SET_UUID: std::ops::Range<usize> = SUPERBLOCK + 56..SUPERBLOCK + 72;

fn masked(image: &str, set_uuid_given: bool) -> Vec<u8> {
    let mut bytes = bytes(image);
    assert!(bytes[UUID].iter().any(|byte| *byte != 0), "a device has a uuid");
    assert!(bytes[SET_UUID].iter().any(|byte| *byte != 0), "a set has a uuid");
    bytes[CHECKSUM].fill(0);
    bytes[UUID].fill(0);
    if !set_uuid_given {
        bytes[SET_UUID].fill(0);
    }
    bytes
}

/// Returns the lines without the values of random fields, and without the lines that only introduce
/// a device.
fn words(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| !line.ends_with(" device)"))
        .map(|line| if line.contains("UUID:") { line.split('\t').next().unwrap_or(line) } else { line })
        .collect()
}

/// Runs both programs with `line`, in which `CACHE`, `BACKING` and `SECOND` are replaced by fresh
/// images.
fn compare(line: &str) {
    let images = Images::new();
    let run_with = |prefix: &str, command: &mut dyn FnMut(&[&str]) -> common::CommandResult| {
        let cache = images.blank(&format!("{prefix}-cache"), CACHE_BYTES);
        let backing = images.blank(&format!("{prefix}-backing"), 20 << 20);
        let second = images.blank(&format!("{prefix}-second"), (9 << 20) + 512);
        let line: Vec<_> = line
            .split(' ')
            .map(|word| match word {
                "CACHE" => cache.as_str(),
                "BACKING" => backing.as_str(),
                "SECOND" => second.as_str(),
                other => other,
            })
            .collect();
        let ran = command(&line);
        assert_eq!(ran.exit, 0, "{line:?}: {ran:?}");
        (ran.out, [cache, backing, second])
    };
    let (theirs, their_images) = run_with("theirs", &mut |line| run(tool("make-bcache").args(line)));
    let (ours, our_images) = run_with("ours", &mut |line| {
        let mut all = vec!["make"];
        all.extend(line);
        bcached(&all)
    });
    // `make-bcache` prints neither the volume's name nor its mode.
    let added = |line: &&str| line.starts_with("label:") || line.starts_with("cache_mode:");
    let ours: String = ours.lines().filter(|line| !added(line)).map(|line| format!("{line}\n")).collect();
    assert_eq!(words(&ours), words(&theirs), "{line}");
    for (name, (ours, theirs)) in
        ["CACHE", "BACKING", "SECOND"].iter().zip(our_images.iter().zip(&their_images))
    {
        if line.contains(name) {
            let given = line.contains("--cset-uuid");
            assert!(masked(ours, given) == masked(theirs, given), "{line}: the bytes of {name} differ");
            let shown = run(tool("bcache-super-show").arg(ours));
            assert_eq!(shown.exit, 0, "{line}: {shown:?}");
        } else {
            assert!(bytes(ours).iter().all(|byte| *byte == 0), "{line}: {name} was not named");
        }
    }
}

#[test]
fn the_same_options_give_the_same_bytes_as_make_bcache() {
    if !requires("make-bcache") {
        return;
    }
    for line in [
        "-C CACHE -b 64k",
        "-C CACHE -b 4k -w 2k",
        "-C CACHE -b 8k -w 4k",
        "-C CACHE -b 16k -w 512",
        "-C CACHE -b 65536 -w 1024",
        "-C CACHE --bucket 32k --block 2k",
        "-C CACHE --bucket=32k --block=512",
        "-C CACHE -b 64k --discard",
        "-C CACHE -b 64k --cache_replacement_policy=fifo",
        "-C CACHE -b 64k --cache-replacement-policy random",
        "-C CACHE -b 64k --cache_replacement_policy lru --discard",
        "-C CACHE -b 64k --cset-uuid 0d7b9b2a-2a53-4ae5-9a6f-9f6f5d6b2f10",
        "-b 64k -C CACHE --writeback",
        "-C -b 64k CACHE",
        "-B BACKING",
        "-B BACKING SECOND",
        "-B BACKING --writeback",
        "-B BACKING -o 16",
        "-B BACKING -o 17",
        "-B BACKING --data-offset 2048",
        "-B BACKING --data_offset=8192 --writeback",
        "-B BACKING -w 512",
        "-B BACKING -b 64k",
        "--bdev BACKING --block 4k",
        "-B BACKING --cset-uuid 0d7b9b2a-2a53-4ae5-9a6f-9f6f5d6b2f10",
        "-C CACHE -B BACKING -b 64k",
        "-B BACKING -C CACHE -b 64k --writeback --discard",
        "-B BACKING -w 512 -b 32k SECOND -C CACHE -o 4096",
        "--cache CACHE --bdev BACKING --bdev SECOND --bucket 32k --block 1k",
        "-U -B BACKING",
    ] {
        compare(line);
    }
}

#[test]
fn devices_made_together_belong_together() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", CACHE_BYTES), images.blank("backing", 20 << 20));
    let ran = bcached(&["make", "--json", "--bucket", "64k", "--cache", &cache, "--backing", &backing]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert_eq!(bytes(&cache)[SET_UUID], bytes(&backing)[SET_UUID]);
    assert_ne!(bytes(&cache)[UUID], bytes(&backing)[UUID]);
    let made = json(&ran.out);
    assert_eq!(made["schema"], "bcached.make");
    assert_eq!(made["devices"][0]["role"], "cache");
    assert_eq!(made["devices"][0]["buckets"], CACHE_BYTES / (64 << 10));
    assert_eq!(made["devices"][1]["data_offset_bytes"], 8192);
    let shown = json(&bcached(&["show", "--json", &backing]).out);
    assert_eq!(shown["set_uuid"], made["set_uuid"]);
    assert_eq!(shown["uuid"], made["devices"][1]["uuid"]);
}

#[test]
fn geometry_can_come_from_the_partner() {
    let images = Images::new();
    let old = images.blank("old", 20 << 20);
    assert_eq!(bcached(&["make", "--backing", &old, "--block", "512"]).exit, 0);
    let cache = images.blank("cache", CACHE_BYTES);
    assert_eq!(bcached(&["make", "--cache", &cache, "--bucket", "64k", "--for", &old]).exit, 0);
    let shown = json(&bcached(&["show", "--json", &cache]).out);
    assert_eq!(shown["block_bytes"], 512, "a cache's block must not exceed that of what it serves");
    let new = images.blank("new", 20 << 20);
    assert_eq!(bcached(&["make", "--backing", &new, "--for", &cache]).exit, 0);
    let made = json(&bcached(&["show", "--json", &new]).out);
    assert_eq!(made["set_uuid"], shown["set_uuid"], "a new backing device names the set it is made for");
    assert_eq!(made["block_bytes"], 4096);
}

/// A regression: a second cache of the same set was served alternately with the first, which then
/// returned data that had been overwritten.
#[test]
fn a_set_has_one_cache() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", CACHE_BYTES), images.blank("backing", 20 << 20));
    let words = ["make", "--bucket", "64k", "--cache", &cache, "--backing", &backing];
    assert_eq!(bcached(&words).exit, 0);
    let new = images.blank("new", CACHE_BYTES);
    for words in [
        ["make", "--bucket=64k", "--cache", &new, "--for", &cache].as_slice(),
        &[
            "make",
            "--bucket=64k",
            "--cache",
            &new,
            "--backing",
            &images.blank("b", 20 << 20),
            "--for",
            &cache,
        ],
        &["make", "--backing", &new, "--for", &backing],
    ] {
        let ran = bcached(words);
        assert_eq!(ran.exit, 2, "{words:?}: {ran:?}");
        let told = ran.err.contains("that is a cache device, too")
            || ran.err.contains("that is a backing device, too");
        assert!(told, "{ran:?}");
        assert!(bytes(&new).iter().all(|byte| *byte == 0), "nothing is written");
    }
}

#[test]
fn a_label_is_kept() {
    let images = Images::new();
    let backing = images.blank("backing", 20 << 20);
    assert_eq!(bcached(&["make", "--backing", &backing, "--label", "täglich"]).exit, 0);
    assert_eq!(json(&bcached(&["show", "--json", &backing]).out)["label"], "täglich");
}

#[test]
fn a_wiped_signature_is_gone_to_the_last_mark() {
    let images = Images::new();
    let backing = images.blank("backing", 20 << 20);
    for (offset, mark) in [(510, &b"\x55\xaa"[..]), (512, b"EFI PART"), ((20 << 20) - 512, b"EFI PART")] {
        patch(&backing, offset, mark);
    }
    patch(&backing, 20 << 20, b"data");
    let refused = bcached(&["make", "--backing", &backing]);
    assert_eq!((refused.exit, refused.err.contains("--wipe-signature=gpt")), (3, true), "{refused:?}");
    let made = bcached(&["make", "--backing", &backing, "--wipe-signature=gpt"]);
    assert_eq!(made.exit, 0, "{made:?}");
    let mut left = bytes(&backing);
    left[SUPERBLOCK..SUPERBLOCK + 4096].fill(0);
    assert_eq!(&left[20 << 20..][..4], b"data", "what is no mark stays");
    left[20 << 20..][..4].fill(0);
    assert!(left.iter().all(|byte| *byte == 0));
}

#[test]
fn a_dry_run_says_what_would_be_and_writes_nothing() {
    let images = Images::new();
    let backing = images.blank("backing", 20 << 20);
    let ran = bcached(&["make", "--dry-run", "--backing", &backing, "--writeback"]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert!(ran.out.starts_with("Nothing is written"), "{ran:?}");
    assert!(bytes(&backing).iter().all(|byte| *byte == 0));
    let refused = bcached(&["make", "--dry-run", "--backing", &backing, "-o", "8"]);
    assert_eq!(refused.exit, 2, "a dry run ends with the real run's status: {refused:?}");
}

/// A regression: a set that bcached cannot run was made, over the device's previous content.
#[test]
fn what_cannot_be_served_is_not_made() {
    let images = Images::new();
    let cache = images.blank("cache", 64 << 20);
    let make = |words: &[&str]| bcached(&[&["make", "-C", &cache], words].concat());
    let ran = make(&["--bucket", "4k"]);
    assert_eq!((ran.exit, ran.err.contains("a bucket must hold two blocks")), (2, true), "{ran:?}");
    assert!(ran.err.contains("--bucket 8k"), "{ran:?}");
    assert!(bytes(&cache).iter().all(|byte| *byte == 0), "nothing was written");
    assert_eq!(make(&["--bucket", "4k", "--block", "512", "--dry-run"]).exit, 0);
    let small = images.blank("small", 2 << 20);
    let ran = bcached(&["make", "-C", &small, "--bucket", "4k", "--block", "2k"]);
    assert_eq!((ran.exit, ran.err.contains("it needs at least 2052 KiB")), (2, true), "{ran:?}");
    let ran = bcached(&["make", "-C", &small, "--bucket", "8k"]);
    assert_eq!(
        (ran.exit, ran.err.contains("it needs at least 4104 KiB, with --bucket 8k")),
        (2, true),
        "{ran:?}"
    );
    // What the message advises works.
    let tight = images.blank("tight", 3 << 20);
    let ran = bcached(&["make", "-C", &tight, "--bucket", "4k"]);
    assert!(ran.err.contains("--block 2k fits") && !ran.err.contains("--bucket 8k"), "{ran:?}");
    assert_eq!(bcached(&["make", "-C", &tight, "--bucket", "4k", "--block", "2k"]).exit, 0);
    // With several devices, the output says which is which.
    let backing = images.blank("backing", 64 << 20);
    let ran = make(&["-B", &backing, "--bucket", "64k"]);
    let titles = [format!("{cache} (cache device)"), format!("{backing} (backing device)")];
    assert!(titles.iter().all(|title| ran.out.lines().any(|line| line == title)), "{ran:?}");
}
