//! Which ring serves which volume.

use crate::ring_client::Guests;
use crate::threads::locked;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The rings of the engines that serve the volumes, by the UUIDs of these. Clones are the same ones.
#[derive(Clone, Default, Debug)]
pub struct Rings(Arc<Mutex<BTreeMap<[u8; 16], Guests>>>);

impl Rings {
    /// The volume is served by an engine with this ring; clients from now on come there.
    pub fn insert(&self, volume: [u8; 16], ring: Guests) {
        locked(&self.0).insert(volume, ring);
    }

    /// Where clients of the volume come.
    #[must_use]
    pub fn of(&self, volume: [u8; 16]) -> Option<Guests> {
        locked(&self.0).get(&volume).cloned()
    }
}
