//! Every command that needs a cache, in every state of the cache, as `volume_states` does for the
//! states of volumes.

use crate::common::exits::unexpected_exit;
use crate::common::{Daemon, Images, ask, bcached, fill, pattern, refused, requires, run, tool};

const MIB: u64 = 1 << 20;

/// The caches, each named after its state, and one that does not exist. `cut` was open when its
/// device was truncated, and has stopped writing.
const STATES: [&str; 5] = ["open", "waiting", "failed", "cut", "unknown"];

/// The commands and the exit status in each state. `CACHE` is replaced by the cache, `of-CACHE` by
/// a volume configured for it, `free` is a volume without a cache, and `SPARE` is replaced by an
/// empty device. Commands that would have an effect are dry runs.
const TABLE: [(&str, [i32; 5]); 16] = [
    //                                                 open waiting failed cut unknown
    ("release CACHE --dry-run", [0, 3, 0, 4, 2]),
    ("replace CACHE --with SPARE --dry-run", [0, 0, 0, 3, 2]),
    ("attach free --cache CACHE --dry-run", [0, 4, 4, 0, 2]),
    ("add scratch --size 4M --cache CACHE --dry-run", [0, 4, 4, 0, 2]),
    ("set CACHE congested_read_threshold_us=7 --dry-run", [0, 0, 0, 0, 2]),
    ("get CACHE congested_read_threshold_us", [0, 0, 0, 0, 2]),
    ("unset CACHE congested_read_threshold_us --dry-run", [0, 0, 0, 0, 2]),
    ("flush of-CACHE --dry-run", [0, 0, 4, 0, 2]),
    ("detach of-CACHE --dry-run", [0, 0, 4, 0, 2]),
    ("attach of-CACHE --cache open --dry-run", [0, 0, 4, 3, 2]),
    ("remove of-CACHE --dry-run", [0, 0, 0, 0, 2]),
    ("stop of-CACHE --dry-run", [0, 0, 0, 0, 2]),
    ("forget of-CACHE --dry-run", [3, 3, 2, 3, 2]),
    ("grow of-CACHE --dry-run", [0, 0, 4, 0, 2]),
    ("wait of-CACHE --for clean --timeout 1s", [0, 0, 1, 6, 2]),
    ("explain of-CACHE 1M", [1, 1, 4, 0, 2]),
];

/// Starts a configuration with one cache in each state, and a volume for each.
fn all_states(images: &Images) -> Daemon {
    let mut text =
        "version = 1\n[defaults]\nwait = \"1s\"\non_cache_error = \"fail\"\nwriteback_running = false\n"
            .to_owned();
    for state in &STATES[..4] {
        let (cache, backing) =
            (images.blank(state, 36 * MIB), images.blank(&format!("of-{state}"), 20 * MIB));
        // A device without a superblock cannot be opened.
        if *state != "failed" {
            assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
        }
        assert_eq!(bcached(&["make", "--writeback", "-B", &backing]).exit, 0);
        text += &format!("[cache.{state}]\ndevice = {cache:?}\n");
        text += &format!("[volume.of-{state}]\nbacking = {backing:?}\ncache = \"{state}\"\n");
    }
    let free = images.blank("free", 20 * MIB);
    assert_eq!(bcached(&["make", "--writeback", "-B", &free]).exit, 0);
    text += &format!("[volume.free]\nbacking = {free:?}\ncache = \"none\"\n");
    images.configure(&text);
    std::fs::remove_file(images.path("waiting")).expect("ours");
    let daemon = Daemon::configured(images);
    fill(images, &daemon, "of-cut", &pattern(2 << 20, 1));
    cut(images, &daemon);
    daemon
}

/// Truncates the device. The cache notices at its next write there, its own or one for this client,
/// and stops writing.
fn cut(images: &Images, daemon: &Daemon) {
    let device = std::fs::File::options().write(true).open(images.path("cut")).expect("ours");
    device.set_len(MIB).expect("shorter");
    let _it_fails =
        run(tool("qemu-io").args(["-f", "raw", "-c", "discard 0 64k", "-c", "flush", &daemon.uri("of-cut")]));
    daemon.wait_for("it has noticed", |_| daemon.log().contains("event=cache-stopped-writing"));
}

/// Returns what a refusal must not change.
fn everything(images: &Images, daemon: &Daemon) -> (String, Vec<String>) {
    let status = daemon.status();
    let seen = |object: &serde_json::Value| {
        ["name", "state", "attached", "dirty_bytes", "size_bytes"]
            .map(|key| object[key].to_string())
            .join(" ")
    };
    let all = ["caches", "volumes", "jobs"].map(|list| status[list].as_array().cloned().unwrap_or_default());
    (images.kept(), all.concat().iter().map(seen).collect())
}

#[test]
fn every_verb_says_what_is_the_matter_in_every_state_of_a_cache() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let images = Images::new();
    let daemon = all_states(&images);
    let spare = images.blank("spare", 36 * MIB);
    let before = everything(&images, &daemon);
    let mut wrong = Vec::new();
    for (line, exits) in TABLE {
        for (state, exit) in STATES.iter().zip(exits) {
            let line = line.replace("CACHE", state).replace("SPARE", &spare);
            wrong.extend(unexpected_exit(&daemon, &line, exit));
            assert_eq!(everything(&images, &daemon), before, "{line}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A regression: for the reason why a cache is not open the message referred to `bcached
    // status`. And a volume without a cache cannot be detached.
    let attach = ["attach", "free", "--cache", "waiting"];
    refused(&daemon, &attach, 4, "the cache waiting is not open: cannot use");
    refused(&daemon, &attach, 4, "it does not exist; check the name, and that the device is connected");
    // A volume that is served without its cache is not abandoned.
    refused(
        &daemon,
        &["release", "waiting"],
        3,
        "of-waiting is served without it; `bcached detach of-waiting`",
    );
    refused(&daemon, &["forget", "of-waiting"], 3, "it is served; `bcached remove of-waiting` first");
}

/// Commands with a SET, in which `SET` is replaced, `MORE` by a backing device that is not served,
/// and `NEW` by an empty one.
const OF_SETS: [&str; 7] = [
    "release SET --dry-run",
    "replace SET --with NEW --dry-run",
    "attach free --cache SET --dry-run",
    "add more --backing MORE --cache SET --dry-run",
    "add scratch --size 4M --cache SET --dry-run",
    "get SET congested_read_threshold_us",
    "set SET congested_read_threshold_us=7 --dry-run",
];

/// Every command accepts a set by its name, its UUID or its device. A regression: `add` accepted an
/// unknown name, and the volume permanently got another cache.
#[test]
fn a_set_is_called_the_same_by_every_command() {
    const FAST: &str = "11111111-1111-4111-8111-111111111111";
    const SPARE: &str = "11111111-2222-4222-8222-222222222222";
    let images = Images::new();
    let mut text = "version = 1\n".to_owned();
    for (name, uuid) in [("fast", FAST), ("spare", SPARE)] {
        let cache = images.blank(name, 36 * MIB);
        assert_eq!(bcached(&["make", "-b", "64k", "--cset-uuid", uuid, "-C", &cache]).exit, 0);
        text += &format!("[cache.{name}]\ndevice = {cache:?}\n");
    }
    let [free, more] = ["free", "more"].map(|name| {
        let backing = images.blank(name, 20 * MIB);
        assert_eq!(bcached(&["make", "-B", &backing]).exit, 0);
        backing
    });
    images.configure(&format!("{text}[volume.free]\nbacking = {free:?}\ncache = \"none\"\n"));
    let (link, other_name) = (images.path("link"), images.path("other-name"));
    std::os::unix::fs::symlink(images.path("fast"), &link).expect("a link");
    std::fs::hard_link(images.path("fast"), &other_name).expect("a link");
    let daemon = Daemon::configured(&images);
    let new = images.blank("new", 36 * MIB);
    let asked = |command: &str, set: &str| {
        let words = command.split(' ').map(|word| match word {
            "SET" => set,
            "MORE" => &more,
            "NEW" => &new,
            word => word,
        });
        ask(&daemon, &words.collect::<Vec<_>>())
    };
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let by_uuid = [FAST.to_owned(), format!("UUID={FAST}"), FAST[..13].to_owned()];
    let by_device = [text(&images.path("fast")), text(&link), text(&other_name)];
    for command in OF_SETS {
        for called in ["fast".to_owned()].iter().chain(&by_uuid).chain(&by_device) {
            let ran = asked(command, called);
            assert_eq!(ran.exit, 0, "{command}, {called}: {ran:?}");
        }
        let ran = asked(command, "11111111");
        assert!(ran.exit == 2 && ran.err.contains("name one of: fast, spare"), "{command}: {ran:?}");
        for nobody in ["nosuch", "UUID=33333333-3333-4333-8333-333333333333", "/nonexistent"] {
            let ran = asked(command, nobody);
            assert!(ran.exit == 2 && ran.err.contains("is called `"), "{command}, {nobody}: {ran:?}");
        }
    }
    assert_eq!(images.kept(), "", "all of that was planned only");
    let added = ask(&daemon, &["add", "more", "--backing", &more, "--cache", &format!("UUID={SPARE}")]);
    assert_eq!(added.exit, 0, "{added:?}");
    assert!(images.kept().contains("cache = \"spare\""), "{}", images.kept());
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes");
    let its = volumes.iter().find(|volume| volume["name"] == "more").expect("it is there");
    assert_eq!(its["cache"], "spare", "{its}");
    let again = |cache: &str| ask(&daemon, &["add", "more", "--backing", &more, "--cache", cache]);
    assert_eq!((again("spare").exit, again(SPARE).exit), (0, 0));
    let ran = again("fast");
    assert!(ran.exit == 3 && ran.err.contains("bcached attach more --cache"), "{ran:?}");
    // The same for a volume, by a path that is not configured.
    std::fs::hard_link(&more, images.path("more-too")).expect("a link");
    let ran = ask(&daemon, &["get", &text(&images.path("more-too")), "cache_mode"]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}
