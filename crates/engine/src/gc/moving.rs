//! Moves live dirty data out of sparsely filled buckets when buckets run out (how: `gc::emptying`). Clean data in the same buckets is
//! not moved: it can be read again.

use crate::error::Error;
use crate::gc::emptying;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::{Bucket, Usage};
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::work::BUCKETS_MAX;
use alloc::collections::BTreeSet;
use bcached_format::BucketId;
use core::time::Duration;

/// Data is moved when fewer than one bucket in so many is available, and where writes are slowed down for want of room.
const AVAILABLE_SHARE: u64 = 8;
/// Most buckets that are filled in one round; and of those that are free, one in so many.
const ROUND_MAX: usize = 32;
const FREE_SHARE: usize = 4;
/// Most buckets that are emptied in one round.
const VICTIMS_MAX: usize = 256;
/// How long to rest when nothing could be gained.
const PAUSE: Duration = Duration::from_millis(500);

/// The rounds of moving, for who waits for the space that one may gain.
#[derive(Default, Debug)]
pub struct Rounds {
    begun: u64,
    /// The newest that has ended, if it has moved nothing.
    vain: Option<u64>,
}

impl Rounds {
    const fn begins(&mut self) {
        self.begun += 1;
    }

    fn ends(&mut self, gained: bool) {
        self.vain = (!gained).then_some(self.begun);
    }

    /// How many have begun: what somebody remembers who begins to wait.
    #[must_use]
    pub const fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether the newest round began after so many had, and has moved nothing.
    #[must_use]
    pub fn are_in_vain(&self, begun_then: u64) -> bool {
        self.vain.is_some_and(|vain| vain > begun_then)
    }
}

/// The task.
pub async fn run(set: CacheSet) {
    let _ends_with_the_set = set.walked().await;
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
struct Victims {
    ids: BTreeSet<BucketId>,
    /// They have no summary.
    are_unknown: bool,
}

/// The emptiest buckets with dirty data, as many as a part of the free ones can take the data of; at least two, or nothing is
/// gained. Those of which it is known that they have no summary only if there are no others.
async fn choose(set: &CacheSet) -> Option<Victims> {
    let mut found: [BTreeSet<(u32, BucketId)>; 2] = Default::default();
    let mut at = 0;
    while set.with(|s| (at as u64) < s.buckets.count() && is_scarce(s)) {
        set.env().breathe().await;
        set.with(|s| {
            for (id, bucket) in s.buckets.part(at).filter(|(_, bucket)| is_sparse(s, bucket)) {
                let emptiest = &mut found[usize::from(bucket.is_unsummed)];
                emptiest.insert((bucket.dirty, id));
                if emptiest.len() > VICTIMS_MAX {
                    emptiest.pop_last();
                }
            }
            s.work.buckets(s.buckets.part(at).count());
        });
        at += BUCKETS_MAX;
    }
    let room = set.with(|s| {
        let most = if s.is_short_of_room() { ROUND_MAX } else { 1 };
        s.open.data_sectors() * (s.buckets.free_count() / FREE_SHARE).clamp(1, most) as u64
    });
    [false, true].into_iter().zip(found).find_map(|(are_unknown, emptiest)| {
        let mut room = room;
        let fits = |(dirty, _): &(u32, BucketId)| {
            let fits = u64::from(*dirty) <= room;
            room = room.saturating_sub(u64::from(*dirty));
            fits
        };
        let ids: BTreeSet<BucketId> = emptiest.into_iter().take_while(fits).map(|(_, id)| id).collect();
        (ids.len() > 1).then_some(Victims { ids, are_unknown })
    })
}

/// Empties them; returns whether that has gained anything, or it has come out that there is another way.
async fn empty(set: &CacheSet, victims: &Victims) -> Result<bool, Error> {
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
    Ok(moved > 0 || learned)
}

fn is_scarce(s: &State) -> bool {
    // Whoever waits for space does so from the reserve on.
    let reserve = (BTREE_RESERVE + MOVING_RESERVE) as u64;
    let scarce = (s.buckets.count() / AVAILABLE_SHARE).max(reserve + 1);
    s.buckets.available() < scarce || s.is_short_of_room()
}

fn is_sparse(s: &State, bucket: &Bucket) -> bool {
    bucket.usage == Usage::Data
        && bucket.dirty > 0
        && bucket.pins == 0
        && u64::from(bucket.dirty) * 100 <= s.open.data_sectors() * s.sparse_percent()
}
