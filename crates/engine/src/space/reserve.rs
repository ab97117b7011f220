//! The reserve: buckets kept free for the next start, each with a proof in it that it is free. With
//! them, requests are served before the tree has been walked; before the walk, nothing else shows
//! that no pointer leads into a bucket.
//!
//! The proof (`docs/decisions/0008-starting-without-the-walk.md`):
//! 1. A free bucket is *stamped*: its first block names the bucket and its generation
//!    (`bcached_format::stamp`).
//! 2. Then the priorities are stored, with a priority value that only the reserve has. Every
//!    journal entry from then on vouches for that ([`PrioChains::marks_reserve`]). A kernel's
//!    entries do not. Nor do ours after a start that took buckets because it had walked the tree,
//!    until the priorities are stored again.
//! 3. A start whose newest journal entry vouches reads the stamps of the marked buckets and uses
//!    half of those proven. They get a new generation, which is stored before data or nodes are
//!    written to them: then they are no longer marked, and their stamps are void. The other half is
//!    kept in case this start, too, ends before its walk.
//!
//! So a bucket that the newest entry marks, and that is stamped with its generation, has not been
//! used since it was stamped. After the walk, the reserve is refilled.
//!
//! [`PrioChains::marks_reserve`]: crate::state::PrioChains

use crate::btree::walk::pause;
use crate::cache_writes::WriteCause;
use crate::cpu_cost::VISIT_MAX;
use crate::error::{Error, ErrorContext};
use crate::journal::scan::JournalEntry;
use crate::set::CacheSet;
use crate::space::BucketUsage;
use crate::space::prios::{self, StoredPriorities};
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env, NoteRecord, join_all};
use bcached_format::prio::PRIO_RESERVE;
use bcached_format::stamp::{is_stamped, stamp};
use bcached_format::{BucketId, DeviceIndex, Geometry, Pointer};
use core::time::Duration;

/// One bucket in so many belongs to the reserve, if that is enough to start from.
const SHARE: u64 = 256;
/// Minimum number of buckets for data that a start needs.
const DATA_MIN: u64 = 4;
/// Maximum number of marked buckets that a start examines.
const MARKED_MAX: usize = 8192;
/// Number of stamps read or written at once.
const DEPTH: usize = 16;
/// Interval at which the task checks for buckets for the reserve, and retries after an error.
const PAUSE: Duration = Duration::from_secs(30);

/// The minimum that a start needs: a chain of priorities, the reserves for the tree and for moving,
/// and some buckets for data.
pub fn needed(geometry: &Geometry) -> u64 {
    geometry.prio_sets() + (BTREE_RESERVE + MOVING_RESERVE) as u64 + DATA_MIN
}

/// Enough for two starts, of which the second finds half of what the first found.
pub fn enough(geometry: &Geometry) -> u64 {
    4 * needed(geometry)
}

/// Number of buckets a set keeps in reserve: enough for two starts, or none.
#[must_use]
pub fn wanted(geometry: &Geometry, asked: Option<u64>) -> u64 {
    let wanted = asked.unwrap_or(geometry.buckets / SHARE).min(MARKED_MAX as u64);
    if wanted < enough(geometry) && asked.is_none() { 0 } else { wanted }
}

/// The buckets that a start has proven free, by index.
pub struct ProvenFree {
    /// Certainly free; for this start.
    pub now: Vec<u64>,
    /// Certainly free; kept for the next start.
    pub later: Vec<u64>,
}

/// Looks for proven free buckets. Returns `None` if there are too few: then the tree must be walked
/// first. `taken`: the buckets that hold metadata. If `entries` or `note` point to a marked bucket,
/// it is in use whatever its stamp says, and nothing is proven.
pub async fn prove(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    stored: &StoredPriorities,
    taken: &BTreeSet<u64>,
    (entries, note): (&[JournalEntry], &[NoteRecord]),
) -> Option<ProvenFree> {
    let is_marked = |index: &u64| {
        let entry = usize::try_from(*index).ok().and_then(|index| stored.entries.get(index));
        entry.is_some_and(|(_, prio)| *prio == PRIO_RESERVE) && !taken.contains(index)
    };
    let first = geometry.first_bucket + geometry.journal_buckets;
    let marked: Vec<u64> = (first..geometry.buckets).filter(is_marked).take(MARKED_MAX).collect();
    let (set, mut is_named) = (marked.iter().copied().collect::<BTreeSet<u64>>(), false);
    each_named((env, geometry), entries, note, |index| is_named |= set.contains(&index)).await;
    if is_named {
        return None;
    }
    let mut now = Vec::new();
    for some in marked.chunks(DEPTH) {
        env.breathe().await;
        let stamped =
            join_all(some.iter().map(|index| is_proven((env, disk), geometry, stored, *index))).await;
        now.extend(some.iter().zip(stamped).filter(|(_, stamped)| *stamped).map(|(index, _)| *index));
    }
    let later = now.split_off(now.len().div_ceil(2));
    (now.len() as u64 >= needed(geometry)).then_some(ProvenFree { now, later })
}

/// Calls `look` for each bucket that keys to be replayed point to, whatever their generation. Other
/// tasks run between the entries.
pub async fn each_named(
    (env, geometry): (&Env, &Geometry),
    entries: &[JournalEntry],
    note: &[NoteRecord],
    mut look: impl FnMut(u64),
) {
    let mut look = |pointer: Pointer| look(pointer.sector() / geometry.bucket_sectors);
    for entry in entries {
        pause(env, entry.keys.len()).await;
        entry.keys.iter().flat_map(|key| key.pointers.as_slice()).for_each(|pointer| look(*pointer));
    }
    for records in note.chunks(VISIT_MAX) {
        pause(env, records.len()).await;
        let words = records.iter().flat_map(|record| record.words.iter().skip(2));
        words.for_each(|word| look(Pointer::from_word(*word)));
    }
}

async fn is_proven(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    stored: &StoredPriorities,
    index: u64,
) -> bool {
    let (generation, _) = stored.entries[usize::try_from(index).expect("the index is in the table")];
    let id = BucketId { device: DeviceIndex(0), index };
    let block = Buffer::zeroed(geometry.block_bytes());
    let (read, block) = disk.read(geometry.sector_of(id), block).await;
    env.breathe().await;
    read.is_ok() && is_stamped(block.as_slice(), geometry.magic, index, generation)
}

/// Runs the task that keeps the reserve at its intended size.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        // An error leaves less for the next start and has no other effect.
        let _ = fill(&set).await;
        let until = set.env().now() + PAUSE;
        while set.env().now() < until && !set.is_ending() {
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// Stamps free buckets until the reserve has its intended size, and stores the priorities that mark
/// them.
async fn fill(set: &CacheSet) -> Result<(), Error> {
    let (mut stamped, mut written) = (false, Ok(()));
    while written.is_ok() && !set.is_ending() && set.with(|s| missing(s)) > 0 {
        let some = set.with(take_some);
        if some.is_empty() && stamped {
            stamped = false;
            prios::store(set).await?;
        } else if some.is_empty() {
            // Requests and the tree come first; the allocator frees more.
            set.signals().allocator_work.notify_all();
            set.env().wait_until(&set.signals().space, set.env().now() + PAUSE).await;
        } else {
            stamped = true;
            let each = join_all(some.into_iter().map(|id| write_stamp(set, id))).await;
            written = each.into_iter().collect();
        }
    }
    // The flush before the journal entry makes the stamps durable.
    if stamped { prios::store(set).await.and(written) } else { written }
}

/// Number of buckets that the reserve lacks.
fn missing(s: &State) -> u64 {
    s.reserve_wanted.saturating_sub(s.buckets.count_of(BucketUsage::Reserve))
}

/// Takes free buckets for the reserve: as many as are stamped at once and can be spared.
fn take_some(s: &mut State) -> Vec<BucketId> {
    let count = usize::try_from(missing(s)).unwrap_or(usize::MAX).min(DEPTH);
    let keep = BTREE_RESERVE + MOVING_RESERVE + 1;
    (0..count).map_while(|_| s.buckets.take_for_reserve(keep)).collect()
}

async fn write_stamp(set: &CacheSet, id: BucketId) -> Result<(), Error> {
    let (sector, bytes) = set.with(|s| {
        let generation = s.buckets.get(id).generation;
        let bytes = stamp(s.geometry.block_bytes(), s.geometry.magic, id.index, generation);
        (s.buckets.sector(id), bytes)
    });
    let written = set.write_cache(WriteCause::Priorities, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(|source| {
        set.with(|s| s.buckets.put_back_from_reserve(id));
        Error::Io { doing: ErrorContext::Priorities, source }
    })
}
