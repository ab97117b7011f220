//! The same images alternate between a real kernel and our daemon: verified writes and discards on
//! each side, a clean stop or a crash at random. At every turn, the whole content is compared, and
//! afterwards the offline checker examines the set.
//!
//! The seed is printed; `BCACHED_PING_PONG_SEED` repeats a run and `BCACHED_PING_PONG_LEGS` makes
//! it longer.

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::judge;
use bcached_tests::scope::{count_from, number_from};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, Kernel, Ours, Side};
use bcached_tests::uml::Uml;
use bcached_tests::workload::{Model, Random, Workload};

/// Number of writes to a volume in one turn; few enough for a turn of two seconds.
const WRITES: u64 = 400;
/// Size of a flash-only volume, in sectors.
const SCRATCH: u64 = 8192;

/// Returns a turn's writes: a random place for each, sizes from a block to 64 KiB. In half of the
/// turns, some are discards.
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
        discard_every: if random.below(2) == 0 { 2 + random.below(10) } else { 0 },
    }
}

/// Runs one turn: writes to every volume, and a random ending.
fn turn(side: &dyn Side, set: &mut CacheSet, random: &mut Random) -> Outcome<Ending> {
    let mut workloads: Vec<Workload> = (0..set.models.len()).map(|n| workload(set, n, random)).collect();
    let last = workloads.last_mut().context("no volumes")?;
    let ending = if random.below(2) == 0 {
        Ending::CleanStop
    } else {
        // Somewhere in the first half, so that the kill comes while writes are in progress.
        Ending::CrashAfterFlush(1 + random.below(WRITES / last.flush_every / 2))
    };
    side.leg(set, &workloads, ending)?;
    Ok(ending)
}

/// The two sides and the set with which they play.
struct Game {
    uml: Uml,
    ours: Ours,
    set: CacheSet,
    maker_is_ours: bool,
}

impl Game {
    fn new(geometry: Geometry, backings: u64, maker_is_ours: bool) -> Outcome<Option<Self>> {
        let Some(uml) = Uml::find() else { return Ok(None) };
        let ours = Ours::find()?;
        let maker = if maker_is_ours { Maker::Ours(ours.program()) } else { Maker::Tools };
        let set = CacheSet::make(geometry, backings, maker)?;
        Ok(Some(Self { uml, ours, set, maker_is_ours }))
    }

    /// Plays the game. `turns` names the side of each leg, repeatedly; side 0 is the one that did
    /// not make the set.
    fn play(mut self, turns: &[usize], seed: u64) -> Outcome {
        let seed = number_from("BCACHED_PING_PONG_SEED")?.unwrap_or(seed);
        let legs = count_from("BCACHED_PING_PONG_LEGS")?.unwrap_or(6.max(2 * turns.len() as u64));
        println!("BCACHED_PING_PONG_SEED={seed} {:?}", self.set.geometry);
        let mut random = Random::new(seed);
        let kernel = Kernel(&self.uml);
        // The maker of the set does not open it first.
        let sides: [&dyn Side; 2] =
            if self.maker_is_ours { [&kernel, &self.ours] } else { [&self.ours, &kernel] };
        for leg in 0..legs {
            let side = sides[turns[usize::try_from(leg)? % turns.len()]];
            let ending =
                turn(side, &mut self.set, &mut random).context(format_args!("seed {seed}, leg {leg}"))?;
            println!("leg {leg}: {}, {ending:?}", side.name());
            judge(&self.set).context(format_args!("seed {seed}, after leg {leg}"))?;
        }
        kernel.leg(&mut self.set, &[], Ending::CleanStop).context(format_args!("seed {seed}, at last"))
    }
}

#[test]
fn six_legs_with_one_backing_device() -> Outcome {
    let game = Game::new(Geometry::small(64 << 10, 512), 1, false)?;
    game.map_or(Ok(()), |game| game.play(&[0, 1], 101))
}

#[test]
fn six_legs_with_two_backing_devices_made_by_us() -> Outcome {
    let game = Game::new(Geometry::small(512 << 10, 4096), 2, true)?;
    game.map_or(Ok(()), |game| game.play(&[0, 1], 102))
}

/// A cache so large that we keep a reserve in it, for a start that does not wait for the walk. The
/// kernel does not know the reserve and uses those buckets; we must not take the buckets it has
/// used for free ones.
#[test]
fn eight_legs_on_a_cache_with_a_reserve() -> Outcome {
    let small = Geometry::small(16 << 10, 512);
    let geometry = Geometry { cache_bytes: 24_000 * small.bucket_bytes, ..small };
    let game = Game::new(geometry, 1, false)?;
    game.map_or(Ok(()), |game| game.play(&[0, 0, 0, 1], 103))
}

/// Besides a backing device, there are two flash-only volumes: one made by the kernel, one by us.
/// The cache is large enough for all dirty data: a kernel that has no bucket for such a volume
/// waits for minutes, or forever.
#[test]
fn six_legs_with_volumes_in_the_cache_alone() -> Outcome {
    let Some(mut game) = Game::new(Geometry::small(512 << 10, 4096), 1, false)? else { return Ok(()) };
    Kernel(&game.uml).add_volume(&mut game.set, SCRATCH).context("the kernel's volume")?;
    let daemon = Daemon::start(game.ours.program(), &game.set)?;
    daemon.command(game.ours.program(), &["add", "scratch", "--size", &(SCRATCH * 512).to_string()])?;
    game.set.models.push(Model::blank(2, SCRATCH));
    drop(daemon.prove(&mut game.set, 2)?);
    daemon.stop()?;
    game.play(&[0, 1], 104)
}
