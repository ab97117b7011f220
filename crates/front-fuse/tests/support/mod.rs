//! A server over a memory-backed engine, behind a real mount.
#![allow(dead_code, reason = "each test file uses its part")]

use bcached_front_fuse::{ControlTree, FuseServer, Limits, Options, StartError};
use bcached_port::ram::{Hook, RamServer, Verdict};
use bcached_port::{BudgetPool, Export, ExportTable, VolumeId};
use rustix::mount::UnmountFlags;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

pub const TANK: VolumeId = VolumeId(1);
pub const ARCHIVE: VolumeId = VolumeId(2);
pub const TANK_SECTORS: u64 = 32 << 11;
pub const TANK_BYTES: u64 = TANK_SECTORS * 512;
/// Time limit for anything a test waits for; nothing here takes nearly as long.
pub const LIMIT: Duration = Duration::from_secs(120);

pub const EPERM: i32 = 1;
pub const EIO: i32 = 5;
pub const ENXIO: i32 = 6;
pub const EINVAL: i32 = 22;
pub const ENOSPC: i32 = 28;
pub const EROFS: i32 = 30;
pub const ENOTCONN: i32 = 107;
pub const ESHUTDOWN: i32 = 108;
pub const ETIMEDOUT: i32 = 110;

/// Whether the kernel lets us mount. If not, the test counts as skipped and should return.
#[must_use = "a test that cannot mount has to return"]
pub fn can_mount() -> bool {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        skip(&format!("/dev/fuse cannot be opened: {error}"));
        return false;
    }
    let may = rustix::process::geteuid().is_root() || program("fusermount3").is_some();
    if !may {
        skip("not root, and fusermount3 is not installed (package fuse3)");
    }
    may
}

/// Prints the line that makes a test count as skipped.
pub fn skip(reason: &str) {
    println!("skipped: {reason}");
}

pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|candidate| candidate.is_file())
}

/// Two mounted volumes: "tank" (32 MiB, blocks of 8 KiB) and "archive" (1 MiB, read-only).
pub struct TestServer {
    // The first field, so that it is dropped first: then nothing waits for an engine that is gone.
    pub server: Option<FuseServer>,
    pub ram: RamServer,
    pub exports: ExportTable,
    directory: tempfile::TempDir,
    _watchdog: Sender<()>,
}

/// Cuts the mount off after a while. A program that waits for an answer of the mount would wait
/// forever, and cannot even be killed if it is the one that serves the mount. After the cut its
/// requests fail.
fn watch(directory: PathBuf) -> Sender<()> {
    let (alive, dead) = channel();
    std::thread::spawn(move || {
        if dead.recv_timeout(2 * LIMIT) == Err(RecvTimeoutError::Timeout) {
            println!("the mount is cut off: something waits for too long");
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(&directory, flags).expect("we have mounted it");
        }
    });
    alive
}

pub fn serve() -> TestServer {
    serve_with(Limits::default(), Box::new(|_, _| Verdict::Serve), Vec::new())
}

pub fn serve_hooked(hook: Hook) -> TestServer {
    serve_with(Limits::default(), hook, Vec::new())
}

pub fn serve_with(limits: Limits, hook: Hook, trees: Vec<(String, Arc<dyn ControlTree>)>) -> TestServer {
    serve_by(hook, |directory, exports| {
        let options = Options { directory: directory.to_owned(), allow_other: false, limits };
        FuseServer::start(options, exports, trees)
    })
}

/// Serves with memory that is shared with others.
pub fn serve_sharing(memory: Arc<BudgetPool>) -> TestServer {
    serve_by(Box::new(|_, _| Verdict::Serve), |directory, exports| {
        let options =
            Options { directory: directory.to_owned(), allow_other: false, limits: Limits::default() };
        FuseServer::start_sharing(options, exports, Vec::new(), memory)
    })
}

fn serve_by(
    hook: Hook,
    start: impl FnOnce(&Path, ExportTable) -> Result<FuseServer, StartError>,
) -> TestServer {
    let ram = RamServer::start_with(&[(TANK, TANK_SECTORS), (ARCHIVE, 2048)], 64, hook);
    let exports = table(&ram);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let server = start(directory.path(), exports.clone()).expect("starts");
    let watchdog = watch(directory.path().to_owned());
    TestServer { server: Some(server), ram, exports, directory, _watchdog: watchdog }
}

pub fn table(ram: &RamServer) -> ExportTable {
    let exports = ExportTable::new();
    exports.insert(tank(ram));
    exports.insert(Export { read_only: true, ..ram.export("archive", ARCHIVE, 2048) });
    exports
}

pub fn tank(ram: &RamServer) -> Export {
    Export { label: "fast".to_owned(), block_sectors: 16, ..ram.export("tank", TANK, TANK_SECTORS) }
}

impl TestServer {
    pub fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub fn tank(&self) -> PathBuf {
        self.path("volumes/tank")
    }

    pub fn open(&self) -> File {
        open(&self.tank()).expect("opens")
    }

    pub fn server(&self) -> &FuseServer {
        self.server.as_ref().expect("runs")
    }

    /// Ends the server, which no client may be using.
    pub fn end(mut self) {
        let server = self.server.take().expect("runs");
        assert_eq!(server.shutdown(LIMIT), Ok(()));
        assert!(!is_mounted(self.directory.path()));
    }
}

pub fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

pub fn is_mounted(directory: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("there is a /proc");
    let place = directory.to_str().expect("a plain name");
    table.lines().any(|line| line.split(' ').nth(4) == Some(place))
}

pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.expect_err("it must fail").raw_os_error().expect("an error of the system")
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
