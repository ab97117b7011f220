//! Storing generations and priorities. A chain of blocks is written into the spare
//! buckets, last block first, then a journal entry that names the first block. When that entry is
//! durable, the former chain becomes the spare one.

use crate::cache_writes::WriteCause;
use crate::cpu_cost::{priorities_ns, sum_ns};
use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{BucketUsage, Buckets, buckets};
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env};
use bcached_format::checksum::{CHECKSUM_BYTES, Checksum};
use bcached_format::prio::{BucketPrio, PRIO_BTREE, PRIO_FRESH, PRIO_RESERVE, PrioSet, PrioWriter};
use bcached_format::{BucketId, Gen, Geometry};

/// Stores all generations and frees the buckets that were pending when the store began.
pub async fn store(set: &CacheSet) -> Result<(), Error> {
    let _alone = set.inner.metadata.acquire(1).await;
    let entry = writer::claim_entry(set).await?;
    set.with(|s| s.buckets.begin_storing_lengths());
    let pending = set.with(|s| s.buckets.pending().len());
    let chain = set.begin(Phase::PriorityChain);
    let sets = set.with(|s| s.prios.spare.len());
    for index in (0..sets).rev() {
        let block = build(set, index).await;
        let sector = set.with(|s| s.buckets.sector(s.prios.spare[index]));
        let written = set.write_cache(WriteCause::Priorities, sector, block.freeze()).await;
        written.map_err(|source| set.fail(Error::Io { doing: ErrorContext::Priorities, source }))?;
    }
    let former = set.with(|s| {
        s.prios.sequence += 1;
        s.prios.marks_reserve = true;
        let spare = core::mem::take(&mut s.prios.spare);
        core::mem::replace(&mut s.prios.current, spare)
    });
    drop(chain);
    let _entry = set.begin(Phase::PriorityEntry);
    // The entry's pre-flush makes the chain durable before the entry that names it.
    entry.commit().await?;
    set.with(|s| {
        s.prios.spare = former;
        // Only now are these generations durable: invariant D11.
        s.buckets.release_pending(pending);
    });
    set.signals().space.notify_all();
    set.signals().discard_work.notify_all();
    Ok(())
}

/// Buckets per piece of work when a block is built or read.
const PIECE: u32 = 512;
/// Bytes checksummed per piece of work.
const SUM_BYTES: usize = 128 << 10;

/// Builds block `index` of the chain. Other tasks run between its pieces and may change
/// generations. Buckets that are pending when a store begins are in it; those that become pending
/// later wait for the next store.
async fn build(set: &CacheSet, index: usize) -> Buffer {
    let (mut block, mut at, end) = set.with(|s| {
        let chain = &s.prios.spare;
        // The last block's successor is junk by definition; zero is as good as any value.
        let next = chain.get(index + 1).map_or(0, |bucket| bucket.index);
        let first = index as u64 * s.geometry.prios_per_set();
        let memory = Buffer::zeroed(s.geometry.meta_bytes());
        let block = PrioWriter::new(memory, s.geometry.magic, s.prios.sequence + 1, next);
        (block, first, s.geometry.buckets.min(first + s.geometry.prios_per_set()))
    });
    while at < end {
        set.env().breathe().await;
        let piece = at..end.min(at + u64::from(PIECE));
        at = piece.end;
        set.with(|s| {
            s.work.priorities(piece.end - piece.start);
            block.push(piece.map(|bucket| stored(s, bucket)));
        });
    }
    loop {
        set.env().breathe().await;
        match block.pass(SUM_BYTES) {
            0 => return block.seal(),
            passed => set.env().charge(sum_ns(passed)),
        }
    }
}

/// The priority and generation stored for a bucket. One priority value is used by the reserve
/// alone.
fn stored(s: &State, bucket: u64) -> BucketPrio {
    let id = s.buckets.id(bucket);
    let prio = match s.buckets.prio(id) {
        _ if s.buckets.get(id).usage == BucketUsage::Reserve => PRIO_RESERVE,
        PRIO_RESERVE => PRIO_RESERVE + 1,
        prio => prio,
    };
    BucketPrio { prio, generation: s.buckets.get(id).generation }
}

/// The contents of a chain.
pub struct StoredPriorities {
    /// Generation and priority of every bucket.
    pub entries: Vec<(Gen, u16)>,
    /// The buckets of the chain.
    pub chain: Vec<BucketId>,
    /// Its sequence number.
    pub sequence: u64,
}

/// Reads the chain that starts in bucket `first`. `is_ours`: bcached wrote it. In a chain written
/// by a kernel, the priorities of nodes say nothing about their lengths.
pub async fn read(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    first: u64,
    is_ours: bool,
) -> Result<StoredPriorities, Error> {
    let known = |prio: u16| if is_ours || prio <= PRIO_FRESH { prio } else { PRIO_BTREE };
    let mut entries = Vec::new();
    // The superblock may claim more buckets than there is memory for.
    usize::try_from(geometry.buckets).ok().and_then(|count| entries.try_reserve_exact(count).ok()).ok_or(
        Error::BucketMemory { buckets: geometry.buckets, needed: buckets::table_bytes(geometry.buckets) },
    )?;
    let mut stored = StoredPriorities { entries, chain: Vec::new(), sequence: 0 };
    let mut bucket = first;
    for index in 0..geometry.prio_sets() {
        if !geometry.is_usable(bucket) || stored.chain.iter().any(|seen| seen.index == bucket) {
            return Err(Error::Inconsistent("the chain of priorities leaves the device or loops"));
        }
        let id = BucketId { device: bcached_format::DeviceIndex(0), index: bucket };
        let buffer = read_set(disk, geometry, id).await?;
        let sum = sum(env, buffer.as_slice()).await;
        let parsed = parse(buffer.as_slice(), geometry, sum)?;
        if index > 0 && parsed.seq != stored.sequence {
            return Err(Error::Inconsistent("the chain of priorities mixes blocks of two writes"));
        }
        stored.sequence = parsed.seq;
        let missing = geometry.buckets - stored.entries.len() as u64;
        let count = usize::try_from(missing.min(geometry.prios_per_set())).expect("a set is small");
        let mut entries = parsed.entries().take(count).map(|entry| (entry.generation, known(entry.prio)));
        while entries.len() > 0 {
            env.breathe().await;
            let before = stored.entries.len();
            stored.entries.extend(entries.by_ref().take(PIECE as usize));
            env.charge(priorities_ns((stored.entries.len() - before) as u64));
        }
        stored.chain.push(id);
        bucket = parsed.next_bucket;
    }
    Ok(stored)
}

/// Returns the sequence number of the priority block in bucket `id`, wherever in a chain it is.
pub async fn sequence_of(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    id: BucketId,
) -> Result<u64, Error> {
    let buffer = read_set(disk, geometry, id).await?;
    let sum = sum(env, buffer.as_slice()).await;
    parse(buffer.as_slice(), geometry, sum).map(|parsed| parsed.seq)
}

async fn read_set(disk: &Disk, geometry: &Geometry, id: BucketId) -> Result<Buffer, Error> {
    let (result, buffer) = disk.read(geometry.sector_of(id), Buffer::zeroed(geometry.meta_bytes())).await;
    result.map_err(Error::io(ErrorContext::Priorities)).map(|()| buffer)
}

fn parse<'a>(bytes: &'a [u8], geometry: &Geometry, sum: u64) -> Result<PrioSet<'a>, Error> {
    let parsed = PrioSet::parse_summed(bytes, geometry.magic, sum);
    parsed.map_err(|source| Error::Format { doing: ErrorContext::Priorities, source: source.into() })
}

/// Computes the checksum of a block; other tasks run between its pieces.
async fn sum(env: &Env, block: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    for piece in block.get(CHECKSUM_BYTES..).unwrap_or_default().chunks(SUM_BYTES) {
        env.breathe().await;
        sum.add(piece);
        env.charge(sum_ns(piece.len()));
    }
    sum.value()
}

/// Takes unreferenced buckets for the first chain or the first spare chain. Only while a set is
/// being started.
pub fn take_unreferenced(buckets: &mut Buckets, count: u64) -> Result<Vec<BucketId>, Error> {
    let mut chain = Vec::new();
    for _ in 0..count {
        chain.push(buckets.take(BucketUsage::Meta, 0).ok_or(Error::NoSpace)?);
    }
    Ok(chain)
}
