//! Where new data is written: one open bucket per class, appended to until it is full. Each sector
//! of a bucket is written at most once per generation, and an extent never crosses the end of a
//! bucket.
//!
//! A bucket of data that may be dirty leaves room at its end for a summary of it
//! (`space::summaries`), if that is small compared with the bucket.

use crate::sorted_map::SortedMap;
use crate::space::buckets::{BucketUsage, Buckets};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bcached_format::summary::{self, Extent};
use bcached_format::{BucketId, Geometry, Inode, Pointer, Pointers, Position};

/// Maximum number of closed buckets that wait for their summary. Buckets closed beyond that get
/// none.
const CLOSED_MAX: usize = 64;
/// Extent lists kept for reuse, so that requests that fill one bucket after another do not
/// allocate.
const SPARE_MAX: usize = 8;

/// The kind of data a bucket is filled with. Kinds are kept apart because they die at different
/// times.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DataClass {
    /// Dirty data of this volume, written by clients.
    Dirty(Inode),
    /// Clean copies: fills and write-through data.
    Clean,
    /// Live data moved out of sparse buckets.
    Moved,
}

impl DataClass {
    /// Returns whether such a bucket gets a summary: its data may have to be moved later.
    const fn is_summed(self) -> bool {
        matches!(self, Self::Dirty(_) | Self::Moved)
    }
}

/// Space for one extent. Pinned until its key is in the tree or the space is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Where it is; one pointer per copy.
    pub pointers: Pointers,
    /// Length in sectors.
    pub sectors: u64,
}

struct OpenBucket {
    id: BucketId,
    used: u64,
    /// The extents written to it, as many as its summary has room for.
    extents: Vec<Extent>,
}

/// A full bucket, pinned until its summary is written.
pub struct ClosedBucket {
    /// Where the summary is written.
    pub pointer: Pointer,
    /// The bucket.
    pub id: BucketId,
    /// The extents written to it.
    pub extents: Vec<Extent>,
}

/// The open buckets of a set.
pub struct OpenBuckets {
    open: SortedMap<DataClass, OpenBucket>,
    closed: VecDeque<ClosedBucket>,
    /// Empty lists with capacity.
    spare: Vec<Vec<Extent>>,
    bucket_sectors: u64,
    /// Sectors of a bucket that a summary takes; 0: buckets have no summary.
    summary_sectors: u64,
}

impl OpenBuckets {
    /// Creates the open buckets of a set with that geometry. Buckets get a summary if it takes at
    /// most one sector in `summary_share`; 0: no bucket gets one.
    #[must_use]
    pub fn new(geometry: &Geometry, summary_share: u64) -> Self {
        let bucket_sectors = geometry.bucket_sectors;
        let sectors = summary::sectors(bucket_sectors, geometry.block_sectors);
        let is_small = summary_share > 0 && sectors * summary_share <= bucket_sectors;
        let summary_sectors = if is_small { sectors } else { 0 };
        Self {
            open: SortedMap::default(),
            closed: VecDeque::new(),
            spare: Vec::new(),
            bucket_sectors,
            summary_sectors,
        }
    }

    /// Returns whether `sectors` for `class` are taken as one piece: in its open bucket, or in a
    /// new one if there is a free bucket.
    #[must_use]
    pub fn fits(&self, class: DataClass, sectors: u64) -> bool {
        let used = self.open.get(class).map_or(0, |open| open.used);
        used + sectors <= self.end(class)
    }

    /// Where data ends in a bucket of `class`, in sectors.
    const fn end(&self, class: DataClass) -> u64 {
        if class.is_summed() { self.data_sectors() } else { self.bucket_sectors }
    }

    /// Takes up to `wanted` sectors (whole blocks) for `class`, pinned; fewer if the open bucket
    /// ends there. Returns `None` if a new bucket is needed and no more than `keep` are free. `of`
    /// is where the data begins in the volume, for the summary.
    pub fn take(
        &mut self,
        buckets: &mut Buckets,
        class: DataClass,
        of: Option<Position>,
        wanted: u64,
        keep: usize,
    ) -> Option<Allocation> {
        assert!(wanted > 0, "at least one sector is requested");
        let end = self.end(class);
        let place = match self.open.place(class) {
            Ok(place) => place,
            Err(_) => {
                let id = buckets.take(BucketUsage::Open, keep)?;
                let extents = self.spare.pop().unwrap_or_default();
                self.open.insert(class, OpenBucket { id, used: 0, extents })
            }
        };
        let open = self.open.at_mut(place);
        let sectors = wanted.min(end - open.used);
        let pointer =
            Pointer::new(open.id.device, buckets.sector(open.id) + open.used, buckets.generation(open.id));
        open.used += sectors;
        buckets.begin(pointer);
        if let Some(of) = of.filter(|_| class.is_summed()) {
            open.remember(of, sectors, summary::extents_in(self.summary_sectors));
        }
        if open.used == end {
            self.close(class, buckets);
        }
        Some(Allocation { pointers: Pointers::one(pointer), sectors })
    }

    /// Closes the open bucket of a class because it is full or no longer needed.
    pub fn close(&mut self, class: DataClass, buckets: &mut Buckets) {
        let Some(OpenBucket { id, extents, .. }) = self.open.remove(class) else { return };
        buckets.set_usage(id, BucketUsage::Data);
        if extents.is_empty() || self.closed.len() >= CLOSED_MAX {
            return self.keep(extents);
        }
        let sector = buckets.sector(id) + self.data_sectors();
        let pointer = Pointer::new(id.device, sector, buckets.generation(id));
        // The bucket is not invalidated before its summary is written: invariant D13.
        buckets.pin(pointer);
        self.closed.push_back(ClosedBucket { pointer, id, extents });
    }

    /// Keeps an extent list for the next bucket.
    pub fn keep(&mut self, mut extents: Vec<Extent>) {
        if self.spare.len() < SPARE_MAX && extents.capacity() > 0 {
            extents.clear();
            self.spare.push(extents);
        }
    }

    /// Closes every open bucket, at a stop.
    pub fn close_all(&mut self, buckets: &mut Buckets) {
        self.close_those(|_| true, buckets);
    }

    /// Closes the open buckets of the classes that `are_meant` selects.
    pub fn close_those(&mut self, mut are_meant: impl FnMut(DataClass) -> bool, buckets: &mut Buckets) {
        let classes: Vec<DataClass> =
            self.open.iter().map(|(class, _)| *class).filter(|class| are_meant(*class)).collect();
        for class in classes {
            self.close(class, buckets);
        }
    }

    /// Takes the first closed bucket that needs a summary. The caller writes it and then returns
    /// the list ([`OpenBuckets::keep`]).
    pub fn take_closed(&mut self) -> Option<ClosedBucket> {
        self.closed.pop_front()
    }

    /// Number of closed buckets that need a summary.
    #[must_use]
    pub fn closed(&self) -> usize {
        self.closed.len()
    }

    /// Returns whether any closed bucket needs a summary.
    #[must_use]
    pub fn has_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Sectors of a bucket that dirty data may take.
    #[must_use]
    pub const fn data_sectors(&self) -> u64 {
        self.bucket_sectors - self.summary_sectors
    }

    /// Sectors that a summary takes; `None`: buckets have no summary.
    #[must_use]
    pub fn summary_sectors(&self) -> Option<u64> {
        Some(self.summary_sectors).filter(|sectors| *sectors > 0)
    }

    /// Number of open buckets.
    #[must_use]
    pub fn count(&self) -> usize {
        self.open.len()
    }
}

impl OpenBucket {
    /// Records an extent appended to the bucket, which begins at `of` in its volume. Extents beyond
    /// `most` are not recorded.
    fn remember(&mut self, of: Position, sectors: u64, most: usize) {
        let sectors = u32::try_from(sectors).expect("a bucket has fewer than 2^32 sectors");
        let goes_on = |last: &&mut Extent| last.inode == of.inode && last.end() == of.offset;
        if let Some(last) = self.extents.last_mut().filter(goes_on) {
            last.sectors += sectors;
        } else if self.extents.len() < most {
            self.extents.push(Extent { inode: of.inode, start: of.offset, sectors });
        }
    }
}
