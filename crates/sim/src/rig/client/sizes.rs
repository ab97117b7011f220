//! Volumes that shrink, grow or lose their disk while other requests are in flight.
//!
//! The oracle is told of a durable write of zeroes in the affected range. That is the content of a
//! device that was truncated and extended again, or of a disk that replaced one which died with
//! newer data in the cache. So it notices any old data that the cache still shows.

use super::{Client, bytes_of};
use crate::failure::FailureKind;
use crate::stamp::SECTOR;
use crate::system::{DeviceLoss, Refusal};
use crate::workload::Step;
use bcached_port::ErrorKind;
use std::ops::Range;

/// What is known of a volume's size in this life.
pub(super) struct KnownSize {
    /// No client submits requests beyond this sector.
    limit: u64,
    /// The lowest value that the limit has had: requests beyond it may be refused.
    least: u64,
    /// A change of the size is in progress.
    is_changing: bool,
}

impl KnownSize {
    pub(super) const fn of(sectors: u64) -> Self {
        Self { limit: sectors, least: sectors, is_changing: false }
    }
}

/// Returns the volume of a step that is about a whole volume.
const fn of_volume(step: &Step) -> Option<u32> {
    match step {
        Step::Flush { volume } | Step::Readd { volume } | Step::Turn { volume, .. } => Some(*volume),
        _ => None,
    }
}

/// Returns the volume and sectors that a step is about.
const fn asked(step: &Step) -> Option<(u32, &Range<u64>)> {
    match step {
        Step::Write { volume, sectors, .. }
        | Step::Zero { volume, sectors, .. }
        | Step::Read { volume, sectors }
        | Step::Discard { volume, sectors } => Some((*volume, sectors)),
        _ => None,
    }
}

impl Client {
    /// Returns the current end of a volume.
    pub(super) fn limit(&self, volume: u32) -> u64 {
        self.shared.sizes.borrow()[volume as usize].limit
    }

    /// Returns whether the volume currently has all that a step is about.
    pub(super) fn is_within(&self, step: &Step) -> bool {
        let is_there = of_volume(step).is_none_or(|volume| self.limit(volume) > 0);
        is_there && asked(step).is_none_or(|(volume, sectors)| sectors.end <= self.limit(volume))
    }

    /// Returns whether a step may be refused because the volume was too small for it at some time.
    pub(super) fn may_be_outside(&self, step: &Step, refusal: &Refusal) -> bool {
        let least = |volume: u32| self.shared.sizes.borrow()[volume as usize].least;
        let is_behind = asked(step).is_some_and(|(volume, sectors)| sectors.end > least(volume));
        // In a deleted volume, any refusal is allowed.
        let of = asked(step).map(|(volume, _)| volume).or(of_volume(step));
        let is_no_more = of.is_some_and(|volume| self.is_lodger(volume) && least(volume) == 0);
        is_no_more || is_behind && *refusal == Refusal::from_error(ErrorKind::Invalid)
    }

    /// Begins a change of the volume; returns false if another one is in progress.
    pub(super) fn begin_change(&self, volume: u32) -> bool {
        let mut sizes = self.shared.sizes.borrow_mut();
        !std::mem::replace(&mut sizes[volume as usize].is_changing, true)
    }

    pub(super) fn end_change(&self, volume: u32) {
        self.shared.sizes.borrow_mut()[volume as usize].is_changing = false;
    }

    pub(super) fn use_limit(&self, volume: u32, limit: u64) {
        let size = &mut self.shared.sizes.borrow_mut()[volume as usize];
        (size.limit, size.least) = (limit, size.least.min(limit));
    }

    /// Tells the oracle that these sectors hold zeroes, durably.
    pub(super) fn are_zero(&self, volume: u32, sectors: Range<u64>) {
        if !sectors.is_empty() {
            let mut oracle = self.shared.oracle.borrow_mut();
            let id = oracle.begin_zeroes(volume, sectors, true);
            oracle.end(id, true);
        }
    }

    pub(super) async fn shrink(&self, volume: u32, sectors: u64) -> Result<(), Refusal> {
        if self.is_lodger(volume) {
            return self.shrink_lodger(volume, sectors).await;
        }
        let former = self.limit(volume);
        if sectors >= former || !self.begin_change(volume) {
            return Ok(());
        }
        self.use_limit(volume, sectors);
        let shrunk = self.shared.running.shrink(volume, sectors).await;
        if matches!(shrunk, Ok(true)) {
            self.cut(volume, sectors);
        } else {
            self.use_limit(volume, former);
        }
        self.end_change(volume);
        shrunk.map(drop)
    }

    /// Truncates the device after this many sectors of the volume.
    fn cut(&self, volume: u32, sectors: u64) {
        let mut world = self.shared.world.borrow_mut();
        let device = &mut world.devices[1 + volume as usize];
        let (start, former) = (device.data_start(), device.model.sectors);
        let is_cut = device.resize(start + sectors);
        drop(world);
        if is_cut {
            self.are_zero(volume, sectors..former - start);
        } else {
            self.notice(FailureKind::Form(format!("volume {volume} is written to beyond its new end")));
        }
    }

    pub(super) async fn grow(&self, volume: u32, sectors: u64) -> Result<(), Refusal> {
        if self.is_lodger(volume) {
            return self.grow_lodger(volume, sectors).await;
        }
        if sectors <= self.limit(volume) || !self.begin_change(volume) {
            return Ok(());
        }
        let sectors = {
            let mut world = self.shared.world.borrow_mut();
            let device = &mut world.devices[1 + volume as usize];
            let (start, former) = (device.data_start(), device.model.sectors);
            let _larger = former >= start + sectors || device.resize(start + sectors);
            // It may have grown for an earlier request that failed, and the volume may have all of
            // it by now.
            device.model.sectors - start
        };
        let grown = self.shared.running.grow(volume, sectors).await;
        if matches!(grown, Ok(true)) {
            self.use_limit(volume, sectors);
        }
        self.end_change(volume);
        grown.map(drop)
    }

    pub(super) async fn forget(&self, volume: u32) -> Result<(), Refusal> {
        if !self.begin_change(volume) {
            return Ok(());
        }
        let flush = self.shared.oracle.borrow_mut().begin_flush(volume);
        let lost = self.shared.running.begin_forget(volume).await;
        let forgotten = match lost {
            Ok(Some(lost)) => {
                self.shared.oracle.borrow_mut().end(flush, true);
                self.exchange(volume, &lost);
                self.shared.running.forget(volume, lost).await
            }
            Ok(None) => {
                self.shared.oracle.borrow_mut().abandon(flush);
                Ok(())
            }
            Err(refusal) => {
                self.shared.oracle.borrow_mut().end(flush, false);
                Err(refusal)
            }
        };
        self.end_change(volume);
        forgotten
    }

    /// Replaces a disk, which alone holds everything except what is lost, by another one with
    /// zeroes in the lost ranges.
    fn exchange(&self, volume: u32, lost: &DeviceLoss) {
        let touched = self.shared.oracle.borrow().touched();
        for (_, range) in touched.into_iter().filter(|(of, _)| *of == volume) {
            let range = range.start..range.end.min(self.limit(volume));
            for kept in without(range, &lost.ranges) {
                self.judge_disk(volume, kept);
            }
        }
        for range in &lost.ranges {
            self.are_zero(volume, range.clone());
        }
        let mut world = self.shared.world.borrow_mut();
        let device = &mut world.devices[1 + volume as usize];
        let start = device.data_start();
        for range in &lost.ranges {
            let end = (start + range.end).min(device.model.sectors);
            device.overwrite(start + range.start..end, crate::disk::WriteContent::Zero);
        }
        self.shared.running.exchange(device);
    }

    /// Judges the content of the disk as if the volume had been read.
    fn judge_disk(&self, volume: u32, sectors: Range<u64>) {
        let mut bytes = vec![0; bytes_of(&sectors)];
        {
            let world = self.shared.world.borrow();
            let device = &world.devices[1 + volume as usize];
            device.view().read(device.data_start() + sectors.start, &mut bytes);
        }
        debug_assert!(bytes.len().is_multiple_of(SECTOR));
        let mut oracle = self.shared.oracle.borrow_mut();
        let id = oracle.begin_read(volume, sectors);
        let judged = oracle.end_read(id, &bytes);
        drop(oracle);
        if let Err(violation) = judged {
            self.notice(FailureKind::Read(violation));
        }
    }
}

/// Returns the parts of `range` outside all `holes`, which are in order.
fn without(range: Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut pieces, mut at) = (Vec::new(), range.start);
    for hole in holes.iter().filter(|hole| hole.end > range.start && hole.start < range.end) {
        if at < hole.start {
            pieces.push(at..hole.start);
        }
        at = at.max(hole.end);
    }
    if at < range.end {
        pieces.push(at..range.end);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_range() {
        let left = |range, holes: &[(u64, u64)]| {
            let holes: Vec<Range<u64>> = holes.iter().map(|(start, end)| *start..*end).collect();
            without(range, &holes).into_iter().map(|piece| (piece.start, piece.end)).collect::<Vec<_>>()
        };
        assert_eq!(left(0..10, &[]), [(0, 10)]);
        assert_eq!(left(2..10, &[(0, 3), (5, 6), (9, 20)]), [(3, 5), (6, 9)]);
        assert_eq!(left(2..10, &[(2, 10)]), []);
        assert_eq!(left(2..10, &[(0, 2), (10, 12)]), [(2, 10)]);
    }
}
