//! The writes in a disk's volatile cache that are not on the platter yet: those that a flush waits
//! for, and later ones.

use std::collections::BTreeMap;

/// Longest run of adjacent sectors that is written at once: other commands wait for its end.
const RUN_SECTORS_MAX: u64 = 2048;

#[derive(Clone, Copy, Debug)]
struct CachedExtent {
    sectors: u64,
    epoch: u64,
}

/// Cached extents by first sector.
#[derive(Debug, Default)]
pub struct DriveCache {
    /// Extents of earlier epochs, which a flush waits for.
    flushing: BTreeMap<u64, CachedExtent>,
    /// Extents of the current epoch.
    fresh: BTreeMap<u64, CachedExtent>,
    epoch: u64,
    /// Number of extents of each epoch that are not on the platter, including the one that is being
    /// written.
    left: BTreeMap<u64, u64>,
    sectors: u64,
}

impl DriveCache {
    /// Returns the size of the cached extents in sectors, without the one that is being written to
    /// the platter.
    pub const fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Adds a write. A write to the same sectors replaces the older one; a write that follows
    /// another directly extends it.
    pub fn put(&mut self, sector: u64, sectors: u64) {
        let before = self.fresh.range_mut(..=sector).next_back();
        if let Some((start, extent)) = before {
            let end = start + extent.sectors;
            if sector + sectors <= end {
                return;
            }
            if sector == end && extent.sectors + sectors <= RUN_SECTORS_MAX {
                extent.sectors += sectors;
                self.sectors += sectors;
                return;
            }
        }
        let replaced = self.fresh.insert(sector, CachedExtent { sectors, epoch: self.epoch });
        self.sectors += sectors;
        match replaced {
            Some(old) => self.sectors -= old.sectors,
            None => *self.left.entry(self.epoch).or_default() += 1,
        }
    }

    /// Begins a flush. Returns the last epoch that it covers.
    pub fn begin_flush(&mut self) -> u64 {
        let epoch = self.epoch;
        self.epoch += 1;
        for (sector, extent) in std::mem::take(&mut self.fresh) {
            // An extent that an earlier flush waits for at the same place is written together with
            // this one.
            if let Some(old) = self.flushing.insert(sector, extent) {
                self.sectors -= old.sectors;
                self.has_landed(old.epoch);
            }
        }
        epoch
    }

    /// Returns up to `count` extents on each side of `sector`, from those that are to be written
    /// first.
    pub fn near(&self, sector: u64, count: usize) -> impl Iterator<Item = (u64, u64)> + '_ {
        let first = if self.flushing.is_empty() { &self.fresh } else { &self.flushing };
        let (behind, ahead) = (first.range(..sector).rev(), first.range(sector..));
        ahead.take(count).chain(behind.take(count)).map(|(sector, extent)| (*sector, extent.sectors))
    }

    /// Removes the extent at `sector`, which is now being written to the platter. Returns its
    /// length and its epoch.
    pub fn take(&mut self, sector: u64) -> (u64, u64) {
        let found = self.flushing.remove(&sector).or_else(|| self.fresh.remove(&sector));
        let CachedExtent { sectors, epoch } = found.expect("what was chosen is there");
        self.sectors -= sectors;
        (sectors, epoch)
    }

    /// Records that an extent of `epoch` is on the platter.
    pub fn has_landed(&mut self, epoch: u64) {
        let count = self.left.get_mut(&epoch).expect("its epoch is known");
        *count -= 1;
        if *count == 0 {
            self.left.remove(&epoch);
        }
    }

    /// Returns the oldest epoch that is not completely on the platter.
    pub fn oldest(&self) -> Option<u64> {
        self.left.first_key_value().map(|(epoch, _)| *epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_waits_for_what_was_there_and_not_for_what_comes_later() {
        let mut cached = DriveCache::default();
        cached.put(100, 8);
        cached.put(100, 8);
        cached.put(108, 8);
        assert_eq!(cached.sectors(), 16);
        let epoch = cached.begin_flush();
        cached.put(200, 8);
        assert_eq!(cached.near(0, 4).collect::<Vec<_>>(), [(100, 16)]);
        assert_eq!(cached.take(100), (16, epoch));
        assert_eq!(cached.oldest(), Some(epoch), "it is on its way");
        cached.has_landed(epoch);
        assert_eq!(cached.oldest(), Some(epoch + 1));
        assert_eq!(cached.near(300, 4).collect::<Vec<_>>(), [(200, 8)]);
        assert_eq!(cached.sectors(), 8);
    }

    #[test]
    fn what_two_flushes_wait_for_is_written_once() {
        let mut cached = DriveCache::default();
        cached.put(0, 8);
        let first = cached.begin_flush();
        cached.put(0, 8);
        let second = cached.begin_flush();
        assert!(first < second);
        assert_eq!(cached.sectors(), 8);
        assert_eq!(cached.take(0), (8, second));
        assert_eq!(cached.oldest(), Some(second));
        cached.has_landed(second);
        assert_eq!((cached.oldest(), cached.sectors()), (None, 0));
    }
}
