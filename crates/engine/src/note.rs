//! Handling of a note whose file has been removed.

use crate::error::Error;
use crate::journal::writer;
use crate::set::CacheSet;

impl CacheSet {
    /// Switches the note to the new file, if its file is gone and another one has been made.
    /// Returns whether the contents of the note outlive the process. Works on a failed set too.
    fn renew_note(&self) -> bool {
        self.with(|s| {
            s.note.keep();
            s.note.is_kept()
        })
    }

    /// To be called when the note's file is gone, and again when another one has been made.
    /// Everything acknowledged before outlives the process from then on: another file holds it, or
    /// the journal does.
    ///
    /// # Errors
    /// The journal cannot be written, and no other file is in place. Writes that were acknowledged
    /// and not flushed are lost if the process ends.
    pub async fn keep_note(&self) -> Result<(), Error> {
        if self.renew_note() { Ok(()) } else { writer::commit(self).await }
    }
}
