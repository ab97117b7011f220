//! One volume's socket and its thread: one VMM after the other.

use crate::pending_count::Tally;
use crate::server::{Limits, VolumeOptions};
use crate::session::{clear, notify, serve, wait};
use bcached_port::socket::Listening;
use bcached_port::{Export, ExportTable, Peer, Quiet};
use bcached_uring::Rings;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// When descriptors run out, accepting pauses this long instead of spinning.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// Of the next socket.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// What the server wants of a volume's thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// Go on.
    Serve,
    /// Tell the VMM that the volume has changed, then go on.
    Tell,
    /// Come to an end.
    Stop,
}

/// What a volume's thread shares with the server.
pub(crate) struct Control {
    pub(crate) name: String,
    pub(crate) exports: ExportTable,
    /// No other socket of this process has had it.
    pub(crate) number: u64,
    /// Whoever is on the socket.
    pub(crate) peer: Peer,
    pub(crate) limits: Limits,
    pub(crate) options: VolumeOptions,
    /// Where volumes are served, as far as disks can be there.
    pub(crate) rings: Rings,
    /// Requests that the engine has not answered.
    pub(crate) tally: Arc<Tally>,
    state: Mutex<State>,
    /// The thread has ended.
    ended: Condvar,
    wake: OwnedFd,
}

struct State {
    /// When the thread is to have ended.
    stop_by: Option<Instant>,
    is_changed: bool,
    /// The VMM that is connected, to be cut off.
    client: Option<UnixStream>,
    is_writing: bool,
    /// It takes the place of the one that is listened on, whose file has gone.
    again: Option<Listening>,
    has_ended: bool,
    crowded: Quiet,
    broken: Quiet,
}

/// Whoever is connected to a volume.
pub(crate) struct Connected {
    pub(crate) is_writing: bool,
}

impl Control {
    pub(crate) fn new(
        name: String,
        (exports, rings): (ExportTable, Rings),
        limits: Limits,
        options: VolumeOptions,
    ) -> io::Result<Self> {
        let state = State {
            stop_by: None,
            is_changed: false,
            client: None,
            is_writing: false,
            again: None,
            has_ended: false,
            crowded: Quiet::default(),
            broken: Quiet::default(),
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (state, ended) = (Mutex::new(state), Condvar::new());
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let peer = Peer::Machine(number);
        Ok(Self {
            name,
            exports,
            number,
            peer,
            limits,
            options,
            rings,
            tally: Arc::default(),
            state,
            ended,
            wake,
        })
    }

    /// Wakes the thread, when polled.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(crate) fn clear(&self) {
        clear(&self.wake);
    }

    /// What is wanted now. That something is to be told is said once.
    pub(crate) fn order(&self) -> Order {
        let mut state = self.lock();
        if state.stop_by.is_some() {
            return Order::Stop;
        }
        if std::mem::take(&mut state.is_changed) { Order::Tell } else { Order::Serve }
    }

    /// Whether the thread is to come to an end. Only looks.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stop_by.is_some()
    }

    /// Until when a thread that is to stop may wait for the engine.
    pub(crate) fn deadline(&self) -> Instant {
        self.lock().stop_by.unwrap_or_else(Instant::now)
    }

    /// A VMM has come.
    pub(crate) fn connected(&self, client: UnixStream) {
        let mut state = self.lock();
        state.client = Some(client);
        state.is_writing = false;
    }

    /// The VMM is gone.
    fn gone(&self) {
        self.lock().client = None;
    }

    /// What the VMM does.
    pub(crate) fn note(&self, is_writing: bool) {
        self.lock().is_writing = is_writing;
    }

    /// Whether and how a VMM is connected.
    pub(crate) fn client(&self) -> Option<Connected> {
        let state = self.lock();
        state.client.as_ref().map(|_| Connected { is_writing: state.is_writing })
    }

    /// The volume has changed.
    pub(crate) fn change(&self) {
        self.lock().is_changed = true;
        notify(&self.wake);
    }

    /// VMMs come by another socket from now on.
    pub(crate) fn listen_on(&self, again: Listening) {
        self.lock().again = Some(again);
        notify(&self.wake);
    }

    /// There is one.
    fn is_to_listen_anew(&self) -> bool {
        self.lock().again.is_some()
    }

    /// The thread is to end by then.
    pub(crate) fn stop(&self, by: Instant) {
        let mut state = self.lock();
        state.stop_by = Some(state.stop_by.map_or(by, |earlier| earlier.min(by)));
        drop(state);
        notify(&self.wake);
    }

    /// Ends whatever the thread waits for of its VMM.
    pub(crate) fn cut(&self) {
        if let Some(client) = &self.lock().client {
            // It may have gone by itself.
            let _gone = client.shutdown(Shutdown::Both);
        }
    }

    /// Whether the thread has ended before the deadline.
    pub(crate) fn wait_ended(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        while !state.has_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Somebody connects while another VMM is served: it is closed at once, so that it does not wait for an answer that
    /// does not come.
    pub(crate) fn turn_away(&self, listener: BorrowedFd<'_>) {
        if accept_with(listener, SocketFlags::CLOEXEC).is_ok()
            && let Some(count) = self.lock().crowded.count()
        {
            let volume = &self.name;
            tracing::warn!(
                event = "vhost-crowded",
                volume,
                count,
                "a VMM connected while another has the volume"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The fields are whole between any two statements: a panic elsewhere does not spoil them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that the thread is about to return, also if it panics.
struct Ending<'a>(&'a Control);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.has_ended, state.client) = (true, None);
        drop(state);
        self.0.ended.notify_all();
    }
}

/// A volume's thread. The socket is removed when it ends.
pub(crate) fn run(control: &Control, listening: Listening) {
    let _ending = Ending(control);
    // The socket goes before the end is told: who waited for that may make it again.
    let mut listening = listening;
    let mut pause = None;
    // Asked each time: a session that ends by the order has taken note of it.
    while control.order() != Order::Stop {
        let mut fds = vec![PollFd::from_borrowed_fd(control.wake(), PollFlags::IN)];
        if pause.is_none() {
            fds.push(PollFd::new(&listening, PollFlags::IN));
        }
        // Whoever waits at the former socket comes first.
        let is_anew = control.is_to_listen_anew() && pause.is_none();
        if !is_anew && let Err(error) = wait(&mut fds, pause) {
            let volume = &control.name;
            tracing::error!(event = "vhost-ended", volume, %error, "poll failed; the volume is served to no VMM any more");
            return;
        }
        control.clear();
        pause = None;
        if control.order() == Order::Stop {
            return;
        }
        match accept_with(&listening, SocketFlags::CLOEXEC) {
            Ok(stream) => serve_one(control, &listening, UnixStream::from(stream)),
            // Nobody waits there any more.
            Err(Errno::AGAIN) => {
                let again = control.lock().again.take();
                listening = again.unwrap_or(listening);
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                let volume = &control.name;
                tracing::warn!(event = "vhost-not-accepted", volume, %error, "could not accept a VMM's connection");
                pause = Some(ACCEPT_PAUSE);
            }
        }
    }
}

fn serve_one(control: &Control, listening: &Listening, stream: UnixStream) {
    let volume = &control.name;
    let found = control.exports.find(volume);
    // Found by name only: a volume that is gone must not be taken for one whose label that is.
    let Some(export) = found.ok().filter(|export| export.name == *volume) else {
        tracing::debug!(
            event = "vhost-broke-off",
            volume,
            "a VMM came for a volume that is not served at present"
        );
        return;
    };
    tracing::debug!(event = "vhost-connected", volume, "a VMM has come");
    let export: Arc<Export> = export;
    if let Err(error) = serve(control, listening.as_fd(), &export, stream)
        && let Some(count) = control.lock().broken.count()
    {
        tracing::warn!(event = "vhost-broke-off", volume, count, %error, "a VMM's connection broke off");
    }
    control.gone();
}
