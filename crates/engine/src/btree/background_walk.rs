//! The walk of the whole tree beside requests, in a set that is served before it has been walked: counts what is in the buckets,
//! and at its end says of each bucket what it is. Only then are buckets taken from what they hold.
//!
//! It needs nothing that others wait for: it takes no buckets, makes no nodes, and changes no leaf. So those who want a
//! bucket before its end may wait for it, as long as it goes on. A node that cannot be read is tried again until it can be, and who
//! cannot do without a bucket, or must know what is dirty, does not wait for that for ever. One that is damaged is tried a few times, and then
//! passed by, with what follows from that (`btree::frozen`). What contradicts itself fails the set, as it would have refused the start.

use crate::btree::{load, walk_frontier::Step};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Usage, summaries};
use crate::state::State;
use crate::volume::{Volume, VolumeId, record};
use crate::writeback::stall_reason::WritebackTrouble;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_format::{BackingState, BucketId};
use core::time::Duration;

/// How long to wait after a node that could not be read.
const PAUSE: Duration = Duration::from_secs(1);
/// How often a node is read that is damaged: a fault of the way from the device passes.
const DAMAGED_TRIES: u32 = 3;
/// Summaries that are read at once.
const DEPTH: usize = 64;

/// The task. It ends when all has been counted, or nobody can want it any more.
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

/// The next node cannot be read, or makes no sense.
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

/// A stop does not end it before all requests have ended: they may wait for buckets.
fn is_over(set: &CacheSet) -> bool {
    set.with(|s| s.settled || s.failed.is_some())
}

async fn count(set: &CacheSet) -> Result<(), Error> {
    while !is_over(set) {
        // Bytes that came in good order and contradict each other are more than a damaged node.
        let counted = set.attempt(State::count_piece).await?.map_err(|error| set.fail(error))?;
        match counted {
            Step::Leaf => {}
            Step::Border => {
                load::together(set, |s, most| (s.leaves_ahead(most).unwrap_or_default(), ())).await;
                set.env().yield_now().await;
            }
            Step::End => {
                finish(set).await;
                break;
            }
        }
    }
    Ok(())
}

/// All keys have been counted: what holds no metadata holds data, or nothing.
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

/// The walk has ended, or what a replay puts beside requests: if both have, it is known what is dirty.
pub async fn all_is_known(set: &CacheSet) {
    if !set.with(|s| s.is_counted()) {
        return;
    }
    for id in set.with(|s| unmarked(s)) {
        if set.with(|s| is_outdated(s, id)) {
            continue;
        }
        // A kernel may have died between the first dirty key and saying so. What cannot be written now is tried at the next start.
        // Meanwhile its device is not exchanged.
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

/// The same of those buckets of which their summaries prove that they hold nothing that a damaged node may name.
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
    /// A bucket of which nothing is known holds no metadata.
    fn holds_data(&mut self, id: BucketId) {
        // It may have become free of its node meanwhile.
        if self.buckets.get(id).usage == Usage::Unknown {
            self.buckets.set_usage(id, Usage::Data);
        }
    }
}

/// The buckets of which nothing is known, by their stored priority.
async fn by_age(set: &CacheSet) -> BTreeMap<u64, Vec<u32>> {
    let mut by_age: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    set.each_bucket(|s, id, bucket| {
        if bucket.usage == Usage::Unknown {
            let index =
                u32::try_from(id.index).expect("a table is not made for more buckets than fit 32 bits");
            by_age.entry(s.buckets.touched(id)).or_default().push(index);
        }
    })
    .await;
    by_age
}

/// What the backing device of the volume says could be believed, and is not so: it is an older copy of itself. It is left as it is, nothing
/// is written back to it, and whoever looks is told.
fn is_outdated(s: &mut State, id: VolumeId) -> bool {
    let Some(volume) = s.volumes.get_mut(id).filter(|volume| volume.must_be_clean) else { return false };
    let (sectors, error) = (volume.sectors, Error::OlderBacking);
    (volume.is_outdated, volume.stands_still) = (true, true);
    volume.writeback_trouble = Some(WritebackTrouble { sector: 0, sectors, error });
    true
}

/// Volumes with dirty data whose superblocks say that there is none.
fn unmarked(s: &State) -> Vec<VolumeId> {
    let is_unmarked = |volume: &Volume| {
        volume.state() == Some(BackingState::Clean) && volume.inode.is_some_and(|inode| s.dirty.of(inode) > 0)
    };
    s.volumes.iter().filter(|(_, volume)| is_unmarked(volume)).map(|(id, _)| id).collect()
}
