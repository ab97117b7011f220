//! Maps volumes to the rings that serve them.

use crate::ring_client::RingHandle;
use crate::threads::locked;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The rings of the engines that serve volumes, by volume UUID. Clones share one map.
#[derive(Clone, Default, Debug)]
pub struct VolumeRings(Arc<Mutex<BTreeMap<[u8; 16], RingHandle>>>);

impl VolumeRings {
    /// Registers `ring` as the ring of the engine that serves `volume`; later clients are hosted
    /// there.
    pub fn insert(&self, volume: [u8; 16], ring: RingHandle) {
        locked(&self.0).insert(volume, ring);
    }

    /// Returns the ring that hosts clients of the volume, if any.
    #[must_use]
    pub fn of(&self, volume: [u8; 16]) -> Option<RingHandle> {
        locked(&self.0).get(&volume).cloned()
    }
}
