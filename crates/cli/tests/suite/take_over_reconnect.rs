//! A hand-over as seen by clients whose connections cannot be passed on, for each kind of export.
//! They are listed before and after, their connections end instead of hanging, and after they
//! reconnect everything they wrote is there.

use crate::certificates::CertificateAuthority;
use crate::common::{
    Daemon, Images, StopOnDrop, ask, bytes, done, fill, has_fuse, json, pattern, refused, requires, tool,
    wrapped,
};
use crate::machine::{QemuMachine, boot_sector, has_qemu};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 16 << 20;
/// The time limit after which an operation counts as hanging.
const LIMIT: Duration = Duration::from_secs(60);

/// A third-party NBD client: it writes, waits for a word to continue, expects its connection to
/// have ended, and connects again.
struct ReconnectingClient {
    process: Child,
    hears: ChildStdin,
    says: Receiver<String>,
}

const SCRIPT: &str = "
import os, sys
def connect():
    handle = nbd.NBD()
    handle.set_uri_allow_local_file(True)
    handle.connect_uri(os.environ['PLACE'])
    return handle
first = connect()
first.pwrite(b'precious' * 512, 8192)
print('written', flush=True)
sys.stdin.readline()
try:
    first.pread(4096, 8192)
    print('goes on', flush=True)
except nbd.Error:
    print('ended', flush=True)
    assert connect().pread(4096, 8192) == b'precious' * 512
    print('back', flush=True)
";

impl ReconnectingClient {
    fn start(uri: &str) -> Self {
        let mut command = tool("nbdsh");
        // nbdsh runs under the first Python in the path, but its module belongs to the system's
        // Python.
        command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("PLACE", uri).args(["-c", SCRIPT]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it is there");
        let (hears, says) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        let (send, receive) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(says).lines().map_while(Result::ok);
            lines.take_while(|line| send.send(line.clone()).is_ok()).for_each(drop);
        });
        Self { process, hears, says: receive }
    }

    #[track_caller]
    fn says(&self, wanted: &str) {
        assert_eq!(self.says.recv_timeout(LIMIT).as_deref(), Ok(wanted));
    }

    fn goes_on(&mut self) {
        self.hears.write_all(b"\n").expect("it listens");
    }
}

impl Drop for ReconnectingClient {
    fn drop(&mut self) {
        let _ended_already = self.process.kill();
        let _reaped_already = self.process.wait();
    }
}

/// Returns the clients that have to reconnect: according to a dry run, and then in fact.
fn taken_over(daemon: &Daemon) -> [Vec<String>; 2] {
    let reconnect = |words: &[&str]| {
        let told = json(&done(daemon, &[&["take-over", "--json"], words].concat()));
        let named = told["reconnect"].as_array().expect("a list").iter();
        named.map(|client| client.as_str().expect("text").to_owned()).collect()
    };
    [reconnect(&["--dry-run"]), reconnect(&[])]
}

#[test]
fn connections_in_tls_end_and_come_again() {
    if !requires("nbdsh") {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    let (authority, tls, client) = (CertificateAuthority::new(), images.path("tls"), images.path("client"));
    authority.put_server(&tls);
    authority.put_client(&client, Some(&authority));
    let text = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    images.configure(&format!("{text}[nbd]\nlisten = [\"127.0.0.1:0\"]\ntls = {tls:?}\n"));
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let status = daemon.status();
    let port = status["nbd"][0].as_str().and_then(|place| place.strip_prefix("127.0.0.1:")).expect("a place");
    let uri = format!("nbds://localhost:{port}/tank?tls-certificates={}", client.display());
    let mut client = ReconnectingClient::start(&uri);
    client.says("written");
    for named in taken_over(&daemon) {
        assert!(matches!(&named[..], [one] if one.starts_with("tank (")), "{named:?}");
    }
    client.goes_on();
    client.says("ended");
    client.says("back");
}

#[test]
fn a_virtual_machine_connects_again() {
    if !has_qemu() || !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    // SeaBIOS boots from blocks of 512 bytes only.
    images.configure_blocks("512", (CACHE_BYTES, BACKING_BYTES), "export = [\"nbd\", \"vhost-user\"]\n");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let mut disk = pattern(64 << 10, 1);
    disk[..512].copy_from_slice(&boot_sector());
    disk[512] = b'!';
    fill(&images, &daemon, "tank", &disk);
    let guest = QemuMachine::start(&images.path("run/vhost-user/tank.sock"));
    assert_eq!([guest.says(), guest.says(), guest.says()], *b"!..");
    daemon.wait_for("it writes", |status| status["clients"][0]["writing"] == true);
    for named in taken_over(&daemon) {
        assert!(matches!(&named[..], [one] if one.starts_with("tank (")), "{named:?}");
    }
    while guest.said.recv_timeout(Duration::from_millis(200)).is_ok_and(|said| said == b'.') {}
    daemon.wait_for("it is back", |status| status["clients"][0]["writing"] == true);
    assert_eq!([guest.says(), guest.says()], *b"..", "it hears of no error");
}

#[test]
fn a_mount_with_no_open_file_is_made_anew() {
    if !has_fuse() {
        return;
    }
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "export = \"fuse\"\n");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    let path = images.path("run/fuse/volumes/tank");
    let data = pattern(300_000, 3);
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("it is there");
    file.write_all_at(&data, 777).expect("it takes it");
    file.sync_all().expect("it is durable");
    daemon.wait_for("its user", |status| status["clients"][0]["way"] == "fuse");
    refused(&daemon, &["take-over"], 3, "clients use mounts or devices that end with the daemon: ");
    file.write_all_at(&data[..512], 0).expect("nothing has changed");
    drop(file);
    daemon.wait_for("its end", |status| status["clients"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(taken_over(&daemon), [Vec::<String>::new(), Vec::new()]);
    assert!(bytes(&path)[777..][..data.len()] == data[..]);
}

/// Runtime options of a cache and of volumes survive a hand-over, which is no stop, and one that is
/// taken back.
#[test]
fn what_was_set_for_a_time_goes_along() {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    images.configure_wait("1s");
    let daemon = Daemon::configured(&images);
    let _last = StopOnDrop(&images);
    done(&daemon, &["add", "lodger", "--cache", "fast", "--size", "4M"]);
    let said = [
        ("tank", "writeback_percent", "23"),
        ("tank", "cache_mode", "writearound"),
        ("fast", "cache_replacement_policy", "fifo"),
        ("lodger", "freeze_timeout", "7s"),
    ];
    for (owner, name, value) in said {
        done(&daemon, &["set", owner, &format!("{name}={value}"), "--runtime"]);
    }
    let check = |when: &str| {
        for (owner, name, value) in said {
            let shown = json(&done(&daemon, &["get", owner, name, "--json"]));
            let option = &shown["options"][0];
            assert_eq!(
                (&option["value"], &option["origin"]),
                (&value.into(), &"runtime".into()),
                "{when}: {shown}"
            );
        }
    };
    check("before");
    for _ in 0..2 {
        let ran = ask(&daemon, &["take-over"]);
        assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
        check("after a take-over");
    }
    let hides = format!("mv {0} {0}.hidden; (sleep 4; mv {0}.hidden {0}) & ", images.path("tank").display());
    let program = wrapped(&images, &hides);
    assert_eq!(ask(&daemon, &["take-over", "--program", &program]).exit, 4);
    let started = Instant::now();
    while !images.path("tank").exists() {
        assert!(started.elapsed() < LIMIT, "it comes back");
        std::thread::sleep(Duration::from_millis(20));
    }
    check("taken back");
    // The file exists, so the volume does, too, or soon will.
    daemon.wait_for("the volume", |status| status["volumes"][0]["state"] == "served");
    done(&daemon, &["stop"]);
    drop(daemon);
    let again = Daemon::configured(&images);
    let shown = json(&done(&again, &["get", "tank", "writeback_percent", "--json"]));
    assert_ne!(shown["options"][0]["value"], "23", "a stop ends it");
    drop(again);
}
