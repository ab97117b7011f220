//! Applies what the journal and the note hold to the tree, through the same transition as a write.
//!
//! Keys whose pointer is stale belong to buckets that were reused since: they become holes (format 9.5). The buckets
//! of all others are pinned before anything is allocated, because nothing else says yet that they are in use.

use crate::btree::Record;
use crate::btree::walk;
use crate::error::Error;
use crate::journal::scan::Entry;
use crate::journal::writer;
use crate::set::CacheSet;
use crate::space::Buckets;
use alloc::vec::Vec;
use bcached_env::NoteRecord;
use bcached_format::{Key, Pointer, Pointers};

/// The keys of `entries`, pinned as far as they are valid. `record_of`: 0 for keys of the note.
pub struct Pending {
    keys: Vec<(u64, Key)>,
}

/// Pulls generations forward and pins the buckets of every key that will be replayed.
pub fn prepare(entries: Vec<Entry>, note: &[NoteRecord], buckets: &mut Buckets) -> Result<Pending, Error> {
    let mut keys: Vec<(u64, Key)> = Vec::new();
    for entry in entries {
        keys.extend(entry.keys.into_iter().map(|key| (entry.header.seq, key)));
    }
    // All of the note, whatever its records' numbers: it is a complete end of the history, in order, so going over it
    // again leaves its last state. Some of it may be in entries; some of it was perhaps replayed by a process that
    // was killed while it did so, whose entries have taken the same numbers.
    keys.extend(note.iter().filter_map(key_of_note).map(|key| (0, key)));
    for (_, key) in &keys {
        for pointer in key.pointers.as_slice() {
            walk::raise(buckets, *pointer)?;
        }
    }
    for (_, key) in &keys {
        for pointer in valid(buckets, key) {
            buckets.pin(pointer);
        }
    }
    Ok(Pending { keys })
}

/// Replays. The keys of entries come first; when their leaves are written and an entry says that nothing older is
/// needed, the journal has room for the keys of the note, which are journalled anew. Afterwards nothing is left for the
/// next start (a kernel's too) to do.
pub async fn apply(set: &CacheSet, pending: Pending, oldest: u64) -> Result<(), Error> {
    let (journalled, noted): (Vec<_>, Vec<_>) =
        pending.keys.iter().copied().partition(|(sequence, _)| *sequence > 0);
    replay_entries(set, journalled, oldest).await?;
    writer::checkpoint(set).await?;
    for (_, key) in noted {
        replay_key(set, &key, Record::Journal).await?;
    }
    set.with(|s| {
        for (_, key) in &pending.keys {
            for pointer in valid(&s.buckets, key) {
                s.buckets.unpin(pointer);
            }
        }
    });
    writer::checkpoint(set).await
}

/// Replays the keys of entries, oldest first. An entry is needed until the keys up to it are in durable leaves. The new
/// roots and priorities of a long replay want entries as well: before the ring runs out of them it lets go what is done.
async fn replay_entries(set: &CacheSet, keys: Vec<(u64, Key)>, oldest: u64) -> Result<(), Error> {
    let mut at = oldest;
    let mut has_moved = false;
    set.with(|s| s.journal.replay(Some(at)));
    for (sequence, key) in keys {
        if sequence != at {
            set.with(|s| s.journal.replay(Some(sequence)));
            (at, has_moved) = (sequence, true);
        }
        if has_moved && set.with(|s| s.journal.is_scarce()) {
            writer::checkpoint(set).await?;
            has_moved = false;
        }
        replay_key(set, &key, Record::Replay(sequence)).await?;
    }
    set.with(|s| s.journal.replay(None));
    set.signals().journal_progress.notify_all();
    Ok(())
}

/// A key whose bucket has been reused since says only that older keys of its range are void (format 9.5): they are, and
/// what replaced it comes later in the journal, or was clean and may be lost.
async fn replay_key(set: &CacheSet, key: &Key, record: Record) -> Result<(), Error> {
    let is_void = set.with(|s| valid(&s.buckets, key).is_empty());
    if is_void {
        set.put_key(&Key::hole(key.inode, key.start(), key.end), record).await
    } else {
        set.put_key(key, record).await
    }
}

fn valid(buckets: &Buckets, key: &Key) -> Vec<Pointer> {
    key.pointers.as_slice().iter().copied().filter(|pointer| !buckets.is_stale(*pointer)).collect()
}

fn key_of_note(record: &NoteRecord) -> Option<Key> {
    let words = record.words.get(..usize::from(record.count))?;
    let pointers: Vec<Pointer> = words.get(2..)?.iter().map(|word| Pointer::from_word(*word)).collect();
    let key = Key::from_words(words[0], words[1], Pointers::from_slice(&pointers)?);
    (key.size > 0 && key.sectors() <= key.end).then_some(key)
}
