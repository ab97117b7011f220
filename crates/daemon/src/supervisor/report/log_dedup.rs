//! What was logged of a cache, and of what is waited for, so that each thing is logged once.

use crate::supervisor::report;
use crate::supervisor::report::health;
use crate::supervisor::report::volume_names::{self, name_of};
use crate::supervisor::table::{Table, VolumeEntry, VolumeState};
use crate::supervisor::{Phase, Supervisor};
use bcached_control::sizes::human;
use bcached_control::status::DirtyData;
use bcached_engine::{LostAcks, Status, UnreadableNode, VolumeId, VolumeInfo, ZeroingInfo};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The interval at which the log says what a daemon with devices on its command line still waits
/// for, and how far a long zeroing is.
const WAITS_TOLD: Duration = Duration::from_secs(30);

impl Table {
    /// Returns a sentence if the set has failed and that was not logged yet.
    pub fn note_failure(&mut self, index: usize, status: &Status) -> Option<String> {
        let error = status.failed.as_ref()?;
        let Self { caches, volumes, .. } = self;
        let entry = caches.get_mut(index)?;
        let is_first = !std::mem::replace(&mut entry.failure_logged, true);
        is_first.then(|| {
            let stopped = health::stopped(error, &volume_names::given_up(volumes, &status.given_up));
            format!("cache {}: {stopped}", entry.display_name())
        })
    }

    /// Returns the cache's name if `is_failing` has changed since the last call.
    pub fn note_failing(&mut self, index: usize, is_failing: bool) -> Option<String> {
        let entry = self.caches.get_mut(index)?;
        let before = std::mem::replace(&mut entry.failing_logged, is_failing);
        (before != is_failing).then(|| entry.display_name().to_owned())
    }

    /// Returns the cache's name if it has changed since the last call whether its index is being
    /// read beside requests.
    pub fn note_walking(&mut self, index: usize, is_walking: bool) -> Option<String> {
        let entry = self.caches.get_mut(index)?;
        let before = std::mem::replace(&mut entry.walking_logged, is_walking);
        (before != is_walking).then(|| entry.display_name().to_owned())
    }

    /// Returns the cache's name at the first call after a failure was logged.
    pub fn note_recovery(&mut self, index: usize) -> Option<String> {
        let entry = self.caches.get_mut(index)?;
        let first = std::mem::replace(&mut entry.failure_logged, false);
        first.then(|| entry.display_name().to_owned())
    }

    /// Returns a sentence about the data that was `given_up` when the set was last opened, if that
    /// was not logged yet.
    pub fn note_given_up(&mut self, index: usize, given_up: &Arc<[LostAcks]>) -> Option<String> {
        let Self { caches, volumes, .. } = self;
        let entry = caches.get_mut(index)?;
        let told = std::mem::replace(&mut entry.given_up_logged, Arc::clone(given_up));
        (!given_up.is_empty() && !Arc::ptr_eq(&told, given_up)).then(|| {
            format!(
                "cache {}: writes that were acknowledged and not flushed when its device failed were given up: {}; \
                 older data is in their place",
                entry.display_name(),
                volume_names::given_up(volumes, given_up)
            )
        })
    }

    /// Returns a sentence for each volume that is not served, has dirty data, and was not logged
    /// yet.
    pub fn note_unserved(&mut self, index: usize, status: &Status) -> Vec<String> {
        let is_coming = |entry: &VolumeEntry| matches!(entry.state, VolumeState::Attaching);
        let Some(cache) = self.caches.get_mut(index).filter(|_| !self.volumes.iter().any(is_coming)) else {
            return Vec::new();
        };
        // The data of a flash-only volume is where it belongs.
        let is_dirty =
            |left: &&bcached_engine::UnservedInfo| left.dirty_sectors > 0 && left.flash_sectors.is_none();
        let all: BTreeSet<_> = status.unserved.iter().filter(is_dirty).map(|left| left.uuid.0).collect();
        let told = std::mem::replace(&mut cache.unserved_logged, all);
        let name = cache.name.as_ref().unwrap_or(&cache.device);
        let news = status.unserved.iter().filter(is_dirty).filter(|left| !told.contains(&left.uuid.0));
        let news = news.map(|left| {
            let left = report::unserved(left);
            let (volume, dirty) = (left.name(), &left.dirty);
            format!(
                "cache {name}: {dirty} of {volume}, which is not served: the data stays there until it is"
            )
        });
        news.collect()
    }

    /// Returns a sentence for each fault of the table of volumes, and for the data that belongs to
    /// no volume for that reason, if it was not logged yet.
    pub fn note_table(&mut self, index: usize, status: &Status) -> Vec<String> {
        let Some(cache) = self.caches.get_mut(index) else { return Vec::new() };
        let name = cache.name.as_ref().unwrap_or(&cache.device);
        let mut news = Vec::new();
        if status.table_is_damaged {
            news.push(format!(
                "cache {name}: its table of volumes is damaged: it is not the one that was written; volumes whose \
                 backing devices name their numbers are served, others may be missing"
            ));
        }
        for slot in &status.doubted {
            let of = match slot.label.to_string() {
                label if label.is_empty() => slot.uuid.to_string(),
                label => label,
            };
            news.push(format!(
                "cache {name}: slot {} of its table of volumes ({of}) may differ from what was written; no \
                 volume is served from it, and the cache keeps the data under that number",
                slot.inode.0
            ));
        }
        if status.ownerless_dirty_sectors > 0 && status.walked_percent == 100 {
            // If the index is damaged there may be more.
            let dirty = DirtyData::of(status.ownerless_dirty_sectors, status.is_counted);
            news.push(format!(
                "cache {name}: {dirty} that belongs to no volume of its table; it is kept, and not written back; add \
                 the volume that it may belong to; if that is refused, keep both devices as they are: \
                 docs/failures.md (a lost table of volumes)",
            ));
        }
        news.retain(|told| !cache.table_logged.contains(told));
        cache.table_logged.extend(news.iter().cloned());
        news
    }

    /// Returns a sentence for each long zeroing of a volume that was not logged recently.
    pub fn note_zeroings(
        &mut self,
        index: usize,
        zeroings: &[(VolumeId, ZeroingInfo)],
        infos: &[VolumeInfo],
    ) -> Vec<String> {
        let Some(cache) = self.caches.get_mut(index) else { return Vec::new() };
        let before = std::mem::take(&mut cache.zeroing_logged);
        let mut told = BTreeMap::new();
        let mut news = Vec::new();
        for (volume, zeroing) in zeroings.iter().filter(|(_, zeroing)| zeroing.since >= health::SLOW) {
            // If the zeroing is younger than what was logged, it is another one.
            let last = before.get(volume).copied().filter(|last| *last <= zeroing.since);
            if let Some(last) = last.filter(|last| zeroing.since < *last + WAITS_TOLD) {
                told.insert(*volume, last);
                continue;
            }
            told.insert(*volume, zeroing.since);
            let (done, all) = (human(zeroing.done * 512), human(zeroing.sectors * 512));
            news.push((*volume, format!("{done} of {all} zeroed after {} s", zeroing.since.as_secs())));
        }
        cache.zeroing_logged = told;
        let name = |volume| name_of(&self.volumes, index, volume, infos);
        news.into_iter().map(|(volume, far)| format!("volume {}: {far}", name(volume))).collect()
    }

    /// Returns a sentence for each btree node of a set that cannot be read and was not logged yet.
    pub fn note_unreadable(
        &mut self,
        index: usize,
        nodes: &[UnreadableNode],
        infos: &[VolumeInfo],
    ) -> Vec<String> {
        let name = |volume| name_of(&self.volumes, index, volume, infos);
        let Some(cache) = self.caches.get_mut(index) else { return Vec::new() };
        let all: BTreeSet<_> = nodes.iter().map(|node| node.sector).collect();
        let told = std::mem::replace(&mut cache.unreadable_logged, all);
        let news = nodes.iter().filter(|node| !told.contains(&node.sector));
        let told = |node: &UnreadableNode| {
            let cost = health::unreadable(std::slice::from_ref(node), name).unwrap_or_default();
            format!("{cost} ({})", health::in_detail(node))
        };
        news.map(told).collect()
    }
}

impl Supervisor {
    /// Logs at intervals why a daemon with devices on its command line is not `ready` yet, which
    /// may last for hours. Returns true if it did.
    pub fn tell_waits(&mut self, since_start: Duration) -> bool {
        let is_due = since_start >= self.waits_told + WAITS_TOLD;
        if !self.strict || !is_due || self.shared().phase != Phase::Starting {
            return false;
        }
        self.waits_told = since_start;
        self.tell_not_served();
        true
    }

    pub fn tell_not_served(&self) {
        let missing = self.shared().table.not_served_yet();
        for told in missing {
            tracing::warn!(event = "not-served-yet", "{told}");
        }
    }
}
