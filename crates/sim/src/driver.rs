//! Implements the engine's driver over a simulated world: virtual time, latencies and completion
//! order come from one seed, and the world can end at any chosen operation.
//!
//! The [`World`] outlives the process that runs in it. A [`SimDriver`] is a handle that an executor
//! owns. When the executor is dropped (the process died, the power was cut), [`World::reboot`]
//! prepares the world for the next one.
//!
//! *Points.* Every submission and every completion of an operation that changes a device (write,
//! zeroing, flush, discard) is a point. Points are counted from 1 over the whole run. A crash is
//! requested by its point, and an [`Observer`] sees the devices as they are at each point. At a
//! submission point the operation is in flight; at a completion point it has completed, and the
//! engine has not been told yet. Reads are not points: a device does not change between two points.

mod crash;
mod device_mapping;
mod submit;
pub mod trace;

use crate::disk::{Device, FaultRules, FlushScope, OpKind, Survivors, WrittenPart};
use crate::figures::HostCounts;
use bcached_env::rng::Rng;
use bcached_env::{Buffer, Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Op, Time, Token};
pub use crash::Crash;
use device_mapping::{DeviceMapping, place_of_memory};
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use trace::Trace;

/// CPU time of one turn of the executor, so that the clock advances even if a loop only yields.
const TURN_NS: u64 = 200;

/// Number of consecutive turns without a device event or timer after which the engine counts as
/// spinning. Legitimate bursts of work between two events stay below a thousand turns of 256 polls.
const IDLE_TURNS_MAX: u64 = 5_000;

/// Number of clock reads between two waits for the driver after which a task counts as one that
/// never yields. Every transition reads the clock once, and a turn has 256 polls.
const LOOKS_MAX: u64 = 1_000_000;

/// Limit for one uninterrupted piece of CPU work (the engine's rule for transitions).
pub const CHARGE_NS_MAX: u64 = 200_000;

/// Why the world halted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HaltReason {
    /// As requested, at this point.
    Requested(u64),
    /// Nothing is in flight, no timer is set, and a task still waits.
    Stuck,
    /// Virtual time ran past the deadline.
    Late,
    /// Tasks keep waking each other and nothing happens.
    Spinning,
}

/// An operation as an [`Observer`] or [`StopCondition`] sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpView {
    /// The device.
    pub disk: DiskId,
    /// The kind of operation.
    pub kind: OpKind,
    /// The sectors; empty for a flush.
    pub sectors: Range<u64>,
    /// Whether it carries FUA.
    pub fua: bool,
    /// Whether it has completed; otherwise it has just been submitted.
    pub completed: bool,
    /// Whether it completed with a failure, which the process has not been told yet.
    pub failed: bool,
}

impl OpView {
    /// Creates the view of an operation that has just been submitted.
    #[must_use]
    pub const fn of(disk: DiskId, kind: OpKind, sectors: Range<u64>, fua: bool) -> Self {
        Self { disk, kind, sectors, fua, completed: false, failed: false }
    }

    /// Returns the same operation at its completion.
    #[must_use]
    pub fn ended(&self) -> Self {
        Self { completed: true, ..self.clone() }
    }
}

/// Called at each point with `(point, devices, operation at this point)`. The world ends there if
/// it returns true.
pub type Observer = Box<dyn FnMut(u64, &[Device], &OpView) -> bool>;

/// Ends the world at the first operation for which it returns true.
pub type StopCondition = Box<dyn FnMut(&OpView) -> bool>;

/// Called with each device whose flush has failed, and with the sectors that lost content.
pub type DropObserver = Box<dyn FnMut(usize, &BTreeSet<u64>)>;

/// An event that is due at a moment of virtual time.
enum DueEvent {
    /// A write becomes visible up to this sector.
    Land { disk: usize, number: u64, end: u64 },
    /// A read samples the content; it completes later.
    Sample { disk: usize, token: Token, sector: u64, buffer: Buffer, end: u64 },
    /// An operation completes.
    Done { disk: usize, token: Token, ending: OpResult, view: OpView },
    /// A completion that involves no device any more, or none of the world's devices.
    Complete(Completion),
}

enum OpResult {
    Read(Result<(), IoErrorKind>, Buffer),
    Write {
        number: u64,
        failed: Option<WrittenPart>,
    },
    Flush {
        flush: FlushScope,
        failed: bool,
    },
    /// Nothing was done.
    Refused(IoErrorKind, Option<Buffer>),
}

/// Devices, clock and everything in flight.
pub struct World {
    /// The devices, by index.
    pub devices: Vec<Device>,
    /// A hash of what happened and, on request, a record of it.
    pub trace: Trace,
    /// Whether a second flush of a device beside a first is a fault; see [`World::refused`].
    pub one_flush: bool,
    /// `(sectors, nanoseconds)`: one in four of the reads of the cache device that have this size
    /// and are aligned to it takes this much longer.
    pub node_reads: Option<(u64, u64)>,
    /// Counts of what hosts have done in this world.
    pub hosting: HostCounts,
    /// Ways by [`DiskId`].
    ways: Vec<DeviceMapping>,
    /// Memory that the process uses as devices.
    memories: Vec<Option<Device>>,
    now: u64,
    deadline: u64,
    /// Total delay, in nanoseconds, that faults have caused so far, without stalls.
    late: u64,
    /// Periods of past and present device stalls.
    stalls: Vec<Range<u64>>,
    rng: Rng,
    due: BTreeMap<(u64, u64), DueEvent>,
    next_due: u64,
    points: u64,
    crash_at: Option<u64>,
    observer: Option<Observer>,
    trap: Option<StopCondition>,
    on_drop: Option<DropObserver>,
    halt: Option<HaltReason>,
    closed: bool,
    idle_turns: u64,
    looks: Cell<u64>,
    charge_max: u64,
    refused: Option<String>,
    /// Devices with a flush in flight.
    flushing: BTreeSet<usize>,
    operations: u64,
    /// Reads submitted, by device.
    reads: Vec<u64>,
    /// Bytes of all writes submitted, by device.
    written: Vec<u64>,
}

impl World {
    /// Creates a world at time zero.
    #[must_use]
    pub fn new(devices: Vec<Device>, seed: u64) -> Self {
        let (reads, written) = (vec![0; devices.len()], vec![0; devices.len()]);
        Self {
            ways: DeviceMapping::to_each(&devices),
            devices,
            memories: Vec::new(),
            hosting: HostCounts::default(),
            trace: Trace::default(),
            one_flush: false,
            node_reads: None,
            now: 0,
            deadline: u64::MAX,
            late: 0,
            stalls: Vec::new(),
            rng: Rng::new(seed),
            due: BTreeMap::new(),
            next_due: 0,
            points: 0,
            crash_at: None,
            observer: None,
            trap: None,
            on_drop: None,
            halt: None,
            closed: false,
            idle_turns: 0,
            looks: Cell::new(0),
            charge_max: 0,
            refused: None,
            flushing: BTreeSet::new(),
            operations: 0,
            reads,
            written,
        }
    }

    /// Ends the world at this point.
    pub const fn crash_at(&mut self, point: u64) {
        self.crash_at = Some(point);
    }

    /// Shows every point to `observer`.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// Removes the observer.
    pub fn stop_observing(&mut self) {
        self.observer = None;
    }

    /// Ends the world at the first operation that `trap` picks. It is called at submission and at
    /// completion, also for reads.
    pub fn set_trap(&mut self, trap: StopCondition) {
        self.trap = Some(trap);
    }

    /// Calls `tell` for each flush that fails.
    pub fn on_drop(&mut self, tell: DropObserver) {
        self.on_drop = Some(tell);
    }

    /// Removes all faults from all devices.
    pub fn heal(&mut self) {
        for device in &mut self.devices {
            device.faults = FaultRules::default();
            device.make_readable();
        }
    }

    /// Returns whether any device has failed since the last call of [`heal`](Self::heal). A late
    /// device has not failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        (0..self.devices.len()).any(|device| self.has_device_failed(device))
    }

    /// Returns whether this device has failed since then.
    #[must_use]
    pub fn has_device_failed(&self, device: usize) -> bool {
        self.devices[device].gone || self.devices[device].faults.failures() > 0
    }

    /// Returns whether this device has failed, or has a rule that will make an operation fail.
    #[must_use]
    pub fn may_fail(&self, device: usize) -> bool {
        self.has_device_failed(device) || self.devices[device].faults.has_rules()
    }

    /// Ends the world now; no operation that is submitted from here on reaches a device.
    pub fn halt_now(&mut self) {
        self.halt.get_or_insert(HaltReason::Requested(self.points));
    }

    /// Records progress that the clients wait for: they wait up to `patience` more nanoseconds for
    /// the next, extended by any delay that faults cause from now on. While a device stalls, this
    /// time starts at the end of the stall.
    pub fn progress(&mut self, patience: u64) {
        let resume = self.devices.iter().map(|device| device.stalled_until).max().unwrap_or(0);
        self.deadline = self.now.max(resume).saturating_add(patience);
    }

    /// Stalls `device` for this many nanoseconds: nothing on it completes until then.
    pub fn stall(&mut self, device: usize, nanoseconds: u64) {
        let resume = self.now.saturating_add(nanoseconds);
        self.devices[device].stalled_until = resume;
        self.stalls.push(self.now..resume);
        self.deadline = self.deadline.saturating_add(nanoseconds);
    }

    /// Returns the total delay that faults and stalls have caused so far, in nanoseconds.
    #[must_use]
    pub fn late(&self) -> u64 {
        let stalled = self.stalls.iter().map(|stall| stall.end.min(self.now) - stall.start);
        self.late + stalled.sum::<u64>()
    }

    /// Returns the number of points passed.
    #[must_use]
    pub const fn points(&self) -> u64 {
        self.points
    }

    /// Returns the number of reads that `device` was asked for.
    #[must_use]
    pub fn reads(&self, device: usize) -> u64 {
        self.reads[device]
    }

    /// Returns the bytes of all writes submitted to `device`, whatever their result. Zeroing
    /// requests do not count.
    #[must_use]
    pub fn written_bytes(&self, device: usize) -> u64 {
        self.written[device]
    }

    /// Returns the number of operations submitted, reads included.
    #[must_use]
    pub const fn operations(&self) -> u64 {
        self.operations
    }

    /// Returns why the world halted, if it did.
    #[must_use]
    pub const fn halted(&self) -> Option<&HaltReason> {
        self.halt.as_ref()
    }

    /// Returns whether an observer ended the world: no further process is to run here.
    #[must_use]
    pub const fn closed(&self) -> bool {
        self.closed
    }

    /// Describes the first request whose form a device refused, or the first flush beside another
    /// one.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Returns the longest piece of CPU work charged, in nanoseconds.
    #[must_use]
    pub const fn charge_max(&self) -> u64 {
        self.charge_max
    }

    /// Returns the virtual time in nanoseconds.
    #[must_use]
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Crashes all devices and prepares the world for the next process. Counts and trace continue.
    pub fn reboot(&mut self, crash: Crash, survivors: Survivors) {
        self.due.clear();
        self.flushing.clear();
        self.ways = DeviceMapping::to_each(&self.devices);
        self.memories.clear();
        if crash == Crash::PowerCut {
            // A power cut ends all stalls.
            self.stalls.iter_mut().for_each(|stall| stall.end = stall.end.min(self.now));
        }
        for (number, device) in self.devices.iter_mut().enumerate() {
            match crash {
                Crash::PowerCut => device.cut_power(number as u64, survivors),
                Crash::ProcessDeath => device.kill_process(number as u64, survivors),
            }
        }
        self.trace.reboot(self.now, crash, survivors);
        self.halt = None;
        self.crash_at = None;
        self.trap = None;
        self.idle_turns = 0;
        self.deadline = u64::MAX;
    }

    fn schedule(&mut self, time: u64, due: DueEvent) {
        self.due.insert((time, self.next_due), due);
        self.next_due += 1;
    }

    /// Returns the number of the point that `view` will be, if it will be one.
    fn next_point(&self, view: &OpView) -> Option<u64> {
        (view.kind != OpKind::Read).then_some(self.points + 1)
    }

    /// Counts a point if `view` is one, shows it to the observer, and ends the world if that was
    /// requested here.
    fn pass(&mut self, view: &OpView) {
        if self.trap.as_mut().is_some_and(|trap| trap(view)) {
            self.halt_now();
        }
        let Some(point) = self.next_point(view) else { return };
        self.points = point;
        if let Some(mut observer) = self.observer.take() {
            let end = observer(self.points, &self.devices, view);
            self.observer = Some(observer);
            if end {
                self.trace.end();
                self.closed = true;
                self.halt_now();
            }
        }
        if self.crash_at == Some(self.points) {
            self.halt_now();
        }
    }

    /// Carries out an event that is due.
    fn happen(&mut self, due: DueEvent, events: &mut Vec<Event>) {
        match due {
            DueEvent::Land { disk, number, end } => self.devices[disk].land(number, end),
            DueEvent::Sample { disk, token, sector, mut buffer, end } => {
                let result = if buffer.lent().is_some() {
                    let mut own = Buffer::zeroed(buffer.len());
                    let result = self.devices[disk].read(sector, own.as_mut_slice());
                    buffer.put(own.as_slice());
                    result
                } else {
                    self.devices[disk].read(sector, buffer.as_mut_slice())
                };
                let sectors = sector..sector + (buffer.len() / crate::stamp::SECTOR) as u64;
                let id = DiskId(u32::try_from(disk).expect("few devices"));
                let view = OpView::of(id, OpKind::Read, sectors, false).ended();
                let ending = OpResult::Read(result, buffer);
                self.schedule(end, DueEvent::Done { disk, token, ending, view });
            }
            DueEvent::Done { disk, token, ending, view } => {
                if view.kind == OpKind::Flush {
                    self.flushing.remove(&disk);
                    if matches!(ending, OpResult::Refused(..)) {
                        // The data that the flush should have covered is unchanged, but nothing can
                        // know that.
                        self.tell_drop(disk, &BTreeSet::new());
                    }
                }
                let completion = self.end(disk, token, ending);
                let view = OpView { failed: completion.result.is_err(), ..view };
                self.trace.completed(self.now, &view, &completion, self.next_point(&view));
                events.push(Event::Done(completion));
                self.pass(&view);
            }
            DueEvent::Complete(completion) => events.push(Event::Done(completion)),
        }
    }

    fn fail_write(&mut self, disk: usize, number: u64, landed: WrittenPart) {
        if let Some(dropped) = self.devices[disk].fail(number, landed) {
            self.tell_drop(disk, &dropped);
        }
    }

    /// Reports that a flush has failed, and which sectors lost content.
    fn tell_drop(&mut self, disk: usize, dropped: &BTreeSet<u64>) {
        if let Some(tell) = &mut self.on_drop {
            tell(disk, dropped);
        }
    }

    fn end(&mut self, disk: usize, token: Token, ending: OpResult) -> Completion {
        let device = &mut self.devices[disk];
        let (result, buffer) = match ending {
            OpResult::Read(result, buffer) => (result, Some(buffer)),
            OpResult::Refused(kind, buffer) => (Err(kind), buffer),
            OpResult::Write { number, failed: Some(landed) } => {
                self.fail_write(disk, number, landed);
                (Err(IoErrorKind::Io), None)
            }
            OpResult::Write { number, failed: None } => {
                device.complete(number);
                (Ok(()), None)
            }
            OpResult::Flush { flush, failed: true } => {
                let dropped = device.fail_flush(&flush);
                self.tell_drop(disk, &dropped);
                (Err(IoErrorKind::Io), None)
            }
            OpResult::Flush { flush, failed: false } => {
                device.complete_flush(&flush);
                (Ok(()), None)
            }
        };
        Completion { token, result, buffer }
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        if self.halt.is_none() {
            self.collect(until, events);
        }
        if self.halt.is_some() {
            events.clear();
            events.push(Event::Halt);
        }
    }

    fn collect(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.now += TURN_NS;
        self.looks.set(0);
        self.idle_turns += 1;
        if self.idle_turns > IDLE_TURNS_MAX {
            self.halt = Some(HaltReason::Spinning);
        }
        while self.halt.is_none() {
            let next = self.due.first_key_value().map(|((time, _), _)| *time);
            // Report what has happened before the clock moves on.
            if !events.is_empty() && next.is_none_or(|time| time > self.now) {
                break;
            }
            let Some(time) = next.filter(|time| until.is_none_or(|until| *time <= until.0)) else {
                match until {
                    Some(until) if until.0 > self.now => {
                        self.now = until.0;
                        self.idle_turns = 0;
                    }
                    Some(_) => {}
                    None => self.halt = Some(HaltReason::Stuck),
                }
                break;
            };
            let (_, due) = self.due.pop_first().expect("looked at above");
            self.now = self.now.max(time);
            self.idle_turns = 0;
            if let Some(due) = self.delayed(due) {
                self.happen(due, events);
            }
        }
        if self.now > self.deadline {
            self.halt.get_or_insert(HaltReason::Late);
        }
    }
}

/// The handle of a process on the world.
#[derive(Clone)]
pub struct SimDriver(Rc<RefCell<World>>);

impl SimDriver {
    /// Creates a handle on `world`.
    #[must_use]
    pub const fn new(world: Rc<RefCell<World>>) -> Self {
        Self(world)
    }

    /// Borrows the world.
    #[must_use]
    pub fn world(&self) -> Ref<'_, World> {
        self.0.borrow()
    }

    /// Borrows the world mutably.
    #[must_use]
    pub fn world_mut(&self) -> RefMut<'_, World> {
        self.0.borrow_mut()
    }
}

impl Driver for SimDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        self.0.borrow_mut().submit(disk, token, op);
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.0.borrow_mut().wait(until, events);
    }

    fn now(&self) -> Time {
        let world = self.0.borrow();
        world.looks.set(world.looks.get() + 1);
        assert!(world.looks.get() < LOOKS_MAX, "a task does not yield");
        Time(world.now)
    }

    fn wall_seconds(&self) -> u32 {
        // Any fixed date will do; this one is in 2023.
        1_700_000_000
            + u32::try_from(self.0.borrow().now / 1_000_000_000).expect("a run lasts hours, not decades")
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        let world = self.0.borrow();
        match place_of_memory(disk) {
            Some(place) => world.memories[place].as_ref().expect("the memory exists").info(),
            None => world.devices[world.way(disk).device].info(),
        }
    }

    fn charge(&mut self, nanoseconds: u64) {
        let mut world = self.0.borrow_mut();
        world.now += nanoseconds;
        world.charge_max = world.charge_max.max(nanoseconds);
    }
}

#[cfg(test)]
mod tests;
