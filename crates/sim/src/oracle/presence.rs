//! Volumes that come and go, other than those with devices: whether they are there, and how large.

use super::Oracle;

/// Whether a volume is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Presence {
    /// It was never made, or has been deleted.
    #[default]
    Absent,
    /// It has been made, and has so many sectors.
    There(u64),
    /// It was to be made or deleted, and that has not been answered with success: it has so many sectors, or is not there.
    Unknown(u64),
    /// It was to have another size, and that has not been answered with success: it has that of before or the new one, in sectors.
    Between(u64, u64),
}

impl Presence {
    /// Whether that may be found at a start: so many sectors, or no volume.
    #[must_use]
    pub fn allows(self, found: Option<u64>) -> bool {
        match self {
            Self::Absent => found.is_none(),
            Self::There(sectors) => found == Some(sectors),
            Self::Unknown(sectors) => found.is_none_or(|found| found == sectors),
            Self::Between(before, after) => found.is_some_and(|found| [before, after].contains(&found)),
        }
    }
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
