//! Assigns the N of each volume's `bcacheN`, from the files alone, never from the order of arrival.
//!
//! A volume has the number that its section asks for (`number = N`), else its place: the position
//! of its section. A volume that asks for another one's place swaps with it, and no other volume
//! moves:
//!
//! ```text
//! place   0      1      2              0      1      2      3
//!         a      b      c: 0           a      b: 0   c: 1   d
//! number  2      1      0              2      0      1      3
//! ```
//!
//! Volumes that live in a cache only have no place to give in exchange: a volume whose place they
//! ask for is moved after all places. Adding a section at the end changes no other number, unless
//! it asks for one in use, or its place is the number of a volume that was moved.

use super::parse::{Settings, VolumeSection};
use bcached_control::failure::Failure;
use std::collections::{BTreeMap, BTreeSet};

/// The numbers of all volumes.
#[derive(Default)]
pub struct VolumeNumbers {
    /// The numbers of volumes with backing devices, by place.
    of_places: Vec<usize>,
    /// The numbers that sections ask for, including those of volumes that are not served.
    pub asked: BTreeSet<usize>,
    /// From this number on, only those in `asked` are in use.
    pub behind: usize,
}

impl VolumeNumbers {
    /// Assigns the numbers for all sections. Errors are added to `findings`.
    pub fn of(settings: &Settings, findings: &mut Vec<Failure>) -> Self {
        if let Some(number) = &settings.defaults.number {
            let failure = number.origin.failure("`number` has no effect in [defaults]");
            let failure = failure.why("each volume has its own number");
            findings.push(failure.next("write it in a [volume.NAME] section"));
        }
        findings.extend(asked_twice(settings));
        let is_flash =
            |volume: &VolumeSection| volume.said().flash.is_some() || settings.defaults.flash.is_some();
        let asked = |volume: &VolumeSection| volume.said().number.as_ref().map(|number| number.value.0);
        let places: Vec<_> =
            settings.volumes.values().filter(|volume| !is_flash(volume)).map(asked).collect();
        let all = settings.volumes.values().filter_map(asked).collect();
        Self::of_places(&places, all)
    }

    /// Assigns the numbers. `places` has the number that the volume at each place asks for; `asked`
    /// are all numbers that any volume asks for.
    fn of_places(places: &[Option<usize>], asked: BTreeSet<usize>) -> Self {
        let mut askers = BTreeMap::new();
        for (place, number) in places.iter().enumerate() {
            if let Some(number) = number {
                askers.entry(*number).or_insert(place);
            }
        }
        let mut numbers = Self { of_places: Vec::new(), asked, behind: places.len() };
        for (place, number) in places.iter().enumerate() {
            let number = number.unwrap_or_else(|| {
                // No two volumes ask for the same number, and this one asks for none, so the chain
                // never returns to this place.
                let left = std::iter::successors(Some(place), |at| askers.get(at).copied()).last();
                let left = left.filter(|left| !numbers.asked.contains(left));
                left.unwrap_or_else(|| numbers.next_behind())
            });
            numbers.of_places.push(number);
        }
        numbers
    }

    /// Returns a number after all places that no volume has or asks for.
    fn next_behind(&mut self) -> usize {
        let free = (self.behind..).find(|number| !self.asked.contains(number));
        let free = free.expect("sections ask for fewer numbers than exist");
        self.behind = free + 1;
        free
    }

    /// Returns the number of the volume at that place.
    pub fn at(&self, place: usize) -> usize {
        self.of_places.get(place).copied().unwrap_or(place)
    }
}

/// Reports each number that a second section asks for, at the location of the second.
fn asked_twice(settings: &Settings) -> Vec<Failure> {
    let mut first = BTreeMap::new();
    let mut twice = Vec::new();
    for (name, volume) in &settings.volumes {
        let Some(number) = &volume.said().number else { continue };
        let (other, origin) = *first.entry(number.value.0).or_insert((name, &number.origin));
        if other != name {
            let what = format!("[volume.{name}] cannot be bcache{}", number.value.0);
            let at = format!("{}:{}", origin.file().display(), origin.line());
            let failure =
                number.origin.failure(&what).why(format!("[volume.{other}] has that `number` ({at})"));
            twice.push(failure.next("give one of them another number"));
        }
    }
    twice
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers by place, and the first free one, if volumes that live in caches only
    /// ask for those in `elsewhere`.
    fn numbers(places: &[Option<usize>], elsewhere: &[usize]) -> (Vec<usize>, usize) {
        let asked = places.iter().flatten().chain(elsewhere).copied().collect();
        let numbers = VolumeNumbers::of_places(places, asked);
        ((0..places.len()).map(|place| numbers.at(place)).collect(), numbers.behind)
    }

    #[test]
    fn who_asks_for_a_place_changes_places_with_whose_it_is() {
        assert_eq!(numbers(&[None, None, None], &[]), (vec![0, 1, 2], 3));
        assert_eq!(numbers(&[None, None, Some(0)], &[]), (vec![2, 1, 0], 3), "one moves");
        assert_eq!(numbers(&[None, Some(7), None], &[]), (vec![0, 7, 2], 3), "nobody moves");
        assert_eq!(numbers(&[None, Some(0), Some(1), None], &[]), (vec![2, 0, 1, 3], 4), "in a ring");
        assert_eq!(numbers(&[Some(1), Some(0), Some(2)], &[]), (vec![1, 0, 2], 3));
        // A section added later moves no other volume, unless it asks for that.
        assert_eq!(numbers(&[None, None, Some(0), None], &[]), (vec![2, 1, 0, 3], 4));
    }

    #[test]
    fn whose_place_is_asked_for_from_elsewhere_goes_behind_all() {
        assert_eq!(numbers(&[None, None], &[0]), (vec![2, 1], 3));
        assert_eq!(numbers(&[None, None], &[0, 2]), (vec![3, 1], 4), "and not where somebody is");
        assert_eq!(numbers(&[None, Some(0)], &[1]), (vec![2, 0], 3), "nor where who moves it was");
        assert_eq!(numbers(&[None, None], &[40]), (vec![0, 1], 2));
    }
}
