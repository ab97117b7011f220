//! The shapes of workloads: named sets of weights and sizes, each of which provokes one kind of
//! trouble.

use crate::growth;
use crate::system::Tuning;
use crate::system::tuning::{CUTOFF_CACHE_ADD, CUTOFF_WRITEBACK};

/// How likely each kind of step is, in parts of the sum.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepWeights {
    pub(super) write: u64,
    pub(super) read: u64,
    pub(super) flush: u64,
    pub(super) discard: u64,
    pub(super) zero: u64,
    pub(super) mode: u64,
    pub(super) pause: u64,
    pub(super) settle: u64,
    pub(super) restart: u64,
    pub(super) trouble: u64,
    pub(super) detach: u64,
    pub(super) attach: u64,
    pub(super) delay: u64,
    pub(super) clean: u64,
    pub(super) readd: u64,
    pub(super) shrink: u64,
    pub(super) grow: u64,
    pub(super) forget: u64,
    pub(super) turn: u64,
    pub(super) create: u64,
    pub(super) delete: u64,
    pub(super) fill: u64,
    /// Several steps that belong together.
    pub(super) coincidence: u64,
}

impl StepWeights {
    /// Returns the weights in the order in which the drawing of a step numbers the kinds.
    pub(super) const fn in_order(self) -> [u64; 23] {
        let Self { write, read, flush, discard, zero, mode, .. } = self;
        let Self { pause, settle, restart, trouble, detach, attach, delay, clean, readd, .. } = self;
        let Self { shrink, grow, forget, turn, create, delete, fill, coincidence, .. } = self;
        [
            write,
            read,
            flush,
            discard,
            zero,
            mode,
            pause,
            settle,
            restart,
            trouble,
            detach,
            attach,
            delay,
            clean,
            readd,
            shrink,
            grow,
            forget,
            turn,
            create,
            delete,
            fill,
            coincidence,
        ]
    }
}

/// A kind of workload.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its name on the command line.
    pub name: &'static str,
    pub(super) weights: StepWeights,
    pub(super) steps: usize,
    pub(super) depth: usize,
    pub(super) volumes: usize,
    /// Sizes of the volumes that live in the cache alone, in sectors.
    pub(super) lodgers: &'static [u64],
    /// Number of sectors of a volume that are used.
    pub(super) span: u64,
    /// Longest request, in sectors.
    pub(super) longest: u64,
    /// One write in this many carries FUA.
    pub(super) fua_one_in: u64,
    /// Number and size of the buckets.
    pub(super) buckets: CacheSize,
    /// Which devices fail, if any do.
    pub(super) failing: FaultTargets,
    /// Adapts the drawn tuning to the needs of the shape.
    pub(super) tune: fn(Tuning) -> Tuning,
}

/// The devices that fail in a shape with trouble.
#[derive(Clone, Copy, Debug)]
pub(super) enum FaultTargets {
    /// Any device; half of the time the cache.
    Anything,
    /// Backing devices.
    Backing,
    /// Flushes of the cache, and writes to some of its sectors.
    CacheData,
    /// Writes of the cache's metadata, after which a set writes nothing more until it is opened
    /// again; and backing devices.
    Sets,
}

/// Changes nothing.
const fn as_drawn(tuning: Tuning) -> Tuning {
    tuning
}

/// Makes volumes start in writethrough and writearound mode.
const fn written_through(mut tuning: Tuning) -> Tuning {
    tuning.devices.first_mode = 0;
    tuning
}

/// Makes the cache accept dirty data until it is full.
const fn taken_up(mut tuning: Tuning) -> Tuning {
    tuning.set.cutoff_cache_add = CUTOFF_CACHE_ADD;
    tuning.set.cutoff_writeback = CUTOFF_WRITEBACK;
    tuning
}

/// Keeps dirty data in the cache.
const fn kept_dirty(mut tuning: Tuning) -> Tuning {
    tuning.devices.first_mode = 2;
    tuning.set.writeback_running = false;
    taken_up(tuning)
}

/// Makes data dirty, with slow backing devices.
const fn behind_a_fast_cache(mut tuning: Tuning) -> Tuning {
    tuning.devices.first_mode = 2;
    tuning.devices.cache_latency_us = 20;
    tuning.devices.backing_latency_us = 5000;
    tuning
}

/// Makes every second set write its leaves soon, so that few journal entries stay pinned.
const fn half_of_them_prompt(mut tuning: Tuning) -> Tuning {
    if tuning.devices.first_mode % 2 == 1 {
        tuning.set.leaf_delay_ms = 2;
        tuning.set.journal_delay_ms = 1;
    }
    tuning
}

/// Like [`half_of_them_prompt`], and makes node reads slow, so that the walk of the tree takes
/// long.
const fn walked_slowly(tuning: Tuning) -> Tuning {
    let mut tuning = half_of_them_prompt(tuning);
    if tuning.devices.node_read_us == 0 {
        tuning.devices.node_read_us = 20_000;
    }
    tuning
}

/// Like [`walked_slowly`], and slower still, so that the walk of a smaller tree takes as long.
const fn walked_more_slowly(tuning: Tuning) -> Tuning {
    let mut tuning = walked_slowly(tuning);
    tuning.devices.node_read_us *= 5;
    tuning
}

/// The cache device of a shape.
#[derive(Clone, Copy, Debug)]
pub(super) enum CacheSize {
    /// 600 to 1,000 buckets of 64 KiB.
    Usual,
    /// As many, of 8 or 16 KiB, so that trees get deep.
    Small,
    /// Fewer than the volume fills, of 8 KiB.
    Scarce,
    /// The minimum number, of 8 KiB.
    Fewest,
    /// So many, of 8 KiB, that their priorities do not fit into one bucket.
    Many,
    /// A set that has grown.
    Grown,
    /// A set that has grown a little.
    Copse,
}

const MIXED: StepWeights = StepWeights {
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
    clean: 1,
    readd: 1,
    // Most of the time a volume has its full size.
    shrink: 1,
    grow: 3,
    forget: 1,
    turn: 2,
    create: 0,
    delete: 0,
    fill: 0,
    coincidence: 2,
};

/// Volumes stay attached, and no client requests write-back of dirty data.
const STAYING: StepWeights =
    StepWeights { detach: 0, attach: 0, clean: 0, shrink: 0, grow: 0, forget: 0, coincidence: 0, ..MIXED };

/// Defaults for most shapes.
const PLAIN: Shape = Shape {
    name: "",
    weights: MIXED,
    steps: 300,
    depth: 8,
    volumes: 1,
    lodgers: &[],
    span: 4096,
    longest: 128,
    fua_one_in: 8,
    buckets: CacheSize::Usual,
    failing: FaultTargets::Anything,
    tune: as_drawn,
};

/// A volume that fits into its cache, in small pieces.
const PACKED: StepWeights =
    StepWeights { write: 80, read: 14, restart: 0, discard: 2, mode: 0, turn: 0, ..STAYING };

const SHAPES: [Shape; 24] = [
    // A bit of everything, three volumes, restarts in between.
    Shape { name: "mixed", volumes: 3, ..PLAIN },
    // Few steps, no restarts of its own: for crash points, each of which restarts.
    Shape {
        name: "points",
        weights: StepWeights { restart: 0, mode: 0, detach: 2, ..MIXED },
        steps: 60,
        depth: 6,
        span: 1024,
        longest: 64,
        fua_one_in: 6,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // A few contended blocks.
    Shape {
        name: "hot",
        weights: StepWeights { flush: 10, discard: 6, zero: 6, mode: 4, ..MIXED },
        steps: 400,
        depth: 16,
        span: 96,
        longest: 24,
        fua_one_in: 5,
        ..PLAIN
    },
    // More data than the cache holds, repeatedly: buckets are reused, nodes split.
    Shape {
        name: "turnover",
        weights: StepWeights {
            write: 70,
            read: 20,
            restart: 0,
            discard: 1,
            zero: 1,
            coincidence: 1,
            ..STAYING
        },
        steps: 2700,
        depth: 16,
        span: 32 * 1024,
        longest: 512,
        fua_one_in: 32,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // Small scattered writes: many keys, deep trees, a busy journal.
    Shape {
        name: "scatter",
        weights: StepWeights { write: 80, read: 12, pause: 2, settle: 1, mode: 0, restart: 1, ..STAYING },
        steps: 1500,
        depth: 16,
        volumes: 2,
        span: 16 * 1024,
        longest: 9,
        fua_one_in: 16,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // Process ends of all kinds, in quick succession.
    Shape {
        name: "restarts",
        weights: StepWeights { restart: 8, mode: 3, ..MIXED },
        steps: 200,
        volumes: 2,
        span: 2048,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // Likewise on a set whose priorities are a chain of buckets, each of which may be torn or
    // missing.
    Shape {
        name: "chains",
        weights: StepWeights { restart: 12, mode: 0, ..MIXED },
        steps: 120,
        span: 2048,
        buckets: CacheSize::Many,
        ..PLAIN
    },
    // Devices that fail, drop what they should flush, and are late; and process ends.
    Shape {
        name: "trouble",
        weights: StepWeights {
            flush: 10,
            mode: 2,
            pause: 8,
            restart: 3,
            trouble: 4,
            readd: 4,
            coincidence: 4,
            ..MIXED
        },
        volumes: 2,
        span: 2048,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // More dirty data than fits, in small pieces: live data is moved together, and everything waits
    // for buckets. A detach would write it all back and free the space.
    Shape {
        name: "scarce",
        weights: StepWeights { write: 70, read: 14, restart: 0, discard: 3, coincidence: 1, ..STAYING },
        steps: 1200,
        depth: 12,
        span: 10 * 1024,
        longest: 160,
        fua_one_in: 16,
        buckets: CacheSize::Scarce,
        tune: taken_up,
        ..PLAIN
    },
    // A tree of two or three levels, with a node that is about to split.
    Shape {
        name: "forest",
        weights: StepWeights { write: 52, read: 36, mode: 0, pause: 2, settle: 1, restart: 0, ..STAYING },
        steps: 400,
        depth: 12,
        span: growth::SPAN,
        longest: 16,
        fua_one_in: 16,
        buckets: CacheSize::Grown,
        tune: half_of_them_prompt,
        ..PLAIN
    },
    // Likewise, restarted again and again: each start is served during the walk of the tree, and
    // many end before the walk does.
    Shape {
        name: "walks",
        weights: StepWeights {
            write: 46,
            read: 34,
            flush: 8,
            mode: 0,
            pause: 3,
            settle: 1,
            restart: 8,
            ..STAYING
        },
        steps: 160,
        depth: 12,
        span: growth::SPAN,
        longest: 16,
        fua_one_in: 8,
        buckets: CacheSize::Grown,
        tune: walked_slowly,
        ..PLAIN
    },
    // A tree of two levels and two volumes, with every kind of request that is possible before the
    // walk has ended, and late operations. Most starts end before their walk does.
    Shape {
        name: "early",
        weights: StepWeights { flush: 8, restart: 8, settle: 1, delay: 6, ..MIXED },
        steps: 160,
        depth: 12,
        volumes: 2,
        span: growth::COPSE_SPAN,
        longest: 16,
        buckets: CacheSize::Copse,
        tune: walked_more_slowly,
        ..PLAIN
    },
    // Volumes that shrink, grow, and lose their disks.
    Shape {
        name: "sizes",
        weights: StepWeights {
            shrink: 5,
            grow: 8,
            forget: 3,
            flush: 8,
            restart: 3,
            detach: 1,
            delay: 3,
            ..MIXED
        },
        steps: 200,
        volumes: 2,
        span: 1024,
        longest: 32,
        buckets: CacheSize::Small,
        ..PLAIN
    },
    // Volumes that live in the cache alone are created, filled, resized and deleted, beside one
    // that has a device.
    Shape { name: "lodgers", ..LODGERS },
    // Likewise where devices fail.
    Shape { name: "lodgers-trouble", weights: StepWeights { trouble: 4, ..LODGERS.weights }, ..LODGERS },
    // Likewise with nearly as much space as can be promised to them, while another volume fills the
    // remaining room with dirty data.
    Shape {
        name: "promised",
        weights: StepWeights { write: 70, create: 3, fill: 1, grow: 1, coincidence: 1, ..STAYING },
        steps: 700,
        depth: 12,
        // The second has room beside part of the first. The third has none, unless the engine
        // promises too much.
        lodgers: &[1792, 1024, 4096],
        span: 4096,
        longest: 64,
        fua_one_in: 16,
        buckets: CacheSize::Fewest,
        tune: taken_up,
        ..PLAIN
    },
    // Dirty data that is never written back, in small pieces that are overwritten: live data is
    // moved together all the time.
    Shape { name: "moves", weights: PACKED, ..MOVES },
    // Likewise on a cache that drops what it should flush and is worn in places.
    Shape {
        name: "moves-trouble",
        weights: StepWeights { trouble: 3, flush: 10, restart: 2, readd: 3, coincidence: 2, ..PACKED },
        failing: FaultTargets::CacheData,
        ..MOVES
    },
    // Writethrough and writearound on backing devices that fail.
    Shape {
        name: "through",
        weights: StepWeights { read: 46, flush: 8, mode: 0, restart: 2, trouble: 5, ..MIXED },
        volumes: 2,
        span: 1024,
        longest: 64,
        buckets: CacheSize::Small,
        failing: FaultTargets::Backing,
        tune: written_through,
        ..PLAIN
    },
    // Steps that belong together, one group after the other, on volumes of both kinds.
    Shape { name: "coincidences", ..COINCIDENCES },
    // Likewise where devices fail.
    Shape {
        name: "coincidences-trouble",
        weights: StepWeights { trouble: 2, ..COINCIDENCES.weights },
        ..COINCIDENCES
    },
    // Volumes that leave the cache with dirty data while slow reads of their backing devices are in
    // flight, and come back. The volumes are small, so that readers and writers meet.
    Shape { name: "leaving", span: 64, longest: 16, ..LEAVING },
    // Likewise where backing devices fail, and their superblock writes with them.
    Shape {
        name: "leaving-trouble",
        weights: StepWeights { trouble: 6, restart: 2, ..LEAVING.weights },
        failing: FaultTargets::Backing,
        ..LEAVING
    },
    // Sets that fail again and again and are reopened, while backing devices drop data and are
    // pulled.
    Shape {
        name: "reopens",
        weights: StepWeights {
            flush: 12,
            mode: 3,
            pause: 12,
            settle: 3,
            restart: 2,
            trouble: 10,
            readd: 2,
            coincidence: 1,
            ..MIXED
        },
        volumes: 2,
        span: 512,
        longest: 48,
        buckets: CacheSize::Small,
        failing: FaultTargets::Sets,
        ..PLAIN
    },
];

/// The base of the `leaving` shapes.
const LEAVING: Shape = Shape {
    weights: StepWeights { detach: 8, attach: 12, delay: 12, mode: 0, clean: 2, readd: 6, ..MIXED },
    span: 256,
    longest: 24,
    buckets: CacheSize::Small,
    tune: behind_a_fast_cache,
    ..PLAIN
};

/// The base of the `coincidences` shapes.
const COINCIDENCES: Shape = Shape {
    weights: StepWeights { write: 40, read: 12, create: 4, coincidence: 12, ..MIXED },
    steps: 250,
    volumes: 2,
    lodgers: &[256],
    span: 1024,
    longest: 48,
    buckets: CacheSize::Small,
    ..PLAIN
};

/// The base of the `lodgers` shapes.
const LODGERS: Shape = Shape {
    weights: StepWeights {
        create: 10,
        delete: 2,
        fill: 1,
        restart: 3,
        readd: 6,
        shrink: 6,
        grow: 6,
        ..MIXED
    },
    steps: 150,
    lodgers: &[256, 64],
    span: 512,
    longest: 32,
    buckets: CacheSize::Small,
    ..PLAIN
};

/// The base of the `moves` shapes.
const MOVES: Shape = Shape {
    steps: 2500,
    depth: 12,
    span: 7 * 1024,
    longest: 64,
    fua_one_in: 16,
    buckets: CacheSize::Fewest,
    tune: kept_dirty,
    ..PLAIN
};

impl Shape {
    /// Returns all shapes.
    #[must_use]
    pub const fn all() -> &'static [Self] {
        &SHAPES
    }

    /// Returns the shape of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.iter().find(|shape| shape.name == name).cloned()
    }

    /// Returns the same shape with another number of steps.
    #[must_use]
    pub const fn with_steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }
}
