//! `bcached import`, as processes: a set moves from the kernel to a running daemon with its dirty
//! data, or nothing is done and what blocks it is named. The kernel is simulated by a directory
//! like sysfs, and by a thread that does what is written there.

use crate::common::{self, Daemon, Images, bcached, content, done, fill, json, pattern, refused, requires};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

/// A set with dirty data in the kernel, and a daemon with an empty configuration.
struct ImportFixture {
    images: Images,
    fast: String,
    tank: String,
    set: String,
}

impl ImportFixture {
    fn new() -> Self {
        let images = Images::new();
        let fast = images.blank("fast", CACHE_BYTES);
        let tank = images.blank("tank", BACKING_BYTES);
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
        assert_eq!(bcached(&["make", "--writeback", "--label", "tank", "-B", &tank, "--for", &fast]).exit, 0);
        let set = json(&bcached(&["show", "--json", &fast]).out)["set_uuid"].as_str().map(str::to_owned);
        let site = Self { images, fast, tank, set: set.expect("a set") };
        site.images.configure("version = 1\n");
        site.kernel_has_it();
        site
    }

    fn sys(&self, path: &str) -> PathBuf {
        self.images.path("sys").join(path)
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.sys(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, text).expect("made");
    }

    fn link(&self, path: &str, to: &str) {
        std::os::unix::fs::symlink(to, self.sys(path)).expect("made");
    }

    /// Creates the files in which the kernel shows a set of one backing device.
    fn kernel_has_it(&self) {
        let set = format!("fs/bcache/{}", self.set);
        self.put(&format!("{set}/stop"), "");
        self.put("block/fast/uevent", &format!("DEVNAME={}\n", self.fast));
        self.put("block/tank/uevent", &format!("DEVNAME={}\n", self.tank));
        self.put("block/fast/bcache/written", "0.0k\n");
        self.put("block/tank/bcache/stop", "");
        self.put("block/bcache0/dev", "4095:77\n");
        std::fs::create_dir_all(self.sys("block/bcache0/holders")).expect("made");
        self.link(&format!("{set}/cache0"), "../../../block/fast/bcache");
        self.link(&format!("{set}/bdev0"), "../../../block/tank/bcache");
        self.link("block/tank/bcache/dev", "../../bcache0");
    }

    /// Starts a kernel that releases the set when told to.
    fn obedient_kernel(&self) -> SimulatedKernel {
        let set = self.sys(&format!("fs/bcache/{}", self.set));
        let folders = [self.sys("block/tank/bcache"), self.sys("block/bcache0"), set.clone()];
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            while !over.load(Ordering::SeqCst) {
                if std::fs::read_to_string(set.join("stop")).is_ok_and(|told| told == "1") {
                    folders.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
                    return true;
                }
                thread::sleep(Duration::from_millis(10));
            }
            false
        });
        SimulatedKernel { is_over, thread }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    fn import(&self, daemon: &Daemon, words: &[&str]) -> common::CommandResult {
        let mut command = common::program();
        command.arg("import").args(words).args(["--control", daemon.control()]);
        common::run(command.env("BCACHED_SYSFS", self.images.path("sys")))
    }

    /// Neither the kernel nor the daemon has done anything.
    #[track_caller]
    fn is_untouched(&self, daemon: &Daemon) {
        let told = std::fs::read_to_string(self.sys(&format!("fs/bcache/{}/stop", self.set))).expect("there");
        let caches = daemon.status()["caches"].as_array().map(Vec::len);
        assert_eq!((told.as_str(), caches, self.kept().as_str()), ("", Some(0), ""));
    }
}

struct SimulatedKernel {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<bool>,
}

impl SimulatedKernel {
    /// Returns whether it was told to stop.
    fn was_told(self) -> bool {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().expect("no panic")
    }
}

#[test]
fn a_set_of_the_kernel_is_taken_with_its_dirty_data() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ImportFixture::new();
    // What the kernel would have written.
    let before = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    done(&before, &["set", "tank", "writeback_running=0", "--runtime"]);
    fill(&site.images, &before, "tank", &pattern(DATA_BYTES, 3));
    assert_eq!(before.stop().0, 0);

    let daemon = site.start();
    let dry = site.import(&daemon, &[&site.set, "--dry-run"]);
    assert!(
        dry.exit == 0 && dry.out.contains("would be served") && dry.out.contains("is the volume tank"),
        "{dry:?}"
    );
    site.is_untouched(&daemon);
    let kernel = site.obedient_kernel();
    let ran = site.import(&daemon, &["bcache0"]);
    assert!(ran.exit == 0 && kernel.was_told(), "{ran:?}\n{}", daemon.log());
    let volume = daemon.status()["volumes"][0].clone();
    assert_eq!(
        (volume["name"].as_str(), volume["state"].as_str()),
        (Some("tank"), Some("served")),
        "{volume}"
    );
    assert!(volume["dirty_bytes"].as_u64() > Some(0), "{volume}");
    // Repeated, it does nothing; and the set stays imported.
    assert!(site.import(&daemon, &[&site.set]).out.contains("it is served already"));
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert!(
        content(&site.images, &daemon, "tank")[..DATA_BYTES] == pattern(DATA_BYTES, 3),
        "the dirty data is there"
    );
    // A set that was released here is imported by its name.
    let cache = daemon.status()["caches"][0]["name"].as_str().expect("a name").to_owned();
    done(&daemon, &["release", &cache]);
    assert_eq!(daemon.status()["volumes"].as_array().map(Vec::len), Some(0));
    done(&daemon, &["import", &cache]);
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "30s"]);
    assert!(!site.kept().contains("served"), "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn a_set_that_is_in_use_is_left_to_the_kernel() {
    let site = ImportFixture::new();
    let daemon = site.start();
    let refuse = |sentence: &str| {
        let ran = site.import(&daemon, &[&site.set, "--json"]);
        let error = json(&ran.err)["error"].clone();
        let holders = error["holders"].as_array().cloned().unwrap_or_default();
        let named =
            holders.iter().any(|holder| holder.as_str().is_some_and(|holder| holder.contains(sentence)));
        assert_eq!((ran.exit, named), (3, true), "{sentence}: {ran:?}");
        site.is_untouched(&daemon);
    };
    // Another device is stacked on it.
    site.put("block/bcache0/holders/dm-7", "");
    refuse("bcache0 is in use by the device dm-7");
    std::fs::remove_file(site.sys("block/bcache0/holders/dm-7")).expect("ours");
    // It is mounted: the simulated device has the number of a mounted one.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let number = mounts.lines().next().and_then(|line| line.split(' ').nth(2)).expect("a mount").to_owned();
    site.put("block/bcache0/dev", &format!("{number}\n"));
    refuse("bcache0 is in use by the mount");
    site.put("block/bcache0/dev", "4095:77\n");
    // A partition on it is mounted.
    site.put("block/bcache0/bcache0p1/partition", "1\n");
    site.put("block/bcache0/bcache0p1/dev", &format!("{number}\n"));
    refuse("bcache0p1 is in use by the mount");
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn what_cannot_be_imported_is_refused() {
    let site = ImportFixture::new();
    let daemon = site.start();
    refused(&daemon, &["import", "no-such-set"], 2, "`bcached scan` shows the sets on this machine");
    // An unavailable device of the set is found before anything is done.
    site.put("block/tank/uevent", "DEVNAME=/nowhere/tank\n");
    let ran = site.import(&daemon, &[&site.set]);
    assert_eq!((ran.exit, ran.err.contains("/nowhere/tank")), (4, true), "{ran:?}");
    site.is_untouched(&daemon);
    site.put("block/tank/uevent", &format!("DEVNAME={}\n", site.tank));
    // A kernel that does not release the set: the message names what it holds and the way back, and
    // the same command waits again.
    let ran = site.import(&daemon, &[&site.set, "--timeout", "1s"]);
    assert_eq!((ran.exit, ran.err.contains("still present: ")), (6, true), "{ran:?}");
    assert!(ran.err.contains("repeat the command to wait again") && ran.err.contains(&site.tank), "{ran:?}");
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(0));
    site.put(&format!("fs/bcache/{}/stop", site.set), "");
    let kernel = site.obedient_kernel();
    let ran = site.import(&daemon, &[&site.set[..8]]);
    assert!(ran.exit == 0 && kernel.was_told(), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
    // A daemon with devices on its command line cannot store the import.
    let site = ImportFixture::new();
    let other = site.images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    let daemon = Daemon::start(&site.images, &["--cache", &other]);
    let ran = site.import(&daemon, &[&site.set]);
    assert_eq!((ran.exit, ran.err.contains("without a configuration")), (2, true), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the set was in the configuration and not in the kernel, and no command reverted
/// that.
#[test]
fn an_import_that_fails_names_the_command_that_goes_back() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ImportFixture::new();
    let before = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    done(&before, &["set", "tank", "writeback_running=0", "--runtime"]);
    fill(&site.images, &before, "tank", &pattern(DATA_BYTES, 3));
    assert_eq!(before.stop().0, 0);
    // All of the journal's five buckets: the dirty data cannot be found.
    let journal = 64 << 10..(6 * 64) << 10;
    let whole = common::bytes(&site.fast)[journal.clone()].to_vec();
    common::patch(&site.fast, 64 << 10, &vec![0; journal.len()]);
    let daemon = site.start();
    let kernel = site.obedient_kernel();
    let ran = site.import(&daemon, &[&site.set]);
    assert!(
        ran.exit == 4 && ran.err.contains("was imported, but cannot be served: ") && kernel.was_told(),
        "{ran:?}"
    );
    let name = daemon.status()["caches"][0]["name"].as_str().expect("a name").to_owned();
    let command = format!("`bcached release {name} --register` undoes the import");
    assert!(ran.err.contains(&command) && ran.err.lines().count() <= 2, "{ran:?}");

    let register = site.sys("fs/bcache/register");
    std::fs::write(&register, "").expect("made");
    let mut release = common::program();
    release.args(["release", &name, "--register", "--control", daemon.control()]);
    let ran = common::run(release.env("BCACHED_SYSFS", site.images.path("sys")));
    let told = format!("given to the kernel: {}, {}", site.fast, site.tank);
    assert!(ran.exit == 0 && ran.err.contains(&told), "{ran:?}\n{}", daemon.log());
    // The last device that it was given; the real file accepts each.
    assert!(common::bytes(&register).starts_with(site.tank.as_bytes()));
    let none = |daemon: &Daemon| {
        let status = daemon.status();
        let lists = ["caches", "volumes"].map(|list| status[list].as_array().map(Vec::len));
        assert_eq!(lists, [Some(0), Some(0)], "{status}");
    };
    none(&daemon);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    none(&daemon);
    // Nothing of the set was changed: repaired, it is imported with its dirty data.
    common::patch(&site.fast, 64 << 10, &whole);
    done(&daemon, &["import", &name]);
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "30s"]);
    assert!(
        content(&site.images, &daemon, "tank")[..DATA_BYTES] == pattern(DATA_BYTES, 3),
        "the dirty data is there"
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A cache that is not open is not released while a volume is served without it, or while its note
/// alone holds data.
#[test]
fn a_cache_that_is_not_open_is_released_when_nothing_needs_it() {
    let images = Images::new();
    let (fast, _) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "wait = \"1s\"\n");
    let daemon = Daemon::configured(&images);
    let set = json(&bcached(&["show", "--json", &fast]).out)["set_uuid"].as_str().expect("a set").to_owned();
    daemon.kill();
    common::patch(&fast, 64 << 10, &vec![0; (5 * 64) << 10]);
    let note = images.path(&format!("run/{set}.note"));
    let left = common::bytes(&note);
    let daemon = Daemon::configured(&images);
    // As if it had acknowledged a write: one record is counted.
    std::fs::write(&note, left).expect("a file");
    common::patch(&note, 128, &1u64.to_ne_bytes());
    refused(&daemon, &["release", "fast"], 3, "may hold acknowledged writes, which only bcached can replay");
    std::fs::remove_file(&note).expect("it is there");
    refused(&daemon, &["release", "fast"], 3, "tank is served without it; `bcached detach tank`");
    done(&daemon, &["remove", "tank"]);
    assert!(done(&daemon, &["release", "fast", "--dry-run"]).contains(&fast));
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(1), "a dry run does nothing");
    done(&daemon, &["release", "fast"]);
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(0));
    assert_eq!(daemon.stop().0, 0);
}

/// Of a cache that has been missing since the start, only the note and the volume whose newest data
/// it holds are known.
#[test]
fn a_cache_that_is_missing_is_not_released_while_a_note_of_it_lies_there() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (fast, _) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "wait = \"1s\"\n");
    let daemon = Daemon::configured(&images);
    let set = json(&bcached(&["show", "--json", &fast]).out)["set_uuid"].as_str().expect("a set").to_owned();
    done(&daemon, &["set", "tank", "cache_mode=writeback", "writeback_running=0"]);
    fill(&images, &daemon, "tank", &pattern(DATA_BYTES, 3));
    daemon.kill();
    // As if it had acknowledged a write that is in no journal entry yet: one record is counted.
    let note = images.path(&format!("run/{set}.note"));
    common::patch(&note, 128, &1u64.to_ne_bytes());
    let away = images.path("away");
    std::fs::rename(&fast, &away).expect("it is there");
    let daemon = Daemon::configured(&images);
    refused(&daemon, &["release", "fast"], 3, "may hold acknowledged writes, which only bcached can replay");
    std::fs::remove_file(&note).expect("it is there");
    let plan = done(&daemon, &["release", "fast", "--dry-run"]);
    assert!(plan.contains("an unknown amount of dirty data would stay on the cache device"), "{plan}");
    done(&daemon, &["release", "fast"]);
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: a set that could not be served was reported as imported, without further
/// explanation.
#[test]
fn what_cannot_be_served_is_not_called_imported() {
    let images = Images::new();
    let (fast, _) = images.configure_pair(CACHE_BYTES, BACKING_BYTES, "wait = \"0s\"\n");
    let whole = common::bytes(&fast);
    common::patch(&fast, 4096, &[0; 4096]);
    let daemon = Daemon::configured(&images);
    refused(&daemon, &["import", "fast"], 4, "fast was imported, but cannot be served: ");
    refused(&daemon, &["import", "fast"], 4, "correct that, then repeat `bcached import fast`");
    // A repaired set is retried at once.
    std::fs::write(&fast, whole).expect("a file");
    done(&daemon, &["import", "fast"]);
    assert_eq!(daemon.status()["caches"][0]["state"], "open");
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "30s"]);
    assert_eq!(daemon.stop().0, 0);
}
