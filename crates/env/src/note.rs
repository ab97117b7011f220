//! The note: changes that are acknowledged but not yet in a written journal entry, kept where a
//! daemon's death does not reach them. A power cut wipes it; then only flushed writes are promised.
//!
//! A note belongs to one *session*, the time between two writes of the cache superblock. The next
//! one to run the set (a kernel, a daemon with its note elsewhere) first writes the superblock.
//! From then on the note's keys are older than the set's content, and replaying them would put old
//! data over new. The superblock's count of writes does not identify a session: a set and its copy,
//! or a set and its restored backup, can reach the same count in different ways. Its checksum does,
//! since it covers the start time as well.
//!
//! In production, the note is a small memory-mapped file with the boot id; in simulation, a vector
//! that survives process death.

use alloc::vec::Vec;

/// One key whose data is on a device and which has been (or is about to be) acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoteRecord {
    /// Sequence number of the journal entry that will hold the key. Records up to a written entry's
    /// number are void.
    pub sequence: u64,
    /// The key's words as stored: header, end, pointers.
    pub words: [u64; 4],
    /// How many of `words` are used, 2..=4.
    pub count: u8,
}

/// Storage for notes. Appending is synchronous: it is part of the transition that inserts the key.
pub trait Note {
    /// Returns how many more records fit.
    fn room(&self) -> usize;

    /// Returns whether the content outlives the process. False while its file was removed and no
    /// other is in place: until then, a change is acknowledged only when the journal holds its
    /// keys.
    fn is_kept(&self) -> bool {
        true
    }

    /// Replaces a missing file with the new one that was made for it, with all that the note holds.
    /// Does nothing if there is none.
    fn keep(&mut self) {}

    /// Adds a record; the caller has checked `room`.
    fn append(&mut self, record: NoteRecord);

    /// Forgets records up to and including `sequence`, which are in a written journal entry: their
    /// room is free again.
    fn forget_through(&mut self, sequence: u64);

    /// Makes all records void, because their data may be lost, and returns them in order of
    /// appending. The next process that opens the note is told ([`Note::given_up`]), since it has
    /// no other way to know.
    fn give_up(&mut self) -> Vec<NoteRecord>;

    /// Returns the records that a former process has given up, in order of appending, until a
    /// session begins. Empty after a power cut.
    fn given_up(&self) -> Vec<NoteRecord>;

    /// Returns the records that a former process left in `session`, in order of appending. Empty
    /// after a power cut, and if the note belongs to another session.
    fn recovered(&mut self, session: u64) -> Vec<NoteRecord>;

    /// Forgets everything, including records given up. Records appended from now on belong to
    /// `session`, the checksum of the superblock as written.
    fn begin(&mut self, session: u64);

    /// Makes it as if another process had opened it: its records are those that a former process
    /// left. Called before another set of this process gets it.
    fn reopen(&mut self);
}
