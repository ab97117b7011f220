//! The fast path of a disk: while nothing has to be waited for, requests are taken and answered on
//! the ring of the engine that serves its volume.
//!
//! A volume's own thread costs two hops for each request, one from the guest and one from the
//! engine, and waking it takes longer than a small request. So it lends the disk to the engine's
//! thread, and sleeps until it gets the disk back.
//!
//! ```text
//! the volume's thread ── lends the disk ──► engine's thread: small requests, replies, calls
//!                     ◄── gives it back ─── a large request, an invalid ring,
//!                                           the first write (to register its claim)
//!                     ── takes it ────────► a message of the VMM, an order of the server, the end
//! ```
//!
//! - **The owner of the disk** is recorded in [`Device::is_lent`], under its lock. The engine's
//!   thread never waits for that lock: the thread that holds it rings the bell when it releases it.
//! - **Nothing that a VMM does makes the engine's thread wait**, because other volumes would wait,
//!   too. The VMM's memory is system memory ([`crate::memory::is_memory`]), its eventfds are
//!   eventfds, and the kernel signals them (`signal.rs`). A disk for which this cannot be
//!   established stays with its own thread.
//! - **A turn is short**: it is limited in requests and bytes, and then others get their turn.
//! - **While the engine's thread is awake, no kicks are needed**: it checks the rings itself.
//!   Before it sleeps it enables kicks.

use crate::device::{Device, TurnOutcome};
use crate::session::{lock, notify};
use bcached_uring::{Bell, Command, RingClient, RingHandle};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};

/// The state shared by the volume's thread and the ring.
pub(crate) struct RingPath {
    /// Signals kicks.
    pub(crate) watch: Arc<OwnedFd>,
    /// Watched, too: signals the end.
    end: OwnedFd,
    /// Wakes the volume's thread.
    thread: Arc<OwnedFd>,
    bell: Bell,
    /// The ring has been asked to look at this disk.
    rung: AtomicBool,
    /// The disk is lent: news goes to the ring, otherwise to the thread.
    is_lent: AtomicBool,
    /// The ring has found the disk locked.
    has_missed: AtomicBool,
    is_ending: AtomicBool,
    /// The ring is gone.
    is_closed: AtomicBool,
}

impl RingPath {
    /// Creates a ring path on a ring; `thread` wakes the volume's thread.
    pub(crate) fn new(ring: &RingHandle, thread: Arc<OwnedFd>) -> io::Result<Arc<Self>> {
        let watch = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let end = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&watch, &end, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Arc::new(Self {
            watch,
            end,
            thread,
            bell: ring.bell(),
            rung: AtomicBool::new(false),
            is_lent: AtomicBool::new(false),
            has_missed: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }))
    }

    /// Starts the ring path. If the ring is gone, the thread keeps the disk.
    pub(crate) fn host(self: &Arc<Self>, ring: &RingHandle, device: &Arc<Mutex<Device>>) {
        let device = Arc::downgrade(device);
        let client = RingDisk { ring_path: Arc::clone(self), device, is_armed: false };
        if let Err(error) = ring.host(Box::new(client)) {
            tracing::debug!(event = "vhost-no-ring", %error, "a virtual machine's disk is served by its own thread");
        }
    }

    /// Announces news from the engine to the current owner of the disk.
    pub(crate) fn tell(&self) {
        if self.is_lent.load(Ordering::SeqCst) { self.ring() } else { notify(&self.thread) }
    }

    fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            self.bell.ring();
        }
    }

    /// Lends the disk, if that is possible.
    pub(crate) fn lend(&self, device: &mut Device) {
        if self.is_open() && device.lend(&self.watch) {
            self.is_lent.store(true, Ordering::SeqCst);
            self.ring();
        }
    }

    /// Takes the disk back.
    pub(crate) fn take_back(&self, device: &mut Device) {
        device.is_lent = false;
        self.is_lent.store(false, Ordering::SeqCst);
    }

    /// Called when the thread has released the disk's lock.
    pub(crate) fn unlocked(&self) {
        if self.has_missed.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::SeqCst)
    }

    /// Ends the ring path: the ring releases the disk.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        notify(&self.end);
        self.ring();
    }
}

/// The disk as a client of the ring.
struct RingDisk {
    ring_path: Arc<RingPath>,
    /// The disk is owned by its own thread: it ends with that thread, whatever is here.
    device: Weak<Mutex<Device>>,
    /// A poll for kicks is pending in the kernel.
    is_armed: bool,
}

impl RingDisk {
    /// Works on the disk, if it is lent and not locked.
    fn with<T>(&self, work: impl FnOnce(&mut Device) -> T) -> Option<T> {
        let device = self.device.upgrade()?;
        let mut device = match device.try_lock() {
            Ok(device) => device,
            Err(TryLockError::Poisoned(device)) => device.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        device.is_lent.then(|| work(&mut device))
    }

    /// Like [`RingDisk::with`]. If the disk is locked, the thread that holds the lock rings when it
    /// is done.
    fn with_or_later<T>(&self, work: impl Fn(&mut Device) -> T) -> Option<T> {
        if !self.ring_path.is_lent.load(Ordering::SeqCst) {
            return None;
        }
        self.with(&work).or_else(|| {
            self.ring_path.has_missed.store(true, Ordering::SeqCst);
            // The lock may have been released already.
            self.with(&work)
        })
    }

    fn look(&self, is_rung: bool) {
        let ring_path = &self.ring_path;
        let turn = self.with_or_later(|device| {
            let turn = device.turn(is_rung);
            if turn == TurnOutcome::NeedsThread {
                ring_path.take_back(device);
            }
            turn
        });
        match turn {
            Some(TurnOutcome::More) => ring_path.ring(),
            Some(TurnOutcome::NeedsThread) => notify(&ring_path.thread),
            Some(TurnOutcome::Idle) | None => {}
        }
    }
}

impl RingClient for RingDisk {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.ring_path.watch.clone()
    }

    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool) {
        // Cleared before the look, so that a ring of the bell during it is not missed. Also cleared
        // before checking whether the disk is here. Otherwise a thread that lends it in between
        // would mistake the earlier ring for its own.
        let is_rung =
            self.ring_path.rung.load(Ordering::SeqCst) && self.ring_path.rung.swap(false, Ordering::SeqCst);
        if !self.ring_path.is_lent.load(Ordering::SeqCst) {
            return;
        }
        if is_rung || self.has_news() {
            self.look(is_rung);
        }
        if !self.is_armed {
            self.is_armed = push(Command::Readable { tag: 0 });
        }
    }

    fn completed(&mut self, _: u16, _: i32) {
        self.is_armed = false;
        // Which kick it was does not matter: all rings are checked.
        let mut told =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let _many = epoll::wait(&self.ring_path.watch, &mut told, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    }

    fn has_news(&self) -> bool {
        self.with(|device| device.has_news()).unwrap_or(false)
    }

    fn may_sleep(&mut self) -> bool {
        !self.with_or_later(Device::listen).unwrap_or(false)
    }

    fn is_over(&self) -> bool {
        !self.is_armed && self.ring_path.is_ending.load(Ordering::SeqCst)
    }

    fn leaves_first(&self) -> bool {
        true
    }
}

impl Drop for RingDisk {
    fn drop(&mut self) {
        self.ring_path.is_closed.store(true, Ordering::SeqCst);
        // The thread may hold the lock for a long time, so it is not taken here; the thread finds
        // out itself.
        self.ring_path.is_lent.store(false, Ordering::SeqCst);
        notify(&self.ring_path.thread);
    }
}

/// A disk that its own thread has locked.
pub(crate) struct DeviceGuard<'a> {
    device: Option<MutexGuard<'a, Device>>,
    ring_path: Option<&'a RingPath>,
}

impl<'a> DeviceGuard<'a> {
    pub(crate) fn new(device: &'a Mutex<Device>, ring_path: Option<&'a RingPath>) -> Self {
        Self { device: Some(lock(device)), ring_path }
    }
}

impl std::ops::Deref for DeviceGuard<'_> {
    type Target = Device;

    fn deref(&self) -> &Device {
        self.device.as_ref().expect("held until it is dropped")
    }
}

impl std::ops::DerefMut for DeviceGuard<'_> {
    fn deref_mut(&mut self) -> &mut Device {
        self.device.as_mut().expect("held until it is dropped")
    }
}

impl Drop for DeviceGuard<'_> {
    fn drop(&mut self) {
        self.device = None;
        self.ring_path.into_iter().for_each(RingPath::unlocked);
    }
}
