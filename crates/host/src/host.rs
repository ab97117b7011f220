//! Tracks which set serves which volume.
//!
//! | the cache set | where its volumes are |
//! |---|---|
//! | works | in the set |
//! | has failed | still in it: dirty data can be read, clean volumes do without the cache |
//! | is being reopened | clean ones in the cacheless set ([`crate::without_cache`]), rest nowhere |
//! | works again | they move back into the set, one by one |
//!
//! A volume keeps its number throughout, so its clients do not notice. [`crate::reopen`] describes
//! when a set is reopened and what can go wrong, [`crate::dispatch`] what happens to requests in
//! the meantime.

use crate::cache_reconnect::ReturnedCache;
use crate::dispatch::RequestSource;
use crate::missing_devices::MissingDevices;
use crate::{Limits, Machine, SetNote};
use bcached_engine::{CacheSet, Error, Latencies, Options, Status, VolumeId, VolumeInfo, VolumeOptions};
use bcached_env::sync::Notify;
use bcached_env::{DiskId, Env, Time};
use bcached_format::{CacheMode, Uuid};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The parameters for opening the set, each time.
pub struct OpenParams {
    /// The cache device, until another one takes its place.
    pub cache: Cell<DiskId>,
    /// UUID of the set.
    pub set_uuid: Uuid,
    /// The set's note, of which the set has a handle.
    pub note: SetNote,
    /// The engine's options.
    pub options: RefCell<Options>,
    /// Time and size limits of the host.
    pub limits: Limits,
}

/// Serves the volumes of one cache set. Clones are handles on the same host.
#[derive(Clone)]
pub struct Host(Rc<HostInner>);

/// The data that all handles share.
pub struct HostInner {
    /// The environment it runs in.
    pub env: Env,
    /// What the host needs of the machine besides the environment.
    pub machine: Box<dyn Machine>,
    /// How the set is opened.
    pub opening: OpenParams,
    state: RefCell<HostState>,
    /// Notified when [`HostState::moves`] has changed, or the set may have failed.
    changed: Rc<Notify>,
    /// Notified when the task that reopens the set may have something to do.
    alarm: Notify,
}

/// Where the volumes are.
#[derive(Default)]
pub struct HostState {
    /// The cache set; `None` while it is closed.
    pub main: Option<CacheSet>,
    /// The set that serves volumes without their cache in the meantime, and its device in memory.
    pub cacheless: Option<(CacheSet, DiskId)>,
    /// Volumes that are not in the cache set at this moment.
    pub away: BTreeMap<VolumeId, AwayVolume>,
    /// The status of the set when it was closed, if it is closed.
    pub before: Option<Box<Status>>,
    /// The number that the next new volume of the closed set would have got.
    pub next: Option<VolumeId>,
    /// Why the set was last closed.
    pub why: Option<Error>,
    /// Whether the set could not be reopened for a permanent reason.
    pub is_lost: bool,
    /// Whether an attempt to reopen the set, or to bring its volumes back, is in progress.
    pub is_trying: bool,
    /// Whether something has changed that may let the next attempt succeed, so that it is made at
    /// once.
    pub is_urgent: bool,
    /// The cache device that has come back as another device. It takes the place of the former one
    /// as soon as the set is closed.
    pub returned: Option<ReturnedCache>,
    /// The session of the set since it was last opened: a number that is unique to this opening.
    pub session: u64,
    /// Whether the host is being stopped.
    pub is_stopping: bool,
    /// Volumes with acknowledged writes that may have been lost, and when that became known.
    /// Flushes fail until one has failed that was requested later.
    pub owes: BTreeMap<VolumeId, Time>,
    /// Cache modes that were acknowledged and are not in the superblocks yet.
    pub owed_modes: BTreeMap<VolumeId, CacheMode>,
    /// Cache modes that were set while the set was being closed.
    pub new_modes: BTreeMap<VolumeId, CacheMode>,
    /// Backing devices that are gone, or are being replaced.
    pub absences: MissingDevices,
    /// Number of backing devices that are being added to the set.
    adding: usize,
    /// The times since which requests of a volume have been waiting for the cache.
    waits_since: BTreeMap<VolumeId, Time>,
    /// Number of times that any volume has moved.
    moves: u64,
    /// Bytes written to the cache device before the set was last opened. `None`: unknown, which is
    /// the case while the set is being closed or opened, or once it could not be opened.
    written_before: Option<u64>,
}

/// A volume that is not in the cache set at this moment.
pub struct AwayVolume {
    /// Its backing device.
    pub disk: DiskId,
    /// The volume when it left, with the options and the mode that it is to have.
    pub info: VolumeInfo,
    /// Latencies of its requests up to that point.
    pub latencies: Latencies,
    /// Whether the cacheless set has it.
    pub is_cacheless: bool,
}

impl HostState {
    /// Returns the set that has the volume now, if any.
    pub(crate) fn set_of(&self, volume: VolumeId) -> Option<CacheSet> {
        match self.away.get(&volume) {
            Some(away) if away.is_cacheless => {
                self.cacheless.as_ref().map(|(cacheless, _)| cacheless.clone())
            }
            Some(_) => None,
            None => self.main.clone(),
        }
    }

    /// Returns how often any volume has moved.
    pub(crate) const fn moves(&self) -> u64 {
        self.moves
    }

    /// Returns the time since which requests of the volume have been waiting for its cache, if any
    /// have.
    pub(crate) fn waiting_since(&self, volume: VolumeId) -> Option<Time> {
        self.waits_since.get(&volume).copied()
    }

    /// Returns a volume that has left the set, or whose set is closed, in the state in which its
    /// next set will get it.
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
    /// Creates a host for an open set that has all of its volumes.
    pub fn new(env: Env, machine: Box<dyn Machine>, opening: OpenParams, set: CacheSet) -> Self {
        let (changed, alarm) = (Rc::<Notify>::default(), Notify::new());
        let session = set.session();
        set.rings(Rc::clone(&changed));
        let state = HostState { main: Some(set), session, written_before: Some(0), ..HostState::default() };
        Self(Rc::new(HostInner { env, machine, opening, state: RefCell::new(state), changed, alarm }))
    }

    /// Returns the data that all handles share.
    #[must_use]
    pub fn inner(&self) -> &HostInner {
        &self.0
    }

    /// Reads or changes the state without waking any task.
    pub fn with<T>(&self, look: impl FnOnce(&mut HostState) -> T) -> T {
        look(&mut self.0.state.borrow_mut())
    }

    /// Changes where a volume is, and wakes all tasks that wait for such a change.
    pub fn change<T>(&self, change: impl FnOnce(&mut HostState) -> T) -> T {
        let changed = self.with(|state| {
            state.moves += 1;
            change(state)
        });
        self.0.changed.notify_all();
        changed
    }

    /// Returns how often any volume has moved.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.with(|state| state.moves)
    }

    /// Waits until that number differs from `moves`.
    pub async fn moved(&self, moves: u64) {
        while self.moves() == moves {
            self.0.changed.wait().await;
        }
    }

    /// Does the same, but at most until `until`.
    pub async fn moved_until(&self, moves: u64, until: Time) {
        while self.moves() == moves && self.0.env.now() < until {
            self.0.env.wait_until(&self.0.changed, until).await;
        }
    }

    /// Waits until `is_so` holds, which is evaluated whenever something has changed.
    pub(crate) async fn until(&self, is_so: impl Fn(&HostState) -> bool) {
        while !self.with(|state| is_so(state)) {
            self.0.changed.wait().await;
        }
    }

    /// Wakes all tasks that wait for a change, although no volume has moved.
    pub(crate) fn wake(&self) {
        self.0.changed.notify_all();
    }

    /// Waits until something may have changed.
    pub(crate) async fn changes(&self) {
        self.0.changed.wait().await;
    }

    /// Does the same, but at most until `until`.
    pub(crate) async fn changes_until(&self, until: Time) {
        self.0.env.wait_until(&self.0.changed, until).await;
    }

    /// Wakes the task that reopens the set: the set has failed, or there is something else to try.
    pub fn alarm(&self) {
        self.0.alarm.notify_all();
    }

    /// Lets the set be reopened, or its volumes be brought back, at once if that is still to be
    /// done.
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

    /// Returns the number of bytes that this host has written to the cache device, if known.
    #[must_use]
    pub fn written_bytes(&self) -> Option<u64> {
        self.with(|state| {
            let by_set = state.main.as_ref().map_or(0, |set| set.written().total());
            Some(state.written_before? + by_set)
        })
    }

    /// Takes the number of bytes written before the set was last opened, which is unknown until it
    /// is put back.
    pub(crate) fn take_written(&self) -> Option<u64> {
        self.with(|state| state.written_before.take())
    }

    /// Stores the number of bytes written before the set was last opened, or is opened next.
    pub(crate) fn put_written(&self, bytes: Option<u64>) {
        self.with(|state| state.written_before = bytes);
    }

    /// Returns the set that has the volume now, if any.
    #[must_use]
    pub fn set_of(&self, volume: VolumeId) -> Option<CacheSet> {
        self.with(|state| state.set_of(volume))
    }

    /// Returns the cache set.
    ///
    /// # Errors
    /// The set is closed; the error says why.
    pub fn main(&self) -> Result<CacheSet, Error> {
        let reason = self.reason();
        self.with(|state| state.main.clone()).ok_or(reason)
    }

    /// Returns the cache set if it has this volume, so that the volume can be changed.
    ///
    /// # Errors
    /// The volume is away, or the set is closed; the error says why.
    pub fn settled(&self, volume: VolumeId) -> Result<CacheSet, Error> {
        let is_away = self.with(|state| state.away.contains_key(&volume));
        if is_away { Err(self.reason()) } else { self.main() }
    }

    /// Returns why the set was last closed.
    #[must_use]
    pub fn reason(&self) -> Error {
        let why = self.with(|state| state.why.clone().filter(|_| !state.is_stopping));
        why.map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))
    }

    /// Returns the options of a volume, wherever it is.
    #[must_use]
    pub fn options_of(&self, volume: VolumeId) -> VolumeOptions {
        let parted = self.with(|state| state.parted(volume).map(|info| info.options));
        let of_set = || self.with(|state| state.main.clone())?.volume_options(volume);
        parted.or_else(of_set).unwrap_or_default()
    }

    /// Changes all options of a volume.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn change_options(&self, volume: VolumeId, new: VolumeOptions) -> Result<(), Error> {
        let parted = self.with(|state| state.parted(volume).map(|info| info.options = new));
        match (parted, self.set_of(volume)) {
            (Some(()), None) => Ok(()),
            (_, Some(set)) => set.change_volume_options(volume, |begun| *begun = new),
            (None, None) => Err(self.reason()),
        }
    }

    /// Changes the cache mode of a volume, and its superblock. If the volume is away, its
    /// superblock is written when the volume is back.
    ///
    /// # Errors
    /// The volume does not exist, or its superblock cannot be written.
    pub async fn change_mode(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        if self.with(|state| state.parted(volume).is_some()) {
            self.change_mode_for_now(volume, mode)?;
            self.with(|state| state.owed_modes.insert(volume, mode));
            return Ok(());
        }
        let set = self.main()?;
        // An older mode that is still to be written must not be written after this one.
        let owed = self.with(|state| state.owed_modes.remove(&volume));
        let changed = set.set_cache_mode(volume, mode).await;
        if let (Err(_), Some(owed)) = (&changed, owed) {
            self.with(|state| *state.owed_modes.entry(volume).or_insert(owed));
            self.alarm();
        }
        changed
    }

    /// Changes the cache mode of a volume, but not its superblock.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn change_mode_for_now(&self, volume: VolumeId, mode: CacheMode) -> Result<(), Error> {
        let parted = self.with(|state| {
            state.parted(volume)?.mode = mode;
            // The set's status is taken again when it has stopped, and does not contain this
            // change.
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

    /// Returns the time since which requests of the volume have been waiting for its cache: now, if
    /// none waited before.
    pub(crate) fn waits_since(&self, volume: VolumeId) -> Time {
        let now = self.0.env.now();
        self.with(|state| *state.waits_since.entry(volume).or_insert(now))
    }

    /// Takes over the reopened set, which has its flash-only volumes. The others are still to be
    /// added, under their numbers.
    pub(crate) fn reopened(&self, set: CacheSet) {
        self.change(|state| {
            // Requests for flash-only volumes still use the numbers from before.
            let former = state.before.take().map(|before| before.volumes).unwrap_or_default();
            set.resume_flash_only(&former);
            // The numbers of removed volumes are known to clients as well, and must not be reused.
            set.number_from(state.next.expect("the next number was kept when the set was closed"));
            let HostState { away, waits_since, .. } = state;
            waits_since.retain(|id, _| away.contains_key(id));
            state.session = set.session();
            set.rings(Rc::clone(&self.0.changed));
            state.main = Some(set);
        });
    }

    /// Keeps the set open that was to be closed since `begun`, with all of its volumes as before.
    pub(crate) fn stays_open(&self, set: CacheSet, begun: Time) {
        let (before, modes) = self.change(|state| {
            // Volumes that can do without the cache have not waited for it.
            state.waits_since.retain(|_, since| *since < begun);
            state.main = Some(set.clone());
            (state.before.take(), std::mem::take(&mut state.new_modes))
        });
        // The set does not know of changes made in the meantime. A volume may have been removed.
        for info in before.into_iter().flat_map(|before| before.volumes) {
            let _it_may_be_gone = set.change_volume_options(info.id, |begun| *begun = info.options);
        }
        for (id, mode) in modes {
            let _it_may_be_gone = set.set_cache_mode_for_now(id, mode);
        }
    }

    /// Records that the cache set has the volume again.
    pub(crate) fn is_back(&self, volume: VolumeId) {
        self.change(|state| {
            state.away.remove(&volume);
            state.waits_since.remove(&volume);
        });
    }

    /// Returns why the set does not work, or was closed.
    pub(crate) fn failure(&self) -> Option<Error> {
        let (main, why) = self.with(|state| (state.main.clone(), state.why.clone()));
        main.map_or(why, |set| set.failure())
    }

    /// Returns whether the set may come back, so that requests may wait for it.
    pub(crate) fn may_come_back(&self) -> bool {
        if self.with(|state| state.is_stopping) {
            return false;
        }
        // A device that is gone may return as another one, whatever the set's failure was.
        match self.failure() {
            Some(error) if error.is_absence() => true,
            Some(error) if self.main().is_ok() => error.may_pass(),
            _ => self.main().is_ok() || !self.with(|state| state.is_lost),
        }
    }

    /// Returns true if the set is open and has not failed. Volumes may be away.
    pub(crate) fn is_open_and_well(&self) -> bool {
        self.with(|state| state.main.as_ref().is_some_and(|set| set.failure().is_none()))
    }

    /// Returns true if the set works and has all of its volumes.
    #[must_use]
    pub fn works(&self) -> bool {
        self.is_open_and_well() && self.with(|state| state.away.is_empty())
    }

    /// Calls `add` to add a backing device to the set, once the set is open.
    ///
    /// # Errors
    /// The set will not be reopened, or it refuses the device.
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

    /// Returns whether a backing device is being added.
    pub(crate) fn is_adding(&self) -> bool {
        self.with(|state| state.adding > 0)
    }

    /// Drops the sets of a host whose executor has ended. A request in flight without a task is
    /// held by its set, and holds the host. Without this call neither would be dropped, and clients
    /// would not learn that their engine is gone.
    pub fn abandon(&self) {
        let sets = self.with(|state| (state.main.take(), state.cacheless.take()));
        drop(sets);
    }

    /// Records that acknowledged writes to these volumes may have been lost: their next flush must
    /// report it.
    pub fn has_lost(&self, volumes: impl IntoIterator<Item = VolumeId>) {
        let now = self.0.env.now();
        self.with(|state| state.owes.extend(volumes.into_iter().map(|volume| (volume, now))));
    }

    /// Returns whether a flush must fail because acknowledged writes may have been lost. A flush
    /// that was requested before the loss became known does not count as the report: it does not
    /// cover what was acknowledged since.
    pub(crate) fn tells_of_loss(&self, RequestSource { volume, asked, .. }: RequestSource) -> bool {
        self.with(|state| {
            let Some(since) = state.owes.get(&volume).copied() else { return false };
            if asked > since {
                state.owes.remove(&volume);
            }
            true
        })
    }

    /// Stops the sets, once no attempt to bring volumes back is in progress.
    ///
    /// # Errors
    /// Acknowledged data may not be durable, including earlier losses that no flush has reported
    /// yet.
    pub async fn stop(&self) -> Result<(), Error> {
        self.change(|state| state.is_stopping = true);
        self.alarm();
        self.until(|state| !state.is_trying).await;
        let (main, cacheless) = self.with(|state| (state.main.clone(), state.cacheless.clone()));
        let of_cacheless = match cacheless {
            Some((cacheless, _)) => cacheless.stop().await,
            None => Ok(()),
        };
        let of_main = match main {
            Some(main) => main.stop().await,
            // Report why it could not be reopened, rather than that it is being stopped.
            None => Err(self
                .with(|state| state.why.clone())
                .map_or(Error::Stopping, |why| Error::Failed(Box::new(why)))),
        };
        // A note without a file ends with the process, and a set that has failed writes no journal.
        let of_main =
            if of_main.is_err() && self.0.opening.note.is_lost() { Err(Error::LostWrites) } else { of_main };
        // The stop is the last flush, and reports what none has reported: invariant D33.
        let owes = self.with(|state| !state.owes.is_empty());
        let told = if owes { Err(Error::LostWrites) } else { Ok(()) };
        of_main.and(of_cacheless).and(told)
    }
}
