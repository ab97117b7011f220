//! What a kernel's check of a set takes that crashed full of dirty blocks, and our walk of what that kernel left when it crashed, too. Both have to find all
//! of it. What it took is printed, an extent: what a set of the same size without any took is taken off. Nothing asserts on time.
//!
//! `TMPDIR=/dev/shm BCACHED_CHECK_EXTENTS=4000000 cargo test --release -p bcached-tests --test suite kernel_check:: -- --nocapture` is one look at what
//! `docs/performance.md` has medians of (B10); `cargo build --release` before that makes the daemon.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use bcached_engine::Request;
use bcached_sim::models::bed::{BACKING, Bed, CACHE, DATA_START, Setting};
use bcached_sim::models::load::{Load, Places, Until};
use bcached_sim::models::ssd;
use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::guest::{self, Job, Machine as _};
use bcached_tests::offline::examine_structure;
use bcached_tests::scope;
use bcached_tests::set::{CacheMode, CacheSet, Geometry};
use bcached_tests::side::{Daemon, Ours};
use bcached_tests::uml::Uml;

/// Dirty extents, of a block each, if nobody asks for more.
const EXTENTS: u64 = 250_000;
const BLOCK_SECTORS: u64 = 8;
/// A set with room for `room` extents, of which `extents` are in it, and a crash. No two lie side by side, or they would be one. They are written by the engine
/// on modelled devices, which hold what is not zero, so that the images do.
fn crashed(room: u64, extents: u64) -> Outcome<CacheSet> {
    // As full as it can be without writes that go past it.
    let cache_sectors = (room * BLOCK_SECTORS * 100 / 85).next_multiple_of(1024);
    let volume_sectors = 4 * cache_sectors;
    let mut setting = Setting::new(ssd::Model::sata_plp(), cache_sectors, volume_sectors);
    setting.options.volume.writeback_running = false;
    let mut bed = Bed::new(&setting);
    let load = Load::random_writes(volume_sectors, 32, Until::Requests(extents));
    bed.run(&Load { places: Places::Strided(4), ..load });
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

/// What a start takes: of a kernel that of the cache device, the tree's check, and that of the backing device, whose dirty sectors are counted; of our daemon
/// all until it is ready, and the processor's time in it.
#[derive(Clone, Copy)]
struct Took {
    check: Duration,
    count: Duration,
    ours: Duration,
    processor: Duration,
}

/// A kernel starts the set and dies, and then we do.
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
    let daemon = Daemon::start(ours.program(), set)?;
    let (ours_took, processor) = (begun.elapsed(), processor_time(&daemon)?);
    let status = daemon.status(ours.program())?;
    assert_eq!(status["volumes"][0]["dirty_bytes"].as_u64(), Some(dirty), "{status}");
    daemon.crash(set)?;
    Ok(Took { check: took("check ")?, count: took("count ")?, ours: ours_took, processor })
}

/// The whole units of what a kernel says of a size, such as `390.6M`, and the power of 1024 that they are.
fn wholes(said: &str) -> Option<(u64, u32)> {
    let power = u32::try_from("kMGT".find(said.chars().last()?)?).ok()? + 1;
    Some((said.split('.').next()?.parse().ok()?, power))
}

/// The same of a number of bytes.
fn shown(bytes: u64) -> (u64, u32) {
    let power = if bytes == 0 { 1 } else { (bytes.ilog2() / 10).max(1) };
    (bytes >> (10 * power), power)
}

/// What its threads have taken of processors so far.
fn processor_time(daemon: &Daemon) -> Outcome<Duration> {
    let mut nanoseconds = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", daemon.pid().as_raw_nonzero()))? {
        // One that has ended meanwhile did little.
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
