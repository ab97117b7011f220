//! A server over memory-backed volumes, and a guest with its VMM: the other side of vhost-user-blk,
//! as small as possible and able to misbehave.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod guest;
pub mod open_resources;
#[path = "../../../front-nbd/tests/support/ring.rs"]
pub mod ring;
pub mod vmm;

use bcached_front_vhost::{GuestBlockSize, Limits, Options, VhostServer, VolumeOptions, VolumeRings};
use bcached_port::ram::{Hook, RamServer, Verdict};
use bcached_port::{Export, ExportTable, Operation, VolumeId};
use guest::{GuestRequest, OUT};
use ring::TestRing;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub const TANK: VolumeId = VolumeId(1);
pub const ARCHIVE: VolumeId = VolumeId(2);
pub const TANK_SECTORS: u64 = 64 << 11;
pub const QUEUES: u16 = 4;
/// Time limit for anything a test waits for; nothing here takes nearly as long.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Two volumes, "tank" (64 MiB, writable, blocks of 4 KiB) and "archive" (1 MiB, read-only), each
/// with a socket.
pub struct TestServer {
    pub ram: RamServer,
    pub exports: ExportTable,
    pub server: Option<VhostServer>,
    /// The ring that serves the disks; `None` if their own threads do.
    pub ring: Option<TestRing>,
    pub directory: tempfile::TempDir,
}

pub fn serve() -> TestServer {
    serve_with(Limits::default(), Box::new(|_, _| Verdict::Serve))
}

pub fn serve_with(limits: Limits, hook: Hook) -> TestServer {
    let ram = RamServer::start_with(&[(TANK, TANK_SECTORS), (ARCHIVE, 2048)], 64, hook);
    let exports = ExportTable::new();
    exports.insert(tank(&ram));
    exports.insert(Export { read_only: true, ..ram.export("archive", ARCHIVE, 2048) });
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (ring, rings) = (if is_threaded() { None } else { TestRing::start() }, VolumeRings::default());
    for export in exports.served() {
        ring.iter().for_each(|ring: &TestRing| rings.insert(export.uuid.0, ring.ring_handle.clone()));
    }
    let server = start(&exports, directory.path().to_owned(), (limits, rings));
    server.serve("tank", volume_options()).expect("a socket");
    server.serve("archive", VolumeOptions { queues: 1, ..volume_options() }).expect("a socket");
    TestServer { ram, exports, server: Some(server), ring, directory }
}

/// Whether this is the test program without rings.
fn is_threaded() -> bool {
    let program = std::env::current_exe().expect("a program");
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("threaded"))
}

pub fn start(
    exports: &ExportTable,
    directory: PathBuf,
    (limits, rings): (Limits, VolumeRings),
) -> VhostServer {
    VhostServer::start(Options { directory, group: None, limits, rings }, exports.clone()).expect("starts")
}

pub fn volume_options() -> VolumeOptions {
    VolumeOptions { queues: QUEUES, block: GuestBlockSize::Sector }
}

pub fn tank(ram: &RamServer) -> Export {
    Export { label: "fast".to_owned(), block_sectors: 8, ..ram.export("tank", TANK, TANK_SECTORS) }
}

impl TestServer {
    pub fn server(&self) -> &VhostServer {
        self.server.as_ref().expect("runs")
    }

    pub fn socket(&self, volume: &str) -> PathBuf {
        self.server().socket_path(volume)
    }

    /// Waits until exactly `count` VMMs are connected.
    pub fn wait_for_clients(&self, count: usize) {
        wait_until("the number of VMMs", || self.server().clients().len() == count);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(server) = self.server.take()
            && !std::thread::panicking()
        {
            let sockets: Vec<PathBuf> = server.served().iter().map(|name| server.socket_path(name)).collect();
            assert_eq!(server.shutdown(LIMIT), Ok(()), "every thread ends");
            assert!(sockets.iter().all(|socket| !socket.exists()), "socket files go with the server");
        }
    }
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Content that depends on its position and on `seed`.
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(31) + at / 251 + seed).to_le_bytes()[0]).collect()
}

/// Serves with a hook that holds requests while told to, and counts them.
pub fn holding(limits: Limits) -> (TestServer, Arc<AtomicBool>, Arc<AtomicU64>) {
    let (hold, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (holds, counts) = (Arc::clone(&hold), Arc::clone(&seen));
    let hook = move |_, _: &Operation| {
        counts.fetch_add(1, Ordering::SeqCst);
        if holds.load(Ordering::SeqCst) { Verdict::Hold } else { Verdict::Serve }
    };
    (serve_with(limits, Box::new(hook)), hold, seen)
}

/// A write by a guest.
pub fn write(sector: u64, content: &[u8]) -> GuestRequest<'_> {
    GuestRequest { kind: OUT, sector, out: content, into: 0 }
}
