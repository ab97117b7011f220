//! Simulates how a kernel finds the journal's entries: it does not read all buckets, but relies on
//! their circular use.
//!
//! The search is followed step by step over the known content of each bucket. If it finds other
//! entries than reading everything does, a kernel would start from an older state, or not at all.

use crate::journal::JournalEntry;
use std::collections::BTreeMap;

/// Multiplier that spreads the first probes over the buckets.
const PROBE_STEP: u64 = 2_654_435_769;

struct JournalSearch<'a> {
    buckets: &'a [Vec<JournalEntry>],
    read: Vec<bool>,
    /// What the kernel would keep: the entries that the newest known one still needs.
    kept: BTreeMap<u64, JournalEntry>,
    last_seq: u64,
}

/// Returns the sequence number of the newest entry that a kernel's search finds, if it also finds
/// all entries that this one needs.
pub(crate) fn newest_by_search(buckets: &[Vec<JournalEntry>]) -> Option<u64> {
    let mut search =
        JournalSearch { buckets, read: vec![false; buckets.len()], kept: BTreeMap::new(), last_seq: 0 };
    let first = search.probe()?;
    let last = search.bisect(first);
    search.walk_down(last);
    let (seq, newest) = search.kept.last_key_value()?;
    let complete = (newest.last_seq..=*seq).all(|needed| search.kept.contains_key(&needed));
    complete.then_some(*seq)
}

impl JournalSearch<'_> {
    /// Reads a bucket. Returns whether it held an entry that is needed and was not known yet.
    fn read(&mut self, index: usize) -> bool {
        self.read[index] = true;
        let mut added = false;
        for entry in &self.buckets[index] {
            if entry.seq < self.last_seq || self.kept.contains_key(&entry.seq) {
                continue;
            }
            self.last_seq = self.last_seq.max(entry.last_seq);
            self.kept.insert(entry.seq, *entry);
            self.kept = self.kept.split_off(&self.last_seq);
            added = true;
        }
        added
    }

    fn newest(&self) -> Option<u64> {
        self.kept.last_key_value().map(|(seq, _)| *seq)
    }

    /// Finds any bucket with entries: first by quick probes, then by reading all buckets in order.
    fn probe(&mut self) -> Option<usize> {
        let count = self.buckets.len();
        for step in 0..count as u64 {
            let hash = step.wrapping_mul(PROBE_STEP) & u64::from(u32::MAX);
            let index = usize::try_from(hash).expect("32 bits") % count;
            if self.read[index] {
                break;
            }
            if self.read(index) {
                return Some(index);
            }
        }
        (0..count).find(|index| !self.read[*index] && self.read(*index))
    }

    /// Bisects for the newest entry. Returns the last bucket read in doing so.
    fn bisect(&mut self, first: usize) -> usize {
        let mut low = first;
        let mut high = (first + 1..self.buckets.len()).find(|index| self.read[*index]);
        let mut last = first;
        while low + 1 < high.unwrap_or(self.buckets.len()) {
            last = usize::midpoint(low, high.unwrap_or(self.buckets.len()));
            let before = self.newest();
            self.read(last);
            if self.newest() > before {
                low = last;
            } else {
                high = Some(last);
            }
        }
        last
    }

    /// Reads downwards, wrapping around, until a bucket adds nothing.
    fn walk_down(&mut self, last: usize) {
        let count = self.buckets.len();
        for step in 1..count {
            let index = (last + count - step) % count;
            if !self.read[index] && !self.read(index) {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(seq: u64, last_seq: u64) -> JournalEntry {
        JournalEntry { seq, last_seq, sector: 0, bytes: 240 }
    }

    #[test]
    fn a_circle_is_followed_wherever_it_has_got_to() {
        let count = 16_u64;
        // Each bucket has two entries, and the newest entry needs the six before it. The circle has
        // advanced by `turns` buckets.
        for turns in 1..60_u64 {
            let mut buckets = vec![Vec::new(); 16];
            // The first entry of a new journal goes to index 1.
            for turn in 0..turns {
                let seqs = [2 * turn + 1, 2 * turn + 2];
                let index = usize::try_from((turn + 1) % count).expect("small");
                buckets[index] = seqs.iter().map(|seq| entry(*seq, seq.saturating_sub(6).max(1))).collect();
            }
            assert_eq!(newest_by_search(&buckets), Some(2 * turns), "after {turns} buckets");
        }
    }

    #[test]
    fn a_newer_entry_out_of_the_circle_is_not_found() {
        let mut buckets = vec![Vec::new(); 16];
        for (bucket, seq) in buckets.iter_mut().zip(1..9) {
            *bucket = vec![entry(seq, seq)];
        }
        assert_eq!(newest_by_search(&buckets), Some(8));
        buckets[15] = vec![entry(9, 9)];
        assert_eq!(newest_by_search(&buckets), Some(8), "bisection never looks there");
    }

    #[test]
    fn an_empty_journal_has_none() {
        assert_eq!(newest_by_search(&[]), None);
        assert_eq!(newest_by_search(&[Vec::new(), Vec::new()]), None);
    }
}
