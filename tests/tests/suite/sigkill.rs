//! The daemon dies by SIGKILL under load, again and again: several clients write at once, and
//! everything is verified.
//!
//! As long as the machine stays up, no acknowledged write may be lost, flushed or not (the note
//! holds what the journal does not). After each kill, the images are consistent by themselves, and
//! the next daemon serves every acknowledged write. `BCACHED_KILLS` sets the number of kills,
//! `BCACHED_SEED` the seed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::{examine, examine_structure};
use bcached_tests::scope::{count_from, number_from};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ours};
use bcached_tests::workload::{Fate, Random, Workload};

/// Number of clients, each with its own part of the volume.
const CLIENTS: u64 = 4;
/// Maximum number of requests of all clients before a kill.
const REQUESTS_MAX: u64 = 1_000;

/// What a client does until the kill: writes of 4k to 256k, a quarter as many reads, and occasional
/// flushes.
fn workload(set: &CacheSet, client: u64, random: &mut Random) -> Workload {
    let model = &set.models[0];
    let sectors = model.sectors() / CLIENTS;
    Workload {
        seed: random.next(),
        volume: 0,
        first_sequence: model.next_sequence() + client * 2 * REQUESTS_MAX,
        first_sector: client * sectors,
        sectors,
        block_sectors: 8,
        write_sectors_max: 512,
        writes: 2 * REQUESTS_MAX,
        flush_every: 1 + random.below(60),
        flushes_max: 0,
        read_every: 4,
        discard_every: 0,
    }
}

/// One life of the daemon: it must serve the right content, serves all clients, and dies with one
/// of their requests in flight.
fn live_and_die(ours: &Ours, set: &mut CacheSet, random: &mut Random) -> Outcome {
    let daemon = Daemon::start(ours.program(), set)?;
    drop(daemon.prove(set, 0)?);
    let workloads: Vec<Workload> = (0..CLIENTS).map(|client| workload(set, client, random)).collect();
    // All clients connect before the first begins: the kill may come with the first request.
    let mut clients = Vec::new();
    for workload in &workloads {
        clients.push((workload, daemon.connect(set, 0)?));
    }
    let left = AtomicU64::new(1 + random.below(REQUESTS_MAX));
    let one = |workload: &Workload, mut client| {
        let mut doom = || left.fetch_sub(1, Ordering::Relaxed) == 1;
        daemon.run_until_killed(workload, &mut client, &mut doom)
    };
    let answered: Vec<_> = thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = clients
            .into_iter()
            .map(|(workload, client)| scope.spawn(move || one(workload, client)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
    });
    daemon.crash(set)?;
    for (workload, answered) in workloads.iter().zip(answered) {
        set.models[0].apply(workload, Fate::KilledAfterWrites(answered.context(workload)?));
    }
    examine_structure(&set.cache, &set.backings)?;
    Ok(())
}

#[test]
fn everything_acknowledged_survives_the_daemon() -> Outcome {
    let ours = Ours::find()?;
    let kills = count_from("BCACHED_KILLS")?.unwrap_or(8);
    let seed = number_from("BCACHED_SEED")?.unwrap_or(71);
    let mut random = Random::new(seed);
    let mut set = CacheSet::make(Geometry::small(64 << 10, 4096), 1, Maker::Ours(ours.program()))?;
    for kill in 1..=kills {
        live_and_die(&ours, &mut set, &mut random).context(format_args!("seed {seed}, kill {kill}"))?;
    }
    let daemon = Daemon::start(ours.program(), &set)?;
    drop(daemon.prove(&mut set, 0).context(format_args!("seed {seed}, at last"))?);
    daemon.stop()?;
    examine(&set.cache, &set.backings, &mut set.models, bcached_check::Options::default())?;
    Ok(())
}
