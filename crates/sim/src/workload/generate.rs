//! Draws a workload of a shape from a seed, step by step.

use super::shape::{CacheSize, Shape, StepWeights};
use super::{Restart, Step, StepSource, Workload};
use crate::digest::mix;
use crate::disk::{DiskFault, FaultRule, OpKind};
use crate::growth::{self, GrowthStage};
use crate::system::tuning::DeviceTuning;
use crate::system::{Geometry, Mode, PolicyOption, Tuning};
use bcached_env::rng::Rng;
use std::collections::VecDeque;
use std::ops::Range;

impl Shape {
    /// Draws the workload of this shape and seed.
    #[must_use]
    pub fn draw(&self, seed: u64) -> Workload {
        let mut rng = Rng::new(mix(&[seed, self.steps as u64]));
        let grown = match self.buckets {
            CacheSize::Grown if rng.one_in(2) => Some(GrowthStage::ThirdLevel),
            CacheSize::Grown => Some(GrowthStage::InteriorSplit),
            CacheSize::Copse => Some(GrowthStage::Copse),
            _ => None,
        };
        let geometry = match grown {
            Some(growth) => growth::geometry(growth, (self.tune)(Self::tuning(&mut rng))),
            None => self.geometry(&mut rng),
        };
        let mut painter = StepGenerator::new(self, rng, &geometry);
        painter.next.extend(geometry.lodgers().map(|(volume, _)| Step::Create { volume }));
        let steps = (0..self.steps).map(|_| painter.step()).collect();
        Workload {
            name: self.name.to_owned(),
            seed,
            geometry,
            grown,
            depth: self.depth,
            steps,
            troubled: self.weights.trouble > 0,
            origin: StepSource::Drawn { steps: self.steps },
            kept: None,
        }
    }

    /// Returns a few more steps to run after a recovery: those of the script, or `steps` steps of
    /// the workload's shape.
    #[must_use]
    pub fn aftermath(workload: &Workload, seed: u64, steps: usize) -> Vec<Step> {
        if let StepSource::Script { after, .. } = &workload.origin {
            return after.clone();
        }
        let shape = Self::named(&workload.name)
            .expect("a workload is drawn from a shape, or a script says what follows");
        // No options are turned, because they might stay at values that stop write-back.
        let weights = StepWeights { restart: 0, pause: 1, trouble: 0, turn: 0, ..shape.weights };
        let calm = Self { weights, ..shape };
        let mut painter = StepGenerator::new(&calm, Rng::new(seed), &workload.geometry);
        (0..steps).map(|_| painter.step()).collect()
    }

    fn geometry(&self, rng: &mut Rng) -> Geometry {
        let block_sectors = if rng.one_in(2) { 1 } else { 8 };
        let bucket_sectors = match self.buckets {
            CacheSize::Usual => 128,
            CacheSize::Small if rng.one_in(2) => 32,
            _ => 16,
        };
        let torn_sectors = if block_sectors == 1 && rng.one_in(2) { 1 } else { 8 };
        // Requests may be smaller than the blocks of the set, and then most volumes end within a
        // block.
        let set_block_sectors = if rng.one_in(4) { block_sectors } else { 8 };
        let odd = set_block_sectors - block_sectors;
        let volumes = (0..self.volumes).map(|_| self.span + rng.below(u64::from(odd) + 1)).collect();
        Geometry {
            block_sectors,
            set_block_sectors,
            bucket_sectors,
            buckets: match self.buckets {
                // A set with a journal needs at least this many.
                CacheSize::Scarce => (512 + rng.below(400)).max(516),
                CacheSize::Fewest => 516 + rng.below(64),
                CacheSize::Many => 2800 + rng.below(400),
                _ => 600 + rng.below(400),
            },
            volumes,
            lodgers: self.lodgers.to_vec(),
            torn_sectors,
            backing_volatile: !rng.one_in(4),
            cache_volatile: !rng.one_in(4),
            note_records: 64 << rng.below(6),
            tuning: (self.tune)(Self::tuning(rng)),
        }
    }

    fn tuning(rng: &mut Rng) -> Tuning {
        Tuning::draw(rng.next()).with_policies(rng.next())
    }
}

/// Draws steps one by one, and remembers where it wrote, to return there.
pub(super) struct StepGenerator<'a> {
    pub(super) shape: &'a Shape,
    pub(super) rng: Rng,
    /// Requests are multiples of this many sectors.
    pub(super) unit: u64,
    /// Sizes of all volumes.
    spans: Vec<u64>,
    devices: DeviceTuning,
    /// Size of the cache device.
    pub(super) cache_sectors: u64,
    recent: Vec<(u32, Range<u64>)>,
    /// Steps that belong to the last step.
    pub(super) next: VecDeque<Step>,
}

/// Piece size for reading a whole volume, in sectors.
pub(super) const READ_SECTORS: usize = 512;

/// A multiple of any set's block, in sectors.
const BLOCK: u64 = 8;

/// Number of places remembered.
const RECENT_MAX: usize = 32;

impl<'a> StepGenerator<'a> {
    fn new(shape: &'a Shape, rng: Rng, geometry: &Geometry) -> Self {
        let unit = u64::from(geometry.block_sectors);
        let cache_sectors = geometry.cache_sectors();
        let spans = (0..geometry.count()).map(|volume| geometry.sectors_of(volume)).collect();
        let devices = geometry.tuning.devices;
        Self { shape, rng, unit, spans, devices, cache_sectors, recent: Vec::new(), next: VecDeque::new() }
    }

    fn step(&mut self) -> Step {
        if let Some(step) = self.next.pop_front() {
            return step;
        }
        let weights = self.shape.weights.in_order();
        let mut pick = self.rng.below(weights.iter().sum());
        let mut kind = 0;
        while pick >= weights[kind] {
            pick -= weights[kind];
            kind += 1;
        }
        match kind {
            0 => {
                let (volume, sectors) = self.place();
                self.remember(volume, &sectors);
                Step::Write { volume, sectors, fua: self.rng.one_in(self.shape.fua_one_in) }
            }
            1 => {
                let (volume, sectors) = self.place();
                Step::Read { volume, sectors }
            }
            2 => Step::Flush { volume: self.any() },
            3 => {
                let (volume, sectors) = self.discarded();
                Step::Discard { volume, sectors }
            }
            4 => {
                let may_unmap = self.rng.one_in(2);
                let (volume, sectors) = if may_unmap { self.zeroed() } else { self.place() };
                self.remember(volume, &sectors);
                // There are few of them.
                let fua = self.rng.one_in(self.shape.fua_one_in.min(3));
                Step::Zero { volume, sectors, fua, may_unmap }
            }
            5 => {
                let modes =
                    [Mode::Writethrough, Mode::Writeback, Mode::Writeback, Mode::Writearound, Mode::None];
                let mode = modes[usize::try_from(self.rng.below(5)).expect("below five")];
                Step::Mode { volume: self.volume(), mode }
            }
            6 if self.rng.one_in(8) => self.note_gone(),
            6 => Step::Pause(1 << self.rng.below(8)),
            7 => Step::Settle,
            8 => self.restart(),
            9 => self.trouble(),
            10 => {
                let volume = self.volume();
                self.begun(volume, Step::Detach { volume })
            }
            11 => {
                let volume = self.volume();
                self.begun(volume, Step::Attach { volume })
            }
            12 => self.delay(),
            13 => {
                let volume = self.volume();
                self.begun(volume, Step::Clean { volume })
            }
            14 => Step::Readd { volume: self.any() },
            15 => self.shrinking(),
            16 => self.growing(),
            17 => Step::Forget { volume: self.volume() },
            18 => self.turn(),
            19 => Step::Create { volume: self.lodger() },
            20 => Step::Delete { volume: self.lodger() },
            21 => self.filling(),
            _ => self.coincidence(),
        }
    }

    /// Draws a restart. Where devices do not fail anyway, a quarter of the starts find a damaged
    /// volume table.
    fn restart(&mut self) -> Step {
        let restart = Step::Restart(match self.rng.below(4) {
            0 => Restart::Stop,
            1 => Restart::Death(self.rng.next()),
            2 => Restart::Power(self.rng.next()),
            _ => Restart::Twice(1 + (self.rng.below(96) >> self.rng.below(5)), self.rng.next()),
        });
        if self.shape.weights.trouble > 0 || !self.rng.one_in(4) {
            return restart;
        }
        self.next.push_back(restart);
        Step::Table(self.rng.next())
    }

    /// The note's file is gone while some writes are answered. Mostly another one takes its place
    /// soon; otherwise the next process creates one.
    fn note_gone(&mut self) -> Step {
        for _ in 0..1 + self.rng.below(4) {
            let (volume, sectors) = self.place();
            self.remember(volume, &sectors);
            self.next.push_back(Step::Write { volume, sectors, fua: false });
        }
        self.next.push_back(Step::Pause(1 << self.rng.below(8)));
        if !self.rng.one_in(4) {
            self.next.push_back(Step::Note { is_there: true });
        }
        Step::Note { is_there: false }
    }

    /// Long work on a volume. It may be cancelled soon, while it waits for a request that its
    /// device carries out slowly.
    fn begun(&mut self, volume: u32, work: Step) -> Step {
        if !self.rng.one_in(4) {
            return work;
        }
        let (written, sectors) = self.place();
        if written == volume {
            self.next.push_back(Step::Write { volume, sectors, fua: self.rng.one_in(2) });
        }
        let pause = Step::Pause(1 << self.rng.below(6));
        self.next.extend([work, pause, Step::Cancel { volume }]);
        let is_cache = volume as usize >= self.shape.volumes || self.rng.one_in(2);
        let fault = DiskFault::Late(1 << (23 + self.rng.below(6)));
        let rule = FaultRule::next(OpKind::Write, 1, fault);
        Step::Trouble { device: if is_cache { 0 } else { 1 + volume as usize }, rule }
    }

    fn turn(&mut self) -> Step {
        let option = PolicyOption::ALL
            [usize::try_from(self.rng.below(PolicyOption::ALL.len() as u64)).expect("few options")];
        Step::Turn { volume: self.any(), option, value: option.draw(&mut self.rng) }
    }

    /// Leaves whole blocks of any set.
    fn shrinking(&mut self) -> Step {
        let volume = self.any();
        let sectors = BLOCK * (1 + self.rng.below(self.span(volume) / BLOCK - 1));
        self.begun(volume, Step::Shrink { volume, sectors })
    }

    /// Half of the time grows to the original size, otherwise to any size. A volume that lives in
    /// the cache alone keeps whole blocks.
    fn growing(&mut self) -> Step {
        let volume = self.any();
        let unit = if volume as usize >= self.shape.volumes { BLOCK } else { self.unit };
        let blocks = self.span(volume) / unit;
        let blocks = if self.rng.one_in(2) { blocks } else { 1 + self.rng.below(blocks) };
        self.begun(volume, Step::Grow { volume, sectors: blocks * unit })
    }

    /// Some operations of a device are slow, and others overtake them. No request fails because of
    /// that.
    fn delay(&mut self) -> Step {
        if self.shape.weights.detach > 2 && self.rng.one_in(2) {
            return self.overtaken();
        }
        let device = usize::try_from(self.rng.below(1 + self.shape.volumes as u64)).expect("few devices");
        if self.rng.one_in(8) {
            return self.stalling(device);
        }
        let on = self.operation();
        let skip = u32::try_from(self.rng.below(12)).expect("few");
        let fault = DiskFault::Late(1 << (20 + self.rng.below(9)));
        let count = 1 << self.rng.below(4);
        Step::Trouble { device, rule: FaultRule { skip, ..FaultRule::next(on, count, fault) } }
    }

    /// A read of uncached data from a backing device is so slow that the data is written twice
    /// meanwhile, the second time while the volume leaves the cache. The data is also read
    /// repeatedly.
    fn overtaken(&mut self) -> Step {
        let (volume, sectors) = self.place();
        let pause = |rng: &mut Rng| Step::Pause(1 << rng.below(5));
        let read = || Step::Read { volume, sectors: sectors.clone() };
        let write = || Step::Write { volume, sectors: sectors.clone(), fua: false };
        let fault = DiskFault::Late(1 << (23 + self.rng.below(5)));
        let rule = FaultRule::next(OpKind::Read, 1, fault);
        self.next.extend([Step::Trouble { device: 1 + volume as usize, rule }, read()]);
        self.next.extend([pause(&mut self.rng), write(), Step::Detach { volume }, write()]);
        for _ in 0..4 {
            self.next.extend([pause(&mut self.rng), read()]);
        }
        Step::Discard { volume, sectors: sectors.clone() }
    }

    pub(super) fn volume(&mut self) -> u32 {
        u32::try_from(self.rng.below(self.shape.volumes as u64)).expect("few volumes")
    }

    /// Draws a volume that lives in the cache alone.
    pub(super) fn lodger(&mut self) -> u32 {
        let (first, count) = (self.shape.volumes as u64, self.shape.lodgers.len() as u64);
        u32::try_from(first + self.rng.below(count)).expect("few volumes")
    }

    /// Draws a volume of either kind.
    pub(super) fn any(&mut self) -> u32 {
        let count = self.shape.volumes + self.shape.lodgers.len();
        u32::try_from(self.rng.below(count as u64)).expect("few volumes")
    }

    /// Returns the size of a volume.
    pub(super) fn span(&self, volume: u32) -> u64 {
        self.spans[volume as usize]
    }

    /// Returns the initial mode of a volume.
    pub(super) const fn first_mode(&self, volume: u32) -> Mode {
        self.devices.first_mode(volume as u64)
    }

    /// A volume that lives in the cache alone is created and written from end to end.
    fn filling(&mut self) -> Step {
        let volume = self.lodger();
        self.filled(volume);
        Step::Create { volume }
    }

    /// Writes a whole volume, one piece after the other.
    pub(super) fn filled(&mut self, volume: u32) {
        let (span, longest) = (self.span(volume), self.shape.longest);
        let pieces =
            (0..span.div_ceil(longest)).map(|piece| piece * longest..span.min((piece + 1) * longest));
        self.next.extend(pieces.map(|sectors| Step::Write { volume, sectors, fua: false }));
    }

    /// Half of the time draws a range at or near a recent write, otherwise anywhere or, rarely, at
    /// the end. Short lengths are more likely.
    pub(super) fn place(&mut self) -> (u32, Range<u64>) {
        let other = self.any();

        let blocks = self.span(other) / self.unit;
        let longest = (self.shape.longest / self.unit).clamp(1, blocks);
        let length = 1 + (self.rng.below(longest) >> self.rng.below(5));
        if self.rng.one_in(24) {
            return (other, (blocks - length) * self.unit..blocks * self.unit);
        }
        if !self.recent.is_empty() && self.rng.one_in(2) {
            let pick = usize::try_from(self.rng.below(self.recent.len() as u64)).expect("few places");
            let (volume, near) = self.recent[pick].clone();
            let blocks = self.span(volume) / self.unit;
            let length = length.min(blocks);
            if self.rng.one_in(3) {
                return (volume, near);
            }
            let within = near.start / self.unit + self.rng.below((near.end - near.start) / self.unit);
            let first = within.saturating_sub(self.rng.below(length)).min(blocks - length);
            return (volume, first * self.unit..(first + length) * self.unit);
        }
        let first = self.rng.below(blocks - length + 1);
        (other, first * self.unit..(first + length) * self.unit)
    }

    /// Where requests are small compared with the volume, sometimes discards much of it at once: a
    /// tree of many keys would never become sparse otherwise.
    fn discarded(&mut self) -> (u32, Range<u64>) {
        if !self.has_many_keys() || !self.rng.one_in(4) {
            return self.place();
        }
        let volume = self.volume();
        let quarter = self.span(volume) / self.unit / 4;
        let length = quarter + self.rng.below(2 * quarter);
        self.anywhere(volume, length * self.unit)
    }

    /// In such volumes sometimes reaches across the ends of leaves, and yet is short enough to be
    /// written as zeroes.
    fn zeroed(&mut self) -> (u32, Range<u64>) {
        if !self.has_many_keys() || !self.rng.one_in(4) {
            return self.place();
        }
        let volume = self.volume();
        let length = 64 << self.rng.below(4);
        self.anywhere(volume, length)
    }

    const fn has_many_keys(&self) -> bool {
        self.shape.longest * 256 <= self.shape.span
    }

    /// Draws a range of that length, in sectors.
    fn anywhere(&mut self, volume: u32, length: u64) -> (u32, Range<u64>) {
        let first = self.rng.below((self.span(volume) - length) / self.unit) * self.unit;
        (volume, first..first + length)
    }

    pub(super) fn remember(&mut self, volume: u32, sectors: &Range<u64>) {
        if self.recent.len() < RECENT_MAX {
            self.recent.push((volume, sectors.clone()));
        } else {
            let place = usize::try_from(self.rng.below(RECENT_MAX as u64)).expect("few places");
            self.recent[place] = (volume, sectors.clone());
        }
    }
}
