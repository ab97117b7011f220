//! The writes in a disk's cache that are not on the platter: those that a flush waits for, and those that came later.

use std::collections::BTreeMap;

/// Longest run of neighbours that is written in one go, in sectors: other commands wait for its end.
const RUN_SECTORS_MAX: u64 = 2048;

#[derive(Clone, Copy, Debug)]
struct Extent {
    sectors: u64,
    epoch: u64,
}

/// Extents by first sector.
#[derive(Debug, Default)]
pub struct Cached {
    /// Of former epochs: a flush waits for them.
    flushing: BTreeMap<u64, Extent>,
    /// Of this epoch.
    fresh: BTreeMap<u64, Extent>,
    epoch: u64,
    /// Extents that are not on the platter, by epoch, with the one that is on its way there.
    left: BTreeMap<u64, u64>,
    sectors: u64,
}

impl Cached {
    /// What is in the cache, in sectors, without what is on its way to the platter.
    pub const fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Adds a write; one over the same sectors replaces the older one, one behind another makes it longer.
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
        let replaced = self.fresh.insert(sector, Extent { sectors, epoch: self.epoch });
        self.sectors += sectors;
        match replaced {
            Some(old) => self.sectors -= old.sectors,
            None => *self.left.entry(self.epoch).or_default() += 1,
        }
    }

    /// A flush begins: the epoch that it goes up to.
    pub fn begin_flush(&mut self) -> u64 {
        let epoch = self.epoch;
        self.epoch += 1;
        for (sector, extent) in std::mem::take(&mut self.fresh) {
            // What a former flush waits for at the same place is written with it.
            if let Some(old) = self.flushing.insert(sector, extent) {
                self.sectors -= old.sectors;
                self.has_landed(old.epoch);
            }
        }
        epoch
    }

    /// The extents nearest to `sector`, so many on each side, of those that are to be written first.
    pub fn near(&self, sector: u64, count: usize) -> impl Iterator<Item = (u64, u64)> + '_ {
        let first = if self.flushing.is_empty() { &self.fresh } else { &self.flushing };
        let (behind, ahead) = (first.range(..sector).rev(), first.range(sector..));
        ahead.take(count).chain(behind.take(count)).map(|(sector, extent)| (*sector, extent.sectors))
    }

    /// The extent at `sector` is on its way to the platter: its length, and its epoch.
    pub fn take(&mut self, sector: u64) -> (u64, u64) {
        let found = self.flushing.remove(&sector).or_else(|| self.fresh.remove(&sector));
        let Extent { sectors, epoch } = found.expect("what was chosen is there");
        self.sectors -= sectors;
        (sectors, epoch)
    }

    /// An extent of `epoch` is on the platter.
    pub fn has_landed(&mut self, epoch: u64) {
        let count = self.left.get_mut(&epoch).expect("its epoch is known");
        *count -= 1;
        if *count == 0 {
            self.left.remove(&epoch);
        }
    }

    /// The oldest epoch of which not all is on the platter.
    pub fn oldest(&self) -> Option<u64> {
        self.left.first_key_value().map(|(epoch, _)| *epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_waits_for_what_was_there_and_not_for_what_comes_later() {
        let mut cached = Cached::default();
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
        let mut cached = Cached::default();
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
