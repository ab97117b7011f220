//! Volumes are flushed, detached and attached by commands, as processes: no data is lost, requested
//! changes persist over restarts, and refused commands change nothing.

use crate::common::{
    self, Daemon, Images, ask, bcached, content, done, fill, json, pattern, refused, refused_also_dry,
    requires, tool,
};
use std::path::PathBuf;

const CACHE_BYTES: u64 = 36 << 20;
/// The volume's data begins where the caches end, so that writes to it can fail while theirs
/// succeed.
const DATA_OFFSET: u64 = CACHE_BYTES;
const BACKING_BYTES: u64 = DATA_OFFSET + (20 << 20);
/// Little enough to stay dirty while clients are active.
const DATA_BYTES: usize = 2 << 20;

/// Two caches and a volume in writeback mode, with a configuration.
struct AttachFixture {
    images: Images,
    fast: String,
    spare: String,
    tank: String,
}

impl AttachFixture {
    fn new() -> Self {
        let images = Images::new();
        let [fast, spare] = ["fast", "spare"].map(|name| images.blank(name, CACHE_BYTES));
        let tank = images.blank("tank", BACKING_BYTES);
        for cache in [&fast, &spare] {
            assert_eq!(bcached(&["make", "-b", "64k", "-C", cache]).exit, 0);
        }
        let offset = (DATA_OFFSET / 512).to_string();
        let made = ["make", "--writeback", "--label", "tank", "--data-offset", &offset, "-B", &tank];
        assert_eq!(bcached(&made).exit, 0);
        let site = Self { images, fast, spare, tank };
        let Self { fast, spare, tank, .. } = &site;
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[cache.spare]\ndevice = {spare:?}\n\
             [volume.media]\nbacking = {tank:?}\ncache = \"fast\"\nwriteback_running = false\n"
        );
        site.images.configure(&text);
        site
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    /// Fills the start of the volume, and returns what was written.
    fn write(&self, daemon: &Daemon, seed: u8) -> Vec<u8> {
        let data = pattern(DATA_BYTES, seed);
        fill(&self.images, daemon, "media", &data);
        data
    }

    #[track_caller]
    fn expect(&self, daemon: &Daemon, data: &[u8]) {
        let found = content(&self.images, daemon, "media");
        assert!(found[..data.len()] == *data, "the volume holds something else");
    }

    /// Returns what the backing device itself holds at the start of the volume.
    fn below(&self) -> Vec<u8> {
        let from = usize::try_from(DATA_OFFSET).expect("small");
        std::fs::read(&self.tank).expect("readable")[from..from + DATA_BYTES].to_vec()
    }
}

fn volume(daemon: &Daemon) -> serde_json::Value {
    daemon.status()["volumes"][0].clone()
}

#[test]
fn a_flush_leaves_nothing_dirty_and_the_volume_cached() {
    if !requires("nbdcopy") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon, 1);
    assert_eq!(volume(&daemon)["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64));
    assert!(site.below() != data, "it is in the cache alone");
    assert_eq!(done(&daemon, &["flush", "media", "--dry-run"]), "media: 2 MiB would be written back\n");
    assert_eq!(done(&daemon, &["flush", "media", "--wait"]), "media: its dirty data is written back\n");
    assert!(site.below() == data, "it is on the backing device, too");
    done(&daemon, &["wait", "media", "--for", "clean", "--timeout", "30s"]);
    let after = volume(&daemon);
    assert_eq!((after["dirty_bytes"].as_u64(), after["backing_state"].as_str()), (Some(0), Some("clean")));
    assert_eq!((after["cache"].as_str(), after["attached"].as_bool()), (Some("fast"), Some(true)));
    let again = json(&done(&daemon, &["flush", "--json"]));
    assert_eq!(
        (again["schema"].as_str(), again["already"].as_bool()),
        (Some("bcached.job"), Some(true)),
        "{again}"
    );
    let listed = done(&daemon, &["list"]);
    assert!(listed.lines().any(|line| line.starts_with("volume  media  served  ")), "{listed}");
    assert_eq!(daemon.stop().0, 0);
}

/// A detached volume is served from its backing device alone, and stays detached over a clean stop
/// and a kill, until it is attached.
#[test]
fn a_detached_volume_stays_so_until_it_is_attached() {
    if !requires("nbdcopy") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let first = site.write(&daemon, 1);
    let planned = done(&daemon, &["detach", "media", "--dry-run"]);
    assert_eq!(planned, "media: 2 MiB would be written back, then it would be served without a cache\n");
    assert_eq!(site.kept(), "", "nothing is kept of it");
    assert_eq!(done(&daemon, &["detach", "media"]), "media: detached: it is served without a cache\n");
    assert!(site.below() == first);
    assert!(site.kept().contains("cache = \"none\""), "{}", site.kept());
    assert_eq!(done(&daemon, &["detach", "media"]), "media: it is detached already\n");
    let now = volume(&daemon);
    assert_eq!((now["attached"].as_bool(), &now["cache"]), (Some(false), &serde_json::Value::Null), "{now}");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    site.expect(&daemon, &first);
    let second = site.write(&daemon, 2);
    assert!(site.below() == second, "nothing is in a cache");
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(2), "{}", daemon.status());
    daemon.kill();

    let daemon = site.start();
    site.expect(&daemon, &second);
    assert_eq!(volume(&daemon)["backing_state"].as_str(), Some("no cache"));
    assert_eq!(done(&daemon, &["attach", "media", "--cache", "spare"]), "media: attached\n");
    assert_eq!(done(&daemon, &["attach", "media", "--cache", "spare"]), "media: it is attached already\n");
    refused(
        &daemon,
        &["attach", "media", "--cache", "fast"],
        3,
        "it is attached to spare; `bcached detach media` first",
    );
    let third = site.write(&daemon, 3);
    assert!(site.below() == second, "it is in the cache");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    site.expect(&daemon, &third);
    assert_eq!(volume(&daemon)["cache"].as_str(), Some("spare"));
    done(&daemon, &["detach", "media"]);
    // Attached to its former cache, whose old data of it is not used any more.
    assert_eq!(done(&daemon, &["attach", "media", "--cache", "spare"]), "media: attached\n");
    site.expect(&daemon, &third);
    assert_eq!(daemon.stop().0, 0);
    let check = bcached(&["check", &site.fast, &site.spare, "--backing", &site.tank]);
    assert!(check.exit == 0 || check.exit == 2, "{check:?}");
}

/// A daemon stopped during a detach continues it after the restart. A daemon that cannot write back
/// says so and keeps all data.
#[test]
fn a_detach_goes_on_after_a_stop_and_can_be_cancelled() {
    if !requires("nbdcopy") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon, 1);
    // The backing device fails all writes: the detach does not end by itself.
    let tank = std::fs::OpenOptions::new().write(true).open(&site.tank).expect("ours");
    daemon.fail_writes_beyond(DATA_OFFSET);
    let job = json(&done(&daemon, &["detach", "media", "--no-wait", "--json"]));
    let (id, state) = (job["id"].as_u64().expect("a number"), job["state"].as_str());
    assert_eq!(state, Some("running"), "{job}");
    let joined = ask(&daemon, &["detach", "media", "--timeout", "1s"]);
    assert_eq!(
        (joined.exit, joined.err.contains(&format!("`bcached cancel {id}`"))),
        (6, true),
        "{joined:?}"
    );
    refused(&daemon, &["flush", "media"], 3, "cannot flush media now: its detach is still running (job ");
    let dry = json(&done(&daemon, &["detach", "media", "--dry-run", "--json"]));
    assert_eq!(
        (dry["id"].as_u64(), dry["state"].as_str()),
        (Some(id), Some("running")),
        "nobody waits for it"
    );
    assert!(site.kept().contains("none"));
    let status = ask(&daemon, &["status"]);
    assert!(status.out.contains("media: detach, 0% written back"), "{status:?}");
    let planned = done(&daemon, &["cancel", &id.to_string(), "--dry-run"]);
    assert!(planned.contains(&format!("job {id} would be cancelled")), "{planned}");
    let still = ask(&daemon, &["status"]);
    assert!(still.out.contains("media: detach, 0% written back"), "nothing was given up: {still:?}");
    assert!(!daemon.log().contains("event=job-cancel"), "{}", daemon.log());
    let cancelled = ask(&daemon, &["cancel", &id.to_string()]);
    assert_eq!(
        (cancelled.exit, cancelled.out.as_str()),
        (0, "media: detach was cancelled\n"),
        "{cancelled:?}"
    );
    assert!(!site.kept().contains("none"), "it is taken back: {}", site.kept());
    assert_eq!(volume(&daemon)["attached"].as_bool(), Some(true));
    let told = format!("[event=job-cancel uid={}]", rustix::process::getuid().as_raw());
    assert!(daemon.log().contains(&told), "{}", daemon.log());
    refused(&daemon, &["cancel", "77"], 2, "there is no job 77");
    refused(&daemon, &["cancel", "77", "--dry-run"], 2, "there is no job 77");
    refused(&daemon, &["cancel", "x"], 2, "is not the number of a job");

    let again = ask(&daemon, &["detach", "media", "--no-wait"]);
    assert_eq!(again.exit, 0, "{again:?}");
    assert!(site.kept().contains("none"));
    daemon.kill();
    drop(tank);
    let daemon = site.start();
    done(&daemon, &["wait", "media", "--for", "detached", "--timeout", "30s"]);
    assert!(site.below() == data, "all of it is there");
    site.expect(&daemon, &data);
    assert_eq!(daemon.stop().0, 0);
}

/// Impossible commands are refused in one sentence, and change nothing.
#[test]
fn what_cannot_be_is_refused() {
    let site = AttachFixture::new();
    let daemon = site.start();
    refused(&daemon, &["flush", "nothing"], 2, "nothing is called `nothing`; there are: media");
    refused(&daemon, &["detach", "nothing"], 2, "nothing is called `nothing`");
    refused(
        &daemon,
        &["attach", "media", "--cache", "nothing"],
        2,
        "no cache is called `nothing`; there are: fast, spare",
    );
    refused(&daemon, &["attach", "media"], 2, "there are several caches; name one of: fast, spare");
    refused(&daemon, &["flush", "media", "--timeout", "soon"], 2, "`soon` is not a time");
    refused(
        &daemon,
        &["wait", "media", "--for", "detached", "--timeout", "1s"],
        6,
        "media is not detached yet",
    );
    assert_eq!(site.kept(), "");
    assert_eq!(daemon.stop().0, 0);
    let ran = bcached(&["flush", "--control", daemon_gone(&site).to_str().expect("text")]);
    assert_eq!(ran.exit, 5, "{ran:?}");
}

fn daemon_gone(site: &AttachFixture) -> PathBuf {
    site.images.path("run/control.sock")
}

/// A backing device alone, of which no cache holds data.
#[test]
fn a_device_without_a_cache_is_served_by_the_command_line() {
    if !requires("nbdcopy") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = Daemon::start(&site.images, &["--backing", &site.tank]);
    let info = volume(&daemon);
    assert_eq!((info["attached"].as_bool(), info["name"].as_str()), (Some(false), Some("tank")), "{info}");
    let data: Vec<u8> = vec![7; 1 << 20];
    let path = site.images.path("data");
    std::fs::write(&path, &data).expect("a file");
    let ran = common::run(tool("nbdcopy").arg("--flush").arg(&path).arg(daemon.uri("tank")));
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert!(site.below()[..data.len()] == *data);
    assert_eq!(daemon.stop().0, 0);
}

/// A volume is removed with dirty data, stays removed over a restart, and returns with that data;
/// another is added, and removed.
#[test]
fn volumes_are_added_and_removed_for_good() {
    if !requires("nbdcopy") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon, 1);
    let planned = done(&daemon, &["remove", "media", "--dry-run"]);
    assert_eq!(planned, "media: would no longer be served; 2 MiB of dirty data would stay in its cache\n");
    let removed = done(&daemon, &["remove", "media"]);
    assert!(removed.starts_with("media: removed: it is no longer served"), "{removed}");
    assert!(site.kept().contains("served = false"), "{}", site.kept());
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(0), "{}", daemon.status());
    let left = &daemon.status()["caches"][0]["unserved"][0];
    assert_eq!(left["dirty_bytes"].as_u64(), Some(DATA_BYTES as u64), "{left}");
    assert_eq!(done(&daemon, &["remove", "media"]), "media: it is removed already\n");
    refused(&daemon, &["flush"], 4, "cannot flush all dirty data: tank (");
    let export = common::run(tool("nbdcopy").arg(daemon.uri("media")).arg(site.images.path("found")));
    assert!(export.exit != 0, "it is no export any more: {export:?}");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(0), "{}", daemon.status());
    assert_eq!(done(&daemon, &["add", "media", "--dry-run"]), "media: would be served\n");
    assert_eq!(done(&daemon, &["add", "media"]), "media: added\n");
    site.expect(&daemon, &data);
    assert_eq!(done(&daemon, &["add", "media"]), "media: it is there already\n");
    assert!(!site.kept().contains("served"), "{}", site.kept());

    let pond = site.images.blank("pond", BACKING_BYTES);
    refused(&daemon, &["add", "pond", "--backing", &pond], 2, "it has no bcache superblock");
    assert_eq!(bcached(&["make", "-B", &pond]).exit, 0);
    refused(
        &daemon,
        &["add", "pond"],
        2,
        "the configuration does not name its device; name it with --backing",
    );
    let taken = format!("that is the name of {}; choose another name", site.tank);
    refused(&daemon, &["add", "media", "--backing", &pond], 3, &taken);
    // The device by its path, by another spelling of that, and by a link: the same refusal.
    let link = site.images.path("link");
    std::os::unix::fs::symlink(&site.tank, &link).expect("a link");
    let dotted = site.images.path("away/../tank");
    let [link, dotted] = [&link, &dotted].map(|path| path.to_str().expect("text"));
    for (path, exit, sentence) in [
        (site.tank.as_str(), 3, "it is the device of media; one device is one volume"),
        (dotted, 3, "it is the device of media, by another name; one device is one volume"),
        (link, 3, "it is the device of media, by another name; one device is one volume"),
        (&site.fast, 2, "it is the device of the cache fast"),
    ] {
        refused_also_dry(&daemon, &["add", "pond", "--backing", path], exit, sentence);
    }
    refused(&daemon, &["add", "a/b", "--backing", &pond], 2, "is not a valid name");
    assert_eq!(done(&daemon, &["add", "pond", "--backing", &pond, "--cache", "spare"]), "pond: added\n");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    let names = |daemon: &Daemon| {
        let status = daemon.status();
        let names = status["volumes"].as_array().into_iter().flatten();
        names.filter_map(|volume| Some(volume["name"].as_str()?.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(names(&daemon), ["media", "pond"]);
    done(&daemon, &["remove", "pond"]);
    assert!(site.kept().contains("served = false"), "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert_eq!(names(&daemon), ["media"]);
    site.expect(&daemon, &data);
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: numbers were ranks of names. A volume that was added renumbered others at the next
/// start, and scripts wrote to the control files of another volume.
#[test]
fn a_volume_that_is_added_or_removed_moves_no_number() {
    let site = AttachFixture::new();
    let numbers = |daemon: &Daemon| {
        let status = daemon.status();
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let volumes = status["volumes"].as_array().into_iter().flatten();
        volumes.map(|volume| (text(&volume["name"]), text(&volume["kernel_name"]))).collect::<Vec<_>>()
    };
    let known = |names: &[(&str, &str)]| -> Vec<_> {
        names.iter().map(|(name, number)| ((*name).to_owned(), (*number).to_owned())).collect()
    };
    let daemon = site.start();
    for name in ["pond", "brook"] {
        let device = site.images.blank(name, BACKING_BYTES);
        assert_eq!(bcached(&["make", "-B", &device]).exit, 0);
        done(&daemon, &["add", name, "--backing", &device, "--cache", "spare"]);
    }
    let all = known(&[("media", "bcache0"), ("pond", "bcache1"), ("brook", "bcache2")]);
    assert_eq!(numbers(&daemon), all);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert_eq!(numbers(&daemon), all, "{}", site.kept());
    done(&daemon, &["set", "brook", "cache_mode=writearound"]);
    done(&daemon, &["remove", "media"]);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert_eq!(numbers(&daemon), all[1..], "its section keeps its place: {}", site.kept());
    done(&daemon, &["add", "media"]);
    let back = known(&[("pond", "bcache1"), ("brook", "bcache2"), ("media", "bcache0")]);
    assert_eq!(numbers(&daemon), back);
    assert_eq!(daemon.stop().0, 0);
}

/// The manual way to grow a volume, without stopping the daemon.
#[test]
fn a_grown_device_is_seen_when_its_volume_comes_back() {
    let site = AttachFixture::new();
    let daemon = site.start();
    let before = volume(&daemon)["size_bytes"].as_u64().expect("served");
    done(&daemon, &["remove", "media"]);
    let tank = std::fs::OpenOptions::new().write(true).open(&site.tank).expect("ours");
    tank.set_len(BACKING_BYTES + (4 << 20)).expect("grows");
    done(&daemon, &["add", "media"]);
    assert_eq!(volume(&daemon)["size_bytes"].as_u64(), Some(before + (4 << 20)));
    assert_eq!(daemon.stop().0, 0);
}

/// A connected client keeps a volume from being removed, and is named.
#[test]
fn a_volume_in_use_is_not_removed() {
    if !requires("qemu-io") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let mut client = tool("qemu-io")
        .args(["-f", "raw", &daemon.uri("media")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("starts");
    daemon.wait_for("a client", |status| status["clients"][0]["volume"] == "media");
    refused(&daemon, &["remove", "media"], 3, "it is in use by");
    assert_eq!(site.kept(), "");
    assert_eq!(volume(&daemon)["state"].as_str(), Some("served"));
    client.kill().expect("kills");
    client.wait().expect("waits");
    daemon.wait_for("nobody", |status| status["clients"].as_array().is_some_and(Vec::is_empty));
    done(&daemon, &["remove", "media"]);
    assert_eq!(daemon.stop().0, 0);
}

/// A client stays connected while its volume moves from one cache to another, and back.
#[test]
fn clients_stay_while_a_volume_goes_to_another_cache() {
    use std::io::{BufRead as _, Write as _};
    if !requires("qemu-io") {
        return;
    }
    let site = AttachFixture::new();
    let daemon = site.start();
    let mut client = tool("qemu-io")
        .args(["-f", "raw", "--cache", "writeback", &daemon.uri("media")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("starts");
    let mut asks = client.stdin.take().expect("piped");
    let answers = client.stdout.take().expect("piped");
    let mut answers = std::io::BufReader::new(answers).lines();
    let mut ask = |asks: &mut std::process::ChildStdin, asked: &str, answer: &str| {
        writeln!(asks, "{asked}").expect("it listens");
        let line = answers.find(|line| !line.as_ref().is_ok_and(|line| line.contains("ops/sec")));
        let line = line.expect("it answers").expect("text");
        assert!(
            line.trim_start_matches("qemu-io> ").starts_with(answer),
            "{asked}: {line}\n{}",
            daemon.log()
        );
    };
    ask(&mut asks, "write -P 1 0 1M", "wrote 1048576/1048576");
    done(&daemon, &["detach", "media"]);
    for (turn, cache) in ["spare", "fast", "spare"].iter().enumerate() {
        done(&daemon, &["detach", "media"]);
        assert_eq!(done(&daemon, &["attach", "media", "--cache", cache]), "media: attached\n");
        assert_eq!(volume(&daemon)["cache"].as_str(), Some(*cache));
        ask(&mut asks, &format!("read -P {} 0 1M", turn + 1), "read 1048576/1048576");
        ask(&mut asks, &format!("write -P {} 0 1M", turn + 2), "wrote 1048576/1048576");
    }
    writeln!(asks, "flush").expect("it listens");
    drop(asks);
    assert!(client.wait().expect("ends").success());
    site.expect(&daemon, &[4; 1 << 20]);
    assert_eq!(daemon.stop().0, 0);
}
