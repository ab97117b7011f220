//! Power cuts under the kernel's bcache and under our daemon, from recordings of both on the same
//! devices, judged by the same oracle.
//!
//! The kernel's losses are printed, not asserted: `docs/reliability.md` has the figures.
//! Environment variables:
//!
//! - `BCACHED_CUTS`: the number of places at which each run is cut (each in six ways).
//! - `BCACHED_CUT_SEED`: the seed.
//! - `BCACHED_CUT_REQUESTS`: the length of a run.
//! - `BCACHED_CUT_WRITER` (`kernel` or `bcached`) and `BCACHED_CUT_MODE` select one of the runs.
//! - `BCACHED_CUT_AFTER_WRITE_BACK=1`: cuts once, when the run is over and everything has been
//!   written back.

use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::recording::client::Plan;
use bcached_tests::recording::cut::{BACKING, CACHE, Disks, Survivors};
use bcached_tests::recording::judge::Promises;
use bcached_tests::recording::reader::Reading;
use bcached_tests::recording::trial::{Readers, Trial, cut, positions};
use bcached_tests::recording::writer::{Run, WriteBack, Writer, record};
use bcached_tests::scope::{choice_from, count_from, number_from};
use bcached_tests::set::{CacheMode, Geometry};
use bcached_tests::side::Ours;
use bcached_tests::uml::Uml;
use bcached_tests::workload::Random;

const VOLUME_SECTORS: u64 = (16 << 20) / 512;

/// The smallest cache that a kernel accepts with buckets of 64 KiB, larger than the volume; blocks
/// of one sector.
fn geometry(mode: CacheMode) -> Geometry {
    Geometry { mode, volume_sectors: VOLUME_SECTORS, ..Geometry::small(64 << 10, 512) }
}

fn plan(seed: u64, requests: u64) -> Plan {
    Plan { seed, requests, sectors: VOLUME_SECTORS, block_sectors: 1 }
}

/// Finds a write to the cache device that is the only copy of some sector of the volume's content.
fn write_to_forget(run: &Run, content: &[u8]) -> Option<usize> {
    content.chunks_exact(512).filter(|sector| sector.iter().any(|byte| *byte != 0)).find_map(|sector| {
        let holds = |data: &[u8]| data.chunks_exact(512).any(|part| part == sector);
        let mut on_cache = run.recording.writes(CACHE).filter(|(_, _, data)| holds(data));
        let on_backing = run.recording.writes(BACKING).any(|(_, _, data)| holds(data));
        let (place, ..) = on_cache.next().filter(|_| !on_backing)?;
        on_cache.next().is_none().then_some(place)
    })
}

/// At the end of a run, everything was flushed. If no unflushed write survives, everything must
/// still be there. If the cache device has forgotten a write that it had flushed, that must be
/// detected. Dirty data stays in the cache, where the kernel keeps its promise.
#[test]
fn what_was_flushed_is_there_and_a_device_that_forgets_is_noticed() -> Outcome {
    let Some(uml) = Uml::find_recordable() else { return Ok(()) };
    let ours = Ours::find()?;
    let readers = Readers { uml: &uml, ours: &ours };
    let geometry = geometry(CacheMode::Writeback);
    let run = record(&uml, Writer::Kernel, geometry, WriteBack::Never, &plan(5, 300))?;
    let end = run.recording.operations.len();
    let mut promises = Promises::new(&run.story);
    promises.advance(end)?;
    let permitted = promises.after_power_cut();
    let mut faithful = Disks::new(&run.recording, &run.before);
    faithful.advance(end);
    let mut to_forget = None;
    for reader in [Writer::Kernel, Writer::Ours] {
        let reading = open_one(readers, reader, &run, &faithful)?;
        if let Reading::Volume { with_cache, .. } = &reading {
            to_forget = write_to_forget(&run, with_cache);
        }
        let trial = Trial::of(&permitted, reading);
        if !trial.is_clean() {
            return Err(Failure::new(format!("opened by {}: {trial:?}", reader.name())));
        }
    }
    let place = to_forget.context("no flushed write whose loss would be seen")?;
    let mut faulty = Disks::new(&run.recording, &run.before).forgetting(place);
    faulty.advance(end);
    for reader in [Writer::Kernel, Writer::Ours] {
        let trial = Trial::of(&permitted, open_one(readers, reader, &run, &faulty)?);
        let noticed = matches!(&trial, Trial::Judged(verdict) if !verdict.lost.is_empty());
        if !noticed {
            return Err(Failure::new(format!("operation {place} was forgotten unnoticed: {trial:?}")));
        }
    }
    Ok(())
}

/// Returns what is read if nothing unflushed survives.
fn open_one(readers: Readers<'_>, reader: Writer, run: &Run, disks: &Disks<'_>) -> Outcome<Reading> {
    readers.open(reader, run, disks, &[Survivors::Nothing])?.pop().context("one reading of one set")
}

/// What the environment requests.
struct Wanted {
    /// The writer's name; `None`: all run.
    writer: Option<&'static str>,
    /// The mode's name; `None`: all run.
    mode: Option<&'static str>,
    /// Number of places in each run; `None`: this is an ordinary test run, and one cut of one run
    /// is enough.
    cuts: Option<u64>,
    seed: u64,
    requests: u64,
    /// Cuts once, when everything has been written back.
    at_the_end: bool,
}

impl Wanted {
    fn from_environment() -> Outcome<Self> {
        Ok(Self {
            writer: choice_from("BCACHED_CUT_WRITER", &[Writer::Kernel.name(), Writer::Ours.name()])?,
            mode: choice_from("BCACHED_CUT_MODE", &MODES.map(CacheMode::name))?,
            cuts: count_from("BCACHED_CUTS")?,
            seed: number_from("BCACHED_CUT_SEED")?.unwrap_or(1),
            requests: count_from("BCACHED_CUT_REQUESTS")?.unwrap_or(300),
            at_the_end: number_from("BCACHED_CUT_AFTER_WRITE_BACK")?.is_some_and(|number| number != 0),
        })
    }

    /// Returns whether such a run is selected.
    fn takes(&self, writer: Writer, mode: CacheMode) -> bool {
        self.writer.is_none_or(|name| name == writer.name())
            && self.mode.is_none_or(|name| name == mode.name())
    }
}

/// Cuts runs of one writer anywhere and prints the results. Returns whether nothing was wrong with
/// any.
fn cut_runs(writer: Writer, readers: &[Writer], wanted: &Wanted) -> Outcome<bool> {
    let Some(uml) = Uml::find_recordable() else { return Ok(true) };
    let ours = Ours::find()?;
    let who = Readers { uml: &uml, ours: &ours };
    let Wanted { cuts, seed, requests, at_the_end, .. } = *wanted;
    let write_back = if at_the_end { WriteBack::Afterwards } else { WriteBack::AtOnce };
    let mut clean = true;
    for mode in MODES.into_iter().filter(|mode| wanted.takes(writer, *mode)) {
        let run = record(&uml, writer, geometry(mode), write_back, &plan(seed, requests))?;
        let title = format!("{} in mode {}, seed {seed}, {requests} requests", writer.name(), mode.name());
        let mut random = Random::new(seed);
        let places = if at_the_end {
            vec![run.recording.operations.len()]
        } else {
            positions(&run, cuts.unwrap_or(1), &mut random)?
        };
        for tally in cut(&run, who, readers, &places, &mut random, &title)? {
            println!("{tally}");
            clean &= tally.is_clean();
        }
        if cuts.is_none() {
            break;
        }
    }
    Ok(clean)
}

/// `make test` runs the first one, in which both devices have something to lose.
const MODES: [CacheMode; 3] = [CacheMode::Writethrough, CacheMode::Writeback, CacheMode::Writearound];

/// The kernel's losses are printed.
#[test]
fn the_kernel_is_cut_anywhere() -> Outcome {
    let wanted = Wanted::from_environment()?;
    let readers: &[Writer] =
        if wanted.cuts.is_some() { &[Writer::Kernel, Writer::Ours] } else { &[Writer::Kernel] };
    cut_runs(Writer::Kernel, readers, &wanted)?;
    Ok(())
}

/// Nothing may be wrong with ours: no loss, and no change without a write.
#[test]
fn we_are_cut_anywhere() -> Outcome {
    if cut_runs(Writer::Ours, &[Writer::Ours], &Wanted::from_environment()?)? {
        return Ok(());
    }
    Err(Failure::new(
        "something is lost, or changed without a write; the tables above have the first of each kind",
    ))
}
