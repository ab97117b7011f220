//! The reserve: buckets kept free for the next start, each with a proof in it that it is, so that requests are served before the
//! tree has been walked. Before the walk nothing else says of a bucket that nobody points into it.
//!
//! The proof (decision 8 of the architecture, and `docs/decisions/0008`):
//! 1. A free bucket is *stamped*: its first block says which bucket of which generation it is (`bcached_format::stamp`).
//! 2. Then the priorities are stored, with a priority that only the reserve has, and every journal entry from then on vouches for
//!    that ([`PrioChains::marks_reserve`]). A kernel's entries do not. Nor do ours after a start that took buckets because it had
//!    walked the tree, until the priorities are stored anew.
//! 3. A start that finds such an entry as the newest reads the stamps of what is marked, and uses half of it. Those buckets get a new
//!    generation, which is stored before data or nodes come into them: then they are not marked any more, and their stamps are void. The
//!    other half stays, for the case that this start, too, ends before its walk.
//!
//! So a bucket that is marked by the newest entry and stamped for its generation has not been used since it was stamped. When the
//! walk has ended the reserve is filled up again.
//!
//! [`PrioChains::marks_reserve`]: crate::state::PrioChains

use crate::btree::walk::pause;
use crate::cache_writes::Cause;
use crate::cpu_cost::VISIT_MAX;
use crate::error::{Doing, Error};
use crate::journal::scan::Entry;
use crate::set::CacheSet;
use crate::space::Usage;
use crate::space::prios::{self, Stored};
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env, NoteRecord, join_all};
use bcached_format::prio::PRIO_RESERVE;
use bcached_format::stamp::{is_stamped, stamp};
use bcached_format::{BucketId, DeviceIndex, Geometry, Pointer};
use core::time::Duration;

/// One bucket in so many is of the reserve, if that is enough to start from.
const SHARE: u64 = 256;
/// Buckets for data that a start is to have, at the least.
const DATA_MIN: u64 = 4;
/// Most marked buckets that a start looks at.
const MARKED_MAX: usize = 8192;
/// Stamps read or written at once.
const DEPTH: usize = 16;
/// How often to look whether there are buckets for it, and how soon to try again after an error.
const PAUSE: Duration = Duration::from_secs(30);

/// The least that a start needs: a chain of priorities, what is kept for the tree and for moving, and some for data.
pub fn needed(geometry: &Geometry) -> u64 {
    geometry.prio_sets() + (BTREE_RESERVE + MOVING_RESERVE) as u64 + DATA_MIN
}

/// What suffices for two starts, of which the second finds half of what the first found.
pub fn enough(geometry: &Geometry) -> u64 {
    4 * needed(geometry)
}

/// How many buckets a set keeps: enough for two starts, or none.
#[must_use]
pub fn wanted(geometry: &Geometry, asked: Option<u64>) -> u64 {
    let wanted = asked.unwrap_or(geometry.buckets / SHARE).min(MARKED_MAX as u64);
    if wanted < enough(geometry) && asked.is_none() { 0 } else { wanted }
}

/// What a start has found, by index.
pub struct Proven {
    /// Free for certain, for this start.
    pub now: Vec<u64>,
    /// The same, for the next.
    pub later: Vec<u64>,
}

/// Looks for proof. `None`: there is too little of it, and the tree must be walked first. `taken`: what holds metadata. What
/// `entries` and `note` point to is in use whatever its stamp says.
pub async fn prove(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    stored: &Stored,
    taken: &BTreeSet<u64>,
    (entries, note): (&[Entry], &[NoteRecord]),
) -> Option<Proven> {
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
    (now.len() as u64 >= needed(geometry)).then_some(Proven { now, later })
}

/// Shows the buckets that keys to be replayed point to, whatever their generation. Others run between the entries.
pub async fn each_named(
    (env, geometry): (&Env, &Geometry),
    entries: &[Entry],
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

async fn is_proven((env, disk): (&Env, &Disk), geometry: &Geometry, stored: &Stored, index: u64) -> bool {
    let (generation, _) = stored.entries[usize::try_from(index).expect("a table index")];
    let id = BucketId { device: DeviceIndex(0), index };
    let block = Buffer::zeroed(geometry.block_bytes());
    let (read, block) = disk.read(geometry.sector_of(id), block).await;
    env.breathe().await;
    read.is_ok() && is_stamped(block.as_slice(), geometry.magic, index, generation)
}

/// The task that keeps the reserve as large as it is to be.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        // After an error there is less for the next start, and nothing else.
        let _ = fill(&set).await;
        let until = set.env().now() + PAUSE;
        while set.env().now() < until && !set.is_ending() {
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// Stamps free buckets until the reserve is as large as it is to be, and has them marked.
async fn fill(set: &CacheSet) -> Result<(), Error> {
    let (mut stamped, mut written) = (false, Ok(()));
    while written.is_ok() && !set.is_ending() && set.with(|s| missing(s)) > 0 {
        let some = set.with(take_some);
        if some.is_empty() && stamped {
            stamped = false;
            prios::store(set).await?;
        } else if some.is_empty() {
            // Requests and the tree come first; the allocator makes more.
            set.signals().allocator_work.notify_all();
            set.env().wait_until(&set.signals().space, set.env().now() + PAUSE).await;
        } else {
            stamped = true;
            let each = join_all(some.into_iter().map(|id| write_stamp(set, id))).await;
            written = each.into_iter().collect();
        }
    }
    // The flush before its journal entry makes the stamps durable.
    if stamped { prios::store(set).await.and(written) } else { written }
}

/// Buckets that the reserve lacks.
fn missing(s: &State) -> u64 {
    s.reserve_wanted.saturating_sub(s.buckets.count_of(Usage::Reserve))
}

/// Free buckets for the reserve, as many as are stamped at once and can be spared.
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
    let written = set.write_cache(Cause::Priorities, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(|source| {
        set.with(|s| s.buckets.put_back_from_reserve(id));
        Error::Io { doing: Doing::Priorities, source }
    })
}
