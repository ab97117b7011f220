//! One VMM's connection, from its first message to its end. One thread waits for messages, kicks,
//! replies and orders of the server. While it has lent the disk to the engine's thread
//! (`ring_path.rs`), it waits only for messages and orders.
//!
//! **The end** may come because the VMM hangs up or is killed, sends data that is not vhost-user,
//! or the server stops. In each case nothing more is taken, and the engine carries out what was
//! taken. Replies that are not needed any more are dropped as they arrive, and with the last of
//! them the guest's memory is unmapped. The next VMM is served immediately: requests of both stay
//! in order, because the engine carries out overlapping ones in order of arrival.

use crate::config_notice::ConfigNotifier;
use crate::device::{Device, DeviceParams};
use crate::requests::{EndReason, RequestHandler};
use crate::ring_path::{DeviceGuard, RingPath};
use crate::volume::{ThreadCommand, VolumeControl};
use crate::writer_claim::WritingClient;
use bcached_port::{Bell, Export};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;
use vhost::vhost_user::{BackendReqHandler, Error as ProtocolError};

/// The time within which a message must be complete.
const MESSAGE_LIMIT: Duration = Duration::from_secs(10);
/// The disk is lent only after this long without a large request. After one, more follow soon, and
/// the disk would only be passed back and forth.
const STREAM_PAUSE: Duration = Duration::from_millis(1);

/// Why a session ended that was not ended by its VMM.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    #[error("the VMM violated the protocol: {0}")]
    Protocol(ProtocolError),
    #[error(
        "the VMM does not share the guest's memory with bcached: configure it to do so (QEMU: \
         -object memory-backend-memfd,id=mem,size=SIZE,share=on -numa node,memdev=mem; Cloud \
         Hypervisor: --memory size=SIZE,shared=on)"
    )]
    NotShared,
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
    #[error("the volume is not served at present")]
    NotServed,
    #[error("the engine has ended; its requests are carried out when the VMM connects again")]
    Engine,
    #[error(
        "memory of the guest is missing: the VMM has truncated its file, or the system has no room \
         for it (see df /dev/shm)"
    )]
    Memory,
}

/// A session.
struct Session<'a> {
    control: &'a VolumeControl,
    device: Arc<Mutex<Device>>,
    handler: BackendReqHandler<Mutex<Device>>,
    socket: Arc<UnixStream>,
    bell: Arc<OwnedFd>,
    ring_path: Option<Arc<RingPath>>,
    /// Rings that were not emptied in their turn, for fairness.
    unfinished: Vec<u16>,
    queues: u16,
}

/// The reasons for a wake-up.
#[derive(Default)]
struct WakeReasons {
    message: bool,
    bell: bool,
    order: bool,
    newcomer: bool,
    kicks: Vec<u16>,
}

/// Serves one VMM to its end.
pub(crate) fn serve(
    control: &VolumeControl,
    listener: BorrowedFd<'_>,
    export: &Arc<Export>,
    stream: UnixStream,
) -> Result<(), SessionError> {
    let mut session = Session::begin(control, export, stream)?;
    let result = session.run(listener);
    if result.is_ok() && control.order() == ThreadCommand::Stop {
        session.wind_up();
    }
    result
}

impl<'a> Session<'a> {
    fn begin(
        control: &'a VolumeControl,
        export: &Arc<Export>,
        stream: UnixStream,
    ) -> Result<Self, SessionError> {
        let route = export.served.clone().ok_or(SessionError::NotServed)?;
        stream.set_read_timeout(Some(MESSAGE_LIMIT))?;
        stream.set_write_timeout(Some(MESSAGE_LIMIT))?;
        let bell =
            Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?);
        let waits = Arc::clone(&bell);
        let ring_handle = control.rings.of(export.uuid.0);
        let ring_path =
            ring_handle.as_ref().map(|ring| RingPath::new(ring, Arc::clone(&bell))).transpose()?;
        let ring: Bell = match ring_path.clone() {
            Some(ring_path) => Arc::new(move || ring_path.tell()),
            None => {
                let rings = Arc::clone(&bell);
                Arc::new(move || notify(&rings))
            }
        };
        let queues = control.options.queues;
        let halves = route.connect_with_bell(control.limits.requests, ring);
        let (pending_count, limits) = (Arc::clone(&control.pending_count), &control.limits);
        let socket = Arc::new(stream.try_clone()?);
        let goes_on = || !control.is_stopping();
        let writer = WritingClient::connects((&control.exports, export), control.peer, &socket, goes_on);
        let is_read_only = writer.is_offered_read_only;
        let what = (Arc::clone(export), control.exports.clone(), writer);
        let serving = RequestHandler::new(what, route, halves, pending_count, limits, queues);
        let setup = DeviceParams {
            exports: control.exports.clone(),
            block: control.options.block,
            is_read_only,
            queues,
            wait: Box::new(move |limit| {
                // After a spurious wake-up, the caller checks and waits again.
                let _woken = wait(&mut [PollFd::new(&*waits, PollFlags::IN)], Some(limit));
                clear(&waits);
            }),
            drain: control.limits.drain,
        };
        let device = Arc::new(Mutex::new(Device::new(serving, setup)?));
        ring_handle.iter().zip(&ring_path).for_each(|(ring, ring_path)| ring_path.host(ring, &device));
        control.connected(stream.try_clone()?);
        let handler = BackendReqHandler::from_stream(stream, Arc::clone(&device));
        Ok(Self { control, device, handler, socket, bell, ring_path, unfinished: Vec::new(), queues })
    }

    fn run(&mut self, listener: BorrowedFd<'_>) -> Result<(), SessionError> {
        loop {
            let limit = if self.unfinished.is_empty() { self.lend() } else { Some(Duration::ZERO) };
            let woken = self.sleep(listener, limit)?;
            if woken.message && !self.hear()? {
                return Ok(());
            }
            if woken.order {
                self.control.clear();
                match self.control.order() {
                    ThreadCommand::Stop => return Ok(()),
                    ThreadCommand::NotifyChange => self.device().tell_of_change(),
                    ThreadCommand::Serve => {}
                }
            }
            if woken.newcomer {
                self.control.turn_away(listener);
            }
            self.work(woken)?;
        }
    }

    /// Lends the disk to the ring, if there is one and the disk is fit for it. Otherwise returns
    /// when to try again, if that may help.
    fn lend(&self) -> Option<Duration> {
        let ring_path = self.ring_path.as_deref().filter(|ring_path| ring_path.is_open())?;
        let mut device = self.device();
        if device.is_lent {
            return None;
        }
        // Replies to large requests ring the bell.
        let small_for = device.serving.small_for()?;
        if small_for < STREAM_PAUSE {
            return Some(STREAM_PAUSE - small_for);
        }
        ring_path.lend(&mut device);
        None
    }

    /// Takes the disk back, wherever it is.
    fn take_back(&self) {
        if let Some(ring_path) = &self.ring_path {
            ring_path.take_back(&mut self.device());
        }
    }

    /// Handles one message. Returns false if the VMM has hung up.
    fn hear(&mut self) -> Result<bool, SessionError> {
        self.take_back();
        self.device().notices_offered = ConfigNotifier::peek(&self.socket);
        match self.handler.handle_request() {
            Ok(()) => Ok(true),
            Err(ProtocolError::Disconnected) => Ok(false),
            // The end of a killed VMM may look like this, and so does an end caused by this side.
            Err(ProtocolError::SocketBroken(error))
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected
                ) =>
            {
                Ok(false)
            }
            Err(_) if self.device().shares_nothing => Err(SessionError::NotShared),
            Err(error) => Err(SessionError::Protocol(error)),
        }
    }

    fn work(&mut self, woken: WakeReasons) -> Result<(), SessionError> {
        if woken.bell {
            clear(&self.bell);
        }
        let mut device = DeviceGuard::new(&self.device, self.ring_path.as_deref());
        if device.is_lent
            && let Some(ring_path) = &self.ring_path
        {
            if ring_path.is_open() {
                return Ok(());
            }
            // The ring is gone, and the disk is here again. The ring path is told so, too, because
            // the disk may have been lent after the ring released it.
            ring_path.take_back(&mut device);
        }
        if woken.bell {
            device.answer();
        }
        for ring in &woken.kicks {
            device.rings[usize::from(*ring)].clear_kick();
        }
        // Replies make room for all rings, and a message may have started or enabled one.
        let mut rings = woken.kicks;
        rings.append(&mut self.unfinished);
        if woken.bell || woken.message {
            rings = (0..self.queues).collect();
        }
        for ring in rings {
            if device.take(ring) && !self.unfinished.contains(&ring) {
                self.unfinished.push(ring);
            }
        }
        self.control.note(device.serving.is_writing());
        match device.over() {
            None => Ok(()),
            Some(EndReason::Engine) => Err(SessionError::Engine),
            Some(EndReason::Memory) => Err(SessionError::Memory),
        }
    }

    /// Sleeps until there is something to do, at most for the given time.
    fn sleep(&self, listener: BorrowedFd<'_>, limit: Option<Duration>) -> io::Result<WakeReasons> {
        let device = Some(self.device()).filter(|device| !device.is_lent);
        let rings = device.as_ref().map_or(&[][..], |device| &device.rings);
        let kicks = (0..).zip(rings).filter_map(|(index, ring)| Some((index, ring.kick()?)));
        let (indices, kicks): (Vec<u16>, Vec<BorrowedFd<'_>>) = kicks.unzip();
        let fixed = [self.socket.as_fd(), self.bell.as_fd(), self.control.wake(), listener];
        let mut fds: Vec<PollFd<'_>> =
            fixed.into_iter().chain(kicks).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        wait(&mut fds, limit)?;
        let has = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (fixed, kicks) = fds.split_at(fixed.len());
        Ok(WakeReasons {
            message: has(&fixed[0]),
            bell: has(&fixed[1]),
            order: has(&fixed[2]),
            newcomer: has(&fixed[3]),
            kicks: indices.into_iter().zip(kicks).filter(|(_, fd)| has(fd)).map(|(index, _)| index).collect(),
        })
    }

    /// Passes the answers to taken requests to the guest, as far as they arrive before the server's
    /// deadline.
    fn wind_up(&mut self) {
        self.take_back();
        let mut device = self.device();
        device.pause();
        while !device.finish() {
            let left = self.control.deadline().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // The order may be repeated with an earlier deadline.
            let mut fds = [
                PollFd::new(&*self.bell, PollFlags::IN),
                PollFd::from_borrowed_fd(self.control.wake(), PollFlags::IN),
            ];
            if wait(&mut fds, Some(left)).is_err() {
                return;
            }
            clear(&self.bell);
            self.control.clear();
        }
    }

    fn device(&self) -> DeviceGuard<'_> {
        DeviceGuard::new(&self.device, self.ring_path.as_deref())
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.take_back();
        self.ring_path.iter().for_each(|ring_path| ring_path.end());
    }
}

pub(crate) fn lock(device: &Mutex<Device>) -> MutexGuard<'_, Device> {
    // Code that holds the lock can leave the value inconsistent only by a panic, which ends the
    // connection.
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Signals an eventfd.
pub(crate) fn notify(fd: &OwnedFd) {
    // The write fails only if the counter is at its maximum, and then the thread is awake anyway.
    let _rung = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Clears an eventfd.
pub(crate) fn clear(fd: &OwnedFd) {
    let mut count = [0; 8];
    // Non-blocking; it does not matter if there is nothing to read.
    let _read = rustix::io::read(fd, &mut count);
}

/// Waits for one of the descriptors, at most for the given time.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.map(Timespec::try_from).transpose().unwrap_or(None);
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
