//! Checks the content of a set: the leaves, with the journal replayed over them in memory.

use crate::buckets::{Buckets, STALE_MAX};
use crate::damage::{BucketUse, DamageKind, Location, Structure};
use crate::extents::ExtentMap;
use crate::findings::Findings;
use crate::image::ReadAt;
use crate::journal::{self, JournalScan};
use crate::tree::{self, NodeRef, TreeWalk};
use crate::volumes::{self, BackingDevice, Volume};
use bcached_format::key_check::check_leaf_key;
use bcached_format::{Geometry, Inode, Key};
use std::collections::BTreeMap;

/// The journal's keys after a replay.
#[derive(Debug, Default)]
pub(crate) struct ReplayedKeys {
    /// Keys and holes to be laid over the leaves. A void key, whose bucket was reused, becomes a
    /// hole, as after a kernel's replay. The data that it hid is older than what was there when its
    /// bucket was given up.
    pub keys: ExtentMap,
    /// Number of keys replayed.
    pub count: u64,
}

/// Reads the keys to be replayed. They raise generations too, so all are read before any is
/// checked.
pub(crate) fn replay(
    image: &dyn ReadAt,
    geometry: &Geometry,
    journal: &JournalScan,
    buckets: &mut Buckets,
    findings: &mut Findings,
) -> ReplayedKeys {
    let mut good = Vec::new();
    for entry in &journal.needed {
        for key in journal::keys_of(image, geometry, *entry, findings) {
            match check_leaf_key(geometry, &key) {
                Ok(()) => good.push(key),
                Err(error) => {
                    let kind = DamageKind::JournalKey { seq: entry.seq, key, error };
                    findings.error(Location::cache(Structure::Journal, entry.sector), kind);
                }
            }
        }
    }
    for key in &good {
        buckets.raise(key);
    }
    let mut replay = ReplayedKeys { count: good.len() as u64, ..ReplayedKeys::default() };
    for key in good {
        let is_void = is_void(buckets, &key);
        replay.keys.insert(if is_void { Key::hole(key.inode, key.start(), key.end) } else { key });
    }
    replay
}

/// Returns true if the key's bucket was reused after the key was written.
fn is_void(buckets: &Buckets, key: &Key) -> bool {
    key.pointers.as_slice().iter().any(|pointer| !pointer.is_check() && buckets.stale_by(*pointer) > 0)
}

/// Returns a leaf's content with the journal replayed over it.
pub(crate) fn of_leaf(
    image: &dyn ReadAt,
    geometry: &Geometry,
    leaf: &NodeRef,
    replay: &ReplayedKeys,
    findings: &mut Findings,
) -> ExtentMap {
    let mut content = tree::leaf_content(image, geometry, leaf, findings);
    for key in replay.keys.within(leaf.low, leaf.high) {
        content.insert(key);
    }
    content
}

/// A run of live data on the cache device.
struct LiveExtent {
    sector: u64,
    end: u64,
}

/// The inputs of the last pass over the leaves.
pub(crate) struct ContentCheck<'a> {
    pub image: &'a dyn ReadAt,
    pub geometry: Geometry,
    pub backings: &'a [Option<BackingDevice>],
    pub backing_images: &'a [&'a dyn ReadAt],
    pub replay: &'a ReplayedKeys,
    pub compare_clean: bool,
}

impl ContentCheck<'_> {
    /// Checks every extent of the tree's final content, and counts the live sectors. Returns the
    /// number of dirty sectors that belong to no volume.
    pub fn judge(
        &self,
        tree: &TreeWalk,
        buckets: &mut Buckets,
        volumes: &mut BTreeMap<Inode, Volume>,
        findings: &mut Findings,
    ) -> u64 {
        let (mut runs, mut nobodys) = (Vec::new(), 0);
        for leaf in &tree.leaves {
            for key in of_leaf(self.image, &self.geometry, leaf, self.replay, findings).iter() {
                if !buckets.is_live(key) {
                    judge_dead(key, leaf, buckets, findings);
                    continue;
                }
                self.judge_live(key, leaf, buckets, volumes.get(&key.inode), findings);
                buckets.count(key);
                let dirty = if key.dirty { key.sectors() } else { 0 };
                if let Some(volume) = volumes.get_mut(&key.inode) {
                    volume.live_sectors += key.sectors();
                    volume.dirty_sectors += dirty;
                } else {
                    nobodys += dirty;
                }
                let pointers = key.pointers.as_slice().iter();
                runs.extend(pointers.map(|pointer| LiveExtent {
                    sector: pointer.sector(),
                    end: pointer.sector() + key.sectors(),
                }));
            }
        }
        report_shared(runs, findings);
        self.judge_volumes(volumes, findings);
        nobodys
    }

    fn judge_live(
        &self,
        key: &Key,
        leaf: &NodeRef,
        buckets: &mut Buckets,
        volume: Option<&Volume>,
        findings: &mut Findings,
    ) {
        let place = leaf.place();
        for pointer in key.pointers.as_slice() {
            buckets.claim(pointer.sector(), BucketUse::Data, place, findings);
            let block = self.geometry.block_sectors;
            if ![key.start(), key.end, pointer.sector()].iter().all(|sector| sector.is_multiple_of(block)) {
                findings.error(place, DamageKind::Unaligned { key: *key });
            }
        }
        match volume {
            None => findings.error(place, DamageKind::Nobodys { key: *key, inode: key.inode }),
            Some(volume) if volume.invalidated && key.dirty => {
                findings.warn(place, DamageKind::DirtyOfGivenUp { key: *key });
            }
            Some(volume) if volume.invalidated => {}
            Some(volume) => self.judge_volume_extent(key, volume, leaf, findings),
        }
    }

    fn judge_volume_extent(&self, key: &Key, volume: &Volume, leaf: &NodeRef, findings: &mut Findings) {
        let place = leaf.place();
        if volume.flash_only && !key.dirty {
            findings.error(place, DamageKind::CleanFlashOnly { key: *key });
        }
        let is_stale = volume.backing.is_some_and(|index| self.is_stale(index));
        // A stale device may have been truncated since: these keys are never read again.
        if let (true, false, Some(end)) = (key.dirty, is_stale, volume.end)
            && !(key.start() >= volume.start && key.end <= end)
        {
            if volume.flash_only && key.start() >= volume.start {
                // A kernel leaves such data behind when it shrinks a flash-only volume, and so does
                // a crash while we do.
                return findings.warn(place, DamageKind::BehindEnd { key: *key, end });
            }
            findings.error(place, DamageKind::OutsideVolume { key: *key, start: volume.start, end });
            return;
        }
        let Some(index) = volume.backing else { return };
        let (Some(Some(backing)), Some(image)) = (self.backings.get(index), self.backing_images.get(index))
        else {
            return;
        };
        let compare =
            if key.dirty { backing.claims_clean() } else { self.compare_clean && backing.uses_copies() };
        if compare && volumes::equals_backing(self.image, (index, *image), key, findings) == Some(false) {
            let key = *key;
            let kind =
                if key.dirty { DamageKind::DirtyDiffers { key } } else { DamageKind::CleanDiffers { key } };
            findings.error(place, kind);
        }
    }

    /// Returns true if the backing device says that its cached data must not be used any more.
    fn is_stale(&self, backing: usize) -> bool {
        self.backings.get(backing).and_then(Option::as_ref).is_some_and(BackingDevice::is_stale)
    }

    fn judge_volumes(&self, volumes: &BTreeMap<Inode, Volume>, findings: &mut Findings) {
        for volume in volumes.values().filter(|volume| volume.dirty_sectors > 0) {
            let Some(index) = volume.backing else { continue };
            if self.is_stale(index) {
                let kind = DamageKind::DirtyButStale { sectors: volume.dirty_sectors };
                findings.warn(Location::backing(index), kind);
            }
        }
    }
}

/// Checks a dead extent. It needs no further checks, except that it may hide lost dirty data or
/// generations that are too far apart.
fn judge_dead(key: &Key, leaf: &NodeRef, buckets: &Buckets, findings: &mut Findings) {
    let stale = key.pointers.as_slice().iter().filter(|pointer| !pointer.is_check());
    let by = stale.map(|pointer| buckets.stale_by(*pointer)).max().unwrap_or(0);
    if by > STALE_MAX {
        findings.error(leaf.place(), DamageKind::TooStale { key: *key, by });
    }
    if by > 0 && key.dirty {
        findings.error(leaf.place(), DamageKind::DirtyStale { key: *key });
    }
}

/// Reports sectors that belong to two live extents.
fn report_shared(mut runs: Vec<LiveExtent>, findings: &mut Findings) {
    runs.sort_by_key(|run| (run.sector, run.end));
    let mut reach = 0;
    for run in runs {
        if run.sector < reach {
            let kind = DamageKind::SectorTwice { sector: run.sector, end: reach.min(run.end) };
            findings.error(Location::cache(Structure::Content, run.sector), kind);
        }
        reach = reach.max(run.end);
    }
}
