//! Storing generations and priorities: a chain of blocks into the spare buckets, last one first, then a journal entry
//! that names the first (format 10). The former chain becomes the spare one when that entry is durable.

use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk};
use bcached_format::prio::{self, BucketPrio, PrioSet};
use bcached_format::{BucketId, Gen, Geometry};

/// Stores all generations and releases the buckets that were pending when it began.
pub async fn store(set: &CacheSet) -> Result<(), Error> {
    let _alone = set.inner.metadata.acquire(1).await;
    let entry = writer::claim_entry(set).await?;
    let pending = set.with(|s| s.buckets.pending().len());
    let chain = set.begin(Phase::PriorityChain);
    let sets = set.with(|s| s.prios.spare.len());
    for index in (0..sets).rev() {
        let (sector, bytes) = set.with(|s| build(s, index));
        set.with(|s| s.stats.prio_written_bytes += bytes.len() as u64);
        let written = set.cache().write(sector, Buffer::copied_from(&bytes).freeze()).await;
        written.map_err(|source| set.fail(Error::Io { doing: Doing::Priorities, source }))?;
    }
    let former = set.with(|s| {
        s.prios.sequence += 1;
        let spare = core::mem::take(&mut s.prios.spare);
        core::mem::replace(&mut s.prios.current, spare)
    });
    drop(chain);
    let _entry = set.begin(Phase::PriorityEntry);
    // Its pre-flush makes the chain durable before the entry that names it.
    entry.commit().await?;
    set.with(|s| {
        s.prios.spare = former;
        s.buckets.release_pending(pending);
    });
    set.signals().space.notify_all();
    Ok(())
}

/// One block of the chain: where it goes and what it says.
fn build(s: &mut State, index: usize) -> (u64, Vec<u8>) {
    let first = index as u64 * s.geometry.prios_per_set();
    let end = (first + s.geometry.prios_per_set()).min(s.geometry.buckets);
    s.work.buckets(2 * usize::try_from(end - first).expect("a block is small"));
    let chain = &s.prios.spare;
    // The last one's successor is junk by definition; zero is as good as any.
    let next = chain.get(index + 1).map_or(0, |bucket| bucket.index);
    let entry = |bucket| {
        let id = s.buckets.id(bucket);
        BucketPrio { prio: s.buckets.prio(id), generation: s.buckets.get(id).generation }
    };
    let entries: Vec<BucketPrio> = (first..end).map(entry).collect();
    let mut bytes = alloc::vec![0; s.geometry.meta_bytes()];
    prio::seal(&mut bytes, s.geometry.magic, s.prios.sequence + 1, next, entries.into_iter());
    (s.buckets.sector(chain[index]), bytes)
}

/// What a chain says.
pub struct Stored {
    /// Generation and priority of every bucket.
    pub entries: Vec<(Gen, u16)>,
    /// Where it is.
    pub chain: Vec<BucketId>,
    /// Its sequence.
    pub sequence: u64,
}

/// Reads the chain that starts in bucket `first`.
pub async fn read(disk: &Disk, geometry: &Geometry, first: u64) -> Result<Stored, Error> {
    let mut stored = Stored { entries: Vec::new(), chain: Vec::new(), sequence: 0 };
    let mut bucket = first;
    for index in 0..geometry.prio_sets() {
        if !geometry.is_usable(bucket) || stored.chain.iter().any(|seen| seen.index == bucket) {
            return Err(Error::Inconsistent("the chain of priorities leaves the device or runs in a circle"));
        }
        let id = BucketId { device: bcached_format::DeviceIndex(0), index: bucket };
        let (result, buffer) = disk.read(geometry.sector_of(id), Buffer::zeroed(geometry.meta_bytes())).await;
        result.map_err(Error::io(Doing::Priorities))?;
        let parsed = PrioSet::parse(buffer.as_slice(), geometry.magic)
            .map_err(|source| Error::Format { doing: Doing::Priorities, source: source.into() })?;
        if index > 0 && parsed.seq != stored.sequence {
            return Err(Error::Inconsistent("the chain of priorities mixes two writes"));
        }
        stored.sequence = parsed.seq;
        let missing = geometry.buckets - stored.entries.len() as u64;
        let count = usize::try_from(missing.min(geometry.prios_per_set())).expect("a set is small");
        stored.entries.extend(parsed.entries().take(count).map(|entry| (entry.generation, entry.prio)));
        stored.chain.push(id);
        bucket = parsed.next_bucket;
    }
    Ok(stored)
}

/// Takes unreferenced buckets for the first chain or the first spare one: only while a set is being started.
pub fn take_unreferenced(buckets: &mut Buckets, count: u64) -> Result<Vec<BucketId>, Error> {
    let mut chain = Vec::new();
    for _ in 0..count {
        chain.push(buckets.take(crate::space::Usage::Meta, 0).ok_or(Error::NoSpace)?);
    }
    Ok(chain)
}
