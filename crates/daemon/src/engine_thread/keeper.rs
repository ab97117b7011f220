//! Which set serves which volume. One does, as long as it works.
//!
//! ```text
//!   works              all volumes are the set's
//!   has failed         still the set's: what is dirty can be read, what is clean goes on without the cache
//!   is opened again    the set has been let go of; volumes whose data is all on their backing devices are on the boat, a set
//!                      without a cache device, the others nowhere
//!   works again        they come home, one by one
//! ```
//!
//! A volume keeps its number all the way, so that nobody outside need know. When the set is opened again, and what may go wrong, is
//! in [`super::revival`]; what becomes of requests meanwhile in [`super::frozen`].

use super::absent::Absences;
use super::cache_back::Returned;
use crate::engine_failure;
use crate::failure::Failure;
use bcached_engine::{
    CacheSet, Error, Latencies, Options, Status, VolumeId, VolumeInfo, VolumeOptions, WaitedOut,
};
use bcached_env::sync::Notify;
use bcached_env::{DiskId, Env, Time};
use bcached_format::{CacheMode, Uuid};
use bcached_uring::Disks;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Has the engine's thread see to a note whose file is gone; whoever has noticed that calls it.
pub type NoteGone = Arc<dyn Fn() + Send + Sync>;

/// What the set is opened with, each time.
pub struct Recipe {
    /// Its device, until another one takes its place.
    pub cache: Cell<DiskId>,
    /// Of the set.
    pub set_uuid: Uuid,
    /// Where the note lies; `None`: nothing is ever written that would have to be noted.
    pub note: Option<PathBuf>,
    /// Called when somebody has removed the note's file.
    pub note_gone: NoteGone,
    /// The engine's options.
    pub options: RefCell<Options>,
}

/// Knows where each volume is. Clones know the same.
#[derive(Clone)]
pub struct Keeper(Rc<Inner>);

/// What all clones share.
pub struct Inner {
    pub env: Env,
    pub disks: Disks,
    pub recipe: Recipe,
    pub sets: RefCell<Sets>,
    /// [`Sets::turn`] has changed, or the set has failed, perhaps.
    changed: Rc<Notify>,
    /// There may be something to do for who opens sets again.
    alarm: Notify,
}

/// Who serves.
#[derive(Default)]
pub struct Sets {
    /// The set, unless it has been let go of.
    pub main: Option<CacheSet>,
    /// Serves volumes without their cache meanwhile, on a device in memory.
    pub boat: Option<(CacheSet, DiskId)>,
    /// The volumes that are not the set's at this moment.
    pub away: BTreeMap<VolumeId, Away>,
    /// What the set was when it was let go of, if it has been.
    pub before: Option<Box<Status>>,
    /// The number that its next volume would have had.
    pub next: Option<VolumeId>,
    /// Why it was, the last time.
    pub why: Option<Error>,
    /// The set could not be opened again, for a reason that does not pass.
    pub is_lost: bool,
    /// Somebody tries to bring all volumes home.
    pub is_trying: bool,
    /// The cache device is back as another one, which takes the place of the former as soon as that is let go of.
    pub returned: Option<Returned>,
    /// What tells the newest start of the set from all others.
    pub session: u64,
    /// The daemon stops.
    pub is_stopping: bool,
    /// Something acknowledged of these volumes may not be durable, which their next flush says.
    pub owes: BTreeSet<VolumeId>,
    /// The cache modes that superblocks are to say as soon as the set can write them: whoever said so was told that it is done.
    pub owed_modes: BTreeMap<VolumeId, CacheMode>,
    /// Cache modes that were said of volumes of a set that is being let go of.
    pub said_modes: BTreeMap<VolumeId, CacheMode>,
    /// Backing devices that are gone, or being exchanged.
    pub absences: Absences,
    /// Backing devices that the set takes up at this moment.
    adding: usize,
    /// Since when requests of a volume have had to wait.
    waits_since: BTreeMap<VolumeId, Time>,
    /// Counts every change of where a volume is.
    turn: u64,
}

/// A volume that is not the set's at this moment.
pub struct Away {
    /// Its backing device.
    pub disk: DiskId,
    /// What it was when it left; its options are those that it is to have.
    pub info: VolumeInfo,
    /// How long its requests took until then.
    pub latencies: Latencies,
    /// It is on the boat.
    pub is_aboard: bool,
}

impl Sets {
    /// Who serves the volume now, if anybody does.
    pub(super) fn home(&self, volume: VolumeId) -> Option<CacheSet> {
        match self.away.get(&volume) {
            Some(away) if away.is_aboard => self.boat.as_ref().map(|(boat, _)| boat.clone()),
            Some(_) => None,
            None => self.main.clone(),
        }
    }

    /// Counts every change of where a volume is.
    pub(super) const fn turn(&self) -> u64 {
        self.turn
    }

    /// What a volume was when it left the set, or when the set was let go of under it; whoever has it next has it so.
    pub(super) fn left(&mut self, volume: VolumeId) -> Option<&mut VolumeInfo> {
        let Self { main, away, before, .. } = self;
        if let Some(away) = away.get_mut(&volume) {
            return Some(&mut away.info);
        }
        let before = before.as_deref_mut().filter(|_| main.is_none())?;
        before.volumes.iter_mut().find(|info| info.id == volume)
    }
}

impl Keeper {
    /// All volumes are those of `set`.
    pub fn new(env: Env, disks: Disks, recipe: Recipe, set: CacheSet) -> Self {
        let (changed, alarm) = (Rc::<Notify>::default(), Notify::new());
        let session = set.session();
        set.rings(Rc::clone(&changed));
        let sets = Sets { main: Some(set), session, ..Sets::default() };
        Self(Rc::new(Inner { env, disks, recipe, sets: RefCell::new(sets), changed, alarm }))
    }

    pub fn inner(&self) -> &Inner {
        &self.0
    }

    /// Reads or changes who serves.
    pub fn with<T>(&self, look: impl FnOnce(&mut Sets) -> T) -> T {
        look(&mut self.0.sets.borrow_mut())
    }

    /// Changes where a volume is; who waits for that looks again.
    pub fn change<T>(&self, change: impl FnOnce(&mut Sets) -> T) -> T {
        let changed = self.with(|sets| {
            sets.turn += 1;
            change(sets)
        });
        self.0.changed.notify_all();
        changed
    }

    /// Counts the changes of where volumes are.
    pub fn turn(&self) -> u64 {
        self.with(|sets| sets.turn)
    }

    /// Until that count is another than `turn`.
    pub async fn turns(&self, turn: u64) {
        while self.turn() == turn {
            self.0.changed.wait().await;
        }
    }

    /// Until `is_so`, which is looked at whenever that count changes.
    pub(super) async fn until(&self, is_so: impl Fn(&Sets) -> bool) {
        while !self.with(|sets| is_so(sets)) {
            self.0.changed.wait().await;
        }
    }

    /// Something that somebody waits for may be so, though nobody has moved.
    pub(super) fn look_again(&self) {
        self.0.changed.notify_all();
    }

    /// Until something may be so that was not.
    pub(super) async fn changes(&self) {
        self.0.changed.wait().await;
    }

    /// Until something may be so that was not, or it is `until`.
    pub(super) async fn changes_until(&self, until: Time) {
        self.0.env.wait_until(&self.0.changed, until).await;
    }

    /// As [`Keeper::turns`], or until it is `until`.
    pub async fn turns_until(&self, turn: u64, until: Time) {
        while self.turn() == turn && self.0.env.now() < until {
            self.0.env.wait_until(&self.0.changed, until).await;
        }
    }

    /// Somebody has seen that the set has failed, or wants it to be looked at.
    pub fn alarm(&self) {
        self.0.alarm.notify_all();
    }

    /// Until somebody does, or it is `until`.
    pub async fn alarmed(&self, until: Option<Time>) {
        match until {
            Some(until) => self.0.env.wait_until(&self.0.alarm, until).await,
            None => self.0.alarm.wait().await,
        }
    }

    /// Who serves the volume now, if anybody does.
    pub fn home(&self, volume: VolumeId) -> Option<CacheSet> {
        self.with(|sets| sets.home(volume))
    }

    /// The set that a volume is to be added to, or that knows it; why not, if it has been let go of.
    pub fn main(&self) -> Result<CacheSet, Error> {
        let reason = self.reason();
        self.with(|sets| sets.main.clone()).ok_or(reason)
    }

    /// The set of a volume that can be changed now.
    pub fn settled(&self, volume: VolumeId) -> Result<CacheSet, Error> {
        let is_away = self.with(|sets| sets.away.contains_key(&volume));
        if is_away { Err(self.reason()) } else { self.main() }
    }

    /// Why the set was let go of, the last time.
    pub fn reason(&self) -> Error {
        let why = self.with(|sets| sets.why.clone().filter(|_| !sets.is_stopping));
        why.map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))
    }

    /// The options of a volume.
    pub fn options_of(&self, volume: VolumeId) -> VolumeOptions {
        let left = self.with(|sets| sets.left(volume).map(|info| info.options));
        let of_set = || self.with(|sets| sets.main.clone())?.volume_options(volume);
        left.or_else(of_set).unwrap_or_default()
    }

    /// Changes all of them.
    pub fn change_options(&self, volume: VolumeId, new: VolumeOptions) -> Result<(), Error> {
        let has_left = self.with(|sets| sets.left(volume).map(|info| info.options = new));
        match (has_left, self.home(volume)) {
            (Some(()), None) => Ok(()),
            (_, Some(set)) => set.change_volume_options(volume, |options| *options = new),
            (None, None) => Err(self.reason()),
        }
    }

    /// Changes the cache mode of a volume, in its superblock too; of one that has left the set as soon as it is back.
    pub async fn change_mode(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        if self.with(|sets| sets.left(volume).is_some()) {
            self.change_mode_for_now(volume, mode)?;
            self.with(|sets| sets.owed_modes.insert(volume, mode));
            return Ok(());
        }
        let set = self.main()?;
        // What is owed of an earlier word must not be written after this one.
        let owed = self.with(|sets| sets.owed_modes.remove(&volume));
        let changed = set.set_cache_mode(volume, mode).await;
        if let (Err(_), Some(owed)) = (&changed, owed) {
            self.with(|sets| *sets.owed_modes.entry(volume).or_insert(owed));
            self.alarm();
        }
        changed
    }

    /// Changes its cache mode, not in its superblock.
    pub fn change_mode_for_now(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        let has_left = self.with(|sets| {
            sets.left(volume)?.mode = mode;
            // What it was is looked at once more when the set has stopped.
            if !sets.away.contains_key(&volume) {
                sets.said_modes.insert(volume, mode);
            }
            Some(())
        });
        match (has_left, self.home(volume)) {
            (Some(()), None) => Ok(()),
            (_, Some(set)) => set.set_cache_mode_for_now(volume, mode),
            (None, None) => Err(self.reason()),
        }
    }

    /// Changes options of the set, also for when it is opened again.
    pub fn change_cache(&self, change: &dyn Fn(&mut Options)) {
        change(&mut self.0.recipe.options.borrow_mut());
        if let Some(set) = self.with(|sets| sets.main.clone()) {
            set.change_options(change);
        }
    }

    /// Since when requests of the volume have to wait: since now, if they have not had to before.
    pub fn waits_since(&self, volume: VolumeId) -> Time {
        let now = self.0.env.now();
        self.with(|sets| *sets.waits_since.entry(volume).or_insert(now))
    }

    /// The set is open again, and has the volumes without a backing device; the others come to it under their numbers.
    pub fn is_open_again(&self, set: CacheSet) {
        self.change(|sets| {
            // Requests for those that live in it alone come under the numbers that they had.
            let former = sets.before.take().map(|before| before.volumes).unwrap_or_default();
            set.resume_flash_only(&former);
            // Those of volumes that are gone are known to somebody, too.
            set.number_from(sets.next.expect("it was kept when the set was let go of"));
            let Sets { away, waits_since, .. } = sets;
            waits_since.retain(|id, _| away.contains_key(id));
            sets.session = set.session();
            set.rings(Rc::clone(&self.0.changed));
            sets.main = Some(set);
        });
    }

    /// The set was to be let go of, since `begun`, and has all of its volumes as before.
    pub fn is_not_let_go(&self, set: CacheSet, begun: Time) {
        let (before, said) = self.change(|sets| {
            // Who can do without the cache has waited for nothing.
            sets.waits_since.retain(|_, since| *since < begun);
            sets.main = Some(set.clone());
            (sets.before.take(), std::mem::take(&mut sets.said_modes))
        });
        // What somebody has changed meanwhile the set did not hear of.
        for info in before.into_iter().flat_map(|before| before.volumes) {
            let _it_may_be_gone = set.change_volume_options(info.id, |begun| *begun = info.options);
        }
        for (id, mode) in said {
            let _it_may_be_gone = set.set_cache_mode_for_now(id, mode);
        }
    }

    /// The volume is the set's again.
    pub fn is_home(&self, volume: VolumeId) {
        self.change(|sets| {
            sets.away.remove(&volume);
            sets.waits_since.remove(&volume);
        });
    }

    /// Why the set does not work, or was let go of.
    pub(super) fn failure(&self) -> Option<Error> {
        let (main, why) = self.with(|sets| (sets.main.clone(), sets.why.clone()));
        main.map_or(why, |set| set.failure())
    }

    /// What waits for the set has something to wait for.
    pub fn may_come_back(&self) -> bool {
        if self.with(|sets| sets.is_stopping) {
            return false;
        }
        // A device that is gone may return as another one, however the set has failed.
        match self.failure() {
            Some(error) if error.is_absence() => true,
            Some(error) if self.main().is_ok() => error.may_pass(),
            _ => self.main().is_ok() || !self.with(|sets| sets.is_lost),
        }
    }

    /// Adds a backing device to the set, when there is one.
    pub async fn add<T, F: Future<Output = Result<T, Error>>>(
        &self,
        add: impl FnOnce(CacheSet) -> F,
    ) -> Result<T, Error> {
        let set = loop {
            let turn = self.turn();
            match self.main() {
                Ok(set) => break set,
                Err(_) if self.may_come_back() => self.turns(turn).await,
                Err(error) => return Err(error),
            }
        };
        self.with(|sets| sets.adding += 1);
        let added = add(set).await;
        self.change(|sets| sets.adding -= 1);
        added
    }

    /// A backing device is being taken up.
    pub fn is_adding(&self) -> bool {
        self.with(|sets| sets.adding > 0)
    }

    /// A snapshot: of the set, or of what it was, with all volumes wherever they are.
    pub fn status(&self) -> Status {
        let (main, boat) = self.with(|sets| (sets.main.clone(), sets.boat.clone()));
        let afloat = boat.map(|(boat, _)| boat.status());
        let now = main.map(|main| main.status());
        self.with(|sets| {
            let before = || sets.before.as_deref().expect("it was kept when the set was let go of").clone();
            let mut status = now.unwrap_or_else(before);
            // They are served, or soon will be.
            status.unserved.retain(|left| !sets.away.values().any(|away| away.info.uuid == left.uuid));
            for (id, away) in &sets.away {
                let shown = afloat.as_ref().filter(|_| away.is_aboard).and_then(|afloat| {
                    let at = afloat.volumes.iter().position(|volume| volume.id == *id)?;
                    Some((afloat.volumes[at].clone(), afloat.latencies.get(at)?.clone()))
                });
                let (info, latencies) = shown.unwrap_or_else(|| (away.info.clone(), away.latencies.clone()));
                match status.volumes.iter().position(|volume| volume.id == *id) {
                    Some(at) => (status.volumes[at], status.latencies[at]) = (info, latencies),
                    None => {
                        status.volumes.push(info);
                        status.latencies.push(latencies);
                    }
                }
            }
            let now = self.0.env.now();
            let waited_out = |info: &VolumeInfo| {
                let is_over = |since: Time| now >= since + info.options.freeze_timeout;
                let cache = sets.waits_since.get(&info.id).copied().is_some_and(is_over);
                let backing = sets.absences.missed_since(info.id).is_some_and(is_over);
                (cache || backing).then_some(WaitedOut { volume: info.id, cache, backing })
            };
            status.waited_out = status.volumes.iter().filter_map(waited_out).collect();
            status
        })
    }

    /// Nobody runs the sets any more. A request that is under way without a task is kept by its set, and keeps who has asked, who knows the keeper:
    /// only when that has no set any more all of them go with the executor, and each request is answered that whoever serves it is gone.
    pub fn is_over(&self) {
        let sets = self.with(|sets| (sets.main.take(), sets.boat.take()));
        drop(sets);
    }

    /// Stops whoever serves, when nobody tries to bring volumes home any more.
    ///
    /// # Errors
    /// Something that was acknowledged may not have been made durable.
    pub async fn stop(&self) -> Result<(), Error> {
        self.change(|sets| sets.is_stopping = true);
        self.alarm();
        self.until(|sets| !sets.is_trying).await;
        let (main, boat) = self.with(|sets| (sets.main.clone(), sets.boat.clone()));
        let landed = match boat {
            Some((boat, _)) => boat.stop().await,
            None => Ok(()),
        };
        let stopped = match main {
            Some(main) => main.stop().await,
            // Not that it is being stopped, but why it could not be opened again.
            None => Err(self
                .with(|sets| sets.why.clone())
                .map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))),
        };
        stopped.and(landed)
    }

    /// What cannot be had of the machine for an opening, as an error of the set.
    pub fn refused(failure: &Failure) -> Error {
        tracing::warn!(event = "cache-not-opened-again", "{failure}");
        Error::Inconsistent(engine_failure::NOT_GIVEN)
    }
}
