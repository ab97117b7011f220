//! How a real kernel handles a set in which we have forgotten a volume, and a flash-only volume
//! that we have made.

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::examine_structure;
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, Kernel, Ours, Side as _, uuid_of};
use bcached_tests::uml::Uml;
use bcached_tests::workload::Model;

/// Number of writes in a turn.
const WRITES: u64 = 300;

/// Size of a flash-only volume, in sectors.
const SCRATCH: u64 = 8192;

/// We make a flash-only volume. A kernel serves it by its own rules and crashes. We serve it again,
/// change its size (the kernel serves it with the new size), and delete it. The kernel then starts
/// a set without volumes.
#[test]
fn a_flash_only_volume_of_ours() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let mut set = CacheSet::make(Geometry::small(64 << 10, 512), 0, Maker::Ours(ours.program()))?;
    let daemon = Daemon::start(ours.program(), &set)?;
    daemon.command(ours.program(), &["add", "scratch", "--size", &(SCRATCH * 512).to_string()])?;
    set.models.push(Model::blank(0, SCRATCH));
    let workload = set.further(0, 1, WRITES);
    let mut client = daemon.prove(&mut set, 0)?;
    daemon.write(&mut set, &workload, &mut client, Ending::CleanStop)?;
    drop(client);
    daemon.stop()?;

    let workload = set.further(0, 2, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CrashAfterFlush(7)).context("the kernel serves it")?;
    let workload = set.further(0, 3, WRITES);
    ours.leg(&mut set, &[workload], Ending::CleanStop).context("we serve it on")?;
    // Twice as large, then half as large: the kernel serves the size in the table.
    for (round, sectors) in [(4, SCRATCH * 2), (6, SCRATCH / 2)] {
        let daemon = Daemon::start(ours.program(), &set)?;
        let (verb, size) = (if round == 4 { "grow" } else { "shrink" }, (sectors * 512).to_string());
        let loss: &[&str] = if round == 4 { &[] } else { &["--accept-loss", "1G"] };
        // Settles what a crash has left undecided.
        drop(daemon.prove(&mut set, 0)?);
        daemon.command(ours.program(), &[&[verb, "scratch", "--size", &size], loss].concat())?;
        set.models[0].resize(sectors);
        let workload = set.further(0, round, WRITES);
        let mut client = daemon.prove(&mut set, 0)?;
        daemon.write(&mut set, &workload, &mut client, Ending::CleanStop)?;
        drop(client);
        daemon.stop()?;
        let workload = set.further(0, round + 1, WRITES);
        kernel.leg(&mut set, &[workload], Ending::CrashAfterFlush(7)).context("the kernel goes on")?;
    }
    let list = set.directory().join("lost.json");
    let daemon = Daemon::start(ours.program(), &set)?;
    drop(daemon.prove(&mut set, 0)?);
    daemon.command(ours.program(), &["remove", "scratch"])?;
    let list = list.to_str().expect("text");
    daemon.command(ours.program(), &["forget", "scratch", "--accept-loss", "1G", "--lost-ranges", list])?;
    daemon.stop()?;
    set.models.clear();
    examine_structure(&set.cache, &set.backings).context("offline")?;
    kernel.leg(&mut set, &[], Ending::CleanStop).context("the kernel starts what is left")
}

/// One of two backing devices dies while its data is in the cache, and we make the set forget it. A
/// kernel serves the other, crashes, and takes it over completely; nothing of the dead device is in
/// its way.
#[test]
fn a_dead_device_that_we_forget() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let mut set = CacheSet::make(Geometry::small(64 << 10, 512), 2, Maker::Tools)?;
    let dead = uuid_of(&set.backings[1])?;
    let daemon = Daemon::start(ours.program(), &set)?;
    daemon.command(
        ours.program(),
        &["set", &dead, "cache_mode=writeback", "writeback_running=0", "--runtime"],
    )?;
    // On a machine that is busy with other tests, the cache appears congested, and data that
    // bypasses it does not become dirty.
    let cache = set.cache.display().to_string();
    let patient =
        ["set", &cache, "congested_read_threshold_us=0", "congested_write_threshold_us=0", "--runtime"];
    daemon.command(ours.program(), &patient)?;
    for index in 0..2 {
        let workload = set.further(index, 1, WRITES);
        let mut client = daemon.prove(&mut set, index)?;
        daemon.write(&mut set, &workload, &mut client, Ending::CleanStop)?;
    }
    let status = daemon.status(ours.program())?;
    let volumes = status["volumes"].as_array().expect("a list");
    let its = volumes.iter().find(|volume| volume["uuid"] == dead.as_str()).expect("it is served");
    assert!(its["dirty_bytes"].as_u64() > Some(0), "nothing of it has become dirty: {its}");
    daemon.stop()?;
    let (_disk, _content) = (set.backings.pop(), set.models.pop());

    let list = set.directory().join("lost.json");
    let daemon = Daemon::start(ours.program(), &set)?;
    let path = list.to_str().expect("text");
    let words = ["forget", &dead, "--lost-ranges", path];
    assert!(daemon.command(ours.program(), &words).is_err(), "something of it is dirty");
    assert!(!list.exists());
    daemon.command(ours.program(), &[&words[..], &["--accept-loss", "1G"]].concat())?;
    assert!(std::fs::read_to_string(&list)?.contains("\"ranges\":[\n{"), "what was lost is listed");
    drop(daemon.prove(&mut set, 0)?);
    daemon.stop()?;
    examine_structure(&set.cache, &set.backings).context("offline")?;
    let workload = set.further(0, 2, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CrashAfterFlush(7)).context("the kernel goes on")?;
    let workload = set.further(0, 3, WRITES);
    kernel.take_over(&mut set, &[workload]).context("the kernel takes it")
}
