//! Volumes whose size has changed, and a cache moved to another device, handed to the other side:
//! volumes made smaller and larger on either side, with dirty data in the cache.

use std::fs::File;
use std::path::Path;

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::judge;
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, KEEP_DIRTY, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;

/// Number of writes in a turn.
const WRITES: u64 = 400;
const MIB: u64 = 2048;
/// How a turn that crashes ends.
const CRASH: Ending = Ending::CrashAfterFlush(9);

/// Makes a set that a kernel has left dirty.
fn left_dirty_by(kernel: &Kernel<'_>) -> Outcome<CacheSet> {
    let mut set = CacheSet::make(Geometry::small(64 << 10, 512), 1, Maker::Tools)?;
    let workload = set.further(0, 1, WRITES);
    kernel.leg(&mut set, &[workload], CRASH).context("the kernel begins")?;
    Ok(set)
}

fn resize_device(set: &CacheSet, sectors: u64) -> Outcome {
    let bytes = (set.geometry.data_offset_sectors + sectors) * 512;
    File::options().write(true).open(&set.backings[0])?.set_len(bytes)?;
    Ok(())
}

/// Writes to the volume that a daemon serves. Depending on `ending`, the daemon continues after
/// that or dies.
fn write(daemon: &Daemon, set: &mut CacheSet, seed: u64, ending: Ending) -> Outcome {
    let workload = set.further(0, seed, WRITES);
    let mut client = daemon.prove(set, 0)?;
    daemon.write(set, &workload, &mut client, ending)?;
    Ok(())
}

fn write_and_die(daemon: Daemon, set: &mut CacheSet, seed: u64) -> Outcome {
    write(&daemon, set, seed, CRASH)?;
    daemon.crash(set)?;
    Ok(())
}

/// Returns the engine's current number of dirty bytes. While the engine is slow to answer, the
/// status has an outdated value instead, so this asks up to a hundred times.
fn dirty_bytes(daemon: &Daemon, program: &Path) -> Outcome<u64> {
    let answers = (0..100).map(|_| daemon.status(program));
    let is_now = |status: &Result<serde_json::Value, _>| {
        status.as_ref().map_or(true, |status| status["volumes"][0]["outdated"] != true)
    };
    let status =
        answers.into_iter().find(is_now).context("the engine has not answered a hundred times")??;
    status["volumes"][0]["dirty_bytes"].as_u64().context("no number of dirty bytes")
}

/// We shrink a volume and its device is truncated; the kernel serves it. We grow it; the kernel
/// serves that, too. Then it grows under the kernel. What was cut off must never come back.
#[test]
fn a_volume_that_shrinks_and_grows() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let program = ours.program();
    let mut set = left_dirty_by(&kernel)?;

    // The odd end lies within a page.
    let small = 40 * MIB - 3;
    let daemon = Daemon::configured(program, &set, KEEP_DIRTY)?;
    write(&daemon, &mut set, 2, Ending::CleanStop)?;
    daemon.command(program, &["shrink", "v0", "--size", &(small * 512).to_string()])?;
    set.models[0].resize(small);
    write_and_die(daemon, &mut set, 3).context("smaller")?;
    judge(&set).context("smaller, and not yet cut")?;
    resize_device(&set, small)?;
    judge(&set).context("smaller, and cut")?;
    let workload = set.further(0, 4, WRITES);
    kernel.leg(&mut set, &[workload], CRASH).context("the kernel serves less")?;

    let large = 56 * MIB + 5;
    let daemon = Daemon::configured(program, &set, KEEP_DIRTY)?;
    write(&daemon, &mut set, 5, Ending::CleanStop)?;
    resize_device(&set, large)?;
    daemon.command(program, &["grow", "v0"])?;
    set.models[0].resize(large);
    write_and_die(daemon, &mut set, 6).context("larger")?;
    judge(&set).context("larger")?;
    let workload = set.further(0, 7, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CleanStop).context("the kernel serves more")?;
    judge(&set).context("served by the kernel")?;

    // A kernel uses the size of the device as it finds it, and so do we.
    for (seed, sectors) in [(8, 64 * MIB), (9, 72 * MIB)] {
        resize_device(&set, sectors)?;
        set.models[0].resize(sectors);
        let workload = set.further(0, seed, WRITES);
        let side: &dyn bcached_tests::side::Side = if seed == 8 { &kernel } else { &ours };
        side.leg(&mut set, &[workload], Ending::CleanStop).context(format_args!("grown to {sectors}"))?;
        judge(&set).context(format_args!("grown to {sectors}"))?;
    }
    kernel.take_over(&mut set, &[]).context("the backing device alone")
}

/// We move a set that a kernel left dirty to another cache device, and leave that dirty. The kernel
/// serves it and takes it over completely.
#[test]
fn a_cache_that_we_have_replaced() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let program = ours.program();
    let mut set = left_dirty_by(&kernel)?;

    let new = set.directory().join("new");
    File::create(&new)?.set_len(set.geometry.cache_bytes * 2)?;
    let daemon = Daemon::configured(program, &set, KEEP_DIRTY)?;
    write(&daemon, &mut set, 2, Ending::CleanStop)?;
    let before = dirty_bytes(&daemon, program)?;
    daemon.command(program, &["replace", "fast", "--with", new.to_str().context("text")?])?;
    set.cache = new;
    write(&daemon, &mut set, 3, Ending::CleanStop)?;
    let after = dirty_bytes(&daemon, program)?;
    assert!(before > 0 && after > 0, "dirty: {before} before, {after} after: {}", daemon.status(program)?);
    write_and_die(daemon, &mut set, 4).context("on the new cache")?;
    judge(&set).context("on the new cache")?;
    let workload = set.further(0, 5, WRITES);
    kernel.leg(&mut set, &[workload], CRASH).context("the kernel on the new cache")?;
    judge(&set).context("after the kernel on the new cache")?;
    let workload = set.further(0, 6, WRITES);
    ours.leg(&mut set, &[workload], Ending::CleanStop).context("we on it")?;
    kernel.take_over(&mut set, &[]).context("the backing device alone")
}
