//! Enforces a minimum pace on peers for anything that holds memory: replies that they receive, and
//! payloads that they send.
//!
//! As long as no other connection waits for that memory, any pace within the stall limit is
//! acceptable. Once a connection waits that holds none of it, a peer that has fallen behind is
//! disconnected: it can reconnect, whereas the waiting one can do nothing.
//!
//! A peer falls behind while we wait for it, and catches up with each byte, at
//! [`SLOWEST_BYTES_A_SECOND`]. So a few bytes now and then are not progress, and a slow link is not
//! a stall. The waiting threads check this themselves; connections that make progress pay nothing
//! for it.

use bcached_port::Budget;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Two megabits a second: the slowest link that is of use for block devices at all.
const SLOWEST_BYTES_A_SECOND: u64 = 256 << 10;

/// Why a peer was disconnected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("other connections wait for the memory that it holds")]
pub(crate) struct HoldsMemoryError;

impl HoldsMemoryError {
    /// Whether the error has this cause.
    pub(crate) fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// The pace of one direction of a connection.
pub(crate) struct PeerPace {
    budget: Arc<Budget>,
    /// How far it may fall behind, and how long others may wait.
    give_way: Duration,
    behind: Duration,
}

impl PeerPace {
    pub(crate) const fn new(budget: Arc<Budget>, give_way: Duration) -> Self {
        Self { budget, give_way, behind: Duration::ZERO }
    }

    /// How often a waiting thread checks the pace.
    pub(crate) fn look_every(&self) -> Duration {
        self.give_way / 8
    }

    /// Records that so many bytes were moved.
    pub(crate) fn moved(&mut self, bytes: usize) {
        if !self.behind.is_zero() {
            let worth = Duration::from_micros(bytes as u64 * 1_000_000 / SLOWEST_BYTES_A_SECOND);
            self.behind = self.behind.saturating_sub(worth);
        }
    }

    /// Records that nothing moved for this time. Fails if the peer has to give way.
    pub(crate) fn waited(&mut self, time: Duration) -> io::Result<()> {
        // More is not recorded, so that the peer can catch up.
        self.behind = (self.behind + time).min(self.give_way);
        if self.behind < self.give_way {
            return Ok(());
        }
        match self.budget.keeps_waiting() {
            Some(waits) if waits >= self.give_way => Err(io::Error::other(HoldsMemoryError)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
impl PeerPace {
    /// A pace for a peer with unlimited time and memory.
    pub(crate) fn unhurried() -> Self {
        let pool = Arc::new(bcached_port::BudgetPool::new(1 << 20));
        Self::new(Arc::new(Budget::new(1 << 20, pool)), Duration::from_secs(3600))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_port::BudgetPool;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_peer_falls_behind_by_what_it_is_too_slow() {
        // At half the required pace it is 1, 1.5, 2 .. seconds behind at each check.
        for (bytes_a_second, late_at) in [(0, Some(5)), (128 << 10, Some(9)), (256 << 10, None)] {
            let mut pace = PeerPace { give_way: 5 * SECOND, ..PeerPace::unhurried() };
            let late = (1..=60).find(|_| {
                pace.moved(bytes_a_second);
                pace.waited(SECOND).expect("nobody waits");
                pace.behind == 5 * SECOND
            });
            assert_eq!(late, late_at, "{bytes_a_second} bytes a second");
        }
    }

    #[test]
    fn it_goes_only_for_others() {
        let pool = Arc::new(BudgetPool::new(1 << 20));
        let [holder, other] = [(); 2].map(|()| Arc::new(Budget::new(1 << 20, Arc::clone(&pool))));
        let held = holder.acquire(1 << 20);
        let mut pace = PeerPace::new(Arc::clone(&holder), Duration::from_millis(1));
        pace.waited(SECOND).expect("nobody waits");
        let waiting = std::thread::spawn(move || drop(other.acquire(1 << 20)));
        let mut looks = (0..30_000).map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            pace.waited(SECOND)
        });
        let error = looks.find_map(Result::err).expect("another waits, and ever longer");
        assert!(HoldsMemoryError::is(&error));
        drop(held);
        waiting.join().expect("it was given its memory");
        pace.waited(SECOND).expect("nobody waits any more");
    }
}
