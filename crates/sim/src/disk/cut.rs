//! Determines what is left of a device when the power is cut, or when the process that used it
//! dies.

use super::store::PAGE_SECTORS;
use super::{Device, SectorStore};
use crate::digest::mix;
use crate::stamp::SECTOR;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Which of the writes that are not durable survive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survivors {
    /// None.
    Nothing,
    /// All, in order.
    Everything,
    /// Some of them, and some of those torn, as this seed determines.
    Seeded(u64),
}

impl Survivors {
    /// Returns whether the unit `unit` (an address) of write `number` survives. In a seeded subset,
    /// three writes in eight survive entirely, three not at all, and two unit by unit.
    fn keeps(self, device: u64, number: u64, unit: u64) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::Seeded(seed) => match mix(&[seed, device, number]) % 8 {
                0..3 => true,
                3..6 => false,
                _ => mix(&[seed, device, number, unit + 1]).is_multiple_of(2),
            },
        }
    }

    /// Returns the sort key of a write in flight in the order of landing.
    fn turn(self, device: u64, number: u64) -> u64 {
        match self {
            Self::Nothing | Self::Everything => number,
            Self::Seeded(seed) => mix(&[seed, device, number, 0]),
        }
    }
}

impl fmt::Display for Survivors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => write!(f, "nothing"),
            Self::Everything => write!(f, "everything"),
            Self::Seeded(seed) => write!(f, "{seed}"),
        }
    }
}

impl FromStr for Survivors {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "nothing" => Ok(Self::Nothing),
            "everything" => Ok(Self::Everything),
            seed => seed
                .parse()
                .map(Self::Seeded)
                .map_err(|_| format!("a subset is nothing, everything or a number, not {seed:?}")),
        }
    }
}

impl Device {
    /// Cuts the power: of all that is not durable, `survivors` reach the medium and the rest is
    /// lost. `device` is its number.
    pub fn cut_power(&mut self, device: u64, survivors: Survivors) {
        self.land_rest(device, survivors, |_, _| true);
        let unit = self.model.torn_sectors;
        for (page, versions) in std::mem::take(&mut self.volatile) {
            for mut version in versions {
                let number = version.number;
                version.thin(|sector| survivors.keeps(device, number, (page * PAGE_SECTORS + sector) / unit));
                version.apply(&mut self.medium, page);
            }
        }
        self.view = self.medium.clone();
        self.stalled_until = 0;
    }

    /// Pulls the device from its host. It also loses power unless everything survives. Returns the
    /// sectors whose content has changed.
    pub fn lose_host(&mut self, device: u64, survivors: Survivors) -> BTreeSet<u64> {
        let mut volatile: BTreeSet<u64> = BTreeSet::new();
        for (page, versions) in &self.volatile {
            volatile.extend(versions.iter().flat_map(|version| version.sectors(*page)));
        }
        let before = self.view.clone();
        match survivors {
            Survivors::Everything => self.kill_process(device, survivors),
            Survivors::Nothing | Survivors::Seeded(_) => self.cut_power(device, survivors),
        }
        let content = |store: &SectorStore, sector| {
            let mut bytes = [0; SECTOR];
            store.read(sector, &mut bytes);
            bytes
        };
        volatile.retain(|sector| content(&before, *sector) != content(&self.view, *sector));
        volatile
    }

    /// Ends the process: operations in flight land as `survivors` determines; everything else stays
    /// as it is.
    pub fn kill_process(&mut self, device: u64, survivors: Survivors) {
        let unit = self.model.torn_sectors;
        self.land_rest(device, survivors, |number, sector| survivors.keeps(device, number, sector / unit));
        if !self.model.volatile_cache {
            // Without a volatile cache, whatever landed is on the medium even without a completion:
            // there is no other place.
            self.volatile.clear();
            self.medium = self.view.clone();
        }
    }

    /// Lands the sectors in flight that `keep(write, sector)` accepts, and forgets all operations
    /// in flight.
    fn land_rest(&mut self, device: u64, survivors: Survivors, keep: impl Fn(u64, u64) -> bool) {
        let mut rest: Vec<_> = std::mem::take(&mut self.in_flight).into_iter().collect();
        rest.sort_by_key(|(number, _)| survivors.turn(device, *number));
        for (number, write) in rest {
            for sector in (write.landed_to..write.range.end).filter(|sector| keep(number, *sector)) {
                self.land_range(number, sector..sector + 1, &write.content, write.range.start);
            }
        }
    }
}
