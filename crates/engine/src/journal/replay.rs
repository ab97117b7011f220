//! Replay: applies the keys of the journal and the note to the tree, through the same transition as
//! a write.
//!
//! Keys are applied in key order, a long run of the journal at a time ([`latest`]), and the next
//! leaves are read together. In journal order, each key of a busy set would read another leaf.
//!
//! Keys whose pointer is stale belong to buckets that were reused since; they become holes (format
//! 9.5). The buckets of all other keys are pinned before anything is allocated, because nothing
//! else says yet that they are in use.
//!
//! The keys are untrusted bytes: see [`prepare`] for what is refused.
//!
//! [`latest`]: crate::journal::latest

use crate::btree::{InsertKind, NodeRef, load, walk};
use crate::cpu_cost::{SORT_MAX, SORT_NS, VISIT_MAX};
use crate::error::{Error, ErrorContext};
use crate::journal::latest::LatestKeys;
use crate::journal::scan::JournalEntry;
use crate::journal::{drain, writer};
use crate::set::{CacheSet, TaskKind};
use crate::space::Buckets;
use crate::state::State;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Env, NoteRecord};
use bcached_format::key_check::check_leaf_key;
use bcached_format::{Geometry, Inode, Key, KeyError, Pointer, Pointers, Position};

/// Keys added to the overlay in one piece.
const LAID_MAX: usize = 32;

/// The keys of the entries, followed by those of the note, with the numbers of their entries (0:
/// note). Their valid pointers are pinned.
pub struct ReplayKeys {
    keys: Vec<(u64, Key)>,
    /// Number of keys that come from entries.
    journalled: usize,
}

/// Checks every key that will be replayed, pulls generations forward and pins the buckets.
/// Impossible keys are refused here, before anything is written: a checksum proves that bytes are
/// as they were written, not that they make sense (invariant D40). Yields between pieces.
pub async fn prepare(
    env: &Env,
    entries: Vec<JournalEntry>,
    note: &[NoteRecord],
    geometry: &Geometry,
    buckets: &mut Buckets,
) -> Result<ReplayKeys, Error> {
    let mut keys: Vec<(u64, Key)> = Vec::new();
    for entry in entries {
        walk::pause(env, entry.keys.len()).await;
        for key in entry.keys {
            let checked = check_key(geometry, &key);
            checked
                .map_err(|source| Error::Format { doing: ErrorContext::Journal, source: source.into() })?;
            keys.push((entry.header.seq, key));
        }
    }
    let journalled = keys.len();
    // Replay the whole note, whatever its records' numbers. It is a complete suffix of the history,
    // in order, so applying it again ends in its last state. Some of it may be in entries. Some of
    // it may have been replayed by a process that was killed meanwhile, whose entries have taken
    // the same numbers.
    for records in note.chunks(VISIT_MAX) {
        walk::pause(env, records.len()).await;
        for record in records {
            let key = key_of_note(record).ok_or(Error::Inconsistent("a record of the note has no key"))?;
            let checked = check_key(geometry, &key);
            checked.map_err(|source| Error::Format { doing: ErrorContext::Note, source: source.into() })?;
            keys.push((0, key));
        }
    }
    for keys in keys.chunks(VISIT_MAX) {
        walk::pause(env, keys.len()).await;
        for pointer in keys.iter().flat_map(|(_, key)| key.pointers.as_slice()) {
            walk::raise(buckets, *pointer)?;
        }
    }
    check_disjoint(env, &keys, buckets).await?;
    for keys in keys.chunks(VISIT_MAX) {
        walk::pause(env, keys.len()).await;
        for (_, key) in keys {
            for pointer in valid(buckets, key) {
                buckets.pin(pointer);
            }
        }
    }
    Ok(ReplayKeys { keys, journalled })
}

/// Checks that a key to be replayed covers something and is valid in a leaf.
fn check_key(geometry: &Geometry, key: &Key) -> Result<(), KeyError> {
    if key.size == 0 {
        return Err(KeyError::ZeroSize);
    }
    check_leaf_key(geometry, key)
}

/// Where the live data of a key lies on the cache device, and which data of which volume it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LiveExtent {
    sector: u64,
    end: u64,
    inode: Inode,
    /// Sector of the volume minus sector of the cache device.
    shift: u64,
    /// Index among the key's pointers.
    copy: usize,
}

/// Checks that no sector of the cache holds two different sectors of volumes, or both copies of
/// one: a bucket would count more live data than it holds. The same extent may appear many times,
/// also in parts.
async fn check_disjoint(env: &Env, keys: &[(u64, Key)], buckets: &Buckets) -> Result<(), Error> {
    let mut extents: BTreeSet<LiveExtent> = BTreeSet::new();
    for keys in keys.chunks(SORT_MAX) {
        env.breathe().await;
        env.charge(SORT_NS * keys.len() as u64);
        for (_, key) in keys.iter().filter(|(_, key)| !is_void(buckets, key)) {
            let copies = key.pointers.as_slice().iter().enumerate();
            extents.extend(copies.filter(|(_, pointer)| !buckets.is_stale(**pointer)).map(
                |(copy, pointer)| {
                    let sector = pointer.sector();
                    let shift = key.start().wrapping_sub(sector);
                    LiveExtent { sector, end: sector + key.sectors(), inode: key.inode, shift, copy }
                },
            ));
        }
    }
    // An extent that overlaps any earlier one overlaps the one that reaches furthest.
    let mut furthest: Option<LiveExtent> = None;
    for (number, extent) in extents.into_iter().enumerate() {
        if number % VISIT_MAX == 0 {
            walk::pause(env, VISIT_MAX).await;
        }
        if let Some(before) = furthest.filter(|before| extent.sector < before.end) {
            let of = |extent: &LiveExtent| (extent.inode, extent.shift, extent.copy);
            if of(&before) != of(&extent) {
                return Err(Error::Inconsistent("two keys of the journal share sectors of a cache bucket"));
            }
        }
        if furthest.is_none_or(|before| before.end < extent.end) {
            furthest = Some(extent);
        }
    }
    Ok(())
}

/// Replays. The keys of entries come first. When their leaves are written and an entry records that
/// nothing older is needed, the journal has room for the keys of the note, which are journalled
/// anew. Afterwards nothing is left to replay for the next start (by a kernel too) except, after a
/// long journal, its last run, which is in the overlay.
pub async fn apply(set: &CacheSet, pending: ReplayKeys) -> Result<(), Error> {
    let (journalled, noted) = pending.keys.split_at(pending.journalled);
    let mut lies_over = set.with(|s| journalled.len() >= s.options.replay_beside.max(1));
    if !lies_over {
        lies_over = match replay_entries(set, journalled).await {
            // The keys of a damaged node stay in the overlay, as far as they are not in leaves.
            Err(Error::Node { .. }) => true,
            other => other.map(|()| false)?,
        };
    }
    let is_beside = lies_over && replay_beside(set, journalled, noted).await?;
    if !is_beside {
        note_dirty(set, &pending.keys).await;
        writer::checkpoint(set).await?;
        replay_in_order(set, LatestKeys::of(set.env(), noted).await, |_| Some(InsertKind::Journal)).await?;
    }
    for keys in pending.keys.chunks(VISIT_MAX) {
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(keys.len());
            for (_, key) in keys {
                for pointer in valid(&s.buckets, key) {
                    s.buckets.unpin(pointer);
                }
            }
        });
    }
    if is_beside { writer::commit(set).await } else { writer::checkpoint(set).await }
}

/// Replays the keys of entries except the last run. That run goes into the overlay with the note's
/// keys, which are journalled anew and not applied to leaves either. Returns false if the journal
/// has little room: then the last run has been replayed too, and the note has not.
async fn replay_beside(set: &CacheSet, keys: &[(u64, Key)], noted: &[(u64, Key)]) -> Result<bool, Error> {
    let stretch_keys = set.with(|s| s.options.replay_keys).max(1);
    let (before, last) = keys.split_at(keys.len().saturating_sub(stretch_keys));
    let Some((first, _)) = last.first() else { return Ok(false) };
    set.with(|s| s.journal.pin(*first));
    replay_entries(set, before).await?;
    let is_scarce = set.with(|s| s.journal.is_scarce());
    if is_scarce {
        set.with(|s| {
            s.journal.replay(Some(*first));
            s.journal.unpin(*first);
        });
        replay_entries(set, last).await?;
        return Ok(false);
    }
    note_ages(set, keys).await;
    let mut latest = LatestKeys::of(set.env(), last).await;
    while !latest.is_empty() {
        set.env().breathe().await;
        set.with(|s| {
            for (sequence, key) in core::iter::from_fn(|| latest.next()).take(LAID_MAX) {
                let key = s.or_hole(&key);
                s.note_replayed(&key);
                s.work.insert(0);
                s.add_pending(sequence, &key);
            }
        });
    }
    set.with(|s| {
        s.journal.unpin(*first);
        s.overlay.grows = true;
    });
    set.spawn(TaskKind::Changing, drain::run);
    for (_, key) in noted {
        while !set.attempt(|s| s.journal_pending(key)).await? {}
    }
    set.with(|s| s.overlay.grows = false);
    set.signals().walked.notify_all();
    Ok(true)
}

/// Notes which volumes have dirty data according to the last keys of journal and note, when all of
/// these are applied to leaves. [`replay_beside`] notes those that it puts into the overlay.
async fn note_dirty(set: &CacheSet, keys: &[(u64, Key)]) {
    let mut latest = LatestKeys::of(set.env(), keys).await;
    while !latest.is_empty() {
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(LAID_MAX);
            for (_, key) in core::iter::from_fn(|| latest.next()).take(LAID_MAX) {
                s.note_replayed(&s.or_hole(&key));
            }
        });
    }
}

/// Records the oldest pointers, so that no bucket is reused so often that a pointer of a needed
/// entry passes for a new one. Such an entry may be needed for a long time.
async fn note_ages(set: &CacheSet, keys: &[(u64, Key)]) {
    for keys in keys.chunks(VISIT_MAX) {
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(keys.len());
            for pointer in keys.iter().flat_map(|(_, key)| key.pointers.as_slice()) {
                if let Some(id) = s.buckets.of(*pointer) {
                    s.buckets.note_oldest(id, pointer.generation());
                }
            }
        });
    }
}

/// Replays the keys of entries, the oldest run first. An entry is needed until the keys up to it
/// are in durable leaves. The new roots and priorities of a long replay need entries as well, so it
/// releases finished entries before the ring runs out.
async fn replay_entries(set: &CacheSet, keys: &[(u64, Key)]) -> Result<(), Error> {
    let stretch_keys = set.with(|s| s.options.replay_keys).max(1);
    for stretch in keys.chunks(stretch_keys) {
        set.with(|s| s.journal.replay(Some(stretch[0].0)));
        let is_scarce = || set.with(|s| s.journal.is_scarce());
        let_go_if_scarce(set).await?;
        // No entry of the run is released before all keys of the run are in leaves. Without room
        // for that, the entries are replayed one by one (invariant L6). Keys may then be applied
        // twice, an older one over a newer one; the following keys correct that.
        let record = |sequence| (!is_scarce()).then_some(InsertKind::Replay(sequence));
        if is_scarce() || !replay_in_order(set, LatestKeys::of(set.env(), stretch).await, record).await? {
            replay_one_by_one(set, stretch).await?;
        }
    }
    set.with(|s| s.journal.replay(None));
    set.signals().journal_progress.notify_all();
    Ok(())
}

/// Releases the entries before the one being replayed, if room is scarce and that frees some.
/// Returns true if it did.
async fn let_go_if_scarce(set: &CacheSet) -> Result<bool, Error> {
    let is_due = set.with(|s| s.journal.is_scarce() && s.journal.replay_would_free());
    if is_due {
        writer::checkpoint(set).await?;
    }
    Ok(is_due)
}

/// Replays keys in key order, as long as `record` returns a value for them. Returns false if it
/// returned none for a key.
async fn replay_in_order(
    set: &CacheSet,
    mut keys: LatestKeys,
    record: impl Fn(u64) -> Option<InsertKind>,
) -> Result<bool, Error> {
    // The leaves of keys that begin before this position have been read.
    let mut upto = Position::ZERO;
    while let Some((sequence, key)) = keys.next() {
        let start = key.start_position();
        if start >= upto {
            let next = |_: &mut State, upto| keys.start_from(upto);
            upto = load::together(set, |s, most| s.leaves_of(start, most, next)).await;
        }
        let Some(record) = record(sequence) else { return Ok(false) };
        replay_key(set, &key, record).await?;
    }
    Ok(true)
}

/// Replays keys in journal order, and releases their entries when there is no room for others.
async fn replay_one_by_one(set: &CacheSet, keys: &[(u64, Key)]) -> Result<(), Error> {
    let mut at = keys.first().map_or(0, |(sequence, _)| *sequence);
    let mut has_moved = false;
    for (sequence, key) in keys {
        if *sequence != at {
            set.with(|s| s.journal.replay(Some(*sequence)));
            (at, has_moved) = (*sequence, true);
        }
        if has_moved && let_go_if_scarce(set).await? {
            has_moved = false;
        }
        replay_key(set, key, InsertKind::Replay(*sequence)).await?;
    }
    Ok(())
}

impl State {
    /// Looks up at most `most` leaves: that of the key that begins at `start` and those of the keys
    /// behind it. Returns the ones that are not in memory, and the end of the last one looked up.
    /// Stops at the first leaf below a node that is not in memory. `after` returns where the next
    /// key behind a leaf begins.
    pub(super) fn leaves_of(
        &mut self,
        start: Position,
        most: usize,
        after: impl Fn(&mut Self, Position) -> Option<Position>,
    ) -> (Vec<NodeRef>, Position) {
        let (mut missing, mut upto) = (Vec::new(), start);
        if self.root.level == 0 {
            return (missing, Position::MAX);
        }
        let mut next = Some(start);
        for _ in 0..most {
            let Some(start) = next else { break };
            let Ok(slot) = self.descend(start, 1) else { break };
            let leaf = self.nodes.get(slot).node().child_for(start);
            let leaf =
                NodeRef { key: *leaf.expect("the children of a checked node reach its end"), level: 0 };
            if self.nodes.find(leaf.pointer()).is_none() {
                missing.push(leaf);
            }
            upto = leaf.key.position();
            next = after(self, upto);
        }
        (missing, upto)
    }
}

/// Applies a key, or a hole if none of its data is left.
async fn replay_key(set: &CacheSet, key: &Key, record: InsertKind) -> Result<(), Error> {
    if set.with(|s| is_void(&s.buckets, key)) {
        set.put_key(&Key::hole(key.inode, key.start(), key.end), record).await
    } else {
        set.put_key(key, record).await
    }
}

/// Returns true if the key has no data, or its data no longer exists.
pub(super) fn is_void(buckets: &Buckets, key: &Key) -> bool {
    let is_placeholder = key.pointers.as_slice().iter().any(|pointer| pointer.is_check());
    is_placeholder || buckets.is_dead(key)
}

fn valid(buckets: &Buckets, key: &Key) -> Vec<Pointer> {
    key.pointers.as_slice().iter().copied().filter(|pointer| !buckets.is_stale(*pointer)).collect()
}

/// The key in a record of the note, or `None` if the record is malformed.
pub fn key_of_note(record: &NoteRecord) -> Option<Key> {
    let words = record.words.get(..usize::from(record.count))?;
    let [header, end, pointers @ ..] = words else { return None };
    if Key::pointer_count_of(*header) != pointers.len() {
        return None;
    }
    let pointers: Vec<Pointer> = pointers.iter().map(|word| Pointer::from_word(*word)).collect();
    Some(Key::from_words(*header, *end, Pointers::from_slice(&pointers)?))
}
