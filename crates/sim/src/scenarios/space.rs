//! Buckets, their generations, and when they may be reused.

use super::bench::quiet;
use super::image::{cached_at, change_generations};
use super::stage::{
    BACK, FLUSH, MILLISECOND, THROUGH, bench, keep, packed, pause, read, small, trouble, unstarted, write,
    write_to,
};
use crate::disk::{DiskFault, OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::scenario::ScenarioRig;
use crate::system::{Geometry, Mode, engine::Engine};
use crate::workload::Step;
use bcached_engine::Options;
use bcached_format::Gen;
use std::collections::BTreeSet;
use std::rc::Rc;

super::scenarios! {
    include_str!("space.rs"),
    a_bucket_is_not_reused_while_a_large_read_of_it_is_in_flight,
    a_pointer_from_before_the_generations_went_round_is_not_believed,
    a_bucket_whose_last_dirty_extent_was_moved_away_is_reused,
    a_stop_waits_for_the_allocator_before_it_ends_the_journal,
}

/// A backup slowly reads a large file from the cache, while other clients fill the cache with new
/// data. The file's bucket is reused in the middle, and the backup contains a part of another file.
/// (Depending on the version, kernels notice and read again, return an error, or did not notice.)
fn a_bucket_is_not_reused_while_a_large_read_of_it_is_in_flight() {
    for seed in 0..4 {
        let geometry = Geometry { buckets: 520, ..small(vec![16384], THROUGH) };
        let (mut stage, _) = unstarted(geometry, quiet(), seed);
        stage.start().unwrap();
        keep(&mut stage, 0..512);
        pause(&mut stage, 20).unwrap();
        let middle = stage.device(0).model.latency_ns;
        // Not so slow that the longest latency of a device, forty times as long, exceeds what
        // waiting requests allow.
        stage.device(0).model.latency_ns = 400 * MILLISECOND;
        let turnover = stage.play(move |client| async move {
            client.go(read(0..512)).await;
            client.go(Step::Pause(1)).await;
            client.world().borrow_mut().devices[0].model.latency_ns = middle;
            for start in (1024..16384).step_by(128) {
                client.go(write(start..start + 128)).await;
            }
            client.settle().await;
            Ok(())
        });
        turnover.unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        stage.verify().unwrap();
    }
}

/// A generation has eight bits, and a cache that is used for years wraps it around. Keys from long
/// ago that were not accessed since must not pass for current ones: their buckets hold other data.
/// Proves invariant D12.
fn a_pointer_from_before_the_generations_went_round_is_not_believed() {
    let geometry = Geometry { buckets: 520, ..packed(vec![4096, 32768], THROUGH) };
    let (mut stage, _) = bench(geometry, quiet());
    stage.ask(Step::Mode { volume: 1, mode: Mode::Writethrough }).unwrap();
    // The old keys have a leaf of their own, so that writes elsewhere do not touch it.
    stage.together((0..600).map(|place| write(place * 3..place * 3 + 1)).collect()).unwrap();
    stage.ask(FLUSH).unwrap();
    pause(&mut stage, 20).unwrap();
    stage.stop().unwrap();
    // All buckets have been reused since, so often that a few more times are too many.
    let used: BTreeSet<u64> = cached_at(&mut stage).iter().map(|sector| sector / 16).collect();
    change_generations(&mut stage, |bucket, generation| {
        if used.contains(&bucket) { Gen(generation.0.wrapping_add(94)) } else { generation }
    });
    stage.start().unwrap();
    for turn in 0..170 {
        let start = 2048 * (turn % 15);
        stage.ask(write_to(1, start..start + 2048)).unwrap();
    }
    stage.verify().unwrap();
    stage.stop().unwrap();
}

/// A cache is full of dirty data, and in many buckets only one old extent is still live. These
/// extents are moved together and their buckets reused; the power fails as the first of those is
/// written. Whatever survives of that, the old extent is there: in its new place, with a key that
/// points to it. Proves invariant D10.
fn a_bucket_whose_last_dirty_extent_was_moved_away_is_reused() {
    // Number of buckets with one old extent. With the other data they leave so few free buckets
    // that data is moved at once.
    const SPARSE: u64 = 300;
    let subsets =
        [Survivors::Nothing, Survivors::Everything].into_iter().chain((0..6).map(Survivors::Seeded));
    for survivors in subsets {
        let geometry = Geometry { buckets: 520, ..small(vec![32768], BACK) };
        let full = Options { cutoff_writeback: 100, cutoff_cache_add: 101, ..quiet() };
        let (mut stage, bench) = unstarted(geometry, full, 1);
        stage.start().unwrap();
        // Two blocks in each bucket, not adjacent in the volume; then the second of each is
        // overwritten.
        let block = |place: u64| write(place * 16..place * 16 + 8);
        for place in 0..2 * SPARSE {
            stage.ask(block(place)).unwrap();
        }
        stage.together((0..SPARSE).map(|place| block(2 * place + 1)).collect()).unwrap();
        stage.ask(FLUSH).unwrap();
        assert_eq!(bench.status().stats.moved_bytes, 0, "there is still room");
        // Only the mover reads so much at once: clients only write.
        let mut emptied: BTreeSet<u64> = BTreeSet::new();
        let reused = move |op: &OpView| {
            let bucket = op.sectors.start / 16;
            if op.disk.0 == 0 && op.kind == OpKind::Read && op.sectors.end - op.sectors.start == 8 {
                emptied.insert(bucket);
            }
            let is_write = op.disk.0 == 0 && op.kind == OpKind::Write && op.completed;
            is_write && emptied.contains(&bucket)
        };
        let more = (2 * SPARSE..2 * SPARSE + 600).map(block).collect();
        stage.crash_at(more, reused, Crash::PowerCut, survivors).unwrap();
        stage.start().unwrap_or_else(|fault| panic!("{survivors}: {fault}"));
        stage.verify().unwrap_or_else(|fault| panic!("{survivors}: {fault}"));
        stage.stop().unwrap();
    }
}

/// A set is stopped while the allocator stores generations on a slow device. The allocator needs
/// the journal for that, so the journal must go on until the allocator has ended (found as a stop
/// that never ended).
fn a_stop_waits_for_the_allocator_before_it_ends_the_journal() {
    // Proves invariant L1.
    const LATE: u64 = 1000 * MILLISECOND;
    let mut met = 0;
    for count in 20..40 {
        let small = small(vec![4096], BACK);
        let mut stage = ScenarioRig::new(Rc::new(Engine), small, count);
        stage.start().expect("the system opens");
        // Superblock, four journal buckets, then the two chains of priorities.
        let chains = 6 * 16..8 * 16;
        trouble(&mut stage, 0, OpKind::Write, chains, 1, DiskFault::Late(LATE));
        stage.together((0..count).map(|place| write(place * 16..(place + 1) * 16)).collect()).unwrap();
        let before = stage.rig().figures().virtual_ns;
        stage.stop().unwrap_or_else(|fault| panic!("after {count} writes: {fault}"));
        met += u32::from(stage.rig().figures().virtual_ns - before > LATE / 2);
    }
    assert!(met > 0, "no stop happened while the allocator was at work");
}
