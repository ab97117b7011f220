//! Sets that our daemon wrote into every corner of the format, judged by a kernel: it reads
//! everything, collects garbage, writes, and detaches. Then the backing device alone must hold the
//! whole volume.
//!
//! The offline checker confirms that a set has the property it was written for, so a change of the
//! engine cannot make a test meaningless.

use bcached_check::{BucketUse, Options};
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::offline::{Examined, examine};
use bcached_tests::set::{CacheMode, CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;
use bcached_tests::workload::Workload;

/// Maximum number of turns until a set has its property; a few are enough.
const TURNS_MAX: u64 = 30;
/// Number of turns, each of which adds a bset to a node.
const SETS: u64 = 12;

/// Returns a workload that writes single blocks all over the first volume.
fn blocks(geometry: &Geometry, writes: u64) -> Workload {
    Workload {
        seed: 51,
        volume: 0,
        first_sequence: 1,
        first_sector: 0,
        sectors: geometry.volume_sectors,
        block_sectors: geometry.block_sectors(),
        write_sectors_max: geometry.block_sectors(),
        writes,
        flush_every: 500,
        flushes_max: 0,
        read_every: 0,
        discard_every: 0,
    }
}

/// A set of ours to be handed to the kernel.
struct Written {
    ours: Ours,
    uml: Uml,
    set: CacheSet,
}

impl Written {
    /// Makes the set. Returns `None` if the test is skipped.
    fn make(geometry: Geometry) -> Outcome<Option<Self>> {
        let Some(uml) = Uml::find() else { return Ok(None) };
        let ours = Ours::find()?;
        let set = CacheSet::make(geometry, 1, Maker::Ours(ours.program()))?;
        Ok(Some(Self { ours, uml, set }))
    }

    /// Lets our daemon write, and returns the checker's findings about the set.
    fn write(&mut self, workload: Workload, ending: Ending) -> Outcome<Examined> {
        self.ours.leg(&mut self.set, &[workload], ending).context(workload)?;
        let options = Options { compare_clean: ending == Ending::CleanStop, ..Options::default() };
        let mut models = self.set.models.clone();
        examine(&self.set.cache, &self.set.backings, &mut models, options).context(workload)
    }

    /// Lets the kernel take the set over, with some writes of its own.
    fn judge(mut self) -> Outcome {
        let last = Workload {
            seed: 52,
            first_sequence: self.set.models[0].next_sequence(),
            write_sectors_max: 64,
            flush_every: 16,
            read_every: 5,
            ..blocks(&self.set.geometry, 300)
        };
        Kernel(&self.uml).take_over(&mut self.set, &[last]).context("handed over to the kernel")
    }
}

#[test]
fn a_tree_of_three_levels() -> Outcome {
    let geometry = Geometry { cache_bytes: 128 << 20, ..Geometry::small(8 << 10, 512) };
    let Some(mut written) = Written::make(geometry)? else { return Ok(()) };
    for seed in 0..TURNS_MAX {
        let first_sequence = written.set.models[0].next_sequence();
        let workload = Workload { seed, first_sequence, flush_every: 0, ..blocks(&geometry, 10_000) };
        let examined = written.write(workload, Ending::CleanStop)?;
        if examined.report.tree.context("no tree")?.root_level >= 2 {
            return written.judge();
        }
    }
    Err(Failure::new(format!("{TURNS_MAX} turns of 10,000 scattered keys, and the root is below level 2")))
}

/// Every stop writes the keys that a node has gained as another bset.
#[test]
fn ten_sets_in_a_node() -> Outcome {
    let geometry = Geometry::small(512 << 10, 4096);
    let Some(mut written) = Written::make(geometry)? else { return Ok(()) };
    let mut sets_max = 0;
    for seed in 0..SETS {
        let first_sequence = written.set.models[0].next_sequence();
        let workload = Workload { seed, first_sequence, ..blocks(&geometry, 50) };
        let examined = written.write(workload, Ending::CleanStop)?;
        sets_max = examined.report.tree.context("no tree")?.sets_max;
    }
    assert!(sets_max >= 10, "{sets_max}");
    written.judge()
}

/// The journal has four buckets of 128 blocks, and each flush is an entry. The daemon is killed, so
/// that the kernel replays across the wrap-around.
#[test]
fn a_journal_that_went_round() -> Outcome {
    let geometry = Geometry::small(64 << 10, 512);
    let Some(mut written) = Written::make(geometry)? else { return Ok(()) };
    let flushes = 4 * 128 * 3 / 2;
    let workload = Workload { flush_every: 1, ..blocks(&geometry, flushes + 100) };
    let examined = written.write(workload, Ending::CrashAfterFlush(flushes))?;
    let journal = examined.report.journal.context("no journal")?;
    // Entries of the first lap are overwritten: there are fewer than were ever written.
    assert!(journal.newest > journal.entries, "{journal:?}");
    assert!(journal.keys_to_replay > 0, "{journal:?}");
    written.judge()
}

/// The cache is overwritten until the gens of its buckets, one byte each, have wrapped around:
/// about 260 turnovers.
#[test]
fn generations_that_went_round() -> Outcome {
    let geometry = Geometry { mode: CacheMode::Writethrough, ..Geometry::small(8 << 10, 512) };
    let Some(mut written) = Written::make(geometry)? else { return Ok(()) };
    let mut seen: Vec<(u8, u8)> = Vec::new();
    for seed in 60..60 + TURNS_MAX {
        let workload = Workload {
            seed,
            first_sequence: written.set.models[0].next_sequence(),
            write_sectors_max: 256,
            // The number of clean copies that may wait for a flush is limited.
            flush_every: 10,
            // Twenty times the cache's size.
            ..blocks(&geometry, geometry.cache_bytes / 512 * 20 / 128)
        };
        let examined = written.write(workload, Ending::CleanStop)?;
        let data = examined.buckets.iter().filter(|bucket| bucket.usage == BucketUse::Data);
        let mut generations: Vec<u8> = data.map(|bucket| bucket.generation).collect();
        generations.sort_unstable();
        let least = *generations.first().context("no data")?;
        let middle = generations[generations.len() / 2];
        let was_late = seen.iter().any(|(_, middle)| *middle > 200);
        seen.push((least, middle));
        if was_late && middle < 100 {
            return written.judge();
        }
    }
    Err(Failure::new(format!(
        "the least and the middle generation of buckets of data, turn by turn: {seen:?}"
    )))
}
