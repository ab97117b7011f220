//! Drawing workloads: named shapes, each a set of weights and sizes that brings out one kind of trouble.

use super::{Origin, Restart, Step, Workload};
use crate::digest::mix;
use crate::disk::{Fault, Landed, OpKind, Rule};
use crate::growth::{self, Brink};
use crate::system::{Geometry, Mode, Tuning};
use bcached_env::rng::Rng;
use std::ops::Range;

/// How likely each kind of step is, in parts of the sum.
#[derive(Clone, Copy, Debug)]
struct Weights {
    write: u64,
    read: u64,
    flush: u64,
    discard: u64,
    zero: u64,
    mode: u64,
    pause: u64,
    settle: u64,
    restart: u64,
    trouble: u64,
    detach: u64,
    attach: u64,
    delay: u64,
}

impl Weights {
    /// As [`Painter::step`] numbers the kinds.
    const fn in_order(self) -> [u64; 13] {
        let Self { write, read, flush, discard, zero, mode, .. } = self;
        let Self { pause, settle, restart, trouble, detach, attach, delay, .. } = self;
        [write, read, flush, discard, zero, mode, pause, settle, restart, trouble, detach, attach, delay]
    }
}

/// A kind of workload.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its name on the command line.
    pub name: &'static str,
    weights: Weights,
    steps: usize,
    depth: usize,
    volumes: usize,
    /// Sectors of a volume that are used.
    span: u64,
    /// Longest request, in sectors.
    longest: u64,
    /// One write in so many carries FUA.
    fua_one_in: u64,
    /// How many buckets, of which sizes in sectors.
    buckets: Buckets,
    /// Which devices fail, where any do.
    failing: Failing,
    /// What it needs of the tuning that was drawn.
    tune: fn(Tuning) -> Tuning,
}

/// What fails in a shape with trouble.
#[derive(Clone, Copy, Debug)]
enum Failing {
    /// Anything; half of it the cache.
    Anything,
    /// Backing devices.
    Backing,
    /// Flushes of the cache, and writes to some of it.
    CacheData,
}

/// Nothing in particular.
const fn as_drawn(tuning: Tuning) -> Tuning {
    tuning
}

/// Volumes begin in write-through and write-around.
const fn written_through(mut tuning: Tuning) -> Tuning {
    tuning.devices.first_mode = 0;
    tuning
}

/// Dirty data stays.
const fn kept_dirty(mut tuning: Tuning) -> Tuning {
    tuning.devices.first_mode = 2;
    tuning.set.writeback_running = false;
    tuning
}

/// The cache device of a shape.
#[derive(Clone, Copy, Debug)]
enum Buckets {
    /// 600 to 1,000 of 64 KiB.
    Usual,
    /// As many of 8 or 16 KiB, so that trees get deep.
    Small,
    /// Fewer than the volume fills, of 8 KiB.
    Scarce,
    /// As few as there can be, of 8 KiB.
    Fewest,
    /// A set that has grown.
    Grown,
}

const MIXED: Weights = Weights {
    write: 46,
    read: 30,
    flush: 6,
    discard: 4,
    zero: 4,
    mode: 1,
    pause: 4,
    settle: 2,
    restart: 1,
    trouble: 0,
    // Most of the time a volume is attached.
    detach: 1,
    attach: 3,
    delay: 1,
};

/// Volumes stay attached.
const STAYING: Weights = Weights { detach: 0, attach: 0, ..MIXED };

/// What most shapes do not say.
const PLAIN: Shape = Shape {
    name: "",
    weights: MIXED,
    steps: 300,
    depth: 8,
    volumes: 1,
    span: 4096,
    longest: 128,
    fua_one_in: 8,
    buckets: Buckets::Usual,
    failing: Failing::Anything,
    tune: as_drawn,
};

/// A volume that fits into its cache, in small pieces.
const PACKED: Weights = Weights { write: 80, read: 14, restart: 0, discard: 2, mode: 0, ..STAYING };

const SHAPES: [Shape; 12] = [
    // A bit of everything, two volumes, restarts in between.
    Shape {
        name: "mixed",
        weights: MIXED,
        steps: 300,
        depth: 8,
        volumes: 2,
        span: 4096,
        longest: 128,
        fua_one_in: 8,
        buckets: Buckets::Usual,
        ..PLAIN
    },
    // Few steps, no restarts of its own: for crash points, each of which restarts.
    Shape {
        name: "points",
        weights: Weights { restart: 0, mode: 0, detach: 2, ..MIXED },
        steps: 60,
        depth: 6,
        volumes: 1,
        span: 1024,
        longest: 64,
        fua_one_in: 6,
        buckets: Buckets::Small,
        ..PLAIN
    },
    // A few blocks that everybody wants.
    Shape {
        name: "hot",
        weights: Weights { flush: 10, discard: 6, zero: 6, ..MIXED },
        steps: 400,
        depth: 16,
        volumes: 1,
        span: 96,
        longest: 24,
        fua_one_in: 5,
        buckets: Buckets::Usual,
        ..PLAIN
    },
    // More data than the cache holds, over and over: buckets are reused, trees split.
    Shape {
        name: "turnover",
        weights: Weights { write: 70, read: 20, restart: 0, discard: 1, zero: 1, ..STAYING },
        steps: 1500,
        depth: 16,
        volumes: 1,
        span: 32 * 1024,
        longest: 512,
        fua_one_in: 32,
        buckets: Buckets::Small,
        ..PLAIN
    },
    // Small scattered writes: many keys, deep trees, a busy journal.
    Shape {
        name: "scatter",
        weights: Weights { write: 80, read: 12, pause: 2, settle: 1, mode: 0, restart: 1, ..STAYING },
        steps: 1500,
        depth: 16,
        volumes: 2,
        span: 16 * 1024,
        longest: 9,
        fua_one_in: 16,
        buckets: Buckets::Small,
        ..PLAIN
    },
    // Ends of processes, of all kinds, close to each other.
    Shape {
        name: "restarts",
        weights: Weights { restart: 8, mode: 3, ..MIXED },
        steps: 200,
        depth: 8,
        volumes: 2,
        span: 2048,
        longest: 128,
        fua_one_in: 8,
        buckets: Buckets::Small,
        ..PLAIN
    },
    // Devices that fail, drop what they should flush, and are late; and ends of processes.
    Shape {
        name: "trouble",
        weights: Weights { flush: 10, mode: 2, pause: 8, restart: 3, trouble: 4, ..MIXED },
        steps: 300,
        depth: 8,
        volumes: 2,
        span: 2048,
        longest: 128,
        fua_one_in: 8,
        buckets: Buckets::Small,
        ..PLAIN
    },
    // More dirty data than fits, in small pieces: what is live is moved together, everything waits for buckets. A detach
    // would write it all back, and then there would be room.
    Shape {
        name: "scarce",
        weights: Weights { write: 70, read: 14, restart: 0, discard: 3, ..STAYING },
        steps: 1200,
        depth: 12,
        volumes: 1,
        span: 10 * 1024,
        longest: 160,
        fua_one_in: 16,
        buckets: Buckets::Scarce,
        ..PLAIN
    },
    // A tree of two or three levels, a node of which is about to split.
    Shape {
        name: "forest",
        weights: Weights { write: 52, read: 36, mode: 0, pause: 2, settle: 1, restart: 0, ..STAYING },
        steps: 400,
        depth: 12,
        volumes: 1,
        span: growth::SPAN,
        longest: 16,
        fua_one_in: 16,
        buckets: Buckets::Grown,
        ..PLAIN
    },
    // Dirty data that nobody writes back, in small pieces that are overwritten: what is live is moved together all the time.
    Shape { name: "moves", weights: PACKED, ..MOVES },
    // The same on a cache that drops what it should flush, and is worn in places.
    Shape {
        name: "moves-trouble",
        weights: Weights { trouble: 1, flush: 10, restart: 1, ..PACKED },
        failing: Failing::CacheData,
        ..MOVES
    },
    // Write-through and write-around on backing devices that fail.
    Shape {
        name: "through",
        weights: Weights { read: 46, flush: 8, mode: 0, restart: 2, trouble: 5, ..MIXED },
        volumes: 2,
        span: 1024,
        longest: 64,
        buckets: Buckets::Small,
        failing: Failing::Backing,
        tune: written_through,
        ..PLAIN
    },
];

/// See the shape of this name.
const MOVES: Shape = Shape {
    steps: 2500,
    depth: 12,
    span: 7 * 1024,
    longest: 64,
    fua_one_in: 16,
    buckets: Buckets::Fewest,
    tune: kept_dirty,
    ..PLAIN
};

impl Shape {
    /// All shapes.
    #[must_use]
    pub const fn all() -> &'static [Self] {
        &SHAPES
    }

    /// The shape of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.iter().find(|shape| shape.name == name).cloned()
    }

    /// The same shape with another number of steps.
    #[must_use]
    pub const fn with_steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// The workload of this shape and seed.
    #[must_use]
    pub fn draw(&self, seed: u64) -> Workload {
        let mut rng = Rng::new(mix(&[seed, self.steps as u64]));
        let geometry = self.geometry(&mut rng);
        let grown = matches!(self.buckets, Buckets::Grown)
            .then(|| if rng.one_in(2) { Brink::ThirdLevel } else { Brink::InteriorSplit });
        let mut painter = Painter::new(self, rng, &geometry);
        let steps = (0..self.steps).map(|_| painter.step()).collect();
        Workload {
            name: self.name.to_owned(),
            seed,
            geometry,
            grown,
            depth: self.depth,
            steps,
            troubled: self.weights.trouble > 0,
            origin: Origin::Drawn { steps: self.steps },
            kept: None,
        }
    }

    /// A few more steps for after a recovery: what the script says, or so many of the workload's shape.
    #[must_use]
    pub fn aftermath(workload: &Workload, seed: u64, steps: usize) -> Vec<Step> {
        if let Origin::Script { after, .. } = &workload.origin {
            return after.clone();
        }
        let shape = Self::named(&workload.name).unwrap_or_else(|| SHAPES[0].clone());
        let calm = Self { weights: Weights { restart: 0, pause: 1, trouble: 0, ..shape.weights }, ..shape };
        let mut painter = Painter::new(&calm, Rng::new(seed), &workload.geometry);
        (0..steps).map(|_| painter.step()).collect()
    }

    fn geometry(&self, rng: &mut Rng) -> Geometry {
        let block_sectors = if rng.one_in(2) { 1 } else { 8 };
        let either = |rng: &mut Rng, one: u32, other: u32| if rng.one_in(2) { one } else { other };
        let bucket_sectors = match self.buckets {
            Buckets::Grown => return growth::geometry(Tuning::draw(rng.next())),
            Buckets::Usual => either(rng, 128, 128),
            Buckets::Small => either(rng, 16, 32),
            Buckets::Scarce | Buckets::Fewest => either(rng, 16, 16),
        };
        let torn_sectors = if block_sectors == 1 && rng.one_in(2) { 1 } else { 8 };
        Geometry {
            block_sectors,
            set_block_sectors: if rng.one_in(2) { 8 } else { block_sectors },
            bucket_sectors,
            buckets: match self.buckets {
                // Fewer are no set with a journal.
                Buckets::Scarce => (512 + rng.below(400)).max(516),
                Buckets::Fewest => 516 + rng.below(64),
                _ => 600 + rng.below(400),
            },
            volumes: vec![self.span; self.volumes],
            torn_sectors,
            backing_volatile: !rng.one_in(4),
            cache_volatile: !rng.one_in(4),
            note_records: 64 << rng.below(6),
            tuning: (self.tune)(Tuning::draw(rng.next())),
        }
    }
}

/// Draws steps one by one; remembers where it wrote, to come back there.
struct Painter<'a> {
    shape: &'a Shape,
    rng: Rng,
    unit: u64,
    /// Size of the cache device.
    cache_sectors: u64,
    recent: Vec<(u32, Range<u64>)>,
    /// What belongs to the last step.
    next: Option<Step>,
}

/// Places remembered.
const RECENT_MAX: usize = 32;

impl<'a> Painter<'a> {
    fn new(shape: &'a Shape, rng: Rng, geometry: &Geometry) -> Self {
        let unit = u64::from(geometry.block_sectors);
        let cache_sectors = geometry.cache_sectors();
        Self { shape, rng, unit, cache_sectors, recent: Vec::new(), next: None }
    }

    fn step(&mut self) -> Step {
        if let Some(step) = self.next.take() {
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
            2 => Step::Flush { volume: self.volume() },
            3 => {
                let (volume, sectors) = self.discarded();
                Step::Discard { volume, sectors }
            }
            4 => {
                let (volume, sectors) = self.place();
                self.remember(volume, &sectors);
                Step::Zero { volume, sectors, fua: self.rng.one_in(self.shape.fua_one_in) }
            }
            5 => {
                let modes =
                    [Mode::Writethrough, Mode::Writeback, Mode::Writeback, Mode::Writearound, Mode::None];
                let mode = modes[usize::try_from(self.rng.below(5)).expect("below five")];
                Step::Mode { volume: self.volume(), mode }
            }
            6 => Step::Pause(1 << self.rng.below(8)),
            7 => Step::Settle,
            8 => Step::Restart(match self.rng.below(3) {
                0 => Restart::Stop,
                1 => Restart::Death(self.rng.next()),
                _ => Restart::Power(self.rng.next()),
            }),
            9 => self.trouble(),
            10 => Step::Detach { volume: self.volume() },
            11 => Step::Attach { volume: self.volume() },
            _ => self.delay(),
        }
    }

    /// Some operations of a device take their time, and others overtake them. No request fails for that.
    fn delay(&mut self) -> Step {
        let device = usize::try_from(self.rng.below(1 + self.shape.volumes as u64)).expect("few devices");
        let on = self.operation();
        let skip = u32::try_from(self.rng.below(12)).expect("few");
        let fault = Fault::Late(1 << (20 + self.rng.below(9)));
        let count = 1 << self.rng.below(4);
        Step::Trouble { device, rule: Rule { on, sectors: 0..u64::MAX, skip, count, fault } }
    }

    /// Of the cache mostly where its data is: the first write of metadata that fails ends all writing there.
    fn trouble(&mut self) -> Step {
        let cache_fails = match self.shape.failing {
            Failing::Anything => self.rng.one_in(2),
            Failing::Backing => false,
            Failing::CacheData => true,
        };
        let device = if cache_fails { 0 } else { 1 + self.volume() as usize };
        if device == 0 && !self.rng.one_in(4) {
            return self.worn_region();
        }
        if matches!(self.shape.failing, Failing::CacheData) {
            return Step::Trouble { device, rule: self.failing_flush() };
        }
        if device > 0 && self.rng.one_in(4) {
            return self.dropping(device);
        }
        let on = self.operation();
        let landed = [Landed::Nothing, Landed::Part, Landed::Everything];
        let fault = match self.rng.below(8) {
            0 => Fault::Late(1 << (20 + self.rng.below(12))),
            pick => Fault::Fail(landed[usize::try_from(pick % 3).expect("three")]),
        };
        let skip = u32::try_from(self.rng.below(12)).expect("few");
        let count = 1 << self.rng.below(4);
        Step::Trouble { device, rule: Rule { on, sectors: 0..u64::MAX, skip, count, fault } }
    }

    /// What a rule is about.
    fn operation(&mut self) -> OpKind {
        [OpKind::Read, OpKind::Write, OpKind::Flush][usize::try_from(self.rng.below(3)).expect("three")]
    }

    /// One of the next flushes drops what it covers.
    fn failing_flush(&mut self) -> Rule {
        let skip = u32::try_from(self.rng.below(3)).expect("few");
        Rule { on: OpKind::Flush, sectors: 0..u64::MAX, skip, count: 1, fault: Fault::Fail(Landed::Nothing) }
    }

    /// A backing device that drops what a flush covers while writes that it has taken are not answered.
    fn dropping(&mut self, device: usize) -> Step {
        let flush = self.failing_flush();
        let late = Fault::Late(1 << (23 + self.rng.below(6)));
        let writes = Rule { on: OpKind::Write, skip: 0, count: 16, fault: late, ..flush.clone() };
        self.next = Some(Step::Trouble { device, rule: flush });
        Step::Trouble { device, rule: writes }
    }

    /// A stretch of the cache, up to an eighth of it, that cannot be written (or, seldom, read) for some time.
    fn worn_region(&mut self) -> Step {
        let eighth = self.cache_sectors / 8;
        let start = self.rng.below(self.cache_sectors);
        let sectors = start..start + 1 + (self.rng.below(eighth) >> self.rng.below(4));
        let on = if self.rng.one_in(6) { OpKind::Read } else { OpKind::Write };
        let landed = if self.rng.one_in(2) { Landed::Nothing } else { Landed::Part };
        let count = 4 << self.rng.below(5);
        Step::Trouble { device: 0, rule: Rule { on, sectors, skip: 0, count, fault: Fault::Fail(landed) } }
    }

    fn volume(&mut self) -> u32 {
        u32::try_from(self.rng.below(self.shape.volumes as u64)).expect("few volumes")
    }

    /// Half of the time at or near a recent write, else anywhere; lengths lean to the short.
    fn place(&mut self) -> (u32, Range<u64>) {
        let blocks = self.shape.span / self.unit;
        let longest = (self.shape.longest / self.unit).clamp(1, blocks);
        let length = 1 + (self.rng.below(longest) >> self.rng.below(5));
        if !self.recent.is_empty() && self.rng.one_in(2) {
            let pick = usize::try_from(self.rng.below(self.recent.len() as u64)).expect("few places");
            let (volume, near) = self.recent[pick].clone();
            if self.rng.one_in(3) {
                return (volume, near);
            }
            let within = near.start / self.unit + self.rng.below((near.end - near.start) / self.unit);
            let first = within.saturating_sub(self.rng.below(length)).min(blocks - length);
            return (volume, first * self.unit..(first + length) * self.unit);
        }
        let first = self.rng.below(blocks - length + 1);
        (self.volume(), first * self.unit..(first + length) * self.unit)
    }

    /// Where requests are small against the volume, much of it goes at once now and then: a tree of many keys would never
    /// become sparse otherwise.
    fn discarded(&mut self) -> (u32, Range<u64>) {
        let has_many_keys = self.shape.longest * 1000 < self.shape.span;
        if !has_many_keys || !self.rng.one_in(4) {
            return self.place();
        }
        let quarter = self.shape.span / self.unit / 4;
        let length = quarter + self.rng.below(2 * quarter);
        let first = self.rng.below(4 * quarter - length);
        (self.volume(), first * self.unit..(first + length) * self.unit)
    }

    fn remember(&mut self, volume: u32, sectors: &Range<u64>) {
        if self.recent.len() < RECENT_MAX {
            self.recent.push((volume, sectors.clone()));
        } else {
            let place = usize::try_from(self.rng.below(RECENT_MAX as u64)).expect("few places");
            self.recent[place] = (volume, sectors.clone());
        }
    }
}
