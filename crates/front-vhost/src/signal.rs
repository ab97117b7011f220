//! Descriptors by which a VMM and this daemon tell each other that something is in a ring.
//!
//! They come from the VMM, which has them open, too, and may be anything. None of them is waited for: kicks are read with a flag that says so,
//! calls go through [`Caller`]. What is no eventfd is written to as it is by a volume's own thread, which holds up nobody else if
//! it is deceived; the thread of an engine, which serves others too, does not touch it.

use bcached_uring::Caller;
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// By which the guest tells of requests.
pub(crate) struct Kick {
    file: File,
    /// Where it is watched.
    watch: Option<Arc<OwnedFd>>,
}

/// By which the guest is told of answers.
pub(crate) struct Call {
    file: File,
    /// The way that never waits, if there is one to this.
    caller: Option<Caller>,
}

impl Kick {
    pub(crate) fn new(file: File) -> Self {
        Self { file, watch: None }
    }

    /// Takes note of it; false if it is no eventfd, and nobody should wait for it again.
    pub(crate) fn clear(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        // At no place of its own. The file's own flag would not do: its VMM can take that away again.
        let read = match rustix::io::preadv2(&self.file, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) {
            // Linux before 5.8 knows that flag for no eventfd.
            Err(Errno::OPNOTSUPP) => {
                must_not_block(&self.file);
                rustix::io::read(&self.file, &mut count)
            }
            read => read,
        };
        matches!(read, Ok(8) | Err(Errno::AGAIN | Errno::INTR))
    }

    /// From now on `watch` tells of each kick, until this is dropped. False if that cannot be: it is no eventfd.
    pub(crate) fn is_watched_by(&mut self, watch: &Arc<OwnedFd>) -> bool {
        if self.watch.is_some() {
            return true;
        }
        if Caller::new(self.file.as_fd()).is_err() {
            return false;
        }
        // By edges: whoever is told looks into the ring, and need not read the counter.
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
            // Closing it would not do: the VMM has it open, too.
            let _gone = epoll::delete(watch, &self.file);
        }
    }
}

impl Call {
    pub(crate) fn new(file: File) -> Self {
        let caller = Caller::new(file.as_fd()).ok();
        if caller.is_none() {
            must_not_block(&file);
        }
        Self { file, caller }
    }

    /// Whether ringing it never waits, whatever the VMM does.
    pub(crate) const fn never_waits(&self) -> bool {
        self.caller.is_some()
    }

    pub(crate) fn ring(&mut self) {
        match &mut self.caller {
            Some(caller) => caller.ring(),
            // An eventfd at its maximum refuses; then the other side has been told.
            None => drop(rustix::io::write(&self.file, &1_u64.to_ne_bytes())),
        }
    }
}

/// Whatever a descriptor of a VMM is, using it must not hold up who serves.
fn must_not_block(file: &File) {
    if let Ok(flags) = fcntl_getfl(file) {
        let _as_good_as_it_gets = fcntl_setfl(file, flags | OFlags::NONBLOCK);
    }
}
