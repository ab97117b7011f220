//! Where the next data goes: one open bucket a class, appended to until full. Sectors of a bucket are written at most
//! once per generation, and an extent never crosses a bucket's end.

use crate::space::buckets::{Buckets, Usage};
use alloc::collections::BTreeMap;
use bcached_format::{BucketId, Inode, Pointer, Pointers};

/// What kind of data a bucket is filled with. Kinds are kept apart because they die at different times.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Written by users, dirty, of this volume.
    Dirty(Inode),
    /// Clean copies: fills and write-through data.
    Clean,
    /// Live data moved out of sparse buckets.
    Moved,
}

/// Space for one extent: pinned until its key is in the tree or it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Where; one pointer a copy.
    pub pointers: Pointers,
    /// How much, in sectors.
    pub sectors: u64,
}

#[derive(Clone, Copy)]
struct OpenBucket {
    id: BucketId,
    used: u64,
}

/// The open buckets of a set.
#[derive(Default)]
pub struct OpenBuckets {
    open: BTreeMap<Class, OpenBucket>,
}

impl OpenBuckets {
    /// Takes up to `wanted` sectors (whole blocks) for `class`, pinned; fewer if the open bucket ends there. `None`
    /// if a new bucket is needed and no more than `keep` are free.
    pub fn take(
        &mut self,
        buckets: &mut Buckets,
        class: Class,
        wanted: u64,
        keep: usize,
        bucket_sectors: u64,
    ) -> Option<Space> {
        assert!(wanted > 0, "space for nothing");
        let open = match self.open.get_mut(&class) {
            Some(open) => open,
            None => {
                let id = buckets.take(Usage::Open, keep)?;
                self.open.entry(class).or_insert(OpenBucket { id, used: 0 })
            }
        };
        let sectors = wanted.min(bucket_sectors - open.used);
        let pointer = Pointer::new(
            open.id.device,
            buckets.sector(open.id) + open.used,
            buckets.get(open.id).generation,
        );
        open.used += sectors;
        buckets.pin(pointer);
        buckets.touch(pointer);
        if open.used == bucket_sectors {
            buckets.set_usage(open.id, Usage::Data);
            self.open.remove(&class);
        }
        Some(Space { pointers: Pointers::one(pointer), sectors })
    }

    /// Closes the open bucket of a class that ends.
    pub fn close(&mut self, class: Class, buckets: &mut Buckets) {
        if let Some(open) = self.open.remove(&class) {
            buckets.set_usage(open.id, Usage::Data);
        }
    }

    /// Closes every open bucket, at stop.
    pub fn close_all(&mut self, buckets: &mut Buckets) {
        for open in core::mem::take(&mut self.open).into_values() {
            buckets.set_usage(open.id, Usage::Data);
        }
    }

    /// Buckets open now.
    #[must_use]
    pub fn count(&self) -> usize {
        self.open.len()
    }
}
