//! `bcached release`, as processes: a set is left consistent with its dirty data, no daemon here
//! takes it again, and the kernel gets it on request. The kernel is simulated by a directory like
//! sysfs.

use crate::common::{
    self, Daemon, Images, LoopDevice, ask, bcached, bytes, done, fill, json, pattern, refused, requires, tool,
};
use bcached_control::client;
use bcached_control::jobs::{JobKind, JobSpec};
use std::path::Path;
use std::process::Stdio;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

struct ReleaseFixture {
    images: Images,
    fast: String,
    tank: String,
}

impl ReleaseFixture {
    fn new() -> Self {
        let images = Images::new();
        let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
        let text = format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\nwriteback_running = false\n"
        );
        images.configure(&text);
        Self { images, fast, tank }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    /// Runs `bcached` on a machine with such a kernel.
    fn beside_kernel(&self, daemon: &Daemon, words: &[&str]) -> common::CommandResult {
        let mut command = common::program();
        command
            .args(words)
            .args(["--control", daemon.control()])
            .env("BCACHED_SYSFS", self.images.path("sys"));
        common::run(&mut command)
    }
}

#[test]
fn a_released_set_stays_as_it_is_and_is_not_taken_again() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReleaseFixture::new();
    let daemon = site.start();
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 1));
    let planned = done(&daemon, &["release", "fast", "--dry-run"]);
    assert_eq!(
        planned,
        format!(
            "fast: would no longer be served; 2 MiB of dirty data would stay on the cache device\n{}\n{}\n",
            site.fast, site.tank
        )
    );
    assert_eq!((daemon.status()["caches"].as_array().map(Vec::len), site.kept()), (Some(1), String::new()));
    let released = done(&daemon, &["release", "fast"]);
    assert!(
        released.starts_with("fast: released: ")
            && released.ends_with(&format!("{}\n{}\n", site.fast, site.tank)),
        "{released}"
    );
    let again = json(&done(&daemon, &["release", "fast", "--json"]));
    assert_eq!(
        (again["already"].as_bool(), again["devices"].as_array().map(Vec::len)),
        (Some(true), Some(2)),
        "{again}"
    );
    let status = daemon.status();
    assert_eq!(
        (status["caches"].as_array().map(Vec::len), status["volumes"].as_array().map(Vec::len)),
        (Some(0), Some(0))
    );
    // Any process can open the devices, and the dirty data is there, consistent.
    let check = bcached(&["check", &site.fast, "--backing", &site.tank]);
    assert!(check.exit == 0 && check.out.contains("2 MiB"), "{check:?}");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(0), "{}", site.kept());
    assert_eq!(done(&daemon, &["release", "fast"]).lines().count(), 3);
    assert_eq!(daemon.stop().0, 0);
    // Removing the file brings the set back manually.
    std::fs::remove_file(site.images.path("config.d/99-set.toml")).expect("ours");
    let daemon = site.start();
    let found = common::content(&site.images, &daemon, "media");
    assert!(found[..DATA_BYTES] == pattern(DATA_BYTES, 1), "the dirty data is there");
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn a_released_set_is_given_to_the_kernel() {
    let site = ReleaseFixture::new();
    let daemon = site.start();
    let ran = site.beside_kernel(&daemon, &["release", "fast", "--register"]);
    assert_eq!(
        (ran.exit, ran.err.contains("the module is not loaded; run `modprobe bcache`")),
        (4, true),
        "{ran:?}"
    );
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(1), "nothing was done");
    let register = site.images.path("sys/fs/bcache/register");
    std::fs::create_dir_all(register.parent().expect("a folder")).expect("made");
    std::fs::write(&register, "").expect("made");
    let ran = site.beside_kernel(&daemon, &["release", "fast", "--register"]);
    assert!(
        ran.exit == 0 && ran.err.contains(&format!("given to the kernel: {}, {}", site.fast, site.tank)),
        "{ran:?}"
    );
    // The last device that was written; the real file accepts each.
    assert!(bytes(&register).starts_with(site.tank.as_bytes()));
    // Repeated, as after a failure in between.
    let ran = site.beside_kernel(&daemon, &["release", "fast", "--register"]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn what_is_in_use_is_not_released() {
    if !requires("qemu-io") {
        return;
    }
    let site = ReleaseFixture::new();
    let daemon = site.start();
    refused(&daemon, &["release", "slow"], 2, "no cache is called `slow`");
    let mut client = tool("qemu-io")
        .args(["-f", "raw", &daemon.uri("media")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    daemon.wait_for("a client", |status| status["clients"][0]["volume"] == "media");
    let ran = ask(&daemon, &["release", "fast", "--json"]);
    let error = json(&ran.err)["error"].clone();
    assert_eq!((ran.exit, error["holders"].as_array().map(Vec::len)), (3, Some(1)), "{ran:?}");
    assert_eq!(daemon.status()["volumes"][0]["state"].as_str(), Some("served"));
    client.kill().expect("kills");
    client.wait().expect("waits");
    daemon.wait_for("nobody", |status| status["clients"].as_array().is_some_and(Vec::is_empty));
    done(&daemon, &["release", "fast"]);
    assert_eq!(daemon.stop().0, 0);
}

/// A volume that was removed before is not part of the released set: it is not given to the kernel,
/// and does not return with the others.
#[test]
fn a_release_leaves_what_was_removed_before_alone() {
    let site = ReleaseFixture::new();
    let daemon = site.start();
    done(&daemon, &["remove", "media"]);
    let released = done(&daemon, &["release", "fast"]);
    assert!(released.contains(&site.fast) && !released.contains(&site.tank), "{released}");
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    let again = json(&done(&daemon, &["release", "fast", "--json"]));
    assert_eq!(again["devices"].as_array().map(Vec::len), Some(1), "{again}");
    done(&daemon, &["import", "fast"]);
    daemon.wait_for("it is open", |status| status["caches"][0]["state"] == "open");
    let status = daemon.status();
    assert_eq!(status["volumes"].as_array().map(Vec::len), Some(0), "{status} {}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// The kernel gets nothing before the set is released, and `--no-wait` would not wait for that.
#[test]
fn devices_are_not_registered_without_waiting() {
    let site = ReleaseFixture::new();
    let daemon = site.start();
    refused(&daemon, &["release", "fast", "--register", "--no-wait"], 2, "exclude each other");
    assert_eq!(daemon.status()["caches"].as_array().map(Vec::len), Some(1), "nothing was done");
    assert_eq!(daemon.stop().0, 0);
}

/// If the release cannot be stored, the next start would serve the set again, wherever its devices
/// are, so the set stays served. Undoing what was not stored leaves no file that a start refuses.
#[test]
fn a_release_that_cannot_be_kept_is_refused_before_anything_is_let_go_of() {
    let site = ReleaseFixture::new();
    let daemon = site.start();
    let in_the_way = site.images.path(&format!("config.d/99-set.toml.{}.new", daemon.id()));
    std::fs::create_dir_all(&in_the_way).expect("in the way");
    refused(
        &daemon,
        &["release", "fast"],
        4,
        "nothing was changed; make sure that the daemon can write there",
    );
    assert_eq!(daemon.status()["volumes"][0]["state"].as_str(), Some("served"));
    std::fs::remove_dir(&in_the_way).expect("out of the way");
    done(&daemon, &["release", "fast"]);
    let file = site.images.path("config.d/99-set.toml");
    std::fs::remove_file(&file).expect("it was kept");
    done(&daemon, &["add", "media"]);
    assert!(!file.exists(), "there is nothing to say");
    std::fs::write(&file, "").expect("as an older daemon has left it");
    daemon.kill();
    let daemon = site.start();
    assert_eq!(daemon.status()["volumes"][0]["state"].as_str(), Some("served"));
    assert_eq!(daemon.stop().0, 0);
}

/// Starts a job without waiting for it.
fn begin(daemon: &Daemon, begin: &JobSpec) -> String {
    let body = serde_json::to_string(begin).expect("text");
    client::post(Path::new(daemon.control()), "/v1/jobs", &body).expect("it begins")
}

/// Waits until no job is running, and checks that none has failed.
fn wait_for_all(daemon: &Daemon) {
    daemon.wait_for("nothing goes on", |status| status["jobs"].as_array().is_none_or(Vec::is_empty));
    assert!(!daemon.log().contains("job-failed"), "{}", daemon.log());
}

/// A regression: a volume that was added during a release made the daemon serve the released one
/// again, and the release was not stored. A kernel or another program that had the device by then
/// was the second writer.
#[test]
fn a_volume_that_is_added_meanwhile_undoes_no_release() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReleaseFixture::new();
    let names: Vec<_> = (0..12).map(|number| format!("other{number}")).collect();
    let devices: Vec<_> = names.iter().map(|name| site.images.blank(name, BACKING_BYTES)).collect();
    let made = |device: &String| bcached(&["make", "-B", device]).exit;
    assert!(devices.iter().all(|device| made(device) == 0));
    let daemon = site.start();
    // Gives the stop something to write.
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 1));
    std::thread::scope(|scope| {
        scope.spawn(|| begin(&daemon, &JobSpec::new(JobKind::Release, "fast".to_owned())));
        for (name, device) in names.iter().zip(&devices) {
            let (backing, cache) = (Some(device.clone()), Some("none".to_owned()));
            begin(&daemon, &JobSpec { backing, cache, ..JobSpec::new(JobKind::Add, name.clone()) });
        }
    });
    wait_for_all(&daemon);
    let are_served = |status: &serde_json::Value| {
        let all = status["volumes"].as_array().expect("volumes");
        all.len() == names.len()
            && all.iter().all(|volume| volume["state"] == "served" && volume["name"] != "media")
    };
    daemon.wait_for("the others are served, and only they", are_served);
    assert!(
        site.kept().contains("[volume.media]\n") && site.kept().contains("released = true"),
        "{}",
        site.kept()
    );
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    assert!(are_served(&daemon.status()), "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: after a reload during the release, the volumes waited for a cache that was gone,
/// and the release could not be stored.
#[test]
fn a_reload_undoes_no_release() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReleaseFixture::new();
    let daemon = site.start();
    // Gives the stop something to write.
    fill(&site.images, &daemon, "media", &pattern(DATA_BYTES, 1));
    std::thread::scope(|scope| {
        let released = scope.spawn(|| done(&daemon, &["release", "fast"]));
        while !released.is_finished() {
            daemon.signal(rustix::process::Signal::HUP);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
    nothing_is_served(&site, daemon);
}

/// A regression: a section that was not read yet, of a volume for that cache, prevented the
/// release: without the cache the volume could not be served.
#[test]
fn a_section_that_was_not_read_goes_with_its_cache() {
    let site = ReleaseFixture::new();
    let daemon = site.start();
    let text = std::fs::read_to_string(site.images.path("config.toml")).expect("readable");
    site.images.configure(&format!("{text}[volume.late]\nbacking = \"/nonexistent\"\n"));
    done(&daemon, &["release", "fast"]);
    assert!(site.kept().contains("[volume.late]"), "{}", site.kept());
    nothing_is_served(&site, daemon);
}

/// Nothing is served, neither now nor by the next start.
#[track_caller]
fn nothing_is_served(site: &ReleaseFixture, daemon: Daemon) {
    let status = daemon.status();
    let served = ["caches", "volumes"].map(|list| status[list].as_array().map(Vec::len));
    assert_eq!(served, [Some(0), Some(0)], "{status} {}\n{}", site.kept(), daemon.log());
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    let status = daemon.status();
    assert_eq!(status["caches"].as_array().map(Vec::len), Some(0), "{status} {}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: a released set that was imported by its UUID lost the names in the configuration,
/// which clients use. Sections of other names were written for devices that were configured by a
/// path. Needs root and loop devices; without them it is skipped, with the reason.
#[test]
fn a_released_set_comes_back_under_its_names_however_it_is_called() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let gone = images.blank("gone", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &gone, "--for", &fast]).exit, 0);
    let set = json(&bcached(&["show", "--json", &fast]).out)["set_uuid"].as_str().map(str::to_owned);
    let set = set.expect("a set");
    let mut loops = Vec::new();
    for image in [&fast, &tank, &gone] {
        let Some(made) = LoopDevice::over(image) else { return };
        // Links like those in /dev/disk/by-id.
        std::os::unix::fs::symlink(&made.0, format!("{image}-by-id")).expect("a link");
        loops.push(made);
    }
    images.configure(&format!(
        "version = 1\n[cache.nvme]\ndevice = \"{fast}-by-id\"\n[volume.media]\nbacking = \"{tank}-by-id\"\n\
         [volume.old]\nbacking = \"{gone}-by-id\"\n"
    ));
    let daemon = Daemon::configured(&images);
    done(&daemon, &["remove", "old"]);
    let by_uuid = format!("UUID={set}");
    let by_id = format!("{fast}-by-id");
    for called in [&set, &by_uuid, &loops[0].0, &loops[1].0, &by_id] {
        done(&daemon, &["release", "nvme"]);
        let status = daemon.status();
        assert_eq!(status["caches"].as_array().map(Vec::len), Some(0), "{status}");
        // A second release reports that it is released already, by every name.
        let again = json(&done(&daemon, &["release", called, "--json"]));
        assert_eq!(
            (&again["already"], &again["volume"]),
            (&true.into(), &"nvme".into()),
            "{called}: {again}"
        );
        let imported = ask(&daemon, &["import", called]);
        assert_eq!(imported.exit, 0, "{called}: {imported:?}\n{}", daemon.log());
        let status = daemon.status();
        let names = |list: &str| -> Vec<String> {
            let all = status[list].as_array().expect("a list").iter();
            all.map(|entry| entry["name"].as_str().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(
            (names("caches"), names("volumes")),
            (vec!["nvme".to_owned()], vec!["media".to_owned()]),
            "{called}: {status}\n{}",
            images.kept()
        );
    }
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: a volume that was added while its set was released stayed failed when the set
/// returned, because of a cache that "is not served".
#[test]
fn a_volume_that_was_refused_for_want_of_its_set_is_served_when_that_comes() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let [slow, pond] =
        [("slow", CACHE_BYTES), ("pond", BACKING_BYTES)].map(|(name, n)| images.blank(name, n));
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &slow]).exit, 0);
    assert_eq!(bcached(&["make", "--writeback", "-B", &pond]).exit, 0);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[cache.slow]\ndevice = {slow:?}\n[defaults]\ncache = \"fast\"\n\
         [volume.media]\nbacking = {tank:?}\n[volume.pond]\nbacking = {pond:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    done(&daemon, &["release", "fast"]);
    done(&daemon, &["add", "pond", "--no-wait"]);
    let pond_of = |status: &serde_json::Value| {
        let volumes = status["volumes"].as_array().expect("volumes").clone();
        volumes.into_iter().find(|volume| volume["name"] == "pond").unwrap_or_default()
    };
    daemon.wait_for("its set is not here", |status| pond_of(status)["state"] == "failed");
    let reason = pond_of(&daemon.status())["reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("it belongs to the cache set"), "{reason}");
    done(&daemon, &["import", "fast"]);
    daemon.wait_for("it is here", |status| {
        let pond = pond_of(status);
        pond["state"] == "served" && pond["cache"] == "fast"
    });
    assert_eq!(daemon.stop().0, 0);
}
