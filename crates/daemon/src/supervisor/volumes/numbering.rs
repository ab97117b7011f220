//! Assigns the N of `bcacheN` to volumes that are added while others are served: those keep theirs
//! until the next start.

use crate::supervisor::table::{Table, VolumeEntry};
use bcached_config::{Config, FlashVolume, Volume};

/// The number of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeNumber {
    pub number: usize,
    /// Its section asks for this number.
    pub is_asked: bool,
}

impl Table {
    /// The number of a volume with a backing device that is added or comes back: the configured
    /// one, unless another volume has that until the next start.
    pub fn number_of(&self, volume: &Volume, before: Option<usize>, config: &Config) -> VolumeNumber {
        let said = VolumeNumber { number: volume.number, is_asked: volume.is_numbered };
        let kept = || before.unwrap_or_else(|| self.number_behind(config));
        match before {
            Some(before) if before == said.number => said,
            // A volume that was there keeps its number, unless its section asks for another.
            Some(before) if !said.is_asked => VolumeNumber { number: before, is_asked: false },
            _ if self.is_number_taken(said.number) => VolumeNumber { number: kept(), is_asked: false },
            _ => said,
        }
    }

    /// The same for a flash-only volume.
    pub fn number_of_flash(
        &self,
        said: Option<&FlashVolume>,
        before: Option<usize>,
        config: &Config,
    ) -> VolumeNumber {
        let asked = said.and_then(|flash| flash.number);
        let is_free = |number: &usize| before == Some(*number) || !self.is_number_taken(*number);
        match asked.filter(is_free) {
            Some(number) => VolumeNumber { number, is_asked: true },
            None => {
                VolumeNumber { number: before.unwrap_or_else(|| self.number_behind(config)), is_asked: false }
            }
        }
    }

    fn is_number_taken(&self, number: usize) -> bool {
        self.volumes.iter().any(|entry| entry.number == number)
    }

    /// A number above all present ones and all places, ignoring those that sections ask for: if one
    /// volume asks for a very high number, the others do not follow it.
    fn number_behind(&self, config: &Config) -> usize {
        let others = self.volumes.iter().filter(|entry| !entry.is_numbered);
        let behind = others.map(|entry| entry.number + 1).max().unwrap_or(0).max(config.places_of_volumes);
        let is_free =
            |number: &usize| !config.numbers_asked.contains(number) && !self.is_number_taken(*number);
        (behind..).find(is_free).expect("a number is free")
    }
}

impl VolumeEntry {
    /// The number that its section asked for when it was added, if it has that.
    pub fn asked_number(&self) -> Option<usize> {
        self.is_numbered.then_some(self.number)
    }
}
