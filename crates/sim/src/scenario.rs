//! A stage for failure scenarios: build one exact state, stop the world at one exact operation,
//! check one thing.
//!
//! Where a workload draws its steps, a scenario tells a story. Every call here runs the world until
//! the call is complete, so that a scenario reads from top to bottom. The same oracle judges all
//! answers. A scenario opens with the story (what was lost, by what, why), then plays exactly that,
//! and ends with one check.

use crate::digest::mix;
use crate::disk::{Device, Survivors};
use crate::driver::{Crash, HaltReason, OpView};
use crate::failure::FailureKind;
use crate::note::NoteState;
use crate::rig::Rig;
use crate::rig::client::Client;
use crate::stamp::SectorValue;
use crate::system::{Geometry, Refusal, System};
use crate::workload::Step;
use bcached_env::{Executor, join_all};
use std::cell::RefMut;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;

/// Maximum number of requests in flight.
const DEPTH: usize = 16;

/// A system on its devices, running or not.
pub struct ScenarioRig {
    rig: Rig,
    running: Option<(Executor, Client)>,
}

impl ScenarioRig {
    /// Makes a new system without starting it.
    #[must_use]
    pub fn new(system: Rc<dyn System>, geometry: Geometry, seed: u64) -> Self {
        Self { rig: Rig::new(system, geometry, DEPTH, mix(&[seed, 200])), running: None }
    }

    /// Starts a process and opens the system.
    ///
    /// # Errors
    /// If it does not open, or the world halts meanwhile.
    pub fn start(&mut self) -> Result<(), FailureKind> {
        assert!(self.running.is_none(), "one process at a time");
        let (mut executor, birth) = self.rig.executor();
        let opened = executor.block_on(birth.open());
        if let Some(fault) = self.rig.complaint() {
            return Err(fault);
        }
        match opened {
            Some(client) => {
                self.running = Some((executor, client?));
                Ok(())
            }
            None => Err(self.halted()),
        }
    }

    /// Makes one request, which must succeed.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub fn ask(&mut self, step: Step) -> Result<(), FailureKind> {
        self.together(vec![step])
    }

    /// Makes several requests that are in flight together and must all succeed.
    ///
    /// # Errors
    /// What is wrong with an answer.
    pub fn together(&mut self, steps: Vec<Step>) -> Result<(), FailureKind> {
        self.play(move |client| async move {
            for step in steps {
                client.go(step).await;
            }
            client.settle().await;
            Ok(())
        })
    }

    /// Makes several requests that are in flight together, and returns the answer of each; the
    /// caller judges refusals.
    ///
    /// # Errors
    /// If the world halts, or a read returns what it may not.
    pub fn attempt(&mut self, steps: Vec<Step>) -> Result<Vec<Result<(), Refusal>>, FailureKind> {
        self.play(move |client| async move {
            Ok(join_all(steps.into_iter().map(|step| client.attempt(step))).await)
        })
    }

    /// Reads sectors, judges them, and returns their values.
    ///
    /// # Errors
    /// If the read is refused or returns what it may not.
    pub fn values(&mut self, volume: u32, sectors: Range<u64>) -> Result<Vec<SectorValue>, FailureKind> {
        self.play(move |client| async move {
            let request = format!("read {volume} {sectors:?}");
            let values = client.values(volume, sectors).await;
            values.map_err(|refusal| FailureKind::Refused { request, refusal })
        })
    }

    /// Returns the values of sectors without judging them: the oracle is not told of this read.
    ///
    /// # Errors
    /// If the read is refused.
    pub fn unjudged(&mut self, volume: u32, sectors: Range<u64>) -> Result<Vec<SectorValue>, FailureKind> {
        self.play(move |client| async move {
            let request = format!("read {volume} {sectors:?}");
            let values = client.unjudged(volume, sectors).await;
            values.map_err(|refusal| FailureKind::Refused { request, refusal })
        })
    }

    /// Returns the pending requests of the running process as text, sorted.
    #[must_use]
    pub fn unanswered(&self) -> Vec<String> {
        self.running.as_ref().map(|(_, client)| client.unanswered()).unwrap_or_default()
    }

    /// Returns the virtual time in nanoseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.rig.world.borrow().now()
    }

    /// Reads and judges everything that was ever written.
    ///
    /// # Errors
    /// The first sector that is not what it must be.
    pub fn verify(&mut self) -> Result<(), FailureKind> {
        self.play(|client| async move {
            client.verify().await;
            Ok(())
        })
    }

    /// Starts `steps` and crashes the world at the first operation that `trap` picks (submitted or
    /// completed).
    ///
    /// # Errors
    /// If the steps end without such an operation, or something goes wrong before it.
    pub fn crash_at(
        &mut self,
        steps: Vec<Step>,
        trap: impl FnMut(&OpView) -> bool + 'static,
        crash: Crash,
        survivors: Survivors,
    ) -> Result<(), FailureKind> {
        self.crash_within(|stage| stage.together(steps), trap, crash, survivors)
    }

    /// Does the same as [`ScenarioRig::crash_at`], in the middle of a start.
    ///
    /// # Errors
    /// If the system has opened without that operation, or something goes wrong before.
    pub fn crash_in_start(
        &mut self,
        trap: impl FnMut(&OpView) -> bool + 'static,
        crash: Crash,
        survivors: Survivors,
    ) -> Result<(), FailureKind> {
        self.crash_within(Self::start, trap, crash, survivors)
    }

    /// Does the same as [`ScenarioRig::crash_at`], in the middle of whatever `act` does.
    ///
    /// Only a halt at the trap is the crash of the story. A hang before it is a failure.
    ///
    /// # Errors
    /// As [`ScenarioRig::crash_at`].
    pub fn crash_within(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), FailureKind>,
        trap: impl FnMut(&OpView) -> bool + 'static,
        crash: Crash,
        survivors: Survivors,
    ) -> Result<(), FailureKind> {
        self.rig.world.borrow_mut().set_trap(Box::new(trap));
        let done = act(self);
        self.crash(crash, survivors);
        match done {
            Err(FailureKind::Waiting { halt: HaltReason::Requested(_), .. }) => Ok(()),
            Err(fault) => Err(fault),
            Ok(()) => Err(FailureKind::Story("the operation to crash at never happened".to_owned())),
        }
    }

    /// Ends the process and the operations in flight as `crash` would.
    pub fn crash(&mut self, crash: Crash, survivors: Survivors) {
        self.running = None;
        self.rig.crash(crash, survivors);
    }

    /// Stops cleanly, and checks the structure on the devices.
    ///
    /// # Errors
    /// If it does not stop, or leaves something unsound.
    pub fn stop(&mut self) -> Result<(), FailureKind> {
        self.play(|client| async move { client.stop().await })?;
        self.crash(Crash::ProcessDeath, Survivors::Nothing);
        self.rig.inspect()
    }

    /// Returns a device, to give it faults or to change its content: 0 is the cache, `1 + v` backs
    /// volume `v`.
    pub fn device(&mut self, number: usize) -> RefMut<'_, Device> {
        RefMut::map(self.rig.world.borrow_mut(), |world| &mut world.devices[number])
    }

    /// Returns the note, to set it aside or to restore one.
    pub fn note(&mut self) -> RefMut<'_, NoteState> {
        self.rig.note.borrow_mut()
    }

    /// Returns the rig under the stage.
    #[must_use]
    pub const fn rig(&self) -> &Rig {
        &self.rig
    }

    /// Runs `script` in the running process.
    ///
    /// # Errors
    /// The first fault noticed.
    pub fn play<T: 'static, F>(&mut self, script: impl FnOnce(Client) -> F) -> Result<T, FailureKind>
    where
        F: Future<Output = Result<T, FailureKind>> + 'static,
    {
        let (executor, client) = self.running.as_mut().expect("the story starts the system first");
        let outcome = executor.block_on(script(client.clone()));
        if let Some(fault) = client.noticed() {
            return Err(fault);
        }
        if let Some(fault) = self.rig.complaint() {
            return Err(fault);
        }
        match outcome {
            Some(result) => result,
            None => Err(self.halted()),
        }
    }

    fn halted(&self) -> FailureKind {
        let halt = self.rig.world.borrow().halted().cloned();
        let halt = halt.expect("a script is unfinished only if the world halted");
        FailureKind::Waiting { halt, waiting: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{DiskFault, FaultRule, OpKind};
    use crate::driver::CHARGE_NS_MAX;
    use crate::system::{Tuning, passthrough::Passthrough};

    const WRITE: Step = Step::Write { volume: 0, sectors: 0..8, fua: false };
    const FLUSH: Step = Step::Flush { volume: 0 };

    fn stage() -> ScenarioRig {
        let geometry = Geometry {
            block_sectors: 8,
            set_block_sectors: 8,
            bucket_sectors: 128,
            buckets: 100,
            volumes: vec![1024],
            lodgers: Vec::new(),
            torn_sectors: 8,
            backing_volatile: true,
            cache_volatile: true,
            note_records: 100,
            tuning: Tuning::draw(0),
        };
        let mut stage = ScenarioRig::new(Rc::new(Passthrough), geometry, 1);
        stage.start().expect("the system opens");
        stage
    }

    fn flush(op: &OpView) -> bool {
        op.kind == OpKind::Flush
    }

    /// The write before the flush never completes: this hang is not the crash of the story.
    #[test]
    fn who_hangs_before_the_crash_has_not_crashed() {
        let mut stage = stage();
        let never = FaultRule::next(OpKind::Write, 1, DiskFault::Never);
        stage.device(1).faults.add(never);
        let steps = vec![WRITE, Step::Settle, FLUSH];
        let done = stage.crash_at(steps, flush, Crash::PowerCut, Survivors::Nothing);
        assert!(matches!(done, Err(FailureKind::Waiting { halt: HaltReason::Stuck, .. })), "{done:?}");
    }

    #[test]
    fn who_is_done_before_the_crash_has_not_crashed() {
        let mut stage = stage();
        let done = stage.crash_at(vec![WRITE], flush, Crash::PowerCut, Survivors::Nothing);
        assert!(matches!(done, Err(FailureKind::Story(_))), "{done:?}");
        stage.start().expect("the system opens");
        stage
            .crash_at(vec![FLUSH], flush, Crash::PowerCut, Survivors::Nothing)
            .expect("the operation happens");
    }

    #[test]
    fn one_long_piece_of_work_is_a_fault() {
        let mut stage = stage();
        let done = stage.play(|client| async move {
            client.env().charge(CHARGE_NS_MAX + 1);
            Ok(())
        });
        assert!(matches!(done, Err(FailureKind::Long(_))), "{done:?}");
    }
}
