//! Sets that our daemon wrote into every corner of the format, and a kernel as the judge: it reads all, collects garbage, writes, and detaches;
//! then the backing device alone holds the whole volume.
//!
//! That a set has the property it was written for is the offline checker's word, so a change of the engine cannot empty a test.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use bcached_check::{Options, Use};
use bcached_format::prio::{self, BucketPrio, PrioSet};
use bcached_format::{Gen, SetMagic};
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::offline::{Examined, examine};
use bcached_tests::set::{CacheMode, CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;
use bcached_tests::workload::Workload;

/// Turns until a set has its property; a few are enough.
const TURNS_MAX: u64 = 30;
/// A generation that is soon at its end.
const OLD: u8 = 250;
/// Turns that each add a set to a node.
const SETS: u64 = 12;

/// Single blocks all over the first volume.
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
    }
}

/// A set of ours on its way to the kernel.
struct Written {
    ours: Ours,
    uml: Uml,
    set: CacheSet,
}

impl Written {
    /// Makes the set. `None`: the test is skipped.
    fn make(geometry: Geometry) -> Outcome<Option<Self>> {
        let Some(uml) = Uml::find() else { return Ok(None) };
        let ours = Ours::find()?;
        let set = CacheSet::make(geometry, 1, Maker::Ours(ours.program()))?;
        Ok(Some(Self { ours, uml, set }))
    }

    /// Our daemon writes; the checker tells what the set is like then.
    fn write(&mut self, workload: Workload, ending: Ending) -> Outcome<Examined> {
        self.ours.leg(&mut self.set, &[workload], ending).context(workload)?;
        let options = Options { compare_clean: ending == Ending::CleanStop, ..Options::default() };
        let mut models = self.set.models.clone();
        examine(&self.set.cache, &self.set.backings, &mut models, options).context(workload)
    }

    /// The kernel takes the set over, with some writes of its own.
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

/// Every stop writes what a node has gained as another set of its own.
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

/// Four buckets of 128 blocks are the journal; each flush is an entry. Killed, so that the kernel replays across the seam.
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

/// Free buckets are made old by hand, then filled again and again until every bucket's generation, a byte, has gone past 255.
#[test]
fn generations_that_went_round() -> Outcome {
    let geometry = Geometry { mode: CacheMode::Writethrough, ..Geometry::small(8 << 10, 512) };
    let Some(mut written) = Written::make(geometry)? else { return Ok(()) };
    let first = written.write(blocks(&geometry, 1), Ending::CleanStop)?;
    age_free_buckets(&written.set.cache, &first)?;
    let mut seen = Vec::new();
    for seed in 60..60 + TURNS_MAX {
        let workload = Workload {
            seed,
            first_sequence: written.set.models[0].next_sequence(),
            write_sectors_max: 256,
            // Twenty times the cache's size.
            ..blocks(&geometry, geometry.cache_bytes / 512 * 20 / 128)
        };
        let examined = written.write(workload, Ending::CleanStop)?;
        let data = examined.buckets.iter().filter(|bucket| bucket.usage == Use::Data);
        let generations: Vec<u8> = data.map(|bucket| bucket.generation).collect();
        let most = *generations.iter().max().context("no data")?;
        seen.push((generations.len(), most));
        if most < OLD / 2 {
            return written.judge();
        }
    }
    Err(Failure::new(format!("buckets of data and their highest generation, turn by turn: {seen:?}")))
}

/// Gives every free bucket of a set at rest the generation [`OLD`].
fn age_free_buckets(cache: &Path, examined: &Examined) -> Outcome {
    let bucket = examined.buckets.iter().position(|bucket| bucket.usage == Use::Priorities);
    let bucket = bucket.context("no bucket with priorities")?;
    let set = examined.report.set.as_ref().context("no set")?;
    let mut bytes = vec![0; usize::try_from(set.bucket_sectors * 512)?];
    let offset = bucket as u64 * set.bucket_sectors * 512;
    let file = File::options().read(true).write(true).open(cache)?;
    file.read_exact_at(&mut bytes, offset)?;
    let magic = SetMagic::of(set.set_uuid);
    let stored = PrioSet::parse(&bytes, magic)?;
    let (seq, next_bucket) = (stored.seq, stored.next_bucket);
    let entries = stored.entries().zip(&examined.buckets).map(|(entry, bucket)| {
        let generation = if bucket.usage == Use::Free { Gen(OLD) } else { entry.generation };
        BucketPrio { generation, ..entry }
    });
    let entries: Vec<BucketPrio> = entries.collect();
    assert_eq!(entries.len(), examined.buckets.len(), "one set describes all buckets");
    prio::seal(&mut bytes, magic, seq, next_bucket, entries.into_iter());
    Ok(file.write_all_at(&bytes, offset)?)
}
