//! Runs a whole workload, restarts included, from making the set to the last check, and defines
//! what happens after each crash.

use crate::digest::mix;
use crate::disk::{self, FaultRule, OpKind, Survivors, WrittenPart};
use crate::driver::Crash;
use crate::failure::FailureKind;
use crate::figures::RunCounts;
use crate::growth;
use crate::rig::client::Client;
use crate::rig::{Rig, Snapshot};
use crate::system::System;
use crate::workload::{Restart, Shape, Step, Workload};
use bcached_env::rng::Rng;
use std::cell::Cell;
use std::future::pending;
use std::rc::Rc;

/// Number of steps before the world comes to rest.
const LAST_STEPS: usize = 24;

/// Number of writes that a backing device refuses: few enough that the retries with back-off
/// outlast them.
const REFUSED: u32 = 6;

/// Creates the rig on which `workload` runs.
///
/// # Errors
/// A fault during the growth of the set that it starts from.
pub fn rig_for(system: &Rc<dyn System>, workload: &Workload) -> Result<Rig, FailureKind> {
    let start = match workload.grown {
        Some(growth) => growth::grown(system, growth)?,
        None => Snapshot::made(system.as_ref(), &workload.geometry, seed_of(workload)),
    };
    Ok(rig_from(system, workload, start))
}

/// Returns the seed of the world that `workload` runs in.
fn seed_of(workload: &Workload) -> u64 {
    mix(&[workload.seed, 100])
}

/// Creates the rig for `workload` with the devices in the state `start` before its first step, such
/// as a set that a kernel left.
#[must_use]
pub fn rig_from(system: &Rc<dyn System>, workload: &Workload, start: Snapshot) -> Rig {
    let (system, geometry) = (Rc::clone(system), workload.geometry.clone());
    let mut rig = Rig::resume(system, geometry, workload.depth, seed_of(workload), start);
    rig.troubled = workload.troubled;
    rig
}

/// Like [`whole`], on a rig of its own.
///
/// # Errors
/// The first fault.
pub fn whole_of(system: &Rc<dyn System>, workload: &Workload) -> Result<RunCounts, FailureKind> {
    whole(&mut rig_for(system, workload)?, workload)
}

/// Runs all of `workload` on `rig`, then verifies, stops, checks, cuts the power, and verifies once
/// more.
///
/// # Errors
/// The first fault.
pub fn whole(rig: &mut Rig, workload: &Workload) -> Result<RunCounts, FailureKind> {
    play(rig, workload)?;
    finish(rig, workload)?;
    Ok(rig.figures())
}

/// The progress of the run, shared with the process that runs it.
#[derive(Default)]
struct RunProgress {
    next: Cell<usize>,
    ending: Cell<Option<Restart>>,
    /// The seed of the damage to the volume table before the next process.
    table: Cell<Option<u64>>,
    /// The seed that picks the device to replace by an older copy of itself before the next
    /// process.
    older: Cell<Option<u64>>,
}

/// Runs the steps of `workload`; returns false if the world was ended from outside.
///
/// # Errors
/// The first fault.
pub fn play(rig: &mut Rig, workload: &Workload) -> Result<bool, FailureKind> {
    let steps: Rc<[Step]> = workload.steps.clone().into();
    let place = Rc::new(RunProgress::default());
    let keeps_copies = steps.iter().any(|step| matches!(step, Step::Older(_)));
    loop {
        let (script_steps, script_place) = (Rc::clone(&steps), Rc::clone(&place));
        let (next, verify) = (place.next.get(), place.next.get() % 2 == 1);
        if next > 0 && workload.troubled && !hard_start(rig, mix(&[workload.seed, next as u64, 12]))? {
            return Ok(false);
        }
        place.ending.set(None);
        if let Some(seed) = place.older.take() {
            rig.meet_older(seed)?;
        }
        if let Some(seed) = place.table.take() {
            rig.damage_table(seed)?;
        }
        rig.world.borrow_mut().heal();
        let lived = rig.live(move |client| steps_from(client, script_steps, script_place, verify))?;
        if rig.world.borrow().closed() {
            return Ok(false);
        }
        match (lived, place.ending.get()) {
            (Some(()), None) => return Ok(true),
            (Some(()), Some(_)) => {
                rig.has_stopped();
                rig.crash(Crash::ProcessDeath, Survivors::Nothing);
                // Half of the orderly stops are followed by a power cut, which must make no
                // difference.
                if place.next.get().is_multiple_of(2) {
                    rig.crash(Crash::PowerCut, Survivors::Nothing);
                }
                if keeps_copies {
                    rig.keep_copies();
                }
            }
            (None, Some(Restart::Death(seed))) => rig.crash(Crash::ProcessDeath, survivors(seed)),
            (None, Some(Restart::Power(seed))) => rig.crash(Crash::PowerCut, survivors(seed)),
            (None, Some(Restart::Twice(points, seed))) => {
                rig.crash(Crash::ProcessDeath, survivors(seed));
                if !short_life(rig, points, mix(&[seed, 1]))? {
                    return Ok(false);
                }
            }
            (None, _) => return Ok(false),
        }
        rig.inspect()?;
        if place.next.get().is_multiple_of(3) {
            rig.lengthen();
        }
    }
}

/// Runs one process that loses its power after `points` points, with survivors drawn from `seed`.
/// Returns false if the world was ended from outside.
fn short_life(rig: &mut Rig, points: u64, seed: u64) -> Result<bool, FailureKind> {
    rig.inspect()?;
    {
        let mut world = rig.world.borrow_mut();
        world.heal();
        let end = world.points() + points;
        world.crash_at(end);
    }
    rig.live(|client| async move {
        client.verify().await;
        Ok(())
    })?;
    if rig.world.borrow().closed() {
        return Ok(false);
    }
    rig.crash(Crash::PowerCut, survivors(seed));
    Ok(true)
}

/// Runs one process whose device fails during the start or soon afterwards. The process may refuse
/// to start, or serve what it can until it dies. The devices must be as good for the next process.
/// For half of the seeds nothing happens. Returns false if the world was ended from outside.
///
/// # Errors
/// The first fault; a refusal is a fault if no device has failed.
pub fn hard_start(rig: &mut Rig, seed: u64) -> Result<bool, FailureKind> {
    let mut rng = Rng::new(seed);
    if rng.one_in(2) {
        return Ok(true);
    }
    rig.heal();
    rig.troubled = true;
    let volumes = rig.geometry.volumes.len() as u64;
    let device =
        if rng.one_in(2) { 0 } else { usize::try_from(1 + rng.below(volumes)).expect("few devices") };
    rig.world.borrow_mut().devices[device].faults.add(failing(&mut rng));
    match rig.live(|client| async move {
        client.verify().await;
        Ok(())
    }) {
        Err(FailureKind::Open(_) | FailureKind::Volumes { .. }) if rig.world.borrow().has_failed() => {}
        lived => drop(lived?),
    }
    if rig.world.borrow().closed() {
        return Ok(false);
    }
    let crash = if rng.one_in(2) { Crash::ProcessDeath } else { Crash::PowerCut };
    rig.crash(crash, survivors(rng.next()));
    rig.inspect()?;
    Ok(true)
}

/// Draws a rule by which some operations of one kind fail, early in the life of a process.
fn failing(rng: &mut Rng) -> FaultRule {
    let mut pick = |count| usize::try_from(rng.below(count)).expect("few");
    let on = [OpKind::Read, OpKind::Write, OpKind::Flush][pick(3)];
    let landed = [WrittenPart::Nothing, WrittenPart::Part, WrittenPart::Everything][pick(3)];
    let skip = u32::try_from(pick(24) >> pick(4)).expect("few");
    FaultRule { skip, ..FaultRule::next(on, 1 << pick(4), disk::DiskFault::Fail(landed)) }
}

/// Chooses the survivors of a crash: each of the two extremes has a quarter of the seeds.
const fn survivors(seed: u64) -> Survivors {
    match seed % 4 {
        0 => Survivors::Nothing,
        1 => Survivors::Everything,
        _ => Survivors::Seeded(seed),
    }
}

async fn steps_from(
    client: Client,
    steps: Rc<[Step]>,
    place: Rc<RunProgress>,
    verify: bool,
) -> Result<(), FailureKind> {
    if verify {
        client.verify().await;
    }
    while let Some(step) = steps.get(place.next.get()) {
        place.next.set(place.next.get() + 1);
        let restart = match step {
            Step::Restart(restart) => restart,
            Step::Table(seed) => {
                place.table.set(Some(*seed));
                continue;
            }
            Step::Older(seed) => {
                place.older.set(Some(*seed));
                continue;
            }
            step => {
                client.go(step.clone()).await;
                continue;
            }
        };
        place.ending.set(Some(*restart));
        if *restart == Restart::Stop {
            return client.stop().await;
        }
        client.world().borrow_mut().halt_now();
        return pending().await;
    }
    client.settle().await;
    Ok(())
}

/// Runs the checks after the last step: everything is verified and stopped, and a power cut then
/// takes nothing. At the end no client writes any more: everything is written back, and repeated
/// reads come from the cache.
///
/// # Errors
/// The first fault.
pub fn finish(rig: &mut Rig, workload: &Workload) -> Result<(), FailureKind> {
    rig.crash(Crash::ProcessDeath, Survivors::Everything);
    verified_life(rig, Vec::new())?;
    rig.crash(Crash::PowerCut, Survivors::Nothing);
    rig.hurry();
    if workload.troubled {
        refused_life(rig, workload)?;
        rig.heal();
    }
    let last = last_steps(workload);
    inspected_life(rig, |client| async move {
        client.verify().await;
        client.go_through(last).await;
        client.written_back().await?;
        client.cached_again().await?;
        client.verify().await;
        client.stop().await
    })
}

/// Returns the steps after the last step, the same for each process that runs any: a script has one
/// list for them.
pub(crate) fn last_steps(workload: &Workload) -> Vec<Step> {
    Shape::aftermath(workload, mix(&[workload.seed, 7]), LAST_STEPS)
}

/// Runs one process whose backing devices refuse writes for some time and then accept them: its
/// dirty data must be written back within its life. Then the process dies.
fn refused_life(rig: &mut Rig, workload: &Workload) -> Result<(), FailureKind> {
    rig.heal();
    rig.troubled = true;
    let steps = last_steps(workload);
    rig.live(|client| async move {
        client.go_through(steps).await;
        for device in &mut client.world().borrow_mut().devices[1..] {
            let fault = disk::DiskFault::Fail(WrittenPart::Nothing);
            device.faults.add(FaultRule::next(OpKind::Write, REFUSED, fault));
        }
        client.written_back().await
    })?;
    rig.crash(Crash::ProcessDeath, Survivors::Everything);
    rig.inspect()
}

/// Runs one process after a crash: opens, verifies, does `steps`, verifies, stops in order, and is
/// checked. Where nodes are read slowly, the steps come first, so that the requests, and crashes,
/// happen during the walk.
///
/// # Errors
/// The first fault.
pub fn verified_life(rig: &mut Rig, steps: Vec<Step>) -> Result<(), FailureKind> {
    rig.heal();
    let (beside_walk, afterwards) =
        if rig.geometry.slow_nodes().is_some() { (steps, Vec::new()) } else { (Vec::new(), steps) };
    inspected_life(rig, move |client| async move {
        client.go_through(beside_walk).await;
        client.verify().await;
        client.world().borrow_mut().stop_observing();
        if !afterwards.is_empty() {
            client.go_through(afterwards).await;
            client.verify().await;
        }
        client.stop().await
    })
}

/// Runs one process and, if the world did not end meanwhile, checks what it leaves.
fn inspected_life<F>(rig: &mut Rig, script: impl FnOnce(Client) -> F + 'static) -> Result<(), FailureKind>
where
    F: Future<Output = Result<(), FailureKind>> + 'static,
{
    if rig.live(script)?.is_none() {
        return Ok(());
    }
    rig.has_stopped();
    rig.inspect()
}
