//! Volumes that leave their cache on one side and join it on the other: detached by us under load
//! and attached by a real kernel, and the reverse; with changes of the cache mode, and crashes, in
//! between. Data that a cache held before must never be used again.

use bcached_tests::failure::{Context as _, Outcome};
use bcached_tests::offline::examine_structure;
use bcached_tests::set::{CacheSet, Geometry, Maker};
use bcached_tests::side::{Daemon, Ending, Kernel, Ours, Side as _};
use bcached_tests::uml::Uml;

/// Number of writes in a turn.
const WRITES: u64 = 300;

/// Runs a turn of ours on one volume: `before`, writes, `after`, and a clean stop. The content is
/// checked again after each command.
fn our_turn(ours: &Ours, set: &mut CacheSet, seed: u64, before: &[&str], after: &[&str]) -> Outcome {
    let daemon = Daemon::start(ours.program(), set)?;
    drop(daemon.prove(set, 0)?);
    let uuid = bcached_tests::side::uuid_of(&set.backings[0])?;
    let command = |words: &[&str]| {
        let words: Vec<&str> =
            words.iter().map(|word| if *word == "VOLUME" { &*uuid } else { word }).collect();
        daemon.command(ours.program(), &words)
    };
    if !before.is_empty() {
        command(before)?;
    }
    let workload = set.further(0, seed, WRITES);
    let mut client = daemon.prove(set, 0)?;
    daemon.write(set, &workload, &mut client, Ending::CleanStop)?;
    drop(client);
    if !after.is_empty() {
        command(after)?;
        drop(daemon.prove(set, 0)?);
    }
    daemon.stop()?;
    Ok(())
}

const DETACH: &[&str] = &["detach", "VOLUME"];

/// We detach, and a kernel attaches and crashes. We open the result, change modes, and detach. A
/// kernel then finds the backing device complete.
#[test]
fn detached_by_us_and_attached_by_the_kernel() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let mut set = CacheSet::make(Geometry::small(64 << 10, 512), 1, Maker::Tools)?;
    let workload = set.further(0, 1, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CleanStop).context("the kernel's first turn")?;
    our_turn(&ours, &mut set, 2, &[], DETACH).context("we detach")?;
    let workload = set.further(0, 3, WRITES);
    kernel.attach(&mut set, &[workload], Ending::CrashAfterFlush(9)).context("the kernel attaches")?;
    our_turn(
        &ours,
        &mut set,
        4,
        &["set", "VOLUME", "cache_mode=writethrough", "--runtime"],
        &["flush", "VOLUME"],
    )
    .context("we go on")?;
    let workload = set.further(0, 5, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CleanStop).context("the kernel goes on")?;
    our_turn(&ours, &mut set, 6, &["flush", "VOLUME"], DETACH).context("we detach again")?;
    examine_structure(&set.cache, &set.backings).context("offline")?;
    let workload = set.further(0, 7, WRITES);
    kernel.attach(&mut set, &[workload], Ending::CleanStop).context("the kernel attaches again")?;
    kernel.take_over(&mut set, &[]).context("the backing device alone")
}

/// A kernel detaches, and we attach. Each time, the cache still holds data that was valid before.
#[test]
fn detached_by_the_kernel_and_attached_by_us() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let mut set = CacheSet::make(Geometry::small(512 << 10, 4096), 1, Maker::Ours(ours.program()))?;
    our_turn(&ours, &mut set, 1, &[], &[]).context("our first turn")?;
    let workload = set.further(0, 2, WRITES);
    kernel.take_over(&mut set, &[workload]).context("the kernel detaches")?;
    // Serving attaches the volume; what was cached before the kernel's writes is invalid.
    our_turn(&ours, &mut set, 3, &[], &[]).context("we attach")?;
    let workload = set.further(0, 4, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CrashAfterFlush(7)).context("the kernel crashes")?;
    our_turn(&ours, &mut set, 5, &[], DETACH).context("we detach")?;
    our_turn(&ours, &mut set, 6, &[], &[]).context("we attach again")?;
    kernel.take_over(&mut set, &[]).context("the backing device alone")
}

/// We attach and detach until the volume table is full. The next daemon gives the volume the first
/// inode again, of which the cache still has clean copies. A kernel serves it under that inode,
/// crashes, and continues with what we leave.
#[test]
fn the_first_number_again_and_then_the_kernel() -> Outcome {
    let Some(uml) = Uml::find() else { return Ok(()) };
    let (ours, kernel) = (Ours::find()?, Kernel(&uml));
    let geometry = Geometry { cache_bytes: 48 << 20, ..Geometry::small(8 << 10, 512) };
    let slots = (8 << 10) / 128;
    let mut set = CacheSet::make(geometry, 1, Maker::Tools)?;
    our_turn(&ours, &mut set, 1, &[], &["flush", "VOLUME"])?;
    let uuid = bcached_tests::side::uuid_of(&set.backings[0])?;
    let daemon = Daemon::start(ours.program(), &set)?;
    let command = |words: &[&str]| daemon.command(ours.program(), words);
    drop(daemon.prove(&mut set, 0)?);
    let cache = set.cache.clone();
    for taken in 1..=slots {
        command(&["detach", &uuid])?;
        let attached = command(&["attach", &uuid, "--cache", cache.to_str().expect("text")]);
        let words = attached.err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(words.contains(&format!("all {slots} slots")), taken == slots, "{taken}: {words}");
    }
    let workload = set.further(0, 2, WRITES);
    let mut client = daemon.prove(&mut set, 0)?;
    let fate = daemon.run(&workload, &mut client)?;
    set.models[0].apply(&workload, fate);
    drop(client);
    daemon.stop()?;

    our_turn(&ours, &mut set, 3, &[], &[]).context("the first number again")?;
    examine_structure(&set.cache, &set.backings).context("offline")?;
    let workload = set.further(0, 4, WRITES);
    kernel.leg(&mut set, &[workload], Ending::CrashAfterFlush(7)).context("the kernel goes on")?;
    our_turn(&ours, &mut set, 5, &[], DETACH).context("we detach")?;
    let workload = set.further(0, 6, WRITES);
    let refused = kernel.attach(&mut set, &[workload], Ending::CleanStop);
    assert!(refused.is_err(), "a kernel has no slot for it");
    our_turn(&ours, &mut set, 7, &[], &[]).context("we have")?;
    kernel.take_over(&mut set, &[]).context("the backing device alone")
}
