//! Replaces the file of a note that was removed: nothing would find the note after a kill.
//!
//! The kernel notifies a thread of this process as soon as something is removed from the note's
//! folder ([`watching`]), and the daemon checks periodically, too ([`look_after_all`]). The first
//! check to notice marks the note as gone: from then on, the engine acknowledges no change before
//! the journal holds it. Then the check creates a new file and reserves its space. Each time it
//! notifies the engine's thread, which alone stores to a note. That thread copies the content into
//! the new file and renames it into place; until it can, it writes the journal. So nothing that was
//! acknowledged depends on the old file once it is known to be gone, and a kill at any instruction
//! leaves a whole note in place, or none.

mod watching;

use super::mapping::Mapping;
use super::{NoteError, io_error};
use crate::ioctl::{LockMode, LockRange};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Suffix of the name of a file that is to replace a note's file.
const UNFINISHED: &str = ".new";

/// The notes that this process keeps.
static KEPT: Mutex<Vec<Weak<WatchedNote>>> = Mutex::new(Vec::new());

/// The state of a note's file.
#[derive(Debug)]
pub enum NoteFileState {
    /// It is where it was created.
    Present,
    /// It is in place, but was missing since the last check: it came back, or another file replaced
    /// it.
    WasReplaced,
    /// It is missing. A new file has been created, and replaces it as soon as the engine's thread
    /// is notified.
    Replaced,
}

/// A note, as seen by the code that looks after its file.
#[derive(Debug)]
pub(super) struct WatchedNote {
    path: PathBuf,
    bytes: u64,
    /// Whether a replacement is offered. Checking this is the only cost per record.
    is_offered: AtomicBool,
    /// The file is missing: nothing that the note holds outlives the process.
    is_gone: AtomicBool,
    tell: OnceLock<NoteNotifier>,
    state: Mutex<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    /// Device and inode of the file in use.
    file: Option<(u64, u64)>,
    offer: Option<Replacement>,
    /// It was missing, and [`look_after_all`] has not reported that yet.
    is_untold: bool,
    /// Why the last offer could not be put in place.
    refused: Option<Errno>,
    /// We have removed the file ourselves: it is no longer looked after.
    is_over: bool,
}

/// Notifies the code that stores to the note when the file is missing, and of each file that is to
/// replace it.
struct NoteNotifier(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for NoteNotifier {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("NoteNotifier")
    }
}

/// A file that is to replace a note's file.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) mapping: Mapping,
    pub(super) file: File,
}

impl WatchedNote {
    /// For the note of `bytes` bytes in `file` at `path`.
    pub(super) fn of(path: &Path, file: &File, bytes: u64) -> Arc<Self> {
        let state = WatchState { file: identity(file).ok(), ..WatchState::default() };
        let watched = Arc::new(Self {
            path: path.to_owned(),
            bytes,
            is_offered: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            tell: OnceLock::new(),
            state: Mutex::new(state),
        });
        // A temporary file that a killed process has left.
        let _none = rustix::fs::unlink(watched.unfinished());
        let mut kept = kept();
        kept.retain(|one| one.strong_count() > 0);
        kept.push(Arc::downgrade(&watched));
        drop(kept);
        watching::watch(path);
        watched
    }

    /// Sets `tell`, which is called when the file is missing and for each file that is to replace
    /// it. It must not block.
    pub(super) fn tells(&self, tell: impl Fn() + Send + Sync + 'static) {
        let _state = self.state();
        // Only the first call counts; later ones change nothing.
        let _first = self.tell.set(NoteNotifier(Box::new(tell)));
        if !self.is_there() {
            self.tell_engine();
        }
    }

    fn tell_engine(&self) {
        if let Some(NoteNotifier(tell)) = self.tell.get() {
            tell();
        }
    }

    /// Returns whether the note's content outlives the process, as far as has been noticed.
    pub(super) fn is_there(&self) -> bool {
        !self.is_gone.load(Ordering::Acquire)
    }

    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unfinished(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(UNFINISHED);
        path.into()
    }

    /// Checks the file on behalf of the code that reports to users, and creates a replacement if it
    /// is missing.
    fn look(&self) -> Result<NoteFileState, NoteError> {
        let mut state = self.state();
        let found = self.look_in(&mut state);
        let was_untold = std::mem::take(&mut state.is_untold);
        match found {
            Ok(NoteFileState::Present) if was_untold => Ok(NoteFileState::WasReplaced),
            found => found,
        }
    }

    fn look_in(&self, state: &mut WatchState) -> Result<NoteFileState, NoteError> {
        if state.is_over {
            return Ok(NoteFileState::Present);
        }
        let there = rustix::fs::lstat(&self.path);
        match there {
            Ok(there) if Some((there.st_dev, there.st_ino)) == state.file => {
                self.is_gone.store(false, Ordering::Release);
                state.refused = None;
                // Its folder may have been replaced.
                watching::watch(&self.path);
                return Ok(NoteFileState::Present);
            }
            Ok(_) | Err(Errno::NOENT) => self.miss(state),
            Err(errno) => {
                self.miss(state);
                return Err(io_error(&self.path, "check")(errno));
            }
        }
        let is_whole = state.offer.as_ref().is_some_and(|offer| {
            let unfinished = rustix::fs::lstat(self.unfinished());
            unfinished.is_ok_and(|it| identity(&offer.file).is_ok_and(|own| own == (it.st_dev, it.st_ino)))
        });
        if !is_whole {
            self.is_offered.store(false, Ordering::Relaxed);
            state.offer = None;
            state.offer = Some(self.make()?);
            self.is_offered.store(true, Ordering::Release);
            self.tell_engine();
        }
        match state.refused {
            None => Ok(NoteFileState::Replaced),
            Some(errno) => Err(io_error(&self.path, "replace")(errno)),
        }
    }

    /// Ends the care for the file: it is not needed any more.
    pub(super) fn ends(&self) {
        let mut state = self.state();
        state.is_over = true;
        self.is_offered.store(false, Ordering::Relaxed);
        if state.offer.take().is_some() {
            let _never_used = rustix::fs::unlink(self.unfinished());
        }
    }

    fn miss(&self, state: &mut WatchState) {
        if !self.is_gone.swap(true, Ordering::AcqRel) {
            state.is_untold = true;
            self.tell_engine();
        }
    }

    fn make(&self) -> Result<Replacement, NoteError> {
        let path = self.unfinished();
        let failed = |doing| io_error(&self.path, doing);
        let _none = rustix::fs::unlink(&path);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
        let file: File = opened.map_err(failed("replace"))?.into();
        // The folder may have been replaced, too.
        watching::watch(&self.path);
        let made = crate::ioctl::lock(&file, LockMode::Exclusive, LockRange::All)
            .map_err(failed("lock"))
            .and_then(|()| {
                let space = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, self.bytes);
                space.map_err(failed("reserve space for"))
            })
            .and_then(|()| {
                let words = usize::try_from(self.bytes / super::WORD).expect("a note is at most 1 GiB");
                let mapped = Mapping::new(&file, words);
                mapped.map_err(|source| NoteError::Io { path: self.path.clone(), doing: "map", source })
            });
        if made.is_err() {
            let _never_used = rustix::fs::unlink(&path);
        }
        Ok(Replacement { mapping: made?, file })
    }

    /// Returns the file to use from now on, if there is a new one. `fill` copies the content of the
    /// old one there; then it is renamed into place.
    pub(super) fn replacement(&self, fill: impl FnOnce(&Mapping)) -> Option<Replacement> {
        if !self.is_offered.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state();
        self.is_offered.store(false, Ordering::Relaxed);
        let offer = state.offer.take()?;
        fill(&offer.mapping);
        // The next check sees that it is still missing, and why.
        state.refused = rustix::fs::rename(self.unfinished(), &self.path).err();
        if state.refused.is_some() {
            let _never_used = rustix::fs::unlink(self.unfinished());
            return None;
        }
        state.file = identity(&offer.file).ok();
        self.is_gone.store(false, Ordering::Release);
        Some(offer)
    }
}

impl Drop for WatchedNote {
    fn drop(&mut self) {
        if self.state().offer.is_some() {
            let _never_used = rustix::fs::unlink(self.unfinished());
        }
    }
}

fn identity(file: &File) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(file).map(|found| (found.st_dev, found.st_ino))
}

fn kept() -> MutexGuard<'static, Vec<Weak<WatchedNote>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks all notes, and leaves the reporting to [`look_after_all`].
fn look_at_all() {
    let all: Vec<_> = kept().iter().filter_map(Weak::upgrade).collect();
    for watched in all {
        let _told_later = watched.look_in(&mut watched.state());
    }
}

/// Checks the files of all notes that this process keeps, and creates missing ones anew. May block
/// on their file system.
pub fn look_after_all() -> Vec<(PathBuf, Result<NoteFileState, NoteError>)> {
    let all: Vec<_> = kept().iter().filter_map(Weak::upgrade).collect();
    // A note that is no longer stored to may still be checked by another thread.
    let kept = all.iter().filter(|watched| !watched.state().is_over);
    kept.map(|watched| (watched.path.clone(), watched.look())).collect()
}

/// Removes the file of the note at `path`, which holds nothing that is still needed; it is not
/// replaced. Does nothing if there is no file.
pub fn remove(path: &Path) {
    let all: Vec<_> = kept().iter().filter_map(Weak::upgrade).collect();
    all.iter().filter(|watched| watched.path == path).for_each(|watched| watched.ends());
    let _left_behind = rustix::fs::unlink(path);
}
