//! A guest: memory, virtqueues, and a driver for each. It outlives the connections of its VMM.
//!
//! The memory starts at address 0: 64 KiB for the parts of each queue, then, from [`DATA`] on, a
//! slot for each request.

use super::LIMIT;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

pub const MEMORY_BYTES: u64 = 64 << 20;
/// Entries of a ring.
pub const SIZE: u16 = 128;
/// The start of the slots, the size of each, and their number for each queue: three descriptors
/// each.
pub const DATA: u64 = 1 << 20;
pub const SLOT_BYTES: u64 = 132 << 10;
pub const SLOTS: u16 = 32;
/// Offsets in a slot: the status, an indirect table, then data. The header is at 0.
const STATUS: u64 = 32;
const TABLE: u64 = 64;
const CONTENT: u64 = 4096;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

pub struct TestGuest {
    pub file: File,
    pub memory: Arc<GuestMemoryMmap>,
    pub queues: Vec<GuestQueue>,
}

/// A virtqueue and its driver.
pub struct GuestQueue {
    pub memory: Arc<GuestMemoryMmap>,
    pub index: u16,
    pub kick: EventFd,
    pub call: EventFd,
    /// Waits for `call`.
    waits: Epoll,
    pub has_event_index: bool,
    pub is_indirect: bool,
    pub available: u16,
    pub used: u16,
    free: Vec<u16>,
    pub kicks: u64,
}

/// A request.
pub struct GuestRequest<'a> {
    pub kind: u32,
    pub sector: u64,
    pub out: &'a [u8],
    pub into: u32,
}

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub struct GuestReply {
    pub slot: u16,
    pub status: u8,
    /// The length according to the used ring.
    pub written: u32,
    pub content: Vec<u8>,
}

impl TestGuest {
    pub fn new(queues: u16) -> Self {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        ftruncate(&file, MEMORY_BYTES).expect("memory");
        Self::with_memory(file, queues)
    }

    /// A guest with the given file as its memory.
    pub fn with_memory(file: File, queues: u16) -> Self {
        let offset = FileOffset::new(file.try_clone().expect("a descriptor"), 0);
        let bytes = usize::try_from(MEMORY_BYTES).expect("fits");
        let memory = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), bytes, Some(offset))]);
        let memory = Arc::new(memory.expect("is mapped"));
        let queues = (0..queues).map(|index| GuestQueue::new(Arc::clone(&memory), index)).collect();
        Self { file, memory, queues }
    }
}

impl GuestQueue {
    fn new(memory: Arc<GuestMemoryMmap>, index: u16) -> Self {
        let event = || EventFd::new(libc_nonblock()).expect("an eventfd");
        let (kick, call, waits) = (event(), event(), Epoll::new().expect("an epoll"));
        let rung = EpollEvent::new(EventSet::IN, 0);
        waits.ctl(ControlOperation::Add, call.as_raw_fd(), rung).expect("is waited for");
        let free = (0..SLOTS).rev().collect();
        let (available, used) = (0, 0);
        Self {
            memory,
            index,
            kick,
            call,
            waits,
            has_event_index: false,
            is_indirect: false,
            available,
            used,
            free,
            kicks: 0,
        }
    }

    /// Resets the queue as a guest's reset does: the ring is empty.
    pub fn reset(&mut self) {
        (self.available, self.used) = (0, 0);
        self.free = (0..SLOTS).rev().collect();
        let bytes = usize::try_from(self.used_ring() + 0x2000 - self.descriptors()).expect("fits");
        self.memory.write_slice(&vec![0; bytes], GuestAddress(self.descriptors())).expect("memory");
    }

    pub fn descriptors(&self) -> u64 {
        u64::from(self.index) << 16
    }

    pub fn available_ring(&self) -> u64 {
        self.descriptors() + 0x4000
    }

    pub fn used_ring(&self) -> u64 {
        self.descriptors() + 0x8000
    }

    /// The start of a slot.
    pub fn slot(&self, slot: u16) -> u64 {
        DATA + (u64::from(self.index) * u64::from(SLOTS) + u64::from(slot)) * SLOT_BYTES
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn put<T: vm_memory::ByteValued>(&self, at: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(at)).expect("memory");
    }

    pub fn get<T: vm_memory::ByteValued>(&self, at: u64) -> T {
        self.memory.read_obj(GuestAddress(at)).expect("memory")
    }

    pub fn describe(&self, table: u64, index: u16, descriptor: (u64, u32, u16, u16)) {
        let (at, bytes, flags, next) = descriptor;
        self.put(table + 16 * u64::from(index), Descriptor::new(at, bytes, flags, next));
    }

    /// Makes a request available, without a kick. Returns its slot.
    pub fn submit(&mut self, ask: &GuestRequest<'_>) -> u16 {
        let slot = self.free.pop().expect("a free slot");
        let at = self.slot(slot);
        self.put(at, ask.kind);
        self.put(at + 4, 0_u32);
        self.put(at + 8, ask.sector);
        self.put(at + STATUS, 0xaa_u8);
        self.memory.write_slice(ask.out, GuestAddress(at + CONTENT)).expect("memory");
        let out = u32::try_from(ask.out.len()).expect("short");
        let (table, first, flag) =
            if self.is_indirect { (at + TABLE, 0, 0) } else { (self.descriptors(), 3 * slot, 0) };
        let mut chain = vec![(at, 16, flag)];
        if out > 0 {
            chain.push((at + CONTENT, out, 0));
        }
        if ask.into > 0 {
            chain.push((at + CONTENT, ask.into, WRITE));
        }
        chain.push((at + STATUS, 1, WRITE));
        let count = u16::try_from(chain.len()).expect("short");
        for (index, (at, bytes, flags)) in (0..).zip(chain) {
            let next = if index + 1 < count { NEXT } else { 0 };
            self.describe(table, first + index, (at, bytes, flags | next, first + index + 1));
        }
        if self.is_indirect {
            self.describe(self.descriptors(), 3 * slot, (table, 16 * u32::from(count), INDIRECT, 0));
        }
        self.publish(3 * slot);
        slot
    }

    /// Makes a chain available, without a kick.
    pub fn publish(&mut self, head: u16) {
        self.put(self.available_ring() + 4 + 2 * u64::from(self.available % SIZE), head);
        self.available = self.available.wrapping_add(1);
        let index = GuestAddress(self.available_ring() + 2);
        self.memory.store(self.available, index, Ordering::Release).expect("memory");
    }

    /// Kicks if the device has not suppressed that.
    pub fn kick(&mut self, since: u16) {
        fence(Ordering::SeqCst);
        let wanted = if self.has_event_index {
            let event: u16 = self.get(self.used_ring() + 4 + 8 * u64::from(SIZE));
            self.available.wrapping_sub(event).wrapping_sub(1) < self.available.wrapping_sub(since)
        } else {
            self.get::<u16>(self.used_ring()) & 1 == 0
        };
        if wanted {
            self.kicks += 1;
            self.kick.write(1).expect("kicks");
        }
    }

    /// Makes a request available, and kicks.
    pub fn send(&mut self, ask: &GuestRequest<'_>) -> u16 {
        let since = self.available;
        let slot = self.submit(ask);
        self.kick(since);
        slot
    }

    /// Returns the next chain that was given back, if there is one: its head and the bytes written.
    pub fn try_used(&mut self) -> Option<(u16, u32)> {
        let index: u16 =
            self.memory.load(GuestAddress(self.used_ring() + 2), Ordering::Acquire).expect("memory");
        if index == self.used {
            return None;
        }
        let at = self.used_ring() + 4 + 8 * u64::from(self.used % SIZE);
        self.used = self.used.wrapping_add(1);
        let (head, written) = (self.get::<u32>(at), self.get::<u32>(at + 4));
        Some((u16::try_from(head).expect("a head"), written))
    }

    /// Waits for the next chain that is given back.
    pub fn used(&mut self) -> (u16, u32) {
        self.used_within(LIMIT).expect("an answer in time")
    }

    /// Like [`GuestQueue::used`], but returns `None` if none arrives within `limit`.
    pub fn used_within(&mut self, limit: Duration) -> Option<(u16, u32)> {
        loop {
            if let Some(used) = self.try_used() {
                return Some(used);
            }
            // Enable notification for the next one, and check once more.
            self.put(self.available_ring() + 4 + 2 * u64::from(SIZE), self.used);
            fence(Ordering::SeqCst);
            if let Some(used) = self.try_used() {
                return Some(used);
            }
            let limit = i32::try_from(limit.as_millis()).expect("short");
            if self.waits.wait(limit, &mut [EpollEvent::default()]).expect("epoll") == 0 {
                return None;
            }
            let _count = self.call.read();
        }
    }

    pub fn answer(&mut self) -> GuestReply {
        let (head, written) = self.used();
        self.finish(head, written)
    }

    pub fn finish(&mut self, head: u16, written: u32) -> GuestReply {
        assert_eq!(head % 3, 0, "a head that was made available");
        let slot = head / 3;
        assert!(slot < SLOTS && !self.free.contains(&slot), "given back once");
        self.free.push(slot);
        let at = self.slot(slot);
        let mut content = vec![0; written.saturating_sub(1) as usize];
        self.memory.read_slice(&mut content, GuestAddress(at + CONTENT)).expect("memory");
        GuestReply { slot, status: self.get(at + STATUS), written, content }
    }

    /// Makes a request and waits for its answer.
    pub fn ask(&mut self, ask: &GuestRequest<'_>) -> GuestReply {
        let slot = self.send(ask);
        let answer = self.answer();
        assert_eq!(answer.slot, slot);
        answer
    }

    pub fn read(&mut self, sector: u64, bytes: u32) -> Vec<u8> {
        let answer = self.ask(&GuestRequest { kind: IN, sector, out: &[], into: bytes });
        assert_eq!((answer.status, answer.written), (OK, bytes + 1));
        answer.content
    }

    pub fn write(&mut self, sector: u64, content: &[u8]) {
        let answer = self.ask(&GuestRequest { kind: OUT, sector, out: content, into: 0 });
        assert_eq!((answer.status, answer.written), (OK, 1));
    }

    pub fn flush(&mut self) -> u8 {
        self.ask(&GuestRequest { kind: FLUSH, sector: 0, out: &[], into: 0 }).status
    }

    /// Discards or writes zeroes.
    pub fn change(&mut self, kind: u32, (sector, sectors, flags): (u64, u32, u32)) -> u8 {
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(sectors.to_le_bytes());
        range.extend(flags.to_le_bytes());
        self.ask(&GuestRequest { kind, sector: 0, out: &range, into: 0 }).status
    }
}

fn libc_nonblock() -> i32 {
    rustix::event::EventfdFlags::NONBLOCK.bits().cast_signed()
}
