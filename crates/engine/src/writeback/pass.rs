//! The task that writes dirty data back.
//!
//! Order of a batch: read from the cache, write to the backing device, **flush it**, then turn the keys that are
//! still the same clean, in the journal like any write (decision 7). After a failed flush nothing turns clean: the
//! keys stay dirty and are written again. *Clean* goes into the backing superblock only when nothing is dirty, no
//! write is in progress, and the keys that say so are durable.

use crate::btree::{Attempt, pointer_to_read};
use crate::error::Error;
use crate::journal::writer;
use crate::request::ranges::Claim;
use crate::request::{Target, flush};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{VolumeId, record};
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::{BackingState, Key};
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
        if set.with(|s| s.stopping || s.failed.is_some()) {
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
            if set.with(|s| !s.options.writeback_running) {
                continue;
            }
            cleaned += clean_batch(&set, &target).await.unwrap_or(0);
            much |= set.with(|s| is_much(s, &target));
            let _ = mark_clean(&set, id).await;
        }
        if cleaned > 0 && much {
            set.signals().allocator_work.notify_all();
            set.env().yield_now().await;
            continue;
        }
        let rest = if cleaned > 0 { REST } else { set.with(|s| s.options.writeback_delay) };
        let until = set.env().now() + rest;
        set.env().wait_until(&set.signals().writeback_work, until).await;
    }
}

/// More dirty data than the target, or so little space that requests suffer: no rest.
fn is_much(s: &State, target: &Target) -> bool {
    let dirty = target.inode.map_or(0, |inode| s.dirty.of(inode));
    let cache = s.geometry.buckets * s.geometry.bucket_sectors;
    dirty > cache * s.options.writeback_percent / 100 || s.in_use_percent() >= s.options.cutoff_writeback
}

/// Writes one batch back; returns how many sectors turned clean.
async fn clean_batch(set: &CacheSet, target: &Target) -> Result<u64, Error> {
    let works = choose(set, target).await?;
    if works.is_empty() {
        return Ok(0);
    }
    // The keys that say so are durable before the backing device gets the data: else a crash could bring back an older
    // clean copy that hides it (decision 11).
    if let Err(error) = writer::commit(set).await {
        release(set, target, &works);
        return Err(error);
    }
    let written = join_all(works.iter().map(|work| copy_out(set, target, work))).await;
    let good: Vec<&Work> = works.iter().zip(&written).filter(|(_, ok)| **ok).map(|(work, _)| work).collect();
    let mut cleaned = 0;
    let mut result = Ok(());
    if !good.is_empty() {
        result = flush::flush_backing(set, target).await;
    }
    if result.is_ok() {
        for work in &good {
            match turn_clean(set, &work.key).await {
                Ok(sectors) => cleaned += sectors,
                Err(error) => result = Err(error),
            }
        }
    }
    release(set, target, &works);
    set.with(|s| s.stats.written_back_bytes += cleaned * 512);
    result.map(|()| cleaned)
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

/// The next dirty keys in address order, from where the last batch ended, wrapping once.
async fn choose(set: &CacheSet, target: &Target) -> Result<Vec<Work>, Error> {
    let inode = target.inode.expect("only attached volumes are written back");
    let mut works = Vec::new();
    let mut sectors = 0;
    let limit = set.with(|s| s.options.writeback_batch_sectors);
    let from = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.writeback_from));
    for (start, end) in [(from, target.cacheable_end), (target.data_offset, from)] {
        let mut at = start;
        while at < end && works.len() < BATCH_KEYS && sectors < limit && set.with(|s| s.dirty.of(inode) > 0) {
            at = set
                .attempt(|s| choose_in_leaf(s, target, at, end, (&mut works, &mut sectors), limit))
                .await?;
        }
        set.with(|s| {
            if let Some(volume) = s.volumes.get_mut(target.id) {
                volume.writeback_from = if at >= target.cacheable_end { target.data_offset } else { at };
            }
        });
        if !works.is_empty() {
            break;
        }
    }
    Ok(works)
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
        let live = key.pointers.as_slice().iter().any(|pointer| !buckets.is_stale(*pointer));
        if key.dirty && live && dirty.len() < BATCH_KEYS {
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

/// Copies one key's data to the backing device. False: it stays dirty.
async fn copy_out(set: &CacheSet, target: &Target, work: &Work) -> bool {
    let Some(pointer) = pointer_to_read(&work.key.pointers) else { return false };
    let Some(backing) = &target.backing else { return false };
    let length = usize::try_from(work.key.sectors() * 512).expect("a key is small");
    let (read, buffer) = set.cache().read(pointer.sector(), Buffer::zeroed(length)).await;
    if read.is_err() {
        return false;
    }
    set.with(|s| {
        if let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) {
            backing.epoch.write_begins();
        }
    });
    let written = backing.write(work.key.start(), buffer.freeze()).await;
    crate::request::write::end_backing_write(set, target);
    written.is_ok()
}

/// The key turns clean wherever it is still the same.
async fn turn_clean(set: &CacheSet, key: &Key) -> Result<u64, Error> {
    let mut cleaned = 0;
    let mut rest = Some(*key);
    while let Some(expected) = rest {
        let clean = Key { dirty: false, ..expected };
        let (upto, sectors) = set.attempt(|s| s.replace(&expected, &clean)).await?;
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

fn is_clean(s: &State, id: VolumeId) -> bool {
    s.volumes.get(id).is_some_and(|volume| {
        volume.state() == Some(BackingState::Dirty)
            && volume.inode.is_some_and(|inode| s.dirty.of(inode) == 0)
            && !volume.ranges.has_writes()
    })
}
