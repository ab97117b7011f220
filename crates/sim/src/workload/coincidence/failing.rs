//! Groups of steps that belong together where devices fail.

use super::StepGenerator;
use crate::disk::{DiskFault, FaultRule, OpKind, WrittenPart};
use crate::system::Mode;
use crate::workload::Step;
use crate::workload::shape::FaultTargets;
use std::ops::Range;

impl StepGenerator<'_> {
    /// Flushes of a device fail repeatedly, in different ways. Between them there are changes,
    /// reads and flushes of clients, and the other device is slow, so that a flush is in flight
    /// when the next one fails.
    pub(super) fn flushes_that_fail(&mut self) {
        let (volume, near) = self.place();
        let is_lodger = volume as usize >= self.shape.volumes;
        let of_volume = if is_lodger { 0 } else { 1 + volume as usize };
        let device = if self.is_failing(of_volume) { of_volume } else { 0 };
        if self.rng.one_in(2) {
            self.next.extend([Step::Write { volume, sectors: near.clone(), fua: false }, Step::Settle]);
            self.next.extend([Step::Flush { volume }, Step::Settle]);
        }
        for _ in 0..2 + self.rng.below(2) {
            if !self.rng.one_in(3) {
                let sectors = self.astride(volume, &near, &near);
                let change = self.change(volume, sectors);
                self.next.push_back(change);
                if self.rng.one_in(2) {
                    self.next.push_back(Step::Settle);
                }
            }
            if !self.rng.one_in(4) {
                let fault = match self.rng.below(4) {
                    0 | 1 => DiskFault::Fail(WrittenPart::Nothing),
                    2 => DiskFault::Fail(WrittenPart::Part),
                    _ => DiskFault::Unreachable,
                };
                let rule = FaultRule::next(OpKind::Flush, 1, fault);
                self.next.push_back(Step::Trouble { device, rule });
            }
            if self.rng.one_in(2) {
                let late = DiskFault::Late(1 << (20 + self.rng.below(8)));
                let other = if device == 0 { of_volume } else { 0 };
                let rule = FaultRule::next(OpKind::Write, 2, late);
                self.next.push_back(Step::Trouble { device: other, rule });
            }
            if self.rng.one_in(2) {
                let sectors = self.beside(volume, &near);
                let request = self.request(volume, sectors);
                self.next.extend([request, Step::Pause(1 << self.rng.below(3))]);
            }
            if self.rng.one_in(2) {
                self.next.push_back(Step::Read { volume, sectors: near.clone() });
            }
            self.next.push_back(Step::Flush { volume });
            if !self.rng.one_in(3) {
                self.next.push_back(Step::Settle);
            }
            if self.rng.one_in(3) {
                self.next.push_back(Step::Read { volume, sectors: near.clone() });
            }
        }
        self.next.extend([Step::Settle, Step::Flush { volume }, Step::Settle]);
        self.cut_off();
        self.next.push_back(Step::Read { volume, sectors: near });
    }

    /// The cache refuses a write over dirty and clean data whose bucket it has invalidated before,
    /// since it dropped what was written to it later. The write goes to the backing device, and the
    /// end comes in the middle of that.
    pub(super) fn written_out(&mut self) {
        let (volume, _) = self.place();
        if volume as usize >= self.shape.volumes || !self.is_failing(0) {
            return self.flushes_that_fail();
        }
        let length = self.unit.max(8) * (2 + self.rng.below(4));
        let anywhere = |painter: &mut Self| {
            let start = painter.rng.below(painter.span(volume) / 8) * 8;
            painter.fitted(volume, start..start + length)
        };
        let (copied, other) = (anywhere(self), anywhere(self));
        let half = (copied.start + copied.end) / 2 / 8 * 8;
        let dirty = if half > copied.start { copied.start..half } else { copied.clone() };
        self.next.extend([Step::Read { volume, sectors: copied.clone() }, Step::Settle]);
        let pause = Step::Pause(1 << self.rng.below(7));
        self.next.extend([pause, Step::Flush { volume }, Step::Settle]);
        let dropped = DiskFault::Fail(WrittenPart::Nothing);
        let flush = FaultRule::next(OpKind::Flush, 1, dropped);
        self.next.extend([Step::Read { volume, sectors: other }, Step::Settle]);
        let early = self.rng.one_in(2);
        let write = Step::Write { volume, sectors: dirty, fua: self.rng.one_in(2) };
        if early {
            self.next.extend([write.clone(), Step::Settle]);
        }
        self.next.extend([Step::Trouble { device: 0, rule: flush }, Step::Flush { volume }, Step::Settle]);
        if !early {
            self.next.extend([write, Step::Settle]);
        }
        if matches!(self.shape.failing, FaultTargets::CacheData) {
            // There are few buckets: reads of uncached data take them from what was copied.
            for _ in 0..self.rng.below(32) {
                let start = self.rng.below(self.span(volume) / 8) * 8;
                let sectors = self.fitted(volume, start..start + self.shape.longest);
                self.next.push_back(Step::Read { volume, sectors });
            }
        }
        let landed =
            [WrittenPart::Nothing, WrittenPart::Part][usize::try_from(self.rng.below(2)).expect("two")];
        let (count, sectors) = (1 << self.rng.below(3), self.cache_sectors / 64..u64::MAX);
        let refused =
            FaultRule { on: OpKind::Write, sectors, skip: 0, count, fault: DiskFault::Fail(landed) };
        self.next.push_back(Step::Trouble { device: 0, rule: refused });
        self.next.push_back(Step::Write { volume, sectors: copied.clone(), fua: self.rng.one_in(4) });
        if self.rng.one_in(2) {
            self.next.push_back(Step::Pause(1 << self.rng.below(4)));
        } else {
            self.next.push_back(Step::Settle);
        }
        self.cut_off();
        self.next.push_back(Step::Read { volume, sectors: copied });
    }

    /// Data that was written past the cache is read, and a flush that fails drops it before that
    /// read has ended. The read may return content older than at its start, or newer than what is
    /// there now, and no copy of it may stay in the cache. A later successful flush proves nothing
    /// about it.
    pub(super) fn read_across_a_failed_flush(&mut self) {
        let (volume, near) = self.place();
        let device = 1 + volume as usize;
        if volume as usize >= self.shape.volumes || !self.is_failing(device) {
            return self.flushes_that_fail();
        }
        let read = || Step::Read { volume, sectors: near.clone() };
        let late = FaultRule::next(OpKind::Read, 1, DiskFault::Late(1 << (20 + self.rng.below(8))));
        let fails = FaultRule::next(OpKind::Flush, 1, DiskFault::Fail(WrittenPart::Nothing));
        self.next.extend([Step::Mode { volume, mode: Mode::Writearound }, Step::Settle]);
        self.next.extend([Step::Write { volume, sectors: near.clone(), fua: false }, Step::Settle]);
        self.next.extend([Step::Trouble { device, rule: late }, read()]);
        self.next.extend([Step::Trouble { device, rule: fails }, Step::Flush { volume }, Step::Settle]);
        self.next.extend([Step::Flush { volume }, Step::Settle]);
        self.next.extend([Step::Pause(1 << self.rng.below(8)), read(), Step::Settle]);
        self.cut_off();
        self.next.push_back(read());
        self.next.push_back(Step::Mode { volume, mode: self.first_mode(volume) });
    }

    /// A clean copy cannot be read, and the backing device is slow to return the data instead.
    /// Meanwhile the same sectors become dirty, and are then written past the cache, which refuses
    /// the write.
    pub(super) fn unreadable_copy(&mut self) {
        let (volume, near) = self.place();
        let device = 1 + volume as usize;
        if volume as usize >= self.shape.volumes || !self.is_failing(0) {
            return self.flushes_that_fail();
        }
        let read = || Step::Read { volume, sectors: near.clone() };
        let write = || Step::Write { volume, sectors: near.clone(), fua: false };
        let of_cache = |on, count| {
            let sectors = self.cache_sectors / 64..u64::MAX;
            FaultRule { sectors, ..FaultRule::next(on, count, DiskFault::Fail(WrittenPart::Nothing)) }
        };
        let (unread, refused) = (of_cache(OpKind::Read, 1), of_cache(OpKind::Write, 1 << self.rng.below(2)));
        let slow_read = FaultRule::next(OpKind::Read, 1, DiskFault::Late(1 << (22 + self.rng.below(6))));
        let slow_write = FaultRule::next(OpKind::Write, 1, DiskFault::Late(1 << (23 + self.rng.below(5))));
        self.next.extend([Step::Mode { volume, mode: Mode::Writeback }, Step::Settle, read(), Step::Settle]);
        // The copy is in its leaf, and nothing else is in flight.
        self.next.extend([Step::Pause(64), Step::Flush { volume }, Step::Settle, Step::Pause(8)]);
        self.next
            .extend([Step::Trouble { device: 0, rule: unread }, Step::Trouble { device, rule: slow_read }]);
        self.next.extend([read(), Step::Pause(1 << self.rng.below(3))]);
        self.next.extend([write(), Step::Pause(1 << self.rng.below(4))]);
        self.next
            .extend([Step::Trouble { device: 0, rule: refused }, Step::Trouble { device, rule: slow_write }]);
        self.next.push_back(write());
        for _ in 0..4 {
            self.next.extend([Step::Pause(1 << self.rng.below(5)), read()]);
        }
        self.next.extend([Step::Settle, Step::Mode { volume, mode: self.first_mode(volume) }]);
    }

    /// A backing device is pulled while requests are in flight, and comes back without what it had
    /// not made durable: data that bypassed the cache before, during a flush, or during write-back
    /// to the device.
    pub(super) fn pulled(&mut self) {
        let (volume, near) = self.place();
        let device = 1 + volume as usize;
        if volume as usize >= self.shape.volumes || !self.is_failing(device) {
            return self.flushes_that_fail();
        }
        let modes = [Mode::Writearound, Mode::Writearound, Mode::Writethrough, Mode::Writeback];
        let mode = modes[usize::try_from(self.rng.below(4)).expect("four")];
        self.next.extend([Step::Mode { volume, mode }, Step::Settle]);
        self.before_it_is_pulled(volume, &near);
        let survivors = self.survivors();
        self.next.push_back(Step::Pull { device, survivors });
        for _ in 0..self.rng.below(3) {
            let sectors = self.beside(volume, &near);
            let request = self.request(volume, sectors);
            self.next.extend([request, Step::Pause(1 << self.rng.below(4))]);
        }
        self.next.push_back(Step::Return { device });
        if self.rng.one_in(3) {
            let sectors = self.beside(volume, &near);
            let request = self.request(volume, sectors);
            self.next.push_back(request);
        }
        self.next.push_back(Step::Settle);
        if self.rng.one_in(2) {
            self.next.push_back(Step::Read { volume, sectors: near.clone() });
        }
        self.next.extend([Step::Flush { volume }, Step::Settle]);
        self.next.push_back(Step::Read { volume, sectors: near.clone() });
        if self.rng.one_in(2) {
            self.cut_off();
            self.next.push_back(Step::Read { volume, sectors: near });
        }
        self.next.extend([Step::Settle, Step::Mode { volume, mode: self.first_mode(volume) }]);
    }

    /// Changes that are acknowledged, and others that are not, beside a slow flush or a slow write.
    fn before_it_is_pulled(&mut self, volume: u32, near: &Range<u64>) {
        let device = 1 + volume as usize;
        for _ in 0..1 + self.rng.below(3) {
            let sectors = self.beside(volume, near);
            let change = self.change(volume, sectors);
            self.next.push_back(change);
            if self.rng.one_in(2) {
                self.next.push_back(Step::Settle);
            }
        }
        let slow_one = |on, painter: &mut Self| {
            let late = DiskFault::Late(1 << (22 + painter.rng.below(6)));
            let rule = FaultRule::next(on, 1 + u32::try_from(painter.rng.below(3)).expect("few"), late);
            Step::Trouble { device, rule }
        };
        let around = self.rng.below(4);
        if around > 0 {
            // It is in flight while another change is acknowledged, or when the device is pulled.
            let on = if around == 1 { OpKind::Write } else { OpKind::Flush };
            let slow = slow_one(on, self);
            let asked = if self.rng.one_in(4) { Step::Clean { volume } } else { Step::Flush { volume } };
            self.next.extend([slow, asked, Step::Pause(1 << self.rng.below(3))]);
            let sectors = self.beside(volume, near);
            let change = self.change(volume, sectors);
            self.next.push_back(change);
        }
        self.next.push_back(match self.rng.below(3) {
            0 => Step::Pause(1 << self.rng.below(4)),
            _ => Step::Settle,
        });
    }

    /// A client's flush waits for the journal while another flush of its backing device, which no
    /// client requested, fails. The data that this drops was written before an earlier failure,
    /// which the client has been told of and which had dropped nothing.
    pub(super) fn flush_in_the_journal(&mut self) {
        let (volume, near) = self.place();
        let device = 1 + volume as usize;
        if volume as usize >= self.shape.volumes || !self.is_failing(device) {
            return self.flushes_that_fail();
        }
        let fails = |fault| {
            let rule = FaultRule::next(OpKind::Flush, 1, fault);
            Step::Trouble { device, rule }
        };
        let change = if self.rng.one_in(2) {
            Step::Zero { volume, sectors: near.clone(), fua: false, may_unmap: true }
        } else {
            self.change(volume, near.clone())
        };
        // The range discarded below is in the cache, so that the journal has something to write.
        let other = self.rng.below(self.span(volume) / 8) * 8;
        let other = self.fitted(volume, other..other + 16);
        self.next.extend([Step::Read { volume, sectors: other.clone() }, Step::Settle]);
        self.next.extend([Step::Flush { volume }, Step::Settle, Step::Pause(1 << self.rng.below(8))]);
        self.next.extend([change, Step::Settle]);
        if !self.rng.one_in(4) {
            let told = if self.rng.one_in(3) {
                DiskFault::Fail(WrittenPart::Nothing)
            } else {
                DiskFault::Unreachable
            };
            self.next.extend([fails(told), Step::Flush { volume }, Step::Settle]);
        }
        // Data of a cache miss enters the cache after a flush that no client requested. Data that
        // is read now is there, whatever errors were reported for it.
        let cold = self.rng.below(self.span(volume) / 8) * 8;
        let cold = if self.rng.one_in(3) { self.fitted(volume, cold..cold + 8) } else { near.clone() };
        self.next
            .extend([fails(DiskFault::Fail(WrittenPart::Nothing)), Step::Read { volume, sectors: cold }]);
        self.next.push_back(Step::Settle);
        let late = DiskFault::Late(1 << (24 + self.rng.below(5)));
        let count = 1 + u32::try_from(self.rng.below(3)).expect("few");
        let rule = FaultRule::next(OpKind::Write, count, late);
        self.next.push_back(Step::Trouble { device: 0, rule });
        self.next.push_back(if self.rng.one_in(4) {
            Step::Write { volume, sectors: other, fua: false }
        } else {
            Step::Discard { volume, sectors: other }
        });
        self.next.extend([Step::Pause(1 << self.rng.below(3)), Step::Flush { volume }, Step::Settle]);
        if self.rng.one_in(2) {
            self.next.push_back(Step::Read { volume, sectors: near.clone() });
            self.next.extend([Step::Settle, Step::Flush { volume }, Step::Settle]);
        }
        self.cut_off();
        self.next.push_back(Step::Read { volume, sectors: near });
    }
}
