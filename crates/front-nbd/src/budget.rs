//! Bytes of payload that may be in memory, for one connection and for all of them together.
//!
//! Who asks first is served first: a large request is not starved by small ones, at the price that they wait behind
//! it. Liveness: a permit comes back when its reply has been sent or thrown away, and every reply is, because the
//! engine answers everything and the writer gives up on a peer that does not read; each return wakes the waiters.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A bound on bytes; inside another one, if it has a parent.
pub(crate) struct Budget {
    state: Mutex<State>,
    changed: Condvar,
    bytes_max: u64,
    parent: Option<Arc<Budget>>,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Number of the next one to ask.
    arriving: u64,
    /// Number of the one whose turn it is.
    serving: u64,
}

/// The right to hold so many bytes, until dropped.
pub(crate) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) const fn new(bytes_max: u64, parent: Option<Arc<Self>>) -> Self {
        let state = State { used: 0, arriving: 0, serving: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), bytes_max, parent }
    }

    /// Waits until there is room for `bytes`.
    pub(crate) fn acquire(self: &Arc<Self>, bytes: u64) -> Permit {
        assert!(bytes <= self.bytes_max, "no request is larger than any budget");
        self.enter(bytes);
        if let Some(parent) = &self.parent {
            parent.enter(bytes);
        }
        Permit { budget: Arc::clone(self), bytes }
    }

    fn enter(&self, bytes: u64) {
        let mut state = self.lock();
        let turn = state.arriving;
        state.arriving += 1;
        while state.serving != turn || self.bytes_max - state.used < bytes {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.used += bytes;
        state.serving += 1;
        if state.serving != state.arriving {
            self.changed.notify_all();
        }
    }

    fn leave(&self, bytes: u64) {
        let mut state = self.lock();
        state.used -= bytes;
        if state.serving != state.arriving {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The numbers are whole between any two statements: a panic elsewhere does not spoil them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.budget.leave(self.bytes);
        if let Some(parent) = &self.budget.parent {
            parent.leave(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn a_small_one_waits_behind_a_large_one() {
        let budget = Arc::new(Budget::new(10, None));
        let first = budget.acquire(6);
        let (order, arrived) = mpsc::channel();
        let spawn = |bytes: u64| {
            let (budget, order) = (Arc::clone(&budget), order.clone());
            let waiting = budget.lock().arriving;
            let asks = Arc::clone(&budget);
            let thread = thread::spawn(move || {
                let permit = asks.acquire(bytes);
                order.send(bytes).unwrap();
                drop(permit);
            });
            while budget.lock().arriving == waiting {
                thread::yield_now();
            }
            thread
        };
        let large = spawn(8);
        let small = spawn(3);
        assert!(arrived.try_recv().is_err(), "four bytes are free, but the large one came first");
        drop(first);
        assert_eq!(arrived.recv_timeout(LIMIT), Ok(8));
        assert_eq!(arrived.recv_timeout(LIMIT), Ok(3));
        large.join().unwrap();
        small.join().unwrap();
        assert_eq!(budget.lock().used, 0);
    }

    #[test]
    fn the_parent_bounds_all_children() {
        let parent = Arc::new(Budget::new(10, None));
        let children = [(); 2].map(|()| Arc::new(Budget::new(8, Some(Arc::clone(&parent)))));
        let first = children[0].acquire(8);
        let (sender, arrived) = mpsc::channel();
        let other = Arc::clone(&children[1]);
        let thread = thread::spawn(move || {
            let permit = other.acquire(8);
            sender.send(()).unwrap();
            drop(permit);
        });
        while parent.lock().arriving < 2 {
            thread::yield_now();
        }
        assert!(arrived.try_recv().is_err());
        drop(first);
        arrived.recv_timeout(LIMIT).unwrap();
        thread.join().unwrap();
        assert_eq!(parent.lock().used, 0);
    }
}
