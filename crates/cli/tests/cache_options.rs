//! `bcached get`, `set` and `unset` on a cache, and its section in a configuration.

mod common;

use bcached_daemon::options::of_cache;
use common::{Daemon, Images, bcached, done, json, refused};

/// The value in force, and who says so.
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

/// Whose word counts before anything is set.
fn of_file(option: &str) -> &'static str {
    if option == "cutoff_writeback_sync" { "config" } else { "default" }
}

/// Of each option: its default, a value as it is typed and as it is printed, one that is refused, and why. The same twice: it is only
/// refused.
const EACH: &[(&str, &str, &str, &str, &str, &str)] = &[
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
    let all: Vec<_> = of_cache::OPTIONS.iter().map(|option| option.name).collect();
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
        "is no option of a cache: it is one of a volume",
    );
    refused(
        &daemon,
        &["set", "media", "io_error_limit=1"],
        2,
        "is no option of a volume: it is one of a cache",
    );
    refused(&daemon, &["get", "fats"], 2, "nothing is called `fats`");
    assert_eq!(daemon.stop().0, 0);

    let daemon = start();
    for (option, before, typed, printed, bad, _) in EACH {
        let now = if typed == bad { pair(before, of_file(option)) } else { pair(printed, "set") };
        assert_eq!(value(&daemon, "fast", option), now, "{option} after a restart");
        done(&daemon, &["unset", "fast", option]);
        assert_eq!(value(&daemon, "fast", option), pair(before, of_file(option)), "{option}");
    }
    assert!(!std::fs::read_to_string(kept).expect("the file").contains("fast"), "nothing is left in it");
}
