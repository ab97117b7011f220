//! Indexes the leaves with unwritten keys by what makes them due to be written. So the writer of
//! leaves looks only at those that are due, however many nodes are in memory.
//!
//! Leaves that are being written or replaced may be among them. They are few, and are skipped.

use alloc::collections::BTreeSet;
use bcached_env::Time;

/// The leaves, by slot.
#[derive(Default)]
pub struct DirtyLeaves {
    /// By the arrival of the oldest unwritten key.
    by_age: BTreeSet<(Time, usize)>,
    /// By the journal entry of the oldest unwritten journalled key.
    by_entry: BTreeSet<(u64, usize)>,
    /// Leaves with many unwritten keys.
    large: BTreeSet<usize>,
}

impl DirtyLeaves {
    /// Moves the leaf in `slot` from age `before` to `now`: the arrival of its oldest unwritten
    /// key, or `None` if it has none.
    pub fn ages(&mut self, slot: usize, before: Option<Time>, now: Option<Time>) {
        exchange(&mut self.by_age, slot, before, now);
    }

    /// Moves the leaf in `slot` from journal entry `before` to `now`: the entry of its oldest
    /// unwritten key, or `None` if it has none.
    pub fn waits(&mut self, slot: usize, before: Option<u64>, now: Option<u64>) {
        exchange(&mut self.by_entry, slot, before, now);
    }

    /// Records whether the leaf in `slot` has many unwritten keys.
    pub fn weighs(&mut self, slot: usize, is_large: bool) {
        if is_large {
            self.large.insert(slot);
        } else {
            self.large.remove(&slot);
        }
    }

    /// Iterates over all leaves, the oldest first, with the arrival of their oldest key.
    pub fn by_age(&self) -> impl Iterator<Item = (Time, usize)> + '_ {
        self.by_age.iter().copied()
    }

    /// Iterates over the leaves that are due: those that hold back journal entries up to `entry`,
    /// those whose oldest key `is_old`, and those with many keys.
    pub fn due(&self, entry: u64, is_old: impl Fn(Time) -> bool) -> impl Iterator<Item = usize> {
        let needed = self.by_entry.range(..=(entry, usize::MAX)).map(|(_, slot)| *slot);
        let aged = self.by_age().take_while(move |(since, _)| is_old(*since)).map(|(_, slot)| slot);
        needed.chain(aged).chain(self.large.iter().copied())
    }

    /// Asserts that the leaf in `slot` is indexed correctly.
    pub fn check(&self, slot: usize, (age, entry): (Option<Time>, Option<u64>), is_large: bool) {
        assert!(age.is_none_or(|age| self.by_age.contains(&(age, slot))), "slot {slot} is not found by age");
        assert!(
            entry.is_none_or(|entry| self.by_entry.contains(&(entry, slot))),
            "slot {slot} is not found by its journal entry"
        );
        assert_eq!(self.large.contains(&slot), is_large, "whether slot {slot} has much to write");
    }

    /// Returns how many leaves are indexed by age and by journal entry.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.by_age.len(), self.by_entry.len())
    }
}

fn exchange<T: Ord>(set: &mut BTreeSet<(T, usize)>, slot: usize, before: Option<T>, now: Option<T>) {
    if before == now {
        return;
    }
    if let Some(before) = before {
        set.remove(&(before, slot));
    }
    if let Some(now) = now {
        set.insert((now, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn what_is_due_is_found_without_the_rest() {
        let mut unwritten = DirtyLeaves::default();
        for slot in 0..100 {
            unwritten.ages(slot, None, Some(Time(1000 + slot as u64)));
            unwritten.waits(slot, None, Some(200 - slot as u64));
        }
        unwritten.weighs(50, true);
        let due = |unwritten: &DirtyLeaves, entry, age| {
            unwritten.due(entry, |since| since <= Time(age)).collect::<Vec<_>>()
        };
        assert_eq!(due(&unwritten, 0, 0), [50]);
        assert_eq!(due(&unwritten, 102, 1001), [99, 98, 0, 1, 50], "the oldest first, by each reason");
        unwritten.waits(99, Some(101), Some(150));
        unwritten.ages(0, Some(Time(1000)), None);
        unwritten.weighs(50, false);
        assert_eq!(due(&unwritten, 102, 1001), [98, 1]);
        assert_eq!(unwritten.counts(), (99, 100));
    }
}
