//! Limits the payload bytes that a front end may have in memory, for one client and for all
//! together.
//!
//! A peer that does not take its replies keeps what it holds until the front end gives up on it,
//! and so does a volume whose disk does not answer. No other client must stall because of that, so
//! memory is given out by three rules:
//!
//! 1. **A share.** A client that holds little has that apart from the common bytes ([`SHARE_BYTES`]
//!    each, an eighth on top for all). So small requests proceed however much others hold.
//! 2. **A part of what is left.** A client that holds common bytes gets more only if afterwards
//!    some multiple of what it then holds is still free ([`BudgetPool::leaving`]). With four times,
//!    the first client that keeps all it gets has a fifth, the next one a fifth of the rest, and of
//!    64 MiB eight of them leave 10.
//! 3. **Clients that hold none first.** A client that holds no common bytes gets what it asks for
//!    once that much is free: in the order of asking, and before all clients that hold some. A
//!    large request is not starved by small ones, at the price that they wait behind it.
//!
//! What remains is that a few large requests can take everything (the largest may be all there is).
//! The code that holds their bytes for a peer that does not take them can ask how long others have
//! waited: [`Budget::keeps_waiting`].
//!
//! **Liveness.** A permit is returned when its reply has been sent or discarded. Every reply is,
//! because the engine answers everything and a front end gives up on a peer that does not read.
//! Each return checks which waiters can proceed. A client that waits because of rule 2 holds
//! something: when that has been returned, rule 3 applies to it.

use crate::lock::{lock, wait};
use slab::Slab;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a client may hold besides the common bytes: a request of a file system or database, and
/// read-ahead up to its usual size.
pub const SHARE_BYTES: u64 = 64 << 10;
/// Divisor of the common bytes that gives the extra bytes for shares.
const SHARES_PART: u64 = 8;

/// The bytes that all clients share.
pub struct BudgetPool {
    state: Mutex<PoolState>,
    /// A waiter has been given what it asked for.
    granted: Condvar,
}

/// The bytes of one client.
pub struct Budget {
    client: usize,
    pool: Arc<BudgetPool>,
}

/// The right to hold this many bytes, until dropped.
pub struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
    kind: GrantKind,
}

/// Which bytes they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GrantKind {
    Share,
    Common,
}

struct PoolState {
    bytes_max: u64,
    /// A client that holds common bytes must leave this many times as many free.
    leaves: u64,
    /// Common bytes that are held.
    used: u64,
    shares_max: u64,
    /// Clients that hold some of their share.
    shares: u64,
    clients: Slab<ClientUsage>,
    /// In order of asking.
    waiting: BTreeMap<u64, BudgetWaiter>,
    /// Granted, but not yet noticed by the waiter.
    given: BTreeMap<u64, GrantKind>,
    /// Number of the next waiter.
    arriving: u64,
    /// A waiter holds no common bytes, and there are too few for it.
    is_short: bool,
    /// Number of passes over the waiters.
    sweep: u64,
}

/// What a client holds.
#[derive(Default)]
struct ClientUsage {
    bytes_max: u64,
    share: u64,
    common: u64,
    /// How many requests wait for bytes of this client.
    waiting: u32,
    /// The sweep in which one of them was left waiting; those behind it do not overtake.
    left_in: u64,
}

struct BudgetWaiter {
    client: usize,
    bytes: u64,
    /// It holds no common bytes, and there are too few for it: since when.
    short_since: Option<Instant>,
}

/// Whether a client can have what it asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Availability {
    Room(GrantKind),
    /// No: because of what it holds itself.
    Held,
    /// No: because of what others hold.
    Short,
}

impl BudgetPool {
    /// Creates a pool of this many bytes, and an eighth on top for shares.
    #[must_use]
    pub const fn new(bytes_max: u64) -> Self {
        let state = PoolState {
            bytes_max,
            leaves: 0,
            used: 0,
            shares_max: bytes_max / SHARES_PART / SHARE_BYTES,
            shares: 0,
            clients: Slab::new(),
            waiting: BTreeMap::new(),
            given: BTreeMap::new(),
            arriving: 0,
            is_short: false,
            sweep: 0,
        };
        Self { state: Mutex::new(state), granted: Condvar::new() }
    }

    /// Configures a pool for clients that may keep what they get: a client that holds common bytes
    /// gets more only if `times` as much as it then holds is left.
    #[must_use]
    pub fn leaving(mut self, times: u64) -> Self {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).leaves = times;
        self
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }
}

impl Budget {
    /// Creates the budget of a client that may hold up to `bytes_max` of the pool's bytes.
    #[must_use]
    pub fn new(bytes_max: u64, pool: Arc<BudgetPool>) -> Self {
        let client = pool.lock().clients.insert(ClientUsage { bytes_max, ..ClientUsage::default() });
        Self { client, pool }
    }

    /// Waits until there is room for `bytes`, which must not exceed what the client or the pool may
    /// ever hold.
    #[must_use = "the bytes are free again when it is dropped"]
    pub fn acquire(self: &Arc<Self>, bytes: u64) -> Permit {
        let mut state = self.pool.lock();
        let mut kind = state.ask(self.client, bytes);
        if kind.is_none() {
            let turn = state.enter(self.client, bytes);
            while kind.is_none() {
                state = wait(&self.pool.granted, state);
                kind = state.given.remove(&turn);
            }
        }
        let kind = kind.expect("a wait ends when the bytes are given");
        Permit { budget: Arc::clone(self), bytes, kind }
    }

    /// The same without waiting, if there is room now and no earlier request waits for it.
    #[must_use]
    pub fn try_acquire(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let kind = self.pool.lock().ask(self.client, bytes)?;
        Some(Permit { budget: Arc::clone(self), bytes, kind })
    }

    /// Returns how long a client that holds no common bytes has waited for some, if this client
    /// holds any.
    #[must_use]
    pub fn keeps_waiting(&self) -> Option<Duration> {
        let state = self.pool.lock();
        if state.clients[self.client].common == 0 {
            return None;
        }
        state.waiting.values().find_map(|waiter| waiter.short_since).map(|since| since.elapsed())
    }
}

impl PoolState {
    /// Gives out `bytes` unless a waiter needs what there is.
    fn ask(&mut self, client: usize, bytes: u64) -> Option<GrantKind> {
        let asks = &self.clients[client];
        assert!(bytes <= asks.bytes_max.min(self.bytes_max), "no request is larger than its budget");
        if asks.waiting > 0 {
            return None;
        }
        match self.look(client, bytes) {
            Availability::Room(GrantKind::Common) if self.is_short => None,
            Availability::Room(kind) => {
                self.take(client, bytes, kind);
                Some(kind)
            }
            Availability::Held | Availability::Short => None,
        }
    }

    /// Registers a waiter for bytes that were not available when it asked.
    fn enter(&mut self, client: usize, bytes: u64) -> u64 {
        let turn = self.arriving;
        self.arriving += 1;
        let short_since = (self.look(client, bytes) == Availability::Short).then(Instant::now);
        self.is_short |= short_since.is_some();
        self.clients[client].waiting += 1;
        self.waiting.insert(turn, BudgetWaiter { client, bytes, short_since });
        turn
    }

    /// Returns what a client can have if there are no waiters.
    fn look(&self, client: usize, bytes: u64) -> Availability {
        let asks = &self.clients[client];
        if asks.share + asks.common + bytes > asks.bytes_max {
            return Availability::Held;
        }
        if asks.share + bytes <= SHARE_BYTES && (asks.share > 0 || self.shares < self.shares_max) {
            return Availability::Room(GrantKind::Share);
        }
        let free = self.bytes_max - self.used;
        match asks.common {
            0 if bytes > free => Availability::Short,
            0 => Availability::Room(GrantKind::Common),
            held if bytes + self.leaves * (held + bytes) <= free => Availability::Room(GrantKind::Common),
            _ => Availability::Held,
        }
    }

    fn take(&mut self, client: usize, bytes: u64, kind: GrantKind) {
        let takes = &mut self.clients[client];
        match kind {
            GrantKind::Share => {
                self.shares += u64::from(takes.share == 0);
                takes.share += bytes;
            }
            GrantKind::Common => {
                self.used += bytes;
                takes.common += bytes;
            }
        }
        assert!(takes.share <= SHARE_BYTES && self.used <= self.bytes_max, "the budget is not exceeded");
    }

    fn give_back(&mut self, client: usize, bytes: u64, kind: GrantKind) {
        let gives = &mut self.clients[client];
        match kind {
            GrantKind::Share => {
                gives.share -= bytes;
                self.shares -= u64::from(gives.share == 0);
            }
            GrantKind::Common => {
                gives.common -= bytes;
                self.used -= bytes;
            }
        }
    }

    /// Gives waiters what they can have now; returns whether any got something.
    fn serve_waiting(&mut self) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let given = self.given.len();
        self.is_short = self.serve_those(true);
        if !self.is_short {
            self.serve_those(false);
        }
        self.given.len() > given
    }

    /// Does one sweep over the waiters without common bytes, or over those with some; returns
    /// whether one of them was short.
    fn serve_those(&mut self, without: bool) -> bool {
        self.sweep += 1;
        let (mut is_short, mut waiting) = (false, std::mem::take(&mut self.waiting));
        waiting.retain(|turn, waiter| {
            let BudgetWaiter { client, bytes, .. } = *waiter;
            let look = self.look(client, bytes);
            let room = match look {
                _ if self.clients[client].left_in == self.sweep => None,
                Availability::Room(GrantKind::Share) => Some(GrantKind::Share),
                Availability::Room(kind) if !is_short && (self.clients[client].common == 0) == without => {
                    Some(kind)
                }
                _ => None,
            };
            waiter.short_since =
                (look == Availability::Short).then(|| waiter.short_since.unwrap_or_else(Instant::now));
            is_short |= look == Availability::Short;
            let Some(kind) = room else {
                self.clients[client].left_in = self.sweep;
                return true;
            };
            self.take(client, bytes, kind);
            self.clients[client].waiting -= 1;
            self.given.insert(*turn, kind);
            false
        });
        self.waiting = waiting;
        is_short
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let pool = &self.budget.pool;
        let mut state = pool.lock();
        state.give_back(self.budget.client, self.bytes, self.kind);
        let served = state.serve_waiting();
        drop(state);
        if served {
            pool.granted.notify_all();
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        // Its permits and waiters keep the budget alive, so nothing is held any more.
        self.pool.lock().clients.remove(self.client);
    }
}

impl fmt::Debug for BudgetPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BudgetPool").field("used", &self.lock().used).finish_non_exhaustive()
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.pool.lock();
        let client = &state.clients[self.client];
        f.debug_struct("Budget").field("used", &(client.share + client.common)).finish_non_exhaustive()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
