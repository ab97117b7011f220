//! The note of the set, which outlives the set: it is kept open from one opening to the next.
//!
//! While the set is closed, its note may hold the only copy of keys that were acknowledged. Opening
//! the note again by its path would find them only if its file was still there. So the note belongs
//! to the host, and a set has it on loan (invariant D51). The host can always put the note into
//! another file, also while the set is being closed or opened, and while its device is away.

use crate::Host;
use bcached_engine::Error;
use bcached_env::{Note, NoteRecord};
use std::cell::RefCell;
use std::rc::Rc;

/// The note of a set. Clones are handles on the same note.
#[derive(Clone)]
pub struct SetNote(Rc<RefCell<Box<dyn Note>>>);

impl SetNote {
    /// Takes over a note that was opened for the set.
    #[must_use]
    pub fn new(note: Box<dyn Note>) -> Self {
        Self(Rc::new(RefCell::new(note)))
    }

    /// Returns the note for the first set.
    #[must_use]
    pub fn lend(&self) -> Box<dyn Note> {
        Box::new(self.clone())
    }

    /// Returns the note for the next set, which finds in it what the former set has left. No other
    /// set uses it any more.
    pub(crate) fn lend_again(&self) -> Box<dyn Note> {
        self.0.borrow_mut().reopen();
        self.lend()
    }

    /// Makes the records void, because the device may have lost their data.
    pub(crate) fn give_up(&self) {
        drop(self.0.borrow_mut().give_up());
    }

    /// Puts the note into another file, if its file is gone and another one was made. Returns
    /// whether the note outlives the process.
    pub(crate) fn keep(&self) -> bool {
        let mut note = self.0.borrow_mut();
        note.keep();
        note.is_kept()
    }

    /// Returns whether the note holds keys that end with the process, for a set to which nothing is
    /// written any more.
    pub(crate) fn is_lost(&self) -> bool {
        !self.keep() && !self.0.borrow_mut().give_up().is_empty()
    }
}

impl Host {
    /// To be called when the note's file is gone, and again when another one has been made. On
    /// success, another file holds everything acknowledged before, or the journal does.
    ///
    /// # Errors
    /// Writes that were acknowledged and not flushed are lost if the process ends now.
    pub async fn keep_note(&self) -> Result<(), Error> {
        if self.inner().opening.note.keep() { Ok(()) } else { self.main()?.keep_note().await }
    }
}

impl Note for SetNote {
    fn room(&self) -> usize {
        self.0.borrow().room()
    }

    fn is_kept(&self) -> bool {
        self.0.borrow().is_kept()
    }

    fn keep(&mut self) {
        self.0.borrow_mut().keep();
    }

    fn append(&mut self, record: NoteRecord) {
        self.0.borrow_mut().append(record);
    }

    fn forget_through(&mut self, sequence: u64) {
        self.0.borrow_mut().forget_through(sequence);
    }

    fn give_up(&mut self) -> Vec<NoteRecord> {
        self.0.borrow_mut().give_up()
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        self.0.borrow().given_up()
    }

    fn recovered(&mut self, session: u64) -> Vec<NoteRecord> {
        self.0.borrow_mut().recovered(session)
    }

    fn begin(&mut self, session: u64) {
        self.0.borrow_mut().begin(session);
    }

    fn reopen(&mut self) {
        self.0.borrow_mut().reopen();
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

    fn reopen(&mut self) {}
}
