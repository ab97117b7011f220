//! The simulated world as the engine's driver: virtual time, latencies and order of completion from one seed, and an
//! end of the world at any chosen operation.
//!
//! The [`World`] outlives the process that runs in it: a [`SimDriver`] is a handle, an executor owns it, and when the
//! executor is dropped (the process died, the power was cut) [`World::reboot`] makes the world ready for the next one.
//!
//! *Points.* Every submission and every completion of an operation that changes a device (write, zeroing, flush,
//! discard) is a point, counted from 1 over the whole run. A crash is asked for by point; an [`Observer`] sees the
//! devices as they are at each. At a submission point the operation is in flight, at a completion point it has
//! completed and the engine has not heard of it. Reads are no points: between two of them a device does not change.

mod crash;
mod submit;
pub mod trace;
mod ways;

use crate::disk::{Device, Faults, Flush, Landed, OpKind, Survivors};
use crate::figures::Hosting;
use bcached_env::rng::Rng;
use bcached_env::{Buffer, Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Op, Time, Token};
pub use crash::Crash;
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use trace::Trace;
use ways::{Way, place_of_memory};

/// CPU time of one turn of the executor, so that a loop that only yields does not stop the clock.
const TURN_NS: u64 = 200;

/// Turns in a row without a device event or timer after which the engine counts as spinning. Honest bursts of work
/// between two events stay below a thousand turns of 256 polls.
const IDLE_TURNS_MAX: u64 = 5_000;

/// Looks at the clock between two waits for the driver, after which some task has not yielded for too long: it would
/// never do so. Every transition looks once, and a turn has 256 polls.
const LOOKS_MAX: u64 = 1_000_000;

/// No CPU work in one piece may exceed this (the engine's rule for transitions).
pub const CHARGE_NS_MAX: u64 = 200_000;

/// Why the world halted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Halt {
    /// As asked for, at this point.
    Asked(u64),
    /// Nothing is under way, no timer is set, and somebody still waits.
    Stuck,
    /// Virtual time ran past the deadline.
    Late,
    /// Tasks keep waking each other and nothing happens.
    Spinning,
}

/// An operation as an [`Observer`] or trap sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpView {
    /// On which device.
    pub disk: DiskId,
    /// What.
    pub kind: OpKind,
    /// Where; empty for a flush.
    pub sectors: Range<u64>,
    /// Carries FUA.
    pub fua: bool,
    /// It has completed, rather than just been submitted.
    pub completed: bool,
    /// With a failure, of which the process has not heard yet.
    pub failed: bool,
}

impl OpView {
    /// An operation that has just been submitted.
    #[must_use]
    pub const fn of(disk: DiskId, kind: OpKind, sectors: Range<u64>, fua: bool) -> Self {
        Self { disk, kind, sectors, fua, completed: false, failed: false }
    }

    /// The same operation when it ends.
    #[must_use]
    pub fn ended(&self) -> Self {
        Self { completed: true, ..self.clone() }
    }
}

/// Looks at the devices at each point: `(point, devices, what made the point)`. The world ends here if it returns true.
pub type Observer = Box<dyn FnMut(u64, &[Device], &OpView) -> bool>;

/// Ends the world at the first operation of which it says yes.
pub type Trap = Box<dyn FnMut(&OpView) -> bool>;

/// Told of each device whose flush has failed, and in which of its sectors something was dropped.
pub type OnDrop = Box<dyn FnMut(usize, &BTreeSet<u64>)>;

/// What happens at a moment of virtual time.
enum Due {
    /// A write becomes visible up to this sector.
    Land { disk: usize, number: u64, end: u64 },
    /// A read takes what is there; it ends later.
    Sample { disk: usize, token: Token, sector: u64, buffer: Buffer, end: u64 },
    /// An operation ends.
    Done { disk: usize, token: Token, ending: Ending, view: OpView },
    /// An operation ends that no device has to do with any more, or none of the world's.
    Told(Completion),
}

enum Ending {
    Read(Result<(), IoErrorKind>, Buffer),
    Write {
        number: u64,
        failed: Option<Landed>,
    },
    Flush {
        flush: Flush,
        failed: bool,
    },
    /// Nothing was done.
    Refused(IoErrorKind, Option<Buffer>),
}

/// Devices, clock and what is on its way.
pub struct World {
    /// The devices, by [`DiskId`].
    pub devices: Vec<Device>,
    /// What happened, hashed and on request recorded.
    pub trace: Trace,
    /// A second flush of a device beside the first is a fault, see [`World::refused`].
    pub one_flush: bool,
    /// One read in four of so many sectors of the cache device, at multiples of that, takes so many nanoseconds more.
    pub node_reads: Option<(u64, u64)>,
    /// What hosts have done here.
    pub hosting: Hosting,
    /// By [`DiskId`].
    ways: Vec<Way>,
    /// What the process uses as devices of its own.
    memories: Vec<Option<Device>>,
    now: u64,
    deadline: u64,
    /// Nanoseconds by which faults have delayed operations so far, all added up; without stalls.
    late: u64,
    /// When devices have stalled, and will.
    stalls: Vec<Range<u64>>,
    rng: Rng,
    due: BTreeMap<(u64, u64), Due>,
    next_due: u64,
    points: u64,
    crash_at: Option<u64>,
    observer: Option<Observer>,
    trap: Option<Trap>,
    on_drop: Option<OnDrop>,
    halt: Option<Halt>,
    closed: bool,
    idle_turns: u64,
    looks: Cell<u64>,
    charge_max: u64,
    refused: Option<String>,
    /// Devices with a flush under way.
    flushing: BTreeSet<usize>,
    operations: u64,
    /// Reads taken, by device.
    reads: Vec<u64>,
    /// Bytes of all writes submitted, by device.
    written: Vec<u64>,
}

impl World {
    /// A world at time zero.
    #[must_use]
    pub fn new(devices: Vec<Device>, seed: u64) -> Self {
        let (reads, written) = (vec![0; devices.len()], vec![0; devices.len()]);
        Self {
            ways: Way::to_each(&devices),
            devices,
            memories: Vec::new(),
            hosting: Hosting::default(),
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

    /// Nobody looks any more.
    pub fn stop_observing(&mut self) {
        self.observer = None;
    }

    /// Ends the world at the first operation that `trap` picks; asked at submission and at completion, reads too.
    pub fn set_trap(&mut self, trap: Trap) {
        self.trap = Some(trap);
    }

    /// Tells `tell` of each flush that fails.
    pub fn on_drop(&mut self, tell: OnDrop) {
        self.on_drop = Some(tell);
    }

    /// No device does anything wrong any more.
    pub fn heal(&mut self) {
        for device in &mut self.devices {
            device.faults = Faults::default();
            device.make_readable();
        }
    }

    /// Whether any device has failed since they were healed; one that is late has not.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        (0..self.devices.len()).any(|device| self.has_device_failed(device))
    }

    /// Whether this device has.
    #[must_use]
    pub fn has_device_failed(&self, device: usize) -> bool {
        self.devices[device].gone || self.devices[device].faults.failures() > 0
    }

    /// Whether this device has failed, or will as soon as it is asked the right thing.
    #[must_use]
    pub fn may_fail(&self, device: usize) -> bool {
        self.has_device_failed(device) || self.devices[device].faults.has_rules()
    }

    /// Ends the world now; no operation submitted from here on reaches a device.
    pub fn halt_now(&mut self) {
        self.halt.get_or_insert(Halt::Asked(self.points));
    }

    /// Something the clients wait for has happened: they wait `patience` more nanoseconds for the next, and as much longer as
    /// faults delay operations from now on. While a device stalls they wait for its end first.
    pub fn progress(&mut self, patience: u64) {
        let resume = self.devices.iter().map(|device| device.stalled_until).max().unwrap_or(0);
        self.deadline = self.now.max(resume).saturating_add(patience);
    }

    /// From now on nothing on `device` completes for so many nanoseconds; then all of it goes on.
    pub fn stall(&mut self, device: usize, nanoseconds: u64) {
        let resume = self.now.saturating_add(nanoseconds);
        self.devices[device].stalled_until = resume;
        self.stalls.push(self.now..resume);
        self.deadline = self.deadline.saturating_add(nanoseconds);
    }

    /// Nanoseconds by which faults have delayed operations so far, all added up.
    #[must_use]
    pub fn late(&self) -> u64 {
        let stalled = self.stalls.iter().map(|stall| stall.end.min(self.now) - stall.start);
        self.late + stalled.sum::<u64>()
    }

    /// Points passed.
    #[must_use]
    pub const fn points(&self) -> u64 {
        self.points
    }

    /// Reads of `device` taken.
    #[must_use]
    pub fn reads(&self, device: usize) -> u64 {
        self.reads[device]
    }

    /// Bytes of all writes to `device` that were submitted, whatever became of them. Zeroes that it is to write by itself are
    /// none.
    #[must_use]
    pub fn written_bytes(&self, device: usize) -> u64 {
        self.written[device]
    }

    /// Operations taken, reads included.
    #[must_use]
    pub const fn operations(&self) -> u64 {
        self.operations
    }

    /// Why the world halted, if it did.
    #[must_use]
    pub const fn halted(&self) -> Option<&Halt> {
        self.halt.as_ref()
    }

    /// An observer has seen enough: no further process is to run here.
    #[must_use]
    pub const fn closed(&self) -> bool {
        self.closed
    }

    /// The first request whose form a device refused, in words, or that was a flush too many.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// The longest piece of CPU work charged, in nanoseconds.
    #[must_use]
    pub const fn charge_max(&self) -> u64 {
        self.charge_max
    }

    /// Virtual time in nanoseconds.
    #[must_use]
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Crashes all devices and makes the world ready for the next process. Counts and trace go on.
    pub fn reboot(&mut self, crash: Crash, survivors: Survivors) {
        self.due.clear();
        self.flushing.clear();
        self.ways = Way::to_each(&self.devices);
        self.memories.clear();
        if crash == Crash::PowerCut {
            // Whatever held a device up is over.
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

    fn schedule(&mut self, time: u64, due: Due) {
        self.due.insert((time, self.next_due), due);
        self.next_due += 1;
    }

    /// The point that `view` is going to make, if it makes one.
    fn next_point(&self, view: &OpView) -> Option<u64> {
        (view.kind != OpKind::Read).then_some(self.points + 1)
    }

    /// Counts a point if `view` makes one, shows it, and ends the world if that is asked for here.
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

    /// Lets what is due at `time` happen.
    fn happen(&mut self, due: Due, events: &mut Vec<Event>) {
        match due {
            Due::Land { disk, number, end } => self.devices[disk].land(number, end),
            Due::Sample { disk, token, sector, mut buffer, end } => {
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
                let ending = Ending::Read(result, buffer);
                self.schedule(end, Due::Done { disk, token, ending, view });
            }
            Due::Done { disk, token, ending, view } => {
                if view.kind == OpKind::Flush {
                    self.flushing.remove(&disk);
                    if matches!(ending, Ending::Refused(..)) {
                        // What it should have covered is as it was, but nobody can know.
                        self.tell_drop(disk, &BTreeSet::new());
                    }
                }
                let completion = self.end(disk, token, ending);
                let view = OpView { failed: completion.result.is_err(), ..view };
                self.trace.completed(self.now, &view, &completion, self.next_point(&view));
                events.push(Event::Done(completion));
                self.pass(&view);
            }
            Due::Told(completion) => events.push(Event::Done(completion)),
        }
    }

    fn fail_write(&mut self, disk: usize, number: u64, landed: Landed) {
        if let Some(dropped) = self.devices[disk].fail(number, landed) {
            self.tell_drop(disk, &dropped);
        }
    }

    /// A flush has failed, and dropped something if it covered anything.
    fn tell_drop(&mut self, disk: usize, dropped: &BTreeSet<u64>) {
        if let Some(tell) = &mut self.on_drop {
            tell(disk, dropped);
        }
    }

    fn end(&mut self, disk: usize, token: Token, ending: Ending) -> Completion {
        let device = &mut self.devices[disk];
        let (result, buffer) = match ending {
            Ending::Read(result, buffer) => (result, Some(buffer)),
            Ending::Refused(kind, buffer) => (Err(kind), buffer),
            Ending::Write { number, failed: Some(landed) } => {
                self.fail_write(disk, number, landed);
                (Err(IoErrorKind::Io), None)
            }
            Ending::Write { number, failed: None } => {
                device.complete(number);
                (Ok(()), None)
            }
            Ending::Flush { flush, failed: true } => {
                let dropped = device.fail_flush(&flush);
                self.tell_drop(disk, &dropped);
                (Err(IoErrorKind::Io), None)
            }
            Ending::Flush { flush, failed: false } => {
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
            self.halt = Some(Halt::Spinning);
        }
        while self.halt.is_none() {
            let next = self.due.first_key_value().map(|((time, _), _)| *time);
            // What has happened is told before the clock moves on.
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
                    None => self.halt = Some(Halt::Stuck),
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
            self.halt.get_or_insert(Halt::Late);
        }
    }
}

/// A process's handle on the world.
#[derive(Clone)]
pub struct SimDriver(Rc<RefCell<World>>);

impl SimDriver {
    /// A handle on `world`.
    #[must_use]
    pub const fn new(world: Rc<RefCell<World>>) -> Self {
        Self(world)
    }

    /// The world.
    #[must_use]
    pub fn world(&self) -> Ref<'_, World> {
        self.0.borrow()
    }

    /// The world, to change.
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
            Some(place) => world.memories[place].as_ref().expect("it is there").info(),
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
