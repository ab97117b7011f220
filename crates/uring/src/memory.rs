//! Process-wide memory settings.
#![allow(
    unsafe_code,
    reason = "the C library's allocator and the process are tuned by calls that no crate wraps"
)]

/// Blocks of at least this size, in bytes, are returned to the system when they are freed: requests
/// of many megabytes must not stay resident after they have ended.
#[cfg(target_env = "gnu")]
const RETURNED_BYTES: libc::c_int = 1 << 20;

/// Since Linux 5.6; not among the crate's constants.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Keeps the allocator from retaining large blocks. By default, once the first large block is
/// freed, glibc retains all later ones, and three times the configured memory stays resident.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: `mallopt` changes parameters of the allocator under its own lock; it is called
        // before there are other threads. A refusal changes nothing, so the result is ignored.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED_BYTES) };
    }
}

/// Protects this process from memory pressure: dirty pages above us wait for us, so we must not
/// wait for them. Pages stay in memory once they are touched, and the kernel's reclaim never waits
/// for I/O that would come back to this process. Each refusal of the system is described in a
/// sentence; an ordinary user may do neither.
///
/// # Errors
/// What was refused, for the log. Nothing depends on it.
pub fn hold() -> Result<(), String> {
    let mut refused = Vec::new();
    if !may_lock() {
        refused.push(
            "cannot lock memory (no CAP_IPC_LOCK, and locked memory is limited; LimitMEMLOCK=infinity or \
             `ulimit -l unlimited` lifts the limit): this process may be swapped out, and requests then \
             wait until it is read back"
                .to_owned(),
        );
    } else if let Err(error) = answer(lock()) {
        refused.push(format!(
            "cannot lock memory ({error}): this process may be swapped out, and requests then wait until \
             it is read back"
        ));
    }
    if let Err(error) = answer(declare_flusher()) {
        refused.push(format!(
            "cannot set PR_SET_IO_FLUSHER (needs CAP_SYS_RESOURCE): {error}; file systems mounted from this \
             daemon may deadlock when memory is short"
        ));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.join("; ")) }
}

fn lock() -> libc::c_int {
    // SAFETY: the call takes no pointer; it only sets a property of the process.
    unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }
}

fn declare_flusher() -> libc::c_int {
    // SAFETY: with these arguments, the call takes no pointer; it only sets a property of the
    // process.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) }
}

fn answer(result: libc::c_int) -> std::io::Result<()> {
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Returns true if memory may be locked without a limit. With a limit, later allocations would fail
/// as soon as it is reached, so it is better to lock nothing.
fn may_lock() -> bool {
    use rustix::process::{Resource, getrlimit};
    use rustix::thread::{CapabilitySet, capabilities};
    let may = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    may || getrlimit(Resource::Memlock).current.is_none()
}
