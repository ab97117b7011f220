//! How much of the daemon's time read-only clients can take.

use super::connection_limit::{self, LimitedListener};
use super::*;
use axum::Router;
use bcached_control::failure::{Failure, Kind};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// Work that ends once the gate is opened.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    /// Begun and not ended.
    inside: AtomicUsize,
    peak: AtomicUsize,
    /// Work that an engine was asked for and has not done.
    begun: Arc<Mutex<Vec<admission::WorkPermit>>>,
}

impl Gate {
    fn pass(&self) {
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(inside, Ordering::SeqCst);
        let is_open = self.is_open.lock().unwrap();
        let waited = self.opened.wait_timeout_while(is_open, LIMIT, |is_open| !*is_open).unwrap();
        assert!(!waited.1.timed_out());
        drop(waited);
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    #[track_caller]
    fn wait_for(&self, inside: usize) {
        let started = Instant::now();
        while self.inside.load(Ordering::SeqCst) != inside {
            assert!(started.elapsed() < LIMIT, "{} are inside", self.inside.load(Ordering::SeqCst));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn no<T>() -> Result<T, Failure> {
    Err(Failure::new(Kind::No, "not here"))
}

/// Handlers whose list of jobs passes the gate, as does a wait for events.
fn gated(gate: &Arc<Gate>) -> Handlers {
    let begun = Arc::clone(&gate.begun);
    let (jobs, events) = (Arc::clone(gate), Arc::clone(gate));
    Handlers {
        status: Box::new(|_| unreachable!("nobody asks")),
        options: Box::new(|_, _| no()),
        change: Box::new(|_, _, _, _| no()),
        begin: Box::new(|_, _| no()),
        jobs: Box::new(move || {
            jobs.pass();
            no()
        }),
        job: Box::new(|_| no()),
        cancel: Box::new(|_, _, _| no()),
        explain: Box::new(move |_, _, work| {
            begun.lock().unwrap().push(work);
            no()
        }),
        differences: Box::new(no),
        events: Box::new(move |_, waits| {
            if waits {
                events.pass();
            }
            no()
        }),
        stop: Box::new(|_, _| no()),
        stopped: Box::new(no),
        take_over: Box::new(|_, _| no()),
        taken_over: Box::new(no),
    }
}

/// Opens a read-only socket for as long as the folder exists.
fn monitor(gate: &Arc<Gate>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("monitor.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let routes: Router = routes::to_look(Arc::new(gated(gate)));
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            axum::serve(LimitedListener::new(listener, 64, connection_limit::TIMEOUTS), routes)
                .await
                .unwrap();
        });
    });
    (folder, path)
}

fn asking(path: &PathBuf, what: &str) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(format!("GET {what} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    stream
}

fn answer(mut stream: UnixStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Opens a control socket for as long as the folder exists.
fn whole() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let routes = routes::router(Arc::new(gated(&Arc::default())));
            let service = routes.into_make_service_with_connect_info::<routes::Peer>();
            let (_again, next) = tokio::sync::mpsc::unbounded_channel();
            axum::serve(listener::ReplaceableListener::new((listener, next)).unwrap(), service)
                .await
                .unwrap();
        });
    });
    (folder, path)
}

/// Any request that cannot be received gets a refusal in bcached's own form.
#[test]
fn what_cannot_be_taken_is_refused_in_our_words() {
    let (_folder, path) = whole();
    for (length, what) in [(100_000, "the request is too long"), (9, "the request is invalid")] {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "POST /v1/stop HTTP/1.0\r\nContent-Length: {length}\r\n\r\n").unwrap();
        let _it_may_have_heard_enough = stream.write_all(&vec![b'x'; length]);
        let said = answer(stream);
        assert!(said.starts_with("HTTP/1.0 400") && said.contains(what), "{said}");
        assert!(said.contains("\"next\":"), "{said}");
    }
}

/// A request whose client has given up waiting is not begun. A daemon that had been stopped for a
/// while once carried out such requests.
#[test]
fn what_nobody_waits_for_any_more_is_not_begun() {
    let (_folder, path) = whole();
    let said = |until: &str, what: &str| {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "POST {what} HTTP/1.0\r\n{until}Content-Length: 2\r\n\r\n{{}}").unwrap();
        answer(stream)
    };
    let passed = said("Bcached-Awaited-Until: 1\r\n", "/v1/stop");
    assert!(passed.contains("no client waits for the answer any more"), "{passed}");
    for until in ["", "Bcached-Awaited-Until: 18446744073709551615\r\n"] {
        let asked = said(until, "/v1/stop");
        assert!(asked.contains("not here"), "{asked}");
    }
    let failure = bcached_control::client::post(&path, "/v1/stop", "{}").expect_err("the handlers say no");
    assert_eq!(failure.kind, Kind::No, "the command says until when it waits");
}

/// Work goes on after its client hangs up, and keeps its permit; no more is begun than there are
/// permits.
#[test]
fn who_asks_and_hangs_up_takes_no_more_than_the_permits() {
    let gate = Arc::<Gate>::default();
    let (_folder, path) = monitor(&gate);
    let mut taken = 0;
    while taken < 16 {
        let asked = asking(&path, "/v1/jobs");
        taken += 1;
        gate.wait_for(taken);
        drop(asked);
    }
    for _ in 0..40 {
        let said = answer(asking(&path, "/v1/jobs"));
        assert!(said.contains("retry-after: 1") && said.contains("\"kind\":\"busy\""), "{said}");
        assert!(
            said.starts_with("HTTP/1.0 503") && said.contains("16 other requests are being answered"),
            "{said}"
        );
        drop(asking(&path, "/v1/jobs"));
    }
    assert_eq!(gate.peak.load(Ordering::SeqCst), 16);
    gate.open();
    gate.wait_for(0);
    let said = answer(asking(&path, "/v1/jobs"));
    assert!(said.contains("not here"), "{said}");
}

/// A few clients may wait for events here. The others are answered at once, and no permit stays
/// taken.
#[test]
fn a_few_wait_for_events() {
    let gate = Arc::<Gate>::default();
    let (_folder, path) = monitor(&gate);
    let waiting: Vec<_> = (1..=4)
        .map(|inside| {
            let asked = asking(&path, "/v1/events?after=1&wait=true");
            gate.wait_for(inside);
            asked
        })
        .collect();
    for _ in 0..40 {
        let said = answer(asking(&path, "/v1/events?after=1&wait=true"));
        assert!(said.contains("not here"), "{said}");
    }
    assert_eq!(gate.peak.load(Ordering::SeqCst), 4);
    gate.open();
    assert!(waiting.into_iter().all(|asked| answer(asked).contains("not here")));
}

/// The work of engines for read-only clients is bounded even if no client waits for it. The permit
/// was once released when the client gave up, although the engine went on, so that the next client
/// began more.
#[test]
fn what_an_engine_does_for_read_only_clients_is_bounded_though_nobody_waits_for_it() {
    let gate = Arc::<Gate>::default();
    let (_folder, path) = monitor(&gate);
    let explain = || answer(asking(&path, "/v1/volumes/v/explain?offset=0"));
    for _ in 0..4 {
        assert!(explain().contains("not here"), "the handler gives up waiting");
    }
    let said = explain();
    assert!(said.starts_with("HTTP/1.0 503") && said.contains("for 4 other requests"), "{said}");
    let full = answer(asking(&path, "/v1/status?full=true"));
    assert!(full.starts_with("HTTP/1.0 503"), "{full}");
    gate.open();
    assert!(answer(asking(&path, "/v1/jobs")).contains("not here"), "the rest is answered");
    assert_eq!(gate.begun.lock().unwrap().len(), 4);
    gate.begun.lock().unwrap().clear();
    assert!(explain().contains("not here"), "it is done");
}

/// A client that finds the socket busy for a moment is told so, and asks again.
#[test]
fn a_client_asks_a_busy_daemon_again() {
    let gate = Arc::<Gate>::default();
    let (_folder, path) = monitor(&gate);
    let taken: Vec<_> = (1..=16)
        .map(|inside| {
            let asked = asking(&path, "/v1/jobs");
            gate.wait_for(inside);
            asked
        })
        .collect();
    let asks = std::thread::spawn(move || bcached_control::client::get(&path, "/v1/jobs"));
    std::thread::sleep(Duration::from_millis(100));
    gate.open();
    assert!(taken.into_iter().all(|asked| answer(asked).contains("not here")));
    assert_eq!(asks.join().unwrap().unwrap_err().kind, Kind::No);
}
