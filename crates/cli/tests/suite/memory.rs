//! The memory for nodes and bucket tables, as processes: caches that are opened and closed never
//! use more together than there is, and each has its share. A set that does not fit its share, or
//! the machine, is refused, without effect on others.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "metrics are small whole numbers"
)]

use crate::common::{Daemon, Images, ask, bcached, done, limited};
use rustix::process::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Half of `memory`.
const ALL: u64 = 64 * MIB;

/// Returns the share of each cache, after asserting that their sum is no more than there is.
#[track_caller]
fn parts(status: &Value) -> Vec<u64> {
    let caches = status["caches"].as_array().expect("caches").iter();
    let part =
        |cache: &Value| Some(cache["node_budget_bytes"].as_u64()? + cache["bucket_table_bytes"].as_u64()?);
    let parts: Vec<u64> = caches.filter_map(part).collect();
    assert!(parts.iter().sum::<u64>() <= ALL, "more than there is: {status}");
    parts
}

/// A regression: each new cache got a share of memory that others had already.
#[test]
fn caches_that_come_and_go_share_the_memory() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 * MIB, 20 * MIB);
    let [slow, new] = ["slow", "new"].map(|name| images.blank(name, 36 * MIB));
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &slow]).exit, 0);
    let one = format!(
        "version = 1\n[daemon]\nmemory = \"128M\"\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n\
         cache = \"fast\"\n"
    );
    images.configure(&one);
    let daemon = Daemon::configured(&images);
    assert_eq!(parts(&daemon.status()), [ALL]);

    images.configure(&format!("{one}[cache.slow]\ndevice = {slow:?}\n"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("both have their part", |status| parts(status) == [ALL / 2, ALL / 2]);
    done(&daemon, &["release", "slow"]);
    daemon.wait_for("it has all of it again", |status| parts(status) == [ALL]);

    done(&daemon, &["replace", "fast", "--with", &new]);
    daemon.wait_for("so has the new one", |status| {
        parts(status) == [ALL] && status["caches"][0]["device"] == *new
    });
    assert_eq!(daemon.status()["volumes"][0]["cache"], "fast");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// The buckets of a sparse file of 32 GiB: their table takes 100 MiB.
const BUCKETS: u64 = 4 * MIB;
const TABLE: u64 = 25 * BUCKETS;

/// Configures a cache with very many buckets and a usual one, each with a volume; `said` is the
/// content of `[daemon]`.
fn many_and_few(images: &Images, said: &str) {
    images.configure(&format!(
        "version = 1\n[daemon]\n{said}[cache.many]\ndevice = {:?}\n[volume.big]\nbacking = {:?}\ncache = \"many\"\nwait = \"1s\"\n\
         [cache.few]\ndevice = {:?}\n[volume.small]\nbacking = {:?}\ncache = \"few\"\n",
        images.path("many"),
        images.path("big"),
        images.path("few"),
        images.path("small"),
    ));
}

/// Makes their devices, the first with so many buckets; returns the warnings about that.
fn make_many_and_few(images: &Images, buckets: u64) -> String {
    let [many, big] =
        [("many", 8192 * buckets), ("big", 20 * MIB)].map(|(name, bytes)| images.blank(name, bytes));
    let [few, small] =
        [("few", 36 * MIB), ("small", 20 * MIB)].map(|(name, bytes)| images.blank(name, bytes));
    let made = bcached(&["make", "--block", "4k", "-b", "8k", "-C", &many, "-B", &big]);
    assert_eq!(made.exit, 0, "{}", made.err);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &few, "-B", &small]).exit, 0);
    made.err
}

fn state<'a>(status: &'a Value, of: &str, name: &str) -> &'a str {
    let all = status[of].as_array().expect("all of them").iter();
    let mut named = all.filter(|one| one["name"] == name);
    named.next().and_then(|one| one["state"].as_str()).unwrap_or_default()
}

/// A regression: the table's memory was neither bounded nor reported: 849 MiB with a `memory` of
/// 256.
#[test]
fn a_table_of_buckets_is_told_counted_and_bounded() {
    let images = Images::new();
    let told = make_many_and_few(&images, BUCKETS);
    assert!(
        told.contains(
            "4194304 buckets take 100 MiB of memory while the cache is served; with `--bucket 16k` it would \
             be 50 MiB"
        ),
        "{told}"
    );
    let many = images.path("many").display().to_string();
    let doctor = bcached(&["doctor", &many]).out;
    let table = "100 MiB of memory while it is served; made with `--bucket 16k` it would take 50 MiB";
    assert!(doctor.contains(&format!("4194304 buckets of 8 KiB ({table})")), "{doctor}");

    // The configured value is a bound: the set that does not fit is refused with the amount it
    // needs, and the other is served.
    many_and_few(&images, "memory = \"128M\"\n");
    let config = images.path("config.toml").display().to_string();
    let check = || bcached(&["config", "check", "--config", &config]).out;
    let needs = "its table of 4194304 buckets takes 100 MiB of memory";
    assert!(check().contains(needs), "{}", check());
    let daemon = Daemon::configured(&images);
    daemon.wait_for("one is refused, one served", |status| {
        state(status, "volumes", "big") == "failed" && state(status, "volumes", "small") == "served"
    });
    let status = daemon.status();
    assert_eq!(state(&status, "caches", "many"), "failed", "{status}");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    let advice = log.split("set `memory = \"").nth(1).and_then(|rest| rest.split('"').next());
    let advice = advice.unwrap_or_else(|| panic!("no advice in {log}"));
    assert!(log.contains(needs), "{log}");

    // The advised amount suffices, and is counted.
    many_and_few(&images, &format!("memory = \"{advice}\"\n"));
    let both =
        |status: &Value| ["big", "small"].iter().all(|name| state(status, "volumes", name) == "served");
    let daemon = Daemon::configured(&images);
    daemon.wait_for("both are served", both);
    let status = daemon.status();
    let of_many = &status["caches"][0];
    assert_eq!(of_many["bucket_table_bytes"], TABLE, "{of_many}");
    let metrics = ask(&daemon, &["metrics"]).out;
    let metric = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name}{{cache=\"many\"}} ")));
        line.and_then(|number| number.parse::<f64>().ok()).unwrap_or_else(|| panic!("no {name}: {metrics}"))
    };
    assert!(metric("bcached_cache_memory_buckets_bytes") as u64 == TABLE);
    assert!(metric("bcached_cache_memory_bytes") as u64 >= TABLE);
    assert!(metric("bcached_cache_memory_limit_bytes") >= metric("bcached_cache_memory_bytes"));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");

    // Without a configured value, the memory grows by such tables, and the log says by how much.
    many_and_few(&images, "");
    assert!(
        check().contains("takes 100 MiB of memory, in addition to the default of `memory` (256M)"),
        "{}",
        check()
    );
    let daemon = Daemon::configured(&images);
    daemon.wait_for("both are served", both);
    let status = daemon.status();
    assert_eq!(status["caches"][0]["node_budget_bytes"], 64 * MIB, "as much for nodes as without it");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert_eq!(log.matches("[event=bucket-memory]").count(), 1, "{log}");
}

/// A regression: an allocation that the machine refused aborted the whole process.
#[test]
fn a_table_for_which_the_machine_has_no_memory_stops_nobody_else() {
    let images = Images::new();
    make_many_and_few(&images, 4 * BUCKETS);
    many_and_few(&images, "");
    // Enough for the program and the usual set, and less than the other's table and its start take.
    let command = limited(
        &Daemon::command(&images, "run", &["--config", &images.path("config.toml").display().to_string()]),
        "ulimit -v 760000",
    );
    let daemon = Daemon::start_command(&images, command);
    daemon.wait_for("one is served, the other waits", |status| {
        state(status, "volumes", "small") == "served" && state(status, "caches", "many") == "waiting"
    });
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert!(log.contains("no memory for the table of its 16777216 buckets, which needs 400 MiB"), "{log}");
}
