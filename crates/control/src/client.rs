//! The client of the control API: one request, one answer, with limits on both time and size.
//!
//! It uses HTTP/1.0 on purpose: the answer ends with the connection, so only the head needs
//! parsing.

use super::{REQUEST_BYTES_MAX, too_long};
use crate::connect::{connect_now, monitor_beside};
use crate::deadline::{AWAITED, boot_millis, millis};
use crate::failure::{Failure, Kind};
use rustix::io::Errno;
use rustix::process::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a request, from connecting to the last byte. A daemon answers much faster unless
/// its machine is in trouble.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Pause between attempts to connect while the listener's backlog is full.
const PAUSE: Duration = Duration::from_millis(20);

/// Pause before a request is repeated after the answer that the daemon is busy.
const BUSY_PAUSE: Duration = Duration::from_millis(500);

/// Longest answer. The status of hundreds of volumes is much shorter.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Sends `GET path` to the daemon that listens on `socket`, and returns the body of the answer.
///
/// # Errors
/// - [`Kind::NoDaemon`] if no process listens on the socket.
/// - [`Kind::TimeLimit`] if a process listens and does not answer.
/// - [`Kind::Busy`] if too many other requests are in progress for the whole time.
/// - [`Kind::Permission`] if the caller may not connect.
/// - The failure that the daemon reports.
pub fn get(socket: &Path, path: &str) -> Result<String, Failure> {
    get_until(socket, path, None)
}

/// The same, with an end of the wait: the answer must arrive before `until`.
///
/// # Errors
/// As [`get`].
pub fn get_until(socket: &Path, path: &str, until: Option<Instant>) -> Result<String, Failure> {
    ask(socket, &Request { method: "GET", path, body: "", until })
}

/// Sends `PATCH path` with a JSON `body`. After [`Kind::TimeLimit`] the change still takes effect
/// if the daemon had begun it by then.
///
/// # Errors
/// As [`get`].
pub fn patch(socket: &Path, path: &str, body: &str) -> Result<String, Failure> {
    ask(socket, &Request { method: "PATCH", path, body, until: None })
}

/// Parses the body of an answer.
///
/// # Errors
/// The daemon's format differs from what this program knows.
pub fn understood<T: DeserializeOwned>(body: &str) -> Result<T, Failure> {
    serde_json::from_str(body).map_err(|error| {
        Failure::new(Kind::Io, "cannot understand the daemon's answer")
            .why(error.to_string())
            .next("the daemon may have another version than this program (see `bcached version`)")
    })
}

/// Sends `POST path` with a JSON `body`. After [`Kind::TimeLimit`] the work is still done if the
/// daemon had begun it by then.
///
/// # Errors
/// As [`get`].
pub fn post(socket: &Path, path: &str, body: &str) -> Result<String, Failure> {
    ask(socket, &Request { method: "POST", path, body, until: None })
}

/// Sends `DELETE path`.
///
/// # Errors
/// As [`get`].
pub fn delete(socket: &Path, path: &str) -> Result<String, Failure> {
    ask(socket, &Request { method: "DELETE", path, body: "", until: None })
}

/// Serialises the body of a request.
///
/// # Errors
/// It cannot be written as JSON.
pub fn body(request: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(request)
        .map_err(|error| Failure::new(Kind::Io, "cannot build the request").why(error.to_string()))
}

/// Encodes `text` as one segment of a path.
#[must_use]
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

struct Request<'a> {
    method: &'a str,
    path: &'a str,
    /// JSON, or empty.
    body: &'a str,
    /// The caller's own end of the wait.
    until: Option<Instant>,
}

impl Request<'_> {
    const fn changes(&self) -> bool {
        !matches!(self.method.as_bytes(), b"GET")
    }

    /// Formats the request as it is sent. `deadline` is the end of the wait for the answer.
    fn text(&self, deadline: Instant) -> String {
        let Self { method, path, body, .. } = self;
        let mut head = format!("{method} {path} HTTP/1.0\r\nHost: bcached\r\nAccept: application/json\r\n");
        if self.changes() {
            let left = deadline.saturating_duration_since(Instant::now());
            head.push_str(&format!("{AWAITED}: {}\r\n", boot_millis().saturating_add(millis(left))));
        }
        if !body.is_empty() {
            head.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
        }
        format!("{head}\r\n{body}")
    }
}

/// Sends the request, and repeats it until the time limit if the daemon answers that it is busy. In
/// that case the daemon has started nothing.
fn ask(socket: &Path, request: &Request<'_>) -> Result<String, Failure> {
    // The daemon would refuse it, too, and may close the connection before all of it has been sent.
    if request.path.len() + request.body.len() > REQUEST_BYTES_MAX {
        return Err(too_long());
    }
    let limit = Instant::now() + TIME_LIMIT;
    let deadline = request.until.map_or(limit, |until| until.min(limit));
    let mut was_busy = None;
    loop {
        match (ask_once(socket, request, deadline), was_busy.take()) {
            (Err(failure), _) if failure.kind == Kind::Busy && Instant::now() + 2 * BUSY_PAUSE < deadline => {
                was_busy = Some(failure);
                thread::sleep(BUSY_PAUSE);
            }
            // The daemon answers and says that it is busy, which is more useful than the client's
            // own time limit.
            (Err(failure), Some(busy)) if failure.kind == Kind::TimeLimit => return Err(busy),
            (outcome, _) => return outcome,
        }
    }
}

fn ask_once(socket: &Path, request: &Request<'_>, deadline: Instant) -> Result<String, Failure> {
    let ask = || {
        exchange(socket, request, deadline).map_err(|error| unreachable(socket, &error, request.changes()))
    };
    let mut answer = ask()?;
    if answer.is_empty() && !request.changes() {
        // The process that accepted the connection has ended, perhaps because another one has taken
        // over.
        answer = ask()?;
    }
    if answer.is_empty() {
        return Err(Failure::new(Kind::NoDaemon, format!("no daemon answers on {}", socket.display()))
            .why("it ended before it answered"));
    }
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| not_understood(socket))?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        Some(status) => {
            let said = serde_json::from_str(body).ok().and_then(|object| Failure::from_json(&object));
            Err(said.unwrap_or_else(|| {
                Failure::new(Kind::Io, format!("the daemon on {} refused the request", socket.display()))
                    .why(format!("HTTP status {status} for {}", request.path))
                    .next("the daemon may have another version than this program (see `bcached version`)")
            }))
        }
        None => Err(not_understood(socket)),
    }
}

/// Why there was no answer.
enum RequestError {
    /// No process listens, or what it sent cannot be understood.
    Failed(io::Error),
    /// A process listens and does not answer; its process id, if it could be determined.
    TimeLimit(Option<i32>),
}

fn exchange(socket: &Path, request: &Request<'_>, deadline: Instant) -> Result<String, RequestError> {
    let mut stream = connect(socket, deadline)?;
    let process = listener(&stream).map(|process| process.as_raw_nonzero().get());
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => RequestError::TimeLimit(process),
        _ => RequestError::Failed(error),
    };
    // A timeout of zero would mean no timeout.
    let left = || Some(deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
    stream.set_write_timeout(left()).map_err(failed)?;
    stream.write_all(request.text(deadline).as_bytes()).map_err(failed)?;
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    while answer.len() < ANSWER_BYTES_MAX {
        stream.set_read_timeout(left()).map_err(failed)?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&part[..count]),
            // This process was stopped and continued. With a timeout set, the kernel does not
            // restart the call.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    String::from_utf8(answer).map_err(|_| RequestError::Failed(io::ErrorKind::InvalidData.into()))
}

fn connect(socket: &Path, deadline: Instant) -> Result<UnixStream, RequestError> {
    loop {
        match connect_now(socket) {
            Ok(stream) => return Ok(stream),
            Err(Errno::AGAIN) if Instant::now() >= deadline => return Err(RequestError::TimeLimit(None)),
            Err(Errno::AGAIN) => thread::sleep(PAUSE),
            Err(error) => return Err(RequestError::Failed(error.into())),
        }
    }
}

/// Returns the id of the process that listens on `socket`, if it is visible from here.
#[must_use]
pub fn process(socket: &Path) -> Option<Pid> {
    listener(&connect(socket, Instant::now() + TIME_LIMIT).ok()?)
}

fn listener(stream: &UnixStream) -> Option<Pid> {
    rustix::net::sockopt::socket_peercred(stream).ok().map(|peer| peer.pid)
}

fn unreachable(socket: &Path, cause: &RequestError, changes: bool) -> Failure {
    let error = match cause {
        RequestError::Failed(error) => error,
        RequestError::TimeLimit(process) => return time_limit(socket, *process, changes),
    };
    let what = format!("no daemon answers on {}", socket.display());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Failure::new(Kind::NoDaemon, what)
            .why(if error.kind() == io::ErrorKind::NotFound {
                "there is no such socket"
            } else {
                "no process listens on it"
            })
            .next("start `bcached serve`, or name its socket with --control"),
        io::ErrorKind::PermissionDenied => not_for_you(socket),
        _ => Failure::new(Kind::NoDaemon, what).why(error.to_string()),
    }
}

/// The failure of a client that lacks permission for `socket`. It names the read-only socket beside
/// the control socket, which more users may open, unless `socket` was that one.
fn not_for_you(socket: &Path) -> Failure {
    let failure = Failure::new(Kind::Permission, "cannot ask the daemon");
    let beside = monitor_beside(socket);
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if name(socket).is_some_and(|name| name.ends_with("monitor.sock") || name.ends_with(".monitor")) {
        return failure
            .why(format!("{} is for its owner and its group", socket.display()))
            .next("run this as the user that runs the daemon (root), or as a member of that group");
    }
    failure.why(format!("{} is for its owner only", socket.display())).next(format!(
        "run this as the user that runs the daemon (root); its group can read with `--control {}` \
         (status, list, get, explain, events, metrics, top, wait)",
        beside.display()
    ))
}

fn time_limit(socket: &Path, process: Option<i32>, changes: bool) -> Failure {
    let (socket, limit) = (socket.display(), TIME_LIMIT.as_secs());
    let wake = process.map_or_else(String::new, |id| format!(" (`kill -CONT {id}`)"));
    let again = match changes {
        true => "then check whether it has begun the request: after this time limit, it does not begin it",
        false => "try again later",
    };
    Failure::new(Kind::TimeLimit, format!("the daemon on {socket} has not answered for {limit} s"))
        .why("its process is stopped, or its machine is too busy")
        .next(format!("continue its process if it is stopped{wake}, or wait; {again}"))
}

fn not_understood(socket: &Path) -> Failure {
    Failure::new(Kind::NoDaemon, format!("the process that listens on {} is not bcached", socket.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a repeated request times out, the client reports the daemon's earlier answer that it is
    /// busy.
    #[test]
    fn a_daemon_that_was_busy_is_said_to_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        let daemon = thread::spawn(move || {
            let (mut first, _) = listener.accept().expect("it asks");
            let mut asked = [0; 4096];
            let _all = first.read(&mut asked).expect("it asks");
            let busy = Failure::new(Kind::Busy, "too many ask").to_json();
            write!(first, "HTTP/1.0 503 Service Unavailable\r\n\r\n{busy}").expect("it listens");
            drop(first);
            // The second request is never answered.
            listener.accept().expect("it asks again")
        });
        let failure = get(&socket, "/v1/status").expect_err("nobody answers");
        assert_eq!((failure.kind, &*failure.what), (Kind::Busy, "too many ask"));
        drop(daemon.join());
    }

    /// A read-only request is repeated with the next process if the first one ends without an
    /// answer. The second of two clients that requested a take-over was once told that no daemon
    /// answers.
    #[test]
    fn who_only_looks_asks_the_next_process_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        let daemon = thread::spawn(move || {
            for answer in ["", "HTTP/1.0 200 OK\r\n\r\nhere", ""] {
                let (mut asked, _) = listener.accept().expect("it asks");
                let _all = asked.read(&mut [0; 4096]).expect("it asks");
                asked.write_all(answer.as_bytes()).expect("it listens");
            }
        });
        assert_eq!(get(&socket, "/v1/status").expect("the second answers"), "here");
        // A request that changes something is not repeated: it may have been carried out.
        let failure = post(&socket, "/v1/stop", "{}").expect_err("nobody answers");
        assert_eq!(failure.kind, Kind::NoDaemon);
        daemon.join().expect("it was asked three times");
    }

    /// A request that is too long is refused before it is sent, with a message that says so. The
    /// daemon used to answer with HTTP status 413, and the client advised to compare versions.
    #[test]
    fn what_is_too_long_is_said_to_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let long = "x".repeat(100_000);
        let asked = patch(&folder.path().join("nobody"), "/v1/volumes/a/options", &long);
        let named = get(&folder.path().join("nobody"), &format!("/v1/volumes/{long}/options"));
        for failure in [asked, named].map(|said| said.expect_err("it is not sent")) {
            assert_eq!((failure.kind, &*failure.what), (Kind::Usage, "the request is too long"));
            assert!(failure.why.is_some() && failure.next.is_some(), "{failure}");
        }
    }

    /// A user that may not use the control socket is told of the read-only one.
    #[test]
    fn who_may_not_ask_is_told_where_he_may_look() {
        let error = || RequestError::Failed(io::ErrorKind::PermissionDenied.into());
        let told = |socket: &str| unreachable(Path::new(socket), &error(), false).to_string();
        let control = told("/run/bcached/control.sock");
        assert!(control.contains("for its owner only") && control.contains("status, "), "{control}");
        assert!(control.contains("`--control /run/bcached/monitor.sock`"), "{control}");
        let monitor = told("/run/bcached/monitor.sock");
        assert!(monitor.contains("its owner and its group") && !monitor.contains("--control"), "{monitor}");
    }
}
