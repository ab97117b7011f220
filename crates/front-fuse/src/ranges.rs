//! Tracks which sectors of a volume are being changed, for changes of partial sectors.
//!
//! Such a change is a read-modify-write: it reads a sector, inserts its bytes and writes the sector
//! back. If another client wrote to that sector in between, its acknowledged write would be lost.
//! So a partial change has exclusive access to its sectors: it waits for changes of them that are
//! in flight, and later ones wait for it. Changes of whole sectors do not exclude each other; the
//! engine carries out overlapping ones in order of arrival.
//!
//! The table covers only this front end. Clients of other front ends that share a volume (`shared`)
//! share it by sectors, as a disk is shared.
//!
//! **Liveness.** A waiting claim holds no range. A holder gives its range back with the engine's
//! reply, and the engine answers every request. Waiting claims are served in order of arrival, so
//! none starves.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(crate) struct RangeLocks {
    state: Mutex<RangeState>,
    changed: Condvar,
}

#[derive(Default)]
struct RangeState {
    next: u64,
    claims: Vec<RangeClaim>,
}

struct RangeClaim {
    /// Order of arrival.
    number: u64,
    sectors: Range<u64>,
    is_alone: bool,
    waits: bool,
}

/// A range that is being changed, until dropped.
pub(crate) struct RangeGuard {
    ranges: Arc<RangeLocks>,
    number: u64,
}

impl RangeClaim {
    fn excludes(&self, sectors: &Range<u64>, is_alone: bool) -> bool {
        (self.is_alone || is_alone) && self.sectors.start < sectors.end && sectors.start < self.sectors.end
    }
}

impl RangeLocks {
    /// Claims sectors for a change of whole sectors, if no exclusive claim holds or waits for any
    /// of them.
    pub(crate) fn try_share(self: &Arc<Self>, sectors: Range<u64>) -> Option<RangeGuard> {
        let mut state = self.lock();
        if state.claims.iter().any(|claim| claim.excludes(&sectors, false)) {
            return None;
        }
        let number = state.put(sectors, false, false);
        Some(RangeGuard { ranges: Arc::clone(self), number })
    }

    /// Claims sectors for a change of whole sectors, and waits if necessary.
    pub(crate) fn share(self: &Arc<Self>, sectors: Range<u64>) -> RangeGuard {
        self.enter(sectors, false)
    }

    /// Claims sectors exclusively, for a change of part of them.
    pub(crate) fn have_alone(self: &Arc<Self>, sectors: Range<u64>) -> RangeGuard {
        self.enter(sectors, true)
    }

    fn enter(self: &Arc<Self>, sectors: Range<u64>, is_alone: bool) -> RangeGuard {
        let mut state = self.lock();
        let number = state.put(sectors.clone(), is_alone, true);
        let is_before =
            |claim: &RangeClaim| claim.number != number && (!claim.waits || claim.number < number);
        while state.claims.iter().any(|claim| is_before(claim) && claim.excludes(&sectors, is_alone)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(own) = state.claims.iter_mut().find(|claim| claim.number == number) {
            own.waits = false;
        }
        RangeGuard { ranges: Arc::clone(self), number }
    }

    fn lock(&self) -> MutexGuard<'_, RangeState> {
        // The value is consistent between any two statements, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RangeState {
    fn put(&mut self, sectors: Range<u64>, is_alone: bool, waits: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        self.claims.push(RangeClaim { number, sectors, is_alone, waits });
        number
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut state = self.ranges.lock();
        let somebody_waits = state.claims.iter().any(|claim| claim.waits);
        if let Some(index) = state.claims.iter().position(|claim| claim.number == self.number) {
            state.claims.swap_remove(index);
        }
        drop(state);
        if somebody_waits {
            self.ranges.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn whole_sectors_go_together_and_parts_go_alone() {
        let ranges = Arc::new(RangeLocks::default());
        let one = ranges.try_share(0..8).expect("nobody is there");
        let other = ranges.try_share(4..12).expect("the engine has them in order");
        let (tell, told) = mpsc::channel();
        let waiting = Arc::clone(&ranges);
        let thread = std::thread::spawn(move || {
            let alone = waiting.have_alone(7..8);
            tell.send(()).expect("somebody listens");
            alone
        });
        while ranges.lock().claims.len() < 3 {
            std::thread::yield_now();
        }
        assert!(ranges.try_share(7..9).is_none(), "who waits is not overtaken");
        assert!(ranges.try_share(8..9).is_some() && ranges.try_share(0..7).is_some());
        drop(one);
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "the other overlaps too");
        drop(other);
        told.recv_timeout(Duration::from_secs(30)).expect("has it now");
        assert!(ranges.try_share(7..8).is_none());
        drop(thread.join().expect("no panic"));
        assert!(ranges.try_share(0..100).is_some());
        assert!(ranges.lock().claims.is_empty());
    }
}
