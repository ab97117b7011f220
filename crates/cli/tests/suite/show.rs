//! `bcached show` against the installed `bcache-super-show`: the same text for the same bytes,
//! damaged ones included.

use crate::common::{self, Images, bcached, bytes, json, patch, requires, run, tool};

/// Runs both programs on `image`: they print the same lines, whatever the exit statuses are.
fn compare(image: &str, with_f: bool) -> common::CommandResult {
    let theirs = if with_f {
        run(tool("bcache-super-show").args(["-f", image]))
    } else {
        run(tool("bcache-super-show").arg(image))
    };
    let ours = if with_f { bcached(&["show", "-f", image]) } else { bcached(&["show", image]) };
    // The one difference: a stray letter after the expected number.
    assert_eq!(ours.out, theirs.out.replace("[expected 8s]", "[expected 8]"), "{image}");
    ours
}

/// Changes a copy of an image. With `seal`, writes the checksum that the other program expects.
fn changed(images: &Images, image: &str, offset: u64, with: &[u8], seal: bool) -> String {
    let copy = images.path("copy");
    std::fs::write(&copy, bytes(image)).expect("a copy");
    patch(&copy, 4096 + offset, with);
    let copy = copy.to_str().expect("text").to_owned();
    if seal {
        let shown = run(tool("bcache-super-show").args(["-f", &copy])).out;
        if let Some((_, sum)) = shown.split_once("[expected ") {
            let sum = sum.split(']').next().expect("split gives one part at least");
            let sum = u64::from_str_radix(sum, 16).expect("a sum");
            patch(&copy, 4096, &sum.to_le_bytes());
        }
    }
    copy
}

#[test]
fn prints_what_bcache_super_show_prints() {
    if !requires("make-bcache") || !requires("bcache-super-show") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 80 << 20), images.blank("backing", 40 << 20));
    assert_eq!(run(tool("make-bcache").args(["-C", &cache, "-b", "64k", "--discard"])).exit, 0);
    assert_eq!(run(tool("make-bcache").args(["-B", &backing, "-o", "2048", "--writeback"])).exit, 0);
    for image in [&cache, &backing] {
        assert_eq!(compare(image, false).exit, 0);
        assert_eq!(compare(image, true).exit, 0);
    }
    let label = b"tank/one .-_%+~\x01 \nA\0junk";
    let with = |image: &str, offset, bytes: &[u8], seal| changed(&images, image, offset, bytes, seal);
    assert_eq!(compare(&with(&backing, 72, label, true), false).exit, 0);
    assert_eq!(
        compare(&with(&backing, 72, &[b'x'; 32], true), false).exit,
        0,
        "a label that fills its field"
    );
    for flags in [0_u64, 1, 2, 3, 9, 1 << 61, 2 << 61, 3 << 61, u64::MAX] {
        assert_eq!(compare(&with(&backing, 104, &flags.to_le_bytes(), true), false).exit, 0, "{flags:#x}");
    }
    for flags in [0_u64, 1, 3, 4, 8, 12, 28, 1 << 5] {
        assert_eq!(compare(&with(&cache, 104, &flags.to_le_bytes(), true), false).exit, 0, "{flags:#x}");
    }
    assert_eq!(compare(&with(&cache, 16, &[3], true), false).exit, 0);
    assert_eq!(compare(&with(&backing, 16, &[1], true), false).exit, 0, "version 1 has a fixed data offset");
    assert_eq!(compare(&with(&cache, 206, &[2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2], true), false).exit, 0);
}

#[test]
fn says_what_does_not_match() {
    if !requires("make-bcache") || !requires("bcache-super-show") {
        return;
    }
    let images = Images::new();
    let cache = images.blank("cache", 80 << 20);
    assert_eq!(run(tool("make-bcache").args(["-C", &cache, "-b", "64k"])).exit, 0);
    let with = |offset, bytes: &[u8]| changed(&images, &cache, offset, bytes, false);
    let ran = compare(&with(120, &[1]), false);
    assert_eq!((ran.exit, ran.err.contains("bad checksum")), (4, true), "{ran:?}");
    let ran = compare(&with(120, &[1]), true);
    assert_eq!((ran.exit, ran.err.as_str()), (0, ""), "{ran:?}");
    // Checksums are printed without leading zeroes.
    assert_eq!(compare(&with(0, &[1, 2, 3, 0, 0, 0, 0, 0]), true).exit, 0);
    let ran = compare(&with(24, &[0; 16]), false);
    assert_eq!((ran.exit, ran.err.contains("is not a bcache device: bad magic")), (2, true), "{ran:?}");
    let ran = compare(&with(30, &[0]), false);
    assert_eq!(
        (ran.exit, ran.err.contains("is damaged: bad magic; -f shows it anyway")),
        (4, true),
        "{ran:?}"
    );
    let ran = compare(&with(8, &[9]), false);
    assert_eq!((ran.exit, ran.err.contains("another sector")), (2, true), "{ran:?}");
    let ran = compare(&changed(&images, &cache, 16, &[7], true), false);
    assert_eq!((ran.exit, ran.err.contains("version 7 is unknown")), (4, true), "{ran:?}");
}

#[test]
fn goes_on_where_the_other_program_crashes_or_stops() {
    let images = Images::new();
    let cache = images.blank("cache", 80 << 20);
    assert_eq!(bcached(&["make", "-C", &cache, "-b", "64k"]).exit, 0);
    let ran = bcached(&["show", "-f", &changed(&images, &cache, 206, &[0xff, 0xff], false)]);
    assert_eq!((ran.exit, ran.err.contains("more journal buckets than fit")), (4, true), "{ran:?}");
    let ran = bcached(&["show", "-f", &changed(&images, &cache, 30, &[0], false)]);
    assert!(ran.exit == 0 && ran.out.starts_with("sb.magic\t\tbad magic\n"), "{ran:?}");
    assert!(ran.out.contains("cset.uuid"), "{ran:?}");
    let ran = bcached(&["show", "-f", &changed(&images, &cache, 16, &[5], false)]);
    assert_eq!((ran.exit, ran.out.contains("5 [cache device]")), (0, true), "{ran:?}");
}

#[test]
fn json_has_the_same_facts_with_units_in_the_keys() {
    let images = Images::new();
    let cache = images.blank("cache", 80 << 20);
    assert_eq!(bcached(&["make", "-C", &cache, "-b", "64k"]).exit, 0);
    let shown = json(&bcached(&["show", "--json", &cache]).out);
    assert_eq!(shown["schema"], "bcached.show");
    assert_eq!(shown["schema_version"], 1);
    assert_eq!(shown["cache"]["total_bytes"], 80 << 20);
    assert_eq!(shown["cache"]["ordered"], false);
    assert_eq!(shown["cache"]["replacement"], "lru");
    assert_eq!(shown["bucket_bytes"], 64 << 10);
    assert_eq!(shown["checksum"]["matches"], true);
}
