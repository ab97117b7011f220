//! The process's memory as a whole.
#![allow(unsafe_code, reason = "the C library's allocator is tuned by a call that no crate wraps")]

/// Blocks of this size and above go back to the system when they are freed, in bytes: requests of many megabytes must not
/// stay resident after their time.
#[cfg(target_env = "gnu")]
const RETURNED_BYTES: libc::c_int = 1 << 20;

/// Keeps the allocator from holding on to large blocks. Left alone, glibc learns from the first large block that is freed
/// to keep all later ones, and three times the configured memory stays resident.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: `mallopt` changes parameters of the allocator under its own lock; it is called before there are other
        // threads. Its refusal changes nothing, so the result does not matter.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED_BYTES) };
    }
}
