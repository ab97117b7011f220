//! Walks the whole tree in the background, in a cache set that is served before it has been walked.
//! The walk counts what the buckets hold and, at its end, determines the usage of each bucket. Only
//! then are buckets that hold data reclaimed.
//!
//! The walk needs nothing that other tasks wait for: it takes no buckets, makes no nodes and
//! changes no leaf. So a task that needs a bucket may wait for the end of the walk, as long as the
//! walk makes progress.
//!
//! - A node that cannot be read is retried until it can be. A caller that cannot do without a
//!   bucket, or must know what is dirty, does not wait for that forever.
//! - A damaged node is tried a few times and then skipped, with the consequences described in
//!   `btree::frozen_ranges`.
//! - A contradiction fails the set, just as it would have refused the start.

use crate::btree::{load, walk_frontier::WalkOutcome};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{BucketUsage, summaries};
use crate::state::State;
use crate::volume::{Volume, VolumeId, record};
use crate::writeback::stall_reason::WritebackError;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_format::{BackingState, BucketId};
use core::time::Duration;

/// How long to wait after a node that could not be read.
const PAUSE: Duration = Duration::from_secs(1);
/// How often a damaged node is read: a fault on the path from the device may be transient.
const DAMAGED_TRIES: u32 = 3;
/// Summaries read at once.
const DEPTH: usize = 64;

/// Runs the task. It ends when everything has been counted, or when no caller can need the result
/// any more.
pub async fn run(set: CacheSet) {
    let _walk = set.begin(Phase::Walk);
    while !is_over(&set) {
        match count(&set).await {
            Ok(()) | Err(Error::Failed(_)) => return,
            Err(error) if error.may_pass() || matches!(error, Error::Node { .. }) => meets(&set, error).await,
            Err(error) => {
                let _told_already = set.fail(error);
            }
        }
    }
}

/// Handles a next node that cannot be read or is damaged.
async fn meets(set: &CacheSet, error: Error) {
    let passes_by = set.with(|s| {
        s.frontier.meets(error.clone());
        let is_damaged = matches!(error, Error::Node { .. }) && s.frontier.trouble(DAMAGED_TRIES).is_some();
        if is_damaged { s.freeze(&error) } else { Ok(false) }
    });
    match passes_by {
        Ok(true) => return,
        Ok(false) => {}
        Err(error) => {
            let _told_already = set.fail(error);
            return;
        }
    }
    set.signals().space.notify_all();
    set.signals().walked.notify_all();
    let until = set.env().now() + PAUSE;
    while set.env().now() < until && !is_over(set) {
        set.env().wait_until(&set.signals().walked, until).await;
    }
}

/// Returns whether the walk ends early. A stop does not end it before all requests have completed,
/// because they may wait for buckets.
fn is_over(set: &CacheSet) -> bool {
    set.with(|s| s.settled || s.failed.is_some())
}

async fn count(set: &CacheSet) -> Result<(), Error> {
    while !is_over(set) {
        // Nodes that pass their checks but contradict each other are worse than a damaged node.
        let counted = set.attempt(State::count_piece).await?.map_err(|error| set.fail(error))?;
        match counted {
            WalkOutcome::Leaf => {}
            WalkOutcome::Border => {
                load::together(set, |s, most| (s.leaves_ahead(most).unwrap_or_default(), ())).await;
                set.env().yield_now().await;
            }
            WalkOutcome::End => {
                finish(set).await;
                break;
            }
        }
    }
    Ok(())
}

/// Ends the walk. All keys have been counted, so a bucket without metadata holds data or nothing.
async fn finish(set: &CacheSet) {
    let by_age = by_age(set).await;
    for some in by_age.values().flat_map(|indices| indices.chunks(VISIT_MAX)) {
        if !set.with(|s| s.frozen.is_empty()) {
            hold_data_if_apart(set, some).await;
            continue;
        }
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(some.len());
            some.iter().for_each(|index| s.holds_data(s.buckets.id(u64::from(*index))));
        });
    }
    set.with(|s| s.stats.found = s.frontier.complete());
    set.wake_all();
    all_is_known(set).await;
}

/// Called when the walk has ended, or when the replay that runs beside requests has. Once both
/// have, it is known what is dirty.
pub async fn all_is_known(set: &CacheSet) {
    if !set.with(|s| s.is_counted()) {
        return;
    }
    for id in set.with(|s| unmarked(s)) {
        if set.with(|s| is_outdated(s, id)) {
            continue;
        }
        // A kernel may have crashed between the first dirty key and marking the superblock. If the
        // superblock cannot be written now, the next start retries. The volume is held during the
        // write, so its backing device is not exchanged meanwhile.
        set.with(|s| s.begin_background(id));
        let _ = record::update(set, id, |s, superblock| {
            if unmarked(s).contains(&id) {
                superblock.set_state(BackingState::Dirty);
            }
        })
        .await;
        set.let_go(id);
    }
}

/// Does the same for those buckets whose summaries prove that they hold nothing a damaged node may
/// name.
async fn hold_data_if_apart(set: &CacheSet, indices: &[u32]) {
    for some in indices.chunks(DEPTH) {
        let ids: Vec<BucketId> =
            set.with(|s| some.iter().map(|index| s.buckets.id(u64::from(*index))).collect());
        for (id, found) in ids.iter().zip(summaries::read(set, &ids).await) {
            set.env().breathe().await;
            set.with(|s| {
                s.work.visit(found.as_ref().map_or(0, Vec::len));
                if found.is_some_and(|extents| s.frozen.is_apart(&extents)) {
                    s.buckets.may_be_named(*id);
                    s.holds_data(*id);
                }
            });
        }
    }
}

impl State {
    /// Marks a bucket of unknown usage as a data bucket: it holds no metadata.
    fn holds_data(&mut self, id: BucketId) {
        // Its node may have been freed meanwhile.
        if self.buckets.get(id).usage == BucketUsage::Unknown {
            self.buckets.set_usage(id, BucketUsage::Data);
        }
    }
}

/// Returns the buckets of unknown usage, by their stored priority.
async fn by_age(set: &CacheSet) -> BTreeMap<u64, Vec<u32>> {
    let mut by_age: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    set.each_bucket(|s, id, bucket| {
        if bucket.usage == BucketUsage::Unknown {
            let index =
                u32::try_from(id.index).expect("a table is not made for more buckets than fit 32 bits");
            by_age.entry(s.buckets.touched(id)).or_default().push(index);
        }
    })
    .await;
    by_age
}

/// Returns whether the volume's backing device is an older copy of itself: its state could have
/// been believed, but is wrong. Such a device is left as it is, nothing is written back to it, and
/// the status reports it.
fn is_outdated(s: &mut State, id: VolumeId) -> bool {
    let Some(volume) = s.volumes.get_mut(id).filter(|volume| volume.must_be_clean) else { return false };
    let (sectors, error) = (volume.sectors, Error::OlderBacking);
    (volume.is_outdated, volume.stands_still) = (true, true);
    volume.writeback_trouble = Some(WritebackError { sector: 0, sectors, error });
    true
}

/// Returns the volumes with dirty data whose superblocks say that there is none.
fn unmarked(s: &State) -> Vec<VolumeId> {
    let is_unmarked = |volume: &Volume| {
        volume.state() == Some(BackingState::Clean) && volume.inode.is_some_and(|inode| s.dirty.of(inode) > 0)
    };
    s.volumes.iter().filter(|(_, volume)| is_unmarked(volume)).map(|(id, _)| id).collect()
}
