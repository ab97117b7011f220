//! Ten virtual machines on one cache, as in the paper that bcache began with: ten backing devices
//! of one set, write-back, nothing bypassed, and a different load for each machine. Again and again
//! an event hits all of them in the middle of their work: the daemon is killed, the machine is
//! reset, the power is cut, or one half of the mirror under the cache fails.
//!
//! A mirror that has lost one half answers late but correctly; nothing more is visible to the
//! layers above.
//!
//! The oracle judges every answer, everything is read after each event, and at the end the offline
//! checker examines the devices. Meanwhile the amount of dirty data and the hit rate of each volume
//! are sampled.

pub mod plot;

use crate::digest::mix;
use crate::disk::{DiskFault, FaultRule, OpKind, Survivors};
use crate::driver::Crash;
use crate::failure::FailureKind;
use crate::models::zipf::Zipf;
use crate::scenario::ScenarioRig;
use crate::scenarios::bench::ScenarioSystem;
use crate::system::{Geometry, Mode, Tuning};
use crate::workload::Step;
use bcached_engine::Options;
use bcached_env::rng::Rng;
use std::array;
use std::fmt::Write as _;
use std::rc::Rc;

/// Number of machines.
pub const COUNT: usize = 10;
/// Size of a volume in sectors: 32 MiB. The cache holds two fifths of all volumes.
const VOLUME_SECTORS: u64 = 65_536;
/// Number of buckets, of 64 KiB each.
const BUCKETS: u64 = 2048;
/// Size of a bucket in sectors.
const BUCKET_SECTORS: u32 = 128;
/// Size of a block in sectors.
const BLOCK: u64 = 8;
/// Requests of each machine in a round.
const REQUESTS: usize = 6;
/// An event happens at most this many device operations after a round has begun.
const OPERATIONS_MAX: u64 = 200;
/// Delay of late operations in nanoseconds, and how many operations are late.
const LATE_NS: u64 = 200_000_000;
const LATE_COUNT: u32 = 40;

/// The workload of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MachineLoad {
    /// Small writes to a few places and some reads; a quarter of the writes are durable.
    Database,
    /// Files of all sizes, with as many reads as writes.
    Files,
    /// Reads of the same data every day, and few writes.
    Desktop,
    /// Small sequential writes, each made durable.
    Log,
    /// Long reads from the beginning to the end, and long writes.
    Backup,
}

/// The load of each machine.
pub const LOADS: [MachineLoad; COUNT] = [
    MachineLoad::Database,
    MachineLoad::Database,
    MachineLoad::Database,
    MachineLoad::Files,
    MachineLoad::Files,
    MachineLoad::Files,
    MachineLoad::Desktop,
    MachineLoad::Desktop,
    MachineLoad::Log,
    MachineLoad::Backup,
];

impl MachineLoad {
    /// Returns the name of the load.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Database => "database",
            Self::Files => "files",
            Self::Desktop => "desktop",
            Self::Log => "log",
            Self::Backup => "backup",
        }
    }
}

/// An event that hits all machines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Incident {
    /// The daemon gets SIGKILL.
    Killed,
    /// The machine restarts, while its devices keep their power.
    Reset,
    /// The machine restarts, and its devices lose their power.
    PowerCut,
    /// One half of the cache's mirror has failed.
    HalfMirror,
}

impl Incident {
    /// All events, in the order in which they happen.
    pub const ALL: [Self; 4] = [Self::Killed, Self::Reset, Self::PowerCut, Self::HalfMirror];

    /// Returns a description.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Killed => "daemon killed",
            Self::Reset => "machine reset",
            Self::PowerCut => "power cut",
            Self::HalfMirror => "half of the mirror failed",
        }
    }
}

/// The state at one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Virtual nanoseconds since the beginning.
    pub now: u64,
    /// The event that has just happened.
    pub event: Option<Incident>,
    /// The figures of each machine.
    pub volumes: [VolumeSample; COUNT],
}

/// The figures of one machine.
#[derive(Clone, Copy, Default, Debug)]
pub struct VolumeSample {
    /// Dirty data in the cache, in bytes.
    pub dirty_bytes: u64,
    /// Reads since the previous sample that hit the cache.
    pub hits: u64,
    /// All reads since the previous sample.
    pub reads: u64,
}

impl VolumeSample {
    /// Returns the percentage of reads that hit, or `None` if there were no reads.
    #[must_use]
    pub const fn hit_percent(&self) -> Option<u64> {
        (self.hits * 100).checked_div(self.reads)
    }
}

/// The length of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunLength {
    /// How often the cycle of all events is repeated.
    pub cycles: u32,
    /// Rounds of requests before each event.
    pub rounds: u32,
}

/// Runs the machines.
///
/// # Errors
/// Returns the first fault: something was lost, came back, or is unsound.
pub fn run(seed: u64, length: RunLength) -> Result<Vec<Sample>, FailureKind> {
    let mut options = Options::default();
    // Some dirty data is always being written back.
    options.volume.writeback_percent = 2;
    let bench = ScenarioSystem::new(options, COUNT);
    let stage = ScenarioRig::new(Rc::clone(&bench) as Rc<_>, geometry(), seed);
    let mut machines = MachineRun::new(bench, stage, seed);
    machines.stage.start()?;
    let volumes = 0..u32::try_from(COUNT).expect("few machines");
    let modes = volumes.map(|volume| Step::Mode { volume, mode: Mode::Writeback });
    machines.stage.together(modes.collect())?;
    for _ in 0..length.cycles {
        for event in Incident::ALL {
            for _ in 0..length.rounds {
                let steps = machines.round();
                machines.stage.together(steps)?;
                machines.look(None);
            }
            machines.suffer(event)?;
        }
    }
    machines.stage.verify()?;
    machines.stage.stop()?;
    Ok(machines.samples)
}

fn geometry() -> Geometry {
    Geometry {
        block_sectors: 8,
        set_block_sectors: 8,
        bucket_sectors: BUCKET_SECTORS,
        buckets: BUCKETS,
        volumes: vec![VOLUME_SECTORS; COUNT],
        lodgers: Vec::new(),
        torn_sectors: 8,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 1 << 12,
        tuning: Tuning::draw(0),
    }
}

struct MachineRun {
    bench: Rc<ScenarioSystem>,
    stage: ScenarioRig,
    rng: Rng,
    zipf: Zipf,
    /// Position of each machine with sequential requests, in sectors.
    at: [u64; COUNT],
    /// Hits and reads of each volume at the previous sample, in this life of the daemon.
    before: [(u64, u64); COUNT],
    samples: Vec<Sample>,
}

impl MachineRun {
    fn new(bench: Rc<ScenarioSystem>, stage: ScenarioRig, seed: u64) -> Self {
        let zipf = Zipf::new(1024, 0.9, seed);
        let rng = Rng::new(mix(&[seed, 300]));
        Self { bench, stage, rng, zipf, at: [0; COUNT], before: [(0, 0); COUNT], samples: Vec::new() }
    }

    /// Returns the requests of all machines in a round, in the order of a fair queue.
    fn round(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        for _ in 0..REQUESTS {
            for (machine, load) in LOADS.into_iter().enumerate() {
                self.draw(machine, load, &mut steps);
            }
        }
        steps
    }

    fn draw(&mut self, machine: usize, load: MachineLoad, steps: &mut Vec<Step>) {
        let volume = u32::try_from(machine).expect("few machines");
        let rng = &mut self.rng;
        let hot = self.zipf.draw(rng) * BLOCK;
        let anywhere = rng.below(VOLUME_SECTORS / BLOCK) * BLOCK;
        let long = BLOCK * (1 + rng.below(16));
        let within = |start: u64, sectors: u64| start..(start + sectors).min(VOLUME_SECTORS);
        let write = |sectors, fua| Step::Write { volume, sectors, fua };
        let read = |sectors| Step::Read { volume, sectors };
        match load {
            MachineLoad::Database if rng.one_in(3) => steps.push(read(within(hot, BLOCK))),
            MachineLoad::Database => steps.push(write(within(hot, BLOCK), rng.one_in(4))),
            MachineLoad::Files if rng.one_in(2) => steps.push(read(within(anywhere, long))),
            MachineLoad::Files => steps.push(write(within(anywhere, long), false)),
            MachineLoad::Desktop if rng.one_in(10) => steps.push(write(within(hot, BLOCK), false)),
            MachineLoad::Desktop => steps.push(read(within(hot, long))),
            MachineLoad::Log => {
                steps.push(write(within(self.at[machine], BLOCK), false));
                steps.push(Step::Flush { volume });
                self.at[machine] = (self.at[machine] + BLOCK) % VOLUME_SECTORS;
            }
            MachineLoad::Backup => {
                let range = within(self.at[machine], 128);
                self.at[machine] = range.end % VOLUME_SECTORS;
                steps.push(if rng.one_in(4) { write(range, false) } else { read(range) });
            }
        }
    }

    /// Makes the event happen in the middle of a round, and then reads everything.
    fn suffer(&mut self, event: Incident) -> Result<(), FailureKind> {
        let steps = self.round();
        let (crash, survivors) = match event {
            Incident::Killed => (Crash::ProcessDeath, Survivors::Seeded(self.rng.next())),
            Incident::Reset => (Crash::PowerCut, Survivors::Everything),
            Incident::PowerCut => (Crash::PowerCut, Survivors::Seeded(self.rng.next())),
            Incident::HalfMirror => {
                for on in [OpKind::Read, OpKind::Write, OpKind::Flush] {
                    let fault = DiskFault::Late(LATE_NS);
                    let rule = FaultRule::next(on, LATE_COUNT, fault);
                    self.stage.device(0).faults.add(rule);
                }
                self.stage.together(steps)?;
                self.look(Some(event));
                return self.verify();
            }
        };
        let mut left = self.rng.below(OPERATIONS_MAX);
        let trap = move |_: &_| {
            left = left.saturating_sub(1);
            left == 0
        };
        self.stage.crash_at(steps, trap, crash, survivors)?;
        self.stage.start()?;
        self.before = [(0, 0); COUNT];
        self.look(Some(event));
        self.verify()
    }

    /// Reads everything, without counting that as load.
    fn verify(&mut self) -> Result<(), FailureKind> {
        self.stage.verify()?;
        self.before = self.reads();
        Ok(())
    }

    /// Returns hits and reads of each volume in this life of the daemon.
    fn reads(&self) -> [(u64, u64); COUNT] {
        let volumes = self.bench.status().volumes;
        array::from_fn(|number| {
            let reads = &volumes[number].stats.reads;
            (reads.hits, reads.hits + reads.misses)
        })
    }

    /// Takes a sample.
    fn look(&mut self, event: Option<Incident>) {
        let (found, now, before) = (self.bench.status().volumes, self.reads(), self.before);
        let volumes = array::from_fn(|number| VolumeSample {
            dirty_bytes: found[number].dirty_sectors * 512,
            hits: now[number].0 - before[number].0,
            reads: now[number].1 - before[number].1,
        });
        self.before = now;
        self.samples.push(Sample { now: self.stage.now(), event, volumes });
    }
}

/// Returns the samples as comma-separated values, one line for each volume of each sample.
#[must_use]
pub fn csv(samples: &[Sample]) -> String {
    let mut text = "seconds,event,volume,load,dirty_bytes,hit_percent\n".to_owned();
    for sample in samples {
        let (milliseconds, event) = (sample.now / 1_000_000, sample.event.map_or("", Incident::name));
        for ((number, load), volume) in LOADS.iter().enumerate().zip(&sample.volumes) {
            let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
            let hits = volume.hit_percent().map_or(String::new(), |percent| percent.to_string());
            let (load, dirty) = (load.name(), volume.dirty_bytes);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{seconds}.{rest:03},{event},{number},{load},{dirty},{hits}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_and_all_is_noted() {
        let samples = run(1, RunLength { cycles: 1, rounds: 5 }).expect("no fault");
        assert_eq!(samples.len(), 4 * 6);
        let events: Vec<_> = samples.iter().filter_map(|sample| sample.event).collect();
        assert_eq!(events, Incident::ALL);
        let all =
            |look: fn(&VolumeSample) -> bool| samples.iter().flat_map(|sample| &sample.volumes).any(look);
        assert!(all(|volume| volume.dirty_bytes > 0) && all(|volume| volume.hits > 0));
        let text = csv(&samples);
        assert_eq!(text.lines().count(), 1 + samples.len() * COUNT);
        assert!(text.lines().all(|line| line.split(',').count() == 6), "{text}");
        let picture = plot::svg(&samples);
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
        assert_eq!(picture.matches("<polyline").count(), 2 * COUNT, "dirty data and hits of each");
        assert!(Incident::ALL.iter().all(|event| picture.contains(event.name())));
    }

    #[test]
    fn a_seed_is_a_run() {
        let length = RunLength { cycles: 1, rounds: 1 };
        let once = || csv(&run(7, length).expect("no fault"));
        assert_eq!(once(), once());
    }
}
