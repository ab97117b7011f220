//! Volumes that a cache forgets, and volumes that live in it alone, as processes: losses are listed
//! in a file, refused commands change nothing, and `check` finds nothing wrong afterwards.

use crate::common::{
    Daemon, Images, ask, bcached, content, done, fill, json, pattern, refused, requires, run, tool,
};
use std::path::PathBuf;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

/// A cache and a volume in writeback mode without automatic write-back.
struct ForgetFixture {
    images: Images,
    fast: String,
    tank: String,
}

impl ForgetFixture {
    fn new() -> Self {
        let images = Images::new();
        let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
        let site = Self { images, fast, tank };
        site.configure(&site.tank);
        site
    }

    /// Configures the volume `media` on this device.
    fn configure(&self, backing: &str) {
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {:?}\n[volume.media]\nbacking = {backing:?}\nwait = \"1s\"\n\
             writeback_running = false\n",
            self.fast
        );
        self.images.configure(&text);
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    /// Fills the start of a volume.
    fn write(&self, daemon: &Daemon, volume: &str, seed: u8) -> Vec<u8> {
        let data = pattern(DATA_BYTES, seed);
        fill(&self.images, daemon, volume, &data);
        data
    }

    #[track_caller]
    fn expect(&self, daemon: &Daemon, volume: &str, data: &[u8]) {
        let found = content(&self.images, daemon, volume);
        assert!(found[..data.len()] == *data, "{volume} holds something else");
    }

    fn uuid(&self) -> String {
        let shown = json(&bcached(&["show", "--json", &self.tank]).out);
        shown["uuid"].as_str().or(shown["device"]["uuid"].as_str()).expect("a uuid").to_owned()
    }

    #[track_caller]
    fn check(&self) {
        let ran = bcached(&["check", &self.fast]);
        assert_eq!(ran.exit, 0, "{ran:?}");
    }
}

/// A volume that is served or unknown is refused, whatever loss is accepted, and nothing changes.
#[test]
fn what_is_served_or_unknown_is_not_forgotten() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ForgetFixture::new();
    let uuid = site.uuid();
    let daemon = site.start();
    site.write(&daemon, "media", 1);
    refused(
        &daemon,
        &["forget", &uuid],
        3,
        "cannot forget media: it is served; `bcached detach media` takes it out of fast",
    );
    refused(&daemon, &["forget", "media", "--accept-loss", "9G"], 3, "it is served");
    refused(&daemon, &["forget", "nothing"], 2, "no open cache has a volume `nothing` that is not served");
    refused(&daemon, &["forget", &uuid, "--cache", "slow"], 2, "no cache is called `slow`; there are: fast");
    refused(&daemon, &["forget", &uuid, "--accept-loss", "2MB"], 2, "`2MB` is not a size");
    assert_eq!(daemon.status()["volumes"][0]["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64));
    assert_eq!(daemon.stop().0, 0);
}

/// A site whose disk is gone, with 2 MiB dirty in the cache, while the configuration waits for it.
fn orphaned() -> (ForgetFixture, String) {
    let site = ForgetFixture::new();
    let uuid = site.uuid();
    let daemon = site.start();
    site.write(&daemon, "media", 1);
    assert_eq!(daemon.stop().0, 0);
    site.configure(&format!("UUID={uuid}"));
    (site, uuid)
}

/// The loss is announced. It happens only if the user accepts that amount and its ranges can be
/// listed.
#[test]
fn dirty_data_is_not_lost_unasked() {
    if !requires("nbdcopy") {
        return;
    }
    let (site, uuid) = orphaned();
    let daemon = site.start();
    let list = site.images.path("list.json");
    let path = list.to_str().expect("text");
    let why = "cannot forget media: 2 MiB of its dirty data in fast would be lost; bring its backing device back, or give that up with `--accept-loss 2M`";
    for words in
        [vec!["forget", uuid.as_str()], vec!["forget", "tank", "--dry-run"], vec!["forget", &uuid[..8]]]
    {
        refused(&daemon, &words, 3, why);
    }
    let refusal = json(&ask(&daemon, &["forget", &uuid, "--json"]).err);
    let (kind, option) = (refusal["error"]["kind"].as_str(), refusal["error"]["option"].as_str());
    assert_eq!((kind, option), (Some("data-loss"), Some("--accept-loss")), "{refusal}");
    refused(&daemon, &["forget", &uuid, "--accept-loss", "1M"], 3, "more than the 1 MiB accepted");
    std::fs::write(&list, "precious").expect("a file");
    refused(
        &daemon,
        &["forget", &uuid, "--accept-loss", "2M", "--lost-ranges", path],
        3,
        "already exists: the list of lost data never overwrites a file; name another file",
    );
    assert_eq!(std::fs::read_to_string(&list).expect("a file"), "precious");
    assert_eq!(daemon.status()["caches"][0]["unserved"][0]["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64));
    assert_eq!(daemon.stop().0, 0);
}

/// A dead device is forgotten, and the data lost with it is listed in a file.
#[test]
fn a_dead_device_is_forgotten_and_its_losses_are_listed() {
    if !requires("nbdcopy") {
        return;
    }
    let (site, uuid) = orphaned();
    let daemon = site.start();
    let list = site.images.path("list.json");
    let path = list.to_str().expect("text");
    let words = ["forget", &uuid, "--accept-loss", "2M", "--lost-ranges", path];
    let planned = done(&daemon, &[&words[..], &["--dry-run"]].concat());
    assert!(planned.starts_with("media: would be forgotten: 2 MiB would be lost; "), "{planned}");
    assert!(!list.exists());
    assert_eq!(daemon.status()["caches"][0]["unserved"][0]["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64));

    let forgotten = done(&daemon, &words);
    assert!(
        forgotten.contains(&format!("media: forgotten: 2 MiB is lost; {path} lists the ranges\n")),
        "{forgotten}"
    );
    assert!(forgotten.contains("the configuration still names it, as media"), "{forgotten}");
    let listed = json(&std::fs::read_to_string(&list).expect("a list"));
    assert_eq!(
        (listed["schema"].as_str(), listed["uuid"].as_str()),
        (Some("bcached.lost-ranges"), Some(uuid.as_str()))
    );
    assert_eq!(
        listed["ranges"],
        serde_json::json!([{ "start_bytes": 0, "length_bytes": DATA_BYTES }]),
        "{listed}"
    );
    assert_eq!(
        (listed["label"].as_str(), listed["lost_bytes"].as_u64()),
        (Some("tank"), Some(DATA_BYTES as u64))
    );
    assert_eq!(daemon.status()["caches"][0]["dirty_bytes"].as_u64(), Some(0), "{}", daemon.status());
    assert!(daemon.status()["caches"][0]["unserved"].is_null(), "{}", daemon.status());
    refused(&daemon, &words, 2, "it may have been forgotten already");
    assert_eq!(daemon.stop().0, 0);
    site.check();

    // The disk is back. It lacks data that is known to be lost, so it is not served as if it were
    // complete.
    site.configure(&site.tank);
    let daemon = site.start();
    let volume = daemon.status()["volumes"][0].clone();
    assert_eq!(volume["state"].as_str(), Some("failed"), "{volume}");
    assert!(
        volume["reason"].as_str().is_some_and(|why| why.contains("the set does not know it")),
        "{volume}"
    );
    // A regression: it searched for a cache that is present, and no message named the way out.
    let reason = volume["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("`bcached forget`") && reason.contains("docs/failures.md"), "{reason}");
    let made = bcached(&["make", "-B", &site.tank, "--wipe-bcache", "--dry-run"]);
    assert_eq!((made.exit, made.err.contains("`wipefs --all")), (3, true), "{made:?}");
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// A forget cancelled in time loses nothing; afterwards the cancel is told that it is too late.
#[test]
fn a_forget_can_be_cancelled_before_anything_is_given_up() {
    if !requires("nbdcopy") || !requires("mkfifo") {
        return;
    }
    use std::io::Read as _;
    let (site, uuid) = orphaned();
    let daemon = site.start();
    let list = site.images.path("list.json");
    let words = ["forget", &uuid, "--accept-loss", "2M", "--lost-ranges", list.to_str().expect("text")];
    // The list is written under this name first. Opening this pipe blocks until there is a reader.
    let pipe = site.images.path("list.new");
    assert_eq!(run(tool("mkfifo").arg(&pipe)).exit, 0);
    let job = json(&done(&daemon, &[&words[..], &["--no-wait", "--json"]].concat()));
    let number = job["id"].to_string();
    let listed = done(&daemon, &["list"]);
    assert!(listed.contains("media: forget, 0% discarded, 2 MiB dirty"), "{listed}");
    let cancelled = std::thread::scope(|scope| {
        let cancel = scope.spawn(|| ask(&daemon, &["cancel", &number]));
        daemon.wait_for("it is to be cancelled", |_| daemon.log().contains("event=job-cancel"));
        let mut head = String::new();
        std::fs::File::open(&pipe)
            .and_then(|mut pipe| pipe.read_to_string(&mut head))
            .expect("it is written");
        cancel.join().expect("no panic")
    });
    let is_told = cancelled.out.starts_with("media: forget was cancelled\n");
    assert_eq!((cancelled.exit, is_told), (0, true), "{cancelled:?}");
    assert!(!list.exists() && !pipe.exists(), "there is no list of what was not lost");
    assert_eq!(daemon.status()["caches"][0]["unserved"][0]["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64));
    done(&daemon, &words);
    assert!(list.exists());
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// If no file is named, the list is stored in the daemon's directory for such lists; a clean volume
/// needs none.
#[test]
fn a_clean_volume_is_forgotten_without_a_question() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ForgetFixture::new();
    let daemon = site.start();
    site.write(&daemon, "media", 1);
    done(&daemon, &["remove", "media"]);
    let forgotten = json(&done(&daemon, &["forget", "tank", "--accept-loss", "1G", "--json"]));
    assert_eq!(
        (forgotten["state"].as_str(), forgotten["lost_bytes"].as_u64()),
        (Some("done"), Some(DATA_BYTES as u64))
    );
    let list = PathBuf::from(forgotten["lost_ranges"].as_str().expect("a file"));
    assert_eq!(list.parent(), Some(site.images.path("state").as_path()));
    assert!(list.exists());
    assert_eq!(daemon.stop().0, 0);
    site.check();

    let site = ForgetFixture::new();
    let daemon = site.start();
    done(&daemon, &["remove", "media"]);
    assert_eq!(done(&daemon, &["forget", &site.uuid()]), "media: forgotten: no dirty data is lost\n");
    assert!(!site.images.path("state").exists());
    // Nothing was lost: it is a normal volume.
    assert_eq!(done(&daemon, &["add", "media"]), "media: added\n");
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// The cache is an older copy. After it has forgotten what it holds of the volume, the volume is
/// attached anew, as the refusal has said.
#[test]
fn a_volume_that_an_older_cache_has_forgotten_is_attached_anew() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ForgetFixture::new();
    let older = site.images.path("older");
    let daemon = site.start();
    site.write(&daemon, "media", 1);
    assert_eq!(daemon.stop().0, 0);
    std::fs::copy(&site.fast, &older).unwrap();
    let daemon = site.start();
    let newer = site.write(&daemon, "media", 2);
    done(&daemon, &["flush", "media"]);
    assert_eq!(daemon.stop().0, 0);
    std::fs::copy(&older, &site.fast).unwrap();
    let daemon = site.start();
    let state = |status: &serde_json::Value| status["volumes"][0]["state"].as_str().map(str::to_owned);
    daemon.wait_for("it is refused", |status| state(status).as_deref() == Some("failed"));
    let uuid = site.uuid();
    let told = done(&daemon, &["forget", &uuid, "--accept-loss", "2M"]);
    assert!(
        told.contains("bcached tries to serve media again") && !told.contains("remove that section"),
        "{told}"
    );
    daemon.wait_for("it is served", |status| {
        !matches!(state(status).as_deref(), Some("failed" | "waiting") | None)
    });
    site.expect(&daemon, "media", &newer);
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// A volume in the cache alone: made, kept over a kill and a stop, removed, served again, deleted.
#[test]
fn a_volume_lives_in_the_cache_alone() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ForgetFixture::new();
    let daemon = site.start();
    let size = (8_u64 << 20).to_string();
    assert_eq!(done(&daemon, &["add", "scratch", "--size", "8M", "--dry-run"]), "scratch: would be served\n");
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(1));
    assert_eq!(done(&daemon, &["add", "scratch", "--size", "8M", "--cache", "fast"]), "scratch: added\n");
    assert_eq!(done(&daemon, &["add", "scratch", "--size", &size]), "scratch: it is there already\n");
    let data = site.write(&daemon, "scratch", 3);
    daemon.kill();

    let daemon = site.start();
    site.expect(&daemon, "scratch", &data);
    let listed = done(&daemon, &["list"]);
    let line = listed.lines().find(|line| line.contains("scratch")).unwrap_or_default();
    assert!(line.contains("8 MiB") && line.contains("  flash-only  "), "{listed}");
    let status = done(&daemon, &["status", "scratch"]);
    assert!(
        status
            .contains("volume scratch: served, 8 MiB in blocks of 4 KiB, writeback, 2 MiB dirty, flash-only"),
        "{status}"
    );
    refused(&daemon, &["forget", "scratch", "--accept-loss", "8M"], 3, "it is served");
    refused(&daemon, &["detach", "scratch"], 2, "scratch is a flash-only volume");
    // A regression: options of backing devices were listed although it has none.
    let options = json(&done(&daemon, &["get", "scratch", "--json"]));
    let names: Vec<_> = options["options"].as_array().into_iter().flatten().collect();
    let names: Vec<_> = names.iter().map(|option| option["name"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["label", "on_cache_error", "freeze_timeout"], "{options}");
    refused(&daemon, &["get", "scratch", "writeback_percent"], 2, "scratch has no writeback_percent");
    done(&daemon, &["remove", "scratch"]);
    assert!(site.kept().contains("served = false"), "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(1), "{}", daemon.status());
    let status = done(&daemon, &["status"]);
    assert!(status.contains("flash-only volume scratch ("), "{status}");
    assert!(status.contains(") is not served: 2 MiB of 8 MiB used\n"), "{status}");
    refused(&daemon, &["add", "scratch", "--size", "4M"], 3, "it exists already, with a size of 8 MiB");
    assert_eq!(done(&daemon, &["add", "scratch"]), "scratch: added\n");
    assert!(!site.kept().contains("scratch"), "{}", site.kept());
    site.expect(&daemon, "scratch", &data);
    done(&daemon, &["remove", "scratch"]);
    refused(&daemon, &["forget", "scratch"], 3, "2 MiB of its dirty data in fast would be lost");
    let forgotten = done(&daemon, &["forget", "scratch", "--accept-loss", "2M"]);
    assert!(forgotten.starts_with("scratch: forgotten: 2 MiB is lost; "), "{forgotten}");
    assert!(!site.kept().contains("scratch"), "{}", site.kept());
    assert_eq!(done(&daemon, &["add", "scratch", "--size", "8M"]), "scratch: added\n");
    site.expect(&daemon, "scratch", &[0; DATA_BYTES]);
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// A regression: a daemon that had read at its start that the volume is not served kept saying that
/// the configuration mentions it.
#[test]
fn the_name_of_a_volume_that_was_deleted_is_free() {
    let site = ForgetFixture::new();
    let daemon = site.start();
    done(&daemon, &["add", "scratch", "--size", "8M"]);
    done(&daemon, &["remove", "scratch"]);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    refused(&daemon, &["add", "scratch", "--size", "4M"], 3, "it exists already, with a size of 8 MiB");
    done(&daemon, &["forget", "scratch"]);
    assert_eq!(done(&daemon, &["add", "scratch", "--size", "4M"]), "scratch: added\n");
    // A regression: for one that was stopped, and not removed, a line without a name was left.
    refused(&daemon, &["forget", "scratch"], 3, "it is served; `bcached remove scratch` first");
    done(&daemon, &["stop", "scratch"]);
    done(&daemon, &["forget", "scratch"]);
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(1), "{}", daemon.status());
    assert_eq!(done(&daemon, &["list"]).matches("volume").count(), 1, "{}", done(&daemon, &["list"]));
    assert_eq!(daemon.stop().0, 0);
    site.check();
}

/// A volume that is too large is refused in one sentence, with the size that fits.
#[test]
fn no_more_is_promised_than_can_be_stored() {
    let site = ForgetFixture::new();
    let daemon = site.start();
    let ran = ask(&daemon, &["add", "scratch", "--size", "1G"]);
    assert_eq!(ran.exit, 3, "{ran:?}");
    let largest =
        ran.err.split("`--size ").nth(1).and_then(|rest| rest.split('`').next()).expect("a size").to_owned();
    refused(
        &daemon,
        &["add", "scratch", "--size", "1000"],
        2,
        "its size must be a whole number of blocks of 4 KiB",
    );
    refused(&daemon, &["add", "scratch", "--size", "0"], 2, "its size must be a whole number of blocks");
    refused(&daemon, &["add", "scratch", "--size", "1M", "--cache", "slow"], 2, "no cache is called `slow`");
    refused(&daemon, &["add", "media", "--size", "1M"], 3, "another volume has that name");
    refused(&daemon, &["add", "a/b", "--size", "1M"], 2, "a name must not be empty, contain a slash");
    refused(&daemon, &["add", &"x".repeat(33), "--size", "1M"], 2, "at most 32 bytes");
    refused(&daemon, &["add", "scratch", "--size", "1M", "--backing", &site.tank], 2, "leave --size out");
    assert_eq!(done(&daemon, &["add", "scratch", "--size", &largest]), "scratch: added\n");
    refused(
        &daemon,
        &["add", "second", "--size", &largest],
        3,
        "beside its dirty data and the space promised to other volumes",
    );
    assert_eq!(daemon.stop().0, 0);
    site.check();
}
