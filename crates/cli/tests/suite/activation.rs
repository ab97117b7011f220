//! Sockets that another program has bound and passes to the daemon, as systemd does.

use crate::common::{Daemon, Images, bcached, json, requires, run, tool};
use rustix::process::{Pid, Signal};
use std::io::Read as _;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The time limit after which a process counts as hanging.
const LIMIT: Duration = Duration::from_secs(60);

fn configured() -> Images {
    let images = Images::new();
    images.configure_pair(36 * MIB, 20 * MIB, "");
    std::fs::create_dir(images.path("run")).expect("a folder");
    images
}

fn listen(images: &Images, name: &str) -> (PathBuf, UnixListener) {
    let path = images.path("run").join(name);
    let listener = UnixListener::bind(&path).expect("a socket");
    (path, listener)
}

/// Returns the configured daemon's command with up to three descriptors of these names. A shell
/// receives them as its standard streams and renumbers them as `sd_listen_fds` expects.
fn given(images: &Images, names: &str, descriptors: Vec<OwnedFd>) -> Command {
    let config = images.path("config.toml");
    let daemon = Daemon::command(images, "run", &["--config", config.to_str().expect("text")]);
    let script =
        "exec 3<&0 4<&1 5<&2 0</dev/null >\"$OUT\" 2>\"$ERRORS\"; export LISTEN_PID=${FOR:-$$}; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(daemon.get_program()).args(daemon.get_args());
    command.envs(daemon.get_envs().filter_map(|(key, value)| Some((key, value?))));
    command.env("OUT", images.path("out")).env("ERRORS", images.path("errors"));
    command.env("LISTEN_FDS", descriptors.len().to_string()).env("LISTEN_FDNAMES", names);
    let mut streams = descriptors.into_iter().map(Stdio::from);
    let mut next = || streams.next().unwrap_or_else(Stdio::null);
    command.stdin(next()).stdout(next()).stderr(next());
    command
}

/// A daemon that is killed when this is dropped.
struct StartedDaemon<'a> {
    child: Child,
    images: &'a Images,
}

impl Drop for StartedDaemon<'_> {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

impl<'a> StartedDaemon<'a> {
    fn new(images: &'a Images, mut command: Command) -> Self {
        Self { child: command.spawn().expect("starts"), images }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.images.path("errors")).unwrap_or_default()
    }

    #[track_caller]
    fn until_ready(&self) {
        let started = Instant::now();
        while std::fs::read_to_string(self.images.path("out")).unwrap_or_default() != "ready\n" {
            assert!(started.elapsed() < LIMIT, "it is not ready: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it, and returns its exit status.
    #[track_caller]
    fn end(&mut self, signal: Option<Signal>) -> Option<i32> {
        if let Some(signal) = signal {
            let process = Pid::from_raw(i32::try_from(self.child.id()).expect("an id")).expect("not zero");
            rustix::process::kill_process(process, signal).expect("signals");
        }
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("waits") {
                return status.code();
            }
            assert!(started.elapsed() < LIMIT, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A control socket bound by another program outlives the daemon: that the socket accepts
/// connections does not mean that the daemon is running.
#[test]
fn a_stop_waits_for_the_daemon_and_not_for_its_socket() {
    let images = configured();
    let (control, socket) = listen(&images, "commands.sock");
    let passed = vec![socket.try_clone().expect("a second one").into()];
    let mut daemon = StartedDaemon::new(&images, given(&images, "control", passed));
    daemon.until_ready();
    let ran = bcached(&["stop", "--timeout", "20s", "--control", control.to_str().expect("text")]);
    assert_eq!(ran.exit, 0, "{}\n{}", ran.err, daemon.log());
    assert!(ran.out.contains("has stopped"), "{}", ran.out);
    assert_eq!(daemon.end(None), Some(0));
}

/// Clients that connect before the daemon runs are answered once it does, and again after another
/// daemon has taken its place.
#[test]
fn who_comes_before_the_daemon_waits_for_it() {
    if !requires("nbdinfo") {
        return;
    }
    let images = configured();
    let (nbd, control, monitor) =
        (listen(&images, "by.sock"), listen(&images, "commands.sock"), listen(&images, "look.sock"));
    let descriptors =
        || [&nbd.1, &control.1, &monitor.1].map(|socket| socket.try_clone().expect("a second one").into());
    for _turn in 0..2 {
        let _no_word_of_before = std::fs::remove_file(images.path("out"));
        let mut early = UnixStream::connect(&nbd.0).expect("somebody listens");
        early.set_read_timeout(Some(LIMIT)).expect("a limit");
        let mut daemon =
            StartedDaemon::new(&images, given(&images, "nbd:control:monitor", descriptors().into()));
        let mut greeting = [0; 8];
        early.read_exact(&mut greeting).expect("it is greeted");
        assert_eq!(&greeting, b"NBDMAGIC");
        daemon.until_ready();
        let size =
            run(tool("nbdinfo").arg("--size").arg(format!("nbd+unix:///tank?socket={}", nbd.0.display())));
        assert_eq!(size.out, "20963328\n", "{size:?}\n{}", daemon.log());
        let status =
            |socket: &PathBuf| bcached(&["status", "--json", "--control", socket.to_str().expect("text")]);
        let told = json(&status(&control.0).out);
        assert_eq!(told["nbd"], serde_json::json!([nbd.0]), "nowhere else: {told}");
        assert_eq!(status(&monitor.0).exit, 0);
        let stop = bcached(&["stop", "--control", monitor.0.to_str().expect("text")]);
        assert_ne!(stop.exit, 0, "there one may only look: {stop:?}");
        assert!(daemon.log().contains(&format!("commands on {}", control.0.display())), "{}", daemon.log());
        drop(early);
        assert_eq!(daemon.end(Some(Signal::TERM)), Some(0), "{}", daemon.log());
        for socket in [&nbd.0, &control.0, &monitor.0] {
            assert!(socket.exists(), "whoever has bound it keeps it");
        }
        for own in ["nbd.sock", "control.sock", "monitor.sock"] {
            assert!(!images.path("run").join(own).exists(), "{own} has no use");
        }
    }
}

/// Sockets that are not passed are created as usual.
#[test]
fn one_socket_alone_may_be_passed() {
    let images = configured();
    let (path, look) = listen(&images, "look.sock");
    let mut text = std::fs::read_to_string(images.path("config.toml")).expect("configured");
    text.push_str(&format!("[nbd]\nlisten = [{{ at = {path:?}, read_only = true }}]\n"));
    images.configure(&text);
    let mut daemon = StartedDaemon::new(&images, given(&images, "nbd", vec![look.into()]));
    daemon.until_ready();
    let control = images.path("run/control.sock");
    let status = bcached(&["status", "--json", "--control", control.to_str().expect("text")]);
    assert_eq!(json(&status.out)["nbd"], serde_json::json!([path]));
    if requires("nbdinfo") {
        let uri = format!("nbd+unix:///tank?socket={}", path.display());
        let is = run(tool("nbdinfo").args(["--is", "read-only", &uri]));
        assert_eq!(is.exit, 0, "it is what the configuration says of it: {is:?}");
    }
    assert_eq!(daemon.end(Some(Signal::TERM)), Some(0), "{}", daemon.log());
    assert!(path.exists() && !control.exists(), "each has removed its own");
}

#[test]
fn what_cannot_be_taken_ends_the_start_in_one_sentence() {
    let images = configured();
    let refuses = |names: &str, descriptors: Vec<OwnedFd>, sentence: &str| {
        let mut daemon = StartedDaemon::new(&images, given(&images, names, descriptors));
        assert_eq!(daemon.end(None), Some(2), "{names}: {}", daemon.log());
        let log = daemon.log();
        let last = log.lines().last().unwrap_or_default();
        assert!(last.contains(sentence), "{names}: {log}");
        assert!(!log.contains("event=cache-open") && !images.path("run/control.sock").exists(), "{log}");
    };
    let unix = |name: &str| {
        let _other_turn = std::fs::remove_file(images.path("run").join(name));
        OwnedFd::from(listen(&images, name).1)
    };
    let tcp = |address: &str| OwnedFd::from(TcpListener::bind(address).expect("a port"));
    let what = "that was passed (descriptor 3): ";
    refuses(
        "web",
        vec![unix("a")],
        &format!("cannot use the socket `web` {what}its purpose is unknown; name it `nbd`"),
    );
    refuses("", vec![unix("a")], &format!("cannot use the socket `` {what}its purpose is unknown"));
    let file = std::fs::File::open("/dev/null").expect("it is there");
    refuses("nbd", vec![file.into()], &format!("`nbd` {what}it is not a socket"));
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
    refuses("nbd", vec![datagrams.into()], &format!("`nbd` {what}it is not a listening stream socket"));
    let (one, _other) = UnixStream::pair().expect("a pair");
    refuses("nbd", vec![one.into()], &format!("`nbd` {what}it is not a listening stream socket"));
    refuses(
        "control",
        vec![tcp("127.0.0.1:0")],
        &format!("`control` {what}commands are accepted on unix sockets only"),
    );
    refuses(
        "monitor:monitor",
        vec![unix("a"), unix("b")],
        "(descriptor 4): another socket has this name already",
    );
    refuses(
        "nbd",
        vec![tcp("0.0.0.0:0")],
        "is not a loopback address, and NBD without TLS is open to every client that",
    );
    refuses("nbd:control", vec![unix("a")], "LISTEN_FDS and LISTEN_FDNAMES are invalid");

    // Sockets that were passed to another process are ignored.
    let mut command = given(&images, "web", vec![unix("a")]);
    command.env("FOR", "1");
    let _no_word_of_before = std::fs::remove_file(images.path("out"));
    let mut daemon = StartedDaemon::new(&images, command);
    daemon.until_ready();
    assert_eq!(daemon.end(Some(Signal::TERM)), Some(0), "{}", daemon.log());
}

/// systemd's own program, like systemd, starts the daemon when the first client connects.
#[test]
fn a_client_starts_the_daemon() {
    if !requires("systemd-socket-activate") || !requires("nbdinfo") {
        return;
    }
    let images = configured();
    let (socket, config) = (images.path("run/nbd.sock"), images.path("config.toml"));
    let serve = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    let mut command = tool("systemd-socket-activate");
    command.arg("--fdname=nbd").arg("--listen").arg(&socket);
    for (key, value) in serve.get_envs().filter_map(|(key, value)| Some((key, value?))) {
        let (key, value) = (key.to_str().expect("text"), value.to_str().expect("text"));
        command.arg(format!("--setenv={key}={value}"));
    }
    command.arg(serve.get_program()).args(serve.get_args());
    let [out, errors] =
        ["out", "errors"].map(|name| std::fs::File::create(images.path(name)).expect("a file"));
    command.stdin(Stdio::null()).stdout(out).stderr(errors);
    let mut daemon = StartedDaemon::new(&images, command);
    let started = Instant::now();
    while !socket.exists() {
        assert!(started.elapsed() < LIMIT, "it does not listen: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!images.path("run/control.sock").exists(), "nobody has come");
    let size =
        run(tool("nbdinfo").arg("--size").arg(format!("nbd+unix:///tank?socket={}", socket.display())));
    assert_eq!(size.out, "20963328\n", "{size:?}\n{}", daemon.log());
    daemon.until_ready();
    assert_eq!(daemon.end(Some(Signal::TERM)), Some(0), "{}", daemon.log());
}

/// The units use the names that the daemon expects.
#[test]
fn the_units_pass_what_the_daemon_takes() {
    let units = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd");
    for (unit, name, socket) in [
        ("bcached-nbd.socket", "nbd", "nbd.sock"),
        ("bcached-control.socket", "control", "control.sock"),
        ("bcached-monitor.socket", "monitor", "monitor.sock"),
    ] {
        let text = std::fs::read_to_string(format!("{units}/{unit}")).expect("it is there");
        for line in [
            format!("FileDescriptorName={name}"),
            format!("ListenStream=/run/bcached/{socket}"),
            "Service=bcached.service".to_owned(),
        ] {
            assert!(text.lines().any(|said| said == line), "{unit}: {line}");
        }
    }
}
