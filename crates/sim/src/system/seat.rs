//! A volume that may be given up and taken up again while clients ask: under another number each
//! time.

use super::Refusal;
use bcached_engine::{CacheSet, Cancel, Error, VolumeId};
use bcached_env::DiskId;
use bcached_env::sync::Notify;
use bcached_format::Uuid;
use bcached_host::Host;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// How often a volume is tried to be added again; its device may be failing.
pub(super) const TRIES: u32 = 8;

/// The place of one volume.
pub struct Seat {
    /// What the engine calls it now; `None`: it could not be added again.
    id: Cell<Option<VolumeId>>,
    is_away: Cell<bool>,
    /// The volume lives in the cache alone, and may be nowhere.
    is_lodger: bool,
    back: Notify,
    /// Of the long work that has been asked for.
    cancel: RefCell<Cancel>,
}

/// What comes of something that a failing device may need to be asked more than once.
pub async fn tried<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut outcome = attempt().await;
    for _ in 1..TRIES {
        if outcome.is_err() {
            outcome = attempt().await;
        }
    }
    outcome
}

/// What becomes of a request to a volume that is gone.
pub fn gone() -> Refusal {
    Refusal("the volume is not served any more".to_owned())
}

impl Seat {
    /// Of a volume that is served.
    pub fn of(id: VolumeId) -> Rc<Self> {
        Self::new(Some(id), false)
    }

    /// Of a volume that lives in the cache alone, if it is there.
    pub fn of_lodger(id: Option<VolumeId>) -> Rc<Self> {
        Self::new(id, true)
    }

    /// Of a volume that lives in the cache alone.
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

    /// What gives up long work on the volume that is asked for now.
    pub fn cancel(&self) -> Cancel {
        self.cancel.borrow().clone()
    }

    /// What gives up all such work that has been asked for.
    pub fn cancelled(&self) -> Cancel {
        self.cancel.take()
    }

    /// What the engine calls the volume now; `None`: it is away, or gone.
    pub fn served_as(&self) -> Option<VolumeId> {
        self.id.get().filter(|_| !self.is_away.get())
    }

    /// What the engine calls the volume, as soon as it has it; `None` if it is gone.
    pub async fn id(&self) -> Option<VolumeId> {
        while self.is_away.get() {
            self.back.wait().await;
        }
        self.id.get()
    }

    /// It could not be added again, or nobody can say what is on it.
    pub fn is_gone(&self) -> bool {
        !self.is_lodger && !self.is_away.get() && self.id.get().is_none()
    }

    /// It is being given up, or taken up again.
    pub fn is_away(&self) -> bool {
        self.is_away.get()
    }

    /// Requests wait from here on; who it was.
    pub fn leave(&self) -> Option<VolumeId> {
        self.is_away.set(true);
        self.id.get()
    }

    /// It is served again, as `id`, or is gone.
    pub fn back(&self, id: Option<VolumeId>) {
        self.id.set(id);
        self.is_away.set(false);
        self.back.notify_all();
    }

    /// Gives the volume up and adds it again. Whether it did so: that is a flush, too. A volume of
    /// a set that has failed comes back by itself.
    ///
    /// # Errors
    /// If it cannot be added again, after which it is gone, or if something acknowledged may be
    /// lost.
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
            // Requests were answered since this was asked for: the next flush tells of them.
            host.has_lost([*id]);
        }
        self.back(added.as_ref().ok().copied());
        added.map_err(Refusal::from_error)?;
        removed.lost.map_or(Ok(true), |lost| Err(Refusal::from_error(lost)))
    }
}

/// How long who adds a volume waits for a set that is being opened again: less than clients wait
/// for any answer.
const REOPENED_LIMIT: Duration = Duration::from_secs(5);

/// How often it looks, as who waits for a device that answers does.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// Has the set of a host serve a backing device.
pub async fn add(host: &Host, disk: DiskId) -> Result<VolumeId, Error> {
    add_by(host, async |set: CacheSet| set.add_backing(disk, None).await).await
}

/// Has the set of a host serve a volume, unless that set takes too long to be opened again.
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

/// The identity of a volume.
pub fn uuid_of(host: &Host, id: VolumeId) -> Option<Uuid> {
    let volumes = host.settled(id).ok()?.volumes();
    volumes.into_iter().find(|info| info.id == id).map(|info| info.uuid)
}
