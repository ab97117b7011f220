//! Devices in memory below the engine's driver, for tests that need many operations rather than
//! exact disasters (the simulator covers those).
//!
//! Sectors filled with one byte value take no memory of their own, so a test can write gigabytes of
//! data. Operations complete in an order drawn from a seed, a few at each wait; time is virtual. A
//! test can make an operation fail, with or without carrying it out.

use bcached_env::rng::Rng;
use bcached_env::{
    Completion, DiskId, DiskInfo, Driver, Event, IoErrorKind, Note, NoteRecord, Op, Time, Token,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

const SECTOR: usize = 512;

/// Virtual time of one wait.
const STEP_NS: u64 = 1_000;

/// Consecutive waits with nothing in flight, while only timers fire, after which the world is
/// considered stuck.
const IDLE_MAX: u64 = 100_000;

/// Consecutive waits without a completion, although something is in flight, after which it is
/// assumed to wait for a timer.
const BARREN_MAX: u64 = 1000;

/// Most operations that complete in one wait.
const ENDINGS_MAX: u64 = 16;

#[derive(Clone)]
enum Sector {
    Filled(u8),
    Mixed(Box<[u8; SECTOR]>),
}

/// What happens to an operation that a test selects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpFault {
    /// It fails and is not carried out.
    Fails,
    /// As `Fails`: the device has disappeared.
    Gone,
    /// It is carried out but reported as failed.
    Lands,
    /// The device does not support it.
    Unknown,
    /// It does not complete yet.
    Waits,
}

/// Decides what happens to an operation, if anything special.
pub type FaultHook = Box<dyn FnMut(DiskId, &Op) -> Option<OpFault>>;

/// Devices, clock, and operations in flight.
pub struct World {
    disks: Vec<Vec<Sector>>,
    under_way: VecDeque<(DiskId, Token, Op)>,
    rng: Rng,
    now: u64,
    idle: u64,
    barren: u64,
    /// The longest time that a task ran without yielding, in nanoseconds of charged work.
    pub longest_ns: u64,
    /// Decides on mishaps.
    pub fate: Option<FaultHook>,
    /// The devices support FUA themselves; otherwise it is reported that a FUA write needs a write
    /// and a flush.
    pub fua: bool,
    /// The devices have a volatile write cache: writes are durable only after a flush.
    pub volatile: bool,
    /// The devices carry out discards, which leave [`DISCARDED`].
    pub discard: bool,
    /// The devices support zeroing a range without writing zeroes to it.
    pub write_zeroes: bool,
    /// As `write_zeroes`, and the device may deallocate the space.
    pub unmap: bool,
    /// Discarded ranges: device, first sector, sectors.
    pub discarded: Vec<(DiskId, u64, u64)>,
    /// Operations that were submitted where a discard was in flight.
    pub beside_discards: Vec<String>,
}

/// The content of discarded sectors.
pub const DISCARDED: u8 = 0xdd;

/// A handle on a world, which outlives the executors that run in it.
#[derive(Clone)]
pub struct MemoryDriver(pub Rc<RefCell<World>>);

/// The longest time that a task may run without yielding, in nanoseconds of charged work. No task
/// should have to wait for longer.
pub const LONGEST_NS: u64 = 200_000;

impl World {
    /// Asserts that no task ran longer than allowed: invariant L5.
    pub fn assert_short(&self) {
        assert!(self.longest_ns <= LONGEST_NS, "{} ns in one piece", self.longest_ns);
    }

    /// Creates devices of `sectors` sectors each, full of zeroes.
    pub fn new(sectors: &[u64], seed: u64) -> Rc<RefCell<Self>> {
        let disk = |sectors: &u64| (0..*sectors).map(|_| Sector::Filled(0)).collect();
        let disks = sectors.iter().map(disk).collect();
        let under_way = VecDeque::new();
        Rc::new(RefCell::new(Self {
            disks,
            under_way,
            rng: Rng::new(seed),
            now: 0,
            idle: 0,
            barren: 0,
            longest_ns: 0,
            fate: None,
            fua: true,
            volatile: true,
            discard: false,
            write_zeroes: true,
            unmap: true,
            discarded: Vec::new(),
            beside_discards: Vec::new(),
        }))
    }

    /// Makes a device larger or smaller.
    pub fn resize(&mut self, disk: usize, sectors: u64) {
        self.disks[disk].resize_with(index(sectors), || Sector::Filled(0));
    }

    /// Adds a copy of a device.
    pub fn copy(&mut self, disk: DiskId) -> DiskId {
        let copy = self.disks[disk.0 as usize].clone();
        self.disks.push(copy);
        DiskId(u32::try_from(self.disks.len() - 1).expect("few"))
    }

    /// Restores the contents of `disk` from `copy`.
    pub fn restore(&mut self, disk: DiskId, copy: DiskId) {
        self.disks[disk.0 as usize] = self.disks[copy.0 as usize].clone();
    }

    /// Stores whole sectors on a device from outside.
    pub fn place(&mut self, disk: usize, sector: u64, bytes: &[u8]) {
        for (place, part) in self.disks[disk][index(sector)..].iter_mut().zip(bytes.chunks_exact(SECTOR)) {
            let same = part.iter().all(|byte| *byte == part[0]);
            *place = if same {
                Sector::Filled(part[0])
            } else {
                Sector::Mixed(Box::new(part.try_into().expect("a sector")))
            };
        }
    }

    /// Reads the contents of a device from outside.
    pub fn look(&self, disk: usize, sector: u64, into: &mut [u8]) {
        for (part, place) in into.chunks_exact_mut(SECTOR).zip(&self.disks[disk][index(sector)..]) {
            match place {
                Sector::Filled(byte) => part.fill(*byte),
                Sector::Mixed(bytes) => part.copy_from_slice(&bytes[..]),
            }
        }
    }

    /// Lets time pass without any event.
    pub fn pass(&mut self, time: Duration) {
        self.now += u64::try_from(time.as_nanos()).expect("a short time");
    }

    /// Drops all operations in flight: the process died.
    pub fn forget(&mut self) {
        self.under_way.clear();
    }

    fn end(&mut self) -> Option<Completion> {
        let pick = index(self.rng.below(self.under_way.len() as u64));
        let (disk, token, mut op) = self.under_way.swap_remove_front(pick).expect("drawn among them");
        let mishap = self.fate.as_mut().and_then(|fate| fate(disk, &op));
        if mishap == Some(OpFault::Waits) {
            self.under_way.push_back((disk, token, op));
            return None;
        }
        if !matches!(mishap, Some(OpFault::Fails | OpFault::Gone | OpFault::Unknown)) {
            self.carry_out(disk.0 as usize, &mut op);
        }
        let buffer = if let Op::Read { buffer, .. } = op { Some(buffer) } else { None };
        Some(Completion {
            token,
            result: match mishap {
                None => Ok(()),
                Some(OpFault::Unknown) => Err(IoErrorKind::Unsupported),
                Some(OpFault::Gone) => Err(IoErrorKind::Gone),
                Some(_) => Err(IoErrorKind::Io),
            },
            buffer,
        })
    }

    fn carry_out(&mut self, disk: usize, op: &mut Op) {
        match op {
            Op::Read { sector, buffer } => {
                let mut own = vec![0; buffer.len()];
                self.look(disk, *sector, &mut own);
                buffer.put(&own);
            }
            Op::Write { sector, payload, .. } => {
                let payload = payload.stable().expect("what is written can be read");
                self.place(disk, *sector, payload.as_slice());
            }
            Op::Zero { sector, sectors, .. } => {
                let range = index(*sector)..index(*sector + *sectors);
                self.disks[disk][range].iter_mut().for_each(|place| *place = Sector::Filled(0));
            }
            Op::Discard { sector, sectors } if self.discard => {
                let range = index(*sector)..index(*sector + *sectors);
                self.disks[disk][range].iter_mut().for_each(|place| *place = Sector::Filled(DISCARDED));
                let device = DiskId(u32::try_from(disk).expect("few"));
                self.discarded.push((device, *sector, *sectors));
            }
            Op::Flush | Op::Discard { .. } => {}
        }
    }

    /// Records an operation that overlaps with a discard in flight, since its effect is undefined.
    fn note_overlap(&mut self, disk: DiskId, op: &Op) {
        let Some((start, end, is_discard)) = range_of(op) else { return };
        let overlaps = |(other, _, earlier): &&(DiskId, Token, Op)| {
            range_of(earlier).is_some_and(|(from, to, was_discard)| {
                *other == disk && start < to && from < end && (is_discard || was_discard)
            })
        };
        if self.under_way.iter().any(|earlier| overlaps(&earlier)) {
            self.beside_discards.push(format!("{disk:?}: {start}..{end} (discard: {is_discard})"));
        }
    }
}

/// Returns the first sector, the end, and whether it is a discard.
fn range_of(op: &Op) -> Option<(u64, u64, bool)> {
    let sectors = |bytes: usize| (bytes / SECTOR) as u64;
    match op {
        Op::Read { sector, buffer } => Some((*sector, *sector + sectors(buffer.len()), false)),
        Op::Write { sector, payload, .. } => Some((*sector, *sector + sectors(payload.len()), false)),
        Op::Zero { sector, sectors, .. } => Some((*sector, *sector + *sectors, false)),
        Op::Discard { sector, sectors } => Some((*sector, *sector + *sectors, true)),
        Op::Flush => None,
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("devices fit in memory")
}

impl Driver for MemoryDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        let mut world = self.0.borrow_mut();
        world.note_overlap(disk, &op);
        world.under_way.push_back((disk, token, op));
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        let mut world = self.0.borrow_mut();
        world.now += STEP_NS;
        if world.under_way.is_empty() {
            world.idle += 1;
            match until {
                Some(until) if world.idle < IDLE_MAX => world.now = world.now.max(until.0),
                // The test must end, not hang.
                _ => events.push(Event::Halt),
            }
            return;
        }
        world.idle = 0;
        let count = 1 + world.rng.below(ENDINGS_MAX);
        for _ in 0..count.min(world.under_way.len() as u64) {
            if let Some(completion) = world.end() {
                events.push(Event::Done(completion));
            }
        }
        world.barren = if events.is_empty() { world.barren + 1 } else { 0 };
        // Everything in flight waits for something that a timer triggers, if for anything.
        match until {
            Some(until) if world.barren > BARREN_MAX => world.now = world.now.max(until.0),
            None if world.barren > IDLE_MAX => events.push(Event::Halt),
            _ => {}
        }
    }

    fn now(&self) -> Time {
        Time(self.0.borrow().now)
    }

    fn charge(&mut self, nanoseconds: u64) {
        let mut world = self.0.borrow_mut();
        world.now += nanoseconds;
        world.longest_ns = world.longest_ns.max(nanoseconds);
    }

    fn wall_seconds(&self) -> u32 {
        1_700_000_000
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        DiskInfo {
            sectors: self.0.borrow().disks[disk.0 as usize].len() as u64,
            logical_block_sectors: 1,
            volatile_cache: self.0.borrow().volatile,
            fua: self.0.borrow().fua,
            discard: self.0.borrow().discard,
            write_zeroes: self.0.borrow().write_zeroes,
            unmap: self.0.borrow().unmap,
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        }
    }
}

/// A note that keeps nothing beyond the process: in these tests no process dies with promises to
/// keep.
#[derive(Default)]
pub struct NoNote;

impl Note for NoNote {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn append(&mut self, _record: NoteRecord) {}

    fn forget_through(&mut self, _sequence: u64) {}

    fn give_up(&mut self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn recovered(&mut self, _session: u64) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn begin(&mut self, _session: u64) {}

    fn reopen(&mut self) {}
}
