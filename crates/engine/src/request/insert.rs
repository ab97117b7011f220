//! Puts data in the cache: first space, then data, then keys. A key enters the tree only after its
//! data has been written (invariant D1), and a failed write is never indexed.

use crate::btree::{Attempt, InsertKind, Need, pointer_to_read};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::request::ranges::Claim;
use crate::request::{SectorRange, Target, write};
use crate::set::CacheSet;
use crate::short_list::ShortList;
use crate::space::{Allocation, DataClass};
use crate::state::State;
use bcached_env::{IoError, Payload, join_all};
use bcached_format::{Key, Pointer, Position};

/// Space for a part of a range.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// First sector in the key space.
    pub start: u64,
    /// Where the data is written.
    pub space: Allocation,
}

impl Chunk {
    /// Returns the first sector of its first copy on the cache device.
    #[must_use]
    pub fn sector(&self) -> u64 {
        self.space.pointers.as_slice().first().expect("allocated space has a pointer").sector()
    }

    /// Returns the end of the part.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start + self.space.sectors
    }

    /// Returns it as a key of volume `inode`.
    #[must_use]
    pub fn key(&self, inode: bcached_format::Inode, dirty: bool) -> Key {
        let size = u16::try_from(self.space.sectors).expect("allocated space fits a key");
        Key { inode, size, dirty, end: self.end(), pointers: self.space.pointers }
    }
}

/// What is left after space has been taken, for the tasks that have to react to it.
#[derive(Clone, Copy)]
pub(super) struct SpaceLeft {
    breath_ns: u64,
    /// Few buckets are free.
    are_few: bool,
    /// Some buckets were closed, and need a summary.
    has_closed: bool,
}

impl State {
    /// Returns what is left; see [`SpaceLeft`].
    pub(super) fn space_left(&self) -> SpaceLeft {
        SpaceLeft {
            breath_ns: self.breath_ns(),
            are_few: self.buckets.free_count() < self.free_low(),
            has_closed: self.open.has_closed(),
        }
    }
}

impl CacheSet {
    /// Takes space for as much of the range as is available, and pins it.
    pub(crate) fn take_chunks(&self, class: DataClass, range: SectorRange) -> ShortList<Chunk> {
        let of = |start| match class {
            DataClass::Dirty(inode) => Some(Position { inode, offset: start }),
            DataClass::Clean | DataClass::Moved => None,
        };
        let chunks = self.with(|s| {
            let mut chunks = ShortList::default();
            let mut at = range.start;
            while at < range.end {
                let wanted = (range.end - at).min(bcached_format::key::MAX_KEY_SECTORS - 7);
                let Some(space) = s.take_space(class, of(at), wanted) else { break };
                chunks.push(Chunk { start: at, space });
                at += space.sectors;
            }
            chunks
        });
        self.tell_of_space(self.with(|s| s.space_left()));
        chunks
    }

    /// Notifies the tasks that react to what is left.
    pub(super) fn tell_of_space(&self, left: SpaceLeft) {
        let SpaceLeft { breath_ns, are_few, has_closed } = left;
        self.env().set_breath(breath_ns);
        if are_few {
            self.signals().allocator_work.notify_all();
        }
        if has_closed {
            self.signals().summary_work.notify_all();
        }
    }

    /// Gives back chunks that will not be indexed.
    pub(crate) fn release_chunks(&self, chunks: &[Chunk]) {
        self.with(|s| {
            for chunk in chunks {
                s.unpin(&chunk.space.pointers);
            }
        });
    }

    /// Writes the data of the chunks, which lies in `payload` from `base` on. Returns each chunk
    /// with its outcome.
    pub(crate) async fn write_chunks(
        &self,
        chunks: ShortList<Chunk>,
        base: u64,
        payload: &Payload,
        cause: WriteCause,
    ) -> ShortList<(Chunk, Result<(), Error>)> {
        let mut written = ShortList::default();
        match chunks.only() {
            Ok(chunk) => written.push((chunk, self.write_chunk(&chunk, base, payload, cause).await)),
            Err(chunks) => {
                let write = |chunk: Chunk| async move {
                    (chunk, self.write_chunk(&chunk, base, payload, cause).await)
                };
                written.extend(join_all(chunks.into_iter().map(write)).await);
            }
        }
        written
    }

    async fn write_chunk(
        &self,
        chunk: &Chunk,
        base: u64,
        payload: &Payload,
        cause: WriteCause,
    ) -> Result<(), Error> {
        let from = usize::try_from((chunk.start - base) * 512).expect("a request fits in memory");
        let length = usize::try_from(chunk.space.sectors * 512).expect("a request fits in memory");
        let part = payload.slice(from..from + length);
        // There is one pointer for each copy; every copy is written.
        let mut written = Ok(());
        for pointer in chunk.space.pointers.as_slice() {
            written =
                self.write_data(*pointer, part.clone(), cause).await.map_err(Error::io(ErrorContext::Data));
            if written.is_err() {
                break;
            }
        }
        self.with(|s| s.buckets.age(chunk.space.sectors));
        written
    }

    /// Writes data to where `pointer` points, and records which flush of the cache device may still
    /// lose it.
    pub(crate) async fn write_data(
        &self,
        pointer: Pointer,
        payload: Payload,
        cause: WriteCause,
    ) -> Result<(), IoError> {
        let begun = self.env().now();
        let bytes = payload.len();
        self.count_written(cause, bytes);
        let written = self.cache().write(pointer.sector(), payload).await;
        self.with(|s| {
            s.cache_has_done(pointer.sector(), bytes, written.is_ok());
            s.buckets.written(pointer);
            s.cache_has_written(s.now.since(begun));
        });
        written
    }

    /// Writes chunks and puts them into the tree as dirty keys. Returns each with its outcome; in
    /// any case all are unpinned.
    pub(crate) async fn store_dirty(
        &self,
        target: &Target,
        chunks: ShortList<Chunk>,
        base: u64,
        payload: &Payload,
    ) -> ShortList<(Chunk, Result<(), Error>)> {
        let mut outcomes = self.write_chunks(chunks, base, payload, WriteCause::Data).await;
        for (chunk, outcome) in outcomes.iter_mut() {
            // Only data that has been written gets a key: invariant D1.
            if outcome.is_ok() {
                let key = chunk.key(target.inode.expect("only attached volumes are cached"), true);
                *outcome = self.put_dirty(target, key).await;
            }
            self.release_chunks(&[*chunk]);
        }
        outcomes
    }

    /// Inserts a dirty key, if its volume is not leaving the cache and *dirty* is durable. Both are
    /// checked in the transition that inserts. An earlier check may be outdated: a task that wanted
    /// the volume to leave, and failed, may have cleared the mark meanwhile.
    pub(super) async fn put_dirty(&self, target: &Target, key: Key) -> Result<(), Error> {
        let mut rest = Some(key);
        while let Some(key) = rest {
            let inserted = self
                .attempt(|s| {
                    let volume = s.volumes.get(target.id).filter(|volume| volume.may_cache(target.inode));
                    let Some(volume) = volume else { return Attempt::Done(Err(Error::Uncached)) };
                    // *Dirty* is durable before the first dirty key: invariant D14.
                    if !volume.dirty_marked {
                        return Attempt::Done(Ok(None));
                    }
                    match s.insert(&key, InsertKind::Journal) {
                        Attempt::Done(upto) => Attempt::Done(Ok(Some(upto))),
                        Attempt::Needs(need) => Attempt::Needs(need),
                    }
                })
                .await??;
            match inserted {
                Some(upto) => rest = key.cut(upto, key.end),
                None => drop(write::ensure_dirty(self, target).await?),
            }
        }
        Ok(())
    }

    /// Inserts a key, leaf by leaf, over whatever is there.
    pub(crate) async fn put_key(&self, key: &Key, record: InsertKind) -> Result<(), Error> {
        let mut rest = Some(*key);
        while let Some(key) = rest {
            let upto = self.attempt(|s| s.insert(&key, record)).await?;
            rest = key.cut(upto, key.end);
        }
        Ok(())
    }
}

/// Starts removing from the tree a clean `copy` that the cache device can no longer read. Otherwise
/// each read of it would wait for the device's error again, forever, and would keep its bucket from
/// being reclaimed.
pub fn spawn_drop(set: &CacheSet, target: &Target, copy: Key) {
    if !set.with(|s| s.begin_favour(target.id, 0)) {
        return;
    }
    let (set, target) = (set.clone(), target.clone());
    set.env().clone().spawn(async move {
        drop_copy(&set, &target, copy).await;
        set.with(|s| s.end_favour(target.id, 0));
        set.signals().ranges.notify_all();
    });
}

/// Removes such a copy. If that fails, the copy stays where it is.
async fn drop_copy(set: &CacheSet, target: &Target, copy: Key) {
    let mut rest = Some(copy);
    while let Some(expected) = rest {
        let hole = Key::hole(expected.inode, expected.start(), expected.end);
        let dropped = set
            .attempt(|s| {
                let replaced = s.replace(&expected, &hole);
                // A reader that no longer finds the key must know from which entry on: a write that
                // bypasses the cache waits for that entry to be durable.
                let sequence = s.journal.appended();
                if let Some(volume) = s.volumes.get_mut(target.id) {
                    volume.last_hole = volume.last_hole.max(sequence);
                }
                replaced
            })
            .await;
        let Ok((upto, _)) = dropped else { return };
        rest = expected.cut(upto, expected.end);
    }
}

/// Inserts a clean key, unless its range was written to since `claim` was entered; this is checked
/// in the transition that inserts. Unpins the key in any case. A failure is ignored, because the
/// key is optional.
pub async fn insert_clean(set: &CacheSet, target: &Target, key: &Key, claim: Claim) {
    debug_assert!(pointer_to_read(&key.pointers).is_some(), "clean data has a pointer");
    let mut rest = Some(*key);
    while let Some(part) = rest {
        let inserted = set
            .attempt(|s| {
                let good = s.volumes.get(target.id).is_some_and(|volume| volume.ranges.fill_is_good(claim));
                if !good {
                    s.fill_has_collided(target.id);
                    return Attempt::Done(None);
                }
                match s.insert(&part, InsertKind::Fill) {
                    Attempt::Done(upto) => Attempt::Done(Some(upto)),
                    // A fill does not wait for the journal: nothing of it is recorded.
                    Attempt::Needs(Need::Journal) => unreachable!("a fill is not journalled"),
                    Attempt::Needs(need) => Attempt::Needs(need),
                }
            })
            .await;
        let Ok(Some(upto)) = inserted else { break };
        rest = part.cut(upto, part.end);
    }
    set.with(|s| s.unpin(&key.pointers));
}
