//! The place of a set that is let go of when it has failed, and opened again in the same process.
//!
//! It does what the daemon does when the device of a cache answers again, in the same order: nobody begins to ask any more, what is
//! under way ends, volumes whose data is all on their backing devices leave the cache, all backing devices are flushed, the set is
//! stopped and let go of, and opened as after a crash.

use super::seat::{Seat, TRIES, tried};
use super::{Refusal, Soon};
use bcached_engine::{CacheSet, Error};
use bcached_env::Env;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// How often who waits for a device that answers, or for the last handle on a set, looks.
const LOOK: Duration = Duration::from_millis(1);

/// Opens the set.
pub type Opener = Box<dyn Fn() -> Soon<Result<CacheSet, Error>>>;

/// The place of a set.
pub struct Berth {
    env: Env,
    open: Opener,
    /// `None`: it is being opened again, or could not be.
    set: RefCell<Option<CacheSet>>,
    /// What the former sets have written to the cache device, in bytes; unknown of one that did not open.
    before: Cell<Option<u64>>,
}

impl Berth {
    /// A set that is opened for the first time.
    pub async fn open(env: Env, open: Opener) -> Result<Rc<Self>, Error> {
        let set = open().await?;
        Ok(Rc::new(Self { env, open, set: RefCell::new(Some(set)), before: Cell::new(Some(0)) }))
    }

    /// The set, if it is open.
    pub fn set(&self) -> Option<CacheSet> {
        self.set.borrow().clone()
    }

    /// Lets who looks for something wait until he looks again.
    pub async fn before_the_next_look(&self) {
        self.env.sleep(LOOK).await;
    }

    /// What all sets here have written to the cache device, in bytes, if that is known.
    pub fn written_bytes(&self) -> Option<u64> {
        Some(self.before.get()? + self.set()?.written().total())
    }

    /// Lets go of the set and opens it again, if it has failed and that may pass; whether it did. Requests on `seats` wait meanwhile.
    ///
    /// # Errors
    /// It cannot be opened again, or not all volumes can be added; those are gone.
    pub async fn revive(&self, seats: &[Rc<Seat>]) -> Result<bool, Refusal> {
        let Some(set) = self.set().filter(|set| set.failure().is_some_and(|error| error.may_pass())) else {
            return Ok(false);
        };
        if seats.iter().any(|seat| seat.is_away()) {
            return Ok(false);
        }
        let infos = set.volumes();
        let mut volumes = Vec::new();
        for seat in seats {
            volumes.push(seat.leave().map(|id| (id, set.disk_of(id))));
        }
        set.drained().await;
        for found in &mut volumes {
            let Some((id, _)) = *found else { continue };
            // One whose backing device cannot be told is added again like one with dirty data.
            let _stays = set.leave_failed(id).await;
            if set.flush_backing_of(id).await.is_err() {
                *found = None;
            }
        }
        let next = set.next_number();
        let outcome = match self.let_go(set).await {
            Some(error) if !error.may_pass() => Err(error),
            _ => self.open_again().await,
        };
        if let Ok(set) = &outcome {
            set.resume_flash_only(&infos);
            set.number_from(next);
        }
        for (seat, found) in seats.iter().zip(volumes) {
            let id = match (&outcome, found) {
                // It lives in the cache alone, and is there.
                (Ok(_), Some((id, None))) => Some(id),
                (Ok(set), Some((id, Some(disk)))) => {
                    tried(async || set.add_backing_as(id, disk).await).await.is_ok().then_some(id)
                }
                _ => None,
            };
            seat.back(id);
        }
        outcome.map(|_| true).map_err(Refusal::from_error)
    }

    /// Why it failed, which may weigh more by the end.
    async fn let_go(&self, set: CacheSet) -> Option<Error> {
        // That it has failed is known.
        let _failed = set.stop().await;
        self.before.set(self.written_bytes());
        *self.set.borrow_mut() = None;
        while !set.is_last_handle() {
            self.before_the_next_look().await;
        }
        set.failure()
    }

    async fn open_again(&self) -> Result<CacheSet, Error> {
        let mut opened = (self.open)().await;
        for _ in 1..TRIES {
            if opened.as_ref().is_err_and(Error::may_pass) {
                // What it had written by then nobody says.
                self.before.set(None);
                opened = (self.open)().await;
            }
        }
        let set = opened?;
        *self.set.borrow_mut() = Some(set.clone());
        Ok(set)
    }
}
