//! Clients that connect before their volumes exist wait as long as the volume's `wait`, and then
//! get the volume or the reason.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use crate::certificates::CertificateAuthority;
use crate::common::{self, Daemon, Images, json, requires, tool};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const BYTES: u64 = 16 << 20;

/// A daemon that the test does not wait for.
struct StartingDaemon {
    images: Images,
    child: Child,
}

impl StartingDaemon {
    /// Starts with the volume `tank`, whose device is missing.
    fn new(wait: &str) -> Self {
        Self::with(Images::new(), wait, "")
    }

    /// The same; `nbd` is that section of the configuration.
    fn with(images: Images, wait: &str, nbd: &str) -> Self {
        let (_, tank) = images.configure_pair(64 << 20, BYTES, &format!("wait = {wait:?}\n{nbd}"));
        std::fs::rename(tank, images.path("away")).unwrap();
        let config = images.path("config.toml");
        let mut command = Daemon::command(&images, "run", &["--config", config.to_str().unwrap()]);
        let log = std::fs::File::create(images.path("errors")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let starting = Self { images, child };
        starting.until("it answers", |status| status["pid"].is_u64());
        starting
    }

    fn until(&self, what: &str, wanted: impl Fn(&serde_json::Value) -> bool) {
        let started = Instant::now();
        loop {
            let control = common::control(&self.images);
            let ran = common::bcached(&["status", "--json", "--control", &control]);
            if matches!(ran.exit, 0 | 1) && wanted(&json(&ran.out)) {
                return;
            }
            let log = std::fs::read_to_string(self.images.path("errors")).unwrap();
            assert!(started.elapsed() < LIMIT, "{what}: {ran:?}\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn client(&self, volume: &str) -> Child {
        let socket = self.images.path("run/nbd.sock");
        size_of(&format!("nbd+unix:///{volume}?socket={}", socket.display()))
    }

    /// Returns the port of its only TCP address.
    fn port(&self) -> String {
        let control = common::control(&self.images);
        let status = json(&common::bcached(&["status", "--json", "--control", &control]).out);
        let mut places = status["nbd"].as_array().unwrap().iter().filter_map(|place| place.as_str());
        places.find_map(|place| place.strip_prefix("127.0.0.1:")).unwrap().to_owned()
    }

    /// Waits until so many clients are connected and have no volume.
    fn until_waiting(&self, clients: usize) {
        self.until("they wait", |status| {
            let all = status["clients"].as_array().unwrap();
            all.iter().filter(|client| client["volume"].is_null()).count() == clients
        });
    }
}

impl Drop for StartingDaemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

/// Starts a client that asks for the volume's size.
fn size_of(uri: &str) -> Child {
    let mut command = tool("nbdinfo");
    command.args(["--size", uri]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the client, within the time limit, and returns its result.
fn end_of(mut client: Child) -> Output {
    let started = Instant::now();
    while client.try_wait().unwrap().is_none() {
        if started.elapsed() > LIMIT {
            client.kill().unwrap();
            panic!("the client does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    client.wait_with_output().unwrap()
}

#[test]
fn who_comes_early_gets_the_volume_when_it_comes() {
    if !requires("nbdinfo") {
        return;
    }
    let starting = StartingDaemon::new("10m");
    let (early, nameless, gone) = (starting.client("tank"), starting.client(""), starting.client("tank"));
    starting.until_waiting(3);
    let unknown = end_of(starting.client("attic"));
    assert!(!unknown.status.success(), "{unknown:?}");
    // A client that disconnects is noticed.
    let mut gone = gone;
    gone.kill().unwrap();
    gone.wait().unwrap();
    starting.until_waiting(2);
    std::fs::rename(starting.images.path("away"), starting.images.path("tank")).unwrap();
    for client in [early, nameless] {
        let end = end_of(client);
        assert!(end.status.success(), "{end:?}");
        assert_eq!(String::from_utf8_lossy(&end.stdout).trim(), (BYTES - 8192).to_string());
    }
}

/// The time a client waits does not count against the handshake limit, with TLS either.
#[test]
fn who_comes_early_by_tls_gets_the_volume_when_it_comes() {
    if !requires("nbdinfo") {
        return;
    }
    let (images, authority) = (Images::new(), CertificateAuthority::new());
    let (tls, trusts) = (images.path("tls"), images.path("trusts"));
    authority.put_server(&tls);
    authority.put_client(&trusts, None);
    let nbd = format!("[nbd]\nlisten = [\"127.0.0.1:0\"]\ntls = {tls:?}\ntls_verify_peer = false\n");
    let starting = StartingDaemon::with(images, "10m", &nbd);
    let port = starting.port();
    let uri = format!("nbds://localhost:{port}/tank?tls-certificates={}", trusts.display());
    let early = size_of(&uri);
    starting.until_waiting(1);
    std::fs::rename(starting.images.path("away"), starting.images.path("tank")).unwrap();
    let end = end_of(early);
    assert!(end.status.success(), "{end:?}");
    assert_eq!(String::from_utf8_lossy(&end.stdout).trim(), (BYTES - 8192).to_string());
}

#[test]
fn who_has_waited_as_long_as_the_volume_is_waited_for_hears_why() {
    if !requires("qemu-io") {
        return;
    }
    let starting = StartingDaemon::new("1s");
    let uri = format!("nbd+unix:///tank?socket={}", starting.images.path("run/nbd.sock").display());
    let ran = common::run(tool("qemu-io").args(["-r", "-f", "raw", "-c", "quit", &uri]));
    assert!(ran.exit != 0 && ran.err.contains("the volume \"tank\" is not served: "), "{ran:?}");
    assert!(ran.err.contains("it does not exist"), "{ran:?}");
}

#[test]
fn a_stop_ends_the_waiting() {
    if !requires("nbdinfo") {
        return;
    }
    let mut starting = StartingDaemon::new("10m");
    let early = starting.client("tank");
    starting.until_waiting(1);
    let process = rustix::process::Pid::from_child(&starting.child);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    let end = end_of(early);
    assert!(!end.status.success(), "{end:?}");
    let started = Instant::now();
    while starting.child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < LIMIT, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}
