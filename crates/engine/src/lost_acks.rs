//! Writes that were acknowledged and are void, because the cache device may have lost them: what they were, for who asks where.
//!
//! The note holds all of them: what it holds no more is in a journal entry, before which the device was flushed.

use crate::journal::replay::key_of_note;
use crate::uuids::UuidTable;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::NoteRecord;
use bcached_format::{Inode, Label, Uuid};

/// What was given up of a volume, at most: of what was moved to another place meanwhile the former one counts again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GivenUp {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// Its label when it was first attached.
    pub label: Label,
    /// Sectors, each counted once.
    pub sectors: u64,
    /// How many ranges they are.
    pub ranges: usize,
    /// Where the first begins, in sectors of the backing device, if there is one.
    pub start: u64,
    /// Where the last ends.
    pub end: u64,
}

/// All that was given up, and when.
#[derive(Default)]
pub struct Losses {
    /// Before the set was opened.
    pub before: Arc<[GivenUp]>,
    /// Since then.
    pub here: Arc<[GivenUp]>,
}

/// What these records were of, by volume. Those of a volume that is no more, and what is on a backing device, nobody misses.
pub fn by_volume(records: &[NoteRecord], uuids: &UuidTable) -> Arc<[GivenUp]> {
    let mut ranges: BTreeMap<Inode, Vec<(u64, u64)>> = BTreeMap::new();
    for key in records.iter().filter_map(key_of_note) {
        let slot = uuids.slot(key.inode).filter(|slot| slot.is_used());
        // Zeroes of a volume that lives in the cache alone are a hole there.
        let is_write = |is_flash_only| key.dirty || is_flash_only && key.pointers.as_slice().is_empty();
        if slot.is_some_and(|slot| is_write(slot.is_flash_only())) {
            ranges.entry(key.inode).or_default().push((key.start(), key.end));
        }
    }
    let of_volume = |(inode, ranges)| {
        let slot = uuids.slot(inode)?;
        let (start, end, sectors, ranges) = count(ranges)?;
        Some(GivenUp { uuid: slot.uuid, label: slot.label, sectors, ranges, start, end })
    };
    ranges.into_iter().filter_map(of_volume).collect()
}

/// Where they begin and end, how many sectors they have, and how many ranges they are when those that meet are one.
fn count(mut ranges: Vec<(u64, u64)>) -> Option<(u64, u64, u64, usize)> {
    ranges.sort_unstable();
    let first = ranges.first()?.0;
    let (mut end, mut sectors, mut apart) = (first, 0, 1);
    for (from, to) in ranges {
        if from > end {
            apart += 1;
        }
        sectors += to.saturating_sub(from.max(end));
        end = end.max(to);
    }
    Some((first, end, sectors, apart))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sector_counts_once() {
        assert_eq!(count(Vec::new()), None);
        let ranges = [(80, 88), (16, 24), (24, 32), (16, 20), (84, 96), (85, 86)];
        assert_eq!(count(ranges.to_vec()), Some((16, 96, 32, 2)));
    }
}
