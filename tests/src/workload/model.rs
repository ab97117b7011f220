//! The expected content of a volume, sector by sector.
//!
//! After flushed writes, or a clean stop, a sector has one value. After a crash, a sector may hold
//! its last flushed value or that of any later write to it, flushed or not. Reading the content
//! settles which, and from then on it must not change again.

use std::collections::BTreeMap;
use std::io::{self, Read};

use super::pattern::{SECTOR_BYTES, Seen, identify};
use super::{Step, Workload};

/// The content of one volume: for each sector, the sequence number of the write it holds, or 0 if
/// it was never written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    volume: u64,
    certain: Vec<u64>,
    /// Unflushed writes that a crash may have kept, by sector.
    possible: BTreeMap<u64, Vec<u64>>,
    /// Discards that a crash may have left half done, by sector: anything from before the write
    /// with this number may have come back. A discard declares the data unneeded, so the cache may
    /// have dropped it while the backing device has not.
    discarded: BTreeMap<u64, u64>,
    /// What the backing device holds under a clean copy that differs from it, by sector: a value
    /// that replaces the copy's once the copy is evicted ([`Model::allow_below`]).
    below: BTreeMap<u64, u64>,
    next_sequence: u64,
}

/// How a workload ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It ran to its end, including the last flush.
    Finished,
    /// The machine died; the flush with this number was the last one acknowledged (0: none).
    CrashedAfterFlush(u64),
    /// The process died, but the machine did not: this many writes were acknowledged, and all of
    /// them must be there; the next may have been in flight.
    KilledAfterWrites(u64),
}

/// Content that differs from the model.
#[derive(Debug, thiserror::Error)]
pub enum Mismatch {
    /// Reading the content failed, or it ended early.
    #[error("read the content at sector {sector}")]
    Read {
        /// The sector that could not be read.
        sector: u64,
        /// The cause.
        source: io::Error,
    },
    /// Sectors with wrong content.
    #[error(
        "{count} sectors differ; the first is {sector}: {found:?}, wanted one of the writes {wanted:?} (0 is blank)"
    )]
    Sectors {
        /// Number of sectors that differ.
        count: u64,
        /// The first of them.
        sector: u64,
        /// What it holds.
        found: Seen,
        /// The sequence numbers it may hold.
        wanted: Vec<u64>,
    },
}

impl Model {
    /// Creates the model of a volume that has never been written, `sectors` sectors long. Its data
    /// must read as zeroes.
    ///
    /// # Panics
    /// If the volume does not fit in memory.
    #[must_use]
    pub fn blank(volume: u64, sectors: u64) -> Self {
        let sectors = usize::try_from(sectors).expect("test volumes fit in memory");
        Self {
            volume,
            certain: vec![0; sectors],
            possible: BTreeMap::new(),
            discarded: BTreeMap::new(),
            below: BTreeMap::new(),
            next_sequence: 1,
        }
    }

    /// Returns the length of the volume, in sectors.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.certain.len() as u64
    }

    /// Returns the first sequence number for the next workload on this volume.
    #[must_use]
    pub const fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Returns the volume number in the stamps of the volume's sectors.
    #[must_use]
    pub const fn volume(&self) -> u64 {
        self.volume
    }

    /// Returns how many sectors a crash has left undecided.
    #[must_use]
    pub fn undecided(&self) -> usize {
        self.possible.len()
    }

    /// Returns the number of sectors that hold written data.
    #[must_use]
    pub fn written_sectors(&self) -> usize {
        self.certain.iter().filter(|sequence| **sequence != 0).count()
    }

    /// Records that a crash left a clean copy of a sector in the cache while the backing device
    /// holds `seen` under it. Returns whether the crash may have left that. If so, the sector may
    /// change to that value at some moment without a write.
    pub fn allow_below(&mut self, sector: u64, seen: Seen) -> bool {
        let below = self.sequence_of(sector, seen).filter(|sequence| self.allows(sector, *sequence));
        self.below.extend(below.map(|sequence| (sector, sequence)));
        below.is_some()
    }

    /// Returns the sequence number of the write that a sector holds, if it holds one of its own.
    fn sequence_of(&self, sector: u64, seen: Seen) -> Option<u64> {
        match seen {
            Seen::Blank => Some(0),
            Seen::Written(stamp) if stamp.sector == sector && stamp.volume == self.volume => {
                Some(stamp.sequence)
            }
            Seen::Written(_) | Seen::Junk(_) => None,
        }
    }

    fn allows(&self, sector: u64, sequence: u64) -> bool {
        let possible = self.possible.get(&sector);
        sequence == self.certain[index(sector)]
            || possible.is_some_and(|possible| possible.contains(&sequence))
            || self.below.get(&sector) == Some(&sequence)
            || self.discarded.get(&sector).is_some_and(|discard| sequence < *discard)
    }

    /// Changes the length of the volume to `sectors` sectors. What lay beyond the end is
    /// permanently gone; what is new reads as zeroes.
    ///
    /// # Panics
    /// If the volume does not fit in memory, or a crash has left something undecided: check the
    /// content first.
    pub fn resize(&mut self, sectors: u64) {
        assert!(self.possible.is_empty(), "something is undecided");
        self.certain.resize(index(sectors), 0);
        self.below.retain(|sector, _| *sector < sectors);
    }

    /// Records what a workload wrote.
    ///
    /// # Panics
    /// If the workload is not for this volume, lies outside it, or repeats sequence numbers: a
    /// fault of the test.
    pub fn apply(&mut self, workload: &Workload, fate: Fate) {
        assert_eq!(workload.volume, self.volume);
        assert!(workload.first_sequence >= self.next_sequence);
        let flushed = match fate {
            Fate::Finished => u64::MAX,
            Fate::CrashedAfterFlush(number) => number,
            Fate::KilledAfterWrites(answered) => return self.apply_killed(workload, answered),
        };
        let mut flushes = 0;
        let mut open: Vec<Step> = Vec::new();
        for step in workload.steps() {
            match step {
                Step::Write { .. } | Step::Discard { .. } => open.push(step),
                Step::Read { .. } => {}
                Step::Flush { number } if number <= flushed => {
                    flushes = number;
                    for write in open.drain(..) {
                        self.for_each_sector(write, Self::becomes);
                    }
                }
                Step::Flush { .. } => {}
            }
        }
        assert!(fate == Fate::Finished || flushes == flushed, "only {flushes} flushes in the workload");
        for write in open {
            self.may_be(write);
        }
        self.next_sequence = workload.next_sequence();
    }

    /// Records a killed workload: the first `answered` writes are certain, the next is possible,
    /// and the others were never sent.
    fn apply_killed(&mut self, workload: &Workload, answered: u64) {
        let changes = |step: &Step| matches!(step, Step::Write { .. } | Step::Discard { .. });
        let writes = workload.steps().filter(changes);
        for (number, write) in (0..=answered).zip(writes) {
            if number < answered {
                self.for_each_sector(write, Self::becomes);
            } else {
                self.may_be(write);
            }
        }
        self.next_sequence = workload.next_sequence();
    }

    /// Records a write that a crash may or may not have left.
    fn may_be(&mut self, write: Step) {
        self.for_each_sector(write, |model, sector, sequence| {
            model.possible.entry(sector).or_default().push(sequence);
            if let Step::Discard { sequence, .. } = write {
                model.discarded.insert(sector, sequence);
            }
        });
    }

    /// Records a write that was acknowledged and flushed: no other value is permitted any more.
    fn becomes(&mut self, sector: u64, sequence: u64) {
        self.certain[index(sector)] = sequence;
        self.possible.remove(&sector);
        self.discarded.remove(&sector);
        self.below.remove(&sector);
    }

    fn for_each_sector(&mut self, write: Step, mut visit: impl FnMut(&mut Self, u64, u64)) {
        let (sector, sectors, sequence) = match write {
            Step::Write { sector, sectors, sequence } => (sector, sectors, sequence),
            Step::Discard { sector, sectors, .. } => (sector, sectors, 0),
            Step::Read { .. } | Step::Flush { .. } => return,
        };
        for sector in sector..sector + sectors {
            visit(self, sector, sequence);
        }
    }

    /// Compares the whole content with the model. What a crash left undecided is settled as found.
    ///
    /// # Errors
    /// [`Mismatch`]; the model is then unchanged.
    pub fn check(&mut self, mut content: impl Read) -> Result<(), Mismatch> {
        let mut bytes = [0; SECTOR_BYTES];
        let mut settled = Vec::new();
        let mut first_wrong = None;
        let mut wrong = 0;
        for sector in 0..self.sectors() {
            content.read_exact(&mut bytes).map_err(|source| Mismatch::Read { sector, source })?;
            let seen = identify(&bytes);
            match self.sequence_of(sector, seen).filter(|sequence| self.allows(sector, *sequence)) {
                Some(sequence) => settled.push((sector, sequence)),
                None => {
                    wrong += 1;
                    first_wrong.get_or_insert((sector, seen));
                }
            }
        }
        if let Some((sector, found)) = first_wrong {
            let others = self.possible.get(&sector).into_iter().flatten().chain(self.below.get(&sector));
            let wanted = std::iter::once(&self.certain[index(sector)]).chain(others).copied().collect();
            return Err(Mismatch::Sectors { count: wrong, sector, found, wanted });
        }
        for (sector, sequence) in settled {
            self.certain[index(sector)] = sequence;
        }
        self.possible.clear();
        self.discarded.clear();
        // Where the copy was read, it is still cached. Where it was not, it has been evicted, and
        // the value under it stays.
        self.below.retain(|sector, sequence| self.certain[index(*sector)] != *sequence);
        Ok(())
    }
}

/// Converts a sector to an index. The vector it indexes was made from such a number.
fn index(sector: u64) -> usize {
    usize::try_from(sector).expect("inside the model")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Stamp;

    const WORKLOAD: Workload = Workload {
        seed: 1,
        volume: 9,
        first_sequence: 1,
        first_sector: 0,
        sectors: 8,
        block_sectors: 8,
        write_sectors_max: 8,
        writes: 3,
        flush_every: 1,
        flushes_max: 0,
        read_every: 0,
        discard_every: 0,
    };

    /// Returns eight sectors, all of one write (0: blank).
    fn content(sequence: u64) -> Vec<u8> {
        let mut bytes = vec![0; 8 * SECTOR_BYTES];
        if sequence != 0 {
            for (sector, bytes) in (0..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
                Stamp { sector, sequence, volume: 9 }.fill(bytes);
            }
        }
        bytes
    }

    #[test]
    fn after_a_clean_end_only_the_last_write_will_do() {
        let mut model = Model::blank(9, 8);
        assert!(model.check(&content(0)[..]).is_ok());
        model.apply(&WORKLOAD, Fate::Finished);
        assert!(model.check(&content(3)[..]).is_ok());
        let wrong = model.check(&content(2)[..]);
        assert!(matches!(wrong, Err(Mismatch::Sectors { count: 8, sector: 0, .. })), "{wrong:?}");
        assert!(matches!(model.check(&content(3)[..600]), Err(Mismatch::Read { sector: 1, .. })));
    }

    #[test]
    fn after_a_kill_every_answered_write_will_do_and_the_next_but_no_other() {
        for (answered, right, wrong) in [(0, [0, 1], 2), (1, [1, 2], 3), (2, [2, 3], 1)] {
            let mut killed = Model::blank(9, 8);
            killed.apply(&WORKLOAD, Fate::KilledAfterWrites(answered));
            for sequence in right {
                assert!(killed.clone().check(&content(sequence)[..]).is_ok(), "{answered}: {sequence}");
            }
            assert!(killed.check(&content(wrong)[..]).is_err(), "{answered}: {wrong}");
        }
    }

    #[test]
    fn a_discard_brings_zeroes_and_until_it_is_done_anything_former() {
        // Write 1, a discard, write 3; or two writes and a discard.
        for (every, fate, right, wrong) in [
            (2, Fate::KilledAfterWrites(1), vec![0, 1], vec![2, 3]),
            (2, Fate::KilledAfterWrites(2), vec![0, 3], vec![1, 2]),
            (2, Fate::CrashedAfterFlush(1), vec![0, 1, 3], vec![2]),
            (2, Fate::CrashedAfterFlush(2), vec![0, 3], vec![1, 2]),
            (3, Fate::KilledAfterWrites(2), vec![0, 1, 2], vec![3]),
            (3, Fate::KilledAfterWrites(3), vec![0], vec![1, 2, 3]),
            (3, Fate::CrashedAfterFlush(2), vec![0, 1, 2], vec![3]),
            (3, Fate::Finished, vec![0], vec![1, 2, 3]),
        ] {
            let mut model = Model::blank(9, 8);
            model.apply(&Workload { discard_every: every, ..WORKLOAD }, fate);
            for sequence in right {
                assert!(model.clone().check(&content(sequence)[..]).is_ok(), "{fate:?}: {sequence}");
            }
            for sequence in wrong {
                assert!(model.clone().check(&content(sequence)[..]).is_err(), "{fate:?}: {sequence}");
            }
        }
    }

    #[test]
    fn what_is_cut_off_does_not_come_back() {
        let mut model = Model::blank(9, 8);
        model.apply(&WORKLOAD, Fate::Finished);
        model.resize(4);
        assert!(model.check(&content(3)[..4 * SECTOR_BYTES]).is_ok());
        model.resize(8);
        assert!(model.check(&content(3)[..]).is_err());
        let mut zeroes_behind = content(3);
        zeroes_behind[4 * SECTOR_BYTES..].fill(0);
        assert!(model.check(&zeroes_behind[..]).is_ok());
    }

    #[test]
    fn after_a_crash_the_flushed_write_and_later_ones_will_do_and_a_look_settles_it() {
        // Writes 1, 2, 3 to the same eight sectors, each followed by a flush; only the first flush
        // was seen to be acknowledged.
        let mut crashed = Model::blank(9, 8);
        crashed.apply(&WORKLOAD, Fate::CrashedAfterFlush(1));
        assert_eq!(crashed.undecided(), 8);
        for allowed in 1..=3 {
            assert!(crashed.clone().check(&content(allowed)[..]).is_ok(), "{allowed}");
        }
        assert!(crashed.clone().check(&content(0)[..]).is_err());

        crashed.check(&content(2)[..]).expect("allowed above");
        assert!(crashed.check(&content(3)[..]).is_err(), "a sector changed without a write");
        assert!(crashed.check(&content(2)[..]).is_ok());
    }
    #[test]
    fn what_a_crash_left_below_a_clean_copy_may_come_up_once_and_then_stays() {
        let mut crashed = Model::blank(9, 8);
        crashed.apply(&WORKLOAD, Fate::CrashedAfterFlush(1));
        for sector in 0..8 {
            assert!(!crashed.allow_below(sector, Seen::Blank), "flushed data cannot be gone");
            assert!(crashed.allow_below(sector, Seen::Written(Stamp { sector, sequence: 3, volume: 9 })));
        }
        for _ in 0..2 {
            crashed.check(&content(2)[..]).expect("the copy");
        }
        assert!(crashed.clone().check(&content(1)[..]).is_err(), "neither the copy nor what is below it");
        crashed.check(&content(3)[..]).expect("the copy was evicted");
        assert!(crashed.check(&content(2)[..]).is_err(), "it does not come back");
    }
}
