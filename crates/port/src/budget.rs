//! Bytes of payload that a front end may have in memory, for one client and for all of them together.
//!
//! Who asks first is served first: a large request is not starved by small ones, at the price that they wait behind
//! it. Liveness: a permit comes back when its reply has been sent or thrown away, and every reply is, because the
//! engine answers everything and a front end gives up on a peer that does not read; each return wakes the waiters.
//!
//! Until it is given up, such a peer may hold all that a client may, and a few of them all that there is. So that
//! they do not stand in everybody's way, a client that holds little has a ledger of its own.

use crate::lock::{lock, wait};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// What a client may hold besides the common bytes: some requests of file systems and databases.
const LITTLE_BYTES: u64 = 1 << 20;
/// The share of all bytes that is there for clients that hold little, on top.
const LITTLE_SHARE: u64 = 8;

/// What all clients share.
pub struct Pool {
    common: Ledger,
    little: Ledger,
}

/// The bytes of one client.
pub struct Budget {
    own: Ledger,
    pool: Arc<Pool>,
}

/// The right to hold so many bytes, until dropped.
pub struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
    is_little: bool,
}

/// A bound on bytes.
struct Ledger {
    state: Mutex<State>,
    changed: Condvar,
    bytes_max: u64,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Number of the next one to ask.
    arriving: u64,
    /// Number of the one whose turn it is.
    serving: u64,
}

impl Pool {
    /// With room for so many bytes, and an eighth on top for clients that hold little.
    #[must_use]
    pub const fn new(bytes_max: u64) -> Self {
        Self { common: Ledger::new(bytes_max), little: Ledger::new(bytes_max / LITTLE_SHARE) }
    }
}

impl Budget {
    /// Of a client that may hold so many of the pool's bytes.
    #[must_use]
    pub const fn new(bytes_max: u64, pool: Arc<Pool>) -> Self {
        Self { own: Ledger::new(bytes_max), pool }
    }

    /// Waits until there is room for `bytes`, which may not be more than the client or the pool may ever hold.
    #[must_use = "the bytes are free again when it is dropped"]
    pub fn acquire(self: &Arc<Self>, bytes: u64) -> Permit {
        let held = self.own.enter(bytes);
        let is_little = held <= LITTLE_BYTES && self.pool.little.try_enter(bytes).is_some();
        if !is_little {
            self.pool.common.enter(bytes);
        }
        Permit { budget: Arc::clone(self), bytes, is_little }
    }

    /// The same, if there is room now and nobody waits for it.
    #[must_use]
    pub fn try_acquire(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let held = self.own.try_enter(bytes)?;
        let is_little = held <= LITTLE_BYTES && self.pool.little.try_enter(bytes).is_some();
        if !is_little && self.pool.common.try_enter(bytes).is_none() {
            self.own.leave(bytes);
            return None;
        }
        Some(Permit { budget: Arc::clone(self), bytes, is_little })
    }
}

impl Ledger {
    const fn new(bytes_max: u64) -> Self {
        let state = State { used: 0, arriving: 0, serving: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), bytes_max }
    }

    /// Waits until there is room for `bytes`; all that is entered then.
    fn enter(&self, bytes: u64) -> u64 {
        assert!(bytes <= self.bytes_max, "no request is larger than any budget");
        let mut state = self.lock();
        let turn = state.arriving;
        state.arriving += 1;
        while state.serving != turn || self.bytes_max - state.used < bytes {
            state = wait(&self.changed, state);
        }
        state.used += bytes;
        let used = state.used;
        state.serving += 1;
        if state.serving != state.arriving {
            self.changed.notify_all();
        }
        used
    }

    /// Enters `bytes` if there is room now and nobody waits; all that is entered then.
    fn try_enter(&self, bytes: u64) -> Option<u64> {
        let mut state = self.lock();
        let has_room = state.serving == state.arriving && bytes <= self.bytes_max - state.used;
        if !has_room {
            return None;
        }
        state.used += bytes;
        Some(state.used)
    }

    fn leave(&self, bytes: u64) {
        let mut state = self.lock();
        state.used -= bytes;
        if state.serving != state.arriving {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.budget.own.leave(self.bytes);
        let pool = &self.budget.pool;
        if self.is_little { pool.little.leave(self.bytes) } else { pool.common.leave(self.bytes) }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("used", &self.common.lock().used).finish_non_exhaustive()
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("used", &self.own.lock().used).finish_non_exhaustive()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(30);
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_small_one_waits_behind_a_large_one() {
        let ledger = Arc::new(Ledger::new(10));
        ledger.enter(6);
        let (order, arrived) = mpsc::channel();
        let spawn = |bytes: u64| {
            let (asks, order) = (Arc::clone(&ledger), order.clone());
            let waiting = ledger.lock().arriving;
            let thread = thread::spawn(move || {
                asks.enter(bytes);
                order.send(bytes).unwrap();
                asks.leave(bytes);
            });
            while ledger.lock().arriving == waiting {
                thread::yield_now();
            }
            thread
        };
        let large = spawn(8);
        let small = spawn(3);
        assert!(arrived.try_recv().is_err(), "four bytes are free, but the large one came first");
        ledger.leave(6);
        assert_eq!(arrived.recv_timeout(LIMIT), Ok(8));
        assert_eq!(arrived.recv_timeout(LIMIT), Ok(3));
        large.join().unwrap();
        small.join().unwrap();
        assert_eq!(ledger.lock().used, 0);
    }

    #[test]
    fn the_pool_bounds_all_connections() {
        let pool = Arc::new(Pool::new(10 * MIB));
        let connections = [(); 2].map(|()| Arc::new(Budget::new(8 * MIB, Arc::clone(&pool))));
        let first = connections[0].acquire(8 * MIB);
        let (sender, arrived) = mpsc::channel();
        let other = Arc::clone(&connections[1]);
        let thread = thread::spawn(move || {
            let permit = other.acquire(8 * MIB);
            sender.send(()).unwrap();
            drop(permit);
        });
        while pool.common.lock().arriving < 2 {
            thread::yield_now();
        }
        assert!(arrived.try_recv().is_err());
        drop(first);
        arrived.recv_timeout(LIMIT).unwrap();
        thread.join().unwrap();
        assert_eq!(pool.common.lock().used, 0);
    }

    /// Peers that do not read hold everything; another connection's small requests pass them.
    #[test]
    fn little_requests_pass_those_who_hold_everything() {
        let pool = Arc::new(Pool::new(16 * MIB));
        let stalled = [(); 2].map(|()| Arc::new(Budget::new(8 * MIB, Arc::clone(&pool))));
        let held: Vec<_> = stalled.iter().map(|connection| connection.acquire(8 * MIB)).collect();
        let other = Arc::new(Budget::new(8 * MIB, Arc::clone(&pool)));
        let little: Vec<_> = (0..4).map(|_| other.acquire(MIB / 4)).collect();
        assert!(little.iter().all(|permit| permit.is_little));
        drop(held);
        assert!(!other.acquire(4096).is_little, "more than little is as any");
        drop(little);
        assert!(!other.acquire(2 * MIB).is_little);
        assert_eq!((pool.common.lock().used, pool.little.lock().used), (0, 0));
    }

    #[test]
    fn what_does_not_want_to_wait_is_told_so_and_holds_nothing() {
        let pool = Arc::new(Pool::new(4 * MIB));
        let [one, other] = [(); 2].map(|()| Arc::new(Budget::new(4 * MIB, Arc::clone(&pool))));
        let held = one.try_acquire(3 * MIB).expect("there is room");
        assert!(one.try_acquire(2 * MIB).is_none(), "its own bound");
        assert!(other.try_acquire(2 * MIB).is_none(), "the bound of all");
        assert_eq!(other.own.lock().used, 0);
        assert!(other.try_acquire(MIB / 2).is_some_and(|permit| permit.is_little));
        drop(held);
        drop(other.try_acquire(4 * MIB).expect("all is free"));
        assert_eq!((pool.common.lock().used, pool.little.lock().used), (0, 0));
    }
}
