//! Measures how much memory the engine needs for a cached block of 4 KiB, to the byte, with a
//! counting allocator. `cargo xtask instructions` prints it.
//!
//! For each cache size, and each order in which the blocks arrive, a new set is created and filled,
//! and then reports how much of that memory its tree nodes take. The fixed part is what the largest
//! and the smallest cache have in common.

mod alone;

use alone::devices::World;
use alone::stage::{Kind, Stage, shuffled};
use bcached_env::rng::Rng;
use cap::Cap;
use std::alloc::System;
use std::process::ExitCode;

#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

/// The limit: a twentieth of what Open CAS needs (41 bytes a block).
const BYTES_A_BLOCK_MAX: f64 = 2.05;
fn main() -> ExitCode {
    println!("\nMemory of the engine, the cache full of clean data\n");
    println!(
        "| cache | blocks come | bytes a block of 4 KiB | nodes of the tree | all else | an empty set, KiB |"
    );
    println!("|---|---|---:|---:|---:|---:|");
    let mut reached = true;
    for (gib, is_random) in [(16, false), (4, false), (4, true)] {
        reached &= measure(gib, is_random) <= BYTES_A_BLOCK_MAX;
    }
    if reached { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

/// Fills a cache of `gib` GiB, prints its row of the table, and returns the bytes of memory a
/// block.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure(gib: u64, is_random: bool) -> f64 {
    let cache_bytes = gib << 30;
    let world = World::new(cache_bytes, 2 * cache_bytes);
    let count = usize::try_from(cache_bytes / 4096).expect("fits in memory");
    let nothing = HEAP.allocated();
    let mut stage = Stage::new(&world, cache_bytes, 2 * cache_bytes);
    let empty = HEAP.allocated() - nothing;
    let mut blocks = shuffled(2 * cache_bytes - (8 << 10), &mut Rng::new(7));
    blocks.truncate(count);
    if !is_random {
        blocks = (0..u32::try_from(count).expect("few")).collect();
    }
    stage.run(Kind::Read, blocks, if is_random { 32 } else { 1 });
    let (full, status) = (HEAP.allocated() - nothing, stage.status());
    let each = |bytes: u64| bytes as f64 / count as f64;
    println!(
        "| {gib} GiB | {} | {:.2} | {:.2} | {:.2} | {} |",
        if is_random { "at random places" } else { "in order" },
        each(full as u64),
        each(status.node_bytes),
        each(full as u64 - status.node_bytes),
        empty >> 10,
    );
    each(full as u64)
}
