//! Serving a set with damaged nodes that had to be walked before service. If enough buckets
//! provably hold no data that such a node may refer to, the set is served as one that has not been
//! walked, and the walk skips those nodes (`btree::frozen_ranges`).
//!
//! Proof is a summary that lists all that was written to the bucket in its present life, none of it
//! in the damaged ranges. All data that other nodes refer to there must be clean. Alternatively,
//! the bucket holds an older block of priorities, which any use of the bucket would have
//! overwritten first. Buckets written by a kernel have no summary, nor have buckets that were never
//! used. A set without enough proven buckets is refused: nothing shows which buckets may be
//! overwritten.

use super::recover::RecoveredMetadata;
use crate::btree::frozen_ranges::FrozenRanges;
use crate::btree::walk::WalkResult;
use crate::cpu_cost::{BUCKET_NS, BUCKETS_MAX, summary_ns};
use crate::space::reserve::{self, ProvenFree, needed};
use crate::space::{BucketUsage, Buckets, OpenBuckets, prios};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::BucketId;
use bcached_format::prio::PrioSet;
use bcached_format::summary;

/// Proven buckets wanted: one in so many, and at least twice what a start needs.
const SHARE: u64 = 64;
/// Number of buckets read at once.
const DEPTH: usize = 16;
/// Maximum number of buckets examined.
const LOOKED_MAX: usize = 8192;

/// Looks for proven buckets. `buckets`: as the walk has counted them. Returns `None` if there are
/// too few.
pub(super) async fn prove(
    before: &RecoveredMetadata<'_>,
    (buckets, walked): (&Buckets, &WalkResult),
    summary_share: u64,
) -> Option<ProvenFree> {
    let geometry = before.geometry;
    if walked.node_sectors_max > geometry.node_sectors() {
        // The node size must be known before nodes are read.
        return None;
    }
    let open = OpenBuckets::new(geometry, summary_share);
    let proof = FreeProof {
        before,
        buckets,
        damaged: &walked.damaged,
        summary_at: open.data_sectors(),
        summary_sectors: open.summary_sectors()?,
    };
    let wanted = (geometry.buckets / SHARE).max(2 * needed(geometry));
    let mut now: Vec<u64> = Vec::new();
    for some in candidates(before, buckets, walked).await.chunks(DEPTH) {
        if now.len() as u64 >= wanted {
            break;
        }
        let are_proven = join_all(some.iter().map(|id| proof.is_proven(*id))).await;
        now.extend(some.iter().zip(are_proven).filter(|(_, is_proven)| *is_proven).map(|(id, _)| id.index));
    }
    // Priorities are written to the first of them before the stored generations make keys that
    // refer to them void.
    let is_named = |index: &u64| buckets.get(buckets.id(*index)).live > 0;
    let chain = usize::try_from(geometry.prio_sets()).expect("a chain is short");
    let suffice = now.len() as u64 >= needed(geometry) && !now.iter().take(chain).any(is_named);
    suffice.then_some(ProvenFree { now, later: Vec::new() })
}

/// Returns the buckets to examine: first those to which no readable key points, then those whose
/// data is all clean and can be read from the backing device. Excludes buckets that keys to be
/// replayed point to, and those whose known generation differs from the stored one.
async fn candidates(before: &RecoveredMetadata<'_>, buckets: &Buckets, walked: &WalkResult) -> Vec<BucketId> {
    let (env, _) = before.on;
    let (entries, note) = before.replayed;
    let mut named = BTreeSet::new();
    reserve::each_named((env, before.geometry), entries, note, |index| {
        named.insert(index);
    })
    .await;
    let (mut unnamed, mut clean) = (Vec::new(), Vec::new());
    for (number, ((id, bucket), (generation, _))) in buckets.iter().zip(&before.stored.entries).enumerate() {
        if number % BUCKETS_MAX == 0 {
            env.breathe().await;
            env.charge(BUCKET_NS * BUCKETS_MAX as u64);
        }
        let is_metadata = before.metadata.contains(&id.index) || walked.nodes.contains(&id.index);
        let is_known = bucket.usage != BucketUsage::Unknown || is_metadata || named.contains(&id.index);
        if !is_known && bucket.dirty == 0 && bucket.generation == *generation {
            let kind = if bucket.live == 0 { &mut unnamed } else { &mut clean };
            if kind.len() < LOOKED_MAX {
                kind.push(id);
            }
        }
    }
    unnamed.append(&mut clean);
    unnamed
}

/// Examines the contents of the buckets.
struct FreeProof<'a> {
    before: &'a RecoveredMetadata<'a>,
    buckets: &'a Buckets,
    damaged: &'a FrozenRanges,
    /// Where in a bucket its summary begins, in sectors.
    summary_at: u64,
    summary_sectors: u64,
}

impl FreeProof<'_> {
    async fn is_proven(&self, id: BucketId) -> bool {
        self.is_apart(id).await || self.buckets.get(id).live == 0 && self.is_former_chain(id).await
    }

    /// Returns whether the bucket's summary proves that no data of the damaged nodes was written to
    /// it.
    async fn is_apart(&self, id: BucketId) -> bool {
        let (env, disk) = self.before.on;
        let bytes = usize::try_from(self.summary_sectors * 512).expect("a summary is small");
        let sector = self.buckets.sector(id) + self.summary_at;
        let (read, buffer) = disk.read(sector, Buffer::zeroed(bytes)).await;
        env.breathe().await;
        let generation = self.buckets.get(id).generation;
        let found = summary::extents(buffer.as_slice(), self.before.geometry.magic, id.index, generation);
        env.charge(summary_ns(found.as_ref().map_or(0, Vec::len)));
        let found = found.filter(|found| read.is_ok() && summary::says_all(found, self.summary_sectors));
        found.is_some_and(|extents| self.damaged.is_apart(&extents))
    }

    /// Returns whether the bucket begins with an older block of priorities: any use of the bucket
    /// would have overwritten it first.
    async fn is_former_chain(&self, id: BucketId) -> bool {
        let (_, disk) = self.before.on;
        let (geometry, sector) = (self.before.geometry, self.buckets.sector(id));
        let (read, first) = disk.read(sector, Buffer::zeroed(geometry.block_bytes())).await;
        if read.is_err() || !PrioSet::begins(first.as_slice(), geometry.magic) {
            return false;
        }
        let sequence = prios::sequence_of(self.before.on, geometry, id).await;
        sequence.is_ok_and(|sequence| sequence < self.before.stored.sequence)
    }
}
