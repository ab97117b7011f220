//! A server over plain memory on its own thread: the smallest implementation that keeps the port's
//! promises. Front ends are tested against it, and its size shows that the port requires little of
//! an engine.
//!
//! A [`Hook`] sees each request first, and may fail it or hold it back; faults live in the tests
//! that need them.

use crate::Bell;
use crate::client::Connector;
use crate::error::ErrorKind;
use crate::export::{Export, Uuid};
use crate::frontend::Frontend;
use crate::lock::{lock, wait};
use crate::operation::{Operation, Reply, SECTOR_BYTES, StatusExtent, VolumeId};
use crate::route::Route;
use crate::server::{Request, Server, open};
use bcached_env::Buffer;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// What happens to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Carry it out.
    Serve,
    /// Answer with an error; nothing is done.
    Fail(ErrorKind),
    /// Keep it until [`RamServer::release`].
    Hold,
}

/// Sees every request before it is carried out.
pub type Hook = Box<dyn FnMut(VolumeId, &Operation) -> Verdict + Send>;

/// Volumes in memory, served until dropped.
pub struct RamServer {
    connector: Connector,
    shared: Arc<RamShared>,
    thread: Option<JoinHandle<()>>,
}

struct RamShared {
    signals: Mutex<Signals>,
    changed: Condvar,
    volumes: Mutex<BTreeMap<VolumeId, RamVolume>>,
}

#[derive(Default)]
struct Signals {
    bell: bool,
    release: bool,
    stop: bool,
}

struct RamVolume {
    bytes: Vec<u8>,
    /// Per sector: was written since it was created or discarded.
    allocated: Vec<bool>,
}

impl RamServer {
    /// Serves zeroed volumes of the given sizes in sectors; all requests are carried out.
    #[must_use]
    pub fn start(volumes: &[(VolumeId, u64)]) -> Self {
        Self::start_with(volumes, 256, Box::new(|_, _| Verdict::Serve))
    }

    /// Like [`RamServer::start`], with room for `queue_max` requests in the inbox and a `hook` that
    /// decides on each request.
    #[must_use]
    pub fn start_with(volumes: &[(VolumeId, u64)], queue_max: usize, hook: Hook) -> Self {
        let volumes = volumes.iter().map(|(id, sectors)| (*id, RamVolume::zeroed(*sectors))).collect();
        let shared = Arc::new(RamShared {
            signals: Mutex::new(Signals::default()),
            changed: Condvar::new(),
            volumes: Mutex::new(volumes),
        });
        let ringer = Arc::clone(&shared);
        let bell: Bell = Arc::new(move || ringer.signal(|signals| signals.bell = true));
        let (connector, server) = open(queue_max, bell);
        let serving = Arc::clone(&shared);
        let thread = std::thread::spawn(move || serving.run(server, hook));
        Self { connector, shared, thread: Some(thread) }
    }

    /// Returns a connector to the server.
    #[must_use]
    pub fn connector(&self) -> Connector {
        self.connector.clone()
    }

    /// Returns one of its volumes as front ends see it: each byte of its UUID is the last byte of
    /// its number, it has no label, its block is one sector, and it is writable.
    #[must_use]
    pub fn export(&self, name: &str, volume: VolumeId, sectors: u64) -> Export {
        Export {
            name: name.to_owned(),
            uuid: Uuid([volume.0.to_le_bytes()[0]; 16]),
            label: String::new(),
            sectors,
            block_sectors: 1,
            read_only: false,
            shared: false,
            frontends: Frontend::ALL.into_iter().collect(),
            served: Some(Route::new(volume, &self.connector)),
        }
    }

    /// Carries out what has been held back so far, the newest first.
    pub fn release(&self) {
        self.shared.signal(|signals| signals.release = true);
    }

    /// Returns a copy of a range of a volume. Panics if there is no such range.
    #[must_use]
    pub fn content(&self, volume: VolumeId, sector: u64, sectors: u64) -> Vec<u8> {
        let volumes = lock(&self.shared.volumes);
        let volume = volumes.get(&volume).expect("the volume was named at the start");
        let range = volume.range(sector, sectors).expect("the range is inside the volume");
        volume.bytes[range].to_vec()
    }
}

impl Drop for RamServer {
    fn drop(&mut self) {
        self.shared.signal(|signals| signals.stop = true);
        if let Some(thread) = self.thread.take() {
            // A panic of a test's hook has been reported by its own thread.
            drop(thread.join());
        }
    }
}

impl RamShared {
    fn signal(&self, set: impl FnOnce(&mut Signals)) {
        set(&mut lock(&self.signals));
        self.changed.notify_one();
    }

    fn run(&self, mut server: Server, mut hook: Hook) {
        let mut held: Vec<Request> = Vec::new();
        loop {
            let mut signals = lock(&self.signals);
            while !signals.bell && !signals.release && !signals.stop {
                signals = wait(&self.changed, signals);
            }
            let Signals { release, stop, .. } = std::mem::take(&mut *signals);
            drop(signals);
            while let Some(request) = server.take() {
                match hook(request.volume, &request.operation) {
                    Verdict::Serve => self.serve(request),
                    Verdict::Fail(kind) => {
                        request.reply_to.send(Reply::failed(kind, buffer_of(request.operation)));
                    }
                    Verdict::Hold => held.push(request),
                }
            }
            if release {
                while let Some(request) = held.pop() {
                    self.serve(request);
                }
            }
            if stop {
                return;
            }
        }
    }

    fn serve(&self, request: Request) {
        let mut volumes = lock(&self.volumes);
        let reply = match volumes.get_mut(&request.volume) {
            Some(volume) => volume.serve(request.operation),
            None => Reply::failed(ErrorKind::Gone, buffer_of(request.operation)),
        };
        request.reply_to.send(reply);
    }
}

fn buffer_of(operation: Operation) -> Option<Buffer> {
    match operation {
        Operation::Read { buffer, .. } => Some(buffer),
        _ => None,
    }
}

impl RamVolume {
    fn zeroed(sectors: u64) -> Self {
        let sectors = usize::try_from(sectors).expect("the volume fits in memory");
        Self { bytes: vec![0; sectors * SECTOR], allocated: vec![false; sectors] }
    }

    /// Returns the bytes of a range of sectors, if it is inside.
    fn range(&self, sector: u64, sectors: u64) -> Option<std::ops::Range<usize>> {
        let end = sector.checked_add(sectors)?;
        if end > self.allocated.len() as u64 {
            return None;
        }
        Some(usize::try_from(sector).ok()? * SECTOR..usize::try_from(end).ok()? * SECTOR)
    }

    fn serve(&mut self, operation: Operation) -> Reply {
        let range = match operation.range() {
            None => return Reply::done(),
            Some((sector, sectors)) => self.range(sector, sectors),
        };
        let Some(range) = range else { return Reply::failed(ErrorKind::Invalid, buffer_of(operation)) };
        match operation {
            Operation::Read { mut buffer, .. } => {
                buffer.as_mut_slice().copy_from_slice(&self.bytes[range]);
                Reply::content(buffer)
            }
            Operation::Write { payload, .. } => {
                self.bytes[range.clone()].copy_from_slice(payload.as_slice());
                self.allocate(&range, true)
            }
            Operation::Discard { .. } => {
                self.bytes[range.clone()].fill(0);
                self.allocate(&range, false)
            }
            Operation::WriteZeroes { may_discard, .. } => {
                self.bytes[range.clone()].fill(0);
                self.allocate(&range, !may_discard)
            }
            Operation::BlockStatus { extents_max, .. } => Reply::extents(self.status(&range, extents_max)),
            Operation::Flush => Reply::done(),
        }
    }

    fn allocate(&mut self, range: &std::ops::Range<usize>, allocated: bool) -> Reply {
        self.allocated[range.start / SECTOR..range.end / SECTOR].fill(allocated);
        Reply::done()
    }

    fn status(&self, range: &std::ops::Range<usize>, extents_max: u32) -> Vec<StatusExtent> {
        let sectors = &self.allocated[range.start / SECTOR..range.end / SECTOR];
        sectors
            .chunk_by(|one, next| one == next)
            .take(extents_max as usize)
            .map(|run| StatusExtent { sectors: run.len() as u64, hole: !run[0], zero: !run[0] })
            .collect()
    }
}

const SECTOR: usize = 512;
const _: () = assert!(SECTOR as u64 == SECTOR_BYTES, "one size of sector");
