//! The descriptions that the driver writes for each tag of a queue: memory of the driver, mapped
//! read-only.
#![allow(unsafe_code, reason = "the driver's descriptions are shared memory")]

use crate::abi::{DESCRIPTION_BYTES, IoDescriptor, QUEUE_STRIDE};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The descriptions of one queue.
pub(crate) struct RequestDescriptors {
    start: NonNull<u8>,
    bytes: usize,
    depth: u16,
}

// SAFETY: only the driver writes this memory, and it is read with atomic loads.
unsafe impl Send for RequestDescriptors {}

impl RequestDescriptors {
    /// Maps those of `queue`, whose depth is `depth`.
    pub(crate) fn map(device: impl AsFd, queue: u16, depth: u16) -> Result<Self, Errno> {
        let page = rustix::param::page_size();
        let bytes = (usize::from(depth) * DESCRIPTION_BYTES).next_multiple_of(page);
        let offset = u64::from(queue) * QUEUE_STRIDE.next_multiple_of(page as u64);
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
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

    /// Reads the description of the request of `tag`. It is valid only between the completion of
    /// the command that delivered the request and the next command of the tag. At any other time
    /// its content is arbitrary.
    pub(crate) fn read(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth, "a queue has no such tag");
        // SAFETY: `tag` is within the mapping, which starts at a page boundary and lives as long as
        // `self`. A description is aligned to 8 bytes, and loads of the sizes of its fields are
        // atomic, so the driver may write concurrently.
        let (flags, sectors, sector) = unsafe {
            let description = self.start.as_ptr().add(usize::from(tag) * DESCRIPTION_BYTES);
            (
                AtomicU32::from_ptr(description.cast()).load(Ordering::Relaxed),
                AtomicU32::from_ptr(description.add(4).cast()).load(Ordering::Relaxed),
                AtomicU64::from_ptr(description.add(8).cast()).load(Ordering::Relaxed),
            )
        };
        IoDescriptor::new(flags, sectors, sector)
    }
}

impl Drop for RequestDescriptors {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made by `map`, and nothing refers to it any more.
        let _unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
