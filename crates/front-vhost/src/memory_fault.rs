//! Handles memory of a VMM that is taken away while it is mapped here, because its file was
//! truncated or the system has no room for it (a full `/dev/shm`).
//!
//! The kernel ends a process that accesses such memory, with a signal (`SIGBUS`). That would end
//! the disks of all other clients, too. So the signal is caught. If the address is in watched
//! memory, the whole mapping is replaced by empty memory, and it is recorded that it [was
//! cut](WatchedMapping::is_cut). The record is made first. So code that has read from the empty
//! memory and checks afterwards finds the record, and discards what it read. For any other address
//! the signal has its former effect.
#![allow(unsafe_code, reason = "a signal's handler, which puts memory in the place of memory")]

use libc::{c_int, c_void, sigaction, siginfo_t};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use vm_memory::GuestRegionMmap;

/// A mapping that is watched for the lifetime of this value.
pub(crate) struct WatchedMapping {
    entry: &'static WatchEntry,
    /// Dropped after the entry is released: the memory is mapped for as long as it is watched.
    mapped: Arc<GuestRegionMmap<()>>,
}

/// What the handler knows of a mapping. An entry lives as long as the process, and is reused.
#[derive(Default)]
struct WatchEntry {
    /// Odd while the next two fields change. The handler skips the entry then: memory being
    /// accessed is not just starting or ceasing to be watched.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 if the entry is free.
    bytes: AtomicUsize,
    is_cut: AtomicBool,
    /// The entry that was created before this one.
    next: AtomicPtr<WatchEntry>,
}

/// The newest entry. A handler may take no lock, so it walks all of them.
static ENTRIES: AtomicPtr<WatchEntry> = AtomicPtr::new(ptr::null_mut());
/// The unused entries.
static FREE: Mutex<Vec<&'static WatchEntry>> = Mutex::new(Vec::new());
/// The former action of the signal.
static FORMER: OnceLock<sigaction> = OnceLock::new();

impl WatchedMapping {
    /// Watches a mapping. If the system refuses to let the signal be caught, it keeps its former
    /// effect.
    pub(crate) fn new(mapped: Arc<GuestRegionMmap<()>>) -> Self {
        FORMER.get_or_init(catch);

        let entry =
            FREE.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_else(WatchEntry::make);
        entry.is_cut.store(false, Ordering::SeqCst);
        entry.set(mapped.as_ptr().addr(), mapped.size());
        Self { entry, mapped }
    }

    /// The memory.
    pub(crate) const fn mapped(&self) -> &Arc<GuestRegionMmap<()>> {
        &self.mapped
    }

    /// Whether it was taken away. To be checked after reading from it, before the data is used.
    pub(crate) fn is_cut(&self) -> bool {
        self.entry.is_cut.load(Ordering::SeqCst)
    }
}

impl Drop for WatchedMapping {
    fn drop(&mut self) {
        self.entry.set(0, 0);
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.entry);
    }
}

impl WatchEntry {
    /// Creates an entry, which the handler finds from then on.
    fn make() -> &'static Self {
        let entry: &'static Self = Box::leak(Box::default());
        let _former = ENTRIES.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |newest| {
            entry.next.store(newest, Ordering::SeqCst);
            Some(ptr::from_ref(entry).cast_mut())
        });
        entry
    }

    /// Sets the watched range. Only the owner of the entry calls this.
    fn set(&self, start: usize, bytes: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.bytes.store(bytes, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the watched range, if the address is in it.
    fn find(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, bytes) = (self.start.load(Ordering::SeqCst), self.bytes.load(Ordering::SeqCst));
        let is_whole = version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst);
        let is_inside = address.checked_sub(start).is_some_and(|offset| offset < bytes);
        (is_whole && is_inside).then_some((start, bytes))
    }
}

/// Installs the handler. Returns the former action.
fn catch() -> sigaction {
    // SAFETY: all zeroes are a valid action, the default one, and the calls read one and write one.
    // The handler does only what a handler may: atomics and system calls. It runs on the thread's
    // alternate stack if there is one, like the handler of the standard library, which detects
    // stack overflows.
    unsafe {
        let mut former: sigaction = MaybeUninit::zeroed().assume_init();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut former) == 0 {
            let mut ours: sigaction = MaybeUninit::zeroed().assume_init();
            ours.sa_sigaction = handle as *const () as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut());
        }
        former
    }
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel calls this with a valid `info`. For a signal sent by a process (a code of
    // 0 or less) it has no address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: `errno` belongs to this thread; the interrupted code finds it unchanged.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    if code <= 0 || !replace(address) {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Replaces the mapping that contains the address with empty memory. Returns false if no watched
/// mapping contains it, or the system refuses.
fn replace(address: usize) -> bool {
    let mut next = ENTRIES.load(Ordering::SeqCst);
    // SAFETY: an entry that can be found lives as long as the process.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.next.load(Ordering::SeqCst);
        let Some((start, bytes)) = entry.find(address) else { continue };
        entry.is_cut.store(true, Ordering::SeqCst);
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
        );
        // SAFETY: a guest's mapping replaces itself. The code that accesses it keeps it mapped and
        // watched, and no reference into it exists, since its bytes may change at any time anyway.
        let mapped =
            unsafe { libc::mmap(ptr::with_exposed_provenance_mut(start), bytes, protection, flags, -1, 0) };
        return mapped != libc::MAP_FAILED;
    }
    false
}

/// Performs the signal's former action.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    // The cell may still be empty, if a signal arrives after the handler is installed and before
    // the cell is filled.
    let former = FORMER.get().filter(|former| ![libc::SIG_DFL, libc::SIG_IGN].contains(&former.sa_sigaction));
    // SAFETY: an action contains a handler or one of the two values above. A handler that takes
    // only the signal's number ignores the other arguments. With the default action, the signal
    // ends the process when this returns.
    unsafe {
        match former {
            Some(former) => {
                std::mem::transmute::<*const (), Handler>(ptr::with_exposed_provenance(former.sa_sigaction))(
                    signal, info, context,
                );
            }
            None => {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryRegion as _, MemoryRegionAddress};

    const BYTES: usize = 1 << 20;

    /// Memory in a file, with some content.
    fn mapped() -> (File, Arc<GuestRegionMmap<()>>) {
        let file =
            File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(BYTES as u64).expect("room");
        let offset = FileOffset::new(file.try_clone().expect("a descriptor"), 0);
        let mapping = vm_memory::MmapRegion::from_file(offset, BYTES).expect("is mapped");
        let mapped = Arc::new(GuestRegionMmap::new(mapping, GuestAddress(0)).expect("lies somewhere"));
        mapped.store(7_u8, MemoryRegionAddress(5), Ordering::SeqCst).expect("memory");
        (file, mapped)
    }

    fn first(watched: &WatchedMapping) -> u8 {
        watched.mapped().load(MemoryRegionAddress(5), Ordering::SeqCst).expect("memory")
    }

    #[test]
    fn memory_that_is_taken_away_reads_as_empty_and_is_known_to_be() {
        for _round in 0..50 {
            let ((file, memory), (_other_file, other)) = (mapped(), mapped());
            let (watched, other) = (WatchedMapping::new(memory), WatchedMapping::new(other));
            assert!(!watched.is_cut() && first(&watched) == 7);
            file.set_len(0).expect("is cut");
            assert!(!watched.is_cut(), "nobody has touched it");
            assert_eq!((first(&watched), watched.is_cut()), (0, true));
            // No other page of it raises a signal any more, also when written.
            let last = MemoryRegionAddress(watched.mapped().len() - 1);
            watched.mapped().store(1_u8, last, Ordering::SeqCst).expect("memory");
            assert_eq!((first(&other), other.is_cut()), (7, false));
        }
        // Other tests use some, too.
        assert!(FREE.lock().unwrap().len() < 50, "entries are used again");
    }

    /// For memory that is not watched, or not any more, the signal ends the process as before.
    #[test]
    fn elsewhere_the_signal_does_what_it_did() {
        const CHILD: &str = "BCACHED_TEST_CUT";
        if std::env::var_os(CHILD).is_some() {
            let _watched = WatchedMapping::new(mapped().1);
            let (file, memory) = mapped();
            drop(WatchedMapping::new(Arc::clone(&memory)));
            file.set_len(0).expect("is cut");
            let _byte: Result<u8, _> = memory.load(MemoryRegionAddress(5), Ordering::SeqCst);
            return;
        }
        let mut child = Command::new(std::env::current_exe().expect("a program"));
        child.args(["--exact", "memory_fault::tests::elsewhere_the_signal_does_what_it_did"]);
        let ended = child.env(CHILD, "1").output().expect("runs");
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS));
    }
}
