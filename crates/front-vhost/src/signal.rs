//! Descriptors by which a VMM and this daemon notify each other of entries in a ring.
//!
//! They come from the VMM, which has them open as well, and may be anything. None of them is waited
//! for: kicks are read with a non-blocking flag, and calls go through [`EventfdCaller`]. A
//! descriptor that is not an eventfd is written to directly by the volume's own thread, which
//! blocks no other volume if that turns out badly. The engine's thread, which serves other volumes
//! too, does not use it.

use bcached_uring::EventfdCaller;
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Signals requests from the guest.
pub(crate) struct Kick {
    file: File,
    /// The epoll instance that watches it.
    watch: Option<Arc<OwnedFd>>,
}

/// Signals answers to the guest.
pub(crate) struct Call {
    file: File,
    /// The non-blocking way to signal it, if it is an eventfd.
    caller: Option<EventfdCaller>,
}

impl Kick {
    pub(crate) fn new(file: File) -> Self {
        Self { file, watch: None }
    }

    /// Clears it. Returns false if it is not an eventfd, and must not be waited for again.
    pub(crate) fn clear(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        // No offset of its own. The file's own non-blocking flag is not sufficient, because the VMM
        // can clear it again.
        let read = match rustix::io::preadv2(&self.file, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) {
            // Before Linux 5.8 eventfds do not support that flag.
            Err(Errno::OPNOTSUPP) => {
                must_not_block(&self.file);
                rustix::io::read(&self.file, &mut count)
            }
            read => read,
        };
        matches!(read, Ok(8) | Err(Errno::AGAIN | Errno::INTR))
    }

    /// Lets `watch` signal each kick from now on, until this is dropped. Returns false if that is
    /// impossible, because it is not an eventfd.
    pub(crate) fn is_watched_by(&mut self, watch: &Arc<OwnedFd>) -> bool {
        if self.watch.is_some() {
            return true;
        }
        if EventfdCaller::new(self.file.as_fd()).is_err() {
            return false;
        }
        // Edge-triggered: the receiver checks the ring, and need not read the counter.
        let (flags, data) = (epoll::EventFlags::IN | epoll::EventFlags::ET, epoll::EventData::new_u64(0));
        let is_watched = epoll::add(watch, &self.file, data, flags).is_ok();
        self.watch = is_watched.then(|| Arc::clone(watch));
        is_watched
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Kick {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            // Closing the file is not sufficient, because the VMM has it open, too.
            let _gone = epoll::delete(watch, &self.file);
        }
    }
}

impl Call {
    pub(crate) fn new(file: File) -> Self {
        let caller = EventfdCaller::new(file.as_fd()).ok();
        if caller.is_none() {
            must_not_block(&file);
        }
        Self { file, caller }
    }

    /// Whether signalling it never blocks, whatever the VMM does.
    pub(crate) const fn never_waits(&self) -> bool {
        self.caller.is_some()
    }

    pub(crate) fn ring(&mut self) {
        match &mut self.caller {
            Some(caller) => caller.ring(),
            // An eventfd at its maximum refuses, but then the other side has been notified.
            None => drop(rustix::io::write(&self.file, &1_u64.to_ne_bytes())),
        }
    }
}

/// Whatever a VMM's descriptor is, using it must not block the thread that serves.
fn must_not_block(file: &File) {
    if let Ok(flags) = fcntl_getfl(file) {
        let _as_good_as_it_gets = fcntl_setfl(file, flags | OFlags::NONBLOCK);
    }
}
