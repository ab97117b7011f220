//! The file of a socket that somebody listens on, which goes with him.

use super::{SocketFile, inherited};
use std::fs;
use std::path::{Path, PathBuf};

/// Device and inode of a socket's file.
pub type Identity = (u64, u64);

/// The file of a socket. Dropped, it goes, unless somebody else's has taken its place, it is [left](Self::leave), or the process before may still
/// want it back.
pub struct OwnFile {
    path: PathBuf,
    whose: Whose,
    /// The group that it had when the process before has passed it on; `None`: it was bound here.
    former_group: Option<u32>,
}

/// Who has bound a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whose {
    /// This process, or one before it. `None`: its file is no more, whatever lies in its place.
    Ours(Option<Identity>),
    /// The file stays, whatever becomes of the socket.
    SomebodyElses,
}

impl OwnFile {
    /// The one that has just been bound at `path`.
    #[must_use]
    pub fn bound(path: &Path, file: &SocketFile) -> Self {
        Self { path: path.to_owned(), whose: Whose::Ours(file.identity().ok()), former_group: None }
    }

    /// That of a socket which another process of ours has bound at `path`, if it still lies there.
    #[must_use]
    pub fn inherited(path: &Path, identity: Option<Identity>) -> Self {
        let mut own = Self { path: path.to_owned(), whose: Whose::Ours(identity), former_group: None };
        let file = own.file();
        own.former_group = file.as_ref().and_then(|file| file.group().ok());
        own.whose = Whose::Ours(identity.filter(|_| file.is_some()));
        own
    }

    /// Somebody else has bound it, and it stays.
    #[must_use]
    pub const fn somebody_elses(path: PathBuf) -> Self {
        Self { path, whose: Whose::SomebodyElses, former_group: None }
    }

    /// Whether somebody else has bound it.
    #[must_use]
    pub const fn is_somebody_elses(&self) -> bool {
        matches!(self.whose, Whose::SomebodyElses)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It stays, for who listens there next: as it was, if that is the process before.
    pub fn leave(&mut self) -> Whose {
        self.file().map(|file| self.give_back(&file));
        std::mem::replace(&mut self.whose, Whose::SomebodyElses)
    }

    /// It has the group again that it had, if the process before may want it back. False: that is settled.
    fn give_back(&self, file: &SocketFile) -> bool {
        let Some(group) = self.former_group.filter(|_| !inherited::are_settled()) else { return false };
        let _as_it_was = file.set_group(group);
        true
    }

    /// What lies there, if that is still ours.
    #[must_use]
    pub fn file(&self) -> Option<SocketFile> {
        let Whose::Ours(Some(identity)) = self.whose else { return None };
        let file = SocketFile::just_bound(&self.path).ok()?;
        (file.identity().ok() == Some(identity)).then_some(file)
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
