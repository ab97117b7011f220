//! A volume that a program has open: its requests on their way to the engine, and the replies on theirs back.
//!
//! A session thread submits what can be submitted at once: there is room in the window and in memory, the volume is not on
//! its way to another engine, and nobody has the sectors for itself. All else goes to the file's lane ([`crate::lane`]), a
//! thread that is there once it was needed. A second thread takes the replies and answers; it ends when the file is closed
//! and everything is answered, and gives up the right to write then.

use crate::answer::{Answer, Pending};
use crate::file_thread::Task;
use crate::open_limit::Place;
use crate::ranges::{Held, Ranges};
use crate::shutdown::Life;
use bcached_port::{
    Budget, Buffer, Claim, Export, ExportTable, Moment, Operation, Payload, Peer, Permit, Pool, Replies,
    Requests, Route, SECTOR_BYTES, Stock,
};
use fuser::Errno;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// An open file.
pub(crate) struct VolumeFile {
    pub(crate) number: u64,
    /// The process that opened it, 0 if it cannot be seen from here.
    pub(crate) opener: u32,
    /// The volume as it was when the file was opened.
    pub(crate) export: Arc<Export>,
    pub(crate) ranges: Arc<Ranges>,
    /// It was opened for durable writes (`O_DSYNC`).
    pub(crate) is_durable: bool,
    exports: ExportTable,
    route: Route,
    requests: Requests<Pending>,
    budget: Arc<Budget>,
    /// Memory of requests of all files that were answered.
    stock: Arc<Mutex<Stock>>,
    life: Arc<Life>,
    /// When it was opened, for the right to write.
    since: Moment,
    common: Arc<Common>,
}

/// What a file shares with the thread that takes its replies.
pub(crate) struct Common {
    state: Mutex<State>,
    /// The lane waits here, for work or for room.
    changed: Condvar,
    window: usize,
    /// The right to write, once it was needed and given.
    claim: Mutex<Option<Claim>>,
}

#[derive(Default)]
struct State {
    /// Submitted and not taken back.
    under_way: usize,
    tasks: VecDeque<Task>,
    has_lane: bool,
    /// The lane wants to submit something and there is no room.
    lane_waits: bool,
    is_closed: bool,
}

/// How a file is opened.
pub(crate) struct Opening<'a> {
    pub(crate) exports: &'a ExportTable,
    pub(crate) ranges: Arc<Ranges>,
    pub(crate) memory: Arc<Pool>,
    pub(crate) stock: Arc<Mutex<Stock>>,
    pub(crate) life: Arc<Life>,
    /// Kept as long as its thread runs.
    pub(crate) place: Place,
    pub(crate) window: usize,
    pub(crate) bytes_max: u64,
    pub(crate) opener: u32,
    pub(crate) is_durable: bool,
}

/// A number for a client that no other open file of this process has, whatever server it belongs to.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl VolumeFile {
    /// Opens the volume, by the route that it has now.
    pub(crate) fn open(
        opening: Opening<'_>,
        export: Arc<Export>,
        route: Route,
        (number, since): (u64, Moment),
    ) -> io::Result<Arc<Self>> {
        let (requests, replies) = route.connect::<Pending>(opening.window);
        let common = Arc::new(Common {
            state: Mutex::default(),
            changed: Condvar::new(),
            window: opening.window,
            claim: Mutex::new(None),
        });
        let (taking, stock, place) = (Arc::clone(&common), Arc::clone(&opening.stock), opening.place);
        let take = move || {
            taking.take_replies(replies, &stock);
            drop(place);
        };
        opening.life.spawn(format!("fuse-reply-{number}"), take)?;
        Ok(Arc::new(Self {
            number,
            opener: opening.opener,
            export,
            ranges: opening.ranges,
            is_durable: opening.is_durable,
            exports: opening.exports.clone(),
            route,
            requests,
            budget: Arc::new(Budget::new(opening.bytes_max, opening.memory)),
            stock: opening.stock,
            life: opening.life,
            since,
            common,
        }))
    }

    /// The size now: what the table says, or said last.
    pub(crate) fn bytes(&self) -> u64 {
        let now = self.exports.by_name(&self.export.name).filter(|export| export.uuid == self.export.uuid);
        now.map_or_else(|| self.export.bytes(), |export| export.bytes())
    }

    /// Whether it has written.
    pub(crate) fn is_writing(&self) -> bool {
        self.common.claim().is_some()
    }

    /// Whether it has the right to write now, or gets it.
    pub(crate) fn may_write(&self) -> bool {
        if self.export.shared {
            return true;
        }
        let mut claim = self.common.claim();
        if claim.is_none() {
            *claim = self.exports.writing().claim(self.export.uuid, Peer::File(self.number), self.since);
        }
        claim.is_some()
    }

    /// Memory for a payload that is there already. Waits for it.
    pub(crate) fn memory_for(&self, bytes: usize) -> Permit {
        self.budget.acquire(bytes as u64)
    }

    /// Memory for a payload that is to come, if there is some.
    pub(crate) fn try_memory_for(&self, bytes: usize) -> Option<Permit> {
        self.budget.try_acquire(bytes as u64)
    }

    /// Memory with `data` in it, for a payload.
    pub(crate) fn copy_of(&self, data: &[u8]) -> Payload {
        if !Stock::keeps(data.len()) {
            return Buffer::copied_from(data).freeze();
        }
        let mut buffer = self.memory(data.len());
        buffer.put(data);
        buffer.freeze()
    }

    /// Memory that holds anything ([`Stock::take`]): of a read until the engine says that it has been read into. Others are kept out neither
    /// while fresh memory is cleared nor while it is filled.
    fn memory(&self, bytes: usize) -> Buffer {
        let kept = self.stock().find(bytes);
        kept.unwrap_or_else(|| Buffer::zeroed(bytes))
    }

    // No piece is half in it between any two statements.
    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it done. Waits for nothing but, for a moment, the engine's inbox.
    pub(crate) fn ask(self: &Arc<Self>, task: Task) {
        if let Err(task) = self.try_now(task) {
            self.leave_to_lane(task);
        }
    }

    /// Does it now, or gives it back.
    #[expect(
        clippy::result_large_err,
        reason = "given back to go into the queue, where it has to fit anyway"
    )]
    fn try_now(&self, task: Task) -> Result<(), Task> {
        if !task.is_plain() || self.route.is_held() || !self.common.try_enter() {
            return Err(task);
        }
        match self.try_submit(task) {
            Ok(()) => Ok(()),
            Err(task) => {
                self.common.leave();
                Err(task)
            }
        }
    }

    #[expect(
        clippy::result_large_err,
        reason = "given back to go into the queue, where it has to fit anyway"
    )]
    fn try_submit(&self, task: Task) -> Result<(), Task> {
        match task {
            Task::Read { sectors, answer } => {
                let bytes = bytes_of(&sectors);
                let Some(permit) = self.try_memory_for(bytes) else {
                    return Err(Task::Read { sectors, answer });
                };
                let operation = Operation::Read { sector: sectors.start, buffer: self.memory(bytes) };
                self.submit(operation, answer, (Some(permit), None));
            }
            Task::Change { operation, sectors, permit, answer } => {
                let Some(held) = self.ranges.try_share(sectors.clone()) else {
                    return Err(Task::Change { operation, sectors, permit, answer });
                };
                self.submit(operation, answer, (permit, Some(held)));
            }
            Task::Flush { answer } => self.submit(Operation::Flush, answer, (None, None)),
            other => return Err(other),
        }
        Ok(())
    }

    /// What has a place in the window goes to the engine.
    pub(crate) fn submit(
        &self,
        operation: Operation,
        answer: Answer,
        (permit, held): (Option<Permit>, Option<Held>),
    ) {
        let payload = match &operation {
            Operation::Write { payload, .. } => Some(payload.clone()),
            _ => None,
        };
        self.requests.submit_by(Pending { answer, permit, held, payload }, &self.route, operation);
    }

    fn leave_to_lane(self: &Arc<Self>, task: Task) {
        let mut state = self.common.lock();
        state.tasks.push_back(task);
        let has_lane = std::mem::replace(&mut state.has_lane, true);
        drop(state);
        self.common.changed.notify_all();
        if has_lane {
            return;
        }
        let file = Arc::clone(self);
        if let Err(error) = self.life.spawn(format!("fuse-lane-{}", self.number), move || file.run_lane()) {
            tracing::warn!(event = "fuse-no-thread", %error, "could not start a thread for an open file");
            let mut state = self.common.lock();
            state.has_lane = false;
            let tasks = std::mem::take(&mut state.tasks);
            drop(state);
            tasks.into_iter().for_each(|task| task.refuse(Errno::ENOMEM));
        }
    }

    /// A place in the window, for the lane.
    pub(crate) fn wait_for_room(&self) {
        self.common.enter();
    }

    /// The lane's next task; `None` when the file is closed and nothing is left.
    pub(crate) fn next_task(&self) -> Option<Task> {
        self.common.next_task()
    }

    /// The last program has closed it.
    pub(crate) fn close(&self) {
        self.common.lock().is_closed = true;
        self.common.changed.notify_all();
    }
}

/// Length of a range of sectors that one request may have.
pub(crate) fn bytes_of(sectors: &Range<u64>) -> usize {
    let bytes = (sectors.end - sectors.start) * SECTOR_BYTES;
    usize::try_from(bytes).expect("no request of a program is larger than memory")
}

impl Common {
    /// A place in the window, if there is one and the lane is not waiting for it.
    fn try_enter(&self) -> bool {
        let mut state = self.lock();
        let has_room = state.under_way < self.window && !state.lane_waits && state.tasks.is_empty();
        state.under_way += usize::from(has_room);
        has_room
    }

    fn enter(&self) {
        let mut state = self.lock();
        while state.under_way >= self.window {
            state.lane_waits = true;
            state = self.wait(state);
        }
        state.lane_waits = false;
        state.under_way += 1;
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.under_way -= 1;
        let lane_waits = state.lane_waits;
        drop(state);
        if lane_waits {
            self.changed.notify_all();
        }
    }

    fn next_task(&self) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            if state.is_closed {
                return None;
            }
            state = self.wait(state);
        }
    }

    /// Answers as the engine does, until the file is closed and everything is answered.
    fn take_replies(&self, mut replies: Replies<Pending>, stock: &Mutex<Stock>) {
        let mut batch = VecDeque::new();
        while replies.next_batch(&mut batch) {
            for (pending, reply) in batch.drain(..) {
                pending.end(reply, stock);
                self.leave();
            }
        }
        // Only now is everything that was written through this file done.
        drop(self.claim().take());
    }

    fn claim(&self) -> MutexGuard<'_, Option<Claim>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Both mutexes guard what is whole between any two statements.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
