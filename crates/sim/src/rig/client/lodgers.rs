//! Volumes that live in the cache alone (flash-only volumes), created, deleted and resized while
//! other requests are in flight.
//!
//! The oracle is told this about their content:
//! - A volume that is created holds zeroes, durably, before any client can read it.
//! - A volume that is being deleted holds what it had or zeroes, as after a discard of all of it.
//! - Sectors after its end are zeroes, durably, from the moment at which it has that end. If the
//!   cache still shows old data there when the volume grows again, the oracle notices.
//!
//! Whether it exists at the next start is judged here: it does once it was created, and does not
//! once it was deleted. If the client got no answer, either is allowed. Likewise its size is the
//! old one, with all its data, or the new one.

use super::sizes::KnownSize;
use super::{Client, ClientSetup};
use crate::failure::FailureKind;
use crate::oracle::VolumePresence;
use crate::system::{Refusal, RunningSystem};

impl ClientSetup {
    /// Checks that exactly the volumes exist that must; returns their sizes, in order.
    pub(super) fn check_lodgers(&self, running: &dyn RunningSystem) -> Result<Vec<KnownSize>, FailureKind> {
        let mut oracle = self.oracle.borrow_mut();
        let mut sizes = Vec::new();
        for (volume, _) in self.geometry.lodgers() {
            let (known, found) = (oracle.presence(volume), running.lodger(volume));
            if !known.allows(found) {
                return Err(FailureKind::Lodger { volume, found });
            }
            if let (VolumePresence::Between(before, _), Some(found)) = (known, found)
                && found < before
            {
                let id = oracle.begin_zeroes(volume, found..before, true);
                oracle.end(id, true);
            }
            oracle.is_there(volume, found.map_or(VolumePresence::Absent, VolumePresence::Exists));
            sizes.push(KnownSize::of(found.unwrap_or(0)));
        }
        Ok(sizes)
    }
}

impl Client {
    /// Returns whether a volume lives in the cache alone.
    pub(super) fn is_lodger(&self, volume: u32) -> bool {
        volume as usize >= self.shared.shapes.len()
    }

    pub(super) async fn create(&self, volume: u32) -> Result<(), Refusal> {
        if self.presence(volume) != VolumePresence::Absent || !self.begin_change(volume) {
            return Ok(());
        }
        let sectors = self.largest(volume);
        self.are_zero(volume, 0..sectors);
        self.is_there(volume, VolumePresence::Unknown(sectors));
        let made = self.shared.running.create(volume, sectors).await;
        match made {
            Ok(true) => {
                self.shared.sizes.borrow_mut()[volume as usize] = KnownSize::of(sectors);
                self.is_there(volume, VolumePresence::Exists(sectors));
            }
            Ok(false) => self.is_there(volume, VolumePresence::Absent),
            Err(_) => {}
        }
        self.end_change(volume);
        made.map(drop)
    }

    pub(super) async fn delete(&self, volume: u32) -> Result<(), Refusal> {
        let VolumePresence::Exists(sectors) = self.presence(volume) else { return Ok(()) };
        if !self.begin_change(volume) {
            return Ok(());
        }
        self.use_limit(volume, 0);
        self.is_there(volume, VolumePresence::Unknown(sectors));
        let id = self.shared.oracle.borrow_mut().begin_discard(volume, 0..sectors);
        let deleted = self.shared.running.delete(volume).await;
        self.shared.oracle.borrow_mut().end(id, matches!(deleted, Ok(true)));
        match deleted {
            Ok(true) => self.is_there(volume, VolumePresence::Absent),
            Ok(false) => {
                self.use_limit(volume, sectors);
                self.is_there(volume, VolumePresence::Exists(sectors));
            }
            Err(_) => {}
        }
        self.end_change(volume);
        deleted.map(drop)
    }

    pub(super) async fn shrink_lodger(&self, volume: u32, sectors: u64) -> Result<(), Refusal> {
        let former = match self.presence(volume) {
            VolumePresence::Exists(former) if sectors < former && self.begin_change(volume) => former,
            _ => return Ok(()),
        };
        self.use_limit(volume, sectors);
        self.is_there(volume, VolumePresence::Between(former, sectors));
        let shrunk = self.shared.running.shrink(volume, sectors).await;
        match shrunk {
            Ok(true) => {
                self.are_zero(volume, sectors..former);
                self.is_there(volume, VolumePresence::Exists(sectors));
            }
            Ok(false) => {
                self.use_limit(volume, former);
                self.is_there(volume, VolumePresence::Exists(former));
            }
            Err(_) => {}
        }
        self.end_change(volume);
        shrunk.map(drop)
    }

    pub(super) async fn grow_lodger(&self, volume: u32, sectors: u64) -> Result<(), Refusal> {
        let sectors = sectors.min(self.largest(volume));
        let former = match self.presence(volume) {
            VolumePresence::Exists(former) if sectors > former && self.begin_change(volume) => former,
            _ => return Ok(()),
        };
        self.is_there(volume, VolumePresence::Between(former, sectors));
        let grown = self.shared.running.grow(volume, sectors).await;
        match grown {
            Ok(true) => {
                self.use_limit(volume, sectors);
                self.is_there(volume, VolumePresence::Exists(sectors));
            }
            Ok(false) => self.is_there(volume, VolumePresence::Exists(former)),
            Err(_) => {}
        }
        self.end_change(volume);
        grown.map(drop)
    }

    /// Returns the size at which it is created, in sectors.
    fn largest(&self, volume: u32) -> u64 {
        self.shared.lodgers[volume as usize - self.shared.shapes.len()]
    }

    fn presence(&self, volume: u32) -> VolumePresence {
        self.shared.oracle.borrow().presence(volume)
    }

    fn is_there(&self, volume: u32, presence: VolumePresence) {
        self.shared.oracle.borrow_mut().is_there(volume, presence);
    }
}
