//! Records in-flight requests in memory that the VMM keeps while the daemon is gone.
//!
//! When a daemon dies, the requests that it had taken from a ring and not answered would be lost,
//! because the ring does not show which they are. So they are recorded in a file that the VMM holds
//! (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`). The next daemon resumes them, in their order of
//! arrival. The layout is that of the vhost-user specification, "inflight I/O tracking" of a split
//! ring. The part of a queue:
//!
//! ```text
//! 0 features u64 | 8 version u16 | 10 descriptors u16 | 12 last batch head u16 | 14 used index u16
//! then for each descriptor: 0 in flight u8 | 6 next u16 | 8 counter u64
//! ```
//!
//! Only the death of the process matters here, so program order suffices; the stores are atomic so
//! that the compiler keeps it. A request that was answered but not yet recorded as such is
//! recognised by the ring's used index, which is then ahead of the recorded one.

use crate::memory::{MemoryError, is_memory, map};
use crate::memory_fault::WatchedMapping;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes as _, VolatileMemory as _};

/// Bytes before the first descriptor, and of each descriptor.
const HEAD_BYTES: usize = 16;
const DESCRIPTOR_BYTES: usize = 16;
/// Alignment of the queues' parts.
const ALIGNMENT: usize = 64;
/// Version of the layout.
const VERSION: u16 = 1;
const AT_VERSION: usize = 8;
const AT_DESCRIPTORS: usize = 10;
const AT_BATCH: usize = 12;
const AT_USED: usize = 14;

/// The whole area, for several queues.
#[derive(Clone)]
pub(crate) struct InflightArea {
    mapped: Arc<WatchedMapping>,
    queues: u16,
    queue_size: u16,
    pub(crate) is_memory: bool,
}

/// The part of one queue.
pub(crate) struct InflightTracker {
    area: InflightArea,
    /// Its offset in the area.
    at: usize,
    /// Counter of the next request.
    counter: u64,
}

/// What a former daemon has left of a queue.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct RecoveredQueue {
    /// Heads of chains that were taken and not answered, in the order in which they were taken.
    pub(crate) heads: Vec<u16>,
    /// The available index up to which the ring's entries were taken.
    pub(crate) next_available: u16,
}

/// Size of an area in bytes.
pub(crate) const fn area_bytes(queues: u16, queue_size: u16) -> u64 {
    part_bytes(queue_size) as u64 * queues as u64
}

const fn part_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + DESCRIPTOR_BYTES * queue_size as usize).next_multiple_of(ALIGNMENT)
}

/// Creates a file for an area.
pub(crate) fn file(queues: u16, queue_size: u16) -> io::Result<File> {
    let file = File::from(memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    ftruncate(&file, area_bytes(queues, queue_size))?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

impl InflightArea {
    /// Maps an area that the VMM passes in.
    pub(crate) fn map(file: File, offset: u64, queues: u16, queue_size: u16) -> Result<Self, MemoryError> {
        let is_memory = is_memory(&file);
        let mapped = Arc::new(map(file, offset, (0, area_bytes(queues, queue_size)))?);
        Ok(Self { mapped, queues, queue_size, is_memory })
    }

    /// Whether the memory was taken away.
    pub(crate) fn is_cut(&self) -> bool {
        self.mapped.is_cut()
    }

    /// Returns the part of a queue, or `None` if the area has none for it, or too small a one.
    pub(crate) fn tracker(&self, queue: u16, queue_size: u16) -> Option<InflightTracker> {
        if queue >= self.queues || queue_size > self.queue_size {
            return None;
        }
        let at = part_bytes(self.queue_size) * usize::from(queue);
        Some(InflightTracker { area: self.clone(), at, counter: 0 })
    }
}

impl InflightTracker {
    /// Resumes what a former daemon has left of the ring, whose current used index is `used`. An
    /// area that is new, or of an unknown layout, is initialised. Whatever its content, each head
    /// is returned at most once and is valid.
    pub(crate) fn resume(&mut self, queue_size: u16, used: u16, next_available: u16) -> RecoveredQueue {
        if self.load(AT_VERSION) != VERSION || self.load(AT_DESCRIPTORS) != queue_size {
            for head in 0..queue_size {
                self.mark(head, 0);
            }
            self.store(AT_USED, used);
            self.store(AT_DESCRIPTORS, queue_size);
            self.store(AT_VERSION, VERSION);
            return RecoveredQueue { heads: Vec::new(), next_available };
        }
        // Answered, but the recording was interrupted.
        let mut head = self.load(AT_BATCH);
        let unnoted = used.wrapping_sub(self.load(AT_USED));
        for _ in 0..unnoted.min(queue_size) {
            if head >= queue_size {
                break;
            }
            self.mark(head, 0);
            head = self.load(Self::descriptor(head) + 6);
        }
        self.store(AT_USED, used);
        let mut left: Vec<(u64, u16)> = (0..queue_size)
            .filter(|head| self.is_marked(*head))
            .map(|head| (self.count(head), head))
            .collect();
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let heads: Vec<u16> = left.into_iter().map(|(_, head)| head).collect();
        let taken = u16::try_from(heads.len()).unwrap_or(queue_size);
        RecoveredQueue { heads, next_available: used.wrapping_add(taken) }
    }

    /// Records that a chain is taken.
    pub(crate) fn begin(&mut self, head: u16) {
        let at = self.at + Self::descriptor(head) + 8;
        self.put(at, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.mark(head, 1);
    }

    /// Records that a chain is about to be given back.
    pub(crate) fn ending(&self, head: u16) {
        self.store(Self::descriptor(head) + 6, self.load(AT_BATCH));
        self.store(AT_BATCH, head);
    }

    /// Records that it was given back, with the ring's used index after that.
    pub(crate) fn ended(&self, head: u16, used: u16) {
        self.mark(head, 0);
        self.store(AT_USED, used);
    }

    /// Records that a chain is put back as if it had not been taken.
    pub(crate) fn untake(&self, head: u16) {
        self.mark(head, 0);
    }

    const fn descriptor(head: u16) -> usize {
        HEAD_BYTES + DESCRIPTOR_BYTES * head as usize
    }

    fn is_marked(&self, head: u16) -> bool {
        self.slice()
            .load::<u8>(self.at + Self::descriptor(head), Ordering::Acquire)
            .is_ok_and(|mark| mark == 1)
    }

    fn count(&self, head: u16) -> u64 {
        self.slice().load(self.at + Self::descriptor(head) + 8, Ordering::Acquire).unwrap_or(0)
    }

    fn mark(&self, head: u16, mark: u8) {
        self.put(self.at + Self::descriptor(head), mark);
    }

    fn load(&self, field: usize) -> u16 {
        self.slice().load(self.at + field, Ordering::Acquire).unwrap_or(0)
    }

    fn store(&self, field: usize, value: u16) {
        self.put(self.at + field, value);
    }

    fn put<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) {
        // All fields are inside and aligned: heads are below the size for which the area was
        // mapped.
        let stored = self.slice().store(value, at, Ordering::Release);
        debug_assert!(stored.is_ok(), "the field at {at} lies in the area");
    }

    fn slice(&self) -> vm_memory::VolatileSlice<'_> {
        self.area.mapped.mapped().as_volatile_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(queues: u16, queue: u16) -> InflightTracker {
        InflightArea::map(file(queues, 8).unwrap(), 0, queues, 8).unwrap().tracker(queue, 8).unwrap()
    }

    fn again(tracker: &InflightTracker) -> InflightTracker {
        InflightTracker { area: tracker.area.clone(), at: tracker.at, counter: 0 }
    }

    #[test]
    fn what_was_taken_and_not_answered_is_left_in_the_order_of_taking() {
        let mut tracker = tracker(2, 1);
        assert_eq!(tracker.resume(8, 5, 7), RecoveredQueue { heads: vec![], next_available: 7 }, "begun");
        for head in [4, 2, 7, 1] {
            tracker.begin(head);
        }
        tracker.ending(2);
        tracker.ended(2, 6);
        let left = again(&tracker).resume(8, 6, 0);
        assert_eq!(left, RecoveredQueue { heads: vec![4, 7, 1], next_available: 9 });
        let mut next = again(&tracker);
        next.resume(8, 6, 0);
        next.begin(3);
        assert_eq!(again(&next).resume(8, 6, 0).heads, [4, 7, 1, 3], "later than what was left");
    }

    /// If the daemon is killed between the answer and its recording, at any of the steps, the
    /// request is not repeated.
    #[test]
    fn what_was_answered_is_not_done_again_though_nobody_noted_it() {
        let mut tracker = tracker(1, 0);
        tracker.resume(8, 0, 0);
        tracker.begin(3);
        tracker.begin(5);
        tracker.ending(3);
        assert_eq!(again(&tracker).resume(8, 0, 0).heads, [3, 5], "the ring does not have it");
        assert_eq!(again(&tracker).resume(8, 1, 0), RecoveredQueue { heads: vec![5], next_available: 2 });
    }

    #[test]
    fn garbage_of_a_vmm_names_only_heads_that_exist() {
        let mut tracker = tracker(1, 0);
        for at in 0..usize::try_from(area_bytes(1, 8)).unwrap() {
            tracker.put(at, 1_u8);
        }
        tracker.store(AT_VERSION, VERSION);
        tracker.store(AT_DESCRIPTORS, 8);
        let mut heads = tracker.resume(8, 300, 0).heads;
        heads.sort_unstable();
        heads.dedup();
        assert!(heads.iter().all(|head| *head < 8) && !heads.is_empty());
        let area = tracker.area.clone();
        assert!(area.tracker(1, 8).is_none() && area.tracker(0, 16).is_none());
        assert!(matches!(InflightArea::map(file(1, 8).unwrap(), 64, 1, 8), Err(MemoryError::Short { .. })));
    }
}
