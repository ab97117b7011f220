//! Groups of steps that belong together: they make two or three conditions coincide, which steps
//! drawn one by one hardly ever do.

mod failing;

use super::generate::StepGenerator;
use super::shape::FaultTargets;
use super::{Restart, Step};
use crate::disk::{DiskFault, FaultRule, OpKind};
use crate::system::Mode;
use std::ops::Range;

/// Longest delay of operations here, as a power of two in nanoseconds: half a second.
const LATE_BITS: u64 = 29;

impl StepGenerator<'_> {
    /// Draws several steps that belong together, and returns the first.
    pub(super) fn coincidence(&mut self) -> Step {
        let is_troubled = self.shape.weights.trouble > 0;
        if !is_troubled && self.shape.weights.restart > 0 && self.rng.one_in(12) {
            self.brought_back();
            return self.next.pop_front().expect("several steps");
        }
        match self.rng.below(if is_troubled { 18 } else { 5 }) {
            0 => self.promised(),
            1 => self.queued(),
            2 => self.pieces(),
            3 => self.discarded_while_written_back(),
            4 => self.grown_together(),
            5 | 6 => self.flush_in_the_journal(),
            7 | 8 => self.written_out(),
            9 | 10 => self.read_across_a_failed_flush(),
            11 | 12 => self.unreadable_copy(),
            13 | 14 => self.pulled(),
            _ => self.flushes_that_fail(),
        };
        self.next.pop_front().expect("several steps")
    }

    /// A promise about a range whose older content is durable, immediately followed by a power cut
    /// that leaves nothing else. The promise is a durable request of any kind, or any change and a
    /// flush, over what was just written and beyond it.
    fn promised(&mut self) {
        let (volume, before) = self.place();
        // The end of a volume may lie within a block.
        let span = self.span(volume);
        let before =
            if self.rng.one_in(5) { self.fitted(volume, span.saturating_sub(16)..span) } else { before };
        let (left, right) = (self.beside(volume, &before), self.beside(volume, &before));
        self.next.extend([
            Step::Write { volume, sectors: left.clone(), fua: false },
            Step::Write { volume, sectors: right.clone(), fua: false },
            Step::Settle,
        ]);
        if !self.rng.one_in(4) {
            self.next.extend([Step::Flush { volume }, Step::Settle]);
        }
        let is_lodger = volume as usize >= self.shape.volumes;
        if self.rng.one_in(3) && self.shape.weights.clean > 0 && !is_lodger {
            self.next.extend([Step::Clean { volume }, Step::Settle]);
        }
        if self.rng.one_in(4) {
            self.next.extend([Step::Read { volume, sectors: before }, Step::Settle]);
        }
        for _ in 0..=self.rng.below(2) {
            let sectors = self.astride(volume, &left, &right);
            if self.rng.one_in(2) {
                let durable = self.durable(volume, sectors);
                self.next.push_back(durable);
            } else {
                let change = self.change(volume, sectors);
                self.next.extend([change, Step::Settle, Step::Flush { volume }]);
            }
            self.next.push_back(Step::Settle);
        }
        self.cut_off();
    }

    /// A device operation is slow. A request that waits for it, and longer requests over the same
    /// sectors behind that one, are in flight while the volume is attached or detached, or
    /// otherwise changed. Then the sectors that only the longer requests cover are read.
    fn queued(&mut self) {
        let (volume, first) = self.place();
        let is_lodger = volume as usize >= self.shape.volumes;
        let span = self.span(volume);
        let long = self.widened(volume, &first);
        self.next.extend([Step::Write { volume, sectors: long.clone(), fua: false }, Step::Settle]);
        let comes = !is_lodger && self.shape.weights.attach > 0 && self.rng.one_in(2);
        if comes {
            self.next.extend([Step::Detach { volume }, Step::Settle]);
        }
        let sectors = (8 * (1 + first.start / 8)).min(span);
        if !comes && self.shape.weights.shrink > 0 && self.shape.weights.grow > 0 && self.rng.one_in(4) {
            // The sectors of the next requests are cut off until the volume grows again.
            self.next.extend([Step::Shrink { volume, sectors }, Step::Settle]);
        }
        if self.rng.one_in(3) {
            self.next.extend([Step::Read { volume, sectors: long.clone() }, Step::Settle]);
        }
        let device = if is_lodger || self.rng.one_in(4) { 0 } else { 1 + volume as usize };
        let on = if self.rng.one_in(4) { OpKind::Read } else { OpKind::Write };
        let late = DiskFault::Late(1 << (24 + self.rng.below(LATE_BITS - 23)));
        let count = 1 + u32::try_from(self.rng.below(3)).expect("few");
        let rule = FaultRule::next(on, count, late);
        self.next.push_back(Step::Trouble { device, rule });
        for sectors in [first.clone(), long.clone()] {
            let request = self.request(volume, sectors);
            self.next.push_back(request);
        }
        if self.rng.one_in(3) {
            let sectors = self.beside(volume, &long);
            let request = self.request(volume, sectors);
            self.next.push_back(request);
        }
        if self.rng.one_in(2) {
            self.next.push_back(Step::Pause(1 << self.rng.below(4)));
        }
        let change = if comes { Step::Attach { volume } } else { self.change_of(volume, span) };
        self.next.push_back(change);
        for _ in 0..1 + self.rng.below(4) {
            let sectors = self.beside(volume, &long);
            let pause = Step::Pause(1 << self.rng.below(8));
            self.next.extend([pause, Step::Read { volume, sectors }]);
        }
        self.next.extend([Step::Settle, Step::Read { volume, sectors: long }]);
    }

    /// Data that write-back is about to read from the cache, slowly, is discarded. Meanwhile so
    /// much is written elsewhere that the bucket may be reused.
    fn discarded_while_written_back(&mut self) {
        let (volume, near) = self.place();
        if volume as usize >= self.shape.volumes {
            return self.grown_together();
        }
        let sectors = self.widened(volume, &near);
        self.next.extend([Step::Mode { volume, mode: Mode::Writeback }, Step::Settle]);
        self.next.extend([Step::Write { volume, sectors: sectors.clone(), fua: false }, Step::Settle]);
        let late = DiskFault::Late(1 << (25 + self.rng.below(LATE_BITS - 24)));
        let rule = FaultRule::next(OpKind::Read, 1 << self.rng.below(3), late);
        self.next.extend([Step::Trouble { device: 0, rule }, Step::Clean { volume }]);
        let pause = Step::Pause(1 << self.rng.below(5));
        let pieces = if self.rng.one_in(2) { sectors.clone() } else { self.beside(volume, &sectors) };
        self.next.extend([pause, Step::Discard { volume, sectors: pieces }]);
        let longest = self.shape.longest;
        for _ in 0..self.rng.below(64) {
            let (other, place) = self.place();
            let end = (place.start + longest).min(self.span(other));
            self.next.push_back(Step::Write { volume: other, sectors: place.start..end, fua: false });
            if self.rng.one_in(4) {
                self.next.push_back(Step::Pause(1));
            }
        }
        self.next.extend([Step::Settle, Step::Read { volume, sectors }]);
        self.next.push_back(Step::Mode { volume, mode: self.first_mode(volume) });
    }

    /// Two volumes that live in the cache alone grow at the same time, and are then written from
    /// end to end, and again in small pieces. There may be room for only one of them.
    fn grown_together(&mut self) {
        let first = u32::try_from(self.shape.volumes).expect("few volumes");
        if self.shape.lodgers.len() < 2 || self.shape.weights.grow == 0 {
            return self.promised();
        }
        let both = [first, first + 1];
        for volume in both {
            let sectors = (self.span(volume) / 8).div_ceil(1 + self.rng.below(4)) * 8;
            self.next.extend([Step::Create { volume }, Step::Settle, Step::Shrink { volume, sectors }]);
            self.next.push_back(Step::Settle);
        }
        self.next.extend(both.map(|volume| Step::Grow { volume, sectors: self.span(volume) }));
        self.next.push_back(Step::Settle);
        for volume in both {
            self.filled(volume);
        }
        // Small pieces take the most room.
        for _ in 0..self.rng.below(512) {
            let volume = both[usize::try_from(self.rng.below(2)).expect("two")];
            let start = self.rng.below(self.span(volume) / 8) * 8;
            self.next.push_back(Step::Write { volume, sectors: start..start + 8, fua: false });
        }
        self.next.push_back(Step::Settle);
    }

    /// Requests of many pieces to a slow device, with a flush and a short request beside each. A
    /// failing device may drop what that flush covers. After a power cut, the answers that were
    /// given must still hold.
    fn pieces(&mut self) {
        let (volume, near) = self.place();
        let is_lodger = volume as usize >= self.shape.volumes;
        let device = if is_lodger { 0 } else { 1 + volume as usize };
        let late = DiskFault::Late(1 << (21 + self.rng.below(5)));
        let count = 4 << self.rng.below(3);
        let rule = FaultRule::next(OpKind::Write, count, late);
        self.next.push_back(Step::Trouble { device, rule });
        let long = self.widened(volume, &near);
        let request = self.change(volume, long.clone());
        self.next.push_back(request);
        if self.rng.one_in(2) {
            self.next.push_back(Step::Pause(1 << self.rng.below(5)));
        }
        if self.shape.weights.trouble > 0 && self.is_failing(device) {
            let rule = self.failing_flush();
            self.next.push_back(Step::Trouble { device, rule });
        }
        let short = self.beside(volume, &long);
        let request = self.request(volume, short);
        self.next.extend([Step::Flush { volume }, request, Step::Settle]);
        if self.rng.one_in(2) {
            self.next.extend([Step::Flush { volume }, Step::Settle]);
        }
        self.cut_off();
        self.next.push_back(Step::Read { volume, sectors: long });
    }

    /// Two orderly stops with a write before each, and an older copy of a device in its place.
    fn brought_back(&mut self) {
        let is_last = self.rng.one_in(2);
        for is_first in [true, false] {
            let (volume, sectors) = self.place();
            self.next.push_back(Step::Write { volume, sectors, fua: self.rng.one_in(4) });
            self.next.push_back(Step::Settle);
            if !is_first && is_last {
                self.next.push_back(Step::Older(self.rng.next()));
            }
            self.next.push_back(Step::Restart(Restart::Stop));
        }
        if !is_last {
            self.next.push_back(Step::Older(self.rng.next()));
            self.cut_off();
        }
    }

    /// Ends the process, in workloads that do so. Mostly the power is cut, and nothing survives
    /// that was not durable.
    fn cut_off(&mut self) {
        if self.shape.weights.restart == 0 {
            return self.next.push_back(Step::Pause(1 << self.rng.below(4)));
        }
        let seed = self.rng.next();
        self.next.push_back(Step::Restart(match self.rng.below(8) {
            0 => Restart::Death(seed),
            1 => Restart::Twice(1 + self.rng.below(48), seed),
            2 => Restart::Power(seed),
            _ => Restart::Power(seed / 4 * 4),
        }));
    }

    /// Returns whether this device is one that fails in this shape.
    const fn is_failing(&self, device: usize) -> bool {
        match self.shape.failing {
            FaultTargets::Anything | FaultTargets::Sets => true,
            FaultTargets::Backing => device > 0,
            FaultTargets::CacheData => device == 0,
        }
    }

    /// Draws a change of a volume that is served, or of how it is served.
    fn change_of(&mut self, volume: u32, span: u64) -> Step {
        let weights = self.shape.weights;
        let is_lodger = volume as usize >= self.shape.volumes;
        let mode = [Mode::Writethrough, Mode::Writeback, Mode::Writearound, Mode::None];
        let mode = mode[usize::try_from(self.rng.below(4)).expect("four")];
        let sectors = 8 * (1 + self.rng.below(span / 8));
        let choices = [
            (!is_lodger && weights.detach > 0, Step::Detach { volume }),
            (!is_lodger && weights.mode > 0, Step::Mode { volume, mode }),
            (!is_lodger && weights.clean > 0, Step::Clean { volume }),
            (weights.readd > 0, Step::Readd { volume }),
            (weights.shrink > 0, Step::Shrink { volume, sectors }),
            (weights.grow > 0, Step::Grow { volume, sectors: span }),
            (!is_lodger && weights.forget > 0, Step::Forget { volume }),
        ];
        let mut choices: Vec<Step> =
            choices.into_iter().filter(|(is_had, _)| *is_had).map(|(_, step)| step).collect();
        if choices.is_empty() {
            return Step::Flush { volume };
        }
        choices.swap_remove(usize::try_from(self.rng.below(choices.len() as u64)).expect("few"))
    }

    /// Draws any request of a client.
    fn request(&mut self, volume: u32, sectors: Range<u64>) -> Step {
        match self.rng.below(4) {
            0 => Step::Read { volume, sectors },
            1 => self.durable(volume, sectors),
            _ => self.change(volume, sectors),
        }
    }

    /// Draws a change that is durable at its completion.
    fn durable(&mut self, volume: u32, sectors: Range<u64>) -> Step {
        match self.rng.below(4) {
            0 => Step::Zero { volume, sectors, fua: true, may_unmap: false },
            1 => Step::Zero { volume, sectors, fua: true, may_unmap: true },
            _ => Step::Write { volume, sectors, fua: true },
        }
    }

    /// Draws a change that is not.
    fn change(&mut self, volume: u32, sectors: Range<u64>) -> Step {
        match self.rng.below(6) {
            0 => Step::Zero { volume, sectors, fua: false, may_unmap: false },
            1 => Step::Zero { volume, sectors, fua: false, may_unmap: true },
            2 => Step::Discard { volume, sectors },
            _ => Step::Write { volume, sectors, fua: false },
        }
    }

    /// Draws a short range that overlaps `near`.
    fn beside(&mut self, volume: u32, near: &Range<u64>) -> Range<u64> {
        let unit = self.unit;
        let length = unit * (1 + self.rng.below((24 / unit).max(2)));
        let first = near.start.saturating_sub(length - unit);
        let start = first + self.rng.below((near.end - first) / unit) * unit;
        self.fitted(volume, start..start + length)
    }

    /// Draws a range from somewhere in one range to somewhere in the other, or a little beyond.
    fn astride(&mut self, volume: u32, one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
        let unit = self.unit;
        let (left, right) = if one.start <= other.start { (one, other) } else { (other, one) };
        let start = left.start + self.rng.below((left.end - left.start) / unit) * unit;
        let end = right.end.max(left.end);
        let end = end + unit * self.rng.below(4);
        let shorter = self.rng.below((end - start) / unit) * unit;
        let end = if self.rng.one_in(2) { end - shorter } else { end };
        self.fitted(volume, start..end)
    }

    /// Draws a range around `near` that is longer than any request that is drawn otherwise.
    fn widened(&mut self, volume: u32, near: &Range<u64>) -> Range<u64> {
        let unit = self.unit;
        let more = self.shape.longest.max(4 * unit) / unit;
        let start = near.start.saturating_sub(self.rng.below(more) * unit);
        let end = near.end + self.rng.below(more) * unit;
        self.fitted(volume, start..end)
    }

    /// Returns the part of a range that the volume has, or its last unit.
    fn fitted(&self, volume: u32, sectors: Range<u64>) -> Range<u64> {
        let end = sectors.end.min(self.span(volume));
        sectors.start.min(end - self.unit)..end
    }
}
