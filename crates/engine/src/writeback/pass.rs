//! The task that writes dirty data back.
//!
//! Order of a batch: read from the cache, write to the backing device, **flush it**, then turn the keys that are
//! still the same clean, in the journal like any write. A key turns clean only if its own copy is proven
//! durable: one that a failed flush may have dropped, whosever flush it was, stays dirty and is written again. *Clean*
//! goes into the backing superblock only when nothing is dirty, no write is in progress, and the keys that say so are
//! durable.

use crate::btree::{Attempt, Need, pointer_to_read};
use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::request::ranges::Claim;
use crate::request::write::end_backing_write;
use crate::request::{Target, flush};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::epoch::{Epoch, Stamp};
use crate::volume::{VolumeId, record};
use crate::writeback::trouble::Round;
use alloc::boxed::Box;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::{BackingState, Inode, Key};
use core::time::Duration;

/// Most keys of a batch.
const BATCH_KEYS: usize = 128;
/// Rest between batches while there is little dirty data: a simple rate for now.
const REST: Duration = Duration::from_millis(250);

/// A dirty key on its way to the backing device.
#[derive(Clone, Copy)]
struct Work {
    key: Key,
    claim: Claim,
}

/// The task.
pub async fn run(set: CacheSet) {
    loop {
        if set.is_ending() {
            return;
        }
        let mut cleaned = 0;
        let mut much = false;
        for id in set.with(|s| s.volumes.iter().map(|(id, _)| id).collect::<Vec<_>>()) {
            let Some(target) =
                set.target(id).filter(|target| target.backing.is_some() && target.inode.is_some())
            else {
                continue;
            };
            if set.with(|s| s.volumes.get(id).is_none_or(|volume| !volume.options.writeback_running)) {
                continue;
            }
            // Who detaches the volume does it all.
            let alone = set.with(|s| s.volumes.get(id)?.writeback_lock.try_acquire(1));
            let Some(_alone) = alone else { continue };
            cleaned += clean_batch(&set, &target).await.sectors;
            much |= set.with(|s| is_much(s, &target));
            let marked = mark_clean(&set, id).await;
            set.with(|s| tell_marking(s, id, marked));
        }
        if cleaned > 0 && much {
            set.signals().allocator_work.notify_all();
            set.env().yield_now().await;
            continue;
        }
        let rest = if cleaned > 0 { REST } else { set.with(|s| s.options.volume.writeback_delay) };
        let until = set.env().now() + rest;
        set.env().wait_until(&set.signals().writeback_work, until).await;
    }
}

/// More dirty data than the target, or so little space that requests suffer: no rest.
fn is_much(s: &State, target: &Target) -> bool {
    let dirty = target.inode.map_or(0, |inode| s.dirty.of(inode));
    let cache = s.geometry.buckets * s.geometry.bucket_sectors;
    dirty > cache * s.options.volume.writeback_percent / 100
        || s.in_use_percent() >= s.options.cutoff_writeback
}

/// What a batch has come to.
pub struct Batch {
    /// So many sectors turned clean.
    pub sectors: u64,
    /// The first trouble that was met.
    pub trouble: Option<Error>,
}

/// Writes one batch back. What went wrong is also shown in the volume's status. For who holds the volume's write-back.
pub async fn clean_batch(set: &CacheSet, target: &Target) -> Batch {
    let mut round = Round::default();
    let works = choose(set, target, &mut round).await;
    let sectors = clean(set, target, &works, &mut round).await;
    release(set, target, &works);
    set.with(|s| {
        s.stats.written_back_bytes += sectors * 512;
        Batch { sectors, trouble: round.shows(s, target) }
    })
}

/// Copies the keys' data to the backing device and turns those clean that are proven durable there.
async fn clean(set: &CacheSet, target: &Target, works: &[Work], round: &mut Round) -> u64 {
    // The keys that say so are durable before the backing device gets the data: else a crash could bring back an older
    // clean copy that hides it.
    if works.is_empty() || writer::commit(set).await.is_err() {
        return 0;
    }
    let copied = join_all(works.iter().map(|work| copy_out(set, target, work))).await;
    // One flush for all. Which of them it has proven is asked of each: another's flush may have failed meanwhile.
    let flushed =
        if copied.iter().any(Result::is_ok) { flush::flush_backing(set, target).await } else { Ok(()) };
    let mut cleaned = 0;
    for (work, copied) in works.iter().zip(copied) {
        let turned = match copied {
            Ok(stamp) => turn_clean(set, target, &work.key, stamp).await,
            Err(error) => Err(error),
        };
        match turned {
            Ok(sectors) => cleaned += sectors,
            // What the device said of its flush says more than that the data is not proven.
            Err(Error::LostWrites) => {
                let error = flushed.clone().err().unwrap_or(Error::LostWrites);
                round.meets(work.key.start(), work.key.end, error);
            }
            Err(error) => round.meets(work.key.start(), work.key.end, error),
        }
    }
    cleaned
}

/// The keys of a batch are not being written back any more.
fn release(set: &CacheSet, target: &Target, works: &[Work]) {
    set.with(|s| {
        for work in works {
            s.unpin(&work.key.pointers);
            if let Some(volume) = s.volumes.get_mut(target.id) {
                volume.ranges.release(work.claim);
            }
        }
    });
    set.signals().ranges.notify_all();
}

/// The next dirty keys in address order, from where the last batch ended, wrapping once. A leaf that cannot be read is
/// passed by: the others' dirty data does not wait for it.
async fn choose(set: &CacheSet, target: &Target, round: &mut Round) -> Vec<Work> {
    let inode = target.inode.expect("only attached volumes are written back");
    let mut works = Vec::new();
    let mut sectors = 0;
    let limit = set.with(|s| s.options.writeback_batch_sectors);
    let from = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.writeback_from));
    for (start, end) in [(from, target.cacheable_end), (target.data_offset, from)] {
        let mut at = start;
        while at < end && works.len() < BATCH_KEYS && sectors < limit && set.with(|s| s.dirty.of(inode) > 0) {
            let chosen =
                set.attempt(|s| choose_in_leaf(s, target, at, end, (&mut works, &mut sectors), limit)).await;
            at = match chosen {
                Ok(upto) => upto,
                Err(Error::Failed(_)) => return works,
                Err(error) => {
                    let upto = set.with(|s| end_of_missing_leaf(s, inode, at, end));
                    round.meets(at, upto, error);
                    upto
                }
            };
        }
        round.passes(start, at);
        set.with(|s| {
            if let Some(volume) = s.volumes.get_mut(target.id) {
                volume.writeback_from = if at >= target.cacheable_end { target.data_offset } else { at };
            }
        });
        if !works.is_empty() {
            break;
        }
    }
    works
}

/// Where the node ends that is not in memory and that `at` lies in, or the leaf that is; at most `end`.
fn end_of_missing_leaf(s: &mut State, inode: Inode, at: u64, end: u64) -> u64 {
    match s.keys_in_leaf(inode, at, end, &mut |_, _| {}) {
        Attempt::Needs(Need::Node(child)) if child.key.inode == inode => child.key.end.min(end),
        Attempt::Done(upto) => upto,
        Attempt::Needs(_) => end,
    }
}

fn choose_in_leaf(
    s: &mut State,
    target: &Target,
    start: u64,
    end: u64,
    (works, sectors): (&mut Vec<Work>, &mut u64),
    limit: u64,
) -> Attempt<u64> {
    let inode = target.inode.expect("only attached volumes are written back");
    let mut dirty: Vec<Key> = Vec::new();
    let found = s.keys_in_leaf(inode, start, end, &mut |buckets, key| {
        if key.dirty && !buckets.is_dead(key) && dirty.len() < BATCH_KEYS {
            dirty.extend(key.cut(start, end));
        }
    });
    let Attempt::Done(mut upto) = found else { return found };
    if dirty.len() == BATCH_KEYS {
        upto = dirty.last().expect("it is full").end;
    }
    for key in dirty {
        if works.len() == BATCH_KEYS || *sectors >= limit {
            return Attempt::Done(key.start());
        }
        let volume = s.volumes.get_mut(target.id).expect("a volume stays while it is written back");
        // A range that is being written is dirty again soon; a later pass takes it.
        let Some(claim) = volume.ranges.begin_clean(key.start(), key.end) else { continue };
        s.pin(&key.pointers);
        *sectors += key.sectors();
        works.push(Work { key, claim });
    }
    Attempt::Done(upto)
}

/// Copies one key's data to the backing device; the stamp of what was written there.
async fn copy_out(set: &CacheSet, target: &Target, work: &Work) -> Result<Stamp, Error> {
    let pointer =
        pointer_to_read(&work.key.pointers).ok_or(Error::Inconsistent("dirty data without a place"))?;
    let backing = target.backing.as_ref().ok_or(Error::NoVolume)?;
    let length = usize::try_from(work.key.sectors() * 512).expect("a key is small");
    let (read, buffer) = set.cache().read(pointer.sector(), Buffer::zeroed(length)).await;
    read.map_err(Error::io(Doing::Data))?;
    let begun = flush::epoch(set, target.id, Epoch::write_begins).ok_or(Error::NoVolume)?;
    let written = backing.write(work.key.start(), buffer.freeze()).await;
    let stamp = end_backing_write(set, target, begun);
    written.map_err(Error::io(Doing::Backing))?;
    stamp
}

/// The key turns clean wherever it is still the same, if what was written with `stamp` is proven durable: asked in the
/// transition that changes the key.
async fn turn_clean(set: &CacheSet, target: &Target, key: &Key, stamp: Stamp) -> Result<u64, Error> {
    let mut cleaned = 0;
    let mut rest = Some(*key);
    while let Some(expected) = rest {
        let clean = Key { dirty: false, ..expected };
        let (upto, sectors) = set
            .attempt(|s| {
                let backing = s.volumes.get(target.id).and_then(|volume| volume.backing.as_ref());
                if !backing.is_some_and(|backing| backing.epoch.is_durable(stamp)) {
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

/// *Clean* on the superblock when nothing is dirty.
async fn mark_clean(set: &CacheSet, id: VolumeId) -> Result<(), Error> {
    let clean = set.with(|s| is_clean(s, id));
    if !clean {
        return Ok(());
    }
    writer::commit(set).await?;
    record::update(set, id, |s, superblock| {
        if is_clean(s, id) {
            superblock.set_state(BackingState::Clean);
        }
    })
    .await
}

/// It is tried again at every pass; until then the device says *dirty*, which loses nothing but the freedom to go without
/// the cache. A set that has failed says so itself.
fn tell_marking(s: &mut State, id: VolumeId, marked: Result<(), Error>) {
    if let Some(volume) = s.volumes.get_mut(id) {
        volume.marking_trouble =
            marked.err().filter(|error| !matches!(error, Error::Failed(_))).map(Box::new);
    }
}

fn is_clean(s: &State, id: VolumeId) -> bool {
    s.volumes.get(id).is_some_and(|volume| {
        volume.state() == Some(BackingState::Dirty)
            && volume.inode.is_some_and(|inode| s.dirty.of(inode) == 0)
            && !volume.ranges.has_writes()
    })
}
