//! Devices in memory that complete each operation before the next wait. The data of volumes is
//! neither copied nor kept; metadata is both.

use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The block size of either device, in bytes.
pub const BLOCK_BYTES: usize = 4096;
const SECTOR_BYTES: usize = 512;
/// The virtual time that one wait takes, in nanoseconds: as long as a fast drive takes. Timers use
/// it.
const WAIT_NS: u64 = 10_000;

/// The first bytes of each block that a client writes. Metadata never begins with them.
pub const DATA: [u8; 16] = *b"data of a client";

/// Counts of the operations on the devices, and of the queries for the time.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct OpCounts {
    pub cache_reads: u64,
    pub cache_writes: u64,
    pub backing_reads: u64,
    pub backing_writes: u64,
    pub flushes: u64,
    pub metadata_bytes: u64,
    pub waits: u64,
    pub times: u64,
}

/// Both devices and the virtual clock.
pub struct World {
    devices: [Device; 2],
    now: u64,
    ended: Vec<Completion>,
    asked: OpCounts,
    times: Cell<u64>,
}

struct Device {
    info: DiskInfo,
    /// Zeroed when allocated; pages that are never touched take no memory.
    bytes: Vec<u8>,
    /// Which blocks hold metadata, one bit each.
    metadata: Vec<u64>,
}

impl Device {
    /// Creates a device that keeps only its first `kept` bytes.
    fn new(sectors: u64, kept: usize) -> Self {
        let info = DiskInfo {
            sectors,
            logical_block_sectors: 8,
            volatile_cache: true,
            fua: true,
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
            discard: false,
            write_zeroes: true,
            unmap: true,
        };
        Self { info, bytes: vec![0; kept], metadata: vec![0; kept.div_ceil(64 * BLOCK_BYTES)] }
    }

    fn place(&mut self, start: usize, bytes: &[u8]) {
        for block in start / BLOCK_BYTES..(start + bytes.len()).div_ceil(BLOCK_BYTES) {
            self.metadata[block / 64] |= 1 << (block % 64);
        }
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Stores `bytes` if they are metadata. Returns the number of metadata bytes.
    fn write(&mut self, start: usize, bytes: &[u8]) -> u64 {
        if bytes[..DATA.len()] != DATA {
            self.place(start, bytes);
            return bytes.len() as u64;
        }
        if start < self.bytes.len() {
            for block in start / BLOCK_BYTES..(start + bytes.len()) / BLOCK_BYTES {
                self.metadata[block / 64] &= !(1 << (block % 64));
            }
        }
        0
    }

    fn read(&self, start: usize, into: &mut [u8]) {
        let block = start / BLOCK_BYTES;
        let is_data = self.metadata.get(block / 64).is_none_or(|bits| bits & (1 << (block % 64)) == 0);
        if is_data && into.len() == BLOCK_BYTES {
            return;
        }
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }
}

impl World {
    /// Creates a cache and a backing device of these sizes.
    pub fn new(cache_bytes: u64, backing_bytes: u64) -> Rc<RefCell<Self>> {
        let cache = Device::new(cache_bytes / SECTOR_BYTES as u64, size(cache_bytes));
        let backing = Device::new(backing_bytes / SECTOR_BYTES as u64, 16 * BLOCK_BYTES);
        let (ended, asked) = (Vec::with_capacity(1024), OpCounts::default());
        Rc::new(RefCell::new(Self { devices: [cache, backing], now: 0, ended, asked, times: Cell::new(0) }))
    }

    /// Stores metadata on a device directly, without an operation.
    pub fn place(&mut self, disk: DiskId, sector: u64, bytes: &[u8]) {
        self.devices[disk.0 as usize].place(size(sector) * SECTOR_BYTES, bytes);
    }

    /// Returns the counts so far.
    pub const fn asked(&self) -> OpCounts {
        let mut asked = self.asked;
        asked.times = self.times.get();
        asked
    }

    fn carry_out(&mut self, disk: DiskId, token: Token, op: Op) {
        let (device, is_cache) = (&mut self.devices[disk.0 as usize], disk.0 == 0);
        let mut buffer = None;
        match op {
            Op::Read { sector, buffer: mut memory } => {
                device.read(size(sector) * SECTOR_BYTES, memory.as_mut_slice());
                buffer = Some(memory);
                *(if is_cache { &mut self.asked.cache_reads } else { &mut self.asked.backing_reads }) += 1;
            }
            Op::Write { sector, payload, .. } => {
                self.asked.metadata_bytes += device.write(size(sector) * SECTOR_BYTES, payload.as_slice());
                *(if is_cache { &mut self.asked.cache_writes } else { &mut self.asked.backing_writes }) += 1;
            }
            Op::Flush => self.asked.flushes += 1,
            Op::Zero { sector, sectors, .. } => {
                device.place(size(sector) * SECTOR_BYTES, &vec![0; size(sectors) * SECTOR_BYTES]);
            }
            Op::Discard { .. } => {}
        }
        self.ended.push(Completion { token, result: Ok(()), buffer });
    }
}

fn size(number: u64) -> usize {
    usize::try_from(number).expect("devices fit in the address space")
}

/// A driver that carries out each operation when it is submitted.
pub struct InlineDriver(pub Rc<RefCell<World>>);

impl Driver for InlineDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        self.0.borrow_mut().carry_out(disk, token, op);
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        let mut world = self.0.borrow_mut();
        world.asked.waits += 1;
        world.now += WAIT_NS;
        if !world.ended.is_empty() {
            events.extend(world.ended.drain(..).map(Event::Done));
            return;
        }
        match until {
            Some(until) => world.now = world.now.max(until.0),
            None => events.push(Event::Halt),
        }
    }

    fn now(&self) -> Time {
        let world = self.0.borrow();
        world.times.set(world.times.get() + 1);
        Time(world.now)
    }

    fn wall_seconds(&self) -> u32 {
        1_700_000_000
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        self.0.borrow().devices[disk.0 as usize].info.clone()
    }
}
