//! The cache set: one state with one owner, the tasks that serve it, and the ways to wait.
//!
//! Every wait is on one of [`Signals`], a disk, a timer, a permit or an answer, and some task is
//! bound to end it:
//!
//! | waiter | waits on | until | notified by |
//! |---|---|---|---|
//! | journal writer | `journal_work` | an entry is needed | tasks that need one |
//! | | age of the open entry | the entry is due | the first key in it |
//! | journal writer, no room | `journal_progress` | the oldest keys are in leaves | leaf writer |
//! | | | | the end of a rewrite, replay |
//! | tasks that need an entry | `journal_progress` | it is durable | journal writer |
//! | | | there is room for one | journal writer, leaf writer |
//! | leaf writer | `leaf_work` | a leaf is due | journal writer |
//! | | | | tasks that need journal room or node memory |
//! | | age of the oldest leaf | it is due | the first key in a leaf |
//! | attempts at a full or closed leaf | `node_progress` | it takes keys | leaf writer |
//! | | | | the start and end of a rewrite |
//! | rewrites, the last writes | `node_progress` | the leaf is not in use | the same |
//! | loads, rewrites | `node_memory` | there is memory | leaf writer, unpin, removal |
//! | | | another load has ended | the end of the load |
//! | allocator | `allocator_work` | few buckets are free | tasks that take some or find none |
//! | | a timer | retry, if none can be freed | |
//! | rewrites, uuid table, writes | `space` | buckets are free | allocator, after every try |
//! | | | two passes of GC have failed | the end of a discard |
//! | summaries | `summary_work` | a bucket is closed | tasks that take space or close one |
//! | | | | a stop |
//! | discards | `discard_work` | many buckets are free | the store of generations |
//! | | | | a change of options, a stop |
//! | writes past older dirty data | `ranges` | earlier backing reads end | the end of each |
//! | overlapping writes, stop | `ranges` | a range is free | the end of each request |
//! | reads of dirty data in a detach | `ranges` | the volume has left, or stays | the detach |
//! | an attach | `ranges` | earlier requests have ended | the end of each |
//! | a stop | `ranges` | requests, attaches, detaches have ended | the end of each |
//! | a detach, beside writes | `ranges` | retry | the end of a write, a stop |
//! | a detach, after trouble | `writeback_work`, a timer | retry | the same |
//! | a flush of dirty data, the same | `writeback_work`, a timer | retry | a stop, a cancel |
//! | the release of a volume | `ranges` | its work has ended | requests, tasks and fills |
//! | flushes of a backing device | `flushed` | the flush in flight ends | its task |
//! | flushes of the cache device | `cache_flushed` | the flush in flight ends | its task |
//! | reads of data that it covers | `cache_flushed` | the same | the same |
//! | workers | `gc_work`, `parked_work` | there is work, or a timer | its producer |
//! | | `writeback_work` | the same | the same |
//! | tasks that need all counted | `walked` | the tree is walked, the journal put | walk |
//! | | | or cannot be for now | the drain, a stop |
//! | an outside observer | own signal ([`CacheSet::rings`]) | the set has failed | the failure |
//! | the client of a request | own signal | it is answered | the end of its operation or task |
//! | stop | `task_ended` | no task of a kind runs | the end of each task |
//!
//! A rewrite is a task that is started on behalf of a waiter; `request::REQUESTS_MAX` accounts for
//! its place.
//!
//! A failure notifies every signal. What a wait needs must not need what the waiter holds. Writing
//! leaves and entries needs neither buckets nor permits. The allocator needs both of these writers
//! and the permit for metadata. Where buckets are kept because of the age of the pointers to them,
//! it also needs GC, which rewrites nodes. So no task waits for a bucket while it holds a permit or
//! a node. Rewrites need all of these, and close a leaf only when they have their buckets and
//! memory.

use crate::btree::budget::{NodeBudget, attempt_tickets};
use crate::btree::cache::NodePin;
use crate::btree::{Attempt, Need, background_rewrite, load, write};
use crate::error::Error;
use crate::journal::writer;
use crate::phases::{Phase, PhaseGuard, Phases};
use crate::request::inflight::InFlightTable;
use crate::state::State;
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::sync::{Notify, Permit, Semaphore};
use bcached_env::{BufferPool, Disk, Env, IoErrorKind};
use bcached_format::Position;
use core::cell::{Cell, OnceCell, RefCell};

/// The signals that tasks wait on. A waiter re-checks its condition after every wake-up.
#[derive(Default)]
pub struct Signals {
    /// The journal writer has work.
    pub journal_work: Notify,
    /// A journal entry became durable, or leaves were written: there may be room.
    pub journal_progress: Notify,
    /// The leaf writer has work.
    pub leaf_work: Notify,
    /// A node is no longer being written, or has been closed or opened.
    pub node_progress: Notify,
    /// A node was loaded, unpinned, written or removed: there may be memory.
    pub node_memory: Rc<Notify>,
    /// The allocator has work, or something it waits for may have changed.
    pub allocator_work: Notify,
    /// Buckets became free.
    pub space: Notify,
    /// Closed buckets need a summary.
    pub summary_work: Notify,
    /// Buckets may be discarded.
    pub discard_work: Notify,
    /// A range was released.
    pub ranges: Notify,
    /// A flush of a backing device has ended.
    pub flushed: Notify,
    /// A pass of GC or moving may be due.
    pub gc_work: Notify,
    /// A flush of the cache device has ended.
    pub cache_flushed: Notify,
    /// Data was parked.
    pub parked_work: Notify,
    /// Write-back has work.
    pub writeback_work: Notify,
    /// The walk or a background replay has ended.
    pub walked: Notify,
    /// Signal of an outside observer, which does not keep the set alive: the set may have failed.
    pub outside: OnceCell<Rc<Notify>>,
    /// A background task ended.
    pub task_ended: Notify,
}

/// Up to this many requests can wait for the same thing without an allocation. A list of waiters
/// that was once longer keeps its memory.
const WAIT_AT_ONCE: usize = 64;

impl Signals {
    /// Creates the signals of a set, with room for waiting requests.
    pub fn of_a_set() -> Self {
        let signals = Self::default();
        let Self {
            journal_progress, node_progress, node_memory, space, ranges, flushed, cache_flushed, ..
        } = &signals;
        for waited_for in
            [journal_progress, node_progress, node_memory, space, ranges, flushed, cache_flushed]
        {
            waited_for.reserve(WAIT_AT_ONCE);
        }
        signals
    }
}

pub(crate) struct Inner {
    pub(crate) env: Env,
    pub(crate) cache: Disk,
    pub(crate) state: RefCell<State>,
    pub(crate) signals: Signals,
    /// Tickets for nodes that may be held across waits, see `btree::budget`.
    pub(crate) tickets: Semaphore,
    /// How the memory for nodes is divided.
    pub(crate) shares: Cell<NodeBudget>,
    /// Permits one change of that at a time.
    pub(crate) resizing: Semaphore,
    /// Permits one change of the tree's shape at a time.
    pub(crate) structure: Semaphore,
    /// Permits one write of the priorities or the uuid table at a time.
    pub(crate) metadata: Semaphore,
    /// Permits one task at a time that invalidates the remains of deleted volumes.
    pub(crate) orphans: Semaphore,
    /// The phases that the set is in.
    pub(crate) phases: Arc<Phases>,
    /// Reusable memory for data that was read and is to be cached.
    pub(crate) stock: RefCell<BufferPool>,
    /// Device operations in flight that no task waits for.
    pub(crate) under_way: RefCell<InFlightTable>,
    /// Number of background tasks running, by kind.
    pub(crate) running: [Cell<usize>; 4],
}

/// What a background task does. A task waits only for tasks of later kinds, so a stop ends them in
/// this order (invariant L1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TaskKind {
    /// Makes changes on its own initiative: write-back, GC, parked data. Ends at
    /// [`State::stopping`], except for a replay, which completes if it can.
    Changing,
    /// Keeps buckets free, for requests and for workers. Ends at [`State::settled`].
    Allocating,
    /// Rewrites one leaf and ends then. Only requests and tasks of the kinds above start one, so
    /// none begins after those have ended.
    Rewriting,
    /// Writes the journal and the leaves, for all others. Ends at [`State::stopped`].
    Writing,
}

/// What an attempt keeps between its tries: pins of the nodes that it needed, and tickets for a
/// path of the tree.
#[derive(Default)]
struct AttemptPins {
    pins: Vec<NodePin>,
    ticket: Option<Permit>,
    count: usize,
}

impl AttemptPins {
    /// Takes tickets for a path, if it has none yet. If the tree has changed so much since then
    /// that more nodes are pinned than there are tickets for, it releases all of them first.
    async fn take_ticket(&mut self, set: &CacheSet) {
        let wanted = set.with(|s| attempt_tickets(s.root.level));
        if self.ticket.is_some() && self.pins.len() < self.count {
            return;
        }
        // It waits for all of them at once, and holds none meanwhile: invariant L2.
        *self = Self::default();
        self.ticket = Some(set.inner.tickets.acquire(wanted).await);
        self.count = wanted;
    }
}

/// What a transition that changed the tree must report to other tasks.
#[derive(Clone, Copy)]
struct TransitionEffects {
    /// The set has failed.
    fails: bool,
    /// A pass of GC is due.
    wants_gc: bool,
}

impl State {
    /// Returns what the transition has done that other tasks must be notified of. `had_failed`: the
    /// set had failed before it.
    #[inline]
    fn is_to_be_told(&mut self, had_failed: bool) -> Option<TransitionEffects> {
        let fails = !had_failed && self.failed.is_some();
        let wants_gc = self.buckets.take_gc_untold();
        let is_any = self.untold || fails || wants_gc || !self.crowded.is_empty();
        is_any.then_some(TransitionEffects { fails, wants_gc })
    }
}

/// A running cache set. Clones are handles on the same one.
#[derive(Clone)]
pub struct CacheSet {
    pub(crate) inner: Rc<Inner>,
}

impl CacheSet {
    /// Runs a transition: it sees and changes the state and cannot wait.
    #[inline]
    pub(crate) fn with<R>(&self, transition: impl FnOnce(&mut State) -> R) -> R {
        let now = self.inner.env.now();
        let mut state = self.inner.state.borrow_mut();
        state.now = now;
        let result = transition(&mut state);
        let nanoseconds = state.work.take();
        drop(state);
        // All work is charged, so that long work yields (invariant L5).
        self.inner.env.charge(nanoseconds);
        result
    }

    pub(crate) fn env(&self) -> &Env {
        &self.inner.env
    }

    pub(crate) fn cache(&self) -> &Disk {
        &self.inner.cache
    }

    pub(crate) fn signals(&self) -> &Signals {
        &self.inner.signals
    }

    /// Enters `phase`; the set is in it until the returned guard is dropped.
    pub(crate) fn begin(&self, phase: Phase) -> PhaseGuard {
        self.inner.phases.begin(phase)
    }

    /// Returns true if background tasks that make changes must end ([`TaskKind::Changing`]).
    pub(crate) fn is_ending(&self) -> bool {
        self.with(|s| s.stopping || s.failed.is_some())
    }

    /// Waits until the tree has been walked, and everything in it and in the journal is counted.
    /// Does not wait for nodes that cannot be read.
    ///
    /// # Errors
    /// What the walk has met a few times in a row, [`Error::Stopping`], and a failure of the set.
    pub async fn walked(&self) -> Result<(), Error> {
        while !self.has_walked()? {
            self.signals().walked.wait().await;
        }
        Ok(())
    }

    /// Returns whether everything has been counted; an error if it will not be for now.
    pub(crate) fn has_walked(&self) -> Result<bool, Error> {
        if self.with(|s| s.is_counted()) {
            return Ok(true);
        }
        self.check_alive()?;
        let in_vain = |s: &State| s.walk_is_in_vain().or_else(|| s.replay_is_in_vain());
        match self.with(|s| if s.stopping { Some(Error::Stopping) } else { in_vain(s) }) {
            Some(error) => Err(error),
            None => Ok(false),
        }
    }

    /// Waits until everything has been counted, however long that takes, or the set is ending. For
    /// tasks.
    pub(crate) async fn walk_ends(&self) {
        while !self.with(|s| s.is_counted()) && !self.is_ending() {
            self.signals().walked.wait().await;
        }
    }

    /// Returns an error if the set has failed.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        match self.with(|s| s.failed.clone()) {
            None => Ok(()),
            Some(error) => Err(Error::Failed(Box::new(error))),
        }
    }

    /// Latches the first failure (invariant D36), or a later one that outweighs it because it is
    /// not transient. Wakes all waiters (invariant L1).
    pub(crate) fn fail(&self, error: Error) -> Error {
        let is_gone = matches!(&error, Error::Io { source, .. } if source.kind == IoErrorKind::Gone);
        let is_volatile = self.cache().info().volatile_cache;
        let first = self.with(|s| {
            let is_proven = s.note_held && s.buckets.flushes().have_succeeded();
            if is_gone && is_volatile && !is_proven {
                // Its volatile write cache is lost with it.
                s.give_up();
            }
            let first = s.failed.get_or_insert_with(|| error.clone());
            if first.may_pass() && !error.may_pass() {
                *first = error;
            }
            first.clone()
        });
        self.wake_all();
        Error::Failed(Box::new(first))
    }

    pub(crate) fn wake_all(&self) {
        let signals = self.signals();
        for notify in [
            &signals.journal_work,
            &signals.journal_progress,
            &signals.leaf_work,
            &signals.node_progress,
            &signals.allocator_work,
            &signals.space,
            &signals.summary_work,
            &signals.discard_work,
            &signals.ranges,
            &signals.flushed,
            &signals.cache_flushed,
            &signals.parked_work,
            &signals.gc_work,
            &signals.writeback_work,
            &signals.walked,
        ] {
            notify.notify_all();
        }
        signals.node_memory.notify_all();
        if let Some(bell) = signals.outside.get() {
            bell.notify_all();
        }
    }

    /// Runs an attempt until it completes: loads the nodes that it needs, which stay pinned until
    /// it succeeds, splits a full leaf, waits for the journal.
    pub(crate) async fn attempt<T>(
        &self,
        transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.run_attempt(true, transition).await
    }

    /// Runs an attempt that changes nothing in the tree. It also works on a failed set: what is in
    /// memory is right, and what was written stays readable (invariant D36).
    pub(crate) async fn attempt_reading<T>(
        &self,
        transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.run_attempt(false, transition).await
    }

    /// Runs an attempt. Fast path: nearly all attempts have what they need in memory and complete
    /// without a wait or an allocation.
    #[inline]
    async fn run_attempt<T>(
        &self,
        changes: bool,
        mut transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        let mut need = None;
        // Many attempts may follow each other without a wait, so check the CPU budget first.
        if self.env().has_breath() {
            match self.try_once(changes, None, &mut transition)? {
                Attempt::Done(Some(result)) => return Ok(result),
                Attempt::Done(None) => unreachable!("without a pending position, the attempt itself runs"),
                Attempt::Needs(missing) => need = Some(missing),
            }
        }
        Box::pin(self.keep_trying(changes, transition, need)).await
    }

    /// Retries until the attempt completes, after providing what it `need`s.
    async fn keep_trying<T>(
        &self,
        changes: bool,
        mut transition: impl FnMut(&mut State) -> Attempt<T>,
        mut need: Option<Need>,
    ) -> Result<T, Error> {
        let mut held = AttemptPins::default();
        // End of the pending key that must be put into the tree first.
        let mut pending: Option<Position> = None;
        loop {
            match need {
                Some(Need::Replay(end)) => pending = Some(end),
                Some(need) => self.see_to(need, &mut held).await?,
                None => {}
            }
            // One piece of work ends here, if it has been long: invariant L5.
            self.env().breathe().await;
            need = match self.try_once(changes, pending, &mut transition)? {
                Attempt::Done(Some(result)) => return Ok(result),
                Attempt::Done(None) => {
                    pending = None;
                    None
                }
                Attempt::Needs(need) => Some(need),
            };
        }
    }

    /// Runs one try. If `pending` is set, puts the key that ends there instead, without a result.
    /// Changes nothing in a set that has failed (invariant D36). Notifies the tasks concerned.
    #[inline]
    fn try_once<T>(
        &self,
        changes: bool,
        pending: Option<Position>,
        transition: &mut impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<Attempt<Option<T>>, Error> {
        // Checked inside the transition, so that a failure of a concurrent task is seen here.
        self.with_telling(|s| {
            if let Some(error) = s.failed.as_ref().filter(|_| changes || pending.is_some()) {
                return Err(Error::Failed(Box::new(error.clone())));
            }
            Ok(match pending {
                Some(end) => s.put_pending(end).map(|()| None),
                None => transition(s).map(Some),
            })
        })
    }

    /// Runs a transition that may have changed the tree, and notifies the tasks concerned.
    #[inline]
    pub(crate) fn with_telling<R>(&self, transition: impl FnOnce(&mut State) -> R) -> R {
        let (result, told) = self.with(|s| {
            let had_failed = s.failed.is_some();
            let result = transition(s);
            (result, s.is_to_be_told(had_failed))
        });
        if let Some(told) = told {
            self.tell(told);
        }
        result
    }

    #[cold]
    fn tell(&self, TransitionEffects { fails, wants_gc }: TransitionEffects) {
        let (untold, crowded) =
            self.with(|s| (core::mem::take(&mut s.untold), core::mem::take(&mut s.crowded)));
        if fails {
            // The transition found contradictory metadata: all waiters must learn that the set has
            // failed.
            self.wake_all();
        }
        crowded.into_iter().for_each(|at| background_rewrite::begin(self, at));
        if untold {
            self.tell_writers();
        }
        if wants_gc {
            self.signals().gc_work.notify_all();
        }
    }

    /// Provides what an attempt is missing.
    async fn see_to(&self, need: Need, held: &mut AttemptPins) -> Result<(), Error> {
        match need {
            Need::Node(child) => {
                held.take_ticket(self).await;
                match load::load(self, child).await {
                    Ok(pin) => held.pins.push(pin),
                    // The node was replaced while this load waited for its turn: the tree refers to
                    // another one by now.
                    Err(_) if self.with(|s| s.buckets.is_stale(child.pointer())) => {}
                    Err(error) => return Err(error),
                }
            }
            Need::Memory if held.ticket.is_none() => held.take_ticket(self).await,
            Need::Memory => {
                // The ticket covers what the leaf may take. Nodes of others, without a ticket, are
                // written and evicted.
                write::relieve(self);
                self.signals().node_memory.wait().await;
            }
            Need::Split { at, words } => {
                // A rewrite takes its own tickets: hold nothing while waiting for it.
                *held = AttemptPins::default();
                background_rewrite::make_room(self, at, words).await?;
            }
            Need::BeingSplit => {
                self.check_alive()?;
                *held = AttemptPins::default();
                self.signals().node_progress.wait().await;
            }
            Need::Journal => {
                *held = AttemptPins::default();
                writer::wait_for_room(self).await?;
            }
            // Handled by a separate attempt, of which this one knows nothing.
            Need::Replay(_) => {}
        }
        Ok(())
    }

    /// Notifies the writers of keys that are the first in an entry or a leaf: the keys age from now
    /// on.
    fn tell_writers(&self) {
        self.signals().journal_work.notify_all();
        self.signals().leaf_work.notify_all();
    }

    /// Starts a background task that does `kind`.
    pub(crate) fn spawn<F: Future<Output = ()> + 'static>(
        &self,
        kind: TaskKind,
        task: impl FnOnce(Self) -> F,
    ) {
        let set = self.clone();
        let task = task(self.clone());
        let running = move |inner: &Inner, change: fn(usize) -> usize| {
            let count = &inner.running[kind as usize];
            count.set(change(count.get()));
        };
        running(&set.inner, |count| count + 1);
        self.env().spawn(async move {
            task.await;
            running(&set.inner, |count| count - 1);
            set.signals().task_ended.notify_all();
        });
    }

    /// Waits until every task that does `kind` has ended.
    pub(crate) async fn ended(&self, kind: TaskKind) {
        while self.inner.running[kind as usize].get() > 0 {
            self.signals().task_ended.wait().await;
        }
    }
}
