//! The N of a volume's `bcacheN`, of volumes that come while others are there: those keep theirs until the next start.

use crate::supervisor::table::{Table, VolumeEntry};
use bcached_config::{Config, Flash, Volume};

/// What a volume is called by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbered {
    pub number: usize,
    /// Its section asks for that.
    pub is_asked: bool,
}

impl Table {
    /// Of a volume with a backing device that comes, or comes back: what the files say, unless another one has that until the next start.
    pub fn number_of(&self, volume: &Volume, before: Option<usize>, config: &Config) -> Numbered {
        let said = Numbered { number: volume.number, is_asked: volume.is_numbered };
        let kept = || before.unwrap_or_else(|| self.number_behind(config));
        match before {
            Some(before) if before == said.number => said,
            // Who was there keeps what it had, unless it asks.
            Some(before) if !said.is_asked => Numbered { number: before, is_asked: false },
            _ if self.is_number_taken(said.number) => Numbered { number: kept(), is_asked: false },
            _ => said,
        }
    }

    /// Of a volume that lives in a cache alone, likewise.
    pub fn number_of_flash(&self, said: Option<&Flash>, before: Option<usize>, config: &Config) -> Numbered {
        let asked = said.and_then(|flash| flash.number);
        let is_free = |number: &usize| before == Some(*number) || !self.is_number_taken(*number);
        match asked.filter(is_free) {
            Some(number) => Numbered { number, is_asked: true },
            None => {
                Numbered { number: before.unwrap_or_else(|| self.number_behind(config)), is_asked: false }
            }
        }
    }

    fn is_number_taken(&self, number: usize) -> bool {
        self.volumes.iter().any(|entry| entry.number == number)
    }

    /// Behind all that there are and all places, without what sections ask for: a number far off that one volume asks for moves nobody there.
    fn number_behind(&self, config: &Config) -> usize {
        let others = self.volumes.iter().filter(|entry| !entry.is_numbered);
        let behind = others.map(|entry| entry.number + 1).max().unwrap_or(0).max(config.places_of_volumes);
        let is_free =
            |number: &usize| !config.numbers_asked.contains(number) && !self.is_number_taken(*number);
        (behind..).find(is_free).expect("so many are not taken")
    }
}

impl VolumeEntry {
    /// The number that its section asked for when it came, if it has that.
    pub fn asked_number(&self) -> Option<usize> {
        self.is_numbered.then_some(self.number)
    }
}
