//! Every refusal has one clear sentence, the right exit status and the same facts in JSON, and
//! writes not a byte.

use crate::common::{self, CommandResult, Images, bcached, bytes, json, patch, requires, run, tool};

/// Runs `bcached` with `words` twice, as text and as JSON; checks the status `exit`, `kind`, and
/// that the error contains `sentence`.
fn refused(words: &[&str], exit: i32, kind: &str, sentence: &str) -> CommandResult {
    let text = bcached(words);
    assert_eq!(text.exit, exit, "{words:?}: {text:?}");
    assert!(text.err.starts_with("bcached: "), "{words:?}: {text:?}");
    assert!(text.err.contains(sentence), "{words:?}: {text:?}");
    assert_eq!(text.err.lines().count(), 1, "one sentence: {text:?}");
    let mut with_json = vec!["--json"];
    with_json.extend(words);
    let object = bcached(&with_json);
    assert_eq!(object.exit, exit, "{words:?}: {object:?}");
    let error = json(&object.err);
    assert_eq!(error["error"]["kind"], kind, "{error}");
    assert_eq!(error["error"]["exit"], exit, "{error}");
    assert!(error["error"]["holders"].is_array(), "{error}");
    text
}

#[test]
fn wrong_words() {
    refused(&[], 2, "usage", "no command given");
    refused(&["bogus"], 2, "usage", "there is no command `bogus`");
    refused(&["show"], 2, "usage", "required");
    refused(&["show", "--bogus", "x"], 2, "usage", "--bogus");
    refused(&["make"], 2, "usage", "no device given");
    refused(&["make", "x"], 2, "usage", "`x` has no role");
    refused(&["make", "-C", ""], 2, "usage", "a value is required for '--cache");
}

#[test]
fn what_is_to_come_says_what_to_do_by_hand() {
    for verb in ["salvage", "repair", "convert"] {
        let ran = refused(&[verb, "x"], 2, "not-in-this-version", "is not in this version; until then: ");
        assert!(ran.out.is_empty(), "{ran:?}");
    }
    let images = Images::new();
    let backing = images.blank("backing", 40 << 20);
    refused(&["make", "--add", "-B", &backing], 2, "not-in-this-version", "--add is not in this version");
    assert!(bytes(&backing).iter().all(|byte| *byte == 0));
}

#[test]
fn geometry_that_cannot_be() {
    let images = Images::new();
    let small = images.blank("small", 10 << 20);
    let tiny = images.blank("tiny", 8192);
    let mut cases: Vec<(&[&str], i32, &str, &str)> = Vec::new();
    let (small, tiny) = (small.as_str(), tiny.as_str());
    let lines: [(&[&str], i32, &str, &str); 17] = [
        (&["make", "-C", small], 2, "geometry", "20 fit, and a set needs 513; --bucket 16k fits"),
        (&["make", "-C", tiny], 2, "geometry", "it needs at least 4104 KiB"),
        (&["make", "-B", tiny], 2, "geometry", "it is too small"),
        (&["make", "-C", small, "-b", "48k"], 2, "geometry", "not a power of two"),
        (&["make", "-C", small, "-b", "2k"], 2, "geometry", "the smallest is 4k"),
        (&["make", "-C", small, "-b", "32M"], 2, "geometry", "the largest is 16M"),
        (&["make", "-C", small, "-b", "0"], 2, "geometry", "not a power of two"),
        (&["make", "-C", small, "-w", "8k"], 2, "geometry", "the largest is 4k"),
        (&["make", "-C", small, "-w", "256"], 2, "geometry", "the smallest is 512"),
        (&["make", "-C", small, "-b", "1MB"], 2, "usage", "decimal units are not used"),
        (&["make", "-C", small, "-b", "x"], 2, "usage", "is not a size"),
        (&["make", "-B", small, "-o", "8"], 2, "geometry", "the superblock ends at sector 16"),
        (&["make", "-B", small, "-o", "99999999"], 2, "geometry", "it is too small"),
        (&["make", "-B", small, "--cset-uuid", "x"], 2, "usage", "is not a UUID"),
        (&["make", "-B", small, "--cache-replacement-policy", "mru"], 2, "usage", "lru, fifo and random"),
        (
            &["make", "-B", small, "--label", "123456789012345678901234567890123"],
            2,
            "usage",
            "longer than 32",
        ),
        (&["make", "-B", small, "--wipe-signature=xfs"], 2, "usage", "no device carries"),
    ];
    cases.extend(lines);
    for (words, exit, kind, sentence) in cases {
        refused(words, exit, kind, sentence);
    }
    for image in [small, tiny] {
        assert!(bytes(image).iter().all(|byte| *byte == 0), "nothing is written");
    }
}

#[test]
fn a_set_has_one_cache_and_no_device_twice() {
    let images = Images::new();
    let (one, two) = (images.blank("one", 80 << 20), images.blank("two", 80 << 20));
    let link = images.path("link");
    std::os::unix::fs::symlink(&one, &link).expect("a link");
    let hard = images.path("hard");
    std::fs::hard_link(&one, &hard).expect("a link");
    let (link, hard) = (link.to_str().expect("text"), hard.to_str().expect("text"));
    refused(&["make", "-b", "64k", "-C", &one, &two], 2, "usage", "a cache set has exactly one");
    for same in [one.as_str(), link, hard] {
        refused(&["make", "-b", "64k", "-C", &one, "-B", same], 3, "same-device", "perhaps by another path");
    }
    assert!(bytes(&one).iter().chain(&bytes(&two)).all(|byte| *byte == 0), "nothing is written");
}

#[test]
fn paths_that_are_no_devices() {
    let images = Images::new();
    let fifo = images.path("fifo");
    assert_eq!(run(tool("mkfifo").arg(&fifo)).exit, 0);
    let fifo = fifo.to_str().expect("text");
    let folder = images.path(".");
    let folder = folder.to_str().expect("text");
    let missing = images.path("missing");
    let missing = missing.to_str().expect("text");
    for verb in [&["show"][..], &["make", "-B"]] {
        let with = |path| [verb, &[path]].concat();
        refused(&with(fifo), 2, "usage", "not a block device or a regular file");
        refused(&with(folder), 2, "usage", "not a block device or a regular file");
        refused(&with(missing), 4, "not-found", "it does not exist");
        refused(&with("/dev/null"), 2, "usage", "not a block device or a regular file");
    }
}

#[test]
fn a_device_that_carries_something() {
    let images = Images::new();
    for (name, words, option) in [
        ("mkfs.ext4", &["mkfs.ext4", "-q", "-F"][..], "ext4"),
        (
            "mkfs.ext4",
            &[
                "mkfs.ext4",
                "-q",
                "-F",
                "-O",
                "^has_journal,^extent,^64bit,^metadata_csum,^flex_bg,^huge_file,^dir_nlink,^extra_isize",
            ],
            "ext2",
        ),
        ("mkswap", &["mkswap", "-q"], "swap"),
    ] {
        if !requires(name) {
            return;
        }
        let image = images.blank("image", 80 << 20);
        assert_eq!(run(tool(words[0]).args(&words[1..]).arg(&image)).exit, 0);
        let before = bytes(&image);
        let option = format!("--wipe-signature={option}");
        refused(&["make", "-B", &image], 3, "signature", &option);
        refused(&["make", "-B", &image, "--wipe-signature=xfs"], 3, "signature", &option);
        assert!(bytes(&image) == before, "nothing is written");
        assert_eq!(bcached(&["make", "-B", &image, &option]).exit, 0);
    }
}

/// Several programs would claim the device.
#[test]
fn every_signature_is_named_at_once() {
    let images = Images::new();
    let image = images.blank("image", 80 << 20);
    patch(&image, 0, b"XFSB");
    patch(&image, (80 << 20) - 4096 + 60, b"\x83\x74\x02\x6d");
    patch(&image, (80 << 20) - 512, b"EFI PART");
    let all = "--wipe-signature=xfs --wipe-signature=drbd --wipe-signature=gpt";
    refused(&["make", "-B", &image], 3, "signature", all);
    refused(&["make", "-B", &image, "--wipe-signature=drbd"], 3, "signature", "of xfs (at byte 0x0), gpt");
    let ran = bcached(&["doctor", &image]);
    assert!(ran.exit == 2 && ran.out.contains("the signature of xfs, drbd, gpt"), "{ran:?}");
    let ran = bcached(&["scan", &image]);
    assert!(ran.exit == 2 && ran.err.contains("the signature of xfs, drbd, gpt"), "{ran:?}");
    let words: Vec<_> = ["make", "-B", &image].into_iter().chain(all.split(' ')).collect();
    assert_eq!(bcached(&words).exit, 0);
}

#[test]
fn a_device_that_holds_data_of_no_known_kind_is_made_and_that_is_said() {
    let images = Images::new();
    let image = images.blank("image", 40 << 20);
    let make = |words: &[&str]| bcached(&[&["make", "-B", &image], words].concat());
    let ran = make(&["--dry-run"]);
    assert!(ran.exit == 0 && ran.err.is_empty(), "blank: {ran:?}");
    for offset in [100_000, (40 << 20) - 1] {
        let image = images.blank("image", 40 << 20);
        patch(&image, offset, &[1]);
        let ran = bcached(&["doctor", &image]);
        assert!(ran.out.contains("it holds data of no known kind"), "{ran:?}");
        let ran = make(&["--dry-run"]);
        assert!(ran.exit == 0 && ran.err.contains("image: holds data of no known kind"), "{ran:?}");
        assert_eq!(json(&make(&["--dry-run", "--json"]).out)["devices"][0]["holds_unknown_data"], true);
        let ran = make(&[]);
        assert!(ran.exit == 0 && ran.err.contains("image: holds data of no known kind"), "{ran:?}");
        let ran = make(&["--wipe-bcache"]);
        assert!(ran.exit == 0 && ran.err.is_empty(), "it is known: {ran:?}");
    }
}

/// A signature known only to the machine's own `wipefs` is refused, too. If that program fails,
/// nothing is overwritten.
#[test]
fn what_the_installed_wipefs_names_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let images = Images::new();
    let image = images.blank("image", 40 << 20);
    let program = images.path("wipefs");
    let with = |script: &str, words: &[&str]| {
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("a file");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        let folder = program.parent().expect("a folder").to_str().expect("text");
        let path = format!("{folder}:{}", std::env::var("PATH").unwrap_or_default());
        let words = [&["make", "-B", &image], words].concat();
        run(common::program().args(words).env("PATH", path))
    };
    // Reads the device, as the real program does.
    let newfs = "[ \"$(dd if=\"$6\" bs=1 skip=9437184 count=5 2>/dev/null)\" = newfs ] && echo 0x900000,5,newfs; true";
    patch(&image, 9 << 20, b"newfs");
    let ran = with(newfs, &[]);
    assert!(ran.exit == 3 && ran.err.contains("--wipe-signature=newfs"), "{ran:?}");
    for broken in ["exit 1", "echo what", "echo 0x27fffff,5,newfs"] {
        let ran = with(broken, &[]);
        assert!(ran.exit == 4 && ran.err.contains("what is on"), "{broken}: {ran:?}");
    }
    // It is still reported after it was erased: the erase, or the program, does not work.
    let ran = with("echo 0x900000,5,newfs", &["--wipe-signature=newfs"]);
    assert!(ran.exit == 4 && ran.err.contains("still there after it was erased"), "{ran:?}");
    patch(&image, 9 << 20, b"newfs");
    assert_eq!(with(newfs, &["--wipe-signature=newfs"]).exit, 0);
    assert_eq!(&bytes(&image)[9 << 20..][..5], [0; 5]);
}

#[test]
fn all_devices_are_checked_before_the_first_is_written() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 80 << 20), images.blank("backing", 40 << 20));
    patch(&backing, 0, b"XFSB");
    refused(&["make", "-b", "64k", "-C", &cache, "-B", &backing], 3, "signature", "--wipe-signature=xfs");
    assert!(bytes(&cache).iter().all(|byte| *byte == 0), "the cache comes first, and is untouched");
}

#[test]
fn members_of_arrays_are_never_overwritten() {
    let images = Images::new();
    for (offset, mark, word) in
        [(4096, &b"\xfc\x4e\x2b\xa9"[..], "linux_raid_member"), (512, b"LABELONE", "LVM2_member")]
    {
        let image = images.blank("image", 40 << 20);
        patch(&image, offset, mark);
        let before = bytes(&image);
        let wipe = format!("--wipe-signature={word}");
        refused(&["make", "-B", &image], 3, "member", word);
        refused(&["make", "-B", &image, &wipe], 3, "member", "nothing overrides this");
        assert!(bytes(&image) == before, "nothing is written");
    }
}

#[test]
fn a_bcache_device_goes_only_if_nothing_dirty_is_behind_it() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 80 << 20), images.blank("backing", 40 << 20));
    let make: &[&str] = &["make", "-b", "64k", "-C", &cache, "-B", &backing];
    assert_eq!(bcached(make).exit, 0);
    let before = bytes(&backing);
    refused(make, 3, "already-bcache", "--wipe-bcache overwrites it");
    assert!(bytes(&backing) == before, "nothing is written");
    let wipe = [make, &["--wipe-bcache"]].concat();
    assert_eq!(bcached(&wipe).exit, 0);
    // State dirty, and a cache that was in use (SYNC), each with a wrong and with a right checksum:
    // neither is overwritten.
    for (image, role, offset, value, sentence) in [
        (&backing, "-B", 4096 + common::STATE, common::DIRTY, "newest data is only in its cache"),
        (&cache, "-C", 4096 + 104, 1, "how much dirty data it holds is unknown"),
    ] {
        let whole = bytes(image);
        patch(image, offset, &[value]);
        let words = ["make", "-b", "64k", "--wipe-bcache", role, image];
        refused(&words, 3, "already-bcache", "its superblock is not usable");
        let shown = json(&bcached(&["show", "-f", "--json", image]).out);
        let sum = shown["checksum"]["expected"].as_str().expect("a sum");
        patch(image, 4096, &u64::from_str_radix(sum, 16).expect("hexadecimal").to_le_bytes());
        refused(&words, 3, "already-bcache", sentence);
        std::fs::write(image, whole).expect("restored");
        assert_eq!(bcached(&words).exit, 0, "it was the change that was refused");
    }
}

#[test]
fn a_file_in_use() {
    let images = Images::new();
    let backing = images.blank("backing", 40 << 20);
    // Another `bcached` cannot be caught holding it, so this process takes the same lock.
    let holder = common::FileLock::new(&backing);
    let ran = refused(&["make", "-B", &backing], 3, "in-use", "it is in use by");
    assert!(ran.err.contains(&format!("process {}", std::process::id())), "the holder is named: {ran:?}");
    assert!(bytes(&backing).iter().all(|byte| *byte == 0), "nothing is written");
    assert_eq!(bcached(&["show", &backing]).exit, 2, "to look needs no claim");
    drop(holder);
    assert_eq!(bcached(&["make", "-B", &backing]).exit, 0);
}

/// A regression: a device that is never cached was made without a warning.
#[test]
fn what_is_made_and_serves_badly_is_warned_of() {
    let images = Images::new();
    let (words, sentence) = (["-o", "17", "-B"], "never cached; with --data-offset 24 it would be cached");
    let image = images.blank("image", 36 << 20);
    let all = [&["make"], &words[..], &[image.as_str()]].concat();
    let text = bcached(&all);
    assert_eq!((text.exit, text.err.lines().count()), (0, 1), "{text:?}");
    assert!(text.err.starts_with("bcached: warning: ") && text.err.contains(sentence), "{text:?}");
    assert!(!text.out.contains("warning"), "standard output is as make-bcache's: {text:?}");
    let again = [&["--json"], all.as_slice(), &["--wipe-bcache"]].concat();
    let object = bcached(&again);
    assert_eq!((object.exit, object.err.as_str()), (0, ""), "{object:?}");
    let said = json(&object.out)["devices"][0]["warning"].as_str().map(|said| said.contains(sentence));
    assert_eq!(said, Some(true), "{object:?}");
    let image = images.blank("image", 36 << 20);
    let made = bcached(&["make", "-b", "8k", "-o", "24", "-B", &image]);
    assert_eq!((made.exit, made.err.as_str()), (0, ""), "{made:?}");
}

/// Returns the command as run by an unprivileged user; `None` if this test cannot become one.
fn as_nobody(images: &Images, words: &[&str]) -> Option<std::process::Command> {
    use std::os::unix::fs::PermissionsExt as _;
    if !rustix::process::geteuid().is_root() {
        let mut command = common::program();
        command.args(words);
        return Some(command);
    }
    if !requires("setpriv") {
        return None;
    }
    // Other users may not access the directory in which root builds.
    let program = images.path("bcached");
    if !program.exists() {
        // Copied by another process: a writable descriptor inherited by a concurrent test's child
        // would prevent the program from running.
        assert_eq!(run(tool("cp").arg(common::PROGRAM).arg(&program)).exit, 0);
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(images.path("."), open).expect("its owner");
    }
    let mut command = tool("setpriv");
    common::isolated(&mut command);
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(program).args(words);
    Some(command)
}

#[test]
fn what_the_user_may_not_do() {
    use std::os::unix::fs::PermissionsExt as _;
    let images = Images::new();
    let cache = images.blank("cache", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    let socket = images.path("control.sock");
    let _somebody = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    std::fs::create_dir(images.path("closed")).expect("a folder");
    let notes = images.path("notes");
    std::fs::create_dir(&notes).expect("a folder");
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&notes, Some(65534), None).expect("root may");
    }
    for name in ["cache", "control.sock", "closed"] {
        std::fs::set_permissions(images.path(name), std::fs::Permissions::from_mode(0o000))
            .expect("its owner");
    }
    let (socket, inside) = (socket.to_str().expect("text"), images.path("closed/control.sock"));
    let inside = inside.to_str().expect("text");
    let cases: [(&[&str], &str); 4] = [
        (&["show", &cache], "permission"),
        (&["make", "-B", &cache], "permission"),
        (&["status", "--control", socket], "is for its owner only"),
        (&["serve", "--cache", &cache, "--control", inside], "cannot listen on"),
    ];
    for (words, sentence) in cases {
        let Some(mut command) = as_nobody(&images, &[&["--json"], words].concat()) else { return };
        command.env("BCACHED_NOTES", &notes);
        let ran = run(&mut command);
        let object = json(ran.err.lines().last().unwrap_or_default());
        let told = object["error"].to_string();
        assert!(told.to_lowercase().contains(sentence), "{words:?}: {ran:?}");
        assert!(ran.exit == 4 && told.contains("permission"), "{words:?}: {ran:?}");
    }
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o600)).expect("its owner");
}

/// Tokio panics if it gets no descriptors for its signals.
#[test]
fn no_descriptors_left() {
    let images = Images::new();
    let cache = images.blank("cache", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    let folder = images.path("run");
    std::fs::create_dir(&folder).expect("a folder");
    for limit in 6..=12 {
        let mut command = tool("sh");
        common::isolated(&mut command);
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")]);
        command.args([common::PROGRAM, "serve", "--cache", &cache]);
        command.arg("--control").arg(folder.join("control.sock")).env("BCACHED_NOTES", &folder);
        let ran = run(&mut command);
        assert_eq!(ran.exit, 4, "{limit}: {ran:?}");
        let said = ran.err.lines().last().unwrap_or_default();
        assert!(said.starts_with("bcached: ") && !ran.err.contains("panicked"), "{limit}: {ran:?}");
    }
}

/// Acknowledged writes in such a note would be lost if the next start is from another directory.
#[test]
fn a_place_for_notes_that_depends_on_the_working_directory() {
    let images = Images::new();
    let cache = images.blank("cache", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    let folder = images.path("run");
    std::fs::create_dir(&folder).expect("a folder");
    let mut command = common::program();
    command.args(["--json", "serve", "--cache", &cache]).current_dir(&folder);
    command.arg("--control").arg(folder.join("control.sock")).env("BCACHED_NOTES", "notes");
    let ran = run(&mut command);
    let object = json(ran.err.lines().last().unwrap_or_default());
    assert_eq!((ran.exit, object["error"]["kind"].as_str()), (2, Some("config")), "{ran:?}");
    let what = object["error"].to_string();
    assert!(what.contains("BCACHED_NOTES is not an absolute path: notes"), "{what}");
    assert!(!folder.join("notes").exists(), "nothing is made");
}

/// A note that runs out of space would lose acknowledged writes.
#[test]
fn no_space_for_the_note() {
    let mut probe = tool("unshare");
    let root = rustix::process::geteuid().is_root();
    let apart: &[&str] = if root { &["--mount"] } else { &["--map-root-user", "--mount"] };
    let can = requires("unshare") && run(probe.args(apart).arg("true")).exit == 0;
    if !can {
        println!("skipped: no mount namespace to be had");
        return;
    }
    let images = Images::new();
    let cache = images.blank("cache", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    let before = bytes(&cache);
    let folder = images.path("run");
    std::fs::create_dir(&folder).expect("a folder");
    let script = "mount -t tmpfs -o size=64k,mode=755 none \"$BCACHED_NOTES\" && exec \"$0\" \"$@\"";
    let mut command = tool("unshare");
    common::isolated(&mut command);
    command.args(apart).args(["sh", "-c", script, common::PROGRAM, "serve", "--cache", &cache]);
    command.arg("--control").arg(folder.join("control.sock")).env("BCACHED_NOTES", &folder);
    let ran = run(&mut command);
    let said = ran.err.lines().last().unwrap_or_default();
    assert!(ran.exit == 4 && said.contains("cannot reserve space for the note"), "{ran:?}");
    let end = "free space on the note's file system: the note records acknowledged writes";
    assert!(said.ends_with(end), "nobody tries it again: {ran:?}");
    assert!(bytes(&cache) == before, "nothing is written");
}
