//! The file of a socket that somebody listens on, which goes with him.

use super::{SocketFile, inherited};
use std::fs;
use std::path::{Path, PathBuf};

/// The file of a socket. Dropped, it goes, unless somebody else's has taken its place, it is [left](Self::leave), or the process before may still
/// want it back.
pub struct OwnFile {
    path: PathBuf,
    /// Device and inode; `None`: it is not ours.
    identity: Option<(u64, u64)>,
    /// The group that it had when the process before has passed it on; `None`: it was bound here.
    former_group: Option<u32>,
}

impl OwnFile {
    /// The one that has just been bound at `path`.
    #[must_use]
    pub fn bound(path: &Path, file: &SocketFile) -> Self {
        Self { path: path.to_owned(), identity: file.identity().ok(), former_group: None }
    }

    /// The socket that lies at `path`, if one does: another process of ours has bound it.
    #[must_use]
    pub fn inherited(path: &Path) -> Self {
        match SocketFile::just_bound(path) {
            Ok(file) => {
                let mut own = Self::bound(path, &file);
                own.former_group = file.group().ok();
                own
            }
            Err(_) => Self::somebody_elses(path.to_owned()),
        }
    }

    /// Somebody else has bound it, and it stays.
    #[must_use]
    pub const fn somebody_elses(path: PathBuf) -> Self {
        Self { path, identity: None, former_group: None }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It stays, for who listens there next: as it was, if that is the process before. False if it has been somebody else's.
    pub fn leave(&mut self) -> bool {
        self.file().map(|file| self.give_back(&file));
        self.identity.take().is_some()
    }

    /// It has the group again that it had, if the process before may want it back. False: that is settled.
    fn give_back(&self, file: &SocketFile) -> bool {
        let Some(group) = self.former_group.filter(|_| !inherited::are_settled()) else { return false };
        let _as_it_was = file.set_group(group);
        true
    }

    /// What lies there, if that is still ours.
    fn file(&self) -> Option<SocketFile> {
        let file = SocketFile::just_bound(&self.path).ok()?;
        (self.identity.is_some() && file.identity().ok() == self.identity).then_some(file)
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if let Some(file) = self.file()
            && !self.give_back(&file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(event = "socket-not-removed", path = %self.path.display(), %error, "could not remove the socket; the next start will");
        }
    }
}
