//! Measures how long a kernel takes to check a set that crashed full of dirty blocks, and how long
//! our walk takes of what that kernel leaves when it crashes, too. Both must find all extents. The
//! times are printed per extent, less those of an empty set of the same size. Nothing asserts on
//! time.
//!
//! `TMPDIR=/dev/shm BCACHED_CHECK_EXTENTS=4000000 cargo test --release -p bcached-tests --test
//! suite kernel_check:: -- --nocapture` takes one sample of the figures whose medians are in
//! `docs/performance.md` (B10). Run `cargo build --release` before that to build the daemon.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use bcached_engine::Request;
use bcached_sim::models::bed::{BACKING, BedConfig, CACHE, DATA_START, TestBed};
use bcached_sim::models::load::{AccessPattern, Load, StopAfter};
use bcached_sim::models::ssd;
use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::guest::{self, Job, Machine as _};
use bcached_tests::offline::examine_structure;
use bcached_tests::scope;
use bcached_tests::set::{CacheMode, CacheSet, Geometry};
use bcached_tests::side::{Daemon, KEEP_DIRTY, Ours};
use bcached_tests::uml::Uml;

/// Default number of dirty extents, of one block each.
const EXTENTS: u64 = 250_000;
const BLOCK_SECTORS: u64 = 8;
/// Makes a crashed set that has room for `room` extents and contains `extents` of them. No two are
/// adjacent, or they would merge. The engine writes them on modelled devices, which hold whatever
/// is not zero, so that the images contain it.
fn crashed(room: u64, extents: u64) -> Outcome<CacheSet> {
    // As full as possible without writes that bypass the cache.
    let cache_sectors = (room * BLOCK_SECTORS * 100 / 85).next_multiple_of(1024);
    let volume_sectors = 4 * cache_sectors;
    let mut setting = BedConfig::new(ssd::SsdModel::sata_plp(), cache_sectors, volume_sectors);
    setting.options.volume.writeback_running = false;
    let mut bed = TestBed::new(&setting);
    let load = Load::random_writes(volume_sectors, 32, StopAfter::Requests(extents));
    bed.run(&Load { places: AccessPattern::Strided(4), ..load });
    let (set, volume) = (bed.set.clone(), bed.volume);
    bed.block_on(async move { set.serve(volume, Request::Flush).await.result }).context("the flush")?;
    assert_eq!(bed.status().dirty_sectors, extents * BLOCK_SECTORS);
    let geometry = Geometry {
        bucket_bytes: u64::from(setting.bucket_sectors) * 512,
        block_bytes: BLOCK_SECTORS * 512,
        cache_bytes: cache_sectors * 512,
        volume_sectors,
        data_offset_sectors: DATA_START,
        mode: CacheMode::Writeback,
    };
    let world = bed.world.borrow();
    let write = |device: usize, path: &Path| -> io::Result<()> {
        let image = File::create(path)?;
        image.set_len(world.devices[device].sectors() * 512)?;
        world.devices[device].content.write_to(&image)
    };
    let images = |cache: &Path, backing: &Path| {
        write(CACHE, cache)?;
        write(BACKING, backing)
    };
    Ok(CacheSet::from_images(geometry, images)?)
}

/// The duration of a start. For a kernel: registering the cache device (the check of the B-tree),
/// and registering the backing device, whose dirty sectors are counted. For our daemon: everything
/// until it is ready, and its processor time.
#[derive(Clone, Copy)]
struct Took {
    check: Duration,
    count: Duration,
    ours: Duration,
    processor: Duration,
}

/// A kernel starts the set and is killed, then our daemon does the same.
fn start(uml: &Uml, ours: &Ours, set: &CacheSet, extents: u64) -> Outcome<Took> {
    let script = format!(
        "begun=$(date +%s%N)
        register {}
        checked=$(date +%s%N)
        register {}
        counted=$(date +%s%N)
        echo check $((checked - begun)); echo count $((counted - checked))
        wait_for 20 test -b /dev/bcache0
        echo dirty $(cat /sys/block/bcache0/bcache/dirty_data)
        echo served
        sleep 100000\n",
        uml.device(0),
        uml.device(1)
    );
    let job = Job { images: &set.images(), script: &script, crash_at: Some("served"), limit: guest::LIMIT };
    let report = uml.run(&job)?;
    report.expect_allowed_log()?;
    let dirty = extents * BLOCK_SECTORS * 512;
    assert_eq!(report.line_after("dirty ").map(wholes), Some(Some(shown(dirty))), "{report}");
    let took = |what: &str| -> Outcome<Duration> {
        Ok(Duration::from_nanos(report.line_after(what).context(what)?.parse()?))
    };
    examine_structure(&set.cache, &set.backings).context("what the kernel left")?;

    let begun = Instant::now();
    let daemon = Daemon::configured(ours.program(), set, KEEP_DIRTY)?;
    let (ours_took, processor) = (begun.elapsed(), processor_time(&daemon)?);
    let status = daemon.status(ours.program())?;
    assert_eq!(status["volumes"][0]["dirty_bytes"].as_u64(), Some(dirty), "{status}");
    daemon.crash(set)?;
    Ok(Took { check: took("check ")?, count: took("count ")?, ours: ours_took, processor })
}

/// Parses a size that a kernel prints, such as `390.6M`, into its whole units and the power of 1024
/// of the unit.
fn wholes(said: &str) -> Option<(u64, u32)> {
    let power = u32::try_from("kMGT".find(said.chars().last()?)?).ok()? + 1;
    Some((said.split('.').next()?.parse().ok()?, power))
}

/// Returns the same for a number of bytes.
fn shown(bytes: u64) -> (u64, u32) {
    let power = if bytes == 0 { 1 } else { (bytes.ilog2() / 10).max(1) };
    (bytes >> (10 * power), power)
}

/// Returns the processor time that the daemon's threads have used so far.
fn processor_time(daemon: &Daemon) -> Outcome<Duration> {
    let mut nanoseconds = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", daemon.pid().as_raw_nonzero()))? {
        // A thread that has ended meanwhile did little.
        let Ok(said) = fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        let running = said.split_whitespace().next().context("an empty schedstat")?;
        nanoseconds += running.parse::<u64>().context(&said)?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

#[test]
fn a_kernel_checks_what_we_left_and_we_walk_what_it_left() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let ours = Ours::find()?;
    let extents = scope::count_from("BCACHED_CHECK_EXTENTS")?.unwrap_or(EXTENTS);
    let empty = start(&uml, &ours, &crashed(extents, 0)?, 0).context("without extents")?;
    let full = start(&uml, &ours, &crashed(extents, extents)?, extents).context("full")?;
    let say = |what: &str, of: fn(&Took) -> Duration| {
        let each = of(&full).saturating_sub(of(&empty)).as_nanos() / u128::from(extents);
        println!("{what:<52}{each:>6} ns an extent, {:?} in all", of(&full));
    };
    say("a kernel checks the tree", |took| took.check);
    say("a kernel counts what is dirty", |took| took.count);
    say("we start", |took| took.ours);
    say("we start: the processor's time", |took| took.processor);
    Ok(())
}
