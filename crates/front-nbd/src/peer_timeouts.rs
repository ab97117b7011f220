//! How fast a peer has to be with what holds memory: replies that it is to take, payloads that it is to send.
//!
//! As long as nobody else waits for that memory, any pace will do that keeps to the limit for stalls. Once somebody does
//! who holds nothing of it, a peer that has fallen behind has to go: it can connect again, and who waits can do nothing.
//!
//! A peer falls behind while we wait for it and catches up with each byte, at [`SLOWEST_BYTES_A_SECOND`]. So a few bytes
//! now and then are no progress, and a slow way to a client is no stall. Threads that wait look for themselves; nobody who
//! moves pays for that.

use bcached_port::Budget;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Two megabits a second: the slowest way to a client that is good for block devices at all.
const SLOWEST_BYTES_A_SECOND: u64 = 256 << 10;

/// Why a peer had to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("others wait for the memory that it holds")]
pub(crate) struct InTheWay;

impl InTheWay {
    /// Whether that is what an error says.
    pub(crate) fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

/// The pace of one direction of a connection.
pub(crate) struct Pace {
    budget: Arc<Budget>,
    /// It may be so far behind, and others may have waited for so long.
    give_way: Duration,
    behind: Duration,
}

impl Pace {
    pub(crate) const fn new(budget: Arc<Budget>, give_way: Duration) -> Self {
        Self { budget, give_way, behind: Duration::ZERO }
    }

    /// Who waits looks this often.
    pub(crate) fn look_every(&self) -> Duration {
        self.give_way / 8
    }

    /// So many bytes went through.
    pub(crate) fn moved(&mut self, bytes: usize) {
        if !self.behind.is_zero() {
            let worth = Duration::from_micros(bytes as u64 * 1_000_000 / SLOWEST_BYTES_A_SECOND);
            self.behind = self.behind.saturating_sub(worth);
        }
    }

    /// So long nothing did.
    pub(crate) fn waited(&mut self, time: Duration) -> io::Result<()> {
        // More is not remembered: it can catch up.
        self.behind = (self.behind + time).min(self.give_way);
        if self.behind < self.give_way {
            return Ok(());
        }
        match self.budget.keeps_waiting() {
            Some(waits) if waits >= self.give_way => Err(io::Error::other(InTheWay)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
impl Pace {
    /// For who has all the time and memory in the world.
    pub(crate) fn unhurried() -> Self {
        let pool = Arc::new(bcached_port::Pool::new(1 << 20));
        Self::new(Arc::new(Budget::new(1 << 20, pool)), Duration::from_secs(3600))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_port::Pool;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_peer_falls_behind_by_what_it_is_too_slow() {
        // Half as fast as it has to be, it is 1, 1.5, 2 .. seconds behind when looked at.
        for (bytes_a_second, late_at) in [(0, Some(5)), (128 << 10, Some(9)), (256 << 10, None)] {
            let mut pace = Pace { give_way: 5 * SECOND, ..Pace::unhurried() };
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
        let pool = Arc::new(Pool::new(1 << 20));
        let [holder, other] = [(); 2].map(|()| Arc::new(Budget::new(1 << 20, Arc::clone(&pool))));
        let held = holder.acquire(1 << 20);
        let mut pace = Pace::new(Arc::clone(&holder), Duration::from_millis(1));
        pace.waited(SECOND).expect("nobody waits");
        let waiting = std::thread::spawn(move || drop(other.acquire(1 << 20)));
        let mut looks = (0..30_000).map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            pace.waited(SECOND)
        });
        let error = looks.find_map(Result::err).expect("another waits, and ever longer");
        assert!(InTheWay::is(&error));
        drop(held);
        waiting.join().expect("it was given its memory");
        pace.waited(SECOND).expect("nobody waits any more");
    }
}
