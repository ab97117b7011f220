//! A system under test with everything that outlives its processes: devices, note, and the clients'
//! knowledge.
//!
//! [`Rig::live`] is one process: a fresh executor, the opened system, and a script of clients. It
//! ends when the script ends or the world halts. [`Rig::crash`] then leaves the devices as the
//! crash would, and the next life can begin.

pub mod client;
pub(crate) mod panic;

use crate::digest::mix;
use crate::disk::{Device, Survivors};
use crate::driver::{CHARGE_NS_MAX, Crash, HaltReason, SimDriver, World, trace};
use crate::failure::FailureKind;
use crate::figures::RunCounts;
use crate::note::{MemoryNote, NoteState};
use crate::oracle::Oracle;
use crate::reached::RequestCoverage;
use crate::stamp::SectorValue;
use crate::system::{Geometry, System};
use bcached_engine::{BucketCount, Phases};
use bcached_env::rng::Rng;
use bcached_env::{Executor, RunOrder};
use client::Client;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Number of orderly stops whose devices are kept.
const COPIES_MAX: usize = 4;

/// Number of unanswered requests that a report names.
const WAITING_SHOWN: usize = 4;

/// The whole state at one moment, from which several runs can continue.
#[derive(Clone)]
pub struct Snapshot {
    /// The devices.
    pub devices: Vec<Device>,
    /// The note.
    pub note: NoteState,
    /// The clients' knowledge.
    pub oracle: Oracle,
}

impl Snapshot {
    /// Creates a newly made system.
    #[must_use]
    pub fn made(system: &dyn System, geometry: &Geometry, seed: u64) -> Self {
        let devices = system.make(geometry, seed);
        // Backing devices initially hold stamps.
        let mut firsts = vec![SectorValue::Written(0); geometry.volumes.len()];
        firsts.resize(geometry.count() as usize, SectorValue::Zero);
        let oracle = Oracle::new(firsts).with_blocks(u64::from(geometry.set_block_sectors));
        let note = NoteState::new(geometry.note_records);
        Self { devices, note, oracle }
    }

    /// Applies a crash.
    pub fn crash(&mut self, crash: Crash, survivors: Survivors) {
        for (number, device) in self.devices.iter_mut().enumerate() {
            match crash {
                Crash::PowerCut => device.cut_power(number as u64, survivors),
                Crash::ProcessDeath => device.kill_process(number as u64, survivors),
            }
        }
        remember(crash, &mut self.note, &mut self.oracle);
        trace::tell(|| {
            format!("= crash {crash}:{survivors}: its recovery follows, with its own clock and points")
        });
    }
}

/// Applies a crash to the note and to the clients' knowledge.
fn remember(crash: Crash, note: &mut NoteState, oracle: &mut Oracle) {
    match crash {
        Crash::PowerCut => {
            note.wipe();
            oracle.power_cut();
        }
        Crash::ProcessDeath => {
            note.process_dies();
            oracle.process_death();
        }
    }
}

/// A system and its surroundings.
pub struct Rig {
    /// The system under test.
    pub system: Rc<dyn System>,
    /// The geometry that it was made with.
    pub geometry: Geometry,
    /// Devices and clock.
    pub world: Rc<RefCell<World>>,
    /// The note.
    pub note: Rc<RefCell<NoteState>>,
    /// The oracle.
    pub oracle: Rc<RefCell<Oracle>>,
    /// Maximum number of requests in flight together.
    pub depth: usize,
    /// Devices fail: requests and stops may be refused.
    pub troubled: bool,
    /// The phases that the system is in, if it reports them.
    pub phases: Arc<Phases>,
    seed: u64,
    lives: u64,
    requests: Rc<Cell<u64>>,
    reached: Rc<RefCell<RequestCoverage>>,
    /// The devices after the last orderly stops, the newest last.
    copies: VecDeque<Vec<Device>>,
    /// The bucket counts of the last process at its orderly stop.
    counted: Rc<RefCell<Option<Vec<BucketCount>>>>,
}

impl Rig {
    /// Creates a rig with a newly made system.
    #[must_use]
    pub fn new(system: Rc<dyn System>, geometry: Geometry, depth: usize, seed: u64) -> Self {
        let made = Snapshot::made(system.as_ref(), &geometry, seed);
        Self::resume(system, geometry, depth, seed, made)
    }

    /// Creates a rig with a system in the state of `snapshot` and no process running.
    #[must_use]
    pub fn resume(
        system: Rc<dyn System>,
        geometry: Geometry,
        depth: usize,
        seed: u64,
        snapshot: Snapshot,
    ) -> Self {
        let data_starts: Vec<u64> = snapshot.devices.iter().map(Device::data_start).collect();
        let mut world = World::new(snapshot.devices, mix(&[seed, 1]));
        world.one_flush = system.flushes_alone();
        world.node_reads = geometry.slow_nodes();
        let oracle = Rc::new(RefCell::new(snapshot.oracle));
        let (volumes, judge) = (geometry.count(), Rc::clone(&oracle));
        let number = |volume: usize| u32::try_from(volume).expect("few volumes");
        world.on_drop(Box::new(move |device, sectors| {
            let mut judge = judge.borrow_mut();
            if device == 0 {
                // Only the system knows which volumes had data where something was dropped. And if
                // it cannot tell that nothing was dropped, it must not bring back data at the next
                // start that may be lost.
                (0..volumes).for_each(|volume| judge.device_dropped(volume, None));
            } else {
                let start = data_starts[device];
                let of_volume = sectors.iter().filter_map(|sector| sector.checked_sub(start)).collect();
                judge.device_dropped(number(device - 1), Some(&of_volume));
            }
        }));
        Self {
            system,
            geometry,
            world: Rc::new(RefCell::new(world)),
            note: Rc::new(RefCell::new(snapshot.note)),
            oracle,
            depth,
            troubled: false,
            phases: Arc::default(),
            seed,
            lives: 0,
            requests: Rc::default(),
            reached: Rc::default(),
            copies: VecDeque::new(),
            counted: Rc::default(),
        }
    }

    /// Runs one process: opens the system and lets `script` use it. Returns `None` if the world was
    /// halted on request.
    ///
    /// # Errors
    /// The first fault noticed.
    pub fn live<T: 'static, F>(
        &mut self,
        script: impl FnOnce(Client) -> F + 'static,
    ) -> Result<Option<T>, FailureKind>
    where
        F: Future<Output = Result<T, FailureKind>> + 'static,
    {
        let (mut executor, birth) = self.executor();
        let (noticed, waiting) = (Rc::clone(&birth.fault), Rc::clone(&birth.waiting));
        let main = async move { script(birth.open().await?).await };
        let outcome = panic::caught(|| {
            let outcome = executor.block_on(main);
            drop(executor);
            outcome
        });
        let outcome = outcome.map_err(FailureKind::Panic)?;
        if let Some(fault) = noticed.borrow_mut().take() {
            return Err(fault);
        }
        match outcome {
            Some(result) => {
                let result = result?;
                self.complaint().map_or(Ok(Some(result)), Err)
            }
            None => match self.complaint().or_else(|| self.waited(&waiting.borrow())) {
                Some(fault) => Err(fault),
                None => Ok(None),
            },
        }
    }

    /// Creates an executor for the next process, and that process's initial state.
    pub(crate) fn executor(&mut self) -> (Executor, client::ClientSetup) {
        self.lives += 1;
        *self.counted.borrow_mut() = None;
        let seed = mix(&[self.seed, self.lives, 2]);
        let driver = Box::new(SimDriver::new(Rc::clone(&self.world)));
        let mut executor = Executor::new(driver, RunOrder::Seeded(Rng::new(seed)), mix(&[seed, 3]));
        // Nodes are small here. Half of the processes yield wherever a process with large nodes
        // would.
        if mix(&[seed, 4]).is_multiple_of(2) {
            executor = executor.out_of_breath();
        }
        let birth = client::ClientSetup {
            env: executor.env(),
            system: Rc::clone(&self.system),
            geometry: self.geometry.clone(),
            note: MemoryNote::new(Rc::clone(&self.note)),
            world: Rc::clone(&self.world),
            oracle: Rc::clone(&self.oracle),
            depth: self.depth,
            troubled: self.troubled,
            phases: Arc::clone(&self.phases),
            requests: Rc::clone(&self.requests),
            reached: Rc::clone(&self.reached),
            counted: Rc::clone(&self.counted),
            fault: Rc::default(),
            waiting: Rc::default(),
        };
        (executor, birth)
    }

    /// Returns a fault that the world itself has detected.
    pub(crate) fn complaint(&self) -> Option<FailureKind> {
        let world = self.world.borrow();
        if let Some(what) = world.refused() {
            return Some(FailureKind::Form(what.to_owned()));
        }
        (world.charge_max() > CHARGE_NS_MAX).then(|| FailureKind::Long(world.charge_max()))
    }

    /// Returns the fault of a world that halted by itself, with the requests in `waiting`
    /// unanswered.
    fn waited(&self, waiting: &BTreeMap<u64, String>) -> Option<FailureKind> {
        match self.world.borrow().halted() {
            Some(halt @ (HaltReason::Stuck | HaltReason::Late | HaltReason::Spinning)) => {
                let waiting = waiting.values().take(WAITING_SHOWN).cloned().collect();
                Some(FailureKind::Waiting { halt: halt.clone(), waiting })
            }
            _ => None,
        }
    }

    /// Removes all device faults; from now on every request must succeed.
    pub fn heal(&mut self) {
        self.world.borrow_mut().heal();
        self.troubled = false;
    }

    /// Makes background work neither rest nor wait long, from the next life on.
    pub fn hurry(&mut self) {
        self.geometry.tuning.set = self.geometry.tuning.set.hurried();
    }

    /// Restores, while no process runs, the size of devices that were truncated, with zeroes beyond
    /// the former end. The system is not told.
    pub fn lengthen(&mut self) {
        let mut world = self.world.borrow_mut();
        for (device, sectors) in world.devices[1..].iter_mut().zip(&self.geometry.volumes) {
            let sectors = device.data_start() + sectors;
            let _longer = device.model.sectors >= sectors || device.resize(sectors);
        }
    }

    /// Replaces the volume table by a different one while no process runs.
    ///
    /// # Errors
    /// If the checker does not detect that.
    pub fn damage_table(&self, seed: u64) -> Result<(), FailureKind> {
        let mut world = self.world.borrow_mut();
        if !self.system.damage_table(&mut world.devices, seed) {
            return Ok(());
        }
        world.devices[0].is_spoiled = true;
        if self.system.finds_damage(&world.devices) {
            Ok(())
        } else {
            Err(FailureKind::Structure(vec!["the damage to the table of volumes is not found".to_owned()]))
        }
    }

    /// Records an orderly stop: everything that was damaged before it has been rewritten.
    pub fn has_stopped(&self) {
        self.world.borrow_mut().devices[0].is_spoiled = false;
    }

    /// Keeps the devices after an orderly stop, for [`Rig::meet_older`].
    pub fn keep_copies(&mut self) {
        if self.copies.len() == COPIES_MAX {
            self.copies.pop_front();
        }
        self.copies.push_back(self.world.borrow().devices.clone());
    }

    /// Runs, while no other process does, a process that finds an older copy of a device in its
    /// place. `seed` picks the copy, if there is one that is detectable. The process must refuse to
    /// serve, and must not write to anything that the refusal concerns. Nothing of this remains:
    /// the next process finds the right device.
    ///
    /// # Errors
    /// If it serves, or has written.
    pub fn meet_older(&self, seed: u64) -> Result<(), FailureKind> {
        let mut rng = Rng::new(seed);
        let now = self.world.borrow().devices.clone();
        // Only copies from before the last stop are sure to differ.
        let Some(older) = self.copies.len().checked_sub(1).filter(|count| *count > 0) else { return Ok(()) };
        let copies = &self.copies[usize::try_from(rng.below(older as u64)).expect("few copies")];
        let which =
            if rng.one_in(2) { 0 } else { usize::try_from(rng.below(now.len() as u64)).expect("few") };
        if !self.system.tells_older(&now, &copies[which], which) {
            return Ok(());
        }
        let mut devices = now;
        devices[which] = copies[which].clone();
        let (note, oracle) = (self.note.borrow().clone(), self.oracle.borrow().clone());
        let start = Snapshot { devices: devices.clone(), note, oracle };
        let (system, geometry) = (Rc::clone(&self.system), self.geometry.clone());
        let mut rig = Self::resume(system, geometry, self.depth, rng.next(), start);
        match rig.live(|_| async { Ok(()) }) {
            Err(FailureKind::Open(_)) => {}
            Err(other) => return Err(other),
            Ok(_) => return Err(FailureKind::Older { device: which, what: "it was served" }),
        }
        let concerned = if which == 0 { 1..devices.len() } else { which..which + 1 };
        let world = rig.world.borrow();
        let is_changed = |index: usize| !devices[index].has_content_of(&world.devices[index]);
        if concerned.into_iter().any(is_changed) {
            return Err(FailureKind::Older { device: which, what: "data was written to a refused volume" });
        }
        Ok(())
    }

    /// Ends the last life with `crash`.
    pub fn crash(&mut self, crash: Crash, survivors: Survivors) {
        self.world.borrow_mut().reboot(crash, survivors);
        remember(crash, &mut self.note.borrow_mut(), &mut self.oracle.borrow_mut());
    }

    /// Checks the structures on the devices; no process may be running.
    ///
    /// # Errors
    /// The inconsistencies found.
    pub fn inspect(&self) -> Result<(), FailureKind> {
        let devices = &self.world.borrow().devices;
        if devices[0].is_spoiled {
            // The checker reports that damage, as it should, and little else is consistent without
            // the table.
            return Ok(());
        }
        let counted = self.counted.borrow();
        let faults =
            panic::caught(|| self.system.inspect(devices, counted.as_deref())).map_err(FailureKind::Panic)?;
        if faults.is_empty() { Ok(()) } else { Err(FailureKind::Structure(faults)) }
    }

    /// Returns the current state.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            devices: self.world.borrow().devices.clone(),
            note: self.note.borrow().clone(),
            oracle: self.oracle.borrow().clone(),
        }
    }

    /// Returns counts of what was done so far.
    #[must_use]
    pub fn figures(&self) -> RunCounts {
        let world = self.world.borrow();
        let (operations, virtual_ns) = (world.operations(), world.now());
        let (lives, requests) = (self.lives, self.requests.get());
        let longest_ns = world.charge_max();
        let (begun, hosting) = (RunCounts::begun(&self.phases), world.hosting);
        let reached = *self.reached.borrow();
        RunCounts {
            requests,
            operations,
            lives,
            virtual_ns,
            longest_ns,
            begun,
            hosting,
            reached,
            ..RunCounts::default()
        }
    }
}
