//! The note of the set, which outlives the set: it is kept open from one opening to the next.
//!
//! While the set is closed, its note may hold the only copy of keys that were acknowledged. Opening
//! the note again by its path would find them only if its file was still there. So a closed set
//! returns its note to the host, and so does one that could not be opened (invariant D51).

use crate::Host;
use bcached_engine::Error;
use bcached_env::{Note, NoteRecord};
use std::cell::RefCell;
use std::rc::Rc;

/// The place of the note while no set has it. Clones are handles on the same place.
#[derive(Clone, Default)]
pub struct NoteSlot(Rc<RefCell<Option<Box<dyn Note>>>>);

impl NoteSlot {
    /// Returns the note for a set that is to be opened, and puts it into this place when the set is
    /// dropped.
    #[must_use]
    pub fn lend(&self, note: Box<dyn Note>) -> Box<dyn Note> {
        Box::new(LentNote { note, slot: self.clone() })
    }

    /// Returns the note for the next set, which finds in it what the former set has left. `None` if
    /// a set still has it.
    pub(crate) fn lend_again(&self) -> Option<Box<dyn Note>> {
        let mut note = self.0.borrow_mut().take()?;
        note.reopen();
        Some(self.lend(note))
    }

    /// Applies `change` to the note, unless a set has it.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut Box<dyn Note>) -> T) -> Option<T> {
        self.0.borrow_mut().as_mut().map(change)
    }

    /// Drops the note, unless a set has it.
    pub(crate) fn clear(&self) {
        drop(self.0.borrow_mut().take());
    }
}

impl Host {
    /// To be called when the note's file is gone, and again when another one has been made. On
    /// success, another file holds everything acknowledged before, or the journal does.
    ///
    /// # Errors
    /// Writes that were acknowledged and not flushed are lost if the process ends now.
    pub async fn keep_note(&self) -> Result<(), Error> {
        let set = match self.main() {
            Ok(set) => set,
            Err(error) => {
                let is_kept = self.inner().opening.note.with(|note| {
                    note.keep();
                    note.is_kept()
                });
                return if is_kept == Some(true) { Ok(()) } else { Err(error) };
            }
        };
        set.keep_note().await
    }
}

/// A note that a set has.
struct LentNote {
    note: Box<dyn Note>,
    slot: NoteSlot,
}

impl Drop for LentNote {
    fn drop(&mut self) {
        let mut note = std::mem::replace(&mut self.note, Box::new(NullNote));
        // No set notices any more if the file was removed and another one made.
        note.keep();
        *self.slot.0.borrow_mut() = Some(note);
    }
}

impl Note for LentNote {
    fn room(&self) -> usize {
        self.note.room()
    }

    fn is_kept(&self) -> bool {
        self.note.is_kept()
    }

    fn keep(&mut self) {
        self.note.keep();
    }

    fn append(&mut self, record: NoteRecord) {
        self.note.append(record);
    }

    fn forget_through(&mut self, sequence: u64) {
        self.note.forget_through(sequence);
    }

    fn give_up(&mut self) -> Vec<NoteRecord> {
        self.note.give_up()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        self.note.given_up()
    }

    fn recovered(&mut self, session: u64) -> Vec<NoteRecord> {
        self.note.recovered(session)
    }

    fn begin(&mut self, session: u64) {
        self.note.begin(session);
    }

    fn reopen(&mut self) {
        self.note.reopen();
    }
}

/// The note of a set on which nothing is ever written that would have to be noted. It has no room,
/// and is never asked for any.
pub struct NullNote;

impl Note for NullNote {
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
