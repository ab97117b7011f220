//! What of a backing device's writes is durable (decision 9).
//!
//! Flushes are numbered as they begin. A write that completed when flush `n` was the newest to have begun is covered
//! by any later flush that succeeds. A flush that fails may have dropped what it should have made durable, and the
//! next one will claim success: all it covered counts as unwritten, and the next client's flush says so once.

/// Flushes and writes of one backing device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epoch {
    begun: u64,
    good: u64,
    failed: u64,
    open: u64,
    last_write: Option<u64>,
    lost: bool,
    volatile: bool,
}

/// When a write completed, relative to flushes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Stamp(u64);

impl Epoch {
    /// A device that has (or has not) a volatile cache; what it may hold from before is unknown, so the first flush
    /// of a client goes through.
    #[must_use]
    pub fn new(volatile: bool) -> Self {
        Self { volatile, last_write: volatile.then_some(0), ..Self::default() }
    }

    /// A write begins.
    pub const fn write_begins(&mut self) {
        self.open += 1;
    }

    /// A write ended; the stamp of its data.
    pub const fn write_ends(&mut self) -> Stamp {
        self.open = self.open.checked_sub(1).expect("a write that ends has begun");
        self.last_write = Some(self.begun);
        Stamp(self.begun)
    }

    /// The stamp of data read now: that of the newest write, because what was read may be in the volatile cache only.
    /// Whatever waits with it, a flush is still wanted ([`Epoch::has_unflushed`]) until it is durable.
    #[must_use]
    pub const fn read_now(&self) -> Stamp {
        match self.last_write {
            Some(number) => Stamp(number),
            None => Stamp(0),
        }
    }

    /// True when data with this stamp survives a power cut.
    #[must_use]
    pub const fn is_durable(&self, stamp: Stamp) -> bool {
        !self.volatile || self.good > stamp.0
    }

    /// True when data with this stamp may have been dropped by a flush that failed.
    #[must_use]
    pub const fn is_lost(&self, stamp: Stamp) -> bool {
        self.volatile && self.failed > stamp.0 && self.good <= stamp.0
    }

    /// True when something written may not be durable, or is being written.
    #[must_use]
    pub fn has_unflushed(&self) -> bool {
        self.volatile
            && (self.open > 0 || self.last_write.is_some_and(|stamp| !self.is_durable(Stamp(stamp))))
    }

    /// A flush begins; its number.
    pub const fn flush_begins(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// A flush succeeded. It proves nothing of what an earlier, failed one dropped: that has been dealt with when it
    /// failed.
    pub fn flush_succeeded(&mut self, number: u64) {
        self.good = self.good.max(number);
    }

    /// A flush failed.
    pub fn flush_failed(&mut self, number: u64) {
        self.failed = self.failed.max(number);
        self.lost = true;
    }

    /// Whether a flush has failed that no client has been told of; telling clears it.
    pub const fn take_lost(&mut self) -> bool {
        core::mem::replace(&mut self.lost, false)
    }

    /// The device has a volatile cache.
    #[must_use]
    pub const fn is_volatile(&self) -> bool {
        self.volatile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_flush_that_began_after_the_write_ended_covers_it() {
        let mut epoch = Epoch::new(true);
        epoch.write_begins();
        let early = epoch.flush_begins();
        let stamp = epoch.write_ends();
        epoch.flush_succeeded(early);
        assert!(!epoch.is_durable(stamp));
        assert!(epoch.has_unflushed());
        let late = epoch.flush_begins();
        epoch.flush_succeeded(late);
        assert!(epoch.is_durable(stamp));
        assert!(!epoch.has_unflushed());
    }

    #[test]
    fn what_is_read_during_a_flush_does_not_wait_for_another_one_that_nobody_wants() {
        let mut epoch = Epoch::new(true);
        let number = epoch.flush_begins();
        let stamp = epoch.read_now();
        assert!(!epoch.is_durable(stamp) && epoch.has_unflushed());
        epoch.flush_succeeded(number);
        assert!(epoch.is_durable(stamp) && !epoch.has_unflushed());
    }

    #[test]
    fn a_failed_flush_is_told_once() {
        let mut epoch = Epoch::new(true);
        epoch.write_begins();
        let stamp = epoch.write_ends();
        let number = epoch.flush_begins();
        epoch.flush_failed(number);
        assert!(epoch.is_lost(stamp));
        assert!(epoch.take_lost());
        assert!(!epoch.take_lost());
    }

    #[test]
    fn a_device_without_a_volatile_cache_needs_no_flush() {
        let mut epoch = Epoch::new(false);
        epoch.write_begins();
        let stamp = epoch.write_ends();
        assert!(epoch.is_durable(stamp) && !epoch.has_unflushed());
    }
}
