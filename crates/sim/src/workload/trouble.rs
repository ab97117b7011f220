//! Draws device faults.

use super::Step;
use super::generate::{READ_SECTORS, StepGenerator};
use super::shape::FaultTargets;
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors, WrittenPart};
use bcached_format::SUPERBLOCK_SECTOR;

impl StepGenerator<'_> {
    /// Draws a fault. For the cache it mostly affects the data area: the first failed write of
    /// metadata ends all writing there.
    pub(super) fn trouble(&mut self) -> Step {
        if !self.shape.lodgers.is_empty() && self.rng.one_in(3) {
            return self.reopened();
        }
        let cache_fails = match self.shape.failing {
            FaultTargets::Sets => return self.failing_set(),
            FaultTargets::Anything => self.rng.one_in(2),
            FaultTargets::Backing => false,
            FaultTargets::CacheData => true,
        };
        let device = if cache_fails { 0 } else { 1 + self.volume() as usize };
        if device == 0 && !self.rng.one_in(4) {
            return self.worn_region();
        }
        if matches!(self.shape.failing, FaultTargets::CacheData) {
            return self.dropped_and_read(device);
        }
        if matches!(self.shape.failing, FaultTargets::Backing) && self.rng.one_in(2) {
            return self.dropped_and_read(device);
        }
        if self.rng.one_in(8) {
            return self.vanishing(device);
        }
        if device > 0 && self.rng.one_in(6) {
            return Step::Trouble { device, rule: self.failing_superblock() };
        }
        if device > 0 && self.rng.one_in(6) {
            return self.decaying(device);
        }
        if device > 0 && self.rng.one_in(4) {
            return self.dropping(device);
        }
        if device > 0 && self.rng.one_in(6) {
            return self.pulling(device);
        }
        let on = self.operation();
        let landed = [WrittenPart::Nothing, WrittenPart::Part, WrittenPart::Everything];
        let fault = match self.rng.below(8) {
            0 => DiskFault::Late(1 << (20 + self.rng.below(12))),
            pick => DiskFault::Fail(landed[usize::try_from(pick % 3).expect("three")]),
        };
        let skip = u32::try_from(self.rng.below(12)).expect("few");
        let count = 1 << self.rng.below(4);
        Step::Trouble { device, rule: FaultRule { skip, ..FaultRule::next(on, count, fault) } }
    }

    /// A volume that lives in the cache alone is created, later than others. Then the journal
    /// cannot be written, and the set is reopened.
    fn reopened(&mut self) -> Step {
        let volume = self.lodger();
        let fails = self.failing_journal();
        let (written, sectors) = self.place();
        self.next.extend([Step::Settle, Step::Create { volume }, Step::Settle]);
        self.next.extend([fails, Step::Write { volume: written, sectors, fua: true }]);
        self.next.extend([Step::Settle, Step::Readd { volume: 0 }]);
        Step::Delete { volume }
    }

    /// The next write of the journal fails.
    const fn failing_journal(&self) -> Step {
        let fault = DiskFault::Fail(WrittenPart::Nothing);
        let sectors = 0..self.cache_sectors / 64;
        Step::Trouble { device: 0, rule: FaultRule { on: OpKind::Write, sectors, skip: 0, count: 1, fault } }
    }

    /// A set fails; or a backing device drops data, is pulled, or is late.
    fn failing_set(&mut self) -> Step {
        let volume = self.volume();
        let device = 1 + volume as usize;
        match self.rng.below(8) {
            0 => self.pulling(device),
            1 => self.dropping(device),
            2 => self.stalling(device),
            3 | 4 => self.closed_over_a_loss(volume),
            5 => self.closed_without_a_note(),
            _ => {
                self.next.push_back(Step::Pause(1 << self.rng.below(12)));
                self.failing_metadata()
            }
        }
    }

    /// The next or almost next writes of the journal fail, with requests beside them.
    fn failing_metadata(&mut self) -> Step {
        let landed = [WrittenPart::Nothing, WrittenPart::Part, WrittenPart::Everything];
        let fault = DiskFault::Fail(landed[usize::try_from(self.rng.below(3)).expect("three")]);
        let skip = u32::try_from(self.rng.below(3)).expect("few");
        let count = 1 << self.rng.below(3);
        let sectors = if self.rng.one_in(4) { 0..u64::MAX } else { 0..self.cache_sectors / 64 };
        let rule = FaultRule { on: OpKind::Write, sectors, skip, count, fault };
        for _ in 0..self.rng.below(4) {
            let (volume, sectors) = self.place();
            self.remember(volume, &sectors);
            self.next.push_front(Step::Write { volume, sectors, fua: self.rng.one_in(2) });
        }
        Step::Trouble { device: 0, rule }
    }

    /// A backing device drops data at its next flush, which may be the one that closes a set, and
    /// it may be pulled meanwhile. Data that is flushed afterwards must be there.
    fn closed_over_a_loss(&mut self, volume: u32) -> Step {
        let device = 1 + volume as usize;
        let (_, sectors) = self.place();
        let sectors = sectors.start.min(self.span(volume) - 8)..sectors.end.min(self.span(volume));
        let sectors = if sectors.is_empty() { 0..8 } else { sectors };
        let drops = Step::Trouble {
            device,
            rule: FaultRule::next(OpKind::Flush, 1, DiskFault::Fail(WrittenPart::Nothing)),
        };
        let fails = self.failing_journal();
        self.next.extend([Step::Settle, drops, fails]);
        if self.rng.one_in(2) {
            self.next.push_back(Step::Write { volume, sectors: 0..8, fua: true });
        }
        if self.rng.one_in(4) {
            let survivors = self.survivors();
            self.next.extend([Step::Pull { device, survivors }, Step::Pause(2), Step::Return { device }]);
        }
        self.next.extend([Step::Pause(1 << self.rng.below(10)), Step::Flush { volume }, Step::Settle]);
        self.next.push_back(Step::Read { volume, sectors: sectors.clone() });
        Step::Write { volume, sectors, fua: false }
    }

    /// A set fails, and the file of its note is removed while only the note holds keys of writes
    /// that were acknowledged. They must be there when the set is open again.
    fn closed_without_a_note(&mut self) -> Step {
        let mut written = Vec::new();
        for _ in 0..1 + self.rng.below(3) {
            let (volume, sectors) = self.place();
            self.remember(volume, &sectors);
            written.push((volume, sectors));
        }
        let write = |(volume, sectors)| Step::Write { volume, sectors, fua: false };
        self.next.extend(written.iter().cloned().map(write));
        let (volume, sectors) = self.place();
        self.next.extend([Step::Settle, self.failing_journal(), Step::Write { volume, sectors, fua: true }]);
        self.next.extend([Step::Pause(1 << self.rng.below(6)), Step::Note { is_there: false }]);
        if self.rng.one_in(2) {
            self.next.extend([Step::Pause(1 << self.rng.below(8)), Step::Note { is_there: true }]);
        }
        let read = |(volume, sectors)| Step::Read { volume, sectors };
        self.next.extend(written.into_iter().map(read));
        Step::Flush { volume }
    }

    /// Draws the kind of operation that a rule applies to.
    pub(super) fn operation(&mut self) -> OpKind {
        [OpKind::Read, OpKind::Write, OpKind::Flush][usize::try_from(self.rng.below(3)).expect("three")]
    }

    /// One of the next flushes drops what it covers.
    pub(super) fn failing_flush(&mut self) -> FaultRule {
        let skip = u32::try_from(self.rng.below(3)).expect("few");
        FaultRule { skip, ..FaultRule::next(OpKind::Flush, 1, DiskFault::Fail(WrittenPart::Nothing)) }
    }

    /// A device is unreachable for some time, and then comes back with all its content. (Meanwhile
    /// only discards reach it.)
    fn vanishing(&mut self, device: usize) -> Step {
        let count = 4 << self.rng.below(5);
        let unreachable = |on| {
            let rule = FaultRule::next(on, count, DiskFault::Unreachable);
            Step::Trouble { device, rule }
        };
        self.next.extend([unreachable(OpKind::Write), unreachable(OpKind::Flush)]);
        unreachable(OpKind::Read)
    }

    /// A backing device is pulled and comes back, with requests in between.
    fn pulling(&mut self, device: usize) -> Step {
        for _ in 0..self.rng.below(6) {
            let (volume, sectors) = self.place();
            let is_write = self.rng.one_in(2);
            if is_write {
                self.remember(volume, &sectors);
            }
            let read = Step::Read { volume, sectors: sectors.clone() };
            self.next.push_back(if is_write { Step::Write { volume, sectors, fua: false } } else { read });
        }
        let pause = Step::Pause(1 << self.rng.below(8));
        self.next.extend([pause, Step::Return { device }]);
        Step::Pull { device, survivors: self.survivors() }
    }

    /// Draws how much of the volatile cache is left when its device is back: mostly nothing.
    pub(super) fn survivors(&mut self) -> Survivors {
        let seed = self.rng.next();
        match seed % 8 {
            0..4 => Survivors::Nothing,
            4 => Survivors::Everything,
            _ => Survivors::Seeded(seed),
        }
    }

    /// A device is overloaded: its next operations take from a quarter of a second to two seconds.
    pub(super) fn stalling(&mut self, device: usize) -> Step {
        let count = 4 << self.rng.below(3);
        let fault = DiskFault::Late(1 << (28 + self.rng.below(4)));
        let late = |on| Step::Trouble { device, rule: FaultRule::next(on, count, fault) };
        self.next.extend([late(OpKind::Write), late(OpKind::Flush)]);
        late(OpKind::Read)
    }

    /// The next sectors that a backing device is asked for become unreadable until they are
    /// written.
    fn decaying(&mut self, device: usize) -> Step {
        let skip = u32::try_from(self.rng.below(8)).expect("few");
        let (on, count) = (OpKind::Read, 1 << self.rng.below(3));
        Step::Trouble { device, rule: FaultRule { skip, ..FaultRule::next(on, count, DiskFault::Decayed) } }
    }

    /// The next write of a backing device's superblock fails.
    fn failing_superblock(&mut self) -> FaultRule {
        let landed = [WrittenPart::Nothing, WrittenPart::Part, WrittenPart::Everything];
        let fault = DiskFault::Fail(landed[usize::try_from(self.rng.below(3)).expect("three")]);
        let sectors = SUPERBLOCK_SECTOR..SUPERBLOCK_SECTOR + 8;
        FaultRule { on: OpKind::Write, sectors, skip: 0, count: 1, fault }
    }

    /// A backing device drops what a flush covers while writes that it has accepted are unanswered.
    fn dropping(&mut self, device: usize) -> Step {
        let flush = self.failing_flush();
        let late = DiskFault::Late(1 << (23 + self.rng.below(6)));
        let writes = FaultRule { on: OpKind::Write, skip: 0, count: 16, fault: late, ..flush.clone() };
        self.next.push_back(Step::Trouble { device, rule: flush });
        Step::Trouble { device, rule: writes }
    }

    /// A device drops what one of the next flushes covers, and a whole volume is read after a
    /// flush.
    fn dropped_and_read(&mut self, device: usize) -> Step {
        let volume = u32::try_from(device.saturating_sub(1)).expect("few volumes");
        self.next.extend([Step::Flush { volume }, Step::Settle]);
        let span = self.span(volume);
        let pieces =
            (0..span).step_by(READ_SECTORS).map(|start| start..span.min(start + READ_SECTORS as u64));
        self.next.extend(pieces.map(|sectors| Step::Read { volume, sectors }));
        Step::Trouble { device, rule: self.failing_flush() }
    }

    /// A region of the cache, up to an eighth of it, cannot be written (or, rarely, read) for some
    /// time.
    fn worn_region(&mut self) -> Step {
        let eighth = self.cache_sectors / 8;
        let start = self.rng.below(self.cache_sectors);
        let sectors = start..start + 1 + (self.rng.below(eighth) >> self.rng.below(4));
        let on = if self.rng.one_in(6) { OpKind::Read } else { OpKind::Write };
        let fault = match (on, self.rng.one_in(2)) {
            (OpKind::Read, true) => DiskFault::Decayed,
            (_, true) => DiskFault::Fail(WrittenPart::Nothing),
            (_, false) => DiskFault::Fail(WrittenPart::Part),
        };
        let count = 4 << self.rng.below(5);
        Step::Trouble { device: 0, rule: FaultRule { on, sectors, skip: 0, count, fault } }
    }
}
