//! Writes back a batch of dirty keys of one volume, in address order. If partial stripe writes are
//! expensive, full stripes come first: those that are dirty throughout ([`stripes`]).
//!
//! The order: read from the cache, write to the backing device, **flush it**, then turn those keys
//! clean that are unchanged, in the journal like any write. A key turns clean only if its own copy
//! is proven durable. A copy that a failed flush may have dropped, whichever task ran that flush,
//! stays dirty and is written again. *Clean* is written to the backing superblock only when nothing
//! is dirty, no write is in progress, and the clean keys are durable.

use crate::btree::Attempt;
use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::request::ranges::Claim;
use crate::request::{Target, flush};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::backing_flushes::FlushStamp;
use crate::writeback::copy::{self, CopyOutcome};
use crate::writeback::failed_extents::{PLACES_MAX, WritableParts};
use crate::writeback::pace::BatchSize;
use crate::writeback::stall_reason::BatchProgress;
use crate::writeback::stripes;
use alloc::vec::Vec;
use bcached_format::Key;

/// Maximum number of keys that one transition chooses.
const PIECE_KEYS: usize = 128;

/// A dirty key that is being written back.
#[derive(Clone, Copy)]
pub struct WritebackKey {
    /// The key.
    pub key: Key,
    /// It has failed before, so it is not written together with its neighbours.
    pub is_alone: bool,
    claim: Claim,
}

/// The result of a batch.
pub struct BatchResult {
    /// Number of sectors that turned clean.
    pub sectors: u64,
    /// It has reached the end of the volume, or has found nothing to write back.
    pub is_round: bool,
    /// The first error.
    pub trouble: Option<Error>,
}

/// Writes one batch back, at the volume's rate unless it `hurries`. Errors are also shown in the
/// volume's status. The caller holds the volume's write-back lock.
pub async fn clean_batch(set: &CacheSet, target: &Target, hurries: bool) -> BatchResult {
    let Some(size) = set.with(|s| s.volumes.get(target.id).map(|volume| volume.pace.size(hurries))) else {
        return BatchResult { sectors: 0, is_round: true, trouble: Some(Error::NoVolume) };
    };
    let began = set.env().now();
    let mut round = BatchProgress::default();
    let outdated = set.with(|s| s.volumes.get(target.id).filter(|it| it.is_outdated).map(|it| it.sectors));
    let BatchKeys { works, is_round, are_stripes } = match outdated {
        Some(sectors) => {
            round.meets(target.data_offset, target.data_offset + sectors, Error::OlderBacking);
            BatchKeys { works: Vec::new(), is_round: true, are_stripes: None }
        }
        // A caller that waits for everything needs a sweep.
        None if hurries => choose(set, target, size, &mut round).await,
        None => match choose_stripes(set, target, size, &mut round).await {
            Some(chosen) => chosen,
            None => choose(set, target, size, &mut round).await,
        },
    };
    let CleaningResult { sectors, keys, overtaken, failed, not_begun } =
        clean(set, target, &works, (size, hurries), &mut round).await;
    release(set, target, &works).await;
    let is_round = is_round && not_begun.is_none();
    let taken = set.env().now().since(began);
    set.with(|s| {
        s.stats.written_back_bytes += sectors * 512;
        s.stats.writeback_keys_done += keys;
        s.stats.writeback_keys_failed += overtaken;
        s.stats.writeback_errors += failed;
        let now = s.now;
        // The failed extents have ages of their own.
        let has_met = round.has_met();
        let trouble = round.shows(s, target, sectors);
        if let Some(volume) = s.volumes.get_mut(target.id) {
            // If less turned clean than was chosen, the rest was overwritten or moved meanwhile.
            // All of the chosen data is on the backing device.
            if has_met {
                volume.pace.age.passes_by();
            }
            if is_round {
                volume.pace.age.sweep_ends(now);
            }
            if let Some(sector) = not_begun {
                match are_stripes {
                    Some(sectors) => volume.stripes.goes_back_to(sector, sectors),
                    None => volume.writeback_from = sector,
                }
            }
            volume.pace.learns_time(works.len(), taken);
        }
        BatchResult { sectors, is_round: is_round || works.is_empty(), trouble }
    })
}

/// What happened to the keys of a batch.
#[derive(Default)]
struct CleaningResult {
    /// Number of sectors that turned clean.
    sectors: u64,
    /// Number of keys that were written back.
    keys: u64,
    /// Number of keys that were written back, but have changed meanwhile.
    overtaken: u64,
    /// Number of keys that could not be written back.
    failed: u64,
    /// Start of the first key that was left for later.
    not_begun: Option<u64>,
}

/// Copies the keys' data to the backing device, and turns those keys clean whose data is proven
/// durable there.
async fn clean(
    set: &CacheSet,
    target: &Target,
    works: &[WritebackKey],
    (size, hurries): (BatchSize, bool),
    round: &mut BatchProgress,
) -> CleaningResult {
    let mut cleaned = CleaningResult::default();
    // The dirty keys become durable before the backing device gets the data (invariant D23).
    // Otherwise a crash could bring back an older clean copy that hides it.
    if works.is_empty() || writer::commit(set).await.is_err() {
        return cleaned;
    }
    let copied = copy::copy_all(set, target, works, size, hurries).await;
    // One flush for all. Whether it proves them durable is checked for each: another task's flush
    // may have failed meanwhile.
    let is_any = copied.iter().any(|copied| matches!(copied, CopyOutcome::Done(Ok(_))));
    let flushed = if is_any { flush::flush_backing(set, target).await } else { Ok(()) };
    for (work, copied) in works.iter().zip(copied) {
        let turned = match copied {
            CopyOutcome::Done(Ok(stamp)) => turn_clean(set, target, &work.key, stamp).await,
            CopyOutcome::Done(Err(error)) => Err(error),
            CopyOutcome::NotBegun => {
                cleaned.not_begun.get_or_insert(work.key.start());
                continue;
            }
        };
        match turned {
            Ok(sectors) => {
                set.with(|s| s.place_succeeds(target, &work.key));
                cleaned.sectors += sectors;
                cleaned.keys += u64::from(sectors > 0);
                cleaned.overtaken += u64::from(sectors == 0);
                continue;
            }
            Err(error @ Error::Io { doing: ErrorContext::Backing | ErrorContext::Data, .. }) => {
                set.with(|s| {
                    s.place_fails(target, &work.key, &error);
                    s.work.pass(PLACES_MAX);
                });
                set.env().breathe().await;
                round.leaves(error);
            }
            // The error of the flush says more than that the data is not proven durable.
            Err(Error::LostWrites) => {
                let error = flushed.clone().err().unwrap_or(Error::LostWrites);
                round.meets(work.key.start(), work.key.end, error);
            }
            Err(error) => round.meets(work.key.start(), work.key.end, error),
        }
        cleaned.failed += 1;
    }
    cleaned
}

/// Releases the keys of a batch: they are not being written back any more.
async fn release(set: &CacheSet, target: &Target, works: &[WritebackKey]) {
    for piece in works.chunks(PIECE_KEYS) {
        set.with(|s| {
            for work in piece {
                s.unpin(&work.key.pointers);
                if let Some(volume) = s.volumes.get_mut(target.id) {
                    volume.ranges.release(work.claim);
                }
            }
        });
        set.env().breathe().await;
    }
    set.signals().ranges.notify_all();
}

/// Chooses keys of stripes that are dirty throughout; `None`: there are none, or none of them can
/// be written back now.
async fn choose_stripes(
    set: &CacheSet,
    target: &Target,
    size: BatchSize,
    round: &mut BatchProgress,
) -> Option<BatchKeys> {
    let stripe_sectors = set.with(|s| Some(s.dirty.stripes(target.inode?)?.sectors()))?;
    let mut taken = KeySelection::default();
    stripes::offer(set, target, async |stripe| {
        let mut at = stripe.start;
        while at < stripe.end && taken.takes_more(size) {
            let chosen = set.attempt(|s| choose_in_leaf(s, target, (at, stripe.end), &mut taken, size)).await;
            // A leaf that cannot be read is reported when the sweep reaches it.
            at = chosen.unwrap_or(stripe.end);
        }
        at
    })
    .await;
    let works = taken.ends(round);
    (!works.is_empty()).then_some(BatchKeys { works, is_round: false, are_stripes: Some(stripe_sectors) })
}

/// Chooses the next dirty keys in address order, from the end of the last batch on, wrapping once.
/// Skips leaves that cannot be read: the dirty data of others does not wait for them.
async fn choose(set: &CacheSet, target: &Target, size: BatchSize, round: &mut BatchProgress) -> BatchKeys {
    let inode = target.inode.expect("only attached volumes are written back");
    let mut taken = KeySelection::default();
    let mut is_round = false;
    let from = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.writeback_from));
    for (start, end) in [(from, target.cacheable_end), (target.data_offset, from)] {
        let mut at = start;
        while at < end && taken.takes_more(size) && set.with(|s| s.dirty.of(inode) > 0) {
            let chosen = set.attempt(|s| choose_in_leaf(s, target, (at, end), &mut taken, size)).await;
            at = match chosen {
                Ok(upto) => upto,
                Err(Error::Failed(_)) => {
                    return BatchKeys { works: taken.ends(round), is_round, are_stripes: None };
                }
                Err(error) => {
                    let upto = set.with(|s| s.end_of_missing_leaf(inode, at, end));
                    round.meets(at, upto, error);
                    upto
                }
            };
        }
        round.passes(start, at);
        let is_end = at >= target.cacheable_end;
        is_round |= is_end && !taken.works.is_empty();
        set.with(|s| {
            let now = s.now;
            if let Some(volume) = s.volumes.get_mut(target.id) {
                if is_end && taken.works.is_empty() {
                    // What is chosen from here on belongs to the next sweep.
                    if round.has_met() {
                        volume.pace.age.passes_by();
                    }
                    volume.pace.age.sweep_ends(now);
                }
                volume.writeback_from = if at >= target.cacheable_end { target.data_offset } else { at };
            }
        });
        if !taken.works.is_empty() {
            break;
        }
    }
    BatchKeys { works: taken.ends(round), is_round, are_stripes: None }
}

/// What has been taken so far.
#[derive(Default)]
struct KeySelection {
    works: Vec<WritebackKey>,
    sectors: u64,
    /// Why extents were left out, if some were.
    barred: Option<Error>,
}

impl KeySelection {
    const fn takes_more(&self, size: BatchSize) -> bool {
        self.works.len() < size.keys && self.sectors < size.sectors
    }

    fn ends(self, round: &mut BatchProgress) -> Vec<WritebackKey> {
        if let Some(error) = self.barred {
            round.leaves(error);
        }
        self.works
    }
}

/// The chosen keys.
struct BatchKeys {
    works: Vec<WritebackKey>,
    /// The end of the volume was reached.
    is_round: bool,
    /// The keys come from full stripes of this many sectors; the sweep has not moved.
    are_stripes: Option<u64>,
}

fn choose_in_leaf(
    s: &mut State,
    target: &Target,
    (start, end): (u64, u64),
    taken: &mut KeySelection,
    size: BatchSize,
) -> Attempt<u64> {
    let inode = target.inode.expect("only attached volumes are written back");
    let mut dirty: Vec<Key> = Vec::new();
    let found = s.keys_in_leaf(inode, start, end, &mut |buckets, key| {
        if key.dirty && !buckets.is_dead(key) && dirty.len() < PIECE_KEYS {
            dirty.extend(key.cut(start, end));
        }
    });
    let Attempt::Done(mut upto) = found else { return found };
    if dirty.len() == PIECE_KEYS {
        upto = dirty.last().expect("the list is full").end;
    }
    let now = s.now;
    if let Some(volume) = s.volumes.get_mut(target.id) {
        volume.failed_extents.keep_dirty(start, upto, &dirty);
    }
    for key in dirty {
        if !taken.takes_more(size) {
            return Attempt::Done(key.start());
        }
        let volume = s.volumes.get_mut(target.id).expect("a volume stays while it is written back");
        let WritableParts { free, barred } = volume.failed_extents.parts(&key, now);
        taken.barred = taken.barred.take().or(barred);
        for (part, is_alone) in free {
            take(s, target, part, is_alone, taken);
        }
    }
    Attempt::Done(upto)
}

/// Takes a key, unless it is in use.
fn take(s: &mut State, target: &Target, key: Key, is_alone: bool, taken: &mut KeySelection) {
    let volume = s.volumes.get_mut(target.id).expect("a volume stays while it is written back");
    // A range that is being written is dirty again soon. A later pass takes it, and what is left of
    // the older data.
    let Some(claim) = volume.ranges.begin_clean(key.start(), key.end) else {
        if volume.ranges.is_being_replaced(key.start(), key.end) {
            volume.pace.age.leaves_to_writes(key.start(), key.end);
        } else {
            volume.pace.age.passes_by();
        }
        return;
    };
    s.pin(&key.pointers);
    taken.sectors += key.sectors();
    taken.works.push(WritebackKey { key, is_alone, claim });
}

impl State {
    /// Records that the data of a key was written back.
    fn place_succeeds(&mut self, target: &Target, key: &Key) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.failed_extents.succeeds(key.start(), key.end, now);
        }
    }

    /// Records that the data of a key could not be written back.
    fn place_fails(&mut self, target: &Target, key: &Key, error: &Error) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            let since = volume.pace.age.since();
            let is_unread = matches!(error, Error::Io { doing: ErrorContext::Data, .. });
            volume.failed_extents.fails(key, is_unread, now, since, error.clone());
        }
    }
}

/// Turns the key clean wherever it is unchanged, if the data written with `stamp` is proven
/// durable. That is checked in the same transition that changes the key.
async fn turn_clean(set: &CacheSet, target: &Target, key: &Key, stamp: FlushStamp) -> Result<u64, Error> {
    let mut cleaned = 0;
    let mut rest = Some(*key);
    while let Some(expected) = rest {
        let clean = Key { dirty: false, ..expected };
        let (upto, sectors) = set
            .attempt(|s| {
                let backing = s.volumes.get(target.id).and_then(|volume| volume.backing.as_ref());
                // What is not proven durable stays dirty: invariant D27.
                if !backing.is_some_and(|backing| backing.flushes.is_durable(stamp)) {
                    return Attempt::Done(Err(Error::LostWrites));
                }
                match s.replace(&expected, &clean) {
                    Attempt::Done(replaced) => Attempt::Done(Ok(replaced)),
                    Attempt::Needs(need) => Attempt::Needs(need),
                }
            })
            .await??;
        cleaned += sectors;
        rest = expected.cut(upto, expected.end);
    }
    Ok(cleaned)
}
