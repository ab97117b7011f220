//! The clients of a recorded run: random requests on one volume, up to four in flight, overlapping,
//! each recorded in the witness.
//!
//! One thread draws the requests and writes them to the witness. It also keeps the oracle, which
//! judges every read during the run. Other threads carry the requests out. The list of requests
//! depends on the seed alone. How they interleave depends on the machine, and the witness records
//! it.
//!
//! The run consists of phases with different queue depths and places, many of them without a single
//! flush. Only such phases can reveal that a system under test relies on flushes that its clients
//! happened to send. The last request is a flush of everything.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use bcached_sim::oracle::{OpId, Oracle, Violation};
use bcached_sim::stamp::{self, SectorValue};

use super::witness::{Event, Request, Witness};
use crate::nbd::Client;
use crate::workload::{Random, SECTOR_BYTES};

/// Maximum number of requests in flight.
const DEPTH_MAX: u64 = 4;
/// The longest request, in sectors.
const SECTORS_MAX: u64 = 128;
/// An alignment that every device accepts for direct I/O.
const ALIGNMENT: usize = 4096;
/// Time for background work of the system under test: longer than a kernel delays a journal write
/// (100 ms).
const PAUSE: Duration = Duration::from_millis(150);

/// Parameters of the clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed that determines every request.
    pub seed: u64,
    /// Number of requests.
    pub requests: u64,
    /// Size of the volume, in sectors.
    pub sectors: u64,
    /// Positions and lengths are multiples of this many sectors.
    pub block_sectors: u64,
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// An I/O error.
    #[error("{what}")]
    Io {
        /// The operation.
        what: String,
        /// The error.
        source: io::Error,
    },
    /// A read returned what no correct device could have returned.
    #[error("while it ran: {0}")]
    Read(#[from] Violation),
}

impl ClientError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}

/// A volume as a worker accesses it.
trait Volume: Send {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&mut self, sector: u64, bytes: &[u8], fua: bool) -> io::Result<()>;
    fn flush(&mut self) -> io::Result<()>;
}

/// A block device, bypassing the page cache.
struct Device {
    plain: File,
    /// Opened so that each write is durable when acknowledged.
    durable: File,
}

impl Volume for Device {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.plain.read_exact_at(bytes, sector * SECTOR_BYTES as u64)
    }

    fn write(&mut self, sector: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let file = if fua { &self.durable } else { &self.plain };
        file.write_all_at(bytes, sector * SECTOR_BYTES as u64)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.plain.sync_all()
    }
}

impl Volume for Client {
    fn read(&mut self, sector: u64, bytes: &mut [u8]) -> io::Result<()> {
        crate::workload::Target::read(self, sector, bytes)
    }

    fn write(&mut self, sector: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        if fua {
            self.write_durable(sector, bytes)
        } else {
            crate::workload::Target::write(self, sector, bytes)
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        crate::workload::Target::flush(self)
    }
}

/// Opens a block device for direct I/O.
fn open_direct(path: &Path, more: rustix::fs::OFlags) -> Result<File, ClientError> {
    let flags = (rustix::fs::OFlags::DIRECT | more).bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    file.map_err(ClientError::io(format!("open {}", path.display())))
}

/// Runs a plan on `volume`, a block device or `nbd:SOCKET:EXPORT`, and records its events on the
/// block device `witness`.
///
/// # Errors
/// [`ClientError`]: the first request that failed or read something wrong.
pub fn run(plan: &Plan, volume: &str, witness: &Path) -> Result<(), ClientError> {
    let mut witness = Witness::new(open_direct(witness, rustix::fs::OFlags::empty())?);
    let (done, answers) = channel();
    let mut workers = Vec::new();
    for index in 0..DEPTH_MAX {
        let mut volume = open(volume)?;
        let (orders, tasks) = channel();
        let done = done.clone();
        thread::spawn(move || work(index, &mut *volume, &tasks, &done));
        workers.push(orders);
    }
    Conductor {
        workers,
        answers,
        idle: (0..DEPTH_MAX).collect(),
        oracle: Oracle::new(vec![SectorValue::Zero]),
    }
    .run(plan, &mut witness)
}

fn open(volume: &str) -> Result<Box<dyn Volume>, ClientError> {
    if let Some((socket, export)) = volume.strip_prefix("nbd:").and_then(|rest| rest.split_once(':')) {
        let client = Client::connect(Path::new(socket), export);
        return Ok(Box::new(client.map_err(ClientError::io(format!("connect to {volume}")))?));
    }
    let path = Path::new(volume);
    let plain = open_direct(path, rustix::fs::OFlags::empty())?;
    Ok(Box::new(Device { plain, durable: open_direct(path, rustix::fs::OFlags::DSYNC)? }))
}

/// A request for a worker.
struct Task {
    id: OpId,
    request: Request,
}

/// A worker's completion of a task; for a read, with the data.
struct Answer {
    worker: u64,
    task: Task,
    result: io::Result<Vec<u8>>,
}

/// Carries out one request after the other.
fn work(worker: u64, volume: &mut dyn Volume, tasks: &Receiver<Task>, done: &Sender<Answer>) {
    let mut storage = vec![0; length(SECTORS_MAX) + ALIGNMENT];
    let offset = storage.as_ptr().align_offset(ALIGNMENT);
    for task in tasks {
        let result = match task.request {
            Request::Write { sector, sectors, fua } => {
                let bytes = &mut storage[offset..][..length(sectors)];
                stamp::fill(bytes, 0, sector, task.id.number());
                volume.write(sector, bytes, fua).map(|()| Vec::new())
            }
            Request::Read { sector, sectors } => {
                let bytes = &mut storage[offset..][..length(sectors)];
                volume.read(sector, bytes).map(|()| bytes.to_vec())
            }
            Request::Flush => volume.flush().map(|()| Vec::new()),
        };
        if done.send(Answer { worker, task, result }).is_err() {
            return;
        }
    }
}

/// Converts sectors to bytes.
fn length(sectors: u64) -> usize {
    usize::try_from(sectors).expect("a request fits in memory") * SECTOR_BYTES
}

/// Draws the requests, records them in the witness, and judges the reads.
struct Conductor {
    workers: Vec<Sender<Task>>,
    answers: Receiver<Answer>,
    idle: Vec<u64>,
    oracle: Oracle,
}

impl Conductor {
    fn run(mut self, plan: &Plan, witness: &mut Witness) -> Result<(), ClientError> {
        let mut random = Random::new(plan.seed);
        let mut phase = Phase::draw(plan, &mut random);
        for _ in 0..plan.requests {
            if phase.left == 0 {
                phase = Phase::draw(plan, &mut random);
                if random.below(4) == 0 {
                    self.settle(0, witness)?;
                    thread::sleep(PAUSE);
                }
            }
            phase.left -= 1;
            let request = phase.request(plan, &mut random);
            self.settle(phase.depth - 1, witness)?;
            self.begin(request, witness)?;
        }
        self.settle(0, witness)?;
        self.begin(Request::Flush, witness)?;
        self.settle(0, witness)
    }

    /// Sends a request to an idle worker.
    fn begin(&mut self, request: Request, witness: &mut Witness) -> Result<(), ClientError> {
        let id = request.begin(&mut self.oracle);
        tell(witness, &Event::Begin { number: id.number(), request })?;
        let worker = self.idle.pop().expect("fewer are at work than there are workers");
        let orders = &self.workers[usize::try_from(worker).expect("a handful")];
        orders.send(Task { id, request }).expect("a worker waits for tasks until this ends");
        Ok(())
    }

    /// Waits until at most `under_way` requests are in flight.
    fn settle(&mut self, under_way: u64, witness: &mut Witness) -> Result<(), ClientError> {
        while DEPTH_MAX - self.idle.len() as u64 > under_way {
            let Answer { worker, task, result } = self.answers.recv().expect("a worker answers each task");
            let number = task.id.number();
            tell(witness, &Event::End { number, success: result.is_ok() })?;
            let bytes = result.map_err(ClientError::io(format!("request {number}: {:?}", task.request)))?;
            match task.request {
                Request::Read { .. } => self.oracle.end_read(task.id, &bytes)?,
                Request::Write { .. } | Request::Flush => self.oracle.end(task.id, true),
            }
            self.idle.push(worker);
        }
        Ok(())
    }
}

fn tell(witness: &mut Witness, event: &Event) -> Result<(), ClientError> {
    witness.tell(event).map_err(ClientError::io("tell the witness"))
}

/// A part of the run.
struct Phase {
    /// Number of requests left in the phase.
    left: u64,
    /// One request in this many is a flush; 0: none.
    flush_every: u64,
    depth: u64,
    /// The range of the volume, in blocks.
    first: u64,
    blocks: u64,
    longest: u64,
}

impl Phase {
    fn draw(plan: &Plan, random: &mut Random) -> Self {
        let all = plan.sectors / plan.block_sectors;
        let blocks = (all / [1, 4, 16][below(random, 3)]).max(1);
        Self {
            left: 20 + random.below(180),
            flush_every: [0, 0, 50, 6][below(random, 4)],
            depth: 1 + random.below(DEPTH_MAX),
            first: random.below(all - blocks + 1),
            blocks,
            longest: ([8, 16, SECTORS_MAX][below(random, 3)] / plan.block_sectors).clamp(1, blocks),
        }
    }

    fn request(&self, plan: &Plan, random: &mut Random) -> Request {
        if self.flush_every != 0 && random.below(self.flush_every) == 0 {
            return Request::Flush;
        }
        let blocks = 1 + random.below(self.longest);
        let first = self.first + random.below(self.blocks - blocks + 1);
        let (sector, sectors) = (first * plan.block_sectors, blocks * plan.block_sectors);
        match random.below(16) {
            0..4 => Request::Read { sector, sectors },
            dice => Request::Write { sector, sectors, fua: self.flush_every != 0 && dice == 15 },
        }
    }
}

fn below(random: &mut Random, limit: u64) -> usize {
    usize::try_from(random.below(limit)).expect("a small number")
}
