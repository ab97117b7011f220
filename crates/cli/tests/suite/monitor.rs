//! `monitor.sock`, for clients that may look but change nothing.

use crate::common::{self, CommandResult, Daemon, Images, bcached};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

fn served(images: &Images) -> Daemon {
    let (cache, backing) = images.pair(36 << 20, 20 << 20);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = \"{cache}\"\n[volume.tank]\nbacking = \"{backing}\"\ncache = \"fast\"\n"
    ));
    Daemon::configured(images)
}

fn on(socket: &Path, words: &[&str]) -> CommandResult {
    bcached(&[words, &["--control", socket.to_str().expect("text")]].concat())
}

/// Returns the answer to a request sent verbatim.
fn raw(socket: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("somebody listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    stream.write_all(request.as_bytes()).expect("it is read");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// The same with a body.
fn sent(socket: &Path, what: &str, body: &str) -> String {
    raw(socket, &format!("{what} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
}

#[test]
fn much_can_be_looked_at() {
    let images = Images::new();
    let daemon = served(&images);
    let (control, monitor) = (images.path("run/control.sock"), images.path("run/monitor.sock"));
    let mode = std::fs::metadata(&monitor).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let looks: [&[&str]; 8] = [
        &["status"],
        &["status", "--full", "--json"],
        &["list"],
        &["get", "tank", "cache_mode"],
        &["get", "fast"],
        &["explain", "tank", "0"],
        &["metrics"],
        &["events"],
    ];
    for words in looks {
        let (looked, asked) = (on(&monitor, words), on(&control, words));
        // That something is not cached is an answer, too.
        assert!(looked.exit < 2 && looked.exit == asked.exit, "{words:?}: {looked:?} {asked:?}");
        assert!(!looked.out.is_empty(), "{words:?}: {looked:?}");
    }
    assert!(on(&monitor, &["list"]).out.contains("tank"));
    assert_eq!(on(&monitor, &["wait", "tank", "--for", "served"]).exit, 0);
    assert_eq!(daemon.stop().0, 0);
    assert!(!monitor.exists(), "it goes with the daemon");
}

/// A regression: the daemon, which is root, looked up any path that a client of this socket named.
/// The answer revealed whether the file exists.
#[test]
fn a_path_is_only_what_it_says() {
    let images = Images::new();
    let _daemon = served(&images);
    let (control, monitor) = (images.path("run/control.sock"), images.path("run/monitor.sock"));
    for (device, words) in [("fast", &["get"][..]), ("tank", &["get"]), ("tank", &["explain"])] {
        let (path, link) = (images.path(device), images.path("link"));
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        let ask = |socket: &Path, path: &Path| {
            let more = if words == ["explain"] { &["0"][..] } else { &[] };
            on(socket, &[words, &[path.to_str().expect("text")], more].concat())
        };
        for (socket, path) in [(&control, &path), (&control, &link), (&monitor, &path)] {
            let ran = ask(socket, path);
            assert!(ran.exit < 2, "{words:?} {path:?}: {ran:?}");
        }
        let ran = ask(&monitor, &link);
        assert_eq!((ran.exit, ran.err.contains("is called")), (2, true), "{words:?}: {ran:?}");
        std::fs::remove_file(link).expect("it is there");
    }
}

#[test]
fn nothing_can_be_changed() {
    let images = Images::new();
    let daemon = served(&images);
    let (control, monitor) = (images.path("run/control.sock"), images.path("run/monitor.sock"));
    let changes: [&[&str]; 5] = [
        &["set", "tank", "cache_mode=writearound"],
        &["flush", "tank"],
        &["remove", "tank"],
        &["cancel", "1"],
        &["stop"],
    ];
    for words in changes {
        let refused = on(&monitor, words);
        assert_eq!(refused.exit, 4, "{words:?}: {refused:?}");
        assert!(refused.err.contains("this socket is read-only"), "{refused:?}");
    }
    let requests = [
        ("PATCH /v1/volumes/tank/options", "{\"set\":{\"cache_mode\":\"writearound\"}}"),
        ("PATCH /v1/caches/fast/options", "{\"set\":{\"congested_read_threshold_us\":\"7\"}}"),
        ("POST /v1/volumes/tank/options", "{\"set\":{\"cache_mode\":\"writearound\"}}"),
        ("PUT /v1/volumes/tank/options", "{\"set\":{\"cache_mode\":\"writearound\"}}"),
        ("POST /v1/jobs", "{\"verb\":\"remove\",\"volume\":\"tank\"}"),
        ("DELETE /v1/jobs/1", ""),
        ("POST /v1/stop", "{}"),
        ("POST /v1/status", "{}"),
        ("POST /v1/nothing", "{}"),
    ];
    for (what, body) in requests {
        let said = sent(&monitor, what, body);
        assert!(said.starts_with("HTTP/1.0 403 "), "{what}: {said}");
        assert!(said.contains("this socket is read-only"), "{what}: {said}");
    }
    // Two requests on one connection, the second after a body that is not read.
    let two = "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}POST /v1/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
    let said = raw(&monitor, two);
    assert!(said.starts_with("HTTP/1.1 200 ") && said.contains("bcached.jobs"), "{said}");
    assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "a connection is for one question: {said}");
    for what in ["/v1/stop", "/v1/config/differences", "/v1/nothing", "/"] {
        let said = sent(&monitor, &format!("GET {what}"), "");
        assert!(
            said.starts_with("HTTP/1.0 404 ") && said.contains("the read-only socket does not have"),
            "{said}"
        );
    }
    // A regression: the control socket's refusal had no message at all.
    for (what, next) in [("GET /v1/nothing", "/v1/nothing"), ("PUT /v1/jobs", "/v1/jobs")] {
        let said = sent(&control, what, "");
        assert!(
            said.starts_with("HTTP/1.0 404 ") && said.contains("unknown request: ") && said.contains(next),
            "{said}"
        );
    }
    let status = daemon.status();
    assert_eq!(
        (&status["state"], &status["volumes"][0]["cache_mode"]),
        (&"ready".into(), &"writeback".into())
    );
    let kept = on(&control, &["get", "fast", "congested_read_threshold_us"]);
    assert!(kept.exit == 0 && !kept.out.contains(" 7"), "{kept:?}");
}

/// Silent clients are disconnected, and others are answered; the control socket answers all the
/// time.
#[test]
fn the_silent_take_no_places_for_long() {
    let images = Images::new();
    let _daemon = served(&images);
    let (control, monitor) = (images.path("run/control.sock"), images.path("run/monitor.sock"));
    let mut silent: Vec<_> =
        (0..20).map(|_| UnixStream::connect(&monitor).expect("somebody listens")).collect();
    assert_eq!(on(&control, &["status"]).exit, 0);
    let started = Instant::now();
    while on(&monitor, &["status"]).exit != 0 {
        assert!(started.elapsed() < LIMIT, "nobody else is answered");
    }
    for stream in &mut silent {
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        let end = stream.read(&mut [0; 1]);
        assert!(
            matches!(&end, Ok(0))
                || matches!(&end, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset),
            "{end:?}"
        );
    }
}

/// The socket is only for looking: if it cannot be created, volumes are served all the same.
#[test]
fn a_daemon_starts_without_it() {
    let images = Images::new();
    std::fs::create_dir(images.path("run")).expect("a folder");
    std::fs::write(images.path("run/monitor.sock"), "a file of somebody").expect("a file");
    let daemon = served(&images);
    assert_eq!(on(&images.path("run/control.sock"), &["status"]).exit, 0);
    let (exit, log) = daemon.stop();
    assert_eq!((exit, log.contains("[event=monitor-failed]")), (0, true), "{log}");
    let left = std::fs::read_to_string(images.path("run/monitor.sock")).expect("it stays");
    assert_eq!(left, "a file of somebody");
}

/// Followers whose requests return at once ask at intervals.
#[test]
fn a_follower_that_may_not_wait_pauses() {
    let images = Images::new();
    let socket = images.path("monitor.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        let body =
            "{\"schema\":\"bcached.events\",\"schema_version\":1,\"daemon\":\"d\",\"events\":[],\"lost\":0}";
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            count.fetch_add(1, Ordering::SeqCst);
            let _asked = stream.read(&mut [0; 4096]);
            let _gone = stream.write_all(format!("HTTP/1.0 200 OK\r\n\r\n{body}").as_bytes());
        }
    });
    let mut command = common::program();
    command.args(["events", "--follow", "--control"]).arg(&socket);
    let mut child = command.stdout(Stdio::null()).spawn().expect("starts");
    let started = Instant::now();
    while asked.load(Ordering::SeqCst) < 4 {
        assert!(started.elapsed() < LIMIT, "it has asked {asked:?} times");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().expect("its own");
    child.wait().expect("ends");
    // A slow machine makes fewer requests.
    let seconds = usize::try_from(started.elapsed().as_secs()).expect("few");
    assert!((1..=10 * seconds).contains(&asked.load(Ordering::SeqCst)), "{asked:?} in {seconds} s");
}
