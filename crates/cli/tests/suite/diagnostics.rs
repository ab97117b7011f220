//! `check`, `dump`, `doctor` and `make` report what they found, what they did not examine, and what
//! they ignored.

use crate::common::{self, Daemon, Images, LoopDevice, bcached, fill, json, patch, requires, run, tool};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Makes a set in writeback mode: a cache and a backing device of these names.
fn set(images: &Images, cache: &str, backing: &str, label: &str) -> (String, String) {
    let (cache, backing) = (images.blank(cache, 36 << 20), images.blank(backing, 20 << 20));
    let made = bcached(&["make", "-b", "64k", "--writeback", "--label", label, "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{made:?}");
    (cache, backing)
}

/// A regression: a backing device of another set was a warning, and the answer was yes although
/// nothing had been compared with it.
#[test]
fn a_backing_device_of_another_set_is_no_yes() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let (other, stranger) = set(&images, "other", "stranger", "pool");
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
    Daemon::start(&images, &["--cache", &other, "--backing", &stranger]).stop();
    let ran = bcached(&["check", &cache, "--backing", &stranger]);
    assert_eq!(ran.exit, 1, "{ran:?}");
    assert!(ran.out.contains(&format!("{stranger}: belongs to the cache set ")), "{ran:?}");
    let checked = json(&bcached(&["--json", "check", &cache, "--backing", &stranger]).out);
    assert_eq!((&checked["schema_version"], &checked["sound"]), (&2.into(), &false.into()), "{checked}");
    assert_eq!(checked["foreign_backing_devices"][0]["device"], stranger.as_str(), "{checked}");
    let both = bcached(&["check", &cache, &other, "--backing", &stranger, "--backing", &backing]);
    assert_eq!((both.exit, both.out.contains("belongs to")), (0, false), "each has its set: {both:?}");
}

/// A regression: neither the amount of dirty data nor what was not judged was printed.
#[test]
fn dirty_data_and_what_was_not_judged_are_named() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    fill(&images, &daemon, "tank", &[0x5a; 1 << 20]);
    // Write-back may have begun: the daemon reports how much is left.
    let (_, log) = daemon.stop();
    let left = log.lines().find_map(|line| line.strip_prefix("bcached: tank: ")?.split_once(" dirty stays"));
    let sound = format!(": sound, 1 node, 1 volume, {} dirty\n", left.map_or("0 B", |(left, _)| left));
    let alone = bcached(&["check", &cache]);
    assert_eq!((alone.exit, alone.out.contains(&sound)), (0, true), "{sound}{alone:?}");
    assert!(alone.out.contains("which are not named (--backing): tank\n"), "{alone:?}");
    let whole = bcached(&["check", &cache, "--backing", &backing]);
    assert_eq!((whole.exit, whole.out.lines().count()), (0, 1), "{whole:?}");
    let checked = json(&bcached(&["--json", "check", &cache, "--backing", &backing]).out);
    let set = &checked["sets"][0];
    let sectors = set["volumes"][0]["dirty_sectors"].as_u64().expect("a number");
    assert_eq!(
        (&set["dirty_bytes"], &set["volumes_without_backing"]),
        (&(sectors * 512).into(), &json("[]"))
    );
}

/// A clean backing device that was truncated is served; the check reports the truncation, which was
/// silent once.
#[test]
fn cached_data_behind_the_end_of_its_device_is_named() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[cache.c]\ndevice = {cache:?}\n[volume.tank]\nbacking = {backing:?}\ncache_mode = \"writethrough\"\n"
    );
    std::fs::write(&config, text).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    fill(&images, &daemon, "tank", &[0x5a; 1 << 20]);
    daemon.stop();
    let words = ["check", &cache, "--backing", &backing];
    let whole = bcached(&words);
    assert_eq!((whole.exit, whole.out.contains("cut short")), (0, false), "{whole:?}");
    let file = std::fs::File::options().write(true).open(&backing).expect("opens");
    file.set_len(512 << 10).expect("a size");
    let cut = bcached(&words);
    let sentence = "data of tank is cached behind the end of its backing device: was the device cut short?";
    assert_eq!((cut.exit, cut.out.contains(sentence)), (0, true), "{cut:?}");
}

/// A regression: `message` was twice in a finding, with different texts, and its kind was the only
/// word in CamelCase.
#[test]
fn a_finding_has_one_message_and_a_kind_as_other_words_are() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
    // All of the journal's five buckets: no entry is left.
    for bucket in 1..6 {
        patch(&cache, bucket << 16, &[0; 64 << 10]);
    }
    let ran = bcached(&["--json", "check", &cache]);
    assert_eq!(ran.exit, 1, "{ran:?}");
    let checked = json(&ran.out);
    let findings = checked["sets"][0]["findings"].as_array().expect("a list").len();
    assert_eq!(checked["sets"][0]["findings"][0]["kind"], "no-journal-entries", "{checked}");
    assert_eq!(ran.out.matches("\"message\"").count(), findings, "{}", ran.out);
    let text = bcached(&["check", &cache]);
    assert!(text.out.contains(": DAMAGED: journal unreadable. Amount of dirty data unknown.\n"), "{text:?}");
}

/// A regression: acknowledged writes were in the note, and no command mentioned it.
#[test]
fn a_note_left_behind_is_named() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let with_notes = |words: &[&str]| {
        let mut command = common::program();
        run(command.args(words).env("BCACHED_NOTES", images.path("run")))
    };
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).kill();
    let note = images.path("run").display().to_string();
    let ran = with_notes(&["check", &cache, "--backing", &backing]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert!(ran.out.contains("a killed bcached left a note") && ran.out.contains(&note), "{ran:?}");
    let ran = with_notes(&["doctor", &cache]);
    assert!(ran.out.contains("a killed bcached left a note") && ran.out.contains(&note), "{ran:?}");
    // The daemon was killed before it acknowledged anything. As if it had: one record is counted.
    let file = std::fs::read_dir(images.path("run")).unwrap().map(|entry| entry.unwrap().path());
    let file =
        file.filter(|path| path.extension().is_some_and(|kind| kind == "note")).last().expect("a note");
    let counter = std::fs::read(&file).unwrap()[128..136].to_vec();
    patch(file.display().to_string(), 128, &1u64.to_ne_bytes());
    let ran = with_notes(&["make", "--cache", &cache, "--wipe-bcache", "--bucket", "64k"]);
    assert!(ran.exit == 3 && ran.err.contains("left a note") && ran.err.contains(&note), "{ran:?}");
    patch(file.display().to_string(), 128, &counter);
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
    let ran = with_notes(&["check", &cache, "--backing", &backing]);
    assert!(!ran.out.contains("note"), "an orderly stop leaves none: {ran:?}");
    // An empty note, as left when there was no space for it: it never held anything.
    std::fs::write(&file, "").expect("an empty file");
    for words in [&["check", &cache, "--backing", &backing][..], &["doctor", &cache]] {
        let ran = with_notes(words);
        let is_named = ran.out.contains("left a note") || ran.out.contains(&note);
        assert!(!is_named, "an empty one holds nothing: {ran:?}");
    }
}

/// A regression: the note was made before the set was read, and `check` took it for that of a
/// killed bcached.
#[test]
fn a_start_that_is_refused_leaves_no_note() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let devices = ["--cache", cache.as_str(), "--backing", &backing];
    let notes = || {
        let all =
            std::fs::read_dir(images.path("run")).into_iter().flatten().flatten().map(|entry| entry.path());
        all.filter(|path| path.extension().is_some_and(|kind| kind == "note")).collect::<Vec<_>>()
    };
    Daemon::start(&images, &devices).stop();
    let journal = common::bytes(&cache)[64 << 10..(6 * 64) << 10].to_vec();
    patch(&cache, 64 << 10, &vec![0; journal.len()]);
    let ran = run(&mut Daemon::command(&images, "run", &devices));
    assert_eq!((ran.exit, ran.err.contains("no journal entries found")), (4, true), "{ran:?}");
    assert_eq!(notes(), Vec::<std::path::PathBuf>::new());
    // A refused start must not remove an earlier note.
    patch(&cache, 64 << 10, &journal);
    Daemon::start(&images, &devices).kill();
    let note = notes().pop().expect("that of the killed one");
    patch(&note, 128, &1u64.to_ne_bytes());
    patch(&cache, 64 << 10, &vec![0; journal.len()]);
    let ran = run(&mut Daemon::command(&images, "run", &devices));
    assert_eq!((ran.exit, notes()), (4, vec![note]), "{ran:?}");
}

/// A regression: the root, which is the whole key space, was printed as a range with a meaningless
/// start and end, and times were numbers.
#[test]
fn a_dump_prints_what_means_something() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
    let journal = bcached(&["dump", &cache, "journal"]);
    assert!(journal.out.contains(" root 0:") && !journal.out.contains("1048575:["), "{journal:?}");
    let superblock = bcached(&["dump", &cache, "superblock"]);
    assert!(superblock.out.contains(" block 8 sectors bucket 128 sectors "), "{superblock:?}");
    let slots = bcached(&["--json", "dump", &cache, "uuids"]);
    let slot = json(slots.out.lines().nth(1).expect("a slot"));
    let time = slot["first_registered_time"].as_str().expect("a time");
    assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 20, "{slot}");
    assert!(slot["first_registered"].is_u64() && slot["invalidated_time"].is_null(), "{slot}");
}

/// A regression: a device that `serve` cannot write was reported as fit.
#[test]
fn a_device_that_may_not_be_written_is_not_fit() {
    let images = Images::new();
    let (cache, _) = set(&images, "cache", "backing", "tank");
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o444)).expect("permissions");
    let mut doctor = if rustix::process::geteuid().is_root() {
        // Root may write whatever the mode says, so another user runs `doctor`, with a copy of the
        // program that it can reach.
        let program = images.path("program");
        // Copied by another process: a writable descriptor inherited by a concurrent test's child
        // would prevent the program from running.
        assert_eq!(run(tool("cp").arg(common::PROGRAM).arg(&program)).exit, 0);
        for path in [images.path("."), program.clone()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("permissions");
        }
        let mut command = Command::new(program);
        common::isolated(&mut command);
        command.uid(65534).gid(65534);
        command
    } else {
        common::program()
    };
    let ran = run(doctor.args(["doctor", &cache]));
    assert_eq!((ran.exit, ran.out.contains("not fit, ")), (4, true), "{ran:?}");
    assert!(ran.out.contains("permission denied") && ran.err.is_empty(), "{ran:?}");
}

/// A regression: options that apply to none of the devices had no effect, without a message.
#[test]
fn options_in_vain_are_named() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
    let ran = bcached(&["make", "-b", "64k", "--writeback", "-o", "32", "-C", &cache]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    let note = |option: &str, role: &str| {
        format!("bcached: warning: {option} has no effect: no {role} device is made\n")
    };
    assert_eq!(ran.err, note("--writeback", "backing") + &note("--data-offset", "backing"));
    let ran = bcached(&["make", "--discard", "-b", "64k", "--writeback", "-B", &backing]);
    assert_eq!((ran.exit, ran.err), (0, note("--discard", "cache")));
}

/// A regression: `bcached help` was not a command.
#[test]
fn help_is_a_command() {
    let whole = bcached(&["help"]);
    assert_eq!((whole.exit, &whole.out), (0, &bcached(&["--help"]).out), "{whole:?}");
    let serve = bcached(&["help", "serve"]);
    assert_eq!((serve.exit, serve.out.contains("can be repeated")), (0, true), "{serve:?}");
}

/// A regression: "Ask it to let go" did not say how.
#[test]
fn a_daemon_in_the_way_is_stopped_in_a_named_way() {
    let images = Images::new();
    let (cache, _) = set(&images, "cache", "backing", "tank");
    let _daemon = Daemon::start(&images, &["--cache", &cache]);
    let ran = bcached(&["check", &cache]);
    let sentence = "stop it (`systemctl stop bcached`, or SIGTERM to ";
    assert_eq!((ran.exit, ran.err.contains(sentence)), (3, true), "{ran:?}");
}

/// The log lists at each start what the system refuses; `doctor` listed only half of the
/// capabilities needed.
#[test]
fn doctor_lists_what_holds_the_memory() {
    let ran = bcached(&["doctor"]);
    for name in ["CAP_IPC_LOCK", "CAP_SYS_RESOURCE", "CAP_SYS_PTRACE"] {
        assert!(ran.out.lines().any(|line| line.starts_with(name)), "{name}: {ran:?}");
    }
}

/// The result fits one screen: the available exports, and why the others are unavailable.
#[test]
fn doctor_fits_a_screen_and_names_every_way() {
    let images = Images::new();
    let mut command = common::program();
    // Notes left behind by other daemons would make it longer.
    let ran = run(command.arg("doctor").env("BCACHED_NOTES", images.path("none")));
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert!(ran.out.lines().count() <= 24, "{}", ran.out);
    let longest = ran.out.lines().map(|line| line.chars().count()).max();
    assert!(longest.is_some_and(|longest| longest <= 100), "{}", ran.out);
    let word = |name: &str| {
        let line = ran.out.lines().find(|line| line.starts_with(&format!("{name:<26} "))).expect("a line");
        line[27..].split_whitespace().next().expect("a word").to_owned()
    };
    let ways = ["ublk", "nbd", "fuse", "loop", "nbd server", "vhost-user"].map(|name| word(name) == "OK");
    let [ublk, nbd, fuse, looped, server, vhost] = ways;
    assert!(server && vhost, "these need nothing: {}", ran.out);
    assert_eq!(word("dev") == "OK", ublk || nbd || fuse && looped, "{}", ran.out);
    let machine = json(&bcached(&["doctor", "--json"]).out)["machine"].clone();
    for item in machine.as_array().expect("items") {
        let is_driver = ["ublk", "nbd"].iter().any(|name| item["name"] == *name);
        assert!(!is_driver || item["available"] == true || item["detail"].is_string(), "{item}");
    }
    if !std::path::Path::new("/dev/ublk-control").exists() {
        let mends = machine.as_array().and_then(|all| all.iter().find(|item| item["name"] == "ublk"));
        let mends = mends.and_then(|item| item["mends"].as_str()).unwrap_or_default();
        assert!(mends.contains("ublk_drv") || mends.contains("6.5"), "{machine}");
    }
}

/// A member of a set that another assembler may claim is fit, with a warning.
#[test]
fn doctor_finds_the_mark_of_an_assembler() {
    let images = Images::new();
    let (cache, backing) = set(&images, "cache", "backing", "tank");
    let clean = json(&bcached(&["doctor", "--json", &cache, &backing]).out);
    assert!(
        clean["devices"].as_array().is_some_and(|all| all.iter().all(|one| one["findings"].is_null())),
        "{clean}"
    );
    patch(&backing, 512, b"LABELONE");
    let ran = bcached(&["doctor", &cache, &backing]);
    assert_eq!(ran.exit, 0, "it is fit: {ran:?}");
    assert!(ran.out.contains("  member: it also carries the signature of LVM2_member, "), "{ran:?}");
    let told = json(&bcached(&["doctor", "--json", &backing]).out);
    assert_eq!(told["devices"][0]["findings"][0]["kind"], "member", "{told}");
}

/// The kernel's properties of a block device are reported.
#[test]
fn doctor_tells_what_the_kernel_tells_of_a_block_device() {
    let images = Images::new();
    let (cache, _) = set(&images, "cache", "backing", "tank");
    let Some(device) = LoopDevice::over(&cache) else { return };
    let told = json(&bcached(&["doctor", "--json", &device.0]).out);
    let queue = std::path::Path::new("/sys/block").join(device.0.trim_start_matches("/dev/")).join("queue");
    let says = |name: &str| std::fs::read_to_string(queue.join(name)).expect("readable").trim().to_owned();
    let one = &told["devices"][0];
    assert_eq!(one["fit"], true, "{told}");
    assert_eq!(one["physical_block_bytes"].to_string(), says("physical_block_size"));
    assert_eq!(one["rotational"], says("rotational") == "1");
    assert_eq!(one["volatile_cache"], says("write_cache") != "write through");
}
