//! A volume that may be removed and added again while clients submit requests, with a new id each
//! time.

use super::Refusal;
use bcached_engine::{CacheSet, CancelToken, Error, VolumeId};
use bcached_env::DiskId;
use bcached_env::sync::Notify;
use bcached_format::Uuid;
use bcached_host::Host;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// How many times adding a volume is tried; its device may be failing.
pub(super) const TRIES: u32 = 8;

/// The slot of one volume.
pub struct VolumeSlot {
    /// The engine's current id for it; `None` if it could not be added again.
    id: Cell<Option<VolumeId>>,
    is_away: Cell<bool>,
    /// The volume lives in the cache alone, and may not exist.
    is_lodger: bool,
    back: Notify,
    /// Cancels the long work that has been requested.
    cancel: RefCell<CancelToken>,
}

/// Repeats an attempt that a failing device may let fail, up to `TRIES` times.
pub async fn tried<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut outcome = attempt().await;
    for _ in 1..TRIES {
        if outcome.is_err() {
            outcome = attempt().await;
        }
    }
    outcome
}

/// Returns the refusal of a request to a volume that is gone.
pub fn gone() -> Refusal {
    Refusal("the volume is no longer served".to_owned())
}

impl VolumeSlot {
    /// Creates the slot of a volume that is served.
    pub fn of(id: VolumeId) -> Rc<Self> {
        Self::new(Some(id), false)
    }

    /// Creates the slot of a volume that lives in the cache alone, if it exists.
    pub fn of_lodger(id: Option<VolumeId>) -> Rc<Self> {
        Self::new(id, true)
    }

    /// Returns whether the volume lives in the cache alone.
    pub const fn is_lodger(&self) -> bool {
        self.is_lodger
    }

    fn new(id: Option<VolumeId>, is_lodger: bool) -> Rc<Self> {
        Rc::new(Self {
            id: Cell::new(id),
            is_away: Cell::new(false),
            is_lodger,
            back: Notify::new(),
            cancel: RefCell::default(),
        })
    }

    /// Returns the cancel handle for long work on the volume that is requested now.
    pub fn cancel(&self) -> CancelToken {
        self.cancel.borrow().clone()
    }

    /// Takes the handle that cancels all such work that has been requested.
    pub fn cancelled(&self) -> CancelToken {
        self.cancel.take()
    }

    /// Returns the engine's current id for the volume; `None` if it is away or gone.
    pub fn served_as(&self) -> Option<VolumeId> {
        self.id.get().filter(|_| !self.is_away.get())
    }

    /// Returns the engine's id for the volume as soon as it has one; `None` if it is gone.
    pub async fn id(&self) -> Option<VolumeId> {
        while self.is_away.get() {
            self.back.wait().await;
        }
        self.id.get()
    }

    /// Returns whether it could not be added again, or its content is unknown.
    pub fn is_gone(&self) -> bool {
        !self.is_lodger && !self.is_away.get() && self.id.get().is_none()
    }

    /// Returns whether it is being removed or added again.
    pub fn is_away(&self) -> bool {
        self.is_away.get()
    }

    /// Makes requests wait from here on; returns the former id.
    pub fn leave(&self) -> Option<VolumeId> {
        self.is_away.set(true);
        self.id.get()
    }

    /// Ends the absence: the volume is served again as `id`, or is gone.
    pub fn back(&self, id: Option<VolumeId>) {
        self.id.set(id);
        self.is_away.set(false);
        self.back.notify_all();
    }

    /// Removes the volume and adds it again. Returns whether it did so, which is a flush, too. A
    /// volume of a set that has failed comes back automatically.
    ///
    /// # Errors
    /// If it cannot be added again, after which it is gone, or if acknowledged data may be lost.
    pub async fn readd(&self, host: &Host) -> Result<bool, Refusal> {
        let Some(id) = self.served_as().filter(|_| host.works()) else { return Ok(false) };
        self.leave();
        let uuid = uuid_of(host, id);
        let removed = match host.remove_volume(id).await {
            Ok(removed) => removed,
            // Nothing has changed.
            Err(_) => {
                self.back(Some(id));
                return Ok(false);
            }
        };
        let added = match removed.disk {
            Some(disk) => add(host, disk).await,
            None => {
                let again = async |set: CacheSet| set.add_flash_only(uuid.ok_or(Error::NoVolume)?);
                add_by(host, again).await
            }
        };
        if let (Ok(id), Some(_)) = (&added, &removed.lost) {
            // Requests were answered since this was requested: the next flush reports the loss.
            host.has_lost([*id]);
        }
        self.back(added.as_ref().ok().copied());
        added.map_err(Refusal::from_error)?;
        removed.lost.map_or(Ok(true), |lost| Err(Refusal::from_error(lost)))
    }
}

/// How long adding a volume waits for a set that is being opened again: less than clients wait for
/// any answer.
const REOPENED_LIMIT: Duration = Duration::from_secs(5);

/// Polling interval, here and when waiting for a device's answers.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// Adds a backing device to the set of a host.
pub async fn add(host: &Host, disk: DiskId) -> Result<VolumeId, Error> {
    add_by(host, async |set: CacheSet| set.add_backing(disk, None).await).await
}

/// Adds a volume to the set of a host, unless opening that set again takes too long.
async fn add_by(
    host: &Host,
    add: impl AsyncFn(CacheSet) -> Result<VolumeId, Error>,
) -> Result<VolumeId, Error> {
    let env = &host.inner().env;
    let until = env.now() + REOPENED_LIMIT;
    while host.main().is_err() && env.now() < until {
        env.sleep(LOOK).await;
    }
    tried(async || {
        host.main()?;
        host.add(|set| add(set)).await
    })
    .await
}

/// Returns the UUID of a volume.
pub fn uuid_of(host: &Host, id: VolumeId) -> Option<Uuid> {
    let volumes = host.settled(id).ok()?.volumes();
    volumes.into_iter().find(|info| info.id == id).map(|info| info.uuid)
}
