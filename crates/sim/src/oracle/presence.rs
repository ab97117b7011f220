//! Volumes without a device of their own (flash-only volumes), which are created and deleted:
//! whether they exist, and how large they are.

use super::Oracle;

/// Whether a volume exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum VolumePresence {
    /// It was never created, or has been deleted.
    #[default]
    Absent,
    /// It has been created, and has this many sectors.
    Exists(u64),
    /// Its creation or deletion was requested and has not succeeded: it has this many sectors or
    /// does not exist.
    Unknown(u64),
    /// A resize was requested and has not succeeded: it has the old size or the new size, in
    /// sectors.
    Between(u64, u64),
}

impl VolumePresence {
    /// Returns whether a start may find this: a volume with this many sectors, or none.
    #[must_use]
    pub fn allows(self, found: Option<u64>) -> bool {
        match self {
            Self::Absent => found.is_none(),
            Self::Exists(sectors) => found == Some(sectors),
            Self::Unknown(sectors) => found.is_none_or(|found| found == sectors),
            Self::Between(before, after) => found.is_some_and(|found| [before, after].contains(&found)),
        }
    }
}

impl Oracle {
    /// Returns what is known about the volume.
    #[must_use]
    pub fn presence(&self, volume: u32) -> VolumePresence {
        self.presences.get(&volume).copied().unwrap_or_default()
    }

    /// Sets what is known about the volume from now on.
    pub fn is_there(&mut self, volume: u32, presence: VolumePresence) {
        self.presences.insert(volume, presence);
    }
}
