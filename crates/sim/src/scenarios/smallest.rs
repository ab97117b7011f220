//! Scenarios on the smallest system, without a cache: they show how a scenario works, and that its
//! outcome depends on its crash.

use super::stage::{FLUSH, THROUGH, failure, geometry, write, write_fua};
use crate::disk::{OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::failure::FailureKind;
use crate::scenario::ScenarioRig;
use crate::stamp::SectorValue;
use crate::system::passthrough::Passthrough;
use bcached_env::DiskId;
use std::rc::Rc;

/// The device of the only volume.
const BACKING: DiskId = DiskId(1);

super::scenarios! {
    include_str!("smallest.rs"),
    a_fua_write_is_there_from_its_answer_on,
    a_flush_that_fails_has_lost_what_it_covered_and_the_next_one_does_not_say_so,
    a_success_after_a_hidden_failure_is_a_lie_that_is_noticed,
    a_dead_process_leaves_a_torn_write_behind,
}

/// The system without a cache, running.
fn stage() -> ScenarioRig {
    let mut stage = ScenarioRig::new(Rc::new(Passthrough), geometry(vec![1024], THROUGH), 1);
    stage.start().expect("the system opens");
    stage
}

/// A file system writes its journal block with FUA, and relies on it from the moment of the answer.
/// The power fails just before the answer: old or new. Just after it: new, whatever else is lost.
fn a_fua_write_is_there_from_its_answer_on() {
    for (completed, survivors, wanted) in [
        (false, Survivors::Nothing, SectorValue::Written(0)),
        (false, Survivors::Everything, SectorValue::Written(1)),
        (true, Survivors::Nothing, SectorValue::Written(1)),
    ] {
        let mut stage = stage();
        let trap = move |op: &OpView| op.disk == BACKING && op.fua && op.completed == completed;
        stage.crash_at(vec![write_fua(0..8)], trap, Crash::PowerCut, survivors).unwrap();
        stage.start().unwrap();
        assert_eq!(stage.values(0, 0..8).unwrap(), [wanted; 8]);
    }
}

/// A drive's flush fails once, and what it covered is gone from the drive's cache. The next flush
/// succeeds, because there is nothing left to fail. A program that takes that success as proof for
/// the data has lost it (users met this with several file systems and databases in 2018).
fn a_flush_that_fails_has_lost_what_it_covered_and_the_next_one_does_not_say_so() {
    let mut stage = stage();
    stage.ask(write(0..8)).unwrap();
    failure(&mut stage, 1, OpKind::Flush, 1);
    let answers = stage.attempt(vec![FLUSH]).unwrap();
    assert!(answers[0].is_err(), "the client gets the error");
    stage.ask(FLUSH).unwrap();
    assert_eq!(stage.values(0, 0..8).unwrap(), [SectorValue::Written(0); 8]);
}

/// The same story with a system that hides the failure: the oracle must notice it. The system's
/// part is played by a flush of the scenario's own, which receives the failure in place of the
/// client's.
fn a_success_after_a_hidden_failure_is_a_lie_that_is_noticed() {
    let mut stage = stage();
    stage.ask(write(0..8)).unwrap();
    failure(&mut stage, 1, OpKind::Flush, 1);
    let hidden = stage.play(|client| {
        let disk = client.env().disk(BACKING);
        async move { Ok(disk.flush().await.is_err()) }
    });
    assert!(hidden.unwrap());
    stage.ask(FLUSH).unwrap();
    assert!(matches!(stage.verify(), Err(FailureKind::Read(_))));
}

/// The process dies with a write in flight: acknowledged data is there, and the rest is old or new
/// in pieces.
fn a_dead_process_leaves_a_torn_write_behind() {
    let mut stage = stage();
    stage.ask(write(0..64)).unwrap();
    let trap = |op: &OpView| op.kind == OpKind::Write && !op.completed;
    let torn = (0..100).find(|seed| {
        let mut other = self::stage();
        other.ask(write(0..64)).unwrap();
        other.crash_at(vec![write(0..64)], trap, Crash::ProcessDeath, Survivors::Seeded(*seed)).unwrap();
        other.start().unwrap();
        let values = other.values(0, 0..64).unwrap();
        values.contains(&SectorValue::Written(1)) && values.contains(&SectorValue::Written(2))
    });
    let seed = torn.expect("one subset in four tears a write");
    stage.crash_at(vec![write(0..64)], trap, Crash::ProcessDeath, Survivors::Seeded(seed)).unwrap();
    stage.start().unwrap();
    stage.verify().unwrap();
    stage.stop().unwrap();
}
