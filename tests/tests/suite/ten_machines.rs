//! Ten virtual machines on one cache, as processes: one daemon, ten backing devices in one set,
//! write-back mode, no bypass, and ten NBD clients at once. The daemon dies by SIGKILL under this
//! load, again and again, and the clients reconnect to the next one. Finally, the daemon stops
//! cleanly, the offline checker examines the set, and a kernel serves the result. The simulator
//! runs the same with power cuts (`sim machines`).
//!
//! `BCACHED_MACHINE_KILLS` sets the number of kills, `BCACHED_SEED` the seed.
//! `BCACHED_MACHINES_CSV` names a file for the amount of dirty data and the read hits of each
//! volume over time.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bcached_check::Options;
use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::{examine, examine_structure};
use bcached_tests::scope::{count_from, number_from};
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, KEEP_DIRTY, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;
use bcached_tests::workload::{Fate, Random, Workload};

const MACHINES: usize = 10;
/// Maximum number of requests of all machines before a kill.
const REQUESTS_MAX: u64 = 4_000;
/// Number of writes of a machine before the clean stop.
const LAST_WRITES: u64 = 200;
/// Interval between two status queries.
const PAUSE: Duration = Duration::from_millis(50);
/// Settings in the section of each volume.
const CACHE_ALL: &str = "sequential_cutoff = 0";

/// The load of a machine.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// The longest write, in sectors.
    write_sectors_max: u64,
    flush_every: u64,
    read_every: u64,
    discard_every: u64,
}

const DATABASE: Load =
    Load { name: "database", write_sectors_max: 16, flush_every: 4, read_every: 1, discard_every: 0 };
const FILES: Load =
    Load { name: "files", write_sectors_max: 512, flush_every: 60, read_every: 2, discard_every: 9 };
const DESKTOP: Load =
    Load { name: "desktop", write_sectors_max: 64, flush_every: 20, read_every: 1, discard_every: 30 };
const LOG: Load = Load { name: "log", write_sectors_max: 8, flush_every: 1, read_every: 8, discard_every: 0 };
const BACKUP: Load =
    Load { name: "backup", write_sectors_max: 2048, flush_every: 100, read_every: 20, discard_every: 0 };
const LOADS: [Load; MACHINES] =
    [DATABASE, DATABASE, DATABASE, FILES, FILES, FILES, DESKTOP, DESKTOP, LOG, BACKUP];

impl Load {
    fn workload(self, set: &CacheSet, machine: usize, random: &mut Random, writes: u64) -> Workload {
        Workload {
            seed: random.next(),
            write_sectors_max: self.write_sectors_max,
            flush_every: self.flush_every,
            read_every: self.read_every,
            discard_every: self.discard_every,
            ..set.further(machine, 0, writes)
        }
    }
}

fn workloads(set: &CacheSet, random: &mut Random, writes: u64) -> Vec<Workload> {
    LOADS.iter().enumerate().map(|(machine, load)| load.workload(set, machine, random, writes)).collect()
}

/// The status over time.
struct Diary {
    began: Instant,
    csv: String,
    /// Volumes that had dirty data, and those that had read hits, at some time.
    dirty: BTreeSet<usize>,
    hit: BTreeSet<usize>,
}

impl Diary {
    fn new() -> Self {
        let csv = "seconds,life,volume,load,dirty_bytes,hits,misses,hit_percent\n".to_owned();
        Self { began: Instant::now(), csv, dirty: BTreeSet::new(), hit: BTreeSet::new() }
    }

    fn enter(&mut self, life: u64, status: &serde_json::Value) -> Outcome {
        for (machine, load) in LOADS.iter().enumerate() {
            let volume = volume(status, machine)?;
            let number = |name: &str| volume[name].as_u64().context(format_args!("no {name} of v{machine}"));
            let (dirty, hits, misses) = (number("dirty_bytes")?, number("hits")?, number("misses")?);
            let percent = (hits * 100).checked_div(hits + misses).map_or(String::new(), |n| n.to_string());
            let (seconds, load) = (self.began.elapsed().as_secs_f64(), load.name);
            writeln!(self.csv, "{seconds:.3},{life},v{machine},{load},{dirty},{hits},{misses},{percent}")?;
            self.dirty.extend((dirty > 0).then_some(machine));
            self.hit.extend((hits > 0).then_some(machine));
        }
        Ok(())
    }

    fn write(&self) -> Outcome {
        if let Some(path) = std::env::var_os("BCACHED_MACHINES_CSV") {
            std::fs::write(path, &self.csv)?;
        }
        Ok(())
    }
}

fn volume(status: &serde_json::Value, machine: usize) -> Outcome<&serde_json::Value> {
    let name = format!("v{machine}");
    let volumes = status["volumes"].as_array().context("no volumes")?;
    volumes.iter().find(|volume| volume["name"] == name.as_str()).context(name)
}

/// Queries the status until `over`, or until there is none: the daemon may die at any moment.
fn watch(daemon: &Daemon, program: &Path, life: u64, over: &AtomicBool, diary: &Mutex<Diary>) -> Outcome {
    while !over.load(Ordering::Relaxed) {
        let Ok(status) = daemon.status(program) else { return Ok(()) };
        diary.lock().expect("nobody panics with it").enter(life, &status)?;
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Runs `work` with each machine's client, all at the same time, while another thread watches the
/// status.
fn at_once<T: Send>(
    (daemon, program, life): (&Daemon, &Path, u64),
    (set, workloads): (&CacheSet, &[Workload]),
    diary: &Mutex<Diary>,
    work: impl Fn(&Workload, bcached_tests::nbd::Client) -> T + Sync,
) -> Outcome<Vec<T>> {
    let mut clients = Vec::new();
    for (machine, workload) in workloads.iter().enumerate() {
        clients.push((workload, daemon.connect(set, machine)?));
    }
    let (over, work) = (AtomicBool::new(false), &work);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(daemon, program, life, &over, diary));
        let machines: Vec<_> = clients
            .into_iter()
            .map(|(workload, client)| scope.spawn(move || work(workload, client)))
            .collect();
        let done = machines.into_iter().map(|machine| machine.join().expect("no client panics")).collect();
        over.store(true, Ordering::Relaxed);
        watcher.join().expect("it does not panic")?;
        Ok(done)
    })
}

fn prove_all(daemon: &Daemon, set: &mut CacheSet) -> Outcome {
    for (machine, load) in LOADS.iter().enumerate() {
        drop(daemon.prove(set, machine).context(format_args!("v{machine}, {}", load.name))?);
    }
    Ok(())
}

/// The state that the daemon's lives have in common.
struct Hall<'a> {
    ours: &'a Ours,
    set: CacheSet,
    random: Random,
    diary: Mutex<Diary>,
}

/// A life of the daemon that ends with one of the machines' requests in flight.
fn live_and_die(hall: &mut Hall<'_>, life: u64) -> Outcome {
    let Hall { ours, set, random, diary } = hall;
    let daemon = Daemon::configured(ours.program(), set, CACHE_ALL)?;
    prove_all(&daemon, set)?;
    let workloads = workloads(set, random, 2 * REQUESTS_MAX);
    let left = AtomicU64::new(1 + random.below(REQUESTS_MAX));
    let answered =
        at_once((&daemon, ours.program(), life), (set, &workloads), diary, |workload, mut client| {
            let mut doom = || left.fetch_sub(1, Ordering::Relaxed) == 1;
            daemon.run_until_killed(workload, &mut client, &mut doom)
        })?;
    daemon.crash(set)?;
    for (machine, (workload, answered)) in workloads.iter().zip(answered).enumerate() {
        let answered = answered.context(format_args!("v{machine}, {workload}"))?;
        set.models[machine].apply(workload, Fate::KilledAfterWrites(answered));
    }
    examine_structure(&set.cache, &set.backings)?;
    Ok(())
}

/// The last life: all machines finish their work, and the daemon stops cleanly. Its last report of
/// each volume's dirty data must equal the checker's count.
fn live_and_stop(hall: &mut Hall<'_>, life: u64) -> Outcome {
    let Hall { ours, set, random, diary } = hall;
    let program = ours.program();
    let daemon = Daemon::configured(program, set, KEEP_DIRTY)?;
    prove_all(&daemon, set)?;
    let workloads = workloads(set, random, LAST_WRITES);
    let fates = at_once((&daemon, program, life), (set, &workloads), diary, |workload, mut client| {
        daemon.run(workload, &mut client)
    })?;
    for (machine, (workload, fate)) in workloads.iter().zip(fates).enumerate() {
        set.models[machine].apply(workload, fate.context(format_args!("v{machine}"))?);
    }
    let status = daemon.status(program)?;
    daemon.stop()?;
    let report = examine(&set.cache, &set.backings, &mut set.models, Options::default())?.report;
    let mut dirty = 0;
    for machine in 0..MACHINES {
        let of_status = volume(&status, machine)?;
        let uuid = of_status["uuid"].as_str().context("no UUID")?;
        let counted = report.volumes.iter().find(|volume| volume.uuid.to_string() == uuid).context(uuid)?;
        assert_eq!(of_status["dirty_bytes"].as_u64(), Some(counted.dirty_sectors * 512), "of v{machine}");
        dirty += counted.dirty_sectors;
    }
    assert!(dirty > 0, "nothing is left for a kernel to find");
    Ok(())
}

#[test]
fn ten_machines_lose_nothing_and_a_kernel_finds_it_all() -> Outcome {
    let ours = Ours::find()?;
    let kills = count_from("BCACHED_MACHINE_KILLS")?.unwrap_or(5);
    let seed = number_from("BCACHED_SEED")?.unwrap_or(91);
    let small = Geometry::small(64 << 10, 4096);
    // The cache holds half of the volumes' data.
    let geometry = Geometry { volume_sectors: (8 << 20) / 512, ..small };
    let set = CacheSet::make(geometry, MACHINES as u64, Maker::Ours(ours.program()))?;
    let diary = Mutex::new(Diary::new());
    let mut hall = Hall { ours: &ours, set, random: Random::new(seed), diary };
    for life in 1..=kills {
        live_and_die(&mut hall, life).context(format_args!("seed {seed}, life {life}"))?;
    }
    live_and_stop(&mut hall, kills + 1).context(format_args!("seed {seed}, at last"))?;
    let Hall { mut set, diary, .. } = hall;
    let diary = diary.into_inner().expect("nobody panics with it");
    diary.write()?;
    println!("{} looks at ten volumes", diary.csv.lines().count() / MACHINES);
    assert_eq!(diary.dirty.len(), MACHINES, "each volume was dirty at some time: {:?}", diary.dirty);
    // The log machines hardly read.
    assert!(diary.hit.len() >= MACHINES - 1, "reads of the others hit: {:?}", diary.hit);
    let Some(uml) = Uml::find() else { return Ok(()) };
    Kernel(&uml).leg(&mut set, &[], Ending::CleanStop).context(format_args!("seed {seed}, the kernel"))
}
