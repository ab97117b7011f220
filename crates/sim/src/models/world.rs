//! All modelled devices as the engine's driver, in virtual time. The time that devices take and the
//! time that the engine takes on its one processor advance the same clock.
//!
//! The [`ModelWorld`] outlives the process that runs in it. Commands in flight at the death of a
//! process are still carried out. Devices here never fail and never lose anything, unless a
//! benchmark sets [`ModelDevice::failing_writes`]; the driver that injects faults is
//! [`crate::driver`].

use super::content::SparseContent;
use super::hdd::{self, Hdd};
use super::heap::HeapPeak;
use super::mechanism::{CommandKind, DeviceCommand, SECTOR_BYTES, TimingModel};
use super::ssd::{self, Ssd};
use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Op, Time, Token};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// CPU time of one turn of the executor, in nanoseconds; the same as in the simulator.
const TURN_NS: u64 = 200;
/// CPU time to submit an operation to a device and to handle its completion, in nanoseconds.
/// Measured with a prototype of executor and driver, for an operation that does nothing.
const OPERATION_NS: u64 = 350;

/// I/O counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// A device: its mechanism and its contents.
pub struct ModelDevice {
    mechanism: Box<dyn TimingModel>,
    info: DiskInfo,
    /// Contents of the device; tools may write here directly.
    pub content: SparseContent,
    /// I/O counters.
    pub traffic: IoCounts,
    /// Number of further writes that fail with an error and write nothing.
    pub failing_writes: u64,
}

impl ModelDevice {
    /// Returns the size in sectors.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.info.sectors
    }

    /// A solid-state drive of `sectors` sectors with blocks of 4 KiB.
    #[must_use]
    pub fn ssd(model: ssd::SsdModel, sectors: u64) -> Self {
        Self::of(Box::new(Ssd::new(model)), sectors, true)
    }

    /// A hard disk of which only the first `sectors` sectors are used.
    #[must_use]
    pub fn hdd(model: hdd::HddModel, sectors: u64) -> Self {
        assert!(sectors <= model.sectors, "a part of the disk");
        let volatile_cache = model.cache_bytes > 0;
        Self::of(Box::new(Hdd::new(model)), sectors, volatile_cache)
    }

    fn of(mechanism: Box<dyn TimingModel>, sectors: u64, volatile_cache: bool) -> Self {
        let info = DiskInfo {
            sectors,
            logical_block_sectors: 1,
            volatile_cache,
            fua: true,
            discard: false,
            write_zeroes: true,
            unmap: true,
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        };
        Self {
            mechanism,
            info,
            content: SparseContent::default(),
            traffic: IoCounts::default(),
            failing_writes: 0,
        }
    }
}

/// An operation in flight, and the process that submitted it.
struct InFlightOp {
    disk: usize,
    /// The process that submitted it.
    life: u64,
    token: Token,
    op: Op,
}

/// All devices and the clock.
pub struct ModelWorld {
    /// The devices, by [`DiskId`].
    pub devices: Vec<ModelDevice>,
    now: u64,
    flights: BTreeMap<u64, InFlightOp>,
    next_number: u64,
    life: u64,
    cpu_ns: u64,
    ended: Vec<u64>,
    /// Peak heap usage of this life, sampled whenever it waits.
    pub heap: HeapPeak,
}

impl ModelWorld {
    /// A world at time zero.
    #[must_use]
    pub fn new(devices: Vec<ModelDevice>) -> Self {
        Self {
            devices,
            now: 0,
            flights: BTreeMap::new(),
            next_number: 0,
            life: 0,
            cpu_ns: 0,
            ended: Vec::new(),
            heap: HeapPeak::default(),
        }
    }

    /// Returns virtual nanoseconds since the beginning.
    #[must_use]
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Returns how many of these nanoseconds the processor was busy.
    #[must_use]
    pub const fn cpu_ns(&self) -> u64 {
        self.cpu_ns
    }

    /// Begins the life of the next process. Completions of operations that the dead process
    /// submitted are no longer delivered.
    pub fn next_life(&mut self) {
        self.life += 1;
        self.heap = HeapPeak::begin();
    }

    fn charge(&mut self, nanoseconds: u64) {
        self.now += nanoseconds;
        self.cpu_ns += nanoseconds;
    }

    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        self.charge(OPERATION_NS);
        let (number, disk) = (self.next_number, disk.0 as usize);
        self.next_number += 1;
        let (kind, sector, sectors) = form(&op);
        let device = &mut self.devices[disk];
        let bytes = sectors * SECTOR_BYTES;
        assert!(sector + sectors <= device.info.sectors, "the engine asks within a device");
        match kind {
            CommandKind::Read => {
                device.traffic.reads += 1;
                device.traffic.read_bytes += bytes;
            }
            CommandKind::Write | CommandKind::WriteFua => {
                device.traffic.writes += 1;
                device.traffic.written_bytes += bytes;
            }
            CommandKind::Flush => device.traffic.flushes += 1,
            CommandKind::Discard => {}
        }
        device.mechanism.submit(self.now, DeviceCommand { number, kind, sector, sectors });
        self.flights.insert(number, InFlightOp { disk, life: self.life, token, op });
    }

    /// Completes an operation: applies it to the contents and returns its event.
    fn end(&mut self, number: u64) -> Option<Event> {
        let InFlightOp { disk, life, token, op } = self.flights.remove(&number)?;
        let ModelDevice { content, failing_writes, .. } = &mut self.devices[disk];
        let (mut result, mut returned) = (Ok(()), None);
        match op {
            Op::Write { .. } if *failing_writes > 0 => {
                *failing_writes -= 1;
                result = Err(IoErrorKind::Io);
            }
            Op::Read { sector, mut buffer } => {
                content.read(sector, buffer.as_mut_slice());
                returned = Some(buffer);
            }
            Op::Write { sector, payload, .. } => content.write(sector, payload.as_slice()),
            Op::Zero { sector, sectors, .. } => content.zero(sector, sectors),
            Op::Discard { .. } => result = Err(IoErrorKind::Unsupported),
            Op::Flush => {}
        }
        (life == self.life).then_some(Event::Done(Completion { token, result, buffer: returned }))
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.charge(TURN_NS);
        loop {
            let next = self.devices.iter().filter_map(|device| device.mechanism.next()).min();
            // Events that have happened are delivered before the clock advances.
            if !events.is_empty() && next.is_none_or(|time| time > self.now) {
                return;
            }
            let Some(time) = next.filter(|time| until.is_none_or(|until| *time <= until.0)) else {
                match until {
                    Some(until) => self.now = self.now.max(until.0),
                    // Nothing is in flight, and no task waits for a timer.
                    None => events.push(Event::Halt),
                }
                return;
            };
            self.now = self.now.max(time);
            let mut ended = std::mem::take(&mut self.ended);
            for device in &mut self.devices {
                device.mechanism.advance(time, &mut ended);
            }
            events.extend(ended.drain(..).filter_map(|number| self.end(number)));
            self.ended = ended;
        }
    }
}

/// Returns what an operation is to a device: its kind, first sector and length in sectors.
fn form(op: &Op) -> (CommandKind, u64, u64) {
    let sectors = |bytes: usize| bytes as u64 / SECTOR_BYTES;
    match op {
        Op::Read { sector, buffer } => (CommandKind::Read, *sector, sectors(buffer.len())),
        Op::Write { sector, payload, fua } => {
            (if *fua { CommandKind::WriteFua } else { CommandKind::Write }, *sector, sectors(payload.len()))
        }
        Op::Zero { sector, sectors, .. } => (CommandKind::Write, *sector, *sectors),
        Op::Discard { sector, sectors } => (CommandKind::Discard, *sector, *sectors),
        Op::Flush => (CommandKind::Flush, 0, 0),
    }
}

/// A process's driver handle to the world.
#[derive(Clone)]
pub struct ModelDriver(Rc<RefCell<ModelWorld>>);

impl ModelDriver {
    /// Creates a handle to `world`.
    #[must_use]
    pub const fn new(world: Rc<RefCell<ModelWorld>>) -> Self {
        Self(world)
    }
}

impl Driver for ModelDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        self.0.borrow_mut().submit(disk, token, op);
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        let mut world = self.0.borrow_mut();
        world.heap.look();
        world.wait(until, events);
    }

    fn now(&self) -> Time {
        Time(self.0.borrow().now)
    }

    fn wall_seconds(&self) -> u32 {
        // Any fixed date serves; this one is in 2023.
        1_700_000_000 + u32::try_from(self.0.borrow().now / 1_000_000_000).expect("a run lasts days at most")
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        self.0.borrow().devices[disk.0 as usize].info.clone()
    }

    fn charge(&mut self, nanoseconds: u64) {
        self.0.borrow_mut().charge(nanoseconds);
    }
}
