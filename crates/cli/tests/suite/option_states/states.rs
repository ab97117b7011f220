//! The states: how each is brought about, what cannot be set in it, and how it ends.

use super::{CACHE_BYTES, OptionStateFixture, OwnerState};
use crate::common::{DIRTY, Daemon, STATE, done, fill, patch, pattern, reseal, run, tool};
use bcached_config::options::Scope;

fn of<'a>(status: &'a serde_json::Value, kind: &str, name: &str) -> &'a serde_json::Value {
    let mut all = status[kind].as_array().expect("a list").iter();
    all.find(|one| one["name"] == name).unwrap_or(&serde_json::Value::Null)
}

fn media(status: &serde_json::Value) -> &serde_json::Value {
    of(status, "volumes", "media")
}

fn fast(status: &serde_json::Value) -> &serde_json::Value {
    of(status, "caches", "fast")
}

fn is(daemon: &Daemon, state: &str) -> bool {
    media(&daemon.status())["state"] == state
}

fn is_home(status: &serde_json::Value) -> bool {
    media(status)["state"] == "served" && media(status)["cache"] == "fast"
}

fn again(site: &OptionStateFixture, daemon: Daemon) -> Daemon {
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    site.start()
}

/// A volume: all options can be set, and its superblock is written.
const MEDIA: OwnerState = OwnerState {
    owner: "media",
    scope: Scope::Volume,
    needs: &[],
    enter: OptionStateFixture::start,
    is_so: |daemon| is_home(&daemon.status()),
    renew: |_| {},
    refuses: &[],
    hidden: &[],
    lacks: &[],
    writes_superblock: true,
    leave: again,
};

/// No superblock is written.
const FAILED: OwnerState = OwnerState {
    refuses: &[
        ("label", 4, "the cache has stopped writing"),
        ("writeback_rate", 4, "the cache has stopped writing"),
        ("cache_replacement_policy", 4, "the cache has stopped writing"),
        ("discard", 4, "the cache has stopped writing"),
    ],
    leave: mend,
    ..MEDIA
};

/// The label is on a device that is not served.
const UNSERVED: OwnerState = OwnerState {
    refuses: &[("label", 4, "the volume is not served"), ("writeback_rate", 4, "the volume is not served")],
    writes_superblock: false,
    ..MEDIA
};

/// Options in superblocks of devices that have not been seen.
const UNSEEN: &[&str] = &["label", "cache_mode", "cache_replacement_policy", "discard"];

#[test]
fn of_a_volume_that_is_served() {
    MEDIA.check();
}

#[test]
fn of_a_detached_volume() {
    let state = OwnerState {
        enter: |site| {
            let daemon = site.start();
            done(&daemon, &["detach", "media"]);
            daemon
        },
        is_so: |daemon| is(daemon, "served") && media(&daemon.status())["attached"] == false,
        leave: |_, daemon| {
            done(&daemon, &["attach", "media", "--cache", "fast"]);
            daemon
        },
        refuses: &[("writeback_rate", 4, "it is served without a cache")],
        ..MEDIA
    };
    state.check();
}

fn plug_cache(site: &OptionStateFixture, daemon: Daemon) -> Daemon {
    std::fs::rename(&site.away, &site.fast).expect("back");
    daemon.wait_for("the volume has its cache", is_home);
    daemon
}

#[test]
fn of_a_clean_volume_without_its_cache() {
    let state = OwnerState {
        enter: |site| {
            site.served_once();
            std::fs::rename(&site.fast, &site.away).expect("out of sight");
            site.start()
        },
        is_so: |daemon| is(daemon, "degraded") && media(&daemon.status())["attached"] == false,
        leave: plug_cache,
        refuses: &[("writeback_rate", 4, "it is served without a cache")],
        ..MEDIA
    };
    state.check();
}

#[test]
fn of_a_dirty_volume_that_waits_for_its_cache() {
    let state = OwnerState {
        enter: |site| {
            site.served_once();
            reseal(site.media.to_str().expect("text"), STATE, DIRTY);
            std::fs::rename(&site.fast, &site.away).expect("out of sight");
            site.start()
        },
        is_so: |daemon| is(daemon, "waiting"),
        leave: plug_cache,
        ..UNSERVED
    };
    state.check();
}

#[test]
fn of_a_volume_whose_device_is_missing() {
    let state = OwnerState {
        enter: |site| {
            std::fs::rename(&site.media, &site.away).expect("out of sight");
            site.start()
        },
        is_so: |daemon| is(daemon, "waiting"),
        leave: |site, daemon| {
            std::fs::rename(&site.away, &site.media).expect("back");
            daemon.wait_for("the volume is served", is_home);
            daemon
        },
        hidden: UNSEEN,
        ..UNSERVED
    };
    state.check();
}

#[test]
fn of_a_volume_that_has_failed() {
    let state = OwnerState {
        enter: |site| {
            site.served_once();
            std::fs::copy(&site.media, &site.away).expect("a copy");
            patch(&site.media, 4096 + 8, &[0xff; 8]);
            site.start()
        },
        is_so: |daemon| is(daemon, "failed"),
        leave: |site, daemon| {
            daemon.kill();
            std::fs::rename(&site.away, &site.media).expect("mended");
            site.start()
        },
        hidden: UNSEEN,
        ..UNSERVED
    };
    state.check();
}

#[test]
fn of_a_stopped_volume() {
    let state = OwnerState {
        enter: |site| {
            let daemon = site.start();
            done(&daemon, &["stop", "media"]);
            daemon
        },
        is_so: |daemon| is(daemon, "stopped"),
        leave: |_, daemon| {
            done(&daemon, &["add", "media"]);
            daemon.wait_for("the volume is served", is_home);
            daemon
        },
        ..UNSERVED
    };
    state.check();
}

/// Truncates the device under the volume, which simulates pulling it, and makes the daemon notice.
fn pull_backing(site: &OptionStateFixture) -> Daemon {
    let daemon = site.start();
    // Data flushed now is not lost with the device.
    let uri = daemon.uri("media");
    assert_eq!(run(tool("qemu-io").args(["-f", "raw", "-c", "flush", &uri])).exit, 0);
    std::fs::copy(&site.media, &site.away).expect("a copy");
    let file = std::fs::File::options().write(true).open(&site.media);
    file.and_then(|file| file.set_len(0)).expect("cut");
    done(&daemon, &["set", "media", "on_backing_error=fail", "--runtime"]);
    let _it_fails = run(tool("qemu-io").args(["-f", "raw", "-c", "read 8M 64k", &uri]));
    done(&daemon, &["unset", "media", "on_backing_error"]);
    daemon.wait_for("it is known to be gone", |status| media(status)["state"] == "degraded");
    daemon
}

#[test]
fn of_a_volume_whose_device_was_pulled() {
    let state = OwnerState {
        needs: &["qemu-io"],
        enter: pull_backing,
        is_so: |daemon| is(daemon, "degraded"),
        refuses: &[
            ("label", 4, "the backing device is gone"),
            ("cache_mode", 4, "the backing device is gone"),
        ],
        leave: |site, daemon| {
            std::fs::rename(&site.away, &site.media).expect("back");
            daemon.wait_for("the volume is served", is_home);
            daemon
        },
        ..MEDIA
    };
    state.check();
}

/// Starts a job whose backing device fails all writes. The job is given up after some rounds of a
/// second each: see [`OwnerState::renew`].
fn begin(site: &OptionStateFixture, verb: &str) -> Daemon {
    let daemon = site.start();
    fill(&site.images, &daemon, "media", &pattern(1 << 20, 1));
    daemon.fail_writes_beyond(CACHE_BYTES);
    begin_again(&daemon, verb);
    daemon
}

fn begin_again(daemon: &Daemon, verb: &str) {
    if !is_running(&daemon.status()) {
        done(daemon, &[verb, "media", "--no-wait"]);
    }
}

fn is_running(status: &serde_json::Value) -> bool {
    status["jobs"].as_array().is_some_and(|jobs| jobs.iter().any(|job| job["state"] == "running"))
}

fn end_job(_: &OptionStateFixture, daemon: Daemon) -> Daemon {
    daemon.writes_succeed();
    daemon.wait_for("the end of that", |status| !is_running(status));
    daemon
}

#[test]
fn of_a_volume_that_is_being_detached() {
    let state = OwnerState {
        needs: &["nbdcopy"],
        enter: |site| begin(site, "detach"),
        renew: |daemon| begin_again(daemon, "detach"),
        is_so: |daemon| is_running(&daemon.status()),
        leave: end_job,
        ..MEDIA
    };
    state.check();
}

#[test]
fn of_a_volume_that_is_being_flushed() {
    let state = OwnerState {
        needs: &["nbdcopy"],
        enter: |site| begin(site, "flush"),
        renew: |daemon| begin_again(daemon, "flush"),
        is_so: |daemon| is_running(&daemon.status()),
        leave: end_job,
        ..MEDIA
    };
    state.check();
}

/// Makes the cache fail while it has dirty data of `volume`.
fn fail_cache(site: &OptionStateFixture, daemon: &Daemon, volume: &str) {
    fill(&site.images, daemon, volume, &pattern(1 << 20, 1));
    done(daemon, &["set", volume, "on_cache_error=fail", "--runtime"]);
    // Everything but the superblocks lies past this offset; the files written beside the devices
    // are smaller.
    daemon.fail_writes_beyond(60 << 10);
    let _it_fails =
        run(tool("qemu-io").args(["-f", "raw", "-c", "discard 0 64k", "-c", "flush", &daemon.uri(volume)]));
    daemon.wait_for("it has failed", |status| of(status, "volumes", volume)["state"] == "degraded");
    done(daemon, &["unset", volume, "on_cache_error"]);
}

/// The device accepts writes again up to the sector that failed last, and no further: the set is
/// closed, and cannot be reopened.
fn let_go(site: &OptionStateFixture, daemon: &Daemon, volume: &str) {
    fail_cache(site, daemon, volume);
    let status = daemon.status();
    let reason = fast(&status)["reason"].as_str().unwrap_or_default();
    let sector =
        reason.split_once(" at sector ").and_then(|(_, rest)| rest.split(')').next()?.parse::<u64>().ok());
    let block = fast(&status)["block_bytes"].as_u64().expect("a size");
    daemon.fail_writes_beyond(sector.expect("the reason names one") * 512 + block);
    daemon.wait_for("the set is let go of", |_| is_let_go(daemon));
}

fn with_failed_cache(site: &OptionStateFixture) -> Daemon {
    let daemon = site.start();
    fail_cache(site, &daemon, "media");
    daemon
}

fn with_cache_let_go(site: &OptionStateFixture) -> Daemon {
    let daemon = site.start();
    let_go(site, &daemon, "media");
    daemon
}

fn is_let_go(daemon: &Daemon) -> bool {
    let log = daemon.log();
    log.contains("the cache set cannot be reopened") && !log.contains("event=cache-works-again")
}

fn mend(_: &OptionStateFixture, daemon: Daemon) -> Daemon {
    daemon.writes_succeed();
    daemon.wait_for("it works again", |_| daemon.log().contains("event=cache-works-again"));
    daemon
}

#[test]
fn of_a_volume_whose_cache_has_stopped_writing() {
    let state = OwnerState {
        needs: &["nbdcopy", "qemu-io"],
        enter: with_failed_cache,
        is_so: |daemon| is(daemon, "degraded") && !is_let_go(daemon),
        ..FAILED
    };
    state.check();
}

#[test]
fn of_a_volume_whose_cache_was_let_go_of() {
    let state =
        OwnerState { needs: &["nbdcopy", "qemu-io"], enter: with_cache_let_go, is_so: is_let_go, ..FAILED };
    state.check();
}

/// All options about a backing device: everything but `label`, `on_cache_error` and
/// `freeze_timeout`.
const ABOUT_BACKING: &[&str] = &[
    "cache_mode",
    "sequential_cutoff",
    "writeback_running",
    "writeback_percent",
    "writeback_delay",
    "writeback_rate",
    "writeback_rate_update_seconds",
    "writeback_rate_p_term_inverse",
    "writeback_rate_i_term_inverse",
    "writeback_rate_fp_term_low",
    "writeback_rate_fp_term_mid",
    "writeback_rate_fp_term_high",
    "writeback_consider_fragment",
    "writeback_rate_minimum",
    "writeback_rate_maximum",
    "max_dirty_age",
    "quiet_hours",
    "writeback_latency",
    "spindown_after",
    "stripe_size",
    "partial_stripes_expensive",
    "on_backing_error",
];

/// A volume that lives in the cache alone, whose options cannot be stored.
const SCRATCH: OwnerState = OwnerState {
    owner: "scratch",
    enter: add_scratch,
    is_so: |daemon| of(&daemon.status(), "volumes", "scratch")["state"] == "served",
    lacks: ABOUT_BACKING,
    refuses: &[("*", 2, "the options of a flash-only volume are not kept; add --runtime")],
    leave: |_, daemon| daemon,
    ..MEDIA
};

fn add_scratch(site: &OptionStateFixture) -> Daemon {
    let daemon = site.start();
    done(&daemon, &["add", "scratch", "--size", "4M"]);
    daemon
}

#[test]
fn of_a_volume_in_the_cache_alone() {
    SCRATCH.check();
}

#[test]
fn of_a_stopped_volume_in_the_cache_alone() {
    let state = OwnerState {
        enter: |site| {
            let daemon = add_scratch(site);
            done(&daemon, &["stop", "scratch"]);
            daemon
        },
        is_so: |daemon| of(&daemon.status(), "volumes", "scratch")["state"] == "stopped",
        refuses: const { &[UNSERVED.refuses[0], SCRATCH.refuses[0]] },
        leave: |_, daemon| {
            done(&daemon, &["add", "scratch"]);
            daemon
        },
        ..SCRATCH
    };
    state.check();
}

#[test]
fn of_a_volume_in_a_cache_that_was_let_go_of() {
    let state = OwnerState {
        needs: &["nbdcopy", "qemu-io"],
        enter: |site| {
            let daemon = add_scratch(site);
            // A volume that can be served without the cache would need a device in memory for that,
            // which also lies past the limit.
            done(&daemon, &["stop", "media"]);
            let_go(site, &daemon, "scratch");
            daemon
        },
        is_so: is_let_go,
        refuses: const { &[FAILED.refuses[0], SCRATCH.refuses[0]] },
        leave: mend,
        ..SCRATCH
    };
    state.check();
}

/// A cache: all options can be set, and its superblock is written.
const FAST: OwnerState = OwnerState {
    owner: "fast",
    scope: Scope::Cache,
    is_so: |daemon| fast(&daemon.status())["state"] == "open",
    ..MEDIA
};

#[test]
fn of_a_cache_that_is_open() {
    FAST.check();
}

#[test]
fn of_a_cache_that_is_missing() {
    let state = OwnerState {
        enter: |site| {
            std::fs::rename(&site.fast, &site.away).expect("out of sight");
            site.start()
        },
        is_so: |daemon| fast(&daemon.status())["state"] == "waiting",
        writes_superblock: false,
        leave: plug_cache,
        hidden: UNSEEN,
        ..FAST
    };
    state.check();
}

#[test]
fn of_a_cache_that_is_damaged() {
    let state = OwnerState {
        enter: |site| {
            site.served_once();
            std::fs::copy(&site.fast, &site.away).expect("a copy");
            // Within the list of journal buckets, which the checksum covers.
            patch(&site.fast, 4096 + 216, &[0xff; 8]);
            site.start()
        },
        is_so: |daemon| fast(&daemon.status())["state"] == "failed",
        writes_superblock: false,
        leave: |site, daemon| {
            daemon.kill();
            std::fs::rename(&site.away, &site.fast).expect("mended");
            site.start()
        },
        hidden: UNSEEN,
        ..FAST
    };
    state.check();
}

#[test]
fn of_a_cache_that_has_stopped_writing() {
    let state = OwnerState {
        needs: &["nbdcopy", "qemu-io"],
        enter: with_failed_cache,
        is_so: |daemon| fast(&daemon.status())["state"] == "open" && !is_let_go(daemon),
        refuses: FAILED.refuses,
        leave: mend,
        ..FAST
    };
    state.check();
}

#[test]
fn of_a_cache_that_was_let_go_of() {
    let state = OwnerState {
        needs: &["nbdcopy", "qemu-io"],
        enter: with_cache_let_go,
        is_so: is_let_go,
        refuses: FAILED.refuses,
        leave: mend,
        ..FAST
    };
    state.check();
}
