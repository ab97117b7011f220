//! The file of a listening socket, which is removed with its listener.

use super::{SocketFile, inherited};
use std::fs;
use std::path::{Path, PathBuf};

/// Device and inode of a socket's file.
pub type FileId = (u64, u64);

/// The file of a socket. Removed when dropped, unless another file has taken its place, it is
/// [left](Self::leave), or the previous process may still need it back.
pub struct OwnedSocketFile {
    path: PathBuf,
    whose: SocketOwner,
    /// The group it had when the previous process passed it on; `None`: it was bound here.
    former_group: Option<u32>,
}

/// Who has bound a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketOwner {
    /// This process, or one before it. `None`: its file no longer exists, whatever is in its place.
    Ours(Option<FileId>),
    /// Another program: the file stays, whatever happens to the socket.
    Foreign,
}

impl OwnedSocketFile {
    /// Creates the value for the file that has just been bound at `path`.
    #[must_use]
    pub fn bound(path: &Path, file: &SocketFile) -> Self {
        Self { path: path.to_owned(), whose: SocketOwner::Ours(file.identity().ok()), former_group: None }
    }

    /// Creates the value for a socket that another process of ours has bound at `path`, if its file
    /// is still there.
    #[must_use]
    pub fn inherited(path: &Path, identity: Option<FileId>) -> Self {
        let mut own = Self { path: path.to_owned(), whose: SocketOwner::Ours(identity), former_group: None };
        let file = own.file();
        own.former_group = file.as_ref().and_then(|file| file.group().ok());
        own.whose = SocketOwner::Ours(identity.filter(|_| file.is_some()));
        own
    }

    /// Creates the value for a file that another program has bound, and that stays.
    #[must_use]
    pub const fn somebody_elses(path: PathBuf) -> Self {
        Self { path, whose: SocketOwner::Foreign, former_group: None }
    }

    /// Returns whether another program has bound it.
    #[must_use]
    pub const fn is_somebody_elses(&self) -> bool {
        matches!(self.whose, SocketOwner::Foreign)
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the file for the next listener there; unchanged, if that is the previous process.
    pub fn leave(&mut self) -> SocketOwner {
        self.file().map(|file| self.give_back(&file));
        std::mem::replace(&mut self.whose, SocketOwner::Foreign)
    }

    /// Restores the group that it had, if the previous process may need it back. Returns false if
    /// that is settled.
    fn give_back(&self, file: &SocketFile) -> bool {
        let Some(group) = self.former_group.filter(|_| !inherited::are_settled()) else { return false };
        let _as_it_was = file.set_group(group);
        true
    }

    /// Returns the file, if it is still ours.
    #[must_use]
    pub fn file(&self) -> Option<SocketFile> {
        let SocketOwner::Ours(Some(identity)) = self.whose else { return None };
        let file = SocketFile::just_bound(&self.path).ok()?;
        (file.identity().ok() == Some(identity)).then_some(file)
    }
}

impl Drop for OwnedSocketFile {
    fn drop(&mut self) {
        if let Some(file) = self.file()
            && !self.give_back(&file)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(
                event = "socket-not-removed",
                path = %self.path.display(),
                %error,
                "cannot remove the socket; the next start removes it"
            );
        }
    }
}
