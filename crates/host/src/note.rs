//! The note of a set on which nothing is ever written that would have to be noted.

use bcached_env::{Note, NoteRecord};

/// A note without room; it is never asked for any.
pub struct NoNote;

impl Note for NoNote {
    fn room(&self) -> usize {
        0
    }

    fn append(&mut self, _record: NoteRecord) {}

    fn forget_through(&mut self, _sequence: u64) {}

    fn give_up(&mut self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn recovered(&mut self, _session: u64) -> Vec<NoteRecord> {
        Vec::new()
    }

    fn begin(&mut self, _session: u64) {}
}
