//! The clients of one process: they submit requests, tell the oracle about the requests and
//! answers, and stop the world at the first fault.

mod liveness;
mod lodgers;
mod pulled;
mod sizes;

use crate::driver::World;
use crate::failure::FailureKind;
use crate::note::MemoryNote;
use crate::oracle::{OpId, Oracle};
use crate::reached::{Alignment, CoverageCase, FailedDevices, RequestCoverage, RequestKind};
use crate::stamp::{self, SECTOR, SectorValue};
use crate::system::{Geometry, ProcessContext, Refusal, RunningSystem, System, VolumeShape};
use crate::workload::Step;
use bcached_engine::{BucketCount, Phases};
use bcached_env::sync::Semaphore;
use bcached_env::{Buffer, Env};
use bcached_port::{Operation, Reply};
use sizes::KnownSize;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// How long clients wait for the next answer of any kind, in virtual nanoseconds, when no fault
/// delays anything. As a rule, this is five hundred times what the slowest device takes for one
/// operation.
pub const PATIENCE_NS: u64 = 20_000_000_000;

/// Additional time for each sector to be zeroed: a zeroing may be carried out block by block, each
/// with a flush.
const ZEROED_NS: u64 = 50_000_000;

/// How long a client waits for the answer to one request while others are answered.
const REQUEST_NS: u64 = 60_000_000_000;

/// Longest read of a verification, in sectors.
const VERIFY_SECTORS: u64 = 128;

/// Gaps between touched ranges of up to this many sectors are read as well.
const VERIFY_GAP: u64 = 16;

/// The initial state of a process.
pub struct ClientSetup {
    pub(super) env: Env,
    pub(super) system: Rc<dyn System>,
    pub(super) geometry: Geometry,
    pub(super) note: MemoryNote,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) oracle: Rc<RefCell<Oracle>>,
    pub(super) depth: usize,
    pub(super) troubled: bool,
    pub(super) phases: Arc<Phases>,
    pub(super) requests: Rc<Cell<u64>>,
    pub(super) reached: Rc<RefCell<RequestCoverage>>,
    pub(super) counted: Rc<RefCell<Option<Vec<BucketCount>>>>,
    /// The first fault noticed in this life.
    pub(super) fault: Rc<RefCell<Option<FailureKind>>>,
    /// Descriptions of the unanswered requests.
    pub(super) waiting: Rc<RefCell<BTreeMap<u64, String>>>,
}

impl ClientSetup {
    /// Opens the system.
    ///
    /// # Errors
    /// If it does not open, or opens without all its volumes.
    pub async fn open(self) -> Result<Client, FailureKind> {
        let written_before = {
            let mut world = self.world.borrow_mut();
            world.progress(PATIENCE_NS);
            world.written_bytes(0)
        };
        let process = ProcessContext {
            env: self.env.clone(),
            world: Rc::clone(&self.world),
            note: self.note.clone(),
            phases: Arc::clone(&self.phases),
        };
        let opening = self.system.open(process, &self.geometry);
        self.waiting.borrow_mut().insert(0, "open".to_owned());
        let running = opening.await.map_err(FailureKind::Open)?;
        self.waiting.borrow_mut().clear();
        let shapes = running.volumes();
        let (found, wanted) = (shapes.len(), self.geometry.volumes.len());
        if found != wanted {
            return Err(FailureKind::Volumes { found, wanted });
        }
        running.assert_invariants();
        self.world.borrow_mut().progress(PATIENCE_NS);
        let lodgers = self.check_lodgers(running.as_ref())?;
        let sizes = shapes.iter().map(|shape| KnownSize::of(shape.sectors)).chain(lodgers).collect();
        let shared = ClientState {
            sizes: RefCell::new(sizes),
            lodgers: self.geometry.lodgers.clone(),
            unit: u64::from(self.geometry.block_sectors),
            block: u64::from(self.geometry.set_block_sectors),
            env: self.env,
            note: self.note,
            running,
            shapes,
            world: self.world,
            oracle: self.oracle,
            places: Semaphore::new(self.depth),
            depth: self.depth,
            troubled: self.troubled,
            requests: self.requests,
            reached: self.reached,
            counted: self.counted,
            fault: self.fault,
            waiting: self.waiting,
            zeroed: Cell::new(0),
            written_before,
        };
        let client = Client { shared: Rc::new(shared) };
        client.check_written().map(|()| client)
    }
}

struct ClientState {
    env: Env,
    note: MemoryNote,
    running: Rc<dyn RunningSystem>,
    shapes: Vec<VolumeShape>,
    sizes: RefCell<Vec<KnownSize>>,
    /// Sizes of the volumes that live in the cache alone, in sectors.
    lodgers: Vec<u64>,
    /// Unit of requests, in sectors.
    unit: u64,
    /// Block size of the set, in sectors.
    block: u64,
    world: Rc<RefCell<World>>,
    oracle: Rc<RefCell<Oracle>>,
    /// One permit for each request in flight.
    places: Semaphore,
    depth: usize,
    troubled: bool,
    requests: Rc<Cell<u64>>,
    reached: Rc<RefCell<RequestCoverage>>,
    counted: Rc<RefCell<Option<Vec<BucketCount>>>>,
    fault: Rc<RefCell<Option<FailureKind>>>,
    waiting: Rc<RefCell<BTreeMap<u64, String>>>,
    /// Sectors of the zeroings in flight.
    zeroed: Cell<u64>,
    /// Bytes that were submitted to the cache device for writing before this life.
    written_before: u64,
}

impl ClientState {
    /// Returns how long clients may go without any answer from now on, in nanoseconds.
    const fn patience(&self) -> u64 {
        PATIENCE_NS + self.zeroed.get() * ZEROED_NS
    }
}

/// A handle on the open system and its oracle. Clones are the same client.
#[derive(Clone)]
pub struct Client {
    shared: Rc<ClientState>,
}

impl Client {
    /// Returns the environment of the process.
    #[must_use]
    pub fn env(&self) -> &Env {
        &self.shared.env
    }

    /// Returns the simulated world.
    #[must_use]
    pub fn world(&self) -> &RefCell<World> {
        &self.shared.world
    }

    /// Starts a step as soon as fewer than `depth` requests are in flight; does not wait for its
    /// answer. A client cannot carry out restarts.
    pub async fn go(&self, step: Step) {
        match step {
            Step::Pause(milliseconds) => self.pause(milliseconds).await,
            Step::Settle => self.settle().await,
            Step::Restart(_) | Step::Table(_) | Step::Older(_) => {
                unreachable!("the rig carries this step out between two processes")
            }
            Step::Note { is_there } => {
                self.shared.note.set_there(is_there);
                let gone = self.shared.oracle.borrow_mut().note_is(is_there);
                if let Some(gone) = gone {
                    self.make_up_for_note(gone);
                }
            }
            Step::Trouble { device, rule } => {
                self.shared.world.borrow_mut().devices[device].faults.add(rule);
            }
            Step::Pull { device, survivors } => self.pull(device, survivors),
            request => {
                let place = self.shared.places.acquire(1).await;
                let client = self.clone();
                self.shared.env.spawn(async move {
                    client.ask(request).await;
                    drop(place);
                });
            }
        }
    }

    /// Tells the system that the note has been gone since `gone`, as the kernel tells a daemon.
    fn make_up_for_note(&self, gone: u64) {
        let shared = Rc::clone(&self.shared);
        self.shared.env.spawn(async move {
            if shared.running.keep_note().await {
                shared.oracle.borrow_mut().note_is_made_up_for(gone);
            }
        });
    }

    /// Carries out `steps`, and waits until all of them have been answered.
    pub async fn go_through(&self, steps: Vec<Step>) {
        for step in steps {
            self.go(step).await;
        }
        self.settle().await;
    }

    /// Waits until every request started so far has been answered.
    pub async fn settle(&self) {
        drop(self.shared.places.acquire(self.shared.depth).await);
    }

    /// Returns sorted descriptions of the unanswered requests.
    #[must_use]
    pub fn unanswered(&self) -> Vec<String> {
        let mut words: Vec<String> = self.shared.waiting.borrow().values().cloned().collect();
        words.sort_unstable();
        words
    }

    async fn pause(&self, milliseconds: u64) {
        self.shared.env.sleep(Duration::from_millis(milliseconds)).await;
        self.shared.world.borrow_mut().progress(self.shared.patience());
    }

    /// Reads everything that was ever written, and judges it.
    pub async fn verify(&self) {
        for (volume, range) in self.verify_ranges() {
            let mut at = range.start;
            while at < range.end {
                let sectors = at..range.end.min(at + VERIFY_SECTORS);
                at = sectors.end;
                self.go(Step::Read { volume, sectors }).await;
            }
        }
        self.settle().await;
    }

    /// Returns the touched ranges, widened to the unit of requests and joined across small gaps.
    fn verify_ranges(&self) -> Vec<(u32, Range<u64>)> {
        let mut ranges: Vec<(u32, Range<u64>)> = Vec::new();
        for (volume, touched) in self.shared.oracle.borrow().touched() {
            let unit = self.shared.unit;
            let start = touched.start / unit * unit;
            let end = (touched.end.div_ceil(unit) * unit + unit).min(self.limit(volume));
            if start >= end {
                continue;
            }
            match ranges.last_mut() {
                Some((last, range)) if *last == volume && range.end + VERIFY_GAP >= start => {
                    range.end = range.end.max(end);
                }
                _ => ranges.push((volume, start..end)),
            }
        }
        ranges
    }

    /// Stops the system in order.
    ///
    /// # Errors
    /// If the system reports that it could not stop.
    pub async fn stop(&self) -> Result<(), FailureKind> {
        self.settle().await;
        self.shared.running.assert_invariants();
        let id = self.shared.oracle.borrow_mut().begin_stop();
        self.shared.waiting.borrow_mut().insert(0, "stop".to_owned());
        let result = self.shared.running.stop().await;
        self.shared.waiting.borrow_mut().clear();
        self.shared.oracle.borrow_mut().end(id, result.is_ok());
        self.shared.world.borrow_mut().progress(self.shared.patience());
        if result.is_ok() {
            *self.shared.counted.borrow_mut() = self.shared.running.counted();
        }
        self.check_written()?;
        if self.may_refuse() { Ok(()) } else { result.map_err(FailureKind::Stop) }
    }

    /// Checks that the system's count of bytes written equals what the device was given, at any
    /// moment and whatever fails.
    fn check_written(&self) -> Result<(), FailureKind> {
        let given = self.shared.world.borrow().written_bytes(0) - self.shared.written_before;
        match self.shared.running.written_bytes() {
            Some(counted) if counted != given => Err(FailureKind::Miscounted { counted, given }),
            _ => Ok(()),
        }
    }

    /// Returns whether a device has failed, so that requests may fail.
    fn may_refuse(&self) -> bool {
        self.shared.troubled && self.shared.world.borrow().has_failed()
    }

    /// Submits one request and waits for the answer; a refusal is a fault, unless a device has
    /// failed.
    pub async fn ask(&self, step: Step) {
        if !self.is_within(&step) {
            return;
        }
        let words = step.to_string();
        if let Err(refusal) = self.attempt(step.clone()).await
            && !self.may_refuse()
            && !self.may_be_outside(&step, &refusal)
        {
            self.notice(FailureKind::Refused { request: words, refusal });
        }
    }

    /// Submits one request and waits for the answer. The answer is judged, but may be a refusal.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn attempt(&self, step: Step) -> Result<(), Refusal> {
        self.shared.requests.set(self.shared.requests.get() + 1);
        let (number, words) = (self.shared.requests.get(), step.to_string());
        let (asked, late) = self.times();
        self.shared.waiting.borrow_mut().insert(number, words.clone());
        self.count(&step);
        let zeroed = if let Step::Zero { sectors, .. } = &step { sectors.end - sectors.start } else { 0 };
        self.shared.zeroed.update(|sectors| sectors + zeroed);
        if zeroed > 0 {
            self.shared.world.borrow_mut().progress(self.shared.patience());
        }
        let result = match step {
            Step::Read { volume, sectors } => self.read(volume, sectors).await.map(drop),
            Step::Mode { volume, mode } => self.shared.running.set_mode(volume, mode).await,
            Step::Turn { volume, option, value } => self.shared.running.turn(volume, option, value).await,
            Step::Detach { volume } => self.shared.running.detach(volume).await,
            Step::Attach { volume } => self.shared.running.attach(volume).await,
            Step::Clean { volume } => self.shared.running.clean(volume).await,
            Step::Cancel { volume } => {
                self.shared.running.cancel(volume);
                Ok(())
            }
            Step::Readd { volume } => self.readd(volume).await,
            Step::Shrink { volume, sectors } => self.shrink(volume, sectors).await,
            Step::Grow { volume, sectors } => self.grow(volume, sectors).await,
            Step::Create { volume } => self.create(volume).await,
            Step::Delete { volume } => self.delete(volume).await,
            Step::Forget { volume } => self.forget(volume).await,
            Step::Return { device } => self.give_back(device).await,
            other => self.change(other).await,
        };
        self.shared.waiting.borrow_mut().remove(&number);
        self.shared.zeroed.update(|sectors| sectors - zeroed);
        let (answered, late_since) = self.times();
        let took = (answered - asked).saturating_sub(late_since - late);
        if took > REQUEST_NS {
            self.notice(FailureKind::Slow { request: words.clone(), milliseconds: took / 1_000_000 });
        }
        if let Err(fault) = self.check_written() {
            self.notice(fault);
        }
        let now = self.shared.env.now().0;
        let mut world = self.shared.world.borrow_mut();
        world.progress(self.shared.patience());
        world.trace.note(now, || format!("{words}: {result:?}"));
        result
    }

    /// Counts the request by kind and circumstances.
    fn count(&self, step: &Step) {
        let Some((asked, volume, sectors)) = RequestKind::of(step) else { return };
        let standing = self.shared.running.standing(volume);
        let lies = Alignment::of(&sectors, self.limit(volume), self.shared.block);
        let world = self.shared.world.borrow();
        let device = 1 + volume as usize;
        let backing = device < world.devices.len() && world.has_device_failed(device);
        let failed = match (world.has_device_failed(0), backing) {
            (false, false) => FailedDevices::Nothing,
            (true, false) => FailedDevices::Cache,
            (false, true) => FailedDevices::Backing,
            (true, true) => FailedDevices::Both,
        };
        self.shared.reached.borrow_mut().count(&CoverageCase { asked, lies, standing, failed });
    }

    /// Re-adds a volume; releasing the volume flushes it.
    async fn readd(&self, volume: u32) -> Result<(), Refusal> {
        let id = self.shared.oracle.borrow_mut().begin_flush(volume);
        let flushed = self.shared.running.readd(volume).await;
        let mut oracle = self.shared.oracle.borrow_mut();
        match &flushed {
            Ok(false) => oracle.abandon(id),
            flushed => oracle.end(id, flushed.is_ok()),
        }
        drop(oracle);
        flushed.map(drop)
    }

    /// Returns the virtual time, and the total delay that faults have caused so far.
    fn times(&self) -> (u64, u64) {
        let world = self.shared.world.borrow();
        (world.now(), world.late())
    }

    /// Reads, judges, and returns the values found.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn values(&self, volume: u32, sectors: Range<u64>) -> Result<Vec<SectorValue>, Refusal> {
        let first = sectors.start;
        let buffer = self.read(volume, sectors).await?;
        parse_all(&buffer, volume, first)
    }

    /// Returns the values found, whatever the oracle would say of them: it is not told of this
    /// read.
    ///
    /// # Errors
    /// The system's refusal.
    pub async fn unjudged(&self, volume: u32, sectors: Range<u64>) -> Result<Vec<SectorValue>, Refusal> {
        let operation = Operation::Read { sector: sectors.start, buffer: used(bytes_of(&sectors)) };
        let Reply { result, buffer, .. } = self.shared.running.serve(volume, operation).await;
        result.map_err(Refusal::from_error)?;
        let buffer = buffer.ok_or_else(|| Refusal("a read was answered without its buffer".to_owned()))?;
        parse_all(&buffer, volume, sectors.start)
    }

    async fn read(&self, volume: u32, sectors: Range<u64>) -> Result<Buffer, Refusal> {
        let bytes = bytes_of(&sectors);
        let id = self.shared.oracle.borrow_mut().begin_read(volume, sectors.clone());
        let operation = Operation::Read { sector: sectors.start, buffer: used(bytes) };
        let judge = self.judge();
        let told = Box::new(move |reply: &Reply| judge.judge_read(id, bytes, reply));
        let Reply { result, buffer, .. } = self.shared.running.serve_and_tell(volume, operation, told).await;
        result.map_err(Refusal::from_error)?;
        let buffer = buffer.filter(|buffer| buffer.len() == bytes);
        buffer.ok_or_else(|| Refusal(format!("a read was answered without its buffer of {bytes} bytes")))
    }

    /// Carries out a write, zeroing, discard or flush.
    async fn change(&self, step: Step) -> Result<(), Refusal> {
        let (volume, id, operation) = {
            let mut oracle = self.shared.oracle.borrow_mut();
            match step {
                Step::Write { volume, sectors, fua } => {
                    let id = oracle.begin_write(volume, sectors.clone(), fua);
                    let mut buffer = Buffer::zeroed(bytes_of(&sectors));
                    stamp::fill(buffer.as_mut_slice(), volume, sectors.start, id.number());
                    (volume, id, Operation::Write { sector: sectors.start, payload: buffer.freeze(), fua })
                }
                Step::Zero { volume, sectors, fua, may_unmap } => {
                    let id = oracle.begin_zeroes(volume, sectors.clone(), fua);
                    let (sector, sectors) = (sectors.start, sectors.end - sectors.start);
                    let operation = Operation::WriteZeroes { sector, sectors, fua, may_discard: may_unmap };
                    (volume, id, operation)
                }
                Step::Discard { volume, sectors } => {
                    let id = oracle.begin_discard(volume, sectors.clone());
                    let (sector, sectors) = (sectors.start, sectors.end - sectors.start);
                    (volume, id, Operation::Discard { sector, sectors, fua: false })
                }
                Step::Flush { volume } => (volume, oracle.begin_flush(volume), Operation::Flush),
                other => unreachable!("{other} is not a change"),
            }
        };
        let oracle = Rc::clone(&self.shared.oracle);
        let told = Box::new(move |reply: &Reply| oracle.borrow_mut().end(id, reply.result.is_ok()));
        let reply = self.shared.running.serve_and_tell(volume, operation, told).await;
        reply.result.map_err(Refusal::from_error)
    }

    /// Takes the first fault noticed.
    pub(crate) fn noticed(&self) -> Option<FailureKind> {
        self.shared.fault.borrow_mut().take()
    }

    /// Keeps the first fault and ends the world.
    fn notice(&self, fault: FailureKind) {
        self.judge().notice(fault);
    }

    fn judge(&self) -> ReplyJudge {
        let ClientState { oracle, fault, world, .. } = &*self.shared;
        ReplyJudge { oracle: Rc::clone(oracle), fault: Rc::clone(fault), world: Rc::clone(world) }
    }
}

/// Receives an answer. Requests that are unanswered when the world ends keep it in the system's
/// memory, so it must not keep the system alive.
struct ReplyJudge {
    oracle: Rc<RefCell<Oracle>>,
    fault: Rc<RefCell<Option<FailureKind>>>,
    world: Rc<RefCell<World>>,
}

impl ReplyJudge {
    /// Judges the answer to a read of `bytes` bytes.
    fn judge_read(&self, id: OpId, bytes: usize, reply: &Reply) {
        let mut oracle = self.oracle.borrow_mut();
        let buffer = reply.buffer.as_ref().filter(|buffer| reply.result.is_ok() && buffer.len() == bytes);
        let Some(buffer) = buffer else { return oracle.abandon(id) };
        let judged = oracle.end_read(id, buffer.as_slice());
        drop(oracle);
        if let Err(violation) = judged {
            self.notice(FailureKind::Read(violation));
        }
    }

    fn notice(&self, fault: FailureKind) {
        self.fault.borrow_mut().get_or_insert(fault);
        self.world.borrow_mut().halt_now();
    }
}

/// Allocates memory that looks used, such as front ends give to the engine: its old content must
/// not be taken for data.
fn used(bytes: usize) -> Buffer {
    let mut buffer = Buffer::zeroed(bytes);
    buffer.as_mut_slice().fill(0xa5);
    buffer
}

fn bytes_of(sectors: &Range<u64>) -> usize {
    usize::try_from(sectors.end - sectors.start).expect("a request fits memory") * SECTOR
}

fn parse_all(buffer: &Buffer, volume: u32, first: u64) -> Result<Vec<SectorValue>, Refusal> {
    let parse = |(index, bytes)| stamp::parse(bytes, volume, first + index as u64);
    let values = buffer.as_slice().chunks_exact(SECTOR).enumerate().map(parse);
    values.collect::<Result<_, _>>().map_err(Refusal::from_error)
}
