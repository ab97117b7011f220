//! What memory is asked for while serving: dirty pages of the kernel may wait for a request, and the kernel for them to give memory.
//!
//! The daemon runs in this process, with its threads, on a cache and a volume in files, and an NBD client asks it one thing after the other by
//! its unix socket. An allocator counts what any thread but the client's asks for meanwhile, and remembers from where.
//!
//! A request asks for none. What keeps the tree small, writes back and looks after devices does, now and then: [`KNOWN`] says how much that
//! comes to for each request, so that it does not become more unseen.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

mod common;

use bcached_daemon::config::CommandLine;
use bcached_uring::{Backend, DriverOptions, open_driver};
use common::{Images, run};
use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where the daemon of this process has its folder. Set: this is that process.
const FOLDER: &str = "BCACHED_ALLOCATIONS_IN";

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Requests of one kind.
const COUNT: u64 = 2000;
/// Kinds of requests, and in tenths how often memory may be asked for beside each: more than was counted, and so little more that one time for
/// each request would be too much.
///
/// Beside all of them the daemon looks after its caches and writes back, which has its own pace (174 to 550 times beside 2000 read hits). Overwrites
/// make leaves that are merged and written again (1564 times), new writes make leaves grow (276).
const KNOWN: [(&str, &[u16], Blocks, u64); 4] = [
    ("read hits", &[Client::READ], Blocks::Known, 9),
    ("overwrites", &[Client::WRITE], Blocks::Known, 24),
    ("new writes", &[Client::WRITE], Blocks::New, 9),
    ("overwrites and flushes", &[Client::WRITE, Client::FLUSH], Blocks::Known, 9),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Blocks {
    Known,
    New,
}

/// So many places are remembered of one kind of request.
const PLACES_MAX: usize = 100;
const LIMIT: Duration = Duration::from_secs(60);

struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicU64 = AtomicU64::new(0);
static PLACES: Mutex<Vec<Backtrace>> = Mutex::new(Vec::new());

thread_local! {
    /// What this thread asks for is not counted: the client's, and whoever is remembering a place.
    static IS_LEFT_OUT: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if !IS_COUNTING.load(Ordering::Relaxed) || IS_LEFT_OUT.get() {
        return;
    }
    ASKED.fetch_add(1, Ordering::Relaxed);
    IS_LEFT_OUT.set(true);
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    if places.len() < PLACES_MAX {
        places.push(Backtrace::force_capture());
    }
    drop(places);
    IS_LEFT_OUT.set(false);
}

// SAFETY: everything is the system's allocator's, which is called with what came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the trait's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static MEMORY: Counting = Counting;

/// What was asked for, and from where, while `work` ran.
fn counted(work: impl FnOnce()) -> (u64, String) {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ASKED.store(0, Ordering::SeqCst);
    IS_COUNTING.store(true, Ordering::SeqCst);
    work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    let mut places = BTreeMap::<String, u32>::new();
    for place in PLACES.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let frames = place.to_string();
        let ours = frames.lines().filter_map(|line| line.split_once("crates/")).map(|(_, place)| place);
        let ours: Vec<_> = ours.filter(|place| !place.starts_with("cli/")).take(3).collect();
        *places.entry(ours.join(" < ")).or_default() += 1;
    }
    let text = places.iter().map(|(place, times)| format!("  {times} of the first {PLACES_MAX}: {place}\n"));
    (ASKED.load(Ordering::SeqCst), text.collect())
}

/// A client that asks one thing after the other, and itself asks for no memory.
struct Client {
    stream: UnixStream,
    block: [u8; BLOCK],
}

impl Client {
    const READ: u16 = 0;
    const WRITE: u16 = 1;
    const FLUSH: u16 = 3;

    /// In the volume `tank`, without structured replies; an error, as long as that is not served.
    fn connect(socket: &Path) -> std::io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.read_exact(&mut [0; 18])?;
        let mut hello = Vec::from(3_u32.to_be_bytes());
        hello.extend_from_slice(b"IHAVEOPT");
        hello.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 4]);
        hello.extend_from_slice(b"tank");
        stream.write_all(&hello)?;
        stream.read_exact(&mut [0; 10])?;
        Ok(Self { stream, block: [7; BLOCK] })
    }

    fn ask(&mut self, kind: u16, block: u64) {
        let bytes = if kind == Self::FLUSH { 0 } else { BLOCK };
        let offset = if kind == Self::FLUSH { 0 } else { block * BLOCK as u64 };
        let mut request = [0; 28 + BLOCK];
        request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        request[6..8].copy_from_slice(&kind.to_be_bytes());
        request[16..24].copy_from_slice(&offset.to_be_bytes());
        request[24..28].copy_from_slice(&u32::try_from(bytes).expect("small").to_be_bytes());
        request[28..].copy_from_slice(&self.block);
        let sent = if kind == Self::WRITE { 28 + BLOCK } else { 28 };
        self.stream.write_all(&request[..sent]).expect("it takes it");
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).expect("it answers");
        assert_eq!(reply[4..8], [0; 4], "it is no error");
        if kind == Self::READ {
            self.stream.read_exact(&mut self.block).expect("it reads");
        }
    }

    /// One of each kind for every block, in an order that is no stream.
    fn ask_all(&mut self, kinds: &[u16], from: u64, count: u64) {
        for n in 0..count {
            // A prime that divides no count here.
            let block = from + n * 7919 % count;
            kinds.iter().for_each(|kind| self.ask(*kind, block));
        }
    }
}

/// Of one kind of request.
struct Found {
    name: &'static str,
    asked: u64,
    asked_max: u64,
    places: String,
}

/// What the process does that has a folder for its daemon.
fn serve_and_count(folder: &Path) -> Vec<Found> {
    IS_LEFT_OUT.set(true);
    let line = CommandLine {
        config: Some(folder.join("config.toml")),
        control: Some(folder.join("run/control.sock")),
        ..CommandLine::default()
    };
    let daemon = std::thread::spawn(move || bcached_daemon::serve(line));
    let socket = folder.join("run/nbd.sock");
    let started = Instant::now();
    let mut client = loop {
        assert!(started.elapsed() < LIMIT && !daemon.is_finished(), "it does not serve");
        match Client::connect(&socket) {
            Ok(client) => break client,
            Err(_not_yet) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // Warm: what grows once has grown.
    client.ask_all(&[Client::WRITE], 0, 4 * COUNT);
    for kinds in [&[Client::READ][..], &[Client::WRITE], &[Client::WRITE, Client::FLUSH]] {
        client.ask_all(kinds, 0, COUNT);
    }
    let mut found = Vec::new();
    for (name, kinds, blocks, tenths_max) in KNOWN {
        let from = if blocks == Blocks::New { 4 * COUNT } else { 0 };
        let (asked, places) = counted(|| client.ask_all(kinds, from, COUNT));
        found.push(Found { name, asked, places, asked_max: COUNT * tenths_max / 10 });
    }
    drop(client);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM).expect("signals");
    daemon.join().expect("no panic").expect("an orderly stop");
    found
}

#[test]
fn no_more_is_asked_for_while_serving_than_is_known() {
    if let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) {
        let found = serve_and_count(&folder);
        for Found { name, asked, places, .. } in &found {
            println!("{name}: memory asked for {asked} times in {COUNT}\n{places}");
        }
        assert!(found.iter().all(|found| found.asked <= found.asked_max), "more than is known");
        return;
    }
    let opened = open_driver(&DriverOptions::default()).expect("a driver");
    if !matches!(opened.backend, Backend::Uring { .. }) {
        println!("skipped: no io_uring, by which requests are counted: {}", opened.backend);
        return;
    }
    drop(opened);
    let images = Images::new();
    images.configure_pair(256 * MIB, 256 * MIB, "sequential_cutoff = 0\n");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let words = ["--exact", "no_more_is_asked_for_while_serving_than_is_known", "--nocapture"];
    command.args(words).env(FOLDER, images.path(""));
    command.env("BCACHED_NOTES", images.path("run")).env("BCACHED_STATE", images.path("state"));
    let ran = run(&mut command);
    assert_eq!(ran.exit, 0, "{}\n{}", ran.out, ran.err);
}
