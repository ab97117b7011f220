//! A device as flows use it: `disk.read(sector, buffer).await`. The futures are concrete types, and
//! hold no state but the operation.

use crate::buffer::{Buffer, Payload};
use crate::driver::{Completion, DiskId, DiskInfo, IoError, IoErrorKind, Op, Token};
use crate::exec::{Core, Env};
use crate::time::Time;
use alloc::rc::Rc;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;

/// A handle on one device.
#[derive(Clone)]
pub struct Disk {
    pub(crate) env: Env,
    pub(crate) id: DiskId,
}

impl Disk {
    /// Returns the device's number.
    #[must_use]
    pub const fn id(&self) -> DiskId {
        self.id
    }

    /// Returns the device's error history and its operations in flight.
    #[must_use]
    pub fn health(&self) -> DiskHealth {
        let core = &self.env.core;
        let now = self.env.now();
        let mut health = DiskHealth::default();
        if let Some(errors) = core.errors.borrow().get(&self.id) {
            health.errors = errors.count;
            health.last_error = Some(errors.last);
            health.since_error = now - errors.at;
            health.successes_since = errors.successes_since;
        }
        let (operations, listened) = (core.operations.borrow(), core.listened.borrow());
        let waiting =
            operations.iter().filter(|(_, operation)| !matches!(operation.slot, OperationState::Done(_)));
        let waiting = waiting.map(|(_, operation)| &operation.what);
        for what in waiting.chain(listened.iter().map(|(_, listened)| &listened.what)) {
            if what.disk == self.id {
                health.waiting += 1;
                health.longest_wait = health.longest_wait.max(now - what.since);
            }
        }
        health
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.env.disk_info(self.id)
    }

    /// Fills `buffer` (whole sectors) from `sector` on. The buffer is returned with the result,
    /// also on failure. Like all operations, it is in flight from this call on.
    pub fn read(&self, sector: u64, buffer: Buffer) -> ReadFuture {
        ReadFuture(self.env.submit(self.id, Op::Read { sector, buffer }))
    }

    /// Writes `payload` (whole sectors) at `sector`.
    pub fn write(&self, sector: u64, payload: Payload) -> OperationFuture {
        self.change(Op::Write { sector, payload, fua: false })
    }

    /// Writes `payload` at `sector`; durable when it has completed.
    pub fn write_fua(&self, sector: u64, payload: Payload) -> OperationFuture {
        self.change(Op::Write { sector, payload, fua: true })
    }

    /// Makes every write that completed before this call durable.
    pub fn flush(&self) -> OperationFuture {
        self.change(Op::Flush)
    }

    /// Discards the content of a range.
    pub fn discard(&self, sector: u64, sectors: u64) -> OperationFuture {
        self.change(Op::Discard { sector, sectors })
    }

    /// Makes a range read as zeroes, without a transfer; with `unmap` the space below may be given
    /// up.
    pub fn zero(&self, sector: u64, sectors: u64, unmap: bool) -> OperationFuture {
        self.change(Op::Zero { sector, sectors, unmap })
    }

    /// Like [`Disk::read`], but `listener` is notified of the completion, under that number.
    #[inline]
    pub fn read_for(&self, sector: u64, buffer: Buffer, listener: Rc<dyn CompletionListener>, number: usize) {
        self.env.begin_for(self.id, Op::Read { sector, buffer }, listener, number);
    }

    /// Like [`Disk::write`], with a listener.
    #[inline]
    pub fn write_for(
        &self,
        sector: u64,
        payload: Payload,
        listener: Rc<dyn CompletionListener>,
        number: usize,
    ) {
        self.env.begin_for(self.id, Op::Write { sector, payload, fua: false }, listener, number);
    }

    fn change(&self, op: Op) -> OperationFuture {
        OperationFuture(self.env.submit(self.id, op))
    }
}

/// Is notified of the completion of an operation, instead of a task that waits for it.
pub trait CompletionListener {
    /// The operation with that number, which the listener has chosen, has completed with this
    /// result. A read's memory is returned. This call cannot wait; it is charged like what a task
    /// does between two waits.
    fn ended(self: Rc<Self>, number: usize, result: Result<(), IoError>, buffer: Option<Buffer>);
}

/// The future of [`Disk::read`].
pub struct ReadFuture(PendingOperation);

impl Future for ReadFuture {
    type Output = (Result<(), IoError>, Buffer);

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = Pin::new(&mut self.0).poll(context);
        ended.map(|(result, buffer)| (result, buffer.unwrap_or_default()))
    }
}

/// The future of an operation that returns no data.
pub struct OperationFuture(PendingOperation);

impl Future for OperationFuture {
    type Output = Result<(), IoError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|(result, _)| result)
    }
}

/// The state of a device, for monitoring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskHealth {
    /// Operations that have not completed yet.
    pub waiting: u64,
    /// How long the oldest of them has been waiting.
    pub longest_wait: Duration,
    /// Operations that failed since the device was opened.
    pub errors: u64,
    /// The last failure.
    pub last_error: Option<IoError>,
    /// How long ago that was.
    pub since_error: Duration,
    /// Operations that have succeeded since.
    pub successes_since: u64,
}

/// What is remembered of a device that has failed.
pub(crate) struct ErrorHistory {
    count: u64,
    last: IoError,
    at: Time,
    successes_since: u64,
}

impl ErrorHistory {
    /// Records the result of an operation.
    #[inline]
    fn note(core: &Core, what: &OperationInfo, result: Result<(), IoErrorKind>) {
        // Usually, no device has ever failed.
        if result.is_err() || !core.errors.borrow().is_empty() {
            Self::note_down(core, what, result);
        }
    }

    fn note_down(core: &Core, what: &OperationInfo, result: Result<(), IoErrorKind>) {
        let mut errors = core.errors.borrow_mut();
        match (result, errors.get_mut(&what.disk)) {
            // An operation that the device does not support is not a failure of the device.
            (Ok(()), None) | (Err(IoErrorKind::Unsupported), _) => {}
            (Ok(()), Some(known)) => known.successes_since += 1,
            (Err(kind), known) => {
                let last = IoError { kind, disk: what.disk, sector: what.sector };
                let count = known.map_or(0, |known| known.count) + 1;
                let at = core.clock();
                errors.insert(what.disk, Self { count, last, at, successes_since: 0 });
            }
        }
    }
}

/// What an operation concerns.
#[derive(Clone, Copy)]
pub(crate) struct OperationInfo {
    pub disk: DiskId,
    /// Its first sector; 0 for a flush.
    pub sector: u64,
    pub since: Time,
}

/// An operation in flight, or completed and not polled yet.
pub(crate) struct Operation {
    pub slot: OperationState,
    pub what: OperationInfo,
}

/// The state of one operation between submission and the future's last poll.
pub(crate) enum OperationState {
    Waiting(Option<Waker>),
    Done(Completion),
    /// The future was dropped first; the completion frees the slot.
    Abandoned,
}

/// An operation in flight that no future waits for.
pub(crate) struct ListenedOperation {
    pub listener: Rc<dyn CompletionListener>,
    /// Chosen by the listener.
    pub number: usize,
    pub what: OperationInfo,
}

/// Where an operation is kept, as encoded in its token.
#[derive(Clone, Copy)]
pub(crate) enum OperationKey {
    /// Among those that futures wait for.
    Awaited(usize),
    /// Among those that have a listener.
    Listened(usize),
}

impl OperationKey {
    #[inline]
    pub(crate) const fn token(self) -> Token {
        match self {
            Self::Awaited(place) => Token(2 * place as u64),
            Self::Listened(place) => Token(2 * place as u64 + 1),
        }
    }

    #[inline]
    pub(crate) fn of(token: Token) -> Self {
        let place = usize::try_from(token.0 / 2).expect("a token is an index");
        if token.0.is_multiple_of(2) { Self::Awaited(place) } else { Self::Listened(place) }
    }
}

impl OperationState {
    /// Handles the completion of the operation at `place`.
    pub(crate) fn complete(core: &Core, place: usize, completion: Completion) {
        let mut operations = core.operations.borrow_mut();
        let operation = operations.get_mut(place).expect("a completion is for an operation in flight");
        ErrorHistory::note(core, &operation.what, completion.result);
        match core::mem::replace(&mut operation.slot, Self::Done(completion)) {
            Self::Waiting(waker) => {
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Self::Abandoned => drop(operations.remove(place)),
            Self::Done(_) => unreachable!("an operation completes once"),
        }
    }
}

impl ListenedOperation {
    /// Handles the completion of the operation at `place`.
    #[inline]
    pub(crate) fn complete(core: &Core, place: usize, completion: Completion) {
        let Self { listener, number, what } = core.listened.borrow_mut().remove(place);
        ErrorHistory::note(core, &what, completion.result);
        let result = completion.result.map_err(|kind| what.error(kind));
        listener.ended(number, result, completion.buffer);
    }
}

impl OperationInfo {
    const fn error(&self, kind: IoErrorKind) -> IoError {
        IoError { kind, disk: self.disk, sector: self.sector }
    }
}

/// An operation in flight.
pub(crate) struct PendingOperation {
    env: Env,
    slot: Option<usize>,
}

impl PendingOperation {
    pub(crate) const fn new(env: Env, slot: usize) -> Self {
        Self { env, slot: Some(slot) }
    }
}

impl Future for PendingOperation {
    type Output = (Result<(), IoError>, Option<Buffer>);

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { env, slot: own } = self.get_mut();
        let index = own.expect("a completed operation is not polled again");
        let mut operations = env.core.operations.borrow_mut();
        match &mut operations[index].slot {
            OperationState::Waiting(waker) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            OperationState::Done(_) => {
                let Operation { slot, what } = operations.remove(index);
                let OperationState::Done(completion) = slot else {
                    unreachable!("the slot was matched above")
                };
                *own = None;
                let result = completion.result.map_err(|kind| what.error(kind));
                Poll::Ready((result, completion.buffer))
            }
            OperationState::Abandoned => unreachable!("an operation being polled is not abandoned"),
        }
    }
}

impl Drop for PendingOperation {
    fn drop(&mut self) {
        let Some(index) = self.slot else { return };
        // During the executor's own teardown nothing else may borrow the slab; if it is borrowed,
        // it is being dropped.
        let Ok(mut operations) = self.env.core.operations.try_borrow_mut() else { return };
        match operations.get_mut(index).map(|operation| &mut operation.slot) {
            Some(slot @ OperationState::Waiting(_)) => *slot = OperationState::Abandoned,
            Some(OperationState::Done(_)) => drop(operations.remove(index)),
            _ => {}
        }
    }
}
