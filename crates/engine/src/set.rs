//! The cache set: one state with one owner, the tasks that serve it, and the ways to wait.
//!
//! Every wait is on one of [`Signals`], on a disk, on a timer, on a permit or on an answer, and has somebody who is bound to ring:
//!
//! | who waits | on | until | rung by |
//! |---|---|---|---|
//! | journal writer | `journal_work`, or the age of the open entry | an entry is wanted | whoever wants one; an attempt that put the first key into the entry |
//! | journal writer without a place | `journal_progress` | the oldest keys are in leaves | leaf writer, a rewrite's end, replay |
//! | who wants an entry durable, or room for one | `journal_progress` | it is, or there is | journal writer, leaf writer |
//! | leaf writer | `leaf_work`, or the age of the oldest leaf | a leaf is due | who needs journal room or node memory; journal writer; the first key in a leaf |
//! | attempts at a full or closed leaf, rewrites, the last writes | `node_progress` | a leaf takes keys, or is not being written or replaced | leaf writer, a rewrite's beginning and end |
//! | loads, rewrites | `node_memory` | memory, or another's load | a pin's end, a load's end, a node's removal, leaf writer |
//! | allocator | `allocator_work`; a pause when nothing can be had | few buckets are free | who takes buckets, who finds none |
//! | rewrites, uuid table, writes | `space` | free buckets, or two failed passes of GC | allocator, after every try; a discard's end |
//! | summaries | `summary_work` | a bucket has been closed | who takes space or closes one, a stop |
//! | discards | `discard_work` | more buckets are free than are kept ready | whoever stores generations, a change of options, a stop |
//! | a write past older dirty data | `ranges` | reads of the backing device from before have ended | the end of each |
//! | overlapping writes, stop | `ranges` | a range is free, a request has ended | the end of each |
//! | who wants dirty data in a cache that the volume is about to leave | `ranges` | it has left, or stays | who makes it leave |
//! | an attach, for the requests of before; a stop, for both | `ranges` | the last has ended | the end of each; a detach's or attach's |
//! | a detach, beside writes or after trouble | `ranges`, `writeback_work`, with a timer | it is time to try again | the end of a write, a stop |
//! | a flush of dirty data, beside writes or after trouble | `writeback_work`, with a timer | it is time to try again | a stop, a cancel |
//! | who gives a volume up | `ranges` | its requests, tasks and fills have ended | the end of each |
//! | who wants a backing device flushed | `flushed` | the flush that is running has ended | who runs it |
//! | who wants the cache device flushed, or has read what a flush is about | `cache_flushed` | the flush that is running has ended | who runs it |
//! | workers | `gc_work`, `parked_work`, `writeback_work`, always with a timer | there is work | who makes some |
//! | who needs every bucket known, every dirty sector counted | `walked` | the tree has been walked and the journal put, or that cannot be for now | the walk, the drain, a stop |
//! | whoever looks after the set from outside | a bell of its own ([`CacheSet::rings`]) | it has failed | the failure |
//! | who waits for the answer to a request | a bell of its own | it is answered | the end of its operation, or of the task for its rest |
//! | stop | `task_ended` | no task of a kind runs | each task's end |
//!
//! A rewrite is a task that begins for who waits: that there is a place for it, `request::REQUESTS_MAX` counts.
//!
//! A failure rings everything. What a wait needs must not need what the waiter holds: writing leaves and entries needs
//! neither buckets nor permits; the allocator needs both and the permit for metadata, and where buckets are kept by the
//! age of the pointers to them it needs GC, which rewrites nodes. So nobody waits for a bucket with a permit or a node in
//! hand; rewrites need all of these, and close a leaf only when they have their buckets and memory.

use crate::btree::budget::{Shares, attempt_tickets};
use crate::btree::cache::Pin;
use crate::btree::{Attempt, Need, background_rewrite, load, write};
use crate::error::Error;
use crate::journal::writer;
use crate::phases::{Inside, Phase, Phases};
use crate::request::inflight::UnderWay;
use crate::state::State;
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::sync::{Notify, Permit, Semaphore};
use bcached_env::{Disk, Env, IoErrorKind, Stock};
use bcached_format::Position;
use core::cell::{Cell, OnceCell, RefCell};

/// Who waits for what. A waiter re-checks its condition after every wake-up.
#[derive(Default)]
pub struct Signals {
    /// The journal's writer has something to do.
    pub journal_work: Notify,
    /// A journal entry became durable, or leaves were written: there may be room.
    pub journal_progress: Notify,
    /// The leaf writer has something to do.
    pub leaf_work: Notify,
    /// A node is no longer being written, or has been closed or opened.
    pub node_progress: Notify,
    /// A node came, was unpinned, written or removed: there may be memory.
    pub node_memory: Rc<Notify>,
    /// The allocator has something to do, or something it waited for may have changed.
    pub allocator_work: Notify,
    /// Free buckets came.
    pub space: Notify,
    /// Buckets have been closed, and want a summary.
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
    /// Parked data has come.
    pub parked_work: Notify,
    /// Write-back has something to do.
    pub writeback_work: Notify,
    /// The walk, or a replay beside requests, has come to its end.
    pub walked: Notify,
    /// Of whoever looks after the set from outside, and does not keep it: it has failed, perhaps.
    pub outside: OnceCell<Rc<Notify>>,
    /// A background task ended.
    pub task_ended: Notify,
}

/// A request that has to wait asks for no memory where so many wait at once for the same thing. The list of each is as long ever after as it
/// once was.
const WAIT_AT_ONCE: usize = 64;

impl Signals {
    /// What a set has.
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
    /// Nodes that may be held across waits, see `btree::budget`.
    pub(crate) tickets: Semaphore,
    /// How the memory for nodes is shared.
    pub(crate) shares: Cell<Shares>,
    /// One change of that at a time.
    pub(crate) resizing: Semaphore,
    /// One change of the tree's shape at a time.
    pub(crate) structure: Semaphore,
    /// One write of the priorities or the uuid table at a time.
    pub(crate) metadata: Semaphore,
    /// One who makes void what is left of volumes that are no more at a time.
    pub(crate) orphans: Semaphore,
    /// What the set is in the middle of.
    pub(crate) phases: Arc<Phases>,
    /// Memory for what was read and goes into the cache, to be used again.
    pub(crate) stock: RefCell<Stock>,
    /// What devices do something for, that no task waits for.
    pub(crate) under_way: RefCell<UnderWay>,
    /// Background tasks running, by what they do.
    pub(crate) running: [Cell<usize>; 4],
}

/// What a background task does. A task waits only for tasks of later kinds, so a stop ends them in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// Makes changes of its own: write-back, GC, parked data. Ends at [`State::stopping`], but for a replay, which comes to its end if it can.
    Changing,
    /// Keeps buckets free, for requests and for workers. Ends at [`State::settled`].
    Allocating,
    /// Rewrites a leaf, and ends then. Requests and tasks of the kinds above ask for it, so none begins when those have ended.
    Rewriting,
    /// Writes the journal and the leaves, for everybody. Ends at [`State::stopped`].
    Writing,
}

/// What an attempt keeps between its tries: the nodes that it named, and tickets for a path of the tree.
#[derive(Default)]
struct Held {
    pins: Vec<Pin>,
    ticket: Option<Permit>,
    count: usize,
}

impl Held {
    /// Takes tickets for a path, if there are none yet. If the tree has changed so much meanwhile that more nodes have
    /// been named than there are tickets for, all are let go first.
    async fn take_ticket(&mut self, set: &CacheSet) {
        let wanted = set.with(|s| attempt_tickets(s.root.level));
        if self.ticket.is_some() && self.pins.len() < self.count {
            return;
        }
        *self = Self::default();
        self.ticket = Some(set.inner.tickets.acquire(wanted).await);
        self.count = wanted;
    }
}

/// Something in a transition that changed the tree is to be told to others.
#[derive(Clone, Copy)]
struct Told {
    /// The set has failed.
    fails: bool,
    /// A pass of GC is due.
    wants_gc: bool,
}

impl State {
    /// What a transition has done that others are to be told of, before which the set had failed or not.
    #[inline]
    fn is_to_be_told(&mut self, had_failed: bool) -> Option<Told> {
        let fails = !had_failed && self.failed.is_some();
        let wants_gc = self.buckets.take_gc_untold();
        let is_any = self.untold || fails || wants_gc || !self.crowded.is_empty();
        is_any.then_some(Told { fails, wants_gc })
    }
}

/// A running cache set. Clones are handles on the same one.
#[derive(Clone)]
pub struct CacheSet {
    pub(crate) inner: Rc<Inner>,
}

impl CacheSet {
    /// A transition: sees and changes the state, cannot wait.
    #[inline]
    pub(crate) fn with<R>(&self, transition: impl FnOnce(&mut State) -> R) -> R {
        let now = self.inner.env.now();
        let mut state = self.inner.state.borrow_mut();
        state.now = now;
        let result = transition(&mut state);
        let nanoseconds = state.work.take();
        drop(state);
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

    /// The set is in the middle of `phase` until what is returned is dropped.
    pub(crate) fn begin(&self, phase: Phase) -> Inside {
        self.inner.phases.begin(phase)
    }

    /// True when background tasks that change things end ([`Duty::Changing`]).
    pub(crate) fn is_ending(&self) -> bool {
        self.with(|s| s.stopping || s.failed.is_some())
    }

    /// Waits until the tree has been walked, and everything in it and in the journal counted; but not for a node that cannot be read.
    ///
    /// # Errors
    /// What the walk has met a few times in a row, [`Error::Stopping`], and a set's failure.
    pub async fn walked(&self) -> Result<(), Error> {
        while !self.has_walked()? {
            self.signals().walked.wait().await;
        }
        Ok(())
    }

    /// Whether all has been counted; an error if it will not be for now.
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

    /// Waits until all has been counted, however long that takes, or the set is ending. For tasks.
    pub(crate) async fn walk_ends(&self) {
        while !self.with(|s| s.is_counted()) && !self.is_ending() {
            self.signals().walked.wait().await;
        }
    }

    /// Refuses when the set has failed.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        match self.with(|s| s.failed.clone()) {
            None => Ok(()),
            Some(error) => Err(Error::Failed(Box::new(error))),
        }
    }

    /// Latches the first failure, or one that weighs more: that does not pass. Everybody who waits finds out.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let is_gone = matches!(&error, Error::Io { source, .. } if source.kind == IoErrorKind::Gone);
        let is_volatile = self.cache().info().volatile_cache;
        let first = self.with(|s| {
            let is_proven = s.note_held && s.buckets.flushes().have_succeeded();
            if is_gone && is_volatile && !is_proven {
                // With its power.
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

    /// Runs an attempt until it completes: loads the nodes it names, which stay pinned until it succeeds, splits a
    /// full leaf, waits for the journal.
    pub(crate) async fn attempt<T>(
        &self,
        transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.run_attempt(true, transition).await
    }

    /// An attempt that changes nothing in the tree: a set that has failed still answers it, because what is in memory
    /// is right and what was written stays readable.
    pub(crate) async fn attempt_reading<T>(
        &self,
        transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        self.run_attempt(false, transition).await
    }

    /// What nearly all attempts need is there: they end without a wait, and take no memory.
    #[inline]
    async fn run_attempt<T>(
        &self,
        changes: bool,
        mut transition: impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<T, Error> {
        let mut need = None;
        // Many attempts may follow each other without anything to wait for.
        if self.env().has_breath() {
            match self.try_once(changes, None, &mut transition)? {
                Attempt::Done(Some(result)) => return Ok(result),
                Attempt::Done(None) => unreachable!("nothing else is to be done first"),
                Attempt::Needs(missing) => need = Some(missing),
            }
        }
        Box::pin(self.keep_trying(changes, transition, need)).await
    }

    /// Tries until it completes, after seeing to what it `need`s.
    async fn keep_trying<T>(
        &self,
        changes: bool,
        mut transition: impl FnMut(&mut State) -> Attempt<T>,
        mut need: Option<Need>,
    ) -> Result<T, Error> {
        let mut held = Held::default();
        // The key that must be put first.
        let mut pending: Option<Position> = None;
        loop {
            match need {
                Some(Need::Replay(end)) => pending = Some(end),
                Some(need) => self.see_to(need, &mut held).await?,
                None => {}
            }
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

    /// One try, or the key that ends at `pending` is put, which comes to nothing else. Whoever is to know of it is told.
    #[inline]
    fn try_once<T>(
        &self,
        changes: bool,
        pending: Option<Position>,
        transition: &mut impl FnMut(&mut State) -> Attempt<T>,
    ) -> Result<Attempt<Option<T>>, Error> {
        // Asked in the transition itself: what fails while others run is known here.
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

    /// A transition that may have changed the tree: whoever is to know of what it has done is told.
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
    fn tell(&self, Told { fails, wants_gc }: Told) {
        let (untold, crowded) =
            self.with(|s| (core::mem::take(&mut s.untold), core::mem::take(&mut s.crowded)));
        if fails {
            // What it found contradicts itself: whoever waits for the set waits in vain.
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

    /// Sees to what an attempt is missing.
    async fn see_to(&self, need: Need, held: &mut Held) -> Result<(), Error> {
        match need {
            Need::Node(child) => {
                held.take_ticket(self).await;
                match load::load(self, child).await {
                    Ok(pin) => held.pins.push(pin),
                    // It has been replaced while its turn came: the tree names another by now.
                    Err(_) if self.with(|s| s.buckets.is_stale(child.pointer())) => {}
                    Err(error) => return Err(error),
                }
            }
            Need::Memory if held.ticket.is_none() => held.take_ticket(self).await,
            Need::Memory => {
                // There is a ticket for what the leaf may take: others, who hold none, are written and evicted.
                write::relieve(self);
                self.signals().node_memory.wait().await;
            }
            Need::Split { at, words } => {
                // A rewrite takes tickets of its own: nothing is held while waiting for it.
                *held = Held::default();
                background_rewrite::make_room(self, at, words).await?;
            }
            Need::Gate => {
                self.check_alive()?;
                *held = Held::default();
                self.signals().node_progress.wait().await;
            }
            Need::Journal => {
                *held = Held::default();
                writer::wait_for_room(self).await?;
            }
            // That is another attempt, of which the first knows nothing.
            Need::Replay(_) => {}
        }
        Ok(())
    }

    /// Keys that stand somewhere for the first time begin to age: whoever writes them looks at the clock from now on.
    fn tell_writers(&self) {
        self.signals().journal_work.notify_all();
        self.signals().leaf_work.notify_all();
    }

    /// Starts a background task that does `duty`.
    pub(crate) fn spawn<F: Future<Output = ()> + 'static>(&self, duty: Duty, task: impl FnOnce(Self) -> F) {
        let set = self.clone();
        let task = task(self.clone());
        let running = move |inner: &Inner, change: fn(usize) -> usize| {
            let count = &inner.running[duty as usize];
            count.set(change(count.get()));
        };
        running(&set.inner, |count| count + 1);
        self.env().spawn(async move {
            task.await;
            running(&set.inner, |count| count - 1);
            set.signals().task_ended.notify_all();
        });
    }

    /// Waits until every task that does `duty` has ended.
    pub(crate) async fn ended(&self, duty: Duty) {
        while self.inner.running[duty as usize].get() > 0 {
            self.signals().task_ended.wait().await;
        }
    }
}
