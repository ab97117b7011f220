//! Which set serves which volume.
//!
//! | the cache set | where its volumes are |
//! |---|---|
//! | works | in the set |
//! | has failed | still there: dirty data can be read, clean volumes go on without the cache |
//! | is being reopened | clean volumes in the bypass ([`crate::bypass`]), the others nowhere |
//! | works again | they move back into the set, one by one |
//!
//! A volume keeps its number all the way, so nobody outside needs to know. [`crate::reopen`] says
//! when a set is opened again and what can go wrong; [`crate::dispatch`] what happens to requests
//! meanwhile.

use crate::absence::Absences;
use crate::cache_reconnect::Returned;
use crate::dispatch::Caller;
use crate::{Limits, Machine};
use bcached_engine::{CacheSet, Error, Latencies, Options, Status, VolumeId, VolumeInfo, VolumeOptions};
use bcached_env::sync::Notify;
use bcached_env::{DiskId, Env, Time};
use bcached_format::{CacheMode, Uuid};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// How the set is opened, each time.
pub struct Opening {
    /// Its cache device, until another one takes its place.
    pub cache: Cell<DiskId>,
    /// UUID of the set.
    pub set_uuid: Uuid,
    /// The engine's options.
    pub options: RefCell<Options>,
    /// How long and for how many the host waits.
    pub limits: Limits,
}

/// Serves the volumes of one cache set. Clones are handles on the same host.
#[derive(Clone)]
pub struct Host(Rc<Inner>);

/// What all handles share.
pub struct Inner {
    /// Where it runs.
    pub env: Env,
    /// What it needs beside that.
    pub machine: Box<dyn Machine>,
    /// How the set is opened.
    pub opening: Opening,
    state: RefCell<State>,
    /// [`State::moves`] has changed, or the set may have failed.
    changed: Rc<Notify>,
    /// The task that reopens the set may have something to do.
    alarm: Notify,
}

/// Where the volumes are.
#[derive(Default)]
pub struct State {
    /// The cache set; `None` while it is closed.
    pub main: Option<CacheSet>,
    /// The set that serves volumes without their cache meanwhile, and its device in memory.
    pub bypass: Option<(CacheSet, DiskId)>,
    /// Volumes that are not in the cache set at this moment.
    pub away: BTreeMap<VolumeId, Away>,
    /// The status of the set when it was closed, if it is closed.
    pub before: Option<Box<Status>>,
    /// The number that the next volume of the closed set would have had.
    pub next: Option<VolumeId>,
    /// Why the set was closed, the last time.
    pub why: Option<Error>,
    /// The set could not be reopened for a reason that does not pass by itself.
    pub is_lost: bool,
    /// An attempt to reopen the set, or to bring its volumes back, is under way.
    pub is_trying: bool,
    /// Something has changed that may let the next attempt succeed: it is made at once.
    pub is_urgent: bool,
    /// The cache device has come back as another device, which takes the place of the former one as
    /// soon as the set is closed.
    pub returned: Option<Returned>,
    /// The session of the set since it was opened last: a number that no other opening has.
    pub session: u64,
    /// The host is being stopped.
    pub is_stopping: bool,
    /// Volumes with acknowledged writes that may have been lost, and when that became known. Flushes
    /// fail until one fails that was asked for later.
    pub owes: BTreeMap<VolumeId, Time>,
    /// Cache modes that were acknowledged and are not in the superblocks yet.
    pub owed_modes: BTreeMap<VolumeId, CacheMode>,
    /// Cache modes that were set while the set was being closed.
    pub new_modes: BTreeMap<VolumeId, CacheMode>,
    /// Backing devices that are gone, or are being replaced.
    pub absences: Absences,
    /// How many backing devices are being added to the set.
    adding: usize,
    /// Since when requests of a volume have been waiting for the cache.
    waits_since: BTreeMap<VolumeId, Time>,
    /// How often any volume has moved.
    moves: u64,
    /// What was written to the cache device before the set was opened last, in bytes. `None`: not
    /// known, as while the set is being closed or opened, or once it could not be opened.
    written_before: Option<u64>,
}

/// A volume that is not in the cache set at this moment.
pub struct Away {
    /// Its backing device.
    pub disk: DiskId,
    /// The volume when it left, with the options and the mode that it is to have.
    pub info: VolumeInfo,
    /// Latencies of its requests until then.
    pub latencies: Latencies,
    /// The bypass has it.
    pub on_bypass: bool,
}

impl State {
    /// The set that has the volume now, if any.
    pub(crate) fn set_of(&self, volume: VolumeId) -> Option<CacheSet> {
        match self.away.get(&volume) {
            Some(away) if away.on_bypass => self.bypass.as_ref().map(|(bypass, _)| bypass.clone()),
            Some(_) => None,
            None => self.main.clone(),
        }
    }

    /// How often any volume has moved.
    pub(crate) const fn moves(&self) -> u64 {
        self.moves
    }

    /// Since when requests of the volume have been waiting for its cache, if any have.
    pub(crate) fn waiting_since(&self, volume: VolumeId) -> Option<Time> {
        self.waits_since.get(&volume).copied()
    }

    /// A volume that has left the set, or whose set is closed, as whoever has it next will have it.
    pub(crate) fn parted(&mut self, volume: VolumeId) -> Option<&mut VolumeInfo> {
        let Self { main, away, before, .. } = self;
        if let Some(away) = away.get_mut(&volume) {
            return Some(&mut away.info);
        }
        let before = before.as_deref_mut().filter(|_| main.is_none())?;
        before.volumes.iter_mut().find(|info| info.id == volume)
    }
}

impl Host {
    /// Of an open set, which has all of its volumes.
    pub fn new(env: Env, machine: Box<dyn Machine>, opening: Opening, set: CacheSet) -> Self {
        let (changed, alarm) = (Rc::<Notify>::default(), Notify::new());
        let session = set.session();
        set.rings(Rc::clone(&changed));
        let state = State { main: Some(set), session, written_before: Some(0), ..State::default() };
        Self(Rc::new(Inner { env, machine, opening, state: RefCell::new(state), changed, alarm }))
    }

    /// What all handles share.
    #[must_use]
    pub fn inner(&self) -> &Inner {
        &self.0
    }

    /// Reads or changes the state without waking anybody.
    pub fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.state.borrow_mut())
    }

    /// Changes where a volume is, and wakes everybody who waits for that.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = self.with(|state| {
            state.moves += 1;
            change(state)
        });
        self.0.changed.notify_all();
        changed
    }

    /// How often any volume has moved.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.with(|state| state.moves)
    }

    /// Waits until that number is no longer `moves`.
    pub async fn moved(&self, moves: u64) {
        while self.moves() == moves {
            self.0.changed.wait().await;
        }
    }

    /// Likewise, at most until `until`.
    pub async fn moved_until(&self, moves: u64, until: Time) {
        while self.moves() == moves && self.0.env.now() < until {
            self.0.env.wait_until(&self.0.changed, until).await;
        }
    }

    /// Waits until `is_so`, which is asked whenever something has changed.
    pub(crate) async fn until(&self, is_so: impl Fn(&State) -> bool) {
        while !self.with(|state| is_so(state)) {
            self.0.changed.wait().await;
        }
    }

    /// Wakes everybody who waits for a change, though no volume has moved.
    pub(crate) fn wake(&self) {
        self.0.changed.notify_all();
    }

    /// Waits until something may have changed.
    pub(crate) async fn changes(&self) {
        self.0.changed.wait().await;
    }

    /// Likewise, at most until `until`.
    pub(crate) async fn changes_until(&self, until: Time) {
        self.0.env.wait_until(&self.0.changed, until).await;
    }

    /// Wakes the task that reopens the set: it has failed, or there is something else to try.
    pub fn alarm(&self) {
        self.0.alarm.notify_all();
    }

    /// Has the set reopened, or its volumes brought back, at once if that is still to be done.
    pub(crate) fn try_soon(&self) {
        self.with(|state| state.is_urgent = true);
        self.alarm();
    }

    /// Waits for [`Host::alarm`], at most until `until`.
    pub(crate) async fn alarmed(&self, until: Option<Time>) {
        match until {
            Some(until) => self.0.env.wait_until(&self.0.alarm, until).await,
            None => self.0.alarm.wait().await,
        }
    }

    /// What this host has written to the cache device, in bytes, if that is known.
    #[must_use]
    pub fn written_bytes(&self) -> Option<u64> {
        self.with(|state| {
            let by_set = state.main.as_ref().map_or(0, |set| set.written().total());
            Some(state.written_before? + by_set)
        })
    }

    /// Takes what was written before the set was opened last: from here on nobody knows.
    pub(crate) fn take_written(&self) -> Option<u64> {
        self.with(|state| state.written_before.take())
    }

    /// So many bytes were written before the set was opened last, or will be.
    pub(crate) fn put_written(&self, bytes: Option<u64>) {
        self.with(|state| state.written_before = bytes);
    }

    /// The set that has the volume now, if any.
    #[must_use]
    pub fn set_of(&self, volume: VolumeId) -> Option<CacheSet> {
        self.with(|state| state.set_of(volume))
    }

    /// The cache set.
    ///
    /// # Errors
    /// It is closed: why.
    pub fn main(&self) -> Result<CacheSet, Error> {
        let reason = self.reason();
        self.with(|state| state.main.clone()).ok_or(reason)
    }

    /// The cache set, if it has this volume, so that the volume can be changed.
    ///
    /// # Errors
    /// The volume is away, or the set is closed: why.
    pub fn settled(&self, volume: VolumeId) -> Result<CacheSet, Error> {
        let is_away = self.with(|state| state.away.contains_key(&volume));
        if is_away { Err(self.reason()) } else { self.main() }
    }

    /// Why the set was closed, the last time.
    #[must_use]
    pub fn reason(&self) -> Error {
        let why = self.with(|state| state.why.clone().filter(|_| !state.is_stopping));
        why.map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))
    }

    /// The options of a volume, wherever it is.
    #[must_use]
    pub fn options_of(&self, volume: VolumeId) -> VolumeOptions {
        let parted = self.with(|state| state.parted(volume).map(|info| info.options));
        let of_set = || self.with(|state| state.main.clone())?.volume_options(volume);
        parted.or_else(of_set).unwrap_or_default()
    }

    /// Changes all of them.
    ///
    /// # Errors
    /// Nobody has the volume.
    pub fn change_options(&self, volume: VolumeId, new: VolumeOptions) -> Result<(), Error> {
        let parted = self.with(|state| state.parted(volume).map(|info| info.options = new));
        match (parted, self.set_of(volume)) {
            (Some(()), None) => Ok(()),
            (_, Some(set)) => set.change_volume_options(volume, |begun| *begun = new),
            (None, None) => Err(self.reason()),
        }
    }

    /// Changes the cache mode of a volume, and its superblock. If the volume is away, its
    /// superblock follows when it is back.
    ///
    /// # Errors
    /// Nobody has the volume, or its superblock cannot be written.
    pub async fn change_mode(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        if self.with(|state| state.parted(volume).is_some()) {
            self.change_mode_for_now(volume, mode)?;
            self.with(|state| state.owed_modes.insert(volume, mode));
            return Ok(());
        }
        let set = self.main()?;
        // An older mode that is still owed must not be written after this one.
        let owed = self.with(|state| state.owed_modes.remove(&volume));
        let changed = set.set_cache_mode(volume, mode).await;
        if let (Err(_), Some(owed)) = (&changed, owed) {
            self.with(|state| *state.owed_modes.entry(volume).or_insert(owed));
            self.alarm();
        }
        changed
    }

    /// Changes its cache mode, and not its superblock.
    ///
    /// # Errors
    /// Nobody has the volume.
    pub fn change_mode_for_now(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        let parted = self.with(|state| {
            state.parted(volume)?.mode = mode;
            // The set's status is taken once more when it has stopped, and does not have this.
            if !state.away.contains_key(&volume) {
                state.new_modes.insert(volume, mode);
            }
            Some(())
        });
        match (parted, self.set_of(volume)) {
            (Some(()), None) => Ok(()),
            (_, Some(set)) => set.set_cache_mode_for_now(volume, mode),
            (None, None) => Err(self.reason()),
        }
    }

    /// Changes options of the set, now and for when it is reopened.
    pub fn change_cache(&self, change: &dyn Fn(&mut Options)) {
        change(&mut self.0.opening.options.borrow_mut());
        if let Some(set) = self.with(|state| state.main.clone()) {
            set.change_options(change);
        }
    }

    /// Since when requests of the volume have been waiting for its cache: since now, if none waited
    /// before.
    pub(crate) fn waits_since(&self, volume: VolumeId) -> Time {
        let now = self.0.env.now();
        self.with(|state| *state.waits_since.entry(volume).or_insert(now))
    }

    /// The set is open again and has its flash-only volumes. The others are still to be added,
    /// under their numbers.
    pub(crate) fn reopened(&self, set: CacheSet) {
        self.change(|state| {
            // Requests for flash-only volumes come under the numbers that these had.
            let former = state.before.take().map(|before| before.volumes).unwrap_or_default();
            set.resume_flash_only(&former);
            // Numbers of volumes that were removed are known outside, too, and are not used again.
            set.number_from(state.next.expect("it was kept when the set was closed"));
            let State { away, waits_since, .. } = state;
            waits_since.retain(|id, _| away.contains_key(id));
            state.session = set.session();
            set.rings(Rc::clone(&self.0.changed));
            state.main = Some(set);
        });
    }

    /// The set that was to be closed, since `begun`, stays open and has all of its volumes as
    /// before.
    pub(crate) fn stays_open(&self, set: CacheSet, begun: Time) {
        let (before, modes) = self.change(|state| {
            // Volumes that can do without the cache have not waited for it.
            state.waits_since.retain(|_, since| *since < begun);
            state.main = Some(set.clone());
            (state.before.take(), std::mem::take(&mut state.new_modes))
        });
        // The set has not been told what was changed meanwhile. A volume may be gone.
        for info in before.into_iter().flat_map(|before| before.volumes) {
            let _it_may_be_gone = set.change_volume_options(info.id, |begun| *begun = info.options);
        }
        for (id, mode) in modes {
            let _it_may_be_gone = set.set_cache_mode_for_now(id, mode);
        }
    }

    /// The cache set has the volume again.
    pub(crate) fn is_back(&self, volume: VolumeId) {
        self.change(|state| {
            state.away.remove(&volume);
            state.waits_since.remove(&volume);
        });
    }

    /// Why the set does not work, or was closed.
    pub(crate) fn failure(&self) -> Option<Error> {
        let (main, why) = self.with(|state| (state.main.clone(), state.why.clone()));
        main.map_or(why, |set| set.failure())
    }

    /// Whether requests that wait for the set have something to wait for.
    pub(crate) fn may_come_back(&self) -> bool {
        if self.with(|state| state.is_stopping) {
            return false;
        }
        // A device that is gone may return as another one, however the set has failed.
        match self.failure() {
            Some(error) if error.is_absence() => true,
            Some(error) if self.main().is_ok() => error.may_pass(),
            _ => self.main().is_ok() || !self.with(|state| state.is_lost),
        }
    }

    /// The set is open and has not failed. Volumes may be away.
    pub(crate) fn is_open_and_well(&self) -> bool {
        self.with(|state| state.main.as_ref().is_some_and(|set| set.failure().is_none()))
    }

    /// The set works, and has all of its volumes.
    #[must_use]
    pub fn works(&self) -> bool {
        self.is_open_and_well() && self.with(|state| state.away.is_empty())
    }

    /// Has `add` add a backing device to the set, once that is open.
    ///
    /// # Errors
    /// The set will not be opened again, or refuses the device.
    pub async fn add<T, F: Future<Output = Result<T, Error>>>(
        &self,
        add: impl FnOnce(CacheSet) -> F,
    ) -> Result<T, Error> {
        let set = loop {
            let moves = self.moves();
            match self.main() {
                Ok(set) => break set,
                Err(_) if self.may_come_back() => self.moved(moves).await,
                Err(error) => return Err(error),
            }
        };
        self.with(|state| state.adding += 1);
        let added = add(set).await;
        self.change(|state| state.adding -= 1);
        added
    }

    /// Whether a backing device is being added.
    pub(crate) fn is_adding(&self) -> bool {
        self.with(|state| state.adding > 0)
    }

    /// Drops the sets of a host that nobody runs any more. A request in flight without a task is
    /// held by its set, and holds the host: without this neither would go, and no client would hear
    /// that its engine is gone.
    pub fn abandon(&self) {
        let sets = self.with(|state| (state.main.take(), state.bypass.take()));
        drop(sets);
    }

    /// Acknowledged writes to these volumes may have been lost: their next flush is to say so.
    pub fn has_lost(&self, volumes: impl IntoIterator<Item = VolumeId>) {
        let now = self.0.env.now();
        self.with(|state| state.owes.extend(volumes.into_iter().map(|volume| (volume, now))));
    }

    /// Whether a flush must fail because acknowledged writes may have been lost. One that was asked
    /// for before that became known does not say it of what was acknowledged meanwhile.
    pub(crate) fn tells_of_loss(&self, Caller { volume, asked, .. }: Caller) -> bool {
        self.with(|state| {
            let Some(since) = state.owes.get(&volume).copied() else { return false };
            if asked > since {
                state.owes.remove(&volume);
            }
            true
        })
    }

    /// Stops the sets, once no attempt to bring volumes back is under way.
    ///
    /// # Errors
    /// Something that was acknowledged may not be durable, also if that was so before and no flush
    /// has told of it yet.
    pub async fn stop(&self) -> Result<(), Error> {
        self.change(|state| state.is_stopping = true);
        self.alarm();
        self.until(|state| !state.is_trying).await;
        let (main, bypass) = self.with(|state| (state.main.clone(), state.bypass.clone()));
        let of_bypass = match bypass {
            Some((bypass, _)) => bypass.stop().await,
            None => Ok(()),
        };
        let of_main = match main {
            Some(main) => main.stop().await,
            // Why it could not be reopened, not that it is being stopped.
            None => Err(self
                .with(|state| state.why.clone())
                .map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))),
        };
        let owes = self.with(|state| !state.owes.is_empty());
        let told = if owes { Err(Error::LostWrites) } else { Ok(()) };
        of_main.and(of_bypass).and(told)
    }
}
