//! The daemon as a service: its messages to the service manager, which kills a service whose start
//! or stop takes too long.

use crate::common::{Daemon, Images, StopOnDrop, bcached, control, json, pid};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// The time limit for operations that take a moment.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that is killed when this is dropped.
struct ServiceProcess(Child);

impl Drop for ServiceProcess {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped_already = self.0.wait();
    }
}

impl ServiceProcess {
    #[track_caller]
    fn ends(&mut self, otherwise: &str) {
        let started = Instant::now();
        while self.0.try_wait().expect("waits").is_none() {
            assert!(started.elapsed() < LIMIT, "{otherwise}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Starts the daemon of this configuration, with a socket that acts as its service manager.
fn managed(images: &Images) -> (UnixDatagram, ServiceProcess) {
    let socket = images.path("manager.sock");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(1))).expect("a limit");
    let config = images.path("config.toml");
    let mut command = Daemon::command(images, "run", &["--config", config.to_str().expect("text")]);
    command.env("NOTIFY_SOCKET", &socket).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    (manager, ServiceProcess(command.spawn().expect("starts")))
}

/// Returns the messages up to and including the first that begins with `wanted`.
#[track_caller]
fn told_until(manager: &UnixDatagram, wanted: &str) -> Vec<String> {
    let (started, mut told) = (Instant::now(), Vec::new());
    let mut bytes = [0; 4096];
    loop {
        let length = manager.recv(&mut bytes).unwrap_or(0);
        let text = String::from_utf8_lossy(&bytes[..length]).trim().to_owned();
        let is_it = text.starts_with(wanted);
        told.push(text);
        if is_it {
            return told;
        }
        assert!(started.elapsed() < LIMIT, "{wanted} is not said: {told:?}");
    }
}

/// A regression: a `wait` of ten minutes, as the documentation advises for a cache that appears
/// late, had the daemon killed every five minutes.
#[test]
fn a_start_and_a_stop_that_last_ask_for_more_time() {
    let images = Images::new();
    let (fast, gone) = (images.path("no-cache"), images.path("no-disk"));
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = \"1h\"\n[volume.media]\nbacking = {gone:?}\n"
    ));
    let (manager, mut served) = managed(&images);
    for _again_and_again in 0..3 {
        let told = told_until(&manager, "EXTEND_TIMEOUT_USEC=");
        assert!(!told.iter().any(|told| told.starts_with("READY")), "it waits: {told:?}");
    }

    let process = rustix::process::Pid::from_raw(i32::try_from(served.0.id()).expect("an id"));
    rustix::process::kill_process(process.expect("not zero"), rustix::process::Signal::TERM)
        .expect("signals");
    told_until(&manager, "STOPPING=1");
    told_until(&manager, "EXTEND_TIMEOUT_USEC=");
    served.ends("it does not stop");
}

/// A package calls `bcached take-over` instead of restarting the service. systemd must learn of the
/// new main process before the old one ends; otherwise it considers the service ended.
#[test]
fn who_has_taken_over_is_the_service() {
    let images = Images::new();
    images.configure_pair(64 << 20, 20 << 20, "");
    let (manager, mut served) = managed(&images);
    let _last = StopOnDrop(&images);
    told_until(&manager, "READY=1");
    let ran = bcached(&["take-over", "--json", "--control", &control(&images)]);
    assert_eq!(ran.exit, 0, "{}", ran.err);
    let new = json(&ran.out)["pid"].as_u64().expect("a process");
    assert_eq!(pid(&images).map(|pid| u64::from(pid.unsigned_abs())), Some(new));
    let told = told_until(&manager, &format!("MAINPID={new}"));
    assert!(!told.iter().any(|told| told.contains("STOPPING")), "the service goes on: {told:?}");
    served.ends("the old one does not end");
}
