//! What the engine's thread needs of this machine: devices in memory, and the set's note.

use super::NoteOutcome;
use crate::engine_error;
use bcached_control::failure::Failure;
use bcached_env::{DiskId, Note};
use bcached_format::{CacheSuperblock, Uuid};
use bcached_host::{Machine, NullNote};
use bcached_offline::devices::memory;
use bcached_uring::note::{NOTE_BYTES, NoteError};
use bcached_uring::{Disks, MappedNote, NoteContents, NoteIdentity, NoteReplay};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tells the engine's thread that the note's file is gone. Called on any thread.
pub type NoteGoneCallback = Arc<dyn Fn() + Send + Sync>;

/// The note of a set, as a file.
#[derive(Clone)]
pub struct NoteLocation {
    /// Its path.
    pub path: PathBuf,
    /// The set.
    pub set_uuid: Uuid,
    /// Called when the file was removed.
    pub gone: NoteGoneCallback,
}

impl NoteLocation {
    /// True if a killed process may have left something here that must be passed to the set. It
    /// only looks: opening a damaged note repairs it.
    pub fn may_hold_anything(&self) -> bool {
        let identity = NoteIdentity::of_this_boot(self.set_uuid.0);
        self.path.exists()
            && identity.map_or(true, |identity| bcached_uring::note::may_hold_anything(&self.path, &identity))
    }

    /// Opens the note, or creates one.
    pub fn open(&self) -> Result<(Box<dyn Note>, NoteOutcome), NoteError> {
        let identity = NoteIdentity::of_this_boot(self.set_uuid.0)?;
        let note = MappedNote::open(&self.path, &identity, NOTE_BYTES)?;
        let gone = Arc::clone(&self.gone);
        note.tell_when_gone(move || gone());
        let found = (note.found().clone(), note.fate());
        Ok((Box::new(note), found))
    }

    /// Removes a note that held nothing when it was opened, before any request was carried out. It
    /// still holds nothing, and must not be taken for the note of a killed process. The cache
    /// device is still claimed, so no other process has opened the note.
    pub fn remove_unused(&self, found: &NoteContents) {
        if !matches!(found, NoteContents::Records(_) | NoteContents::Damaged { .. }) {
            bcached_uring::note::remove(&self.path);
        }
    }
}

/// Opens the note of a set that is being opened, with what a former process has left in it.
pub fn open_note(
    place: Option<&NoteLocation>,
    device: &Path,
) -> Result<(Box<dyn Note>, NoteOutcome), Failure> {
    match place {
        Some(place) => place.open().map_err(|error| engine_error::of_note(Some(device), &error)),
        None => Ok((Box::new(NullNote), (NoteContents::Nothing, NoteReplay::default()))),
    }
}

/// This machine, for one set.
#[derive(Clone)]
pub struct LocalMachine {
    /// The devices that its driver knows.
    pub disks: Disks,
    /// `None` if nothing is ever written that would have to be noted.
    pub note: Option<NoteLocation>,
}

impl Machine for LocalMachine {
    fn memory_cache(&self, superblock: &CacheSuperblock) -> Result<DiskId, String> {
        let device = memory::with(superblock).map_err(|failure| failure.to_string())?;
        Ok(self.disks.add(device))
    }

    fn remove(&self, disk: DiskId) {
        drop(self.disks.remove(disk));
    }
}
