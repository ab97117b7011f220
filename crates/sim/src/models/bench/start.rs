//! B10: the time from a crash until a volume is served, with a cache full of small extents. Also
//! measured: a second crash before the tree has been walked, and a crash with keys for all leaves
//! in the journal.

use super::{BenchmarkRow, BenchmarkScale};
use crate::models::bed::{BedConfig, CACHE, TestBed};
use crate::models::load::{AccessPattern, Load, StopAfter};
use crate::models::ssd;

/// Bound of memory usage, in MiB.
const MEMORY_MIB: f64 = 256.0;
/// Bound of the time to the first answer, in seconds.
const ANSWER_S: f64 = 1.0;
/// Random writes before the crash with a full journal.
const JOURNALLED: u64 = 100_000;
/// CPU time of a kernel's check per extent, in nanoseconds, as measured
/// (`tests/tests/suite/kernel_check.rs`).
const KERNEL_NS: f64 = 113.0;
/// A kernel's check must take at least this many times as long as ours.
const KERNEL_TIMES: f64 = 20.0;

pub fn run(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    let full = scale.of(64 << 21, 1 << 19);
    let small = measure(full / 4);
    let large = measure(full);
    let mut rows = rows("B10", &large);
    let extents = large.dirty_gib * f64::from(1 << 18);
    let times = extents * KERNEL_NS / 1e9 / large.processor;
    rows.extend([
        BenchmarkRow::at_least("B10", "time of a kernel's check / that CPU time", times, KERNEL_TIMES, ""),
        BenchmarkRow::tells("B10", "first answer, a quarter of the size", small.answers[0], "s"),
        BenchmarkRow::tells("B10", "the tree is walked, a quarter of the size", small.walked, "s"),
    ]);
    rows
}

/// The same at four times the size, to see what grows.
pub fn run_large(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    rows("B10x4", &measure(scale.of(256 << 21, 1 << 20)))
}

/// The same at eight times the size. It takes 14 GiB of memory.
pub fn run_huge(scale: BenchmarkScale) -> Vec<BenchmarkRow> {
    rows("B10x8", &measure(scale.of(512 << 21, 1 << 21)))
}

/// Returns the figures that are reported for every size.
fn rows(id: &'static str, measured: &StartTimes) -> Vec<BenchmarkRow> {
    let at_most =
        |quantity: &str, measured, bound, unit| BenchmarkRow::at_most(id, quantity, measured, bound, unit);
    let tells = |quantity: &str, measured, unit| BenchmarkRow::tells(id, quantity, measured, unit);
    vec![
        at_most("first answer after a crash", measured.answers[0], ANSWER_S, "s"),
        at_most("first answer after a second crash, during the walk", measured.answers[1], ANSWER_S, "s"),
        at_most("maximum memory of the whole set", measured.memory_mib, MEMORY_MIB, "MiB"),
        at_most("first answer with 100,000 random writes in the journal", measured.journalled, ANSWER_S, "s"),
        tells("maximum memory of nodes", measured.nodes_mib, "MiB"),
        tells("dirty data", measured.dirty_gib, "GiB"),
        tells("read from the cache device by the first answer", measured.read_mib, "MiB"),
        tells("the tree is walked, after the second crash", measured.walked, "s"),
        tells("first answer, last used by a kernel", measured.of_a_kernel, "s"),
        tells("CPU time of that", measured.processor, "s"),
    ]
}

/// The figures of a set of one size. Times are in seconds.
struct StartTimes {
    /// From each of the first two crashes to the first answer.
    answers: [f64; 2],
    /// From the second crash to the end of the walk.
    walked: f64,
    /// From a third crash to the first answer, with keys for all leaves in the journal.
    journalled: f64,
    /// From a fourth crash, after use by a kernel, to the first answer; and the CPU time of that.
    of_a_kernel: f64,
    processor: f64,
    /// Peak of all that the engine has allocated: from a crash to the end of the walk, and from the
    /// start after use by a kernel to the first answer.
    memory_mib: f64,
    nodes_mib: f64,
    dirty_gib: f64,
    read_mib: f64,
}

/// Measures a cache of `cache` sectors.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure(cache: u64) -> StartTimes {
    let mut setting = BedConfig::new(ssd::SsdModel::sata_plp(), cache, 4 * cache);
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    // If more of the cache were dirty, writes would bypass it. No two extents are adjacent, or they
    // would be merged. They are written in order because that builds the same tree sooner.
    let load = Load::random_writes(4 * cache, 32, StopAfter::Requests(cache / 8 * 85 / 100));
    bed.run(&Load { places: AccessPattern::Strided(4), ..load });
    let dirty_gib = bed.status().dirty_sectors as f64 / f64::from(1 << 21);
    let one = Load { read_percent: 100, until: StopAfter::Requests(1), depth: 1, ..load };
    let (mut answers, mut read_mib) = ([0.0; 2], 0.0);
    for answer in &mut answers {
        let read_before = bed.traffic(CACHE).read_bytes;
        let opened;
        (bed, opened) = bed.crash_and_reopen();
        let first = bed.run(&one);
        read_mib = (bed.traffic(CACHE).read_bytes - read_before) as f64 / f64::from(1 << 20);
        *answer = (opened + first.nanoseconds) as f64 / 1e9;
    }
    let (set, began) = (bed.set.clone(), bed.now());
    bed.block_on(async move { set.walked().await }).expect("the tree is intact");
    let walked = (bed.now() - began) as f64 / 1e9 + answers[1];
    let nodes_mib = bed.status().node_bytes_max as f64 / f64::from(1 << 20);
    let mut memory = bed.heap();
    assert!(memory >= bed.status().node_bytes, "nodes are a part of it");
    let again = Load::random_writes(4 * cache, 32, StopAfter::Requests(JOURNALLED.min(cache / 80)));
    bed.run(&again);
    let (mut bed, opened) = bed.crash_and_reopen();
    let journalled = (opened + bed.run(&one).nanoseconds) as f64 / 1e9;
    let set = bed.set.clone();
    bed.block_on(async move { set.walked().await }).expect("the tree is intact");
    memory = memory.max(bed.heap());
    let busy_before = bed.world.borrow().cpu_ns();
    let (mut bed, opened) = bed.crash_and_reopen_of_a_kernel();
    let of_a_kernel = (opened + bed.run(&one).nanoseconds) as f64 / 1e9;
    let processor = (bed.world.borrow().cpu_ns() - busy_before) as f64 / 1e9;
    let memory_mib = memory.max(bed.heap()) as f64 / f64::from(1 << 20);
    StartTimes {
        answers,
        walked,
        journalled,
        of_a_kernel,
        processor,
        memory_mib,
        nodes_mib,
        dirty_gib,
        read_mib,
    }
}
