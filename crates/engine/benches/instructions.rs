//! Runs requests of 4 KiB through the engine alone, on each path that a request can take.
//! `cargo xtask instructions` runs this program under callgrind, which counts the instructions
//! inside [`callgrind::counted`].
//!
//! Each phase prints a line: its name, the number of counted requests, and what they asked of the
//! devices.

mod alone;

use alone::callgrind;
use alone::devices::{OpCounts, World};
use alone::stage::{Kind, Stage, shuffled};
use bcached_engine::RequestPath;
use bcached_env::rng::Rng;
use std::ffi::CString;

const CACHE_BYTES: u64 = 1 << 30;
const BACKING_BYTES: u64 = 4 << 30;
/// Space at the start of the backing device for its superblock.
const KEPT_BYTES: u64 = 8 << 10;
/// A number of blocks that is more than the cache holds.
const FULL: usize = 290_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo bench` also passes `--bench`.
    let mut words = arguments.iter().map(String::as_str).filter(|word| !word.starts_with("--"));
    let run = words.next().unwrap_or("all");
    let depth: usize = words.next().map_or(1, |word| word.parse().expect("a depth"));
    let mut known = false;
    for (name, script) in
        [("hits", hits as fn(&mut Bench)), ("inserts", inserts), ("evictions", evictions), ("idle", idle)]
    {
        if run == name || run == "all" {
            known = true;
            script(&mut Bench::new(depth));
        }
    }
    assert!(known, "hits, inserts, evictions, idle or all");
}

/// A set, and which of its blocks have been requested.
struct Bench {
    stage: Stage,
    depth: usize,
    rng: Rng,
    /// All blocks of the volume, in random order.
    blocks: Vec<u32>,
    /// How many of `blocks` have been requested, from the first on.
    used: usize,
}

impl Bench {
    fn new(depth: usize) -> Self {
        let world = World::new(CACHE_BYTES, BACKING_BYTES);
        let mut rng = Rng::new(7);
        let blocks = shuffled(BACKING_BYTES - KEPT_BYTES, &mut rng);
        Self { stage: Stage::new(&world, CACHE_BYTES, BACKING_BYTES), depth, rng, blocks, used: 0 }
    }

    /// Returns the next `count` blocks that have not been requested yet.
    fn fresh(&mut self, count: usize) -> Vec<u32> {
        let from = self.used;
        self.used += count;
        self.blocks[from..self.used].to_vec()
    }

    /// Returns `count` blocks drawn at random, with repetition, from the range `among` of `blocks`.
    fn any(&mut self, among: std::ops::Range<usize>, count: usize) -> Vec<u32> {
        let pick = |rng: &mut Rng| usize::try_from(rng.below(among.len() as u64)).expect("an index");
        (0..count).map(|_| self.blocks[among.start + pick(&mut self.rng)]).collect()
    }

    /// Runs a counted phase. At least 99 % of its requests must take the path `way`: a request that
    /// finds the cache momentarily full takes another one.
    fn count(&mut self, name: &str, kind: Kind, blocks: Vec<u32>, way: RequestPath) {
        let (count, before) = (blocks.len() as u64, (self.stage.asked(), self.went(way)));
        let label = CString::new(name).expect("a word");
        callgrind::counted(&label, || self.stage.run(kind, blocks, self.depth));
        let (asked, went) = (self.stage.asked(), self.went(way) - before.1);
        assert!(100 * went >= 99 * count, "{name}: {went} of {count} went by {way:?}");
        println!("phase {name} depth {} requests {count} {}", self.depth, each(before.0, asked, count));
    }

    fn went(&self, way: RequestPath) -> u64 {
        self.stage.status().latencies[0].of(way).requests()
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn each(before: OpCounts, after: OpCounts, count: u64) -> String {
    let of = |figure: fn(&OpCounts) -> u64| (figure(&after) - figure(&before)) as f64 / count as f64;
    format!(
        "cache_reads {:.3} cache_writes {:.3} backing_reads {:.3} backing_writes {:.3} flushes {:.4} metadata_bytes {:.1} \
         waits {:.3} times {:.2}",
        of(|asked| asked.cache_reads),
        of(|asked| asked.cache_writes),
        of(|asked| asked.backing_reads),
        of(|asked| asked.backing_writes),
        of(|asked| asked.flushes),
        of(|asked| asked.metadata_bytes),
        of(|asked| asked.waits),
        of(|asked| asked.times),
    )
}

/// Read misses that fill free space, then hits.
fn hits(bench: &mut Bench) {
    let warm = bench.fresh(20_000);
    bench.stage.run(Kind::Read, warm, bench.depth);
    let blocks = bench.fresh(100_000);
    bench.count("miss_free", Kind::Read, blocks, RequestPath::ReadMiss);
    // A fill is best effort, so some blocks may not be cached yet.
    let warm = bench.blocks[..bench.used].to_vec();
    bench.stage.run(Kind::Read, warm, 1);
    let blocks = bench.any(0..120_000, 50_000);
    bench.count("read_hit_clean", Kind::Read, blocks, RequestPath::ReadHit);
    let warm = bench.blocks[..10_000].to_vec();
    bench.stage.run(Kind::Write, warm, bench.depth);
    let blocks = bench.blocks[10_000..60_000].to_vec();
    bench.count("write_clean_to_dirty", Kind::Write, blocks, RequestPath::WriteBack);
    let blocks = bench.any(0..60_000, 50_000);
    bench.count("read_hit_dirty", Kind::Read, blocks, RequestPath::ReadHit);
    let warm = bench.any(0..60_000, 20_000);
    bench.stage.run(Kind::Write, warm, bench.depth);
    let blocks = bench.any(0..60_000, 200_000);
    bench.count("write_hit_dirty", Kind::Write, blocks, RequestPath::WriteBack);
}

/// Writes of new blocks into free space.
fn inserts(bench: &mut Bench) {
    let warm = bench.fresh(20_000);
    bench.stage.run(Kind::Write, warm, bench.depth);
    let blocks = bench.fresh(120_000);
    bench.count("write_insert_free", Kind::Write, blocks, RequestPath::WriteBack);
}

/// Fills the cache with clean data, then runs requests that evict it.
fn evictions(bench: &mut Bench) {
    let warm = bench.fresh(FULL);
    bench.stage.run(Kind::Read, warm, bench.depth);
    let blocks = bench.fresh(100_000);
    bench.count("miss_evict", Kind::Read, blocks, RequestPath::ReadMiss);
    let warm = bench.fresh(10_000);
    bench.stage.run(Kind::Write, warm, bench.depth);
    let blocks = bench.fresh(100_000);
    bench.count("write_insert_evict", Kind::Write, blocks, RequestPath::WriteBack);
}

/// Counts a phase without requests: the cost of counting itself.
fn idle(bench: &mut Bench) {
    bench.count("nothing", Kind::Read, Vec::new(), RequestPath::ReadHit);
}
