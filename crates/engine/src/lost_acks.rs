//! Acknowledged writes that are void because the cache device may have lost them, by volume and
//! range.
//!
//! The note holds all of them: any write that it no longer holds is in a journal entry, before
//! which the device was flushed.

use crate::journal::replay::key_of_note;
use crate::uuids::UuidTable;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::NoteRecord;
use bcached_format::{Inode, Label, Uuid};

/// The writes of a volume that were given up: an upper bound. Where data had been moved, the former
/// copy is valid again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LostAcks {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// The label it had when it was first attached.
    pub label: Label,
    /// Number of sectors, each counted once.
    pub sectors: u64,
    /// Number of separate ranges.
    pub ranges: usize,
    /// Start of the first range, in sectors of the backing device, if there is one.
    pub start: u64,
    /// End of the last range.
    pub end: u64,
}

/// All writes that were given up.
#[derive(Default)]
pub struct LossHistory {
    /// Those given up before the set was opened.
    pub before: Arc<[LostAcks]>,
    /// Those given up since then.
    pub here: Arc<[LostAcks]>,
}

/// Returns the writes that these records describe, by volume. Omits those of deleted volumes, and
/// those whose data is on a backing device: neither is lost.
pub fn by_volume(records: &[NoteRecord], uuids: &UuidTable) -> Arc<[LostAcks]> {
    let mut ranges: BTreeMap<Inode, Vec<(u64, u64)>> = BTreeMap::new();
    for key in records.iter().filter_map(key_of_note) {
        let slot = uuids.slot(key.inode).filter(|slot| slot.is_used());
        // Zeroes in a flash-only volume are a hole there.
        let is_write = |is_flash_only| key.dirty || is_flash_only && key.pointers.as_slice().is_empty();
        if slot.is_some_and(|slot| is_write(slot.is_flash_only())) {
            ranges.entry(key.inode).or_default().push((key.start(), key.end));
        }
    }
    let of_volume = |(inode, ranges)| {
        let slot = uuids.slot(inode)?;
        let (start, end, sectors, ranges) = count(ranges)?;
        Some(LostAcks { uuid: slot.uuid, label: slot.label, sectors, ranges, start, end })
    };
    ranges.into_iter().filter_map(of_volume).collect()
}

/// Returns where the ranges begin and end, their number of sectors, and their number after adjacent
/// ranges are merged.
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
