//! The state of the journal ring: sequence numbers, pins, the open entry, and where entries are
//! placed.
//!
//! Invariants:
//! 1. The `last_seq` of an entry is the oldest sequence with a key that is not in a durable leaf
//!    yet, taken when the entry is closed.
//! 2. A journal bucket is reused only when every entry in it is older than the `last_seq` of a
//!    *durable* entry.
//! 3. Buckets are used in ascending circular order. One bucket is always left unused as a
//!    gap.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use bcached_env::{BufferPool, Payload};
use bcached_format::Key;

/// Entries without keys that must always find room: two writes of the priorities, one of the UUID
/// table, one that carries `last_seq`, and two to spare.
pub const RESERVE_ENTRIES: u64 = 6;

/// Entries without keys that stay possible for urgent entries: the one that frees space, and one to
/// spare.
const ENTRIES_KEPT: u64 = 2;

/// Words of an entry before its keys (240 bytes).
const HEADER_WORDS: u64 = 30;
const WORDS_PER_SECTOR: u64 = 64;
/// Largest entry, in sectors (32 KiB).
const ENTRY_SECTORS_MAX: u64 = 64;

/// Where a closed entry is written, and which older entries it still needs.
#[derive(Debug)]
pub struct ClosedEntry {
    /// Its sequence number.
    pub sequence: u64,
    /// The oldest entry still needed.
    pub last_sequence: u64,
    /// First sector on the cache device.
    pub sector: u64,
    /// The keys, in the order they were inserted.
    pub keys: Vec<Key>,
    /// The ring wraps around with this entry.
    pub wraps: bool,
    /// This entry frees a journal bucket.
    pub frees: bool,
}

/// Bytes of memory kept for entries to be written; only one is written at a time.
const MEMORY_MAX: usize = 64 << 10;

/// The journal's state. Sectors are those of the cache device.
pub struct Journal {
    /// First sectors of the journal buckets, in ring order.
    buckets: Vec<u64>,
    /// Newest sequence in each bucket; 0 = none.
    newest: Vec<u64>,
    bucket_sectors: u64,
    block_sectors: u64,
    current: usize,
    used_sectors: u64,
    /// Buckets behind the current one that hold nothing needed. Cached, because it is read for each
    /// key and changes only from one entry to the next.
    free: u64,
    /// Free buckets that entries with keys do not touch.
    reserve: u64,
    /// Sequence of the open entry.
    next: u64,
    keys: Vec<Key>,
    /// An empty vector with the capacity of an entry that has been closed, for the next entry.
    room: Vec<Key>,
    /// Memory for the bytes of entries.
    pub memory: BufferPool,
    /// Words of `keys`.
    words: usize,
    pins: BTreeMap<u64, u32>,
    /// The entry whose keys are being replayed. It and later entries are needed, whatever leaves
    /// are written.
    replaying: Option<u64>,
    durable: u64,
    durable_last: u64,
    wanted: u64,
    in_flight: bool,
    /// Entries without keys for which room has been promised.
    claimed: u64,
}

impl Journal {
    /// The journal of a set that has never been started: the first entry is placed at index 1.
    #[must_use]
    pub fn fresh(buckets: Vec<u64>, bucket_sectors: u64, block_sectors: u64) -> Self {
        let newest = vec![0; buckets.len()];
        let mut journal = Self {
            current: 1 % buckets.len(),
            buckets,
            newest,
            bucket_sectors,
            block_sectors,
            used_sectors: 0,
            free: 0,
            reserve: 0,
            next: 1,
            keys: Vec::new(),
            room: Vec::new(),
            memory: BufferPool::new(MEMORY_MAX),
            words: 0,
            pins: BTreeMap::new(),
            replaying: None,
            durable: 0,
            durable_last: 0,
            wanted: 0,
            in_flight: false,
            claimed: 0,
        };
        journal.reserve = journal.kept();
        journal.count_free();
        journal
    }

    /// The journal of a set that has never been started, on a device where a former set with the
    /// same UUID left entries up to `sequence`, with that one in `bucket`. All entries of this set
    /// are newer, and continue from there in the ring. (A kernel looks for the newest entry as in a
    /// sorted ring: it would not find one elsewhere.)
    #[must_use]
    pub fn behind(self, sequence: u64, bucket: usize) -> Self {
        // None of the former entries is needed, so all buckets are free.
        let newest = vec![0; self.buckets.len()];
        self.resumed(newest, bucket, 0, sequence, sequence + 1)
    }

    /// The journal as found: `newest[i]` is the newest sequence in bucket i (0 = none), `current`
    /// the bucket that holds the newest entry, and `used_sectors` the end of that entry.
    ///
    /// Writing resumes in the next bucket, as in a kernel. If that bucket is still needed (after
    /// repeated starts without any progress in between), writing resumes behind the newest entry
    /// instead.
    #[must_use]
    pub fn resumed(
        mut self,
        newest: Vec<u64>,
        current: usize,
        used_sectors: u64,
        sequence: u64,
        last_sequence: u64,
    ) -> Self {
        assert_eq!(newest.len(), self.buckets.len(), "one number for each journal bucket");
        self.newest = newest;
        self.current = current;
        self.used_sectors = used_sectors;
        self.next = sequence + 1;
        self.durable = sequence;
        self.durable_last = last_sequence;
        self.count_free();
        if self.free_buckets() > 1 {
            self.current = (current + 1) % self.buckets.len();
            self.used_sectors = 0;
            self.count_free();
        }
        self
    }

    /// Sequence of the open entry, which is being filled.
    #[must_use]
    pub const fn open_sequence(&self) -> u64 {
        self.next
    }

    /// The oldest entry that the newest durable one still needs.
    #[must_use]
    pub const fn needed_from(&self) -> u64 {
        self.durable_last
    }

    /// The newest durable entry.
    #[must_use]
    pub const fn durable(&self) -> u64 {
        self.durable
    }

    /// Asks the writer to make everything up to `sequence` durable.
    pub fn want(&mut self, sequence: u64) {
        self.wanted = self.wanted.max(sequence);
    }

    /// The sequence that must become durable for every key appended so far to be durable.
    #[must_use]
    pub const fn appended(&self) -> u64 {
        if self.keys.is_empty() { self.next - 1 } else { self.next }
    }

    /// Returns true when the writer has something to do: a task waits for the open entry.
    #[must_use]
    pub const fn should_close(&self) -> bool {
        !self.in_flight && self.wanted >= self.next
    }

    /// Returns true when the open entry holds keys.
    #[must_use]
    pub const fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Returns true if `words` more words of keys can be appended now. If false, wait for the
    /// writer or for space.
    #[must_use]
    pub fn has_room(&self, words: usize) -> bool {
        let sectors = self.entry_sectors(self.words + words);
        let fits_here = self.used_sectors + sectors <= self.bucket_sectors;
        let largest = ENTRY_SECTORS_MAX.min(self.bucket_sectors);
        let left = self.entries_left().saturating_sub(sectors.div_ceil(self.entry_sectors(0)));
        // Keys leave room for the entries that free room: invariant D8.
        sectors <= largest
            && left >= ENTRIES_KEPT + self.claimed
            && (fits_here && self.free_buckets() >= self.reserve || self.free_buckets() > self.reserve)
    }

    /// Returns true when only old entries stand in the way of [`Journal::has_room`]: leaves must be
    /// written.
    #[must_use]
    pub fn is_low(&self) -> bool {
        self.free_buckets() <= self.reserve + 1
    }

    /// Returns true when more than half of the buckets are in use, and one other than the current
    /// bucket would become free if all older entries were released.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.free_buckets() * 2 < self.buckets.len() as u64 && self.would_free_before(self.next)
    }

    /// Returns true when few entries without keys fit: a caller that writes them without asking
    /// must first release old entries.
    #[must_use]
    pub fn is_scarce(&self) -> bool {
        self.entries_left() < RESERVE_ENTRIES + self.claimed
    }

    /// Returns true when an entry without keys can be written before a replay that releases no
    /// entries, and the entries that the replay needs still fit after it.
    #[must_use]
    pub fn can_spare_one(&self) -> bool {
        self.entries_left() > RESERVE_ENTRIES + self.claimed
    }

    /// Returns true while keys of older entries are being replayed into the tree.
    #[must_use]
    pub const fn is_replaying(&self) -> bool {
        self.replaying.is_some()
    }

    /// Returns true when a replay has used up the room: the entry being replayed is the oldest
    /// needed one, and no entry is about to be written.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.replaying.is_some() && self.oldest_pin() == self.replaying && self.has_no_way_on()
    }

    /// Returns true when only the kept entries still fit, no entry is about to be written, and none
    /// would free a bucket.
    #[must_use]
    pub fn has_no_way_on(&self) -> bool {
        self.claimed == 0 && !self.in_flight && self.entries_left() <= ENTRIES_KEPT && !self.would_free()
    }

    /// Returns true when everything appended is durable.
    #[must_use]
    pub const fn is_at_rest(&self) -> bool {
        !self.in_flight && self.keys.is_empty()
    }

    /// Returns true when an entry written now would free a bucket that the newest durable entry
    /// still needs.
    #[must_use]
    pub fn would_free(&self) -> bool {
        self.would_free_before(self.oldest_pin().unwrap_or(self.next).min(self.next))
    }

    /// Returns true when an entry written after the leaves with the keys replayed so far would free
    /// a bucket. Any other entry only costs room, of which a replay may have little.
    #[must_use]
    pub fn replay_would_free(&self) -> bool {
        self.replaying.is_some_and(|replaying| self.would_free_before(replaying))
    }

    /// Returns true when a bucket would become free if `last` were the oldest needed entry.
    fn would_free_before(&self, last: u64) -> bool {
        let count = self.buckets.len();
        let mut others = (1..count).map(|step| self.newest[(self.current + step) % count]);
        others.any(|newest| newest >= self.durable_last.max(1) && newest < last)
    }

    /// Returns true when an entry written now would free the bucket behind the gap.
    fn would_free_beyond_gap(&self) -> bool {
        let last = self.oldest_pin().unwrap_or(self.next).min(self.next);
        self.newest[(self.current + 2) % self.buckets.len()] < last
    }

    /// Number of entries without keys that fit now.
    #[must_use]
    pub fn entries_left(&self) -> u64 {
        let entry = self.entry_sectors(0);
        let here = (self.bucket_sectors - self.used_sectors.min(self.bucket_sectors)) / entry;
        here + self.free_buckets().saturating_sub(1) * (self.bucket_sectors / entry)
    }

    /// The sequence up to which leaves should be written to free a bucket: the newest entry of the
    /// oldest bucket in use. Leaves of an entry under replay are excluded: writing them frees
    /// nothing, and leaves written key by key fill up quickly.
    #[must_use]
    pub fn reclaim_target(&self) -> u64 {
        let count = self.buckets.len();
        let oldest = (1..=count)
            .map(|step| self.newest[(self.current + step) % count])
            .find(|newest| *newest >= self.durable_last.max(1));
        let target = oldest.unwrap_or(self.durable);
        self.replaying.map_or(target, |replaying| target.min(replaying.saturating_sub(1)))
    }

    /// The oldest sequence with a key that is not in a durable leaf yet.
    #[must_use]
    pub fn oldest_pin(&self) -> Option<u64> {
        self.pins.first_key_value().map(|(sequence, _)| *sequence)
    }

    /// Appends a key, and returns the sequence of its entry. The caller has checked
    /// [`Journal::has_room`].
    pub fn append(&mut self, key: &Key) -> u64 {
        self.words += key.words();
        self.keys.push(*key);
        self.next
    }

    /// Moves replay on to the keys of entry `sequence`, after those of all older entries. `None`:
    /// replay has finished.
    pub fn replay(&mut self, sequence: Option<u64>) {
        if let Some(sequence) = sequence {
            self.pin(sequence);
        }
        if let Some(before) = core::mem::replace(&mut self.replaying, sequence) {
            self.unpin(before);
        }
    }

    /// Pins entry `sequence`: one of its keys is in a leaf that is not written yet.
    pub fn pin(&mut self, sequence: u64) {
        *self.pins.entry(sequence).or_insert(0) += 1;
    }

    /// Undoes one [`Journal::pin`].
    pub fn unpin(&mut self, sequence: u64) {
        let count = self.pins.get_mut(&sequence).expect("pins and unpins are in pairs");
        *count -= 1;
        if *count == 0 {
            self.pins.remove(&sequence);
        }
    }

    /// Promises room for an entry without keys, if [`ENTRIES_KEPT`] others remain possible. See
    /// [`Journal::unclaim`].
    #[must_use]
    pub fn try_claim(&mut self) -> bool {
        // The entries that free room still fit after this one: invariant D8.
        let enough = self.entries_left() > ENTRIES_KEPT + self.claimed;
        self.claimed += u64::from(enough);
        enough
    }

    /// Releases the room promised by [`Journal::try_claim`].
    pub const fn unclaim(&mut self) {
        self.claimed -= 1;
    }

    /// Closes the open entry and opens the next. Returns `None` if the entry does not fit yet:
    /// space must be reclaimed first.
    pub fn close(&mut self) -> Option<ClosedEntry> {
        assert!(!self.in_flight, "one entry in flight at a time");
        let sectors = self.entry_sectors(self.words);
        let (before, frees) = (self.current, self.would_free());
        if self.used_sectors + sectors > self.bucket_sectors {
            // Even an entry without keys leaves the gap: a kernel that opens the set after a crash
            // resumes there. An entry that frees a bucket may be placed in the gap: once it is
            // durable there is a gap again, and until then the entry does not exist.
            let free = self.free_buckets();
            if free < 2 && !(free == 1 && self.would_free_beyond_gap()) {
                return None;
            }
            self.current = (self.current + 1) % self.buckets.len();
            self.used_sectors = 0;
        }
        let closed = ClosedEntry {
            sequence: self.next,
            last_sequence: self.oldest_pin().unwrap_or(self.next).min(self.next),
            sector: self.buckets[self.current] + self.used_sectors,
            keys: core::mem::replace(&mut self.keys, core::mem::take(&mut self.room)),
            wraps: self.current < before,
            frees,
        };
        self.words = 0;
        self.newest[self.current] = self.next;
        self.count_free();
        self.used_sectors += sectors;
        self.next += 1;
        self.in_flight = true;
        Some(closed)
    }

    /// Keeps the memory of a durable entry's keys and bytes for the next entries, so that a flush
    /// does not wait for allocations.
    pub fn reuse(&mut self, mut keys: Vec<Key>, written: Payload) {
        keys.clear();
        self.room = keys;
        self.memory.put_payload(written);
    }

    /// Marks entry `sequence` as durable.
    pub fn completed(&mut self, sequence: u64, last_sequence: u64) {
        assert!(self.in_flight && sequence == self.durable + 1, "entries become durable in order");
        self.in_flight = false;
        self.durable = sequence;
        assert!(last_sequence >= self.durable_last, "last_seq never goes back");
        self.durable_last = last_sequence;
        self.count_free();
    }

    /// Number of buckets behind the current one that hold nothing needed.
    const fn free_buckets(&self) -> u64 {
        self.free
    }

    /// Recounts the free buckets, after a change of the current bucket, its content, or what is
    /// needed.
    fn count_free(&mut self) {
        let count = self.buckets.len();
        let free = |step: &usize| self.newest[(self.current + step) % count] < self.durable_last.max(1);
        self.free = (1..count).take_while(free).count() as u64;
    }

    /// Free buckets that entries with keys do not touch: the gap, and room for [`RESERVE_ENTRIES`].
    /// Never so many that a small journal could take no keys at all: with everything free, entries
    /// with keys may use the next bucket.
    fn kept(&self) -> u64 {
        let blocks = self.bucket_sectors / self.block_sectors;
        let entries_a_bucket = (blocks / self.entry_sectors(0).div_ceil(self.block_sectors)).max(1);
        (1 + RESERVE_ENTRIES.div_ceil(entries_a_bucket)).min(self.buckets.len() as u64 - 2)
    }

    fn entry_sectors(&self, words: usize) -> u64 {
        (HEADER_WORDS + words as u64).div_ceil(WORDS_PER_SECTOR).next_multiple_of(self.block_sectors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::{Inode, Key};

    fn journal(buckets: usize, bucket_sectors: u64, block_sectors: u64) -> Journal {
        Journal::fresh((0..buckets as u64).map(|index| 100 * index).collect(), bucket_sectors, block_sectors)
    }

    fn complete(journal: &mut Journal) -> ClosedEntry {
        let closed = journal.close().expect("has a place");
        journal.completed(closed.sequence, closed.last_sequence);
        closed
    }

    #[test]
    fn the_first_entry_goes_to_index_one() {
        let mut journal = journal(4, 16, 1);
        let closed = journal.close().expect("an empty journal has room");
        assert_eq!((closed.sequence, closed.last_sequence, closed.sector), (1, 1, 100));
    }

    /// Proves invariant D8.
    #[test]
    fn keys_stop_before_the_reserve_and_entries_without_keys_go_on() {
        for (buckets, bucket_sectors, block_sectors) in [(4, 16, 8), (8, 16, 1), (4, 128, 1)] {
            let mut journal = journal(buckets, bucket_sectors, block_sectors);
            complete(&mut journal);
            journal.pin(2); // nothing after entry 1 can be reclaimed
            let mut keyed = 0;
            while journal.has_room(3) {
                journal.append(&Key::hole(Inode(0), 8, 16));
                complete(&mut journal);
                keyed += 1;
                assert!(keyed < 10_000, "the ring is finite");
            }
            assert!(keyed > 0, "a journal of {buckets} buckets takes keys");
            let mut empty = 0;
            while journal
                .close()
                .map(|closed| journal.completed(closed.sequence, closed.last_sequence))
                .is_some()
            {
                empty += 1;
            }
            assert!(
                empty >= 2,
                "{empty} entries without keys fit the reserve: one that frees space, and one to spare"
            );
            journal.unpin(2);
            assert!(journal.free_buckets() >= 1, "the gap stays");
        }
    }

    /// Replay is not exhausted before that: the entry that frees space and one to spare remain
    /// possible, and an older pinned entry may still be released.
    #[test]
    fn a_replay_is_at_its_end_when_nothing_it_can_do_frees_a_bucket() {
        let mut journal = journal(4, 16, 8);
        complete(&mut journal);
        journal.pin(1);
        journal.replay(Some(2));
        let mut empty = 0;
        while journal.try_claim() {
            journal.unclaim();
            assert!(!journal.is_exhausted(), "after {empty} entries");
            complete(&mut journal);
            empty += 1;
        }
        assert!(empty > 0 && !journal.is_exhausted(), "leaves of entry 1 can be written");
        journal.unpin(1);
        assert!(journal.is_exhausted());
        journal.replay(None);
        assert!(!journal.is_exhausted());
    }

    #[test]
    fn a_bucket_is_reused_only_after_a_durable_entry_lets_it_go() {
        let mut journal = journal(4, 8, 8);
        for _ in 0..3 {
            complete(&mut journal);
        }
        // All three entries are unpinned, and entry 3 records that: every bucket but its own is
        // free.
        assert_eq!(journal.free_buckets(), 3);
        journal.pin(4);
        let closed = journal.close().expect("room");
        assert_eq!(journal.free_buckets(), 2, "closing alone frees nothing");
        journal.completed(closed.sequence, closed.last_sequence);
        assert_eq!(closed.last_sequence, 4);
        complete(&mut journal);
        assert_eq!(journal.free_buckets(), 2, "entry 4 is needed");
    }
}
