//! Counts dirty sectors per stripe. To compute its parity, a backing device of several disks (RAID
//! 5, 6) reads the rest of a stripe that a write fills only in part. So write-back takes full
//! stripes first, those that are dirty throughout. A write that would bypass the cache goes to the
//! cache if it touches a stripe with dirty data, so that both are written back together.
//!
//! The dirty sectors of each stripe are counted, exactly, in the transition that changes a key.
//! Counting begins with the keys that are already in the tree, leaf by leaf, and the counts are
//! exact below the position reached so far ([`Stripes::counted_to`]). They take four bytes per
//! stripe where anything is dirty, and nothing where they are not needed.

use crate::btree::Attempt;
use crate::error::Error;
use crate::options::VolumeOptions;
use crate::request::{SectorRange, Target};
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use bcached_env::DiskInfo;
use bcached_format::Position;

/// Minimum length of a counted stripe, in sectors (4 MiB). If a device reports less, several of its
/// stripes are counted as one.
const SECTORS_MIN: u64 = 8192;
/// Reported lengths above this are ignored.
const SECTORS_MAX: u64 = 1 << 30;

/// Number of stripes whose counts are stored together.
const PAGE: usize = 1024;

/// After this many batches of full stripes, one takes whatever is dirty.
const IN_A_ROW_MAX: u32 = 16;

/// The length of the counted stripes for a device that reports `bytes`, in bytes: the smallest
/// multiple of that from 4 MiB on. 0: no stripes.
#[must_use]
pub const fn stripe_bytes(bytes: u64) -> u64 {
    let sectors = bytes / 512;
    if sectors == 0 || sectors > SECTORS_MAX {
        return 0;
    }
    SECTORS_MIN.div_ceil(sectors) * sectors * 512
}

/// The length of a volume's stripes in sectors, and whether partial stripe writes are expensive: as
/// configured, or as its backing device reports. `None`: no stripes.
#[must_use]
pub fn of_volume(options: &VolumeOptions, backing: &DiskInfo) -> (Option<u64>, bool) {
    let bytes = options.stripe_size.unwrap_or_else(|| stripe_bytes(backing.optimal_io_sectors * 512));
    let sectors = Some(bytes / 512).filter(|sectors| (1..=SECTORS_MAX).contains(sectors));
    (sectors, options.partial_stripes_expensive.unwrap_or(backing.partial_stripes_expensive))
}

/// The dirty sectors of a volume, by stripe. Sectors of the key space, which are those of the
/// backing device.
#[derive(Debug)]
pub struct Stripes {
    /// The length of a stripe.
    sectors: u64,
    /// Dirty sectors beyond this are not counted yet.
    counted_to: u64,
    dirty: BTreeMap<u64, Box<[u32]>>,
    /// Stripes that are dirty throughout.
    full: BTreeSet<u64>,
}

impl Stripes {
    /// Creates counts for stripes of `sectors` sectors; nothing has been counted.
    #[must_use]
    pub const fn new(sectors: u64) -> Self {
        Self { sectors, counted_to: 0, dirty: BTreeMap::new(), full: BTreeSet::new() }
    }

    /// The length of a stripe, in sectors.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Below this sector the counts are exact; above it nothing is counted.
    #[must_use]
    pub const fn counted_to(&self) -> u64 {
        self.counted_to
    }

    /// Counts `[start, end)`, which has become dirty.
    pub fn add(&mut self, start: u64, end: u64) {
        self.change(start, end.min(self.counted_to), |dirty, sectors| dirty + sectors);
    }

    /// Uncounts `[start, end)`, which was dirty.
    pub fn remove(&mut self, start: u64, end: u64) {
        self.change(start, end.min(self.counted_to), |dirty, sectors| {
            dirty.checked_sub(sectors).expect("a stripe loses no more dirty sectors than it has")
        });
    }

    /// Counts `[counted_to, upto)`, in which exactly the ranges `dirty` are dirty. From now on that
    /// part is counted.
    pub fn count(&mut self, upto: u64, dirty: &[(u64, u64)]) {
        let from = core::mem::replace(&mut self.counted_to, upto);
        for (start, end) in dirty {
            self.add((*start).max(from), *end);
        }
    }

    fn change(&mut self, mut start: u64, end: u64, change: impl Fn(u32, u32) -> u32) {
        while start < end {
            let stripe = start / self.sectors;
            let upto = end.min((stripe + 1) * self.sectors);
            let (page, place) = place_of(stripe);
            let nothing = || alloc::vec![0; PAGE].into_boxed_slice();
            let dirty = &mut self.dirty.entry(page).or_insert_with(nothing)[place];
            *dirty = change(*dirty, u32::try_from(upto - start).expect("fewer than 2^32 sectors"));
            assert!(u64::from(*dirty) <= self.sectors, "stripe {stripe} has {dirty} dirty sectors");
            if u64::from(*dirty) == self.sectors {
                self.full.insert(stripe);
            } else {
                self.full.remove(&stripe);
            }
            start = upto;
        }
    }

    fn of(&self, stripe: u64) -> u32 {
        let (page, place) = place_of(stripe);
        self.dirty.get(&page).map_or(0, |page| page[place])
    }

    /// Returns true if a stripe that `[start, end)` touches has dirty sectors.
    #[must_use]
    pub fn touches_dirty(&self, start: u64, end: u64) -> bool {
        start < end && (start / self.sectors..=(end - 1) / self.sectors).any(|stripe| self.of(stripe) > 0)
    }

    /// The first stripe from `at` on that is dirty throughout.
    #[must_use]
    pub fn full_from(&self, at: u64) -> Option<SectorRange> {
        let stripe = self.full.range(at.div_ceil(self.sectors)..).next()?;
        Some(SectorRange { start: stripe * self.sectors, end: (stripe + 1) * self.sectors })
    }

    /// The number of stripes that are dirty throughout.
    #[must_use]
    pub fn full_count(&self) -> u64 {
        self.full.len() as u64
    }

    /// The number of all counted dirty sectors.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.dirty.values().flat_map(|page| page.iter()).map(|dirty| u64::from(*dirty)).sum()
    }
}

/// Where the count of a stripe is stored: its page, and its index there.
fn place_of(stripe: u64) -> (u64, usize) {
    (stripe / PAGE as u64, usize::try_from(stripe % PAGE as u64).expect("below the length of a page"))
}

/// The position of write-back among full stripes.
#[derive(Clone, Copy, Debug, Default)]
pub struct StripeCursor {
    /// The rest of the stripe that has been begun.
    rest: Option<SectorRange>,
    /// Where the search for the next one starts.
    from: u64,
    /// Number of batches of full stripes since one of whatever was dirty.
    in_a_row: u32,
}

impl StripeCursor {
    /// The next range to write back: the rest of a stripe, or the next one that is dirty
    /// throughout, wrapping at the end. `before` is the start of the previous range in the same
    /// batch. A range at or before it means that the search has wrapped around, and `None` is
    /// returned.
    fn next(&mut self, stripes: &Stripes, before: Option<u64>) -> Option<SectorRange> {
        let next = || stripes.full_from(self.from).or_else(|| stripes.full_from(0));
        let range = self.rest.take().or_else(next)?;
        if before.is_some_and(|before| range.start <= before) {
            return None;
        }
        self.from = range.end;
        Some(range)
    }

    /// Moves back to `sector`, because the batch that was chosen last was not begun from there on.
    pub fn goes_back_to(&mut self, sector: u64, stripe_sectors: u64) {
        let end = (sector / stripe_sectors + 1) * stripe_sectors;
        self.rest = Some(SectorRange { start: sector, end });
        self.from = end;
    }
}

impl State {
    /// Returns true if `range` touches a stripe with dirty data that is expensive to write in
    /// parts: then the write should go to the cache too.
    #[must_use]
    pub(crate) fn completes_a_stripe(&self, target: &Target, range: SectorRange) -> bool {
        let stripes = target.inode.and_then(|inode| self.dirty.stripes(inode));
        stripes.is_some_and(|stripes| stripes.touches_dirty(range.start, range.end))
    }

    /// The next range of a full stripe to write back, behind `before`; `None`: there is none, or
    /// other data is due.
    fn next_full(&mut self, target: &Target, before: Option<u64>) -> Option<SectorRange> {
        let now = self.now;
        let stripes = self.dirty.stripes(target.inode?)?;
        let volume = self.volumes.get_mut(target.id)?;
        // Old data is taken in address order, which reaches everything.
        let (limit, oldest) = (volume.options.max_dirty_age, volume.pace.age.oldest(now));
        let is_old = limit.is_some_and(|limit| {
            oldest.is_some_and(|oldest| oldest.known().is_none_or(|age| age >= limit / 2))
        });
        let cursor = &mut volume.stripes;
        if is_old || cursor.in_a_row >= IN_A_ROW_MAX {
            cursor.in_a_row = 0;
            return None;
        }
        cursor.next(stripes, before)
    }

    /// Starts or stops counting the stripes of a volume, depending on whether that is useful.
    /// Returns where counting has to continue, if it has to.
    fn follow_stripes(&mut self, target: &Target) -> Option<u64> {
        let inode = target.inode?;
        let (volume, backing) = (self.volumes.get(target.id)?, target.backing.as_ref()?);
        let (sectors, is_expensive) = of_volume(&volume.options, &backing.info());
        let wanted = sectors.filter(|_| is_expensive);
        if self.dirty.stripes(inode).map(Stripes::sectors) != wanted {
            // Also drop the counts of inodes that are not served any more: these start from
            // scratch.
            let served: BTreeSet<_> = self.volumes.iter().filter_map(|(_, volume)| volume.inode).collect();
            self.dirty.forget_stripes(|inode| !served.contains(&inode));
            self.dirty.set_stripes(inode, wanted.map(Stripes::new));
            if let Some(volume) = self.volumes.get_mut(target.id) {
                volume.stripes = StripeCursor::default();
            }
        }
        let counted_to = self.dirty.stripes(inode)?.counted_to();
        (counted_to < Position::MAX.offset).then_some(counted_to)
    }

    /// Counts the dirty data in the leaf that holds `at`.
    fn count_in_leaf(&mut self, target: &Target, at: u64) -> Attempt<()> {
        let Some(inode) = target.inode else { return Attempt::Done(()) };
        let mut found: Vec<(u64, u64)> = Vec::new();
        let upto = match self.keys_in_leaf(inode, at, Position::MAX.offset, &mut |buckets, key| {
            if key.dirty && !buckets.is_dead(key) {
                found.push((key.start(), key.end));
            }
        }) {
            Attempt::Done(upto) => upto,
            Attempt::Needs(need) => return Attempt::Needs(need),
        };
        for (_, end) in &mut found {
            *end = (*end).min(upto);
        }
        // Counting may have restarted meanwhile.
        if let Some(stripes) = self.dirty.stripes_mut(inode).filter(|stripes| stripes.counted_to() == at) {
            stripes.count(upto, &found);
        }
        Attempt::Done(())
    }
}

/// Ensures that the stripes of a volume are counted, if that is useful. A leaf that cannot be read
/// ends counting until the next call: nothing beyond it is counted.
///
/// # Errors
/// The error of that leaf.
pub async fn follow(set: &CacheSet, target: &Target) -> Result<(), Error> {
    while let Some(at) = set.with(|s| s.follow_stripes(target)) {
        set.attempt(|s| s.count_in_leaf(target, at)).await?;
        if set.is_over(target.id) {
            break;
        }
    }
    Ok(())
}

/// Offers full stripes to `taken`, in device order, until it takes one of them only in part; the
/// rest is offered next time. `taken` returns how far it got. Returns false if there is no full
/// stripe.
pub async fn offer(set: &CacheSet, target: &Target, mut taken: impl AsyncFnMut(SectorRange) -> u64) -> bool {
    let mut offered = None;
    while let Some(range) = set.with(|s| s.next_full(target, offered)) {
        offered = Some(range.start);
        let upto = taken(range).await;
        let is_over = set.with(|s| {
            let volume = s.volumes.get_mut(target.id)?;
            volume.stripes.rest = (upto < range.end).then_some(SectorRange { start: upto, ..range });
            Some(upto < range.end)
        });
        if is_over.unwrap_or(true) {
            break;
        }
    }
    if offered.is_some() {
        set.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.stripes.in_a_row += 1));
    }
    offered.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_names_short_stripes_has_several_counted_as_one() {
        const KIB: u64 = 1024;
        let of = |kib| stripe_bytes(kib * KIB) / KIB;
        assert_eq!((of(192), of(4096), of(4097), of(1)), (4224, 4096, 4097, 4096));
        assert_eq!((stripe_bytes(0), stripe_bytes(511), stripe_bytes(u64::MAX)), (0, 0, 0));
    }

    #[test]
    fn what_comes_and_goes_is_counted_by_stripe() {
        let mut stripes = Stripes::new(100);
        stripes.count(1000, &[(50, 70), (120, 330)]);
        assert_eq!((stripes.total(), stripes.full_count()), (230, 1));
        assert_eq!(stripes.full_from(0), Some(SectorRange { start: 200, end: 300 }));
        assert_eq!(stripes.full_from(201), None);
        stripes.add(100, 120);
        assert_eq!(stripes.full_from(0), Some(SectorRange { start: 100, end: 200 }));
        stripes.remove(150, 250);
        assert_eq!((stripes.total(), stripes.full_count()), (150, 0));
        assert!(stripes.touches_dirty(0, 1) && stripes.touches_dirty(390, 401));
        assert!(!stripes.touches_dirty(400, 1000) && !stripes.touches_dirty(0, 0));
    }

    /// A begun stripe is continued, then the following ones are offered, each once. Regression:
    /// when the keys of all stripes were in use, the search wrapped around forever. (Found by `sim
    /// hunt`.)
    #[test]
    fn full_stripes_are_offered_once_a_batch() {
        let mut stripes = Stripes::new(100);
        stripes.count(1000, &[(200, 300), (600, 800)]);
        let mut cursor = StripeCursor::default();
        cursor.goes_back_to(550, 100);
        let mut batch = || {
            let mut starts = Vec::new();
            while let Some(range) = cursor.next(&stripes, starts.last().copied()) {
                assert!(starts.len() < 9, "it goes round: {starts:?}");
                starts.push(range.start);
            }
            starts
        };
        assert_eq!([batch(), batch(), batch()], [[550, 600, 700], [200, 600, 700], [200, 600, 700]]);
    }

    #[test]
    fn what_is_not_counted_yet_is_counted_once() {
        let mut stripes = Stripes::new(100);
        stripes.count(300, &[(250, 300)]);
        stripes.add(280, 320);
        stripes.remove(250, 280);
        assert_eq!(stripes.total(), 40, "the part behind is counted when its leaf is");
        stripes.count(Position::MAX.offset, &[(280, 320)]);
        assert_eq!(stripes.total(), 60);
    }
}
