//! A start without a cache, as processes. A volume without dirty data in the cache is served
//! without it, and stale cached data is never read afterwards. A volume with dirty data waits.

use crate::common::{
    Daemon, Images, bcached, bytes, content, done, fill, json, patch, pattern, refused, refused_also_dry,
    requires,
};
use std::path::PathBuf;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

/// A cache with two volumes in writeback mode, `media` and `pond`, without automatic write-back.
struct WithoutCacheFixture {
    images: Images,
    cache: PathBuf,
    /// The path of the cache while it is missing.
    away: PathBuf,
    media: String,
    pond: String,
}

impl WithoutCacheFixture {
    fn new() -> Self {
        let images = Images::new();
        let cache = images.blank("fast", CACHE_BYTES);
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
        let [media, pond] = ["media", "pond"].map(|name| images.blank(name, BACKING_BYTES));
        for backing in [&media, &pond] {
            assert_eq!(bcached(&["make", "--writeback", "-B", backing]).exit, 0);
        }
        images.configure(&format!(
            "version = 1\n[cache.fast]\ndevice = {cache:?}\ncongested_write_threshold_us = 0\n[defaults]\nwait = \"1s\"\nwriteback_running = false\n\
             [volume.media]\nbacking = {media:?}\n[volume.pond]\nbacking = {pond:?}\n"
        ));
        let away = images.path("unplugged");
        Self { cache: cache.into(), away, media, pond, images }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    /// Fills both volumes with pattern 1. That of `media` is on its device, too; that of `pond`
    /// exists only in the cache.
    fn fill(&self) {
        let daemon = self.start();
        for volume in ["media", "pond"] {
            fill(&self.images, &daemon, volume, &pattern(DATA_BYTES, 1));
        }
        done(&daemon, &["flush", "media"]);
        done(&daemon, &["wait", "media", "--for", "clean", "--timeout", "30s"]);
        let (exit, log) = daemon.stop();
        assert_eq!(exit, 0, "{log}");
        assert_eq!((state_of(&self.media).as_str(), state_of(&self.pond).as_str()), ("clean", "dirty"));
    }

    fn unplug(&self) {
        std::fs::rename(&self.cache, &self.away).expect("out of sight");
    }

    fn plug(&self) {
        std::fs::rename(&self.away, &self.cache).expect("back");
    }

    #[track_caller]
    fn expect(&self, daemon: &Daemon, volume: &str, seed: u8) {
        let found = content(&self.images, daemon, volume);
        assert!(found[..DATA_BYTES] == pattern(DATA_BYTES, seed), "{volume} holds something else");
    }
}

/// Returns the state in the superblock.
fn state_of(backing: &str) -> String {
    let shown = json(&bcached(&["show", "--json", backing]).out);
    shown["backing"]["state"].as_str().expect("a state").to_owned()
}

#[track_caller]
fn volume(daemon: &Daemon, name: &str) -> serde_json::Value {
    let status = daemon.status();
    let mut volumes = status["volumes"].as_array().expect("volumes").iter();
    volumes.find(|volume| volume["name"] == name).expect("it is configured").clone()
}

fn is_home(status: &serde_json::Value) -> bool {
    status["volumes"][0]["state"] == "served" && status["volumes"][0]["cache"] == "fast"
}

/// A regression: a removed SSD blocked access to data all of which was on the disk.
#[test]
fn a_clean_volume_is_served_without_its_cache_and_nothing_old_comes_back() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    site.unplug();
    let daemon = site.start();
    // Not a moment after `ready`, but with it.
    let media = volume(&daemon, "media");
    assert_eq!(
        (media["state"].as_str(), media["attached"].as_bool()),
        (Some("degraded"), Some(false)),
        "{media}"
    );
    let reason = media["reason"].as_str().unwrap_or_default();
    assert!(reason.starts_with("its cache fast (set ") && reason.contains("`bcached replace`"), "{reason}");
    assert!(daemon.log().contains("event=volume-without-cache"), "{}", daemon.log());
    assert_eq!(state_of(&site.media), "inconsistent", "before anything is written");
    site.expect(&daemon, "media", 1);
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 2));
    assert!(bytes(&site.media)[8192..][..DATA_BYTES] == pattern(DATA_BYTES, 2), "all of it is on the device");
    refused(&daemon, &["attach", "media"], 4, "the cache fast is not open");
    // No clean stop is needed: written data is there.
    daemon.kill();

    site.plug();
    let daemon = site.start();
    assert!(is_home(&daemon.status()), "{}", daemon.status());
    site.expect(&daemon, "media", 2);
    site.expect(&daemon, "pond", 1);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    let check = bcached(&[
        "check",
        site.cache.to_str().expect("text"),
        "--backing",
        &site.media,
        "--backing",
        &site.pond,
    ]);
    assert_eq!(check.exit, 0, "{check:?}");
}

/// The cache returns while the volume is served: the volume returns to it under its clients, and
/// reads no stale data.
#[test]
fn a_cache_that_returns_gets_its_volumes_back() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    site.unplug();
    let daemon = site.start();
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 2));
    site.plug();
    daemon.wait_for("the cache has it again", is_home);
    assert!(daemon.log().contains("media: its cache is back: attaching it"), "{}", daemon.log());
    site.expect(&daemon, "media", 2);
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 3));
    assert!(bytes(&site.media)[8192..][..DATA_BYTES] == pattern(DATA_BYTES, 2), "it is in the cache");
    assert_eq!(site.images.kept(), "", "nobody has asked for anything");
    daemon.kill();
    let daemon = site.start();
    site.expect(&daemon, "media", 3);
    assert_eq!(daemon.stop().0, 0);
}

/// The newest data is in the cache. The volume waits for it however long it takes, and its device
/// is not written.
#[test]
fn a_dirty_volume_waits_for_its_cache() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    site.unplug();
    let before = bytes(&site.pond);
    let daemon = site.start();
    let pond = volume(&daemon, "pond");
    assert_eq!(pond["state"], "waiting", "{pond}");
    let reason = pond["reason"].as_str().unwrap_or_default();
    let wanted = "which is missing; connect the cache's device; without the cache the volume holds old data";
    assert!(
        reason.starts_with("its newest data is in the cache set") && reason.ends_with(wanted),
        "{reason}"
    );
    // The other volume has been served for a while: this one is not just late, but waits.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(volume(&daemon, "pond")["state"], "waiting");
    assert!(bytes(&site.pond) == before, "its device was written");
    site.plug();
    daemon.wait_for("it is served", |status| status["volumes"][1]["state"] == "served");
    site.expect(&daemon, "pond", 1);
    assert_eq!(daemon.stop().0, 0);
}

/// A cache that is present but refused for damage counts as missing.
#[test]
fn a_clean_volume_is_served_without_a_cache_that_is_damaged() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    // Within the list of journal buckets, which the checksum covers.
    patch(&site.cache, 4096 + 216, &[0xff; 8]);
    let daemon = site.start();
    let (media, pond) = (volume(&daemon, "media"), volume(&daemon, "pond"));
    assert_eq!(
        (media["state"].as_str(), pond["state"].as_str()),
        (Some("degraded"), Some("failed")),
        "{media} {pond}"
    );
    // A regression: it was reported as missing, with the advice to connect it.
    let why = media["reason"].as_str().unwrap_or_default();
    let is_said = why.contains(") is present, but refused (cannot use ");
    assert!(is_said && why.contains("`bcached check`") && !why.contains("missing"), "{media}");
    site.expect(&daemon, "media", 1);
    assert_eq!(state_of(&site.pond), "dirty");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: with another cache beside it, the volume could not be assigned to a cache, and was
/// not served.
#[test]
fn a_clean_volume_of_several_caches_is_served_without_its_own_that_is_damaged() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    // All of the journal's five buckets.
    patch(&site.cache, 64 << 10, &vec![0; (5 * 64) << 10]);
    let other = site.images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    let text = std::fs::read_to_string(site.images.path("config.toml")).expect("text");
    site.images.configure(&format!("{text}[cache.other]\ndevice = {other:?}\n"));
    let daemon = site.start();
    let (media, pond) = (volume(&daemon, "media"), volume(&daemon, "pond"));
    let why = media["reason"].as_str().unwrap_or_default();
    assert!(
        media["state"] == "degraded" && why.contains("its journal is damaged: it has no valid entry"),
        "{media}"
    );
    let why = pond["reason"].as_str().unwrap_or_default();
    assert!(pond["state"] == "failed" && why.starts_with("its cache is not served: "), "{pond}");
    site.expect(&daemon, "media", 1);
    assert_eq!(state_of(&site.pond), "dirty");
    assert_eq!(daemon.stop().0, 0);
}

/// A volume that was detached deliberately meanwhile has no cache to return to.
#[test]
fn a_volume_that_was_detached_while_its_cache_was_missing_stays_so() {
    let site = WithoutCacheFixture::new();
    let daemon = site.start();
    assert_eq!(daemon.stop().0, 0);
    site.unplug();
    let daemon = site.start();
    assert_eq!(volume(&daemon, "media")["state"], "degraded");
    done(&daemon, &["detach", "media"]);
    assert_eq!(volume(&daemon, "media")["state"], "served", "so it is to be");
    site.plug();
    daemon.wait_for("the other one goes back", |status| status["volumes"][1]["cache"] == "fast");
    let media = volume(&daemon, "media");
    assert_eq!(
        (media["state"].as_str(), media["attached"].as_bool()),
        (Some("served"), Some(false)),
        "{media}"
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A volume went on without its cache, and the section of the cache permanently names another
/// device since. A regression: it failed permanently as attached to the former set, with no way to
/// override that. So did a volume whose replacement was stopped before it had joined.
#[test]
fn a_volume_that_went_on_without_its_cache_goes_to_the_one_there_is_now() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    site.unplug();
    let daemon = site.start();
    daemon.wait_for("without its cache", |_| volume(&daemon, "media")["state"] == "degraded");
    assert_eq!(daemon.stop().0, 0);
    assert_eq!(state_of(&site.media), "inconsistent");
    let another = site.images.blank("fast", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &another]).exit, 0);
    let daemon = site.start();
    daemon.wait_for("on the other one", |_| volume(&daemon, "media")["attached"] == true);
    site.expect(&daemon, "media", 1);
    // The dirty data is in the former cache, and nowhere else.
    assert!(volume(&daemon, "pond")["state"] != "served", "{}", daemon.status());
    assert_eq!(daemon.stop().0, 0);
}

/// The cache is not about to be opened: it may never appear.
#[test]
fn a_cache_that_is_missing_is_not_said_to_be_opening() {
    let site = WithoutCacheFixture::new();
    let daemon = site.start();
    assert_eq!(daemon.stop().0, 0);
    site.unplug();
    let daemon = site.start();
    daemon.wait_for("without its cache", |_| volume(&daemon, "media")["state"] == "degraded");
    let log = daemon.log();
    let is_why = |line: &str| {
        let is_missing = line.contains("its cache fast (set ") && line.contains(") is missing; connect");
        is_missing || line.contains("it is about to be served without a cache")
    };
    let said: Vec<_> = log.lines().filter(|line| line.contains("event=volume-waits")).collect();
    assert!(!said.is_empty() && said.iter().all(|line| is_why(line)), "{log}");
    assert_eq!(daemon.stop().0, 0);
}

/// A volume that waits for its cache holds its device. A regression: a copy of that device was
/// taken for another volume.
#[test]
fn a_copy_of_a_volume_that_waits_is_not_added() {
    if !requires("nbdcopy") {
        return;
    }
    let site = WithoutCacheFixture::new();
    site.fill();
    site.unplug();
    let daemon = site.start();
    daemon.wait_for("it waits", |_| volume(&daemon, "pond")["state"] == "waiting");
    let copy = site.images.path("copy");
    std::fs::copy(&site.pond, &copy).expect("a copy");
    let words = ["add", "copy", "--backing", copy.to_str().expect("text")];
    refused_also_dry(&daemon, &words, 3, "pond has the same UUID");
    assert_eq!(daemon.stop().0, 0);
}
