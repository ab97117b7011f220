//! The simulator's in-memory note: it survives the death of a process, and a power cut empties it.

use bcached_env::{Note, NoteRecord};
use std::cell::RefCell;
use std::rc::Rc;

/// The note's records, on the simulator's side. A clone of this value is independent.
#[derive(Clone, Debug)]
pub struct NoteState {
    session: u64,
    records: Vec<NoteRecord>,
    given_up: Vec<NoteRecord>,
    capacity: usize,
    /// Its file has been removed: it disappears with its process.
    is_gone: bool,
}

impl NoteState {
    /// Creates an empty note with room for `capacity` records.
    #[must_use]
    pub const fn new(capacity: usize) -> Self {
        Self { session: 0, records: Vec::new(), given_up: Vec::new(), capacity, is_gone: false }
    }

    /// Applies a power cut.
    pub fn wipe(&mut self) {
        self.records.clear();
        self.given_up.clear();
        self.is_gone = false;
    }

    /// Removes the note's file (`false`), or puts another file with the same records in its place
    /// (`true`).
    pub const fn set_there(&mut self, is_there: bool) {
        self.is_gone = !is_there;
    }

    /// Applies the death of the process: a note whose file is gone is lost with it.
    pub fn process_dies(&mut self) {
        if self.is_gone {
            self.wipe();
        }
    }

    /// Returns whether it holds no records.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

/// The engine's handle on a shared [`NoteState`].
#[derive(Clone)]
pub struct MemoryNote(Rc<RefCell<NoteState>>);

impl MemoryNote {
    /// Creates a handle for the next process.
    #[must_use]
    pub const fn new(state: Rc<RefCell<NoteState>>) -> Self {
        Self(state)
    }

    /// See [`NoteState::set_there`].
    pub fn set_there(&self, is_there: bool) {
        self.0.borrow_mut().set_there(is_there);
    }
}

impl Note for MemoryNote {
    fn room(&self) -> usize {
        let state = self.0.borrow();
        state.capacity.saturating_sub(state.records.len())
    }

    fn is_kept(&self) -> bool {
        !self.0.borrow().is_gone
    }

    fn append(&mut self, record: NoteRecord) {
        let mut state = self.0.borrow_mut();
        assert!(state.records.len() < state.capacity, "the caller has checked the room");
        state.records.push(record);
    }

    fn forget_through(&mut self, sequence: u64) {
        self.0.borrow_mut().records.retain(|record| record.sequence > sequence);
    }

    fn give_up(&mut self) -> Vec<NoteRecord> {
        let mut state = self.0.borrow_mut();
        let records = std::mem::take(&mut state.records);
        state.given_up.extend(&records);
        records
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        self.0.borrow().given_up.clone()
    }

    /// The records stay until they are forgotten: the process may die again before it has
    /// journalled them.
    fn recovered(&mut self, session: u64) -> Vec<NoteRecord> {
        let state = self.0.borrow();
        if state.session == session { state.records.clone() } else { Vec::new() }
    }

    fn begin(&mut self, session: u64) {
        let mut state = self.0.borrow_mut();
        state.records.clear();
        state.given_up.clear();
        state.session = session;
    }

    /// Its records are the same for any process.
    fn reopen(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_outlive_the_process_until_forgotten() {
        let state = Rc::new(RefCell::new(NoteState::new(3)));
        let record = |sequence| NoteRecord { sequence, words: [sequence; 4], count: 3 };
        let mut first = MemoryNote::new(Rc::clone(&state));
        first.begin(7);
        for sequence in 1..=3 {
            first.append(record(sequence));
        }
        assert_eq!(first.room(), 0);
        drop(first);
        let mut second = MemoryNote::new(Rc::clone(&state));
        second.forget_through(2);
        assert_eq!(second.recovered(7), [record(3)]);
        assert_eq!(second.recovered(7), [record(3)], "still there for a third process");
        assert!(second.recovered(8).is_empty(), "somebody else has run the set");
        assert_eq!(second.room(), 2);
        second.set_there(false);
        assert!(!second.is_kept());
        second.set_there(true);
        state.borrow_mut().process_dies();
        assert_eq!(second.recovered(7), [record(3)], "another file had taken its place");
        second.set_there(false);
        state.borrow_mut().process_dies();
        assert!(second.recovered(7).is_empty() && second.is_kept());
        second.append(record(4));
        state.borrow_mut().wipe();
        assert!(second.recovered(7).is_empty());
    }
}
