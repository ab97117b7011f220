//! Volumes that live in the cache alone, which come and go while others ask.
//!
//! What the judge is told: one that is made has zeroes, durably, before anybody can read it; one that is being deleted has what it had or
//! zeroes, as after a discard of all of it. Whether it is there at the next start is judged here: it is, once it was made, and is not,
//! once it was deleted; who was not told finds either.

use super::sizes::Size;
use super::{Birth, Client};
use crate::failure::Fault;
use crate::oracle::Presence;
use crate::system::{Refusal, Running};

impl Birth {
    /// Those that are there are those that must be; their sizes, in order.
    pub(super) fn check_lodgers(&self, running: &dyn Running) -> Result<Vec<Size>, Fault> {
        let mut oracle = self.oracle.borrow_mut();
        let mut sizes = Vec::new();
        for (volume, sectors) in self.geometry.lodgers() {
            let found = running.lodger(volume);
            let is_wrong = match oracle.presence(volume) {
                Presence::Unknown => found.is_some_and(|found| found != sectors),
                Presence::There => found != Some(sectors),
                Presence::Absent => found.is_some(),
            };
            if is_wrong {
                return Err(Fault::Lodger { volume, found });
            }
            oracle.is_there(volume, if found.is_some() { Presence::There } else { Presence::Absent });
            sizes.push(Size::of(found.unwrap_or(0)));
        }
        Ok(sizes)
    }
}

impl Client {
    /// A volume that lives in the cache alone.
    pub(super) fn is_lodger(&self, volume: u32) -> bool {
        volume as usize >= self.shared.shapes.len()
    }

    pub(super) async fn create(&self, volume: u32) -> Result<(), Refusal> {
        if self.presence(volume) != Presence::Absent || !self.begin_change(volume) {
            return Ok(());
        }
        let sectors = self.shared.lodgers[volume as usize - self.shared.shapes.len()];
        self.are_zero(volume, 0..sectors);
        self.is_there(volume, Presence::Unknown);
        let made = self.shared.running.create(volume, sectors).await;
        match made {
            Ok(true) => {
                self.shared.sizes.borrow_mut()[volume as usize] = Size::of(sectors);
                self.is_there(volume, Presence::There);
            }
            Ok(false) => self.is_there(volume, Presence::Absent),
            Err(_) => {}
        }
        self.end_change(volume);
        made.map(drop)
    }

    pub(super) async fn delete(&self, volume: u32) -> Result<(), Refusal> {
        if self.presence(volume) != Presence::There || !self.begin_change(volume) {
            return Ok(());
        }
        let sectors = self.limit(volume);
        self.use_limit(volume, 0);
        self.is_there(volume, Presence::Unknown);
        let id = self.shared.oracle.borrow_mut().begin_discard(volume, 0..sectors);
        let deleted = self.shared.running.delete(volume).await;
        self.shared.oracle.borrow_mut().end(id, matches!(deleted, Ok(true)));
        match deleted {
            Ok(true) => self.is_there(volume, Presence::Absent),
            Ok(false) => {
                self.use_limit(volume, sectors);
                self.is_there(volume, Presence::There);
            }
            Err(_) => {}
        }
        self.end_change(volume);
        deleted.map(drop)
    }

    fn presence(&self, volume: u32) -> Presence {
        self.shared.oracle.borrow().presence(volume)
    }

    fn is_there(&self, volume: u32, presence: Presence) {
        self.shared.oracle.borrow_mut().is_there(volume, presence);
    }
}
