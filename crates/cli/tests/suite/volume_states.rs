//! Every command in every state of a volume: an impossible command says what is wrong, why, and
//! what can be done, ends with the exit status of its kind, and changes nothing.

use crate::common::exits::unexpected_exit;
use crate::common::{Daemon, Images, ask, bcached, done, fill, pattern, refused, refused_also_dry, requires};

const MIB: u64 = 1 << 20;

/// The volumes, each named after its state, and one that does not exist.
const STATES: [&str; 7] = ["served", "detached", "waiting", "failed", "stopped", "busy", "unknown"];

/// The commands, in which `VOLUME` is replaced, and the exit status in each state. Commands that
/// would have an effect are dry runs.
const TABLE: [(&str, [i32; 7]); 16] = [
    //                                          served detached waiting failed stopped busy unknown
    ("flush VOLUME --dry-run", [0, 0, 4, 4, 4, 3, 2]),
    ("detach VOLUME --dry-run", [0, 0, 4, 4, 4, 0, 2]),
    ("attach VOLUME --cache fast --dry-run", [0, 0, 4, 4, 4, 3, 2]),
    ("grow VOLUME --dry-run", [0, 0, 4, 4, 4, 3, 2]),
    ("shrink VOLUME --size 8M --dry-run", [0, 0, 4, 4, 4, 3, 2]),
    ("remove VOLUME --dry-run", [0, 0, 0, 0, 0, 3, 2]),
    ("stop VOLUME --dry-run", [0, 0, 0, 0, 0, 3, 2]),
    ("add VOLUME --dry-run", [0, 0, 0, 0, 0, 0, 2]),
    ("forget VOLUME --dry-run", [3, 3, 2, 2, 0, 3, 2]),
    ("replace VOLUME --with /nonexistent --dry-run", [2; 7]),
    ("release VOLUME --dry-run", [2; 7]),
    ("cancel VOLUME", [2; 7]),
    ("set VOLUME writeback_percent=20 --dry-run", [0, 0, 0, 0, 0, 0, 2]),
    ("get VOLUME writeback_percent", [0, 0, 0, 0, 0, 0, 2]),
    ("explain VOLUME 10M", [1, 1, 4, 4, 4, 1, 2]),
    ("wait VOLUME --for served --timeout 1s", [0, 0, 6, 1, 1, 0, 2]),
];

/// Past the end of the cache's offsets, so that writes to a backing device alone can be made to
/// fail.
const DATA_OFFSET: u64 = 40 * MIB;
const CACHE_BYTES: u64 = 36 * MIB;

/// Starts a configuration with one volume in each state; see [`keep_busy`].
fn all_states(images: &Images) -> Daemon {
    let fast = images.blank("fast", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
    let mut text = format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = \"1s\"\nwriteback_running = false\n"
    );
    let offset = (DATA_OFFSET / 512).to_string();
    for state in &STATES[..6] {
        let device = images.blank(state, DATA_OFFSET + 20 * MIB);
        // A device without a superblock cannot be served.
        if *state != "failed" {
            assert_eq!(bcached(&["make", "--writeback", "-o", &offset, "-B", &device]).exit, 0);
        }
        text += &format!("[volume.{state}]\nbacking = {device:?}\n");
        text += if *state == "detached" { "cache = \"none\"\n" } else { "" };
    }
    images.configure(&text);
    std::fs::remove_file(images.path("waiting")).expect("ours");
    let daemon = Daemon::configured(images);
    done(&daemon, &["stop", "stopped"]);
    fill(images, &daemon, "busy", &pattern(2 << 20, 1));
    // From now on writes to its device fail, and those to the cache succeed.
    daemon.fail_writes_beyond(CACHE_BYTES);
    keep_busy(&daemon);
    daemon.wait_for("its device fails", |status| {
        let volumes = status["volumes"].as_array().expect("volumes");
        volumes.iter().any(|volume| volume["name"] == "busy" && volume["state"] == "degraded")
    });
    daemon
}

/// Starts the job again: it gives up after some rounds without progress, a second each.
fn keep_busy(daemon: &Daemon) {
    if let Some(job) = daemon.status()["jobs"][0]["id"].as_u64() {
        // It may have ended this moment.
        let _cancelled = ask(daemon, &["cancel", &job.to_string()]);
    }
    done(daemon, &["detach", "busy", "--no-wait"]);
}

/// Returns what a refusal must not change.
fn everything(images: &Images, daemon: &Daemon) -> (String, Vec<String>) {
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes").iter();
    let of = |volume: &serde_json::Value| {
        let seen =
            ["name", "state", "attached", "dirty_bytes", "size_bytes"].map(|key| volume[key].to_string());
        seen.join(" ")
    };
    let jobs = status["jobs"].as_array().into_iter().flatten();
    let of_job = |job: &serde_json::Value| format!("{} {}", job["verb"], job["state"]);
    (images.kept(), volumes.map(of).chain(jobs.map(of_job)).collect())
}

#[test]
fn every_verb_says_what_is_the_matter_in_every_state() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let daemon = all_states(&images);
    let before = everything(&images, &daemon);
    let mut wrong = Vec::new();
    for (line, exits) in TABLE {
        for (state, exit) in STATES.iter().zip(exits) {
            keep_busy(&daemon);
            let line = line.replace("VOLUME", state);
            wrong.extend(unexpected_exit(&daemon, &line, exit));
            assert_eq!(everything(&images, &daemon), before, "{line}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The advice can be followed: `bcached cancel` is named only for jobs that can be cancelled.
#[test]
fn nobody_is_told_to_cancel_what_cannot_be_cancelled() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let daemon = all_states(&images);
    let status = daemon.status();
    let number = status["jobs"][0]["id"].to_string();
    refused(&daemon, &["flush", "busy"], 3, &format!("wait for it, or `bcached cancel {number}`"));
    let waits = ask(&daemon, &["wait", "busy", "--for", "detached", "--timeout", "1s"]);
    let told = waits.exit == 6 && waits.err.contains("busy: detach, 0% written back, 2 MiB dirty");
    assert!(told, "{waits:?}");
    let listed = done(&daemon, &["list"]);
    assert!(listed.lines().any(|line| line.starts_with("busy: detach, 0%")), "{listed}");
    assert!(listed.contains("write-back fails at"), "{listed}");
    assert_eq!(done(&daemon, &["cancel", &number]), "busy: detach was cancelled\n");
    refused(&daemon, &["cancel", "77"], 2, "there is no job 77; `bcached status` shows the running jobs");
}

/// A regression: a device under another name was accepted by the dry run and then refused, and its
/// section was kept: it failed again at each start.
#[test]
fn a_device_is_not_added_again_by_another_name() {
    let images = Images::new();
    let (fast, tank) = images.configure_pair(CACHE_BYTES, 20 * MIB, "");
    let daemon = Daemon::configured(&images);
    for (name, of) in [("again", &tank), ("cached", &fast)] {
        let link = images.path(name);
        std::fs::hard_link(of, &link).expect("one file system");
        let link = link.to_str().expect("text");
        let words = ["add", name, "--backing", link];
        let exit = if of == &tank { 3 } else { 2 };
        let sentence = if of == &tank { "is the device of tank" } else { "it is a cache device" };
        refused_also_dry(&daemon, &words, exit, sentence);
    }
    let copy = images.path("copy");
    std::fs::copy(&tank, &copy).expect("a copy");
    let words = ["add", "copy", "--backing", copy.to_str().expect("text")];
    refused_also_dry(&daemon, &words, 3, "tank has the same UUID");
    assert_eq!(images.kept(), "", "nothing is kept of what was refused");
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(1));
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: although no detach had been requested, the message said that something waits.
#[test]
fn a_wait_for_a_detach_that_nobody_has_begun_says_so() {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, 20 * MIB, "");
    let daemon = Daemon::configured(&images);
    let wait = ["wait", "tank", "--for", "detached", "--timeout", "1s"];
    refused(&daemon, &wait, 6, "no detach was requested: run `bcached detach tank`");
    refused(&daemon, &["shrink", "tank", "--size", "-5"], 2, "`-5` is not a size");
    // A setting that keeps dirty data from being written back is visible.
    assert!(!done(&daemon, &["status"]).contains("write-back is off"));
    done(&daemon, &["set", "tank", "writeback_running=0", "--runtime"]);
    assert!(done(&daemon, &["status"]).contains("write-back is off (writeback_running)"));
    let status = daemon.status();
    assert_eq!(status["volumes"][0]["writeback_running"].as_bool(), Some(false), "{status}");
    // The value is that of the files again.
    done(&daemon, &["unset", "tank", "writeback_running"]);
    done(&daemon, &["detach", "tank"]);
    assert!(!done(&daemon, &["status"]).contains("write-back is off"));
    done(&daemon, &["attach", "tank"]);
    assert_eq!(done(&daemon, &["config", "diff"]), "the running configuration is that of the files\n");
    assert_eq!(daemon.stop().0, 0);
}
