//! The note: what has been acknowledged but is not in a written journal entry yet, kept where a daemon's death does
//! not reach it. A power cut wipes it; then only flushed writes are promised.
//!
//! A note ends the history of one *session*, the time between two writes of the cache superblock. Whoever runs the set
//! next (a kernel, a daemon with its note elsewhere) writes the superblock first thing: from then on the note's keys are
//! older than what the set holds, and replaying them would put old data over new. The superblock's count of writes does not
//! tell sessions apart: a set and its copy, or a set and its restored backup, come to the same number by different ways. Its sum
//! does, which covers the time of the start as well.
//!
//! In production a small memory-mapped file with the boot id; in simulation a vector that process death leaves alone.

use alloc::vec::Vec;

/// One key whose data is on a device and which has been (or is about to be) acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoteRecord {
    /// Sequence number of the journal entry that will hold the key. Records up to a written entry's number are void.
    pub sequence: u64,
    /// The key's words as stored: header, end, pointers.
    pub words: [u64; 4],
    /// How many of `words` count, 2..=4.
    pub count: u8,
}

/// Where notes are kept. Appending is synchronous: it is part of the transition that inserts the key.
pub trait Note {
    /// How many more records fit.
    fn room(&self) -> usize;

    /// Whether what it holds outlives the process. False while somebody has taken its file away and no
    /// other is in place: until then a change is answered only when the journal holds its keys.
    fn is_kept(&self) -> bool {
        true
    }

    /// Puts the file that was made in the place of one that is gone, with all that the note holds. Nothing happens
    /// if there is none.
    fn keep(&mut self) {}

    /// Adds a record; the caller has checked `room`.
    fn append(&mut self, record: NoteRecord);

    /// Records up to and including `sequence` are in a written journal entry: their room is free again.
    fn forget_through(&mut self, sequence: u64);

    /// All that it holds is void, because its data may be gone; returns that, in order of appending. Whoever opens the note next is told
    /// ([`Note::given_up`]), since nobody else can tell.
    fn give_up(&mut self) -> Vec<NoteRecord>;

    /// What a former process has given up, in order of appending, until somebody begins a session. Empty after a power cut.
    fn given_up(&self) -> Vec<NoteRecord>;

    /// What a former process left in `session`, in order of appending; empty after a power cut, and if the note is of
    /// another session.
    fn recovered(&mut self, session: u64) -> Vec<NoteRecord>;

    /// Forgets everything, also what was given up; what is appended from now on belongs to `session`, the sum of the superblock as written.
    fn begin(&mut self, session: u64);
}
