//! Allocates slots in a ring's table of buffers that the kernel registers by itself for ring
//! clients. Each ring client gets a contiguous run of slots.

use io_uring::IoUring;
use std::ops::Range;

/// Slots for all clients of one ring together: as many as the kernel allows, and enough for 32
/// devices of four deep queues.
const SLOTS: u16 = 1 << 14;

/// The table of one ring. It is created when a ring client first needs part of it.
#[derive(Default)]
pub(crate) struct BufferSlots {
    /// Whether the kernel has created the table; `None`: not asked yet.
    is_there: Option<bool>,
    /// The runs allocated to ring clients, in order.
    taken: Vec<Range<u16>>,
}

impl BufferSlots {
    /// Allocates `count` free slots with nothing registered in them, and returns the first. Returns
    /// `None` if there is no table or no room in it.
    pub(crate) fn take(&mut self, ring: &IoUring, count: u16) -> Option<u16> {
        let make = || ring.submitter().register_buffers_sparse(u32::from(SLOTS)).is_ok();
        if !*self.is_there.get_or_insert_with(make) {
            return None;
        }
        let run = self.find(count)?;
        // A ring client whose device is gone may have left buffers registered there.
        crate::ring::clear_slots(ring, u32::from(run.start), run.len()).ok()?;
        let at = self.taken.partition_point(|taken| taken.start < run.start);
        self.taken.insert(at, run.clone());
        Some(run.start)
    }

    /// Finds a free run.
    fn find(&self, count: u16) -> Option<Range<u16>> {
        let starts = core::iter::once(0).chain(self.taken.iter().map(|taken| taken.end));
        let ends = self.taken.iter().map(|taken| taken.start).chain(core::iter::once(SLOTS));
        let mut gaps = starts.zip(ends);
        gaps.find(|(start, end)| end - start >= count).map(|(start, _)| start..start + count)
    }

    /// Frees the run that begins at `first`.
    pub(crate) fn give_back(&mut self, first: u16) {
        self.taken.retain(|taken| taken.start != first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_do_not_overlap_and_are_given_again() {
        let Ok(ring) = IoUring::new(8) else { return eprintln!("SKIPPED: no io_uring here") };
        let mut slots = BufferSlots::default();
        let first = slots.take(&ring, 128).expect("there is room");
        let second = slots.take(&ring, 128).expect("there is room");
        assert!(first.abs_diff(second) >= 128);
        slots.give_back(first);
        let third = slots.take(&ring, 64).expect("there is room");
        let fourth = slots.take(&ring, 64).expect("there is room");
        assert_eq!((third, fourth), (first, first + 64), "the gap is used");
        assert_eq!(slots.take(&ring, SLOTS), None);
        let rest = slots.take(&ring, SLOTS - 256).expect("all the rest");
        assert_eq!((rest, slots.take(&ring, 1)), (256, None));
    }
}
