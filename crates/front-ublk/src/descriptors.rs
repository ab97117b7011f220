//! What the driver has put for each tag of a queue: memory of its own, mapped for reading.
#![allow(unsafe_code, reason = "the driver's descriptions are shared memory")]

use crate::abi::{DESCRIPTION_BYTES, Description, QUEUE_STRIDE};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The descriptions of one queue.
pub(crate) struct Descriptors {
    start: NonNull<u8>,
    bytes: usize,
    depth: u16,
}

// SAFETY: it is memory that only the driver writes, and that is read with atomic loads.
unsafe impl Send for Descriptors {}

impl Descriptors {
    /// Those of `queue`, which is `depth` deep.
    pub(crate) fn map(device: impl AsFd, queue: u16, depth: u16) -> Result<Self, Errno> {
        let page = rustix::param::page_size();
        let bytes = (usize::from(depth) * DESCRIPTION_BYTES).next_multiple_of(page);
        let offset = u64::from(queue) * QUEUE_STRIDE.next_multiple_of(page as u64);
        // SAFETY: the kernel chooses the place, so no memory of ours is replaced.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, bytes, depth })
    }

    /// What the request of `tag` is. Only meant between the end of the command that brought it and the next command of the tag; at any other
    /// time it is anything.
    pub(crate) fn read(&self, tag: u16) -> Description {
        assert!(tag < self.depth, "a queue has no such tag");
        // SAFETY: `tag` is within the mapping, which begins at a page and lives as long as `self`; a description is aligned to 8 bytes, and
        // loads of the sizes of its fields are atomic, so that the driver may write meanwhile.
        let (flags, sectors, sector) = unsafe {
            let description = self.start.as_ptr().add(usize::from(tag) * DESCRIPTION_BYTES);
            (
                AtomicU32::from_ptr(description.cast()).load(Ordering::Relaxed),
                AtomicU32::from_ptr(description.add(4).cast()).load(Ordering::Relaxed),
                AtomicU64::from_ptr(description.add(8).cast()).load(Ordering::Relaxed),
            )
        };
        Description::new(flags, sectors, sector)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: it is the mapping that `map` has made, and nothing refers to it any more.
        let _unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
