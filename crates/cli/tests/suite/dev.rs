//! `export = "dev"`: a block device by whatever means this machine has.

use crate::common::{
    Daemon, Images, LoopDevice, StopOnDrop, ask, bcached, done, json, pid, refused, requires, run, tool,
    wrapped,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 96 << 20;
const DATA: &[u8] = b"it was here before the daemon was stopped";

/// Returns what the volume's device is made with, and its path.
fn device(status: &Value) -> Option<(String, PathBuf)> {
    let export = &status["volumes"][0]["exports"][0];
    assert_eq!(export["way"], "dev", "{status}");
    Some((export["by"].as_str()?.to_owned(), export["place"].as_str()?.into()))
}

/// Returns whether block devices can be made here; if not, the test is skipped.
fn has_a_way(daemon: &Daemon) -> bool {
    let status = daemon.status();
    let is_there = device(&status).is_some();
    if !is_there {
        println!("skipped: {}", status["volumes"][0]["exports"][0]["reason"]);
    }
    is_there
}

fn link_of(images: &Images, status: &Value) -> PathBuf {
    let uuid = status["volumes"][0]["uuid"].as_str().expect("served");
    images.root().join("dev/bcache/by-uuid").join(uuid)
}

fn does(command: &mut Command) -> String {
    let ran = run(command);
    assert_eq!(ran.exit, 0, "{command:?}: {ran:?}");
    ran.out
}

/// A mounted file system, unmounted at the end.
struct MountGuard(PathBuf);

impl MountGuard {
    fn at(device: &Path, place: PathBuf) -> Self {
        std::fs::create_dir_all(&place).expect("a folder");
        does(tool("mount").args(["-t", "ext4"]).arg(device).arg(&place));
        Self(place)
    }
}

impl Drop for MountGuard {
    fn drop(&mut self) {
        let _gone_already = tool("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Repeats the command while another process has the device open: udev, or another daemon's
/// `losetup`, opens it only briefly.
fn done_unused(daemon: &Daemon, words: &[&str]) {
    wait_until("nobody has a look", || {
        let ran = ask(daemon, words);
        let is_looked_at = ran.exit == 3 && ran.err.contains("process ");
        assert!(ran.exit == 0 || is_looked_at, "{words:?}: {ran:?}\n{}", daemon.log());
        !is_looked_at
    });
}

/// A certain device, even if its number belongs to another device by now: concurrent tests take
/// free numbers.
#[derive(Debug)]
struct DeviceIdentity {
    place: PathBuf,
    identity: [Option<String>; 2],
}

impl DeviceIdentity {
    /// Returns the device that has this path now.
    fn now(device: &Path) -> Self {
        let place = Path::new("/sys/block").join(device.file_name().expect("a device"));
        let identity = Self::identity(&place);
        Self { place, identity }
    }

    /// Identifies the device: the kernel counts disks, and loop devices once for each file; for its
    /// NBD client it gives the serving process.
    fn identity(place: &Path) -> [Option<String>; 2] {
        ["diskseq", "pid"].map(|file| std::fs::read_to_string(place.join(file)).ok())
    }

    /// Returns what lies below the device; `None` if it is unused or gone.
    fn lies_over(&self) -> Option<String> {
        let of = ["loop/backing_file", "pid"].map(|file| std::fs::read_to_string(self.place.join(file)).ok());
        let found = of.into_iter().flatten().next();
        let found = found.or_else(|| (!self.has_nodes() && self.place.exists()).then(String::new))?;
        // Compared last, so that what was found above is not that of a later device.
        (Self::identity(&self.place) == self.identity).then_some(found)
    }

    /// Returns true if the device's nodes persist while it is unused.
    fn has_nodes(&self) -> bool {
        let name = self.place.file_name().expect("a device").to_string_lossy();
        name.starts_with("loop") || name.starts_with("nbd")
    }
}

/// A regression in the tests: they failed by chance when the number of a removed loop device
/// belonged to another test's device.
#[test]
fn who_has_the_number_of_a_device_later_is_not_that_device() {
    if !requires("losetup") {
        return;
    }
    let images = Images::new();
    let files = ["before", "after"].map(|name| images.blank(name, 1 << 20));
    let Some(device) = LoopDevice::over(&files[0]) else { return };
    let number = device.0.clone();
    let before = DeviceIdentity::now(Path::new(&number));
    assert!(before.lies_over().is_some_and(|file| file.trim_end().ends_with("before")), "{before:?}");
    drop(device);
    assert_eq!(before.lies_over(), None);
    let taken = run(tool("losetup").args([&number, &files[1]]));
    // If this was too late, another process has the number, which serves as well.
    let _theirs = (taken.exit == 0).then(|| LoopDevice(number));
    assert_eq!(before.lies_over(), None, "{taken:?}");
}

/// A file system on the device survives stops and starts, and a stop leaves nothing behind.
#[test]
fn a_volume_is_a_block_device_by_what_there_is() {
    if !requires("mkfs.ext4") || !requires("mount") {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"dev\"\n");
    let daemon = Daemon::configured(&images);
    if !has_a_way(&daemon) {
        return;
    }
    let status = daemon.status();
    let (by, path) = device(&status).expect("it is there");
    assert!(daemon.log().contains("event=device-way-chosen"), "{}", daemon.log());
    let link = link_of(&images, &status);
    assert_eq!(std::fs::canonicalize(&link).expect("a link"), path, "{by}");
    let shown = done(&daemon, &["status"]);
    let listed = done(&daemon, &["list"]);
    let name = path.to_str().expect("text");
    assert!(shown.contains(name) && listed.contains(name), "{shown}{listed}");

    does(tool("mkfs.ext4").arg("-q").arg(&link));
    let mounted = MountGuard::at(&link, images.path("mnt"));
    std::fs::write(mounted.0.join("file"), DATA).expect("it takes it");
    std::fs::File::open(mounted.0.join("file")).expect("a file").sync_all().expect("it is durable");
    let place = mounted.0.display();
    let uses = |status: &Value| status["clients"][0]["peer"] == format!("the mount {place}");
    daemon.wait_for("it has a user", |status| uses(status) && status["clients"][0]["way"] == "dev");
    refused(&daemon, &["remove", "tank"], 3, &format!("it is in use by the mount {place}"));
    does(tool("umount").arg(&mounted.0));
    does(tool("fsck.ext4").args(["-f", "-n"]).arg(&link));

    let once = DeviceIdentity::now(&path);
    // A client writes and closes; the data is still to be written out of the page cache.
    does(
        tool("dd")
            .args(["if=/dev/zero", "bs=4k", "count=1", "seek=4000", "status=none"])
            .arg(format!("of={name}")),
    );
    done_unused(&daemon, &["remove", "tank"]);
    wait_until("its device goes", || once.lies_over().is_none());
    wait_until("and its link after it", || !link.exists());
    done(&daemon, &["add", "tank"]);
    daemon.wait_for("it comes again", |status| device(status).is_some());
    let (_, path) = device(&daemon.status()).expect("it is there");
    let once = DeviceIdentity::now(&path);
    let (exit, log) = daemon.stop();
    assert_eq!((exit, once.lies_over()), (0, None), "{log}");
    assert!(!link.exists(), "{log}");
    assert!(!log.contains("event=device-cut") && !log.contains("-not-removed"), "{log}");

    let daemon = Daemon::configured(&images);
    let (again, path) = device(&daemon.status()).expect("it is there again");
    assert_eq!(again, by);
    let mounted = MountGuard::at(&path, images.path("mnt"));
    assert_eq!(std::fs::read(mounted.0.join("file")).expect("it is there"), DATA);
    does(tool("umount").arg(&mounted.0));
    let once = DeviceIdentity::now(&path);
    let (exit, log) = daemon.stop();
    assert_eq!((exit, once.lies_over()), (0, None), "{log}");
}

/// What a killed daemon leaves is cleared by the next one, and flushed data is there.
#[test]
fn what_a_killed_daemon_leaves_is_cleared() {
    if !requires("mkfs.ext4") || !requires("mount") {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"dev\"\n");
    let daemon = Daemon::configured(&images);
    if !has_a_way(&daemon) {
        return;
    }
    let (by, path) = device(&daemon.status()).expect("it is there");
    does(tool("mkfs.ext4").arg("-q").arg(&path));
    let mounted = MountGuard::at(&path, images.path("mnt"));
    std::fs::write(mounted.0.join("file"), DATA).expect("it takes it");
    std::fs::File::open(mounted.0.join("file")).expect("a file").sync_all().expect("it is durable");
    let once = DeviceIdentity::now(&path);
    // In flight when the daemon dies.
    std::fs::write(mounted.0.join("other"), vec![7; 4 << 20]).expect("into memory");
    daemon.kill();

    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    let (again, new) = device(&status).expect("it is there again");
    assert_eq!(std::fs::canonicalize(link_of(&images, &status)).expect("a link"), new);
    assert_eq!(again, by);
    let second = DeviceIdentity::now(&new);
    if by == "ublk" {
        // It is the same device throughout.
        assert_eq!(new, path);
    } else {
        assert_ne!(new, path, "the old one is mounted");
        does(tool("umount").arg(&mounted.0));
        wait_until("the dead device goes", || once.lies_over().is_none());
        drop(mounted);
        let mounted = MountGuard::at(&new, images.path("mnt"));
        assert_eq!(std::fs::read(mounted.0.join("file")).expect("it is there"), DATA);
        does(tool("umount").arg(&mounted.0));
    }
    does(tool("fsck.ext4").args(["-f", "-n"]).arg(&new));
    // Killed while the device is unused: after the next daemon nothing is left.
    daemon.kill();
    let daemon = Daemon::configured(&images);
    let (_, last) = device(&daemon.status()).expect("it is there again");
    let last = DeviceIdentity::now(&last);
    let (exit, log) = daemon.stop();
    assert_eq!((exit, last.lies_over(), second.lies_over()), (0, None, None), "{log}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    assert!(!mounts.contains(images.path("run").to_str().expect("text")), "{mounts}");
}

/// A device that ends with the daemon blocks a hand-over while it is in use; unused, it is made
/// anew.
#[test]
fn another_daemon_takes_over_and_has_a_device_too() {
    if !requires("mkfs.ext4") || !requires("mount") {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"dev\"\n");
    let daemon = Daemon::configured(&images);
    if !has_a_way(&daemon) {
        return;
    }
    let _last = StopOnDrop(&images);
    let (by, path) = device(&daemon.status()).expect("it is there");
    does(tool("mkfs.ext4").arg("-q").arg(&path));
    let mounted = MountGuard::at(&path, images.path("mnt"));
    std::fs::write(mounted.0.join("file"), DATA).expect("it takes it");
    if by == "ublk" {
        done(&daemon, &["take-over"]);
    } else {
        refused(
            &daemon,
            &["take-over"],
            3,
            "clients use mounts or devices that end with the daemon: the mount ",
        );
    }
    does(tool("umount").arg(&mounted.0));
    if by != "ublk" {
        // A process opens the device while the new daemon reads its configuration: the old daemon
        // continues as before.
        let has_it = "for n in $(seq 1500); do test -e \"$done\" && exit; sleep 0.02; done";
        let done = images.path("done");
        let late = format!("done={}\nexec 3<{}\n({has_it}) &\nexec 3<&-", done.display(), path.display());
        let program = wrapped(&images, &late);
        wait_until("nobody has a look", || daemon.status()["clients"].as_array().is_some_and(Vec::is_empty));
        refused(
            &daemon,
            &["take-over", "--program", &program],
            3,
            "clients use mounts or devices that end with the daemon: process ",
        );
        assert_eq!(pid(&images).and_then(|pid| u32::try_from(pid).ok()), Some(daemon.id()));
        assert_eq!(device(&daemon.status()), Some((by.clone(), path)));
        std::fs::write(done, "").expect("a file");
    }
    done_unused(&daemon, &["take-over"]);
    let status = daemon.status();
    let (again, path) = device(&status).expect("it is there");
    assert_eq!((&again, std::fs::canonicalize(link_of(&images, &status)).ok().as_ref()), (&by, Some(&path)));
    let mounted = MountGuard::at(&path, images.path("mnt"));
    assert_eq!(std::fs::read(mounted.0.join("file")).expect("it is there"), DATA);
    does(tool("umount").arg(&mounted.0));
    let once = DeviceIdentity::now(&path);
    done(&daemon, &["stop"]);
    assert_eq!(once.lies_over(), None);
}

/// A volume grown while served makes the device larger. A device in use at a stop is cut off, and
/// the log names the process that used it.
#[test]
fn a_device_grows_and_is_cut_off_at_a_stop() {
    if !requires("mkfs.ext4") || !requires("mount") {
        return;
    }
    let images = Images::new();
    let (_, tank) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"dev\"\n");
    let config = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    images.configure(&config.replace("version = 1\n", "version = 1\n[daemon]\nstop_timeout = \"1s\"\n"));
    let daemon = Daemon::configured(&images);
    if !has_a_way(&daemon) {
        return;
    }
    let (by, path) = device(&daemon.status()).expect("it is there");
    let name = path.file_name().expect("a name").to_owned();
    let sectors = || {
        let text = std::fs::read_to_string(Path::new("/sys/block").join(&name).join("size")).expect("a size");
        text.trim().parse::<u64>().expect("a number")
    };
    let before = sectors();
    std::fs::File::options()
        .write(true)
        .open(&tank)
        .expect("opens")
        .set_len(2 * BACKING_BYTES)
        .expect("grows");
    done(&daemon, &["grow", "tank"]);
    assert_eq!(sectors(), before + (BACKING_BYTES >> 9), "`grow` ends when the device has its size");
    does(tool("mkfs.ext4").arg("-q").arg(&path));
    let mounted = MountGuard::at(&path, images.path("mnt"));
    let once = DeviceIdentity::now(&path);
    let (stopped, log) = (ask(&daemon, &["stop"]), daemon.log());
    let (exit, told) = if by == "ublk" { (0, "event=ublk-left") } else { (4, "event=device-cut") };
    assert_eq!(stopped.exit, exit, "{stopped:?}\n{log}");
    assert!(exit == 0 || stopped.err.contains("clients were cut off"), "{stopped:?}");
    assert!(log.contains(told), "{log}");
    let _it_is_dead = tool("umount").arg(&mounted.0).status();
    drop(mounted);
    if by == "ublk" {
        // Only another daemon, which takes it over, can remove it.
        assert_eq!(Daemon::configured(&images).stop().0, 0);
    }
    wait_until("it goes when nobody uses it", || once.lies_over().is_none());
}

/// While the kernel's bcache is loaded, no link of bcached takes the name of a kernel device, and
/// other files of such names are kept.
#[test]
fn a_volume_that_asks_for_a_number_has_a_link_of_it() {
    if !requires("unshare") || !requires("nsenter") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: mounts are root's");
    }
    let images = Images::new();
    let number = 4096;
    let link = images.root().join(format!("dev/bcache{number}"));
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, &format!("export = \"dev\"\nnumber = {number}\n"));
    let config = images.path("config.toml").display().to_string();
    let command = Daemon::command(&images, "run", &["--config", &config]);
    let mut apart = tool("unshare");
    apart.arg("--mount").arg(command.get_program()).args(command.get_args());
    apart.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let daemon = Daemon::start_command(&images, apart);
    if !has_a_way(&daemon) {
        return;
    }
    let leads_to = || std::fs::canonicalize(&link).ok();
    let told = |key: &str| daemon.status()["volumes"][0]["exports"][0][key].as_str().map(str::to_owned);
    let name = link.display().to_string();
    let (_, path) = device(&daemon.status()).expect("it is there");
    assert_eq!((leads_to().as_ref(), told("link").as_ref()), (Some(&path), Some(&name)), "{}", daemon.log());
    let called = done(&daemon, &["status", &format!("bcache{number}")]);
    assert!(called.contains(&format!(", {name}")) && called.contains("tank"), "{called}");

    let within = |script: &str| {
        let daemon = daemon.id().to_string();
        does(tool("nsenter").args(["--target", &daemon, "--mount", "sh", "-ec", script]))
    };
    within("mount -t tmpfs modules /sys/module; mkdir /sys/module/bcache");
    wait_until("its name is the kernel's", || std::fs::symlink_metadata(&link).is_err());
    let why = told("no_link").expect("it says so");
    assert!(why.starts_with(&format!("not {name}: the kernel's bcache is loaded")), "{why}");
    assert_eq!(
        (told("link"), std::fs::canonicalize(link_of(&images, &daemon.status())).ok()),
        (None, Some(path))
    );
    let log = daemon.log();
    assert_eq!(log.matches("event=number-not-linked").count(), 1, "{log}");
    within("umount /sys/module");
    wait_until("it is there again", || leads_to().is_some());

    done_unused(&daemon, &["remove", "tank"]);
    wait_until("it goes with the device", || std::fs::symlink_metadata(&link).is_err());
    std::fs::write(&link, "somebody's").expect("a file");
    done(&daemon, &["add", "tank"]);
    daemon.wait_for("it comes again", |status| device(status).is_some());
    let why = told("no_link").expect("it says so");
    assert!(
        why.contains("a file that bcached did not make has this name, and is left as it is; remove it"),
        "{why}"
    );
    assert_eq!(std::fs::read_to_string(&link).expect("it is there"), "somebody's");
    std::fs::remove_file(&link).expect("ours");
    wait_until("it is there again", || leads_to().is_some());
    let (exit, log) = daemon.stop();
    assert_eq!((exit, std::fs::symlink_metadata(&link).is_err()), (0, true), "{log}");
}

/// If no block device can be made, the volume says why, and others are served.
#[test]
fn where_there_is_no_way_the_volume_says_why_and_others_are_served() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let other = images.blank("other", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &other]).exit, 0);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {tank:?}\nexport = \"dev\"\n\
         [volume.other]\nbacking = {other:?}\n"
    ));
    let config = images.path("config.toml").display().to_string();
    let command = Daemon::command(&images, "run", &["--config", &config]);
    let command = if rustix::process::geteuid().is_root() {
        if !requires("unshare") {
            return;
        }
        // A mount namespace with next to nothing in /dev.
        let hide = "mount -t tmpfs dev /dev && mknod /dev/null c 1 3 && exec \"$@\"";
        let mut hidden = tool("unshare");
        hidden.args(["--mount", "sh", "-c", hide, "sh"]).arg(command.get_program()).args(command.get_args());
        hidden.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        hidden
    } else {
        command
    };
    let daemon = Daemon::start_command(&images, command);
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes");
    let of = |name: &str| volumes.iter().find(|volume| volume["name"] == name).expect("it is configured");
    assert_eq!(of("other")["state"], "served", "{status}");
    let export = &of("tank")["exports"][0];
    let reason = export["reason"].as_str().expect("a reason");
    for part in ["this machine cannot provide a block device: ublk: ", "; kernel nbd: ", "; FUSE + loop: "] {
        assert!(reason.contains(part), "{reason}");
    }
    assert_eq!((of("tank")["state"].as_str(), export["place"].as_str()), (Some("degraded"), None));
    let listed = done(&daemon, &["list"]);
    assert!(listed.contains("dev (unavailable)"), "{listed}");
    let shown = json(&bcached(&["list", "--json", "--control", daemon.control()]).out);
    assert!(shown.to_string().contains("this machine cannot provide a block device"), "{shown}");
    let once = daemon.log().matches("this machine cannot provide a block device").count();
    assert_eq!(once, 1, "once: {}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}
