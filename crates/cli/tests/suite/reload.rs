//! What a reload applies, and what it leaves unchanged: for each key left unchanged it says so, and
//! what applies it.

use crate::common::{Daemon, Images, ask, bcached, done, json};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// A regression: after a change of a device, the daemon said "reloaded" and served the old one.
#[test]
fn a_reload_says_what_it_leaves_as_it_is() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 * MIB, 20 * MIB);
    let flash = "6f0c1a52-2a53-4ae5-9a6f-9f6f5d6b2f10";
    let swap = format!("[volume.swap]\nflash = \"UUID={flash}\"\n");
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\nwait = \"1s\"\n{swap}"
    ));
    let daemon = Daemon::configured(&images);
    let socket = images.path("run/other.sock");
    images.configure(&format!(
        "version = 1\n[daemon]\nmemory = \"300M\"\nstop_timeout = \"7s\"\nmetrics = \"127.0.0.1:9763\"\n\
         [nbd]\nlisten = [{socket:?}]\n[cache.fast]\ndevice = \"/nonexistent/other\"\n\
         [volume.media]\nbacking = \"/nonexistent/tank\"\ncache = \"none\"\nwait = \"2s\"\nread_only = true\n\
         shared = true\nsize = \"10M\"\nwriteback_percent = 20\n{swap}read_only = true\n"
    ));
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().contains("event=reloaded"));
    let log = daemon.log();
    let next = "until the next start";
    for told in [
        format!("`memory` of [daemon] stays 256M {next}"),
        format!("`metrics` of [daemon] stays unset {next}"),
        format!("`listen` of [nbd] stays {} {next}", images.path("run/nbd.sock").display()),
        format!("`device` of [cache.fast] stays {fast} {next}; `bcached replace` moves its volumes"),
        format!("`backing` of [volume.media] stays {tank} {next}"),
        format!("`cache` of [volume.media] stays unset {next}, or `bcached attach` and `detach`"),
        format!("`wait` of [volume.media] stays 1s {next}"),
        format!("`read_only` of [volume.media] stays false {next}"),
        format!("`shared` of [volume.media] stays false {next}"),
        format!("`size` of [volume.media] stays unset {next}, or `bcached grow` and `shrink`"),
        format!("`read_only` of [volume.swap] stays false {next}"),
    ] {
        assert!(log.contains(&told), "{told}\n{log}");
    }
    assert_eq!(log.matches("event=reload-kept").count(), 11, "{log}");
    // The rest is in force.
    assert_eq!(done(&daemon, &["get", "media", "writeback_percent"]), "20\n");
    let stop = json(&done(&daemon, &["stop", "--dry-run", "--json"]));
    assert_eq!(stop["stop_timeout_seconds"].as_u64(), Some(7), "{stop}");
    assert_eq!(daemon.status()["volumes"][0]["backing"], serde_json::json!(tank));
    // What was logged is also what `config diff` shows later.
    let differs = ask(&daemon, &["config", "diff"]);
    assert!(
        differs.out.contains("daemon.memory: 256M is in force, 300M is in the files (until the next start)"),
        "{differs:?}"
    );
    assert!(!differs.out.contains("stop_timeout"), "{differs:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: adding a volume applied pending changes of the files in part: memory for nodes but
/// not for requests, options of other volumes but not their cache modes. `config diff` showed
/// nothing.
#[test]
fn a_volume_that_is_added_has_the_files_read_whole() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 * MIB, 20 * MIB);
    let other = images.blank("other", 20 * MIB);
    assert_eq!(bcached(&["make", "-B", &other]).exit, 0);
    let text = format!("[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n");
    images.configure(&format!("version = 1\n{text}cache_mode = \"writethrough\"\n"));
    let daemon = Daemon::configured(&images);
    images.configure(&format!(
        "version = 1\n[daemon]\nmemory = \"300M\"\nstop_timeout = \"7s\"\n{text}cache_mode = \"writeback\"\n"
    ));
    let differs = || ask(&daemon, &["config", "diff"]).out;
    assert!(differs().contains("daemon.stop_timeout") && differs().contains("cache_mode"), "{}", differs());
    done(&daemon, &["add", "other", "--backing", &other]);
    assert!(daemon.log().contains("`memory` of [daemon] stays 256M"), "{}", daemon.log());
    let memory = "daemon.memory: 256M is in force, 300M is in the files (until the next start)\n";
    assert_eq!(differs(), memory);
    let stop = json(&done(&daemon, &["stop", "--dry-run", "--json"]));
    assert_eq!(stop["stop_timeout_seconds"].as_u64(), Some(7), "{stop}");
    // The superblock has the mode, too.
    assert_eq!(daemon.stop().0, 0);
    let shown = json(&bcached(&["show", "--json", &tank]).out);
    assert_eq!(shown["backing"]["cache_mode"].as_str(), Some("writeback"), "{shown}");
}

/// A regression: a section was taken for that of a volume of the same name in the cache alone. The
/// section's volume was not served, silently, and its options were applied to the other one.
#[test]
fn a_section_is_not_of_what_has_its_name_in_a_cache_alone() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 * MIB, 20 * MIB);
    let text = format!("version = 1\n[cache.fast]\ndevice = {fast:?}\n");
    images.configure(&text);
    let daemon = Daemon::configured(&images);
    done(&daemon, &["add", "scratch", "--size", "4M"]);
    images.configure(&format!("{text}[volume.scratch]\nbacking = {tank:?}\nfreeze_timeout = \"90s\"\n"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("it is read", |_| daemon.log().contains("event=reloaded"));
    let next = "the next start, when the flash-only volume that has this name gets another one";
    let told = format!("[volume.scratch] is not served until {next}");
    assert!(daemon.log().contains(&told), "{}", daemon.log());
    let differs = ask(&daemon, &["config", "diff"]).out;
    assert_eq!(
        differs,
        format!("volume.scratch: nothing is in force, a section is in the files (until {next})\n")
    );
    let timeout = json(&done(&daemon, &["get", "scratch", "freeze_timeout", "--json"]));
    assert_eq!(timeout["options"][0]["origin"].as_str(), Some("default"), "{timeout}");
    assert_eq!(daemon.stop().0, 0);
    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes");
    let named = volumes.iter().find(|volume| volume["name"] == "scratch").expect("the section's");
    assert_eq!((volumes.len(), &named["backing"]), (2, &serde_json::json!(tank)), "{status}");
    assert_eq!(daemon.stop().0, 0);
}
