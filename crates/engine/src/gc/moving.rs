//! Moves live dirty data out of sparsely filled buckets when buckets run out. Each piece is copied and its key replaced
//! if it is still the same, in the journal like a write: the old bucket is reused only when that entry is
//! durable. Clean data in the same buckets is not moved: it can be read again.

use crate::btree::pointer_to_read;
use crate::error::Error;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Bucket, Buckets, Class, Space, Usage};
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::work::BUCKETS_MAX;
use crate::written::Cause;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::Buffer;
use bcached_format::{Key, Position};
use core::time::Duration;

/// Data is moved when fewer than one bucket in so many is available, and where writes are slowed down for want of room.
const AVAILABLE_SHARE: u64 = 8;
/// Most buckets that are filled in one round, which walks over the whole tree; and of those that are free, one in so many.
const ROUND_MAX: usize = 32;
const FREE_SHARE: usize = 4;
/// Most buckets that are emptied in one round.
const VICTIMS_MAX: usize = 256;
/// Keys that are copied at once.
const DEPTH: usize = 16;
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

    fn ends(&mut self, gained: u64) {
        self.vain = (gained == 0).then_some(self.begun);
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
        let victims = choose(&set).await;
        let gained = if victims.is_empty() { 0 } else { empty(&set, &victims).await.unwrap_or(0) };
        set.with(|s| s.moving.ends(gained));
        if gained == 0 {
            let until = set.env().now() + PAUSE;
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// The emptiest buckets with dirty data, as many as a part of the free ones can take the data of; at least two, or nothing is
/// gained.
async fn choose(set: &CacheSet) -> BTreeSet<u64> {
    let mut found: BTreeSet<(u32, u64)> = BTreeSet::new();
    let mut at = 0;
    while set.with(|s| (at as u64) < s.buckets.count() && is_scarce(s)) {
        set.env().breathe().await;
        set.with(|s| {
            for (id, bucket) in s.buckets.part(at).filter(|(_, bucket)| is_sparse(s, bucket)) {
                found.insert((bucket.dirty, id.index));
                if found.len() > VICTIMS_MAX {
                    found.pop_last();
                }
            }
            s.work.buckets(s.buckets.part(at).count());
        });
        at += BUCKETS_MAX;
    }
    let mut room = set.with(|s| {
        let most = if s.is_short_of_room() { ROUND_MAX } else { 1 };
        s.geometry.bucket_sectors * (s.buckets.free_count() / FREE_SHARE).clamp(1, most) as u64
    });
    let fits = |(dirty, _): &(u32, u64)| {
        let fits = u64::from(*dirty) <= room;
        room = room.saturating_sub(u64::from(*dirty));
        fits
    };
    let victims: BTreeSet<u64> = found.into_iter().take_while(fits).map(|(_, index)| index).collect();
    if victims.len() < 2 { BTreeSet::new() } else { victims }
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
        && u64::from(bucket.dirty) * 2 <= s.geometry.bucket_sectors
}

/// Moves what is dirty in `victims`; returns how many sectors were moved.
async fn empty(set: &CacheSet, victims: &BTreeSet<u64>) -> Result<u64, Error> {
    let mut at = Position::ZERO;
    let mut moved = 0;
    loop {
        let mut keys: Vec<Key> = Vec::new();
        let visited = set
            .attempt(|s| {
                keys.clear();
                s.visit_leaf(at, &mut |buckets, key| {
                    if is_in(buckets, key, victims) {
                        keys.push(*key);
                    }
                })
            })
            .await?;
        for some in keys.chunks(DEPTH) {
            for sectors in bcached_env::join_all(some.iter().map(|key| move_key(set, key))).await {
                moved += sectors?;
            }
        }
        if visited.next == Position::MAX || set.with(|s| s.stopping) {
            break;
        }
        at = visited.next;
        if visited.is_end {
            set.env().yield_now().await;
        }
    }
    writer::commit(set).await?;
    set.with(|s| s.stats.moved_bytes += moved * 512);
    set.signals().allocator_work.notify_all();
    Ok(moved)
}

fn is_in(buckets: &Buckets, key: &Key, victims: &BTreeSet<u64>) -> bool {
    let inside = |pointer| {
        !buckets.is_stale(pointer) && buckets.of(pointer).is_some_and(|id| victims.contains(&id.index))
    };
    key.dirty && key.pointers.as_slice().iter().any(|pointer| inside(*pointer))
}

/// Copies one key's data and puts the copy in its place, as far as the key is still the same.
async fn move_key(set: &CacheSet, key: &Key) -> Result<u64, Error> {
    // From the check to the end of the copy the old bucket must not be reused.
    let pinned = set.with(|s| {
        let valid = key.pointers.as_slice().iter().all(|pointer| !s.buckets.is_stale(*pointer));
        if valid {
            s.pin(&key.pointers);
        }
        valid
    });
    if !pinned {
        return Ok(0);
    }
    let mut moved = 0;
    let mut at = key.start();
    while at < key.end {
        let Some(space) = set.with(|s| s.take_space(Class::Moved, key.end - at)) else { break };
        let part = key.cut(at, at + space.sectors).expect("space is not longer than asked for");
        let done = copy(set, &part, space).await;
        set.with(|s| s.unpin(&space.pointers));
        match done {
            Ok(sectors) => moved += sectors,
            Err(error) => {
                set.with(|s| s.unpin(&key.pointers));
                return Err(error);
            }
        }
        at += space.sectors;
    }
    set.with(|s| s.unpin(&key.pointers));
    Ok(moved)
}

async fn copy(set: &CacheSet, part: &Key, space: Space) -> Result<u64, Error> {
    let from = pointer_to_read(&part.pointers).expect("a live key has a pointer");
    let length = usize::try_from(part.sectors() * 512).expect("a key is small");
    let (read, buffer) = set.read_cache(from.sector(), Buffer::zeroed(length)).await;
    if read.is_err() {
        // It stays where it is; whoever needs it is told.
        return Ok(0);
    }
    let payload = buffer.freeze();
    let _phase = set.begin(Phase::Move);
    for pointer in space.pointers.as_slice() {
        if set.write_data(*pointer, payload.clone(), Cause::Moved).await.is_err() {
            return Ok(0);
        }
    }
    let mut moved = 0;
    let mut rest = Some(*part);
    while let Some(expected) = rest {
        let pointers = space.pointers.advanced(expected.start() - part.start());
        let new = Key { pointers, ..expected };
        let (upto, sectors) = set.attempt(|s| s.replace(&expected, &new)).await?;
        moved += sectors;
        rest = expected.cut(upto, expected.end);
    }
    Ok(moved)
}
