//! `bcached get`, `set` and `unset` on a cache, and the cache's section in a configuration.

use crate::common::{Daemon, Images, bcached, done, fill, json, pattern, refused, run, tool};
use bcached_config::options::cache_options;

/// Returns the value in force, and its origin.
#[track_caller]
fn value(daemon: &Daemon, cache: &str, option: &str) -> (String, String) {
    let shown = json(&done(daemon, &["get", "--json", cache, option]));
    assert_eq!((shown["cache"].as_str(), shown["volume"].as_str()), (Some("fast"), None));
    let text = |key: &str| shown["options"][0][key].as_str().unwrap_or_default().to_owned();
    (text("value"), text("origin"))
}

fn pair(value: &str, origin: &str) -> (String, String) {
    (value.to_owned(), origin.to_owned())
}

/// Returns true if the superblock stores the option: it is the origin if nothing else sets the
/// option, and keeps the last value after an unset.
fn is_kept(option: &str) -> bool {
    ["cache_replacement_policy", "discard"].contains(&option)
}

/// Returns the option's origin before anything is set.
fn of_file(option: &str) -> &'static str {
    match option {
        "cutoff_writeback_sync" => "config",
        _ if is_kept(option) => "superblock",
        _ => "default",
    }
}

/// For each option: its default, a value as typed and as printed, a refused value, and why. If the
/// typed value equals the refused one, only the refusal is tested.
const EACH: &[(&str, &str, &str, &str, &str, &str)] = &[
    ("cache_replacement_policy", "lru", "fifo", "fifo", "mru", "is not one of lru, fifo, random"),
    ("discard", "0", "1", "1", "maybe", "is neither 1 nor 0"),
    ("congested_read_threshold_us", "2000", "0", "0", "2ms", "is not a whole number"),
    ("congested_write_threshold_us", "20000", "5000", "5000", "-1", "is not a whole number"),
    ("journal_delay_ms", "100", "70000", "65535", "none", "is not a whole number"),
    ("io_error_limit", "8", "0", "0", "8k", "is not a whole number"),
    ("io_error_halflife", "0", "1000", "1000", "a week", "is not a whole number"),
    ("cutoff_writeback", "90", "40", "40", "40%", "is not a whole number"),
    ("cutoff_writeback_sync", "80", "0", "1", "", "is not a whole number"),
    ("idle_max_writeback_rate", "1", "no", "", "no", "is neither 1 nor 0"),
];

#[test]
fn every_option_of_a_cache_is_set_stays_and_is_unset() {
    let tried: Vec<_> = EACH.iter().map(|each| each.0).collect();
    let all: Vec<_> = cache_options::OPTIONS.iter().map(|option| option.name).collect();
    assert_eq!(tried, all, "none is left out");
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("tank", 20 << 20));
    assert_eq!(bcached(&["make", "-b", "64k", "--label", "tank", "-C", &cache, "-B", &backing]).exit, 0);
    let (config, kept) = (images.path("config.toml"), images.path("config.d/99-set.toml"));
    let text = format!(
        "version = 1\n[cache.fast]\ndevice = {cache:?}\ncutoff_writeback_sync = 80\n[volume.media]\nbacking = {backing:?}\n"
    );
    std::fs::write(&config, text).expect("a file");
    let start = || Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let daemon = start();
    let set_uuid = daemon.status()["caches"][0]["set_uuid"].as_str().expect("a uuid").to_owned();
    for (option, before, typed, printed, bad, why) in EACH {
        assert_eq!(value(&daemon, "fast", option), pair(before, of_file(option)), "{option}");
        refused(&daemon, &["set", "fast", &format!("{option}={bad}")], 2, why);
        if typed == bad {
            continue;
        }
        let said = done(&daemon, &["set", "fast", &format!("{option}={typed}")]);
        assert_eq!(said, format!("fast: {option} is {printed} (set)\n"));
        for name in [set_uuid.as_str(), &set_uuid[..8], cache.as_str()] {
            assert_eq!(value(&daemon, name, option), pair(printed, "set"), "{option} of {name}");
        }
    }
    done(&daemon, &["set", "fast", "idle_max_writeback_rate=0", "--runtime"]);
    assert_eq!(value(&daemon, "fast", "idle_max_writeback_rate"), pair("0", "runtime"));
    refused(
        &daemon,
        &["set", "fast", "cache_mode=none"],
        2,
        "is not an option of a cache: it is an option of a volume",
    );
    refused(
        &daemon,
        &["set", "media", "io_error_limit=1"],
        2,
        "is not an option of a volume: it is an option of a cache",
    );
    refused(&daemon, &["get", "fats"], 2, "nothing is called `fats`");
    assert_eq!(daemon.stop().0, 0);

    let daemon = start();
    for (option, before, typed, printed, bad, _) in EACH {
        let now = if typed == bad { pair(before, of_file(option)) } else { pair(printed, "set") };
        assert_eq!(value(&daemon, "fast", option), now, "{option} after a restart");
        done(&daemon, &["unset", "fast", option]);
        let left = if is_kept(option) { printed } else { before };
        assert_eq!(value(&daemon, "fast", option), pair(left, of_file(option)), "{option}");
    }
    assert!(!std::fs::read_to_string(kept).expect("the file").contains("fast"), "nothing is left in it");
}

/// What is set is in the superblock for a kernel or the next daemon; what is set with `--runtime`
/// is not. Both take effect at once.
#[test]
fn what_the_superblock_keeps_of_a_cache_is_set_there() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("tank", 20 << 20));
    assert_eq!(bcached(&["make", "-b", "64k", "--discard", "-C", &cache, "-B", &backing]).exit, 0);
    let config = images.path("config.toml");
    let text =
        format!("version = 1\n[cache.fast]\ndevice = {cache:?}\n[volume.media]\nbacking = {backing:?}\n");
    std::fs::write(&config, &text).expect("a file");
    let config = config.to_str().expect("text");
    let daemon = Daemon::start(&images, &["--config", config]);
    let in_force = |daemon: &Daemon| {
        let now = &daemon.status()["caches"][0];
        let text = |key: &str| now[key].as_str().unwrap_or_default().to_owned();
        (text("discard"), text("cache_replacement_policy"))
    };
    let kept = || {
        let shown = json(&bcached(&["show", "--json", &cache]).out);
        (
            shown["cache"]["discard"] == true,
            shown["cache"]["replacement"].as_str().unwrap_or_default().to_owned(),
        )
    };
    assert_eq!((in_force(&daemon), kept()), (pair("on", "lru"), (true, "lru".to_owned())));
    // Free buckets have never been used, but are still discarded on the device.
    let discarded = |status: &serde_json::Value| status["caches"][0]["discarded_bytes"].as_u64();
    daemon.wait_for("free buckets are discarded", |status| discarded(status).is_some_and(|bytes| bytes > 0));
    assert!(done(&daemon, &["metrics"]).contains("bcached_cache_discarded_bytes_total{cache=\"fast\"} "));
    done(&daemon, &["set", "fast", "discard=0", "cache_replacement_policy=random", "--runtime"]);
    assert_eq!((in_force(&daemon), kept()), (pair("off", "random"), (true, "lru".to_owned())), "for now");
    done(&daemon, &["set", "fast", "discard=0", "cache_replacement_policy=fifo"]);
    assert_eq!((in_force(&daemon), kept()), (pair("off", "fifo"), (false, "fifo".to_owned())));
    done(&daemon, &["unset", "fast", "discard", "cache_replacement_policy"]);
    assert_eq!(
        (in_force(&daemon), kept()),
        (pair("off", "fifo"), (false, "fifo".to_owned())),
        "nobody says otherwise"
    );
    assert_eq!(daemon.stop().0, 0);
    // A configuration file has the same effect as `set`.
    std::fs::write(config, text.replace("[volume", "discard = true\n[volume")).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config]);
    daemon.wait_for("the superblock says so", |_| kept().0);
    assert_eq!(in_force(&daemon), pair("on", "fifo"));
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: a policy from the configuration that waits for the cache to work again made every
/// other change fail. It also hid that the superblock could not be written now, so such an option
/// was kept in the file, and refused all the same.
#[test]
fn what_a_failed_cache_still_owes_is_nothing_to_who_sets_something_else() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 << 20, 20 << 20);
    let text = |more: &str| {
        format!("version = 1\n[cache.fast]\ndevice = {fast:?}\n{more}[volume.media]\nbacking = {tank:?}\n")
    };
    images.configure(&text(""));
    let daemon = Daemon::configured(&images);
    fill(&images, &daemon, "media", &pattern(1 << 20, 1));
    done(&daemon, &["set", "media", "on_cache_error=fail", "--runtime"]);
    // Everything but the superblocks lies beyond this offset.
    daemon.fail_writes_beyond(60 << 10);
    let _it_fails =
        run(tool("qemu-io").args(["-f", "raw", "-c", "discard 0 64k", "-c", "flush", &daemon.uri("media")]));
    daemon.wait_for("it has failed", |status| status["volumes"][0]["state"] == "degraded");
    images.configure(&text("cache_replacement_policy = \"fifo\"\n"));
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().contains("event=settings-failed"));
    done(&daemon, &["set", "fast", "congested_read_threshold_us=7"]);
    assert_eq!(value(&daemon, "fast", "congested_read_threshold_us"), pair("7", "set"));
    let kept = images.kept();
    refused(
        &daemon,
        &["set", "fast", "discard=1"],
        4,
        "cannot set discard of fast: it is written to a device",
    );
    assert_eq!(images.kept(), kept);
}
