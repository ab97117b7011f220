//! The simulator's workloads start from what a kernel has left: the engine takes the set over,
//! runs, is crashed, and must keep every promise that the kernel gave.
//!
//! The kernel's devices are recorded while it serves random requests in User-Mode Linux (see
//! `power_cut`). Its clients end with a flush. Then the power is cut, with dirty data in the cache
//! and part of the index in the journal. `BCACHED_STARTS` sets the number of seeds.

use bcached_sim::crashpoints::{SweepDepth, sweep_on};
use bcached_sim::disk::{Device, DeviceModel, InitialContent};
use bcached_sim::figures::RunCounts;
use bcached_sim::note::NoteState;
use bcached_sim::rig::Snapshot;
use bcached_sim::run::{rig_from, whole};
use bcached_sim::system::{self, System};
use bcached_sim::workload::{Shape, Workload};
use bcached_tests::failure::{Context as _, Failure, Outcome};
use bcached_tests::recording::client::Plan;
use bcached_tests::recording::cut::{BACKING, CACHE, Disks, Survivors};
use bcached_tests::recording::judge::Promises;
use bcached_tests::recording::writer::{Run, WriteBack, Writer, record};
use bcached_tests::scope::count_from;
use bcached_tests::set::{CacheMode, Geometry};
use bcached_tests::uml::Uml;
use std::fs;
use std::rc::Rc;

/// Size of the volume, in sectors: what a shape uses, and little more, so that the kernel has
/// written in the same places.
const VOLUME_SECTORS: u64 = (6 << 20) / 512;

/// Where the tools let a volume begin on its device.
const BEHIND_SUPERBLOCK: InitialContent = InitialContent::Zero { data_start: 16 };

/// Number of the kernel's requests.
const REQUESTS: u64 = 400;

/// Number of steps of a workload that runs to its end, and of one that is crashed at some of its
/// points.
const WHOLE_STEPS: usize = 150;
const CRASHED_STEPS: usize = 30;

/// Shapes with a single volume that fits.
const SHAPES: [&str; 3] = ["hot", "points", "scarce"];

/// How densely the crash points of the latter are sampled.
const DEPTH: SweepDepth =
    SweepDepth { novel: 1, recovery_one_in: 8, work: Some(20_000), ..SweepDepth::SPARSE };

/// In write-back mode: in another mode, a kernel leaves clean copies that differ from the backing
/// device, which the simulator reports as an error of the system under test
/// (`docs/reliability.md`).
fn sizes() -> Geometry {
    Geometry { mode: CacheMode::Writeback, volume_sectors: VOLUME_SECTORS, ..Geometry::small(64 << 10, 512) }
}

/// Returns the recorded devices at the end of the run, with none or all of their unflushed writes
/// surviving.
fn start(run: &Run, survivors: Survivors) -> Outcome<Snapshot> {
    let end = run.recording.operations.len();
    let mut promises = Promises::new(&run.story);
    promises.advance(end)?;
    let mut disks = Disks::new(&run.recording, &run.before);
    disks.advance(end);
    let directory = tempfile::tempdir()?;
    let mut devices = Vec::new();
    for image in [CACHE, BACKING] {
        let path = directory.path().join(image.to_string());
        disks.write_image(image, survivors, &path)?;
        let bytes = fs::read(&path)?;
        let sectors = bytes.len() as u64 / 512;
        let model = if image == CACHE {
            DeviceModel::fast(sectors, 1)
        } else {
            DeviceModel::slow(sectors, 1, BEHIND_SUPERBLOCK)
        };
        let mut device = Device::new(model);
        for (sector, piece) in (0..).step_by(8).zip(bytes.chunks(8 * 512)) {
            if piece.iter().any(|byte| *byte != 0) {
                device.place(sector, piece);
            }
        }
        devices.push(device);
    }
    Ok(Snapshot { devices, note: NoteState::new(256), oracle: promises.after_power_cut() })
}

/// Returns a workload of this shape and seed for the kernel's set.
fn workload(name: &str, steps: usize, seed: u64) -> Outcome<Workload> {
    let shape = Shape::named(name).context("a shape")?;
    let drawn = shape.with_steps(steps).draw(seed);
    let fits = matches!(drawn.geometry.volumes[..], [sectors] if sectors <= VOLUME_SECTORS);
    if !fits {
        return Err(Failure::new(format!("{name} does not fit into the kernel's volume")));
    }
    let sizes = sizes();
    let geometry = system::Geometry {
        block_sectors: 1,
        set_block_sectors: 1,
        bucket_sectors: u32::try_from(sizes.bucket_bytes / 512)?,
        buckets: sizes.cache_bytes / sizes.bucket_bytes,
        volumes: vec![sizes.volume_sectors],
        lodgers: Vec::new(),
        torn_sectors: 1,
        ..drawn.geometry
    };
    Ok(Workload { geometry, ..drawn })
}

#[test]
fn the_engine_goes_on_from_what_a_kernel_left() -> Outcome {
    let Some(uml) = Uml::find_recordable() else { return Ok(()) };
    let seeds = count_from("BCACHED_STARTS")?.unwrap_or(1);
    let engine: Rc<dyn System> = Rc::new(system::engine::Engine);
    let mut figures = RunCounts::default();
    for seed in 0..seeds {
        let plan = Plan { seed, requests: REQUESTS, sectors: VOLUME_SECTORS, block_sectors: 1 };
        let run = record(&uml, Writer::Kernel, sizes(), WriteBack::Never, &plan)?;
        for survivors in [Survivors::Nothing, Survivors::Everything] {
            let start = start(&run, survivors)?;
            for name in SHAPES {
                let told = |what: String| Failure::new(format!("{survivors:?}, then {name} {seed}: {what}"));
                let long = workload(name, WHOLE_STEPS, seed)?;
                let mut rig = rig_from(&engine, &long, start.clone());
                figures.add(&whole(&mut rig, &long).map_err(|fault| told(fault.to_string()))?);
                let short = workload(name, CRASHED_STEPS, seed)?;
                let swept = sweep_on(rig_from(&engine, &short, start.clone()), &short, DEPTH);
                figures.add(&swept.map_err(|failure| told(failure.to_string()))?);
            }
        }
    }
    println!(
        "{} requests, {} crashes, {} of them in recoveries",
        figures.requests, figures.crashes, figures.crashes_in_recovery
    );
    Ok(())
}
