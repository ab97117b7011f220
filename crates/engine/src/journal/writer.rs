//! Writes journal entries, one in flight at a time, with a pre-flush and FUA. So a durable entry
//! proves that all data completed before it is durable too.

use crate::btree::write;
use crate::cache_writes::WriteCause;
use crate::error::Error;
use crate::journal::ring::ClosedEntry;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::state::State;
use bcached_env::{Payload, Time};
use bcached_format::jset::{JSET_BYTES_MAX, JsetHeader, seal_into};

/// The task: writes the open entry when a caller needs it durable, or when its keys have waited
/// long enough.
pub async fn run(set: CacheSet) {
    let mut keys_since: Option<Time> = None;
    loop {
        let (stop, close, has_keys, delay) = set.with(|s| {
            (
                s.failed.is_some() || s.stopped,
                s.journal.should_close(),
                s.journal.has_keys(),
                s.options.journal_delay,
            )
        });
        if stop {
            return;
        }
        if close {
            keys_since = None;
            if write_entry(&set).await.is_err() {
                return;
            }
        } else if has_keys {
            let since = *keys_since.get_or_insert_with(|| set.env().now());
            if set.env().now() >= since + delay {
                set.with(|s| s.journal.want(s.journal.appended()));
                continue;
            }
            set.env().wait_until(&set.signals().journal_work, since + delay).await;
        } else {
            keys_since = None;
            set.signals().journal_work.wait().await;
        }
    }
}

async fn write_entry(set: &CacheSet) -> Result<(), Error> {
    let Some((closed, memory, bytes)) = set.with(close) else {
        // The entry does not fit yet. The leaves with the oldest keys are being written; then this
        // entry frees their bucket.
        if set.with(|s| s.journal_is_exhausted()) {
            // A replay needs the oldest entry, and waits for this one.
            return Err(set.fail(Error::JournalFull));
        }
        set.with(relieve);
        set.signals().leaf_work.notify_all();
        set.signals().journal_progress.wait().await;
        return Ok(());
    };
    let _wrap = closed.wraps.then(|| set.begin(Phase::JournalWrap));
    let _reclaim = closed.frees.then(|| set.begin(Phase::JournalReclaim));
    // There is an open entry with room again.
    set.signals().journal_progress.notify_all();
    // The data that the keys point to becomes durable before the keys do.
    write::flush_cache(set).await?;
    write::write_durably(set, WriteCause::Journal, closed.sector, memory.slice(0..bytes)).await?;
    set.with(|s| {
        s.journal.completed(closed.sequence, closed.last_sequence);
        if !s.note_held {
            s.note.forget_through(closed.sequence);
        }
        s.journal.reuse(closed.keys, memory);
        s.stats.journal_entries += 1;
        relieve(s);
    });
    if set.with(|s| s.wants_carrying()) {
        set.signals().walked.notify_all();
    }
    set.signals().leaf_work.notify_all();
    set.signals().journal_progress.notify_all();
    set.signals().allocator_work.notify_all();
    Ok(())
}

/// Closes the open entry. Returns it with its memory and the number of bytes to write from the
/// start of that memory.
fn close(s: &mut State) -> Option<(ClosedEntry, Payload, usize)> {
    let closed = s.journal.close()?;
    s.buckets.entry_closes(closed.sequence);
    let header = JsetHeader {
        seq: closed.sequence,
        last_seq: closed.last_sequence,
        uuids: s.uuid_key,
        root: s.root.key,
        root_level: u16::from(s.root.level),
        prio_bucket: s.prios.current.first().expect("a chain has a first bucket").index,
        marks_reserve: s.prios.marks_reserve,
        table: s.uuid_seal,
    };
    let mut memory = s.journal.memory.take(s.geometry.whole_blocks(JSET_BYTES_MAX));
    let bytes = memory.as_mut_slice();
    let sealed = seal_into(bytes, s.geometry.magic, &header, &closed.keys);
    s.work.seal(sealed);
    let whole = s.geometry.whole_blocks(sealed);
    bytes[sealed..whole].fill(0);
    Some((closed, memory.freeze(), whole))
}

/// Keeps the journal from filling up. When little is free, it has the leaves with the oldest keys
/// written; when that frees a bucket, it requests an entry that records so.
pub fn relieve(s: &mut State) {
    if !s.journal.is_low() {
        return;
    }
    s.reclaim_to = s.reclaim_to.max(s.journal.reclaim_target());
    if s.journal.would_free() {
        s.journal.want(s.journal.open_sequence());
    }
}

/// Waits until everything appended so far is durable.
pub async fn commit(set: &CacheSet) -> Result<(), Error> {
    let sequence = set.with(|s| s.journal.appended());
    commit_through(set, sequence).await
}

/// Writes an entry that carries the current root, UUID table and priorities, with or without keys,
/// and waits for it.
pub async fn commit_now(set: &CacheSet) -> Result<(), Error> {
    let sequence = set.with(|s| s.journal.open_sequence());
    commit_through(set, sequence).await
}

/// Writes every leaf, and then an entry that records from where on the journal is still needed.
pub async fn checkpoint(set: &CacheSet) -> Result<(), Error> {
    write::write_all(set).await?;
    commit_now(set).await
}

/// Waits until no entry up to `sequence` is needed any more: their keys are in durable leaves, and
/// a durable entry records so.
pub async fn let_go_through(set: &CacheSet, sequence: u64) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        let (is_gone, is_written) = set.with(|s| {
            s.reclaim_to = s.reclaim_to.max(sequence);
            let is_written = s.journal.oldest_pin().is_none_or(|oldest| oldest > sequence);
            (s.journal.needed_from() > sequence, is_written)
        });
        if is_gone {
            return Ok(());
        }
        if is_written {
            claim_entry(set).await?.commit().await?;
        } else {
            set.signals().leaf_work.notify_all();
            set.signals().journal_progress.wait().await;
        }
    }
}

/// Waits until entry `sequence` is durable.
pub async fn commit_through(set: &CacheSet, sequence: u64) -> Result<(), Error> {
    loop {
        check_writes(set)?;
        if set.with(|s| s.journal.durable() >= sequence) {
            return Ok(());
        }
        set.with(|s| s.journal.want(sequence));
        set.signals().journal_work.notify_all();
        set.signals().journal_progress.wait().await;
    }
}

/// Returns an error when no more entries are written, so that no caller waits for one.
fn check_writes(set: &CacheSet) -> Result<(), Error> {
    set.check_alive()?;
    if set.with(|s| s.stopped) { Err(Error::Stopping) } else { Ok(()) }
}

/// Claims room for an entry like that of [`commit_now`], for work that can wait. The room is
/// claimed before the objects that the entry names are written. So urgent work (a new root, while
/// the leaf that pins the oldest entry is closed) always finds room.
pub async fn claim_entry(set: &CacheSet) -> Result<EntryReservation, Error> {
    loop {
        check_writes(set)?;
        let claimed = set.with(|s| {
            relieve(s);
            s.journal.try_claim()
        });
        if claimed {
            return Ok(EntryReservation { set: set.clone() });
        }
        check_hope(set)?;
        set.signals().journal_work.notify_all();
        set.signals().leaf_work.notify_all();
        if set.with(|s| s.journal_is_exhausted()) {
            // Tasks that wait for buckets wait in vain.
            set.signals().space.notify_all();
        }
        set.signals().journal_progress.wait().await;
    }
}

/// Room for one entry without keys, reserved until this is dropped.
pub struct EntryReservation {
    set: CacheSet,
}

impl EntryReservation {
    /// Writes the entry and waits for it.
    pub async fn commit(self) -> Result<(), Error> {
        let set = self.set.clone();
        drop(self);
        commit_now(&set).await
    }
}

impl Drop for EntryReservation {
    fn drop(&mut self) {
        // Already borrowed only while the simulated world is torn down in the middle of a
        // transition.
        if let Ok(mut state) = self.set.inner.state.try_borrow_mut() {
            state.journal.unclaim();
        }
    }
}

/// Waits for room after an attempt found none in the journal or the note: has the open entry
/// written and, if old entries stand in the way, the leaves that hold their keys.
pub async fn wait_for_room(set: &CacheSet) -> Result<(), Error> {
    set.check_alive()?;
    check_hope(set)?;
    set.with(|s| {
        s.journal.want(s.journal.appended());
        relieve(s);
        s.stats.journal_waits += 1;
    });
    set.signals().journal_work.notify_all();
    set.signals().leaf_work.notify_all();
    set.signals().journal_progress.wait().await;
    Ok(())
}

/// Fails the set if no room can become free: the keys that pin the oldest entry cannot be applied.
fn check_hope(set: &CacheSet) -> Result<(), Error> {
    set.with(|s| s.journal_is_in_vain()).map_or(Ok(()), |error| Err(set.fail(error)))
}
