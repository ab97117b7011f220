//! The N of `bcacheN` for volumes that are added while others are served.

use crate::supervisor::table::{Table, VolumeEntry, VolumeState};
use crate::supervisor::tests::config;
use crate::supervisor::volumes::numbering::VolumeNumber;
use bcached_config::{Config, FlashVolume, WAIT_DEFAULT};
use bcached_format::Uuid;

/// Volumes with the numbers they ask for, at their places; the configuration ensures that no number
/// occurs twice.
fn asking(volumes: &[(&str, Option<usize>)]) -> Config {
    let names: Vec<_> = volumes.iter().map(|(name, _)| *name).collect();
    let mut config = config(&names);
    for (volume, (_, asked)) in config.volumes.iter_mut().zip(volumes) {
        (volume.number, volume.is_numbered) = (asked.unwrap_or(volume.number), asked.is_some());
    }
    config.numbers_asked = volumes.iter().filter_map(|(_, asked)| *asked).collect();
    config
}

fn numbers(table: &Table) -> Vec<(&str, usize, Option<usize>)> {
    let number = |entry: &'_ VolumeEntry| (entry.number, entry.asked_number());
    table.volumes.iter().map(|entry| (entry.display_name(), number(entry).0, number(entry).1)).collect()
}

#[test]
fn a_volume_that_comes_takes_nobodys_number() {
    let mut table = Table::of(&asking(&[("one", None), ("two", Some(9))]), false);
    // The number that it asks for is taken until the next start. The others keep theirs, whatever
    // the files say now.
    let files =
        asking(&[("one", Some(5)), ("two", Some(9)), ("three", Some(0)), ("four", None), ("five", Some(7))]);
    table.adopt(&files);
    let wanted =
        [("one", 0, None), ("two", 9, Some(9)), ("three", 6, None), ("four", 3, None), ("five", 7, Some(7))];
    assert_eq!(numbers(&table), wanted, "behind the places is 5, which somebody asks for");
}

#[test]
fn a_volume_that_comes_back_has_its_number_again() {
    let files = asking(&[("one", None), ("two", Some(9))]);
    let mut table = Table::of(&files, false);
    let removed = |table: &mut Table| {
        for entry in &mut table.volumes {
            entry.state = VolumeState::Removed;
        }
    };
    removed(&mut table);
    table.adopt(&files);
    assert_eq!(numbers(&table), [("one", 0, None), ("two", 9, Some(9))]);
    // Its section says something else now.
    removed(&mut table);
    table.adopt(&asking(&[("one", Some(4)), ("two", None)]));
    assert_eq!(numbers(&table), [("one", 4, Some(4)), ("two", 9, None)]);
}

#[test]
fn a_volume_in_a_cache_alone_is_behind_all_places_or_where_it_asks_to_be() {
    let mut files = asking(&[("one", None), ("two", Some(40))]);
    let table = Table::of(&files, false);
    let flash = |number| FlashVolume {
        name: "swap".to_owned(),
        uuid: Uuid([1; 16]),
        served: true,
        read_only: false,
        shared: false,
        ways: files.ways,
        number,
        wait: WAIT_DEFAULT,
    };
    let [unsaid, asks, taken] = [None, Some(3), Some(0)].map(flash);
    let is = |number, is_asked| VolumeNumber { number, is_asked };
    files.numbers_asked.extend([2, 3]);
    assert_eq!(table.number_of_flash(Some(&unsaid), None, &files), is(4, false), "others ask for 2 and 3");
    assert_eq!(table.number_of_flash(Some(&asks), None, &files), is(3, true));
    assert_eq!(table.number_of_flash(Some(&taken), None, &files), is(4, false), "it is served all the same");
    assert_eq!(table.number_of_flash(Some(&unsaid), Some(7), &files), is(7, false), "it comes back");
}
