//! Volumes that come and go, other than those with devices: whether they are there.

use super::Oracle;

/// Whether a volume is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Presence {
    /// It was never made, or has been deleted.
    #[default]
    Absent,
    /// It has been made.
    There,
    /// One of both was asked for, and has not been answered with success.
    Unknown,
}

impl Oracle {
    /// What is known of it.
    #[must_use]
    pub fn presence(&self, volume: u32) -> Presence {
        self.presences.get(&volume).copied().unwrap_or_default()
    }

    /// What is known from now on.
    pub fn is_there(&mut self, volume: u32, presence: Presence) {
        self.presences.insert(volume, presence);
    }
}
