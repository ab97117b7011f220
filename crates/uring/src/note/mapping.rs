//! A file's pages as shared words.
#![allow(unsafe_code, reason = "a shared mapping is raw memory")]

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A whole number of words, mapped shared and writable. What is stored survives this process,
/// however it ends.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only reachable as atomics.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `words` words of `file`. The caller has reserved their space: a store to a
    /// page that cannot be allocated would kill the process.
    pub(super) fn new(file: &File, words: usize) -> std::io::Result<Self> {
        let bytes = words.checked_mul(size_of::<AtomicU64>()).ok_or(std::io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        // It is only ever accessed as `AtomicU64`, for which it does not matter that another
        // process could change the file too.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, words })
    }

    /// The words.
    pub(super) const fn words(&self) -> &[AtomicU64] {
        // SAFETY: `start` is the page-aligned beginning of a mapping of exactly `words` words that
        // lives as long as `self`; any bytes are a valid `AtomicU64`, and no `&mut` to them is ever
        // made.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and no slice of it outlives `self`. A failure
        // leaves it mapped, which is harmless.
        let _ =
            unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.words * size_of::<AtomicU64>()) };
    }
}
