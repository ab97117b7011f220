//! Volumes that grow and shrink, as processes: they lose no data, a requested size persists over
//! restarts, and refused commands change nothing.

use crate::common::{
    self, Daemon, Images, bcached, content, done, fill, json, pattern, refused, requires, tool,
};
use std::fs::File;
use std::io::Write as _;
use std::process::Stdio;

const MIB: u64 = 1 << 20;
/// Where a volume's data begins.
const OFFSET: u64 = 8192;

/// A cache and a volume of 20 MiB in writeback mode, without automatic write-back.
struct ResizeFixture {
    images: Images,
    fast: String,
    tank: String,
}

impl ResizeFixture {
    fn new() -> Self {
        let images = Images::new();
        let (fast, tank) = images.pair(100 * MIB, OFFSET + 20 * MIB);
        let site = Self { images, fast, tank };
        site.configure("");
        site
    }

    /// Configures the site, with `more` in the section of the volume `media`.
    fn configure(&self, more: &str) {
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {:?}\n[volume.media]\nbacking = {:?}\nwriteback_running = false\nsequential_cutoff = 0\n{more}",
            self.fast, self.tank
        );
        self.images.configure(&text);
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    fn resize_device(&self, volume_bytes: u64) {
        let device = File::options().write(true).open(&self.tank).expect("ours");
        device.set_len(OFFSET + volume_bytes).expect("resized");
    }

    /// Fills the volume from its start with bytes that depend on their position.
    fn write(&self, daemon: &Daemon, bytes: u64, seed: u8) -> Vec<u8> {
        let data = pattern(usize::try_from(bytes).expect("small"), seed);
        fill(&self.images, daemon, "media", &data);
        data
    }

    /// Writes a little near the end, which no rule makes bypass the cache, however slow the machine
    /// is. Updates `data`, the content of the whole volume.
    fn write_behind(&self, daemon: &Daemon, data: &mut [u8]) {
        let ran = common::run(tool("qemu-io").args([
            "-f",
            "raw",
            "-c",
            "write -P 7 18M 64k",
            "-c",
            "flush",
            &daemon.uri("media"),
        ]));
        assert_eq!(ran.exit, 0, "{ran:?}\n{}", daemon.log());
        let start = usize::try_from(18 * MIB).expect("small");
        data[start..start + (64 << 10)].fill(7);
    }

    /// Returns all of the volume, as a client reads it.
    fn read(&self, daemon: &Daemon) -> Vec<u8> {
        content(&self.images, daemon, "media")
    }
}

fn volume(daemon: &Daemon) -> serde_json::Value {
    daemon.status()["volumes"][0].clone()
}

fn size(daemon: &Daemon) -> u64 {
    volume(daemon)["size_bytes"].as_u64().unwrap_or_default()
}

#[test]
fn a_device_that_has_grown_is_taken_up_while_it_is_served() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    let before = site.write(&daemon, 20 * MIB, 1);
    assert_eq!(done(&daemon, &["grow", "media"]), "media: its size is 20 MiB already\n");
    // Its end is not on a block boundary.
    site.resize_device(24 * MIB + 1024);
    assert_eq!(
        done(&daemon, &["grow", "media", "--dry-run"]),
        "media: its size would become 24 MiB (25166848 bytes)\n"
    );
    assert_eq!(size(&daemon), 20 * MIB);
    assert_eq!(done(&daemon, &["grow", "media"]), "media: its size is 24 MiB (25166848 bytes)\n");
    assert_eq!(size(&daemon), 24 * MIB + 1024);
    let found = site.read(&daemon);
    assert!(found[..before.len()] == before[..] && found[before.len()..].iter().all(|byte| *byte == 0));
    let after = site.write(&daemon, 24 * MIB + 1024, 2);
    site.resize_device(28 * MIB);
    let job = json(&done(&daemon, &["grow", "media", "--json"]));
    assert_eq!(
        (job["schema"].as_str(), job["size_bytes"].as_u64()),
        (Some("bcached.job"), Some(28 * MIB)),
        "{job}"
    );
    assert!(site.read(&daemon)[..after.len()] == after[..], "the odd end is a part of a block now");
    assert_eq!(daemon.stop().0, 0);
    let check = bcached(&["check", &site.fast, "--backing", &site.tank]);
    assert_eq!(check.exit, 0, "{check:?}");
    let daemon = site.start();
    assert_eq!(size(&daemon), 28 * MIB);
    assert!(site.read(&daemon)[..after.len()] == after[..]);
}

/// The requested size persists: over the truncation of the device, which may happen while the
/// volume is served, and over restarts before it.
#[test]
fn a_volume_that_has_shrunk_stays_so_until_it_grows() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    let mut data = site.write(&daemon, 20 * MIB, 1);
    site.write_behind(&daemon, &mut data);
    let dry = ["shrink", "media", "--size", "12M", "--dry-run"];
    let planned = done(&daemon, &dry);
    assert!(
        planned.ends_with(" beyond 12 MiB would be written back, then its size would become 12 MiB\n"),
        "{planned}"
    );
    // Under load some of it may have bypassed the cache.
    let behind = json(&done(&daemon, &[&dry[..], &["--json"]].concat()))["dirty_bytes_at_start"].as_u64();
    let dirty = volume(&daemon)["dirty_bytes"].as_u64();
    let (behind, dirty) = (behind.expect("a number"), dirty.expect("a number"));
    assert!(0 < behind && behind <= 8 * MIB && behind < dirty, "{behind} of {dirty}");
    assert_eq!((site.kept().as_str(), size(&daemon)), ("", 20 * MIB));
    assert_eq!(done(&daemon, &["shrink", "media", "--size", "12M"]), "media: its size is 12 MiB\n");
    assert_eq!(done(&daemon, &["shrink", "media", "--size", "12M"]), "media: its size is 12 MiB already\n");
    assert!(site.kept().contains("size = \"12M\""), "{}", site.kept());
    assert_eq!(
        volume(&daemon)["dirty_bytes"].as_u64(),
        Some(12 * MIB),
        "what lies before the end stays dirty"
    );
    let below = common::bytes(&site.tank);
    let behind = usize::try_from(12 * MIB).expect("small");
    assert!(below[8192 + behind..] == data[behind..], "what lay behind it is on the device");
    assert_eq!(site.read(&daemon), data[..behind]);
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    assert_eq!((size(&daemon), site.read(&daemon).len()), (12 * MIB, behind), "the device is still longer");
    site.resize_device(12 * MIB);
    assert_eq!(done(&daemon, &["flush", "media"]), "media: its dirty data is written back\n");
    assert_eq!(volume(&daemon)["state"].as_str(), Some("served"), "{}", volume(&daemon));
    site.resize_device(20 * MIB);
    assert_eq!(done(&daemon, &["grow", "media"]), "media: its size is 20 MiB\n");
    assert!(!site.kept().contains("size"), "{}", site.kept());
    let found = site.read(&daemon);
    assert!(
        found[..behind] == data[..behind] && found[behind..].iter().all(|byte| *byte == 0),
        "what was cut is gone"
    );
    assert_eq!(daemon.stop().0, 0);
    let check = bcached(&["check", &site.fast, "--backing", &site.tank]);
    assert_eq!(check.exit, 0, "{check:?}");
}

/// While its device fails writes, a shrink does not end. It continues after a kill and a start;
/// cancelled, it leaves everything as it was.
#[test]
fn a_shrink_goes_on_after_a_kill_and_can_be_cancelled() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    let mut data = site.write(&daemon, 20 * MIB, 1);
    site.write_behind(&daemon, &mut data);
    daemon.fail_writes_beyond(OFFSET);
    let job = json(&done(&daemon, &["shrink", "media", "--size", "12M", "--no-wait", "--json"]));
    let id = job["id"].as_u64().expect("a number").to_string();
    refused(&daemon, &["detach", "media"], 3, "its shrink is still running (job ");
    assert_eq!(done(&daemon, &["cancel", &id]), "media: shrink was cancelled\n");
    assert_eq!((site.kept().contains("size"), size(&daemon)), (false, 20 * MIB));
    assert!(site.read(&daemon) == data, "nothing is lost");
    done(&daemon, &["shrink", "media", "--size", "12M", "--no-wait"]);
    assert!(site.kept().contains("size = \"12M\""), "{}\n{}", site.kept(), daemon.log());
    daemon.kill();

    let daemon = site.start();
    assert!(site.read(&daemon) == data[..usize::try_from(12 * MIB).expect("small")]);
    daemon.wait_for("it goes on with it", |status| {
        let volume = &status["volumes"][0];
        volume["size_bytes"].as_u64() == Some(12 * MIB) && status["jobs"].as_array().is_none_or(Vec::is_empty)
    });
    assert_eq!(daemon.stop().0, 0);
    let below = common::bytes(&site.tank);
    let behind = usize::try_from(12 * MIB).expect("small");
    assert!(below[8192 + behind..] == data[behind..], "what lay behind it is on the device");
}

#[test]
fn what_cannot_be_resized_is_refused_in_a_sentence() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon, 20 * MIB, 1);
    let shrink = |size: &'static str| ["shrink", "media", "--size", size];
    refused(
        &daemon,
        &shrink("30M"),
        2,
        "its size is only 20 MiB; `bcached grow media` gives it the size of a device that has grown",
    );
    refused(
        &daemon,
        &shrink("10000001"),
        2,
        "a whole number of blocks of 4 KiB, at least one; `--size 9764k` is possible",
    );
    refused(
        &daemon,
        &shrink("0"),
        2,
        "a whole number of blocks of 4 KiB, at least one; `--size 4k` is possible",
    );
    refused(&daemon, &shrink("1MB"), 2, "`1MB` is not a size");
    refused(&daemon, &["shrink", "nothing", "--size", "1M"], 2, "nothing is called `nothing`");
    refused(&daemon, &["grow", "nothing"], 2, "nothing is called `nothing`");
    refused(&daemon, &["grow", "media", "--size", "1G"], 2, "it becomes as large as its backing device");
    site.resize_device(10 * MIB);
    refused(
        &daemon,
        &["grow", "media"],
        4,
        "has room for 10 MiB only, and the volume is 20 MiB large; restore the device's former size",
    );
    site.resize_device(20 * MIB);
    assert!(size(&daemon) == 20 * MIB && !site.kept().contains("size"));
    drop(data);
    assert_eq!(daemon.stop().0, 0);
}

/// A connected client keeps the size that it was told, so the volume does not shrink. After the
/// device has grown, the client gets the new size when it reconnects.
#[test]
fn a_volume_in_use_grows_and_does_not_shrink() {
    if !requires("qemu-io") || !requires("nbdinfo") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    let mut client = tool("qemu-io")
        .args(["-f", "raw", &daemon.uri("media")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    daemon.wait_for("a client", |status| status["clients"][0]["volume"] == "media");
    refused(&daemon, &["shrink", "media", "--size", "12M"], 3, "cannot shrink media now: it is in use by");
    site.resize_device(24 * MIB);
    let told =
        "media: its size is 24 MiB\nmedia: clients that are connected see the new size when they reconnect\n";
    assert_eq!(done(&daemon, &["grow", "media"]), told);
    client.stdin.take().expect("piped").write_all(b"write 0 4096\nq\n").expect("it listens");
    let ended = client.wait_with_output().expect("ends");
    assert!(String::from_utf8_lossy(&ended.stdout).contains("wrote 4096/4096"), "{ended:?}");
    let sized = common::run(tool("nbdinfo").args(["--size", &daemon.uri("media")]));
    assert_eq!(sized.out.trim(), (24 * MIB).to_string(), "{sized:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// `size` in a user's own file limits a volume, and `grow` does not exceed it.
#[test]
fn a_size_in_the_configuration_is_a_limit() {
    let site = ResizeFixture::new();
    site.configure("size = \"8M\"\n");
    let daemon = site.start();
    assert_eq!(size(&daemon), 8 * MIB);
    let told = "media: its size is 8 MiB already\nmedia: the configuration limits it (`size = \"8M\"`); the device has room for 20 MiB\n";
    assert_eq!(done(&daemon, &["grow", "media"]), told);
    assert_eq!(daemon.stop().0, 0);
    // A regression: it was stored as if by `set`, and later changes in the user's file had no
    // effect.
    assert!(!site.images.path("config.d/99-set.toml").exists(), "{}", site.kept());
    // A regression: a size that is not a multiple of the block size was no limit at all.
    site.configure("size = \"12289k\"\n");
    let daemon = site.start();
    assert_eq!(size(&daemon), 12 * MIB);
    assert!(!daemon.log().contains("event=job-failed"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}

/// The words that ask for another size of the flash-only volume.
fn sized<'a>(verb: &'a str, size: &'a str) -> [&'a str; 4] {
    [verb, "scratch", "--size", size]
}

/// Tries names and sizes of a flash-only volume of 4 MiB that are refused.
fn cannot_be_added_or_grown(daemon: &Daemon) {
    for name in ["a\u{202e}b", " ", "a\n"] {
        refused(
            daemon,
            &["add", name, "--size", "4M"],
            2,
            "an invisible character, or begin or end with a blank",
        );
    }
    refused(daemon, &["grow", "scratch"], 2, "its new size is not given; the largest that fits is `--size ");
    refused(
        daemon,
        &sized("grow", "1M"),
        2,
        "its size is already 4 MiB; `bcached shrink scratch --size 1M` makes",
    );
    refused(daemon, &sized("grow", "10000001"), 2, "a whole number of blocks of 4 KiB, at least one");
    refused(
        daemon,
        &sized("grow", "1G"),
        3,
        "beside its dirty data and the space promised to other volumes; the largest",
    );
}

/// Its size is stored in the cache: no device determines it, and data past the new end exists
/// nowhere else.
#[test]
fn a_volume_in_the_cache_alone_gets_another_size() {
    if !requires("nbdcopy") || !requires("nbdinfo") {
        return;
    }
    let site = ResizeFixture::new();
    let daemon = site.start();
    done(&daemon, &["add", "scratch", "--size", "4M"]);
    cannot_be_added_or_grown(&daemon);
    let dry = done(&daemon, &[&sized("grow", "6M")[..], &["--dry-run"]].concat());
    assert_eq!(dry, "scratch: its size would become 6 MiB\n");
    assert_eq!(done(&daemon, &sized("grow", "6M")), "scratch: its size is 6 MiB\n");
    assert_eq!(done(&daemon, &sized("grow", "6M")), "scratch: its size is 6 MiB already\n");
    let data = pattern(usize::try_from(6 * MIB).expect("small"), 1);
    fill(&site.images, &daemon, "scratch", &data);
    daemon.kill();

    let daemon = site.start();
    assert!(content(&site.images, &daemon, "scratch") == data, "larger, after a crash too");
    refused(
        &daemon,
        &sized("shrink", "8M"),
        2,
        "its size is only 6 MiB; `bcached grow scratch --size 8M` makes",
    );
    refused(&daemon, &sized("shrink", "0"), 2, "a whole number of blocks of 4 KiB, at least one");
    let next = "discard what is not needed there, or give it up with `--accept-loss 2M`";
    let loss = format!("2 MiB of data beyond 4 MiB, which exists nowhere else, would be lost; {next}");
    refused(&daemon, &sized("shrink", "4M"), 3, &loss);
    let loss = format!(
        "2 MiB of data beyond 4 MiB, which exists nowhere else, would be lost, more than the 1 MiB accepted; {next}"
    );
    refused(&daemon, &[&sized("shrink", "4M")[..], &["--accept-loss", "1M"]].concat(), 3, &loss);
    assert!(content(&site.images, &daemon, "scratch") == data, "nothing is lost");
    let list = site.images.path("list.json").display().to_string();
    let smaller = [&sized("shrink", "4M")[..], &["--accept-loss", "2M", "--lost-ranges", &list]].concat();
    let would =
        format!("scratch: its size would become 4 MiB: 2 MiB would be lost; {list} lists the ranges\n");
    assert_eq!(done(&daemon, &[&smaller[..], &["--dry-run"]].concat()), would);
    let smaller = json(&done(&daemon, &[&smaller[..], &["--json"]].concat()));
    assert_eq!(
        (smaller["lost_bytes"].as_u64(), smaller["lost_ranges"].as_str()),
        (Some(2 * MIB), Some(&*list))
    );
    let lost = json(&std::fs::read_to_string(&list).expect("it was written"));
    let range = (lost["ranges"][0]["start_bytes"].as_u64(), lost["ranges"][0]["length_bytes"].as_u64());
    assert_eq!((range, &lost["ranges"][1]), ((Some(4 * MIB), Some(2 * MIB)), &serde_json::Value::Null));
    assert_eq!(
        done(&daemon, &sized("shrink", "4M")),
        "scratch: its size is 4 MiB\n",
        "it asks for nothing more"
    );
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    let four = usize::try_from(4 * MIB).expect("small");
    assert!(content(&site.images, &daemon, "scratch") == data[..four], "what it keeps is there");
    done(&daemon, &sized("grow", "6M"));
    let grown = content(&site.images, &daemon, "scratch");
    assert!(grown.len() > four && grown[four..].iter().all(|byte| *byte == 0), "it does not come back");
    assert_eq!(daemon.stop().0, 0);
    let checked = bcached(&["check", &site.fast, "--backing", &site.tank]).out;
    assert!(checked.contains(" 2 volumes, 0 B dirty, 4 MiB of flash-only volumes\n"), "{checked}");
}

/// A shrink cancelled before the first data is given up loses nothing. Until then new clients are
/// told the smaller size, and a request for a third size is refused.
#[test]
fn a_shrink_that_loses_data_can_be_cancelled() {
    if !requires("nbdcopy") || !requires("nbdinfo") || !requires("mkfifo") {
        return;
    }
    use std::io::Read as _;
    let site = ResizeFixture::new();
    let daemon = site.start();
    done(&daemon, &["add", "scratch", "--size", "6M"]);
    let data = pattern(usize::try_from(6 * MIB).expect("small"), 1);
    fill(&site.images, &daemon, "scratch", &data);
    let list = site.images.path("list.json");
    let name = list.to_str().expect("text");
    let words = ["shrink", "scratch", "--size", "4M", "--accept-loss", "2M", "--lost-ranges", name];
    // The list is written under this name first. Opening this pipe blocks until there is a reader.
    let pipe = site.images.path("list.new");
    assert_eq!(common::run(tool("mkfifo").arg(&pipe)).exit, 0);
    let job = json(&done(&daemon, &[&words[..], &["--no-wait", "--json"]].concat()));
    let number = job["id"].to_string();
    refused(&daemon, &["shrink", "scratch", "--size", "2M"], 3, "its shrink to 4 MiB is still running (job ");
    refused(&daemon, &["grow", "scratch", "--size", "8M"], 3, "is still running (job ");
    let size = |daemon: &Daemon| common::run(tool("nbdinfo").args(["--size", &daemon.uri("scratch")])).out;
    assert_eq!(size(&daemon), format!("{}\n", 4 * MIB));
    let cancelled = std::thread::scope(|scope| {
        let cancel = scope.spawn(|| common::ask(&daemon, &["cancel", &number]));
        daemon.wait_for("it is to be cancelled", |_| daemon.log().contains("event=job-cancel"));
        let mut head = String::new();
        File::open(&pipe).and_then(|mut pipe| pipe.read_to_string(&mut head)).expect("it is written");
        cancel.join().expect("no panic")
    });
    assert!(cancelled.out.starts_with("scratch: shrink was cancelled\n"), "{cancelled:?}");
    daemon.wait_for("it is as large as before", |status| {
        let volumes = status["volumes"].as_array().into_iter().flatten();
        let mut scratch = volumes.filter(|volume| volume["name"] == "scratch");
        scratch.any(|volume| volume["size_bytes"].as_u64() == Some(6 * MIB))
    });
    assert!(!list.exists() && !pipe.exists(), "there is no list of what was not lost");
    assert!(content(&site.images, &daemon, "scratch") == data, "nothing is lost");
    assert_eq!(size(&daemon), format!("{}\n", 6 * MIB));
    refused(
        &daemon,
        &["shrink", "media", "--size", "4M", "--accept-loss", "1M"],
        2,
        "none of it is lost; leave --accept-loss out",
    );
    let done = done(&daemon, &words);
    assert_eq!(done, format!("scratch: its size is 4 MiB: 2 MiB is lost; {name} lists the ranges\n"));
    assert_eq!(daemon.stop().0, 0);
}
