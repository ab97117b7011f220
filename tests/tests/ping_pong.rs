//! The same images to and fro between a real kernel and our daemon: verified writes on each side, clean stop or crash by dice, the whole
//! content compared at every turn.
//!
//! The seed is printed; `BCACHED_PING_PONG_SEED` repeats a run and `BCACHED_PING_PONG_LEGS` makes it longer.

use bcached_check::Options;
use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::examine;
use bcached_tests::scope::{count_from, number_from};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Ending, Kernel, Ours, Side};
use bcached_tests::uml::Uml;
use bcached_tests::workload::{Random, Workload};

/// Writes of one turn on one volume; short enough for a turn of two seconds.
const WRITES: u64 = 400;

/// A turn's writes: a fresh place for each, sizes from a block to 64 KiB.
fn workload(set: &CacheSet, volume: usize, random: &mut Random) -> Workload {
    let model = &set.models[volume];
    Workload {
        seed: random.next(),
        volume: model.volume(),
        first_sequence: model.next_sequence(),
        first_sector: 0,
        sectors: model.sectors(),
        block_sectors: set.geometry.block_sectors(),
        write_sectors_max: 128,
        writes: WRITES,
        flush_every: 1 + random.below(40),
        flushes_max: 0,
        read_every: 4,
    }
}

/// One turn: writes to every volume, an end by dice.
fn turn(side: &dyn Side, set: &mut CacheSet, random: &mut Random) -> Outcome<Ending> {
    let mut workloads: Vec<Workload> = (0..set.models.len()).map(|n| workload(set, n, random)).collect();
    let last = workloads.last_mut().context("no volumes")?;
    let ending = if random.below(2) == 0 {
        Ending::CleanStop
    } else {
        // Somewhere in the first half, so that the kill comes while writes go on.
        Ending::CrashAfterFlush(1 + random.below(WRITES / last.flush_every / 2))
    };
    side.leg(set, &workloads, ending)?;
    Ok(ending)
}

/// `turns`: who comes when, again and again; the first side is who did not make the set.
fn ping_pong(geometry: Geometry, backings: u64, maker_is_ours: bool, turns: &[usize], seed: u64) -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let ours = Ours::find()?;
    let seed = number_from("BCACHED_PING_PONG_SEED")?.unwrap_or(seed);
    let legs = count_from("BCACHED_PING_PONG_LEGS")?.unwrap_or(6.max(2 * turns.len() as u64));
    println!("BCACHED_PING_PONG_SEED={seed} {geometry:?}");
    let mut random = Random::new(seed);
    let maker = if maker_is_ours { Maker::Ours(ours.program()) } else { Maker::Tools };
    let mut set = CacheSet::make(geometry, backings, maker)?;
    let kernel = Kernel(&uml);
    // Whoever made the set does not open it first.
    let sides: [&dyn Side; 2] = if maker_is_ours { [&kernel, &ours] } else { [&ours, &kernel] };
    for leg in 0..legs {
        let side = sides[turns[usize::try_from(leg)? % turns.len()]];
        let ending = turn(side, &mut set, &mut random).context(format_args!("seed {seed}, leg {leg}"))?;
        println!("leg {leg}: {}, {ending:?}", side.name());
        if ending == Ending::CleanStop {
            // A daemon's crash leaves its note to be replayed, a kernel's may leave clean extents behind the backing device.
            let set = set.duplicate()?;
            examine(&set.cache, &set.backings, &mut set.models.clone(), Options::default())
                .context(format_args!("seed {seed}, after leg {leg}"))?;
        }
    }
    kernel.leg(&mut set, &[], Ending::CleanStop).context(format_args!("seed {seed}, at last"))
}

#[test]
fn six_legs_with_one_backing_device() -> Outcome {
    ping_pong(Geometry::small(64 << 10, 512), 1, false, &[0, 1], 101)
}

#[test]
fn six_legs_with_two_backing_devices_made_by_us() -> Outcome {
    ping_pong(Geometry::small(512 << 10, 4096), 2, true, &[0, 1], 102)
}

/// A cache so large that we keep a reserve in it for a start that does not wait for the walk. The kernel knows nothing of that, and
/// uses those buckets; what it has used we must not take for free.
#[test]
fn eight_legs_on_a_cache_with_a_reserve() -> Outcome {
    let small = Geometry::small(16 << 10, 512);
    let geometry = Geometry { cache_bytes: 24_000 * small.bucket_bytes, ..small };
    ping_pong(geometry, 1, false, &[0, 0, 0, 1], 103)
}
