//! Moves live dirty data out of sparsely filled buckets when buckets run out (`gc::emptying` copies
//! it). Clean data in the same buckets is not moved, because it can be read again.

use crate::cpu_cost::BUCKETS_MAX;
use crate::error::Error;
use crate::gc::emptying;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::{Bucket, BucketUsage};
use crate::state::State;
use alloc::collections::BTreeSet;
use bcached_env::Time;
use bcached_format::BucketId;
use bcached_format::summary::extents_in;
use core::time::Duration;

/// Most buckets filled in one round: `ROUND_MAX` while writes are throttled for lack of room,
/// `ROUND_PRESSED` under pressure, and one otherwise, because emptied buckets become free only at
/// the end of a round. A round fills at most one in `FREE_SHARE` of the free buckets.
const ROUND_MAX: usize = 32;
const ROUND_PRESSED: usize = 4;
const FREE_SHARE: usize = 4;
/// Most buckets emptied in one round, and most extents that may have been written to them. Two
/// buckets are allowed in any case.
const VICTIMS_MAX: usize = 256;
const EXTENTS_MAX: usize = 8192;
/// Most buckets sorted in one piece.
const SORTED_MAX: usize = 128;
/// Number of fill levels that are told apart.
const LEVELS: usize = 64;
/// How long to rest when nothing could be gained.
const PAUSE: Duration = Duration::from_millis(500);
/// How long to leave buckets alone that could not be emptied.
const PAUSE_OF_STUCK: Duration = Duration::from_secs(60);

/// The rounds of moving, for tasks that wait for the space that a round may gain.
#[derive(Default, Debug)]
pub struct MoveRounds {
    begun: u64,
    /// The newest round that has ended, if it has moved nothing.
    vain: Option<u64>,
    /// When buckets that could not be emptied were last tried.
    stuck_tried: Option<Time>,
}

impl MoveRounds {
    const fn begins(&mut self) {
        self.begun += 1;
    }

    fn ends(&mut self, gained: bool) {
        self.vain = (!gained).then_some(self.begun);
    }

    /// Returns whether this round also retries buckets that could not be emptied.
    fn takes_stuck(&mut self, now: Time) -> bool {
        let is_due = self.stuck_tried.is_none_or(|tried| now >= tried + PAUSE_OF_STUCK);
        if is_due {
            self.stuck_tried = Some(now);
        }
        is_due
    }

    /// Returns how many rounds have begun. A task remembers this when it begins to wait.
    #[must_use]
    pub const fn begun(&self) -> u64 {
        self.begun
    }

    /// Returns whether the newest round began after `begun_then` rounds had begun, and has moved
    /// nothing.
    #[must_use]
    pub fn are_in_vain(&self, begun_then: u64) -> bool {
        self.vain.is_some_and(|vain| vain > begun_then)
    }
}

/// Runs the task.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        set.with(|s| s.moving.begins());
        let gained = match choose(&set).await {
            Some(victims) => empty(&set, &victims).await.unwrap_or(false),
            None => false,
        };
        set.with(|s| s.moving.ends(gained));
        if !gained {
            let until = set.env().now() + PAUSE;
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// The buckets that are emptied in one round.
struct MoveVictims {
    ids: BTreeSet<BucketId>,
    /// Not all of them have a summary.
    are_unknown: bool,
}

/// Chooses the emptiest buckets with dirty data: as many as a share of the free buckets can hold
/// the data of. There must be at least two, or nothing is gained. Buckets that are known to have no
/// summary are chosen only if there are no others. Buckets that could not be emptied are chosen
/// only from time to time, or the emptiest would be the same ones each time.
async fn choose(set: &CacheSet) -> Option<MoveVictims> {
    let sparse = set.with(|s| SparseLimit {
        most: s.open.data_sectors() * s.sparse_percent() / 100,
        takes_stuck: s.moving.takes_stuck(s.now),
    });
    let mut census = <[LevelCounts; 2]>::default();
    each_sparse(set, sparse, |_, bucket, level| {
        census[usize::from(bucket.is_unsummed)].count(level, bucket.dirty);
        false
    })
    .await;
    let room = set.with(|s| {
        let most = match (s.is_short_of_room(), s.presses()) {
            (true, _) => ROUND_MAX,
            (false, true) => ROUND_PRESSED,
            (false, false) => 1,
        };
        s.open.data_sectors() * (s.buckets.free_count() / FREE_SHARE).clamp(1, most) as u64
    });
    let mut wanted = census.map(|census| census.emptiest(room));
    let mut found: [BTreeSet<(u32, BucketId)>; 2] = Default::default();
    each_sparse(set, sparse, |id, bucket, level| {
        let kind = usize::from(bucket.is_unsummed);
        wanted[kind].takes(level) && found[kind].insert((bucket.dirty, id))
    })
    .await;
    let victims_max = set.with(|s| {
        let each = s.open.summary_sectors().map_or(1, extents_in);
        (EXTENTS_MAX / each.max(1)).max(2)
    });
    let [summed, unsummed] = found;
    let fitting = |emptiest: &BTreeSet<(u32, BucketId)>, most: usize| {
        let mut room = room;
        let fits = |(dirty, _): &&(u32, BucketId)| {
            let fits = u64::from(*dirty) <= room;
            room = room.saturating_sub(u64::from(*dirty));
            fits
        };
        let ids = emptiest.iter().take(most).take_while(fits).map(|(_, id)| *id);
        Some(ids.collect::<BTreeSet<_>>()).filter(|ids| ids.len() > 1)
    };
    if let Some(ids) = fitting(&summed, victims_max) {
        return Some(MoveVictims { ids, are_unknown: false });
    }
    // One of each kind gains as much as two of one kind.
    let all = summed.into_iter().chain(unsummed).collect();
    Some(MoveVictims { ids: fitting(&all, VICTIMS_MAX)?, are_unknown: true })
}

/// Which buckets are sparse. This stays the same while a round is chosen, though the pressure may
/// rise meanwhile.
#[derive(Clone, Copy)]
struct SparseLimit {
    /// Most sectors of dirty data that a sparse bucket has.
    most: u64,
    /// Includes buckets that could not be emptied.
    takes_stuck: bool,
}

impl SparseLimit {
    /// Returns whether a bucket has dirty data, but not too much of it, and is not pinned.
    fn holds(self, bucket: &Bucket) -> bool {
        bucket.usage == BucketUsage::Data
            && bucket.pins == 0
            && (1..=self.most).contains(&u64::from(bucket.dirty))
            && (self.takes_stuck || !bucket.is_stuck)
    }

    /// Returns the fill level of a bucket with `dirty` sectors of dirty data.
    fn level(self, dirty: u32) -> usize {
        let level = u64::from(dirty) * LEVELS as u64 / (self.most + 1);
        usize::try_from(level).map_or(LEVELS - 1, |level| level.min(LEVELS - 1))
    }
}

/// Passes each sparse bucket and its fill level to `look`, while buckets are scarce. `look` returns
/// whether it has sorted the bucket among others. Other tasks run between the pieces.
async fn each_sparse(
    set: &CacheSet,
    sparse: SparseLimit,
    mut look: impl FnMut(BucketId, &Bucket, usize) -> bool,
) {
    let mut at = 0;
    while set.with(|s| (at as u64) < s.buckets.count() && s.are_buckets_scarce()) {
        set.env().breathe().await;
        set.with(|s| {
            let (mut passed, mut sorted) = (0, 0);
            for (id, bucket) in s.buckets.part(at).take(BUCKETS_MAX) {
                passed += 1;
                if sparse.holds(&bucket) && look(id, &bucket, sparse.level(bucket.dirty)) {
                    sorted += 1;
                    if sorted == SORTED_MAX {
                        break;
                    }
                }
            }
            s.work.buckets(passed);
            s.work.sort(sorted);
            at += passed;
        });
    }
}

/// The number of sparse buckets of each level, and their dirty sectors. With it only the emptiest
/// buckets need be sorted.
#[derive(Clone, Copy)]
struct LevelCounts([(usize, u64); LEVELS]);

impl Default for LevelCounts {
    fn default() -> Self {
        Self([(0, 0); LEVELS])
    }
}

impl LevelCounts {
    fn count(&mut self, level: usize, dirty: u32) {
        let (buckets, sectors) = &mut self.0[level];
        *buckets += 1;
        *sectors += u64::from(dirty);
    }

    /// Selects the emptiest buckets whose dirty data fills `room` sectors, and one more.
    fn emptiest(&self, room: u64) -> EmptiestBuckets {
        let (mut left, mut buckets_left) = (room, VICTIMS_MAX);
        for (level, (buckets, sectors)) in self.0.iter().enumerate() {
            if *sectors >= left || *buckets >= buckets_left {
                let fitting = left * *buckets as u64 / (*sectors).max(1) + 1;
                let fitting = usize::try_from(fitting).unwrap_or(usize::MAX).min(buckets_left);
                return EmptiestBuckets { below: level, of_it: fitting };
            }
            left -= sectors;
            buckets_left -= buckets;
        }
        EmptiestBuckets { below: LEVELS, of_it: 0 }
    }
}

/// All buckets below a level, and a number of those at it.
struct EmptiestBuckets {
    below: usize,
    of_it: usize,
}

impl EmptiestBuckets {
    /// Returns whether a bucket of `level` is among them.
    fn takes(&mut self, level: usize) -> bool {
        if level == self.below && self.of_it > 0 {
            self.of_it -= 1;
            return true;
        }
        level < self.below
    }
}

/// Empties the buckets. Returns true if that has gained anything, or has shown that there is
/// another way.
async fn empty(set: &CacheSet, victims: &MoveVictims) -> Result<bool, Error> {
    let dirty = |s: &mut State| victims.ids.iter().map(|id| u64::from(s.buckets.get(*id).dirty)).sum::<u64>();
    let before = set.with(dirty);
    let mut learned = false;
    let moved = if victims.are_unknown {
        emptying::by_walk(set, &victims.ids).await?
    } else {
        let (extents, unsummed) = emptying::extents_of(set, &victims.ids).await;
        learned = !unsummed.is_empty();
        set.with(|s| unsummed.into_iter().for_each(|id| s.buckets.set_unsummed(id)));
        emptying::by_extents(set, &victims.ids, &extents).await?
    };
    writer::commit(set).await?;
    set.with(|s| s.stats.moved_bytes += moved * 512);
    set.signals().allocator_work.notify_all();
    // Data that clients have overwritten or discarded meanwhile has made room as well.
    Ok(moved > 0 || learned || set.with(dirty) < before)
}
