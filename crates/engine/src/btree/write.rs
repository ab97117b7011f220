//! Appends pending keys to leaves on the device.
//!
//! Rules:
//!
//! - The data that keys name is durable before the bset that holds them, so the cache device is
//!   flushed first.
//! - One bset of a node is in flight at a time.
//! - The journal releases an entry only when the bsets that hold its keys are durable.

use crate::btree::cache::{CachedNode, NodeState};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::flushes::CacheFlushAction;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{Buffer, Payload, Time, join_all};
use bcached_format::Geometry;
use bcached_node::{Node, SetWrite};

/// Leaves written at once: they share one flush of the cache device.
const BATCH: usize = 16;
/// Pending keys of a leaf are written when they exceed this, or a quarter of the node.
const PENDING_BYTES_MAX: usize = 16 << 10;

/// A bset in the memory that it is written from.
pub type SealedSet = SetWrite<Payload>;

struct NodeWrite {
    slot: usize,
    sector: u64,
    set: SealedSet,
}

/// Runs the task that writes leaves that are due, until the set stops.
pub async fn run(set: CacheSet) {
    loop {
        let (stop, next) = set.with(|s| (s.stopped || s.failed.is_some(), next_due(s)));
        if stop {
            return;
        }
        let due = set.with(due_leaves);
        if due.is_empty() {
            match next {
                Some(time) => set.env().wait_until(&set.signals().leaf_work, time).await,
                None => set.signals().leaf_work.wait().await,
            }
            continue;
        }
        if write_leaves(&set, due).await.is_err() {
            return;
        }
        // The writes free journal space only after a journal entry records that.
        set.with(writer::relieve);
        set.signals().journal_work.notify_all();
    }
}

/// Requests node memory: leaves with unwritten keys become evictable once written.
pub fn relieve(set: &CacheSet) {
    set.with(|s| s.node_pressure = true);
    set.signals().leaf_work.notify_all();
}

/// Writes every leaf that has pending keys: at stop and after replay.
pub async fn write_all(set: &CacheSet) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        let (due, busy) = set.with(|s| {
            let due =
                s.nodes.iter().filter(|(_, cached)| cached.node().is_leaf() && cached.node().has_pending());
            let (ready, waiting): (Vec<_>, Vec<_>) =
                due.partition(|(_, cached)| !cached.writing && cached.state.is_open());
            // A closing leaf may have keys that its successors are to write.
            let is_busy =
                |cached: &CachedNode| cached.writing || matches!(cached.state, NodeState::Closing(_));
            let busy = s.nodes.iter().any(|(_, cached)| is_busy(cached));
            (
                ready.into_iter().take(BATCH).map(|(slot, _)| slot).collect::<Vec<_>>(),
                busy || !waiting.is_empty(),
            )
        });
        if !due.is_empty() {
            write_leaves(set, due).await?;
        } else if busy {
            set.signals().node_progress.wait().await;
        } else {
            return Ok(());
        }
    }
}

fn next_due(s: &State) -> Option<Time> {
    let is_writable = |slot| s.nodes.get(slot).is_writable();
    let (oldest, _) = s.nodes.unwritten().by_age().find(|(_, slot)| is_writable(*slot))?;
    Some(oldest + s.options.leaf_delay)
}

/// Returns the most bytes that a leaf may have pending.
pub fn pending_bytes_max(geometry: &Geometry) -> usize {
    PENDING_BYTES_MAX.min(usize::try_from(geometry.node_sectors() * 512 / 4).unwrap_or(usize::MAX))
}

fn due_leaves(s: &mut State) -> Vec<usize> {
    let is_old = |since: Time| since + s.options.leaf_delay <= s.now;
    let mut due = Vec::new();
    for slot in s.nodes.unwritten().due(s.reclaim_to, is_old) {
        if due.len() == BATCH {
            break;
        }
        if s.nodes.get(slot).is_writable() && !due.contains(&slot) {
            due.push(slot);
        }
    }
    if core::mem::take(&mut s.node_pressure) {
        for slot in s.nodes.unwritten_unpinned() {
            if due.len() >= BATCH {
                break;
            }
            if !due.contains(&slot) {
                due.push(slot);
            }
        }
    }
    due
}

/// Writes the pending bset of each leaf in `slots` that is neither being written nor replaced.
async fn write_leaves(set: &CacheSet, slots: Vec<usize>) -> Result<(), Error> {
    let mut writes: Vec<NodeWrite> = Vec::new();
    for slot in slots {
        set.env().breathe().await;
        writes.extend(set.with(|s| begin(s, slot)));
    }
    let _phase = (!writes.is_empty()).then(|| set.begin(Phase::LeafWrite));
    let tails = join_all(writes.iter().map(|write| write_tail(set, write.sector, &write.set))).await;
    tails.into_iter().collect::<Result<(), Error>>()?;
    // The data of the keys, and all but the first blocks of the bsets, become durable before the
    // first blocks are written: invariant D2.
    flush_cache(set).await?;
    let results = join_all(writes.into_iter().map(|write| append(set, write))).await;
    set.signals().node_progress.notify_all();
    set.signals().node_memory.notify_all();
    set.signals().journal_progress.notify_all();
    results.into_iter().collect()
}

/// Seals the pending bset of a leaf, unless the leaf has changed state since it was chosen.
fn begin(s: &mut State, slot: usize) -> Option<NodeWrite> {
    let cached = s.nodes.try_get_mut(slot).filter(|cached| cached.is_writable())?;
    cached.writing = true;
    let since = s.nodes.wrote(slot);
    let cached = s.nodes.get_mut(slot);
    cached.writing_since = since;
    let start = first_sector(cached.node());
    s.work.seal(s.nodes.get(slot).node().pending_bytes());
    let set = s.nodes.change(slot, seal_pending).expect("chosen because it has pending keys");
    Some(NodeWrite { slot, sector: start + u64::from(set.block) * s.geometry.block_sectors, set })
}

/// [`Node::seal_pending`], in memory that can be written from.
pub fn seal_pending(node: &mut Node) -> Option<SealedSet> {
    Some(node.seal_pending(Buffer::zeroed)?.map(Buffer::freeze))
}

/// Returns where a node starts on the cache device.
pub fn first_sector(node: &Node) -> u64 {
    crate::btree::pointer_to_read(&node.own().pointers).expect("a node's key has a pointer").sector()
}

async fn append(set: &CacheSet, write: NodeWrite) -> Result<(), Error> {
    write_head(set, write.sector, &write.set).await?;
    set.with(|s| {
        let cached = s.nodes.get_mut(write.slot);
        cached.writing = false;
        if let Some(sequence) = cached.writing_since.take() {
            s.journal.unpin(sequence);
        }
    });
    Ok(())
}

/// Appends a bset durably to a node that is reachable. A power cut could tear a bset longer than a
/// logical block, and a torn bset makes the node unreadable (for the kernel too). So everything
/// after its first block is made durable first: without its header the bset does not exist
/// (invariant D2).
pub async fn append_set(set: &CacheSet, sector: u64, write: &SealedSet) -> Result<(), Error> {
    write_tail(set, sector, write).await?;
    flush_cache(set).await?;
    write_head(set, sector, write).await
}

/// Returns the bytes of the part that is written last: what the device writes atomically.
fn head_bytes(set: &CacheSet) -> usize {
    usize::try_from(set.cache().info().logical_block_sectors * 512).expect("a block is small")
}

async fn write_tail(set: &CacheSet, sector: u64, write: &SealedSet) -> Result<(), Error> {
    let head = head_bytes(set);
    if write.bytes.len() <= head {
        return Ok(());
    }
    set.check_alive()?;
    // A slice of the same memory. If a device needs a larger alignment than its block, the driver
    // copies it.
    let tail = write.bytes.slice(head..write.bytes.len());
    let written = set.write_cache(WriteCause::Btree, sector + head as u64 / 512, tail).await;
    written.map_err(|source| set.fail(Error::Io { doing: ErrorContext::Node, source }))
}

async fn write_head(set: &CacheSet, sector: u64, write: &SealedSet) -> Result<(), Error> {
    let head = head_bytes(set).min(write.bytes.len());
    write_durably(set, WriteCause::Btree, sector, write.bytes.slice(0..head)).await?;
    // A length never counts what is not durable: invariant D5.
    is_durable(set, sector, write);
    Ok(())
}

/// Records that a bset of a node is durable, and everything before it in the node.
fn is_durable(set: &CacheSet, sector: u64, write: &SealedSet) {
    set.with(|s| {
        let blocks = write.bytes.len() / s.geometry.block_bytes();
        let blocks = write.block + u32::try_from(blocks).expect("a set is smaller than its node");
        let (bucket, _) = s.geometry.bucket_at(sector);
        s.buckets.node_reaches(s.buckets.id(bucket), blocks);
    });
}

/// Durably writes the first bset of a node that nothing points to yet. A failure latches: the tree
/// on the device is behind what was acknowledged.
pub async fn write_set(set: &CacheSet, sector: u64, write: &SealedSet) -> Result<(), Error> {
    write_durably(set, WriteCause::Btree, sector, write.bytes.clone()).await?;
    is_durable(set, sector, write);
    Ok(())
}

/// Writes metadata durably before it returns. On a device without FUA it uses the one flush that
/// may run at a time. A failure latches (invariant D36).
pub async fn write_durably(
    set: &CacheSet,
    cause: WriteCause,
    sector: u64,
    payload: Payload,
) -> Result<(), Error> {
    set.check_alive()?;
    let has_fua = set.cache().info().fua;
    let written = match has_fua {
        true => set.write_cache_fua(cause, sector, payload).await,
        false => set.write_cache(cause, sector, payload).await,
    };
    written.map_err(|source| set.fail(Error::Io { doing: cause.doing(), source }))?;
    if has_fua { Ok(()) } else { flush_cache(set).await }
}

/// Makes everything written to the cache device so far durable. A failure latches: what it covered
/// may be lost, and the next flush would claim success.
pub async fn flush_cache(set: &CacheSet) -> Result<(), Error> {
    if !set.cache().info().volatile_cache {
        return Ok(());
    }
    let wanted = set.with(|s| s.buckets.flushes().wanted());
    loop {
        match set.with(|s| s.buckets.flush_turn(wanted)) {
            CacheFlushAction::Done => return Ok(()),
            CacheFlushAction::Failed(source) => {
                return Err(set.fail(Error::Io { doing: ErrorContext::CacheFlush, source }));
            }
            CacheFlushAction::Wait => set.signals().cache_flushed.wait().await,
            CacheFlushAction::Run => {
                let flushed = set.cache().flush().await;
                set.with(|s| s.cache_flush_ends(flushed));
                set.signals().cache_flushed.notify_all();
            }
        }
    }
}
