//! Stops by command: they name the dirty data that stays and report how the daemon ended. A volume
//! that was stopped returns as it was.

use crate::common::{
    self, Daemon, Images, ask, bcached, content, done, fill, json, pattern, refused, requires, tool,
};
use rustix::process::Signal;
use std::io::Write as _;
use std::process::{Child, Stdio};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

/// A cache and a volume in writeback mode, without automatic write-back.
struct StopFixture {
    images: Images,
    fast: String,
    tank: String,
}

impl StopFixture {
    fn new() -> Self {
        let images = Images::new();
        let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
        let text = format!(
            "version = 1\n[daemon]\nstop_timeout = \"5m\"\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\n\
             backing = {tank:?}\nwriteback_running = false\n"
        );
        images.configure(&text);
        Self { images, fast, tank }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn write(&self, daemon: &Daemon) -> Vec<u8> {
        let data = pattern(DATA_BYTES, 1);
        fill(&self.images, daemon, "media", &data);
        data
    }

    #[track_caller]
    fn expect(&self, daemon: &Daemon, data: &[u8]) {
        let found = content(&self.images, daemon, "media");
        assert!(found[..data.len()] == *data, "the volume holds something else");
    }

    /// Starts a client that stays connected until its input ends.
    fn client(&self, daemon: &Daemon) -> Child {
        let client = tool("qemu-io")
            .args(["-f", "raw", &daemon.uri("media")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("starts");
        // A client that has not chosen an export yet uses no volume.
        daemon.wait_for("a client", |status| status["clients"][0]["volume"] == "media");
        client
    }
}

fn state(daemon: &Daemon) -> String {
    daemon.status()["volumes"][0]["state"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_stop_names_what_stays_dirty_and_says_how_it_has_ended() {
    if !requires("nbdcopy") {
        return;
    }
    let site = StopFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon);
    let stays = "media: 2 MiB dirty stays on fast; keep them together\n";
    let pid = daemon.status()["pid"].to_string();
    assert_eq!(done(&daemon, &["stop", "--dry-run"]), format!("{stays}daemon {pid} would be stopped\n"));
    assert_eq!(state(&daemon), "served");
    assert_eq!(done(&daemon, &["stop"]), format!("{stays}daemon {pid} has stopped\n"));
    let log = daemon.log();
    assert!(log.contains("stop [event=stop-asked uid=") && log.contains("stopped [event=stopped]"), "{log}");
    assert!(!std::path::Path::new(daemon.control()).exists(), "its socket went with it");
    let again = ask(&daemon, &["stop"]);
    assert_eq!(
        (again.exit, again.out.as_str()),
        (0, "no daemon answers: there is nothing to stop\n"),
        "{again:?}"
    );
    assert!(again.err.contains(daemon.control()), "it may be the wrong socket: {again:?}");
    assert_eq!(daemon.stop().0, 0, "its own exit status");
    let check = bcached(&["check", &site.fast, "--backing", &site.tank]);
    assert_eq!(check.exit, 0, "{check:?}");
    let daemon = site.start();
    site.expect(&daemon, &data);
    let object = json(&done(&daemon, &["stop", "--json"]));
    let dirty = &object["dirty"][0];
    assert_eq!(
        (
            object["schema"].as_str(),
            object["ended"].as_bool(),
            dirty["volume"].as_str(),
            dirty["dirty_bytes"].as_u64()
        ),
        (Some("bcached.stop"), Some(true), Some("media"), Some(DATA_BYTES as u64)),
        "{object}"
    );
}

/// A regression: the final report gave the dirty data as it was at the request, although connected
/// clients kept writing, and write-back continued.
#[test]
fn what_stays_is_what_is_dirty_in_the_end() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = StopFixture::new();
    let daemon = site.start();
    site.write(&daemon);
    let mut client = site.client(&daemon);
    let begun = done(&daemon, &["stop", "--no-wait"]);
    assert!(begun.contains("media: 2 MiB dirty stays on fast"), "{begun}");
    let mut input = client.stdin.take().expect("piped");
    input.write_all(b"write 4M 1M\n").expect("it reads");
    daemon.wait_for("the write", |status| status["volumes"][0]["dirty_bytes"] == 3 << 20);
    let asked = std::thread::scope(|scope| {
        let asks = scope.spawn(|| done(&daemon, &["stop"]));
        drop(input);
        assert!(client.wait().expect("ends").success());
        asks.join().expect("it is answered")
    });
    assert!(asked.starts_with("media: 3 MiB dirty stays on fast"), "{asked}");
    let (exit, log) = daemon.stop();
    let said = log.lines().filter(|line| line.contains("event=dirty-stays"));
    assert_eq!((exit, said.collect::<Vec<_>>().len()), (0, 1), "{log}");
    assert!(log.contains("media: 3 MiB dirty stays on fast"), "{log}");
}

/// A command that stops waiting leaves the stop in progress. A second command joins it, and does
/// not count as a second signal.
#[test]
fn a_stop_waits_for_clients_and_is_joined() {
    if !requires("qemu-io") {
        return;
    }
    let site = StopFixture::new();
    let daemon = site.start();
    let mut client = site.client(&daemon);
    for _ in 0..2 {
        let limited = ask(&daemon, &["stop", "--timeout", "1s"]);
        assert_eq!(
            (limited.exit, limited.err.contains("is still stopping: waiting up to 300 s for clients: ")),
            (6, true),
            "{limited:?}"
        );
        assert!(limited.err.contains(" uses media"), "{limited:?}");
    }
    assert_eq!(daemon.status()["state"].as_str(), Some("stopping"));
    drop(client.stdin.take());
    assert!(client.wait().expect("ends").success());
    let ended = ask(&daemon, &["stop"]);
    assert_eq!(ended.exit, 0, "{ended:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A stop that is not clean is reported to the client that asked for it.
#[test]
fn a_stop_that_fails_is_told() {
    if !requires("nbdcopy") {
        return;
    }
    let site = StopFixture::new();
    let daemon = site.start();
    site.write(&daemon);
    daemon.fail_writes_beyond(4096);
    let failed = ask(&daemon, &["stop"]);
    assert_eq!((failed.exit, failed.err.contains("could not be stopped in order")), (4, true), "{failed:?}");
    assert!(failed.err.contains("the next start recovers the set"), "{failed:?}");
    assert_eq!(daemon.stop().0, 4);
}

#[test]
fn a_stopped_volume_is_not_served_until_it_is_added_or_the_daemon_starts() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = StopFixture::new();
    let daemon = site.start();
    let data = site.write(&daemon);
    let mut client = site.client(&daemon);
    refused(&daemon, &["stop", "media"], 3, "cannot stop media now: it is in use by");
    drop(client.stdin.take());
    assert!(client.wait().expect("ends").success());
    daemon.wait_for("nobody", |status| status["clients"].as_array().is_some_and(Vec::is_empty));

    let planned = done(&daemon, &["stop", "media", "--dry-run"]);
    assert_eq!(
        planned,
        "media: would not be served until the next start; 2 MiB of dirty data would stay in its cache\n"
    );
    assert_eq!(state(&daemon), "served");
    let told = done(&daemon, &["stop", "media"]);
    assert!(
        told.starts_with("media: stopped: it is not served until the next start, or `bcached add`"),
        "{told}"
    );
    assert_eq!(done(&daemon, &["stop", "media"]), "media: it is stopped already\n");
    assert_eq!(state(&daemon), "stopped");
    assert_eq!(ask(&daemon, &["status"]).exit, 1, "it is configured, and not served");
    let waited = ask(&daemon, &["wait", "media", "--for", "served"]);
    assert_eq!((waited.exit, waited.err.contains("media is not served")), (1, true), "{waited:?}");
    refused(
        &daemon,
        &["flush", "media"],
        4,
        "it was stopped on request; `bcached add media` serves it again",
    );
    let copied = common::run(tool("nbdcopy").arg(daemon.uri("media")).arg(site.images.path("found")));
    assert!(copied.exit != 0, "{copied:?}");
    assert!(!site.images.path("config.d/99-set.toml").exists(), "nothing is kept of it");
    daemon.signal(Signal::HUP);
    daemon.wait_for("the reload", |_| daemon.log().contains("event=reloaded"));
    assert_eq!(state(&daemon), "stopped", "a reload is no start");

    assert_eq!(done(&daemon, &["add", "media"]), "media: added\n");
    site.expect(&daemon, &data);
    done(&daemon, &["stop", "media"]);
    done(&daemon, &["remove", "media"]);
    assert_eq!(
        daemon.status()["volumes"].as_array().map(Vec::len),
        Some(0),
        "removed, it is as if it was not configured"
    );
    done(&daemon, &["add", "media"]);
    done(&daemon, &["stop", "media"]);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    site.expect(&daemon, &data);
    assert_eq!(daemon.stop().0, 0);
}

/// Devices of the command line, and a volume that lives in the cache alone.
#[test]
fn a_stop_of_a_volume_needs_no_configuration() {
    let site = StopFixture::new();
    let daemon = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    done(&daemon, &["add", "scratch", "--size", "1M"]);
    for name in ["tank", "scratch"] {
        done(&daemon, &["stop", name]);
        assert_eq!(done(&daemon, &["stop", name]), format!("{name}: it is stopped already\n"));
        assert_eq!(done(&daemon, &["add", name]), format!("{name}: added\n"));
        done(&daemon, &["wait", name, "--for", "served", "--timeout", "30s"]);
    }
    done(&daemon, &["stop", "scratch"]);
    assert_eq!(daemon.stop().0, 0);
}
