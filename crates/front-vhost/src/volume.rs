//! One volume's socket and its thread: it serves one VMM after another.

use crate::pending_count::PendingCount;
use crate::server::{Limits, VolumeOptions};
use crate::session::{clear, notify, serve, wait};
use bcached_port::socket::SocketListener;
use bcached_port::{Export, ExportTable, LogLimit, Peer};
use bcached_uring::VolumeRings;
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

/// How long accepting pauses when descriptors run out, instead of spinning.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The number of the next socket.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// The server's order to a volume's thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ThreadCommand {
    /// Continue.
    Serve,
    /// Tell the VMM that the volume has changed, then continue.
    NotifyChange,
    /// Stop.
    Stop,
}

/// The state that a volume's thread shares with the server.
pub(crate) struct VolumeControl {
    pub(crate) name: String,
    pub(crate) exports: ExportTable,
    /// The number of the socket, unique within this process.
    pub(crate) number: u64,
    /// The client on the socket.
    pub(crate) peer: Peer,
    pub(crate) limits: Limits,
    pub(crate) options: VolumeOptions,
    /// The rings of the engines that serve volumes, for the fast path of disks.
    pub(crate) rings: VolumeRings,
    /// Counts the requests that the engine has not answered.
    pub(crate) pending_count: Arc<PendingCount>,
    state: Mutex<VolumeState>,
    /// Signalled when the thread has ended.
    ended: Condvar,
    wake: OwnedFd,
}

struct VolumeState {
    /// The deadline by which the thread has to end.
    stop_by: Option<Instant>,
    is_changed: bool,
    /// The connected VMM, for cutting it off.
    client: Option<UnixStream>,
    is_writing: bool,
    /// A recreated socket, to replace the current one, whose file was removed.
    again: Option<SocketListener>,
    has_ended: bool,
    crowded: LogLimit,
    broken: LogLimit,
}

/// The VMM connected to a volume.
pub(crate) struct ConnectedVmm {
    pub(crate) is_writing: bool,
}

impl VolumeControl {
    pub(crate) fn new(
        name: String,
        (exports, rings): (ExportTable, VolumeRings),
        limits: Limits,
        options: VolumeOptions,
    ) -> io::Result<Self> {
        let state = VolumeState {
            stop_by: None,
            is_changed: false,
            client: None,
            is_writing: false,
            again: None,
            has_ended: false,
            crowded: LogLimit::default(),
            broken: LogLimit::default(),
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
            pending_count: Arc::default(),
            state,
            ended,
            wake,
        })
    }

    /// Wakes the thread, which polls it.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(crate) fn clear(&self) {
        clear(&self.wake);
    }

    /// Returns the current order. [`ThreadCommand::NotifyChange`] is returned once for each change.
    pub(crate) fn order(&self) -> ThreadCommand {
        let mut state = self.lock();
        if state.stop_by.is_some() {
            return ThreadCommand::Stop;
        }
        if std::mem::take(&mut state.is_changed) { ThreadCommand::NotifyChange } else { ThreadCommand::Serve }
    }

    /// Whether the thread has to stop. Does not consume the order.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stop_by.is_some()
    }

    /// How long a stopping thread may wait for the engine.
    pub(crate) fn deadline(&self) -> Instant {
        self.lock().stop_by.unwrap_or_else(Instant::now)
    }

    /// Records that a VMM has connected.
    pub(crate) fn connected(&self, client: UnixStream) {
        let mut state = self.lock();
        state.client = Some(client);
        state.is_writing = false;
    }

    /// Records that the VMM is gone.
    fn gone(&self) {
        self.lock().client = None;
    }

    /// Records whether the VMM is writing.
    pub(crate) fn note(&self, is_writing: bool) {
        self.lock().is_writing = is_writing;
    }

    /// Returns the connected VMM, if there is one.
    pub(crate) fn client(&self) -> Option<ConnectedVmm> {
        let state = self.lock();
        state.client.as_ref().map(|_| ConnectedVmm { is_writing: state.is_writing })
    }

    /// Announces that the volume has changed.
    pub(crate) fn change(&self) {
        self.lock().is_changed = true;
        notify(&self.wake);
    }

    /// Makes VMMs connect at another socket from now on.
    pub(crate) fn listen_on(&self, again: SocketListener) {
        self.lock().again = Some(again);
        notify(&self.wake);
    }

    /// Whether there is a recreated socket.
    fn is_to_listen_anew(&self) -> bool {
        self.lock().again.is_some()
    }

    /// Orders the thread to end by the given time.
    pub(crate) fn stop(&self, by: Instant) {
        let mut state = self.lock();
        state.stop_by = Some(state.stop_by.map_or(by, |earlier| earlier.min(by)));
        drop(state);
        notify(&self.wake);
    }

    /// Ends anything of its VMM that the thread waits for.
    pub(crate) fn cut(&self) {
        if let Some(client) = &self.lock().client {
            // It may be gone already.
            let _gone = client.shutdown(Shutdown::Both);
        }
    }

    /// Whether the thread ends before the deadline.
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

    /// Refuses a VMM that connects while another is being served. It is closed immediately, so that
    /// it does not wait for an answer that never comes.
    pub(crate) fn turn_away(&self, listener: BorrowedFd<'_>) {
        if accept_with(listener, SocketFlags::CLOEXEC).is_ok()
            && let Some(count) = self.lock().crowded.count()
        {
            let volume = &self.name;
            tracing::warn!(
                event = "vhost-crowded",
                volume,
                count,
                "a VMM was turned away, because another one is connected to the volume"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, VolumeState> {
        // The fields are consistent between any two statements, so a panic elsewhere does not
        // corrupt them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks the thread as ended when it is about to return, even if it panics.
struct ThreadEndGuard<'a>(&'a VolumeControl);

impl Drop for ThreadEndGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.has_ended, state.client) = (true, None);
        drop(state);
        self.0.ended.notify_all();
    }
}

/// The body of a volume's thread. The socket is removed when it ends.
pub(crate) fn run(control: &VolumeControl, listening: SocketListener) {
    let _ending = ThreadEndGuard(control);
    // The socket is removed before the end is signalled: a thread that waited for the end may
    // create it again.
    let mut listening = listening;
    let mut pause = None;
    // Checked each time: a session that was ended by the order has already cleared its signal.
    while control.order() != ThreadCommand::Stop {
        let mut fds = vec![PollFd::from_borrowed_fd(control.wake(), PollFlags::IN)];
        if pause.is_none() {
            fds.push(PollFd::new(&listening, PollFlags::IN));
        }
        // A connection that waits at the former socket is served first.
        let is_anew = control.is_to_listen_anew() && pause.is_none();
        if !is_anew && let Err(error) = wait(&mut fds, pause) {
            let volume = &control.name;
            tracing::error!(
                event = "vhost-ended",
                volume,
                %error,
                "cannot poll; the volume is no longer served by vhost-user"
            );
            return;
        }
        control.clear();
        pause = None;
        if control.order() == ThreadCommand::Stop {
            return;
        }
        match accept_with(&listening, SocketFlags::CLOEXEC) {
            Ok(stream) => serve_one(control, &listening, UnixStream::from(stream)),
            // No connection waits there any more.
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

fn serve_one(control: &VolumeControl, listening: &SocketListener, stream: UnixStream) {
    let volume = &control.name;
    let found = control.exports.find(volume);
    // Accepts only a match by name: an absent volume must not be confused with one that has this
    // label.
    let Some(export) = found.ok().filter(|export| export.name == *volume) else {
        tracing::debug!(
            event = "vhost-broke-off",
            volume,
            "a VMM connected to a volume that is not served at present"
        );
        return;
    };
    tracing::debug!(event = "vhost-connected", volume, "a VMM has connected");
    let export: Arc<Export> = export;
    if let Err(error) = serve(control, listening.as_fd(), &export, stream)
        && let Some(count) = control.lock().broken.count()
    {
        tracing::warn!(event = "vhost-broke-off", volume, count, %error, "a VMM's connection broke off");
    }
    control.gone();
}
