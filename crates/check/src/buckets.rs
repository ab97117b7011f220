//! Tracks the state of each bucket: its generation, its use, and how much of it is live.

use crate::damage::{BucketUse, DamageKind, Location, Structure};
use crate::findings::Findings;
use bcached_format::{BucketPrio, Gen, Geometry, JsetHeader, Key, Pointer, SECTOR_BYTES, prio};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// One bucket of the cache device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Bucket {
    /// Generation: as stored, raised by the pointers into the bucket.
    pub generation: u8,
    /// Priority as stored.
    pub prio: u16,
    /// What the bucket is used for.
    pub usage: BucketUse,
    /// Sectors of live extents in the bucket.
    pub live_sectors: u32,
    /// How many of these sectors are dirty.
    pub dirty_sectors: u32,
}

/// Largest number of generations that a pointer may lag behind its bucket; a kernel refuses a set
/// with more.
pub(crate) const STALE_MAX: u8 = 96;

/// All buckets.
#[derive(Debug)]
pub(crate) struct Buckets {
    list: Vec<Bucket>,
    /// For buckets that held nodes, by bucket index: the generation of the node, and how many of
    /// its blocks were durable.
    durable: BTreeMap<usize, (Gen, u16)>,
    first: u64,
    bucket_sectors: u64,
}

impl Buckets {
    pub fn new(geometry: &Geometry) -> Self {
        Self {
            list: Vec::new(),
            durable: BTreeMap::new(),
            first: geometry.first_bucket,
            bucket_sectors: geometry.bucket_sectors,
        }
    }

    /// Adds the next bucket, as stored in the priority chain.
    pub fn push(&mut self, stored: BucketPrio) {
        let usage =
            if (self.list.len() as u64) < self.first { BucketUse::Superblock } else { BucketUse::Free };
        self.list.push(Bucket {
            generation: stored.generation.0,
            prio: stored.prio,
            usage,
            live_sectors: 0,
            dirty_sectors: 0,
        });
    }

    /// Records what the priority of the next bucket says about a node in it. A priority that a
    /// kernel wrote says nothing.
    fn push_length(&mut self, stored: BucketPrio) {
        let blocks = prio::durable_blocks(stored.prio);
        if blocks > 0 {
            self.durable.insert(self.list.len(), (stored.generation, blocks));
        }
    }

    /// Returns the least number of blocks that were durable in the node that `pointer` leads to.
    pub fn durable_blocks(&self, pointer: Pointer) -> u32 {
        let stored = self.durable.get(&self.index_of(pointer));
        let stored = stored.filter(|(generation, _)| *generation == pointer.generation());
        stored.map_or(0, |(_, blocks)| u32::from(*blocks))
    }

    pub fn to_list(&self) -> Vec<Bucket> {
        self.list.clone()
    }

    fn of(&self, pointer: Pointer) -> Option<&Bucket> {
        self.list.get(self.index_of(pointer))
    }

    fn index_of(&self, pointer: Pointer) -> usize {
        usize::try_from(pointer.sector() / self.bucket_sectors).unwrap_or(usize::MAX)
    }

    /// Returns how many generations the pointer's bucket is ahead of it; 0 means that the pointer
    /// is valid. Must not be called for check pointers or pointers outside the device.
    pub fn stale_by(&self, pointer: Pointer) -> u8 {
        self.of(pointer).map_or(u8::MAX, |bucket| Gen(bucket.generation).after(pointer.generation()))
    }

    /// Returns whether all of the key's pointers lead to existing data.
    pub fn is_live(&self, key: &Key) -> bool {
        let pointers = key.pointers.as_slice();
        !pointers.is_empty()
            && pointers.iter().all(|pointer| !pointer.is_check() && self.stale_by(*pointer) == 0)
    }

    /// Raises the generation of each bucket that one of the key's pointers is ahead of.
    pub fn raise(&mut self, key: &Key) {
        for pointer in key.pointers.as_slice().iter().filter(|pointer| !pointer.is_check()) {
            if self.stale_by(*pointer) == 0 {
                let index = self.index_of(*pointer);
                if let Some(bucket) = self.list.get_mut(index) {
                    bucket.generation = pointer.generation().0;
                }
            }
        }
    }

    /// Records what the bucket at `sector` is used for, and returns whether that use is possible.
    /// Data may share a bucket with data; every other use needs a bucket of its own.
    pub fn claim(&mut self, sector: u64, usage: BucketUse, place: Location, findings: &mut Findings) -> bool {
        let bucket = sector / self.bucket_sectors;
        let Some(slot) = usize::try_from(bucket).ok().and_then(|index| self.list.get_mut(index)) else {
            return false;
        };
        let free =
            slot.usage == BucketUse::Free || (slot.usage == BucketUse::Data && usage == BucketUse::Data);
        if free {
            slot.usage = usage;
        } else {
            let kind = DamageKind::BucketTwice { bucket, first: slot.usage, second: usage };
            findings.error(place, kind);
        }
        free
    }

    /// Counts a live extent.
    pub fn count(&mut self, key: &Key) {
        for pointer in key.pointers.as_slice() {
            let index = self.index_of(*pointer);
            if let Some(bucket) = self.list.get_mut(index) {
                bucket.live_sectors = bucket.live_sectors.saturating_add(u32::from(key.size));
                if key.dirty {
                    bucket.dirty_sectors = bucket.dirty_sectors.saturating_add(u32::from(key.size));
                }
            }
        }
    }
}

/// Reads the priority chain that `header` names. Returns `None` if it is damaged: no pointer can be
/// checked then.
pub(crate) fn read_chain(
    image: &dyn crate::ReadAt,
    geometry: &Geometry,
    header: &JsetHeader,
    findings: &mut Findings,
) -> Option<(Buckets, Vec<u64>)> {
    let mut buckets = Buckets::new(geometry);
    let (mut chain, mut seen) = (Vec::new(), BTreeSet::new());
    let (mut next, mut seq) = (header.prio_bucket, None);
    for index in 0..geometry.prio_sets() {
        if !geometry.is_usable(next) || !seen.insert(next) {
            let kind = DamageKind::PrioBucket { index, found: next };
            findings.error(Location::whole(Structure::Priorities), kind);
            return None;
        }
        let sector = next * geometry.bucket_sectors;
        let place = Location::cache(Structure::Priorities, sector);
        let bytes = crate::read_or_report(image, place, sector, geometry.meta_bytes(), findings)?;
        let set = match bcached_format::PrioSet::parse(&bytes, geometry.magic) {
            Ok(set) => set,
            Err(error) => {
                findings.error(place, DamageKind::PrioSet(error));
                return None;
            }
        };
        let wanted = *seq.get_or_insert(set.seq);
        if set.seq != wanted {
            findings.error(place, DamageKind::PrioSeq { index, wanted, found: set.seq });
        }
        let left = geometry.buckets - buckets.list.len() as u64;
        let described = usize::try_from(left).unwrap_or(usize::MAX);
        for entry in set.entries().take(described) {
            if header.marks_reserve {
                buckets.push_length(entry);
            }
            buckets.push(entry);
        }
        chain.push(next);
        next = set.next_bucket;
    }
    Some((buckets, chain))
}

/// Returns the sectors in `bytes`, which are whole sectors here.
pub(crate) fn sectors(bytes: usize) -> u64 {
    bytes as u64 / SECTOR_BYTES
}
