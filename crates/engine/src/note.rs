//! A note whose file somebody has removed.

use crate::error::Error;
use crate::journal::writer;
use crate::set::CacheSet;

impl CacheSet {
    /// Where the note's file is gone and another one has been made, that takes its place. Whether what the
    /// note holds outlives the process. Also of a set that has failed.
    #[must_use]
    pub fn renew_note(&self) -> bool {
        self.with(|s| {
            s.note.keep();
            s.note.is_kept()
        })
    }

    /// To be called when the note's file is gone, and again when another one has been made. What was
    /// answered before outlives the process from here on: another file holds it, or the journal does.
    ///
    /// # Errors
    /// The journal cannot be written, and no other file is in place: what was answered and not flushed
    /// goes with the process.
    pub async fn keep_note(&self) -> Result<(), Error> {
        if self.renew_note() { Ok(()) } else { writer::commit(self).await }
    }
}
