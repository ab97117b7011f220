//! The process's memory as a whole.
#![allow(
    unsafe_code,
    reason = "the C library's allocator and the process are tuned by calls that no crate wraps"
)]

/// Blocks of this size and above go back to the system when they are freed, in bytes: requests of many megabytes must not
/// stay resident after their time.
#[cfg(target_env = "gnu")]
const RETURNED_BYTES: libc::c_int = 1 << 20;

/// Since Linux 5.6; not among the constants of the crate.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

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

/// Makes this process's memory its own (dirty pages above us wait for us, so we must not wait for them):
/// pages stay in memory once they were touched, and the kernel's reclaim never waits for I/O that would come back here.
/// What the system refuses is said in a sentence; an ordinary user may do neither.
///
/// # Errors
/// What was refused, for the log. Nothing depends on it.
pub fn hold() -> Result<(), String> {
    let mut refused = Vec::new();
    if !may_lock() {
        refused.push(
            "it may be swapped out, and then a request waits until it is read back (no CAP_IPC_LOCK, and a limit to locked \
             memory: LimitMEMLOCK=infinity, or `ulimit -l unlimited`, lifts that)"
                .to_owned(),
        );
    } else if let Err(error) = answer(lock()) {
        refused
            .push(format!("it may be swapped out, and then a request waits until it is read back ({error})"));
    }
    if let Err(error) = answer(declare_flusher()) {
        refused
            .push(format!(
                "when memory is short the kernel may wait for this process, which waits for the kernel, if what is served is \
                 mounted on this machine (PR_SET_IO_FLUSHER: {error}; it takes CAP_SYS_RESOURCE)"
            ));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.join("; ")) }
}

fn lock() -> libc::c_int {
    // SAFETY: it takes no pointer; it only sets a property of the process.
    unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }
}

fn declare_flusher() -> libc::c_int {
    // SAFETY: with these arguments it takes no pointer; it only sets a property of the process.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) }
}

fn answer(result: libc::c_int) -> std::io::Result<()> {
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// With a limit, later memory would be refused as soon as it is reached: better none is locked.
fn may_lock() -> bool {
    use rustix::process::{Resource, getrlimit};
    use rustix::thread::{CapabilitySet, capabilities};
    let may = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    may || getrlimit(Resource::Memlock).current.is_none()
}
