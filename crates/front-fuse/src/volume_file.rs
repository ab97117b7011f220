//! A volume that a program has open: it passes requests to the engine, and replies back.
//!
//! A session thread submits a request directly if the window and the memory have room, the volume
//! is not being moved to another engine, and its sectors are not claimed exclusively. Everything
//! else goes to the file's thread ([`crate::file_thread`]), a thread that is started when first
//! needed. A second thread receives the replies and answers the programs. It ends when the file is
//! closed and everything is answered, and then gives up the write claim.

use crate::answer::{PendingRequest, ReplyTarget};
use crate::file_thread::FileTask;
use crate::open_limit::OpenSlot;
use crate::ranges::{RangeGuard, RangeLocks};
use crate::shutdown::Lifecycle;
use bcached_port::{
    Budget, BudgetPool, Buffer, BufferPool, Export, ExportTable, Operation, Payload, Peer, Permit,
    ReplyReceiver, RequestSender, Route, SECTOR_BYTES, WriteClaim, WriterGeneration,
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
    /// The process that opened it, 0 if it is not visible from here.
    pub(crate) opener: u32,
    /// The volume as it was when the file was opened.
    pub(crate) export: Arc<Export>,
    pub(crate) ranges: Arc<RangeLocks>,
    /// Whether it was opened for durable writes (`O_DSYNC`).
    pub(crate) is_durable: bool,
    exports: ExportTable,
    route: Route,
    requests: RequestSender<PendingRequest>,
    budget: Arc<Budget>,
    /// Buffers of completed requests of all files, kept for reuse.
    stock: Arc<Mutex<BufferPool>>,
    lifecycle: Arc<Lifecycle>,
    /// When it was opened, for the write claim.
    since: WriterGeneration,
    common: Arc<FileShared>,
}

/// The state that a file shares with its reply thread.
pub(crate) struct FileShared {
    state: Mutex<FileState>,
    /// The thread waits here for tasks or for room in the window.
    changed: Condvar,
    window: usize,
    /// The write claim, once it was needed and granted.
    claim: Mutex<Option<WriteClaim>>,
}

#[derive(Default)]
struct FileState {
    /// Requests submitted whose replies were not yet received.
    under_way: usize,
    tasks: VecDeque<FileTask>,
    has_thread: bool,
    /// The thread has a request to submit, but the window is full.
    thread_waits: bool,
    is_closed: bool,
}

/// The parameters for opening a file.
pub(crate) struct OpenParams<'a> {
    pub(crate) exports: &'a ExportTable,
    pub(crate) ranges: Arc<RangeLocks>,
    pub(crate) memory: Arc<BudgetPool>,
    pub(crate) stock: Arc<Mutex<BufferPool>>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    /// Held for as long as the file's reply thread runs.
    pub(crate) place: OpenSlot,
    pub(crate) window: usize,
    pub(crate) bytes_max: u64,
    pub(crate) opener: u32,
    pub(crate) is_durable: bool,
}

/// Returns a client number that is unique among the open files of this process, across servers.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl VolumeFile {
    /// Opens the volume, by its current route.
    pub(crate) fn open(
        opening: OpenParams<'_>,
        export: Arc<Export>,
        route: Route,
        (number, since): (u64, WriterGeneration),
    ) -> io::Result<Arc<Self>> {
        let (requests, replies) = route.connect::<PendingRequest>(opening.window);
        let common = Arc::new(FileShared {
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
        opening.lifecycle.spawn(format!("fuse-reply-{number}"), take)?;
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
            lifecycle: opening.lifecycle,
            since,
            common,
        }))
    }

    /// The current size: from the table, or as of the open if the volume is no longer in it.
    pub(crate) fn bytes(&self) -> u64 {
        let now = self.exports.by_name(&self.export.name).filter(|export| export.uuid == self.export.uuid);
        now.map_or_else(|| self.export.bytes(), |export| export.bytes())
    }

    /// Whether it has written.
    pub(crate) fn is_writing(&self) -> bool {
        self.common.claim().is_some()
    }

    /// Whether it holds the write claim, or can get it now.
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

    /// Acquires memory for a payload that already exists. Waits for it.
    pub(crate) fn memory_for(&self, bytes: usize) -> Permit {
        self.budget.acquire(bytes as u64)
    }

    /// Acquires memory for a payload that is yet to be created, if available.
    pub(crate) fn try_memory_for(&self, bytes: usize) -> Option<Permit> {
        self.budget.try_acquire(bytes as u64)
    }

    /// Returns a payload with a copy of `data`.
    pub(crate) fn copy_of(&self, data: &[u8]) -> Payload {
        if !BufferPool::keeps(data.len()) {
            return Buffer::copied_from(data).freeze();
        }
        let mut buffer = self.memory(data.len());
        buffer.put(data);
        buffer.freeze()
    }

    /// Returns a buffer with arbitrary content ([`BufferPool::take`]), which is what a read has
    /// until the engine has filled it. The stock is not locked while a fresh buffer is cleared or
    /// while the buffer is filled.
    fn memory(&self, bytes: usize) -> Buffer {
        let kept = self.stock().find(bytes);
        kept.unwrap_or_else(|| Buffer::zeroed(bytes))
    }

    // The stock is consistent between any two statements, so a poisoned lock is usable.
    fn stock(&self) -> MutexGuard<'_, BufferPool> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a task carried out. Waits for nothing, except briefly for the engine's inbox.
    pub(crate) fn ask(self: &Arc<Self>, task: FileTask) {
        if let Err(task) = self.try_now(task) {
            self.leave_to_thread(task);
        }
    }

    /// Submits the task now, or gives it back.
    #[expect(
        clippy::result_large_err,
        reason = "given back to go into the queue, where it has to fit anyway"
    )]
    fn try_now(&self, task: FileTask) -> Result<(), FileTask> {
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
    fn try_submit(&self, task: FileTask) -> Result<(), FileTask> {
        match task {
            FileTask::Read { sectors, answer } => {
                let bytes = bytes_of(&sectors);
                let Some(permit) = self.try_memory_for(bytes) else {
                    return Err(FileTask::Read { sectors, answer });
                };
                let operation = Operation::Read { sector: sectors.start, buffer: self.memory(bytes) };
                self.submit(operation, answer, (Some(permit), None));
            }
            FileTask::Change { operation, sectors, permit, answer } => {
                let Some(held) = self.ranges.try_share(sectors.clone()) else {
                    return Err(FileTask::Change { operation, sectors, permit, answer });
                };
                self.submit(operation, answer, (permit, Some(held)));
            }
            FileTask::Flush { answer } => self.submit(Operation::Flush, answer, (None, None)),
            other => return Err(other),
        }
        Ok(())
    }

    /// Submits a request that has a place in the window.
    pub(crate) fn submit(
        &self,
        operation: Operation,
        answer: ReplyTarget,
        (permit, held): (Option<Permit>, Option<RangeGuard>),
    ) {
        let payload = match &operation {
            Operation::Write { payload, .. } => Some(payload.clone()),
            _ => None,
        };
        self.requests.submit_by(PendingRequest { answer, permit, held, payload }, &self.route, operation);
    }

    fn leave_to_thread(self: &Arc<Self>, task: FileTask) {
        let mut state = self.common.lock();
        state.tasks.push_back(task);
        let has_thread = std::mem::replace(&mut state.has_thread, true);
        drop(state);
        self.common.changed.notify_all();
        if has_thread {
            return;
        }
        let file = Arc::clone(self);
        if let Err(error) =
            self.lifecycle.spawn(format!("fuse-lane-{}", self.number), move || file.run_thread())
        {
            tracing::warn!(event = "fuse-no-thread", %error, "could not start a thread for an open file");
            let mut state = self.common.lock();
            state.has_thread = false;
            let tasks = std::mem::take(&mut state.tasks);
            drop(state);
            tasks.into_iter().for_each(|task| task.refuse(Errno::ENOMEM));
        }
    }

    /// Takes a place in the window for the thread, and waits for one if necessary.
    pub(crate) fn wait_for_room(&self) {
        self.common.enter();
    }

    /// Returns the thread's next task, or `None` if the file is closed and no task is left.
    pub(crate) fn next_task(&self) -> Option<FileTask> {
        self.common.next_task()
    }

    /// Marks the file as closed by its last user.
    pub(crate) fn close(&self) {
        self.common.lock().is_closed = true;
        self.common.changed.notify_all();
    }
}

/// The length in bytes of a sector range that fits in one request.
pub(crate) fn bytes_of(sectors: &Range<u64>) -> usize {
    let bytes = (sectors.end - sectors.start) * SECTOR_BYTES;
    usize::try_from(bytes).expect("no request of a program is larger than memory")
}

impl FileShared {
    /// Takes a place in the window, if there is one and no task or thread waits for it.
    fn try_enter(&self) -> bool {
        let mut state = self.lock();
        let has_room = state.under_way < self.window && !state.thread_waits && state.tasks.is_empty();
        state.under_way += usize::from(has_room);
        has_room
    }

    fn enter(&self) {
        let mut state = self.lock();
        while state.under_way >= self.window {
            state.thread_waits = true;
            state = self.wait(state);
        }
        state.thread_waits = false;
        state.under_way += 1;
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.under_way -= 1;
        let thread_waits = state.thread_waits;
        drop(state);
        if thread_waits {
            self.changed.notify_all();
        }
    }

    fn next_task(&self) -> Option<FileTask> {
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

    /// Answers programs as the engine replies, until the file is closed and everything is answered.
    fn take_replies(&self, mut replies: ReplyReceiver<PendingRequest>, stock: &Mutex<BufferPool>) {
        let mut batch = VecDeque::new();
        while replies.next_batch(&mut batch) {
            for (pending, reply) in batch.drain(..) {
                pending.end(reply, stock);
                self.leave();
            }
        }
        // Only now is every write through this file complete.
        drop(self.claim().take());
    }

    fn claim(&self) -> MutexGuard<'_, Option<WriteClaim>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The values of both mutexes are consistent between any two statements, so a poisoned lock is
    // usable.
    fn lock(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, FileState>) -> MutexGuard<'a, FileState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
