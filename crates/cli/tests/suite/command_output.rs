//! What commands report about themselves and their results: JSON on request, one event for one
//! action, and sizes that can be typed back.

use crate::common::{
    self, Daemon, Images, ask, bcached, content, done, fill, json, pattern, refused, requires,
};
use rustix::process::geteuid;

/// A regression: `metrics --json` printed text.
#[test]
fn json_is_json_of_every_command() {
    let images = Images::new();
    let (fast, tank) = images.configure_pair(36 << 20, 20 << 20, "");
    let config = images.path("config.toml").to_str().expect("text").to_owned();
    let daemon = Daemon::configured(&images);
    let control = daemon.control().to_owned();
    let asking: &[&[&str]] = &[
        &["status"],
        &["list"],
        &["events"],
        &["explain", "tank", "0"],
        &["explain", "tank", "1P"],
        &["top", "-n", "1"],
        &["metrics"],
        &["metrics", "--textfile"],
        &["get", "tank"],
        &["set", "tank", "cache_mode=writeback", "--dry-run"],
        &["unset", "tank", "cache_mode", "--dry-run"],
        &["flush", "tank"],
        &["wait", "tank", "--for", "served"],
        &["grow", "tank"],
        &["shrink", "tank", "--size", "1P"],
        &["detach", "nobody"],
        &["config", "diff"],
    ];
    let looking: &[&[&str]] = &[
        &["show", &fast],
        &["scan", &fast, &tank],
        &["doctor"],
        &["dump", &tank],
        &["schema"],
        &["version"],
        &["config", "check", "--config", &config],
        &["config", "show", "--config", &config],
        &["config", "scan", &fast],
        &["salvage"],
        &["frobnicate"],
    ];
    let asking = asking.iter().map(|words| [*words, &["--control", &control]].concat());
    for words in asking.chain(looking.iter().map(|words| words.to_vec())) {
        let ran = bcached(&[&["--json"], words.as_slice()].concat());
        let told = format!("{}{}", ran.out, ran.err);
        let mut values = serde_json::Deserializer::from_str(&told).into_iter::<serde_json::Value>();
        let all_are = values.all(|value| value.is_ok_and(|value| value.is_object()));
        assert!(all_are && !told.is_empty(), "{words:?}: {ran:?}");
    }
    // With a file there is nothing to print.
    let file = format!("--textfile={}", images.path("numbers.prom").display());
    let ran = bcached(&["--json", "metrics", &file, "--control", &control]);
    assert_eq!((ran.exit, ran.out.as_str()), (2, ""), "{ran:?}");
    let error = &json(&ran.err)["error"];
    assert_eq!(error["option"], "--textfile", "{error}");
}

/// Both forms have the same numbers.
#[test]
fn metrics_are_the_same_as_json() {
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "");
    let daemon = Daemon::configured(&images);
    let text = done(&daemon, &["metrics"]);
    let metrics = json(&done(&daemon, &["metrics", "--json"]));
    let metrics = metrics["metrics"].as_array().expect("a list");
    let samples: usize = metrics.iter().map(|one| one["samples"].as_array().expect("a list").len()).sum();
    assert_eq!(samples, text.lines().filter(|line| !line.starts_with('#')).count());
    let size = metrics.iter().find(|one| one["name"] == "bcached_volume_size_bytes").expect("it is there");
    assert_eq!((&size["kind"], &size["samples"][0]["labels"]["volume"]), (&"gauge".into(), &"tank".into()));
    assert_eq!(size["samples"][0]["value"], f64::from((20 << 20) - 8192));
}

/// A regression: `attach` logged the same twice: that it was done, and that the volume was served,
/// as it had been all the time.
#[test]
fn one_attach_is_one_event() {
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "cache = \"none\"\n");
    let daemon = Daemon::configured(&images);
    assert_eq!(daemon.log().matches("event=volume-served").count(), 1, "{}", daemon.log());
    done(&daemon, &["attach", "tank", "--cache", "fast"]);
    let log = daemon.log();
    assert_eq!(log.matches("event=job-done").count(), 1, "{log}");
    assert_eq!(log.matches("event=volume-served").count(), 1, "it was served before: {log}");
}

/// A regression: nearly all of a cache full of clean data was called available.
#[test]
fn a_cache_says_what_is_cached() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "cache_mode = \"writethrough\"\nsequential_cutoff = 0\n");
    let daemon = Daemon::configured(&images);
    assert!(done(&daemon, &["status"]).contains(": open, 0 B of 36 MiB cached, 0 B dirty, "));
    fill(&images, &daemon, "tank", &pattern(4 << 20, 3));
    drop(content(&images, &daemon, "tank"));
    let cached = daemon.status()["caches"][0]["cached_bytes"].as_u64().expect("a number");
    assert!(cached >= 4 << 20, "{cached}");
    let status = done(&daemon, &["status"]);
    assert!(status.contains(" of 36 MiB cached, 0 B dirty, ") && !status.contains("available"), "{status}");
}

/// A regression: `status` said 20 MiB, and a refusal 19.9; neither could be typed as a size.
#[test]
fn a_size_in_a_refusal_can_be_asked_for() {
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "");
    let daemon = Daemon::configured(&images);
    assert!(done(&daemon, &["status", "tank"]).contains("volume tank: served, 20 MiB in blocks of "));
    let sentence = "its size is only 20 MiB (20963328 bytes)";
    refused(&daemon, &["shrink", "tank", "--size", "20M"], 2, sentence);
    refused(&daemon, &["shrink", "tank", "--size", "20 MiB"], 2, sentence);
    assert_eq!(
        done(&daemon, &["shrink", "tank", "--size", "20963328"]),
        "tank: its size is 20 MiB (20963328 bytes) already\n"
    );
}

/// A regression: started by hand, the daemon could be killed by the OOM killer, from which the unit
/// protects it.
#[test]
fn root_is_protected_from_the_oom_killer_without_a_unit() {
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "");
    let config = images.path("config.toml");
    let words = ["--config", config.to_str().expect("text")];
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").expect("Linux");
    let start = |variable: Option<&str>| {
        let mut command = Daemon::command(&images, "run", &words);
        command.env_remove("INVOCATION_ID").env_remove("NOTIFY_SOCKET");
        command.envs(variable.map(|name| (name, "4f1b5a7e")));
        let daemon = Daemon::start_command(&images, command);
        let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", daemon.id())).expect("it runs");
        let log = daemon.log();
        assert_eq!(daemon.stop().0, 0);
        (score, log.contains("event=oom-not-protected"))
    };
    let (score, warned) = start(None);
    if own.trim().starts_with('-') || !geteuid().is_root() {
        assert_eq!((score, warned), (own.clone(), false), "it is not its own to decide");
    } else {
        // A container may forbid that even to root: then the log says so.
        assert!(score.trim() == "-900" && !warned || score == own && warned, "{score} {warned}");
    }
    assert_eq!(start(Some("INVOCATION_ID")), (own, false), "the unit says what is right");
}

/// A program that a hand-over executes does not inherit the protection from its parent: it decides
/// for itself.
#[test]
fn what_is_executed_has_the_score_of_before() {
    let images = Images::new();
    images.configure_pair(36 << 20, 20 << 20, "");
    let daemon = Daemon::configured(&images);
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").expect("Linux");
    let seen = images.path("seen");
    let program = common::wrapped(&images, &format!("cat /proc/self/oom_score_adj > {}", seen.display()));
    done(&daemon, &["take-over", "--dry-run", "--program", &program]);
    assert_eq!(std::fs::read_to_string(seen).expect("it was executed"), own);
    let before = ask(&daemon, &["status"]);
    assert_eq!(before.exit, 0, "{before:?}");
}
