//! Replays the clients' events up to a cut on the simulator's oracle, and judges what was read
//! afterwards.
//!
//! A volume is read twice: first when it comes up, then from the backing device alone, after its
//! cache was detached. Three things can be wrong with a sector, and each sector is counted once, as
//! the worst of them:
//!
//! - *lost*: the first reading is none of the permitted values. Flushed data, or any whole value,
//!   is gone.
//! - *lost behind the cache*: the first reading was permitted, the second is none of the values
//!   permitted at the cut. The flushed data was only in the cache, as a copy that the cache may
//!   drop at any time.
//! - *changed*: both readings were permitted at the cut, but they differ without a write between
//!   them.

use std::collections::BTreeMap;

use bcached_sim::oracle::{OpId, Oracle, Violation};
use bcached_sim::stamp::SectorValue;

use super::witness::{Event, Request};
use crate::workload::SECTOR_BYTES;

/// What clients were promised, along a recording.
#[derive(Debug)]
pub struct Promises<'a> {
    story: &'a [(usize, Event)],
    /// Events before this index have been replayed.
    told: usize,
    oracle: Told,
    under_way: BTreeMap<u64, (OpId, Request)>,
}

/// Wraps the oracle, which does not implement `Debug`.
struct Told(Oracle);

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Oracle({} requests)", self.0.asked())
    }
}

/// An event whose request number differs from the oracle's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("request {0} of the story is out of order")]
pub struct StoryError(pub u64);

impl<'a> Promises<'a> {
    /// Creates the state at the start: a volume of zeroes, and no promise made.
    #[must_use]
    pub fn new(story: &'a [(usize, Event)]) -> Self {
        let oracle = Told(Oracle::new(vec![SectorValue::Zero]));
        Self { story, told: 0, oracle, under_way: BTreeMap::new() }
    }

    /// Replays what had happened when the operations before `position` were done.
    ///
    /// # Errors
    /// [`StoryError`].
    pub fn advance(&mut self, position: usize) -> Result<(), StoryError> {
        while let Some((_, event)) = self.story.get(self.told).filter(|(place, _)| *place < position) {
            self.tell(event)?;
            self.told += 1;
        }
        Ok(())
    }

    fn tell(&mut self, event: &Event) -> Result<(), StoryError> {
        match *event {
            Event::Begin { number, request } => {
                let id = request.begin(&mut self.oracle.0);
                if id.number() != number {
                    return Err(StoryError(number));
                }
                self.under_way.insert(number, (id, request));
            }
            Event::End { number, success } => {
                let (id, request) = self.under_way.remove(&number).ok_or(StoryError(number))?;
                // Reads were judged when they completed; the witness does not record their data.
                match request {
                    Request::Read { .. } => self.oracle.0.abandon(id),
                    Request::Write { .. } | Request::Flush => self.oracle.0.end(id, success),
                }
            }
        }
        Ok(())
    }

    /// Returns an oracle of what may be read if the power is cut now.
    #[must_use]
    pub fn after_power_cut(&self) -> Oracle {
        let mut oracle = self.oracle.0.clone();
        oracle.power_cut();
        oracle
    }
}

/// What is wrong with a volume after a cut: the sectors by kind, as defined in the module's
/// documentation.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Lost when the volume came up.
    pub lost: Vec<Violation>,
    /// Lost behind the cache.
    pub lost_behind: Vec<Violation>,
    /// Changed without a write.
    pub changed: Vec<Violation>,
}

impl Verdict {
    /// Returns true if nothing is wrong.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.lost.is_empty() && self.lost_behind.is_empty() && self.changed.is_empty()
    }
}

/// Judges both readings of a whole volume against what is permitted after the cut.
#[must_use]
pub fn judge(permitted: &Oracle, with_cache: &[u8], alone: &[u8]) -> Verdict {
    let mut verdict = Verdict::default();
    let (mut first, mut second) = (permitted.clone(), permitted.clone());
    let readings = with_cache.chunks_exact(SECTOR_BYTES).zip(alone.chunks_exact(SECTOR_BYTES));
    for (sector, (with_cache, alone)) in (0..).zip(readings) {
        if let Err(violation) = read(&mut first, sector, with_cache) {
            verdict.lost.push(violation);
        } else if let Err(violation) = read(&mut second, sector, alone) {
            verdict.lost_behind.push(violation);
        } else if let Err(violation) = read(&mut first, sector, alone) {
            verdict.changed.push(violation);
        }
    }
    verdict
}

fn read(oracle: &mut Oracle, sector: u64, bytes: &[u8]) -> Result<(), Violation> {
    let id = oracle.begin_read(0, sector..sector + 1);
    oracle.end_read(id, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_sim::stamp;

    const WRITE: Request = Request::Write { sector: 0, sectors: 1, fua: false };

    /// Write 1, flush 2, write 3: all acknowledged, with one event at every second operation.
    fn story() -> Vec<(usize, Event)> {
        let requests = [WRITE, Request::Flush, WRITE];
        let events = (1..).zip(requests).flat_map(|(number, request)| {
            [Event::Begin { number, request }, Event::End { number, success: true }]
        });
        events.enumerate().map(|(place, event)| (2 * place, event)).collect()
    }

    fn volume(number: u64) -> Vec<u8> {
        let mut bytes = vec![0; 2 * SECTOR_BYTES];
        if number != 0 {
            stamp::fill(&mut bytes[..SECTOR_BYTES], 0, 0, number);
        }
        bytes
    }

    /// Returns how many sectors are lost, lost behind the cache, and changed after a cut at
    /// `position`.
    fn verdict(position: usize, with_cache: u64, alone: u64) -> [usize; 3] {
        let story = story();
        let mut promises = Promises::new(&story);
        promises.advance(position).expect("a story in order");
        let Verdict { lost, lost_behind, changed } =
            judge(&promises.after_power_cut(), &volume(with_cache), &volume(alone));
        [lost.len(), lost_behind.len(), changed.len()]
    }

    #[test]
    fn before_the_flush_is_answered_nothing_is_promised() {
        assert_eq!(verdict(6, 0, 0), [0, 0, 0]);
        assert_eq!(verdict(6, 1, 1), [0, 0, 0]);
        assert_eq!(verdict(7, 0, 0), [1, 0, 0]);
        assert_eq!(verdict(7, 1, 1), [0, 0, 0]);
    }

    #[test]
    fn each_wrong_is_told_from_the_others() {
        assert_eq!(verdict(12, 0, 1), [1, 0, 0]);
        assert_eq!(verdict(12, 1, 0), [0, 1, 0]);
        assert_eq!(verdict(12, 1, 3), [0, 0, 1]);
        assert_eq!(verdict(12, 3, 1), [0, 0, 1]);
        assert_eq!(verdict(12, 3, 3), [0, 0, 0]);
    }

    #[test]
    fn a_story_with_other_numbers_is_refused() {
        let story = [(0, Event::Begin { number: 2, request: WRITE })];
        assert_eq!(Promises::new(&story).advance(1), Err(StoryError(2)));
        let story = [(0, Event::End { number: 1, success: true })];
        assert_eq!(Promises::new(&story).advance(1), Err(StoryError(1)));
    }
}
