//! The file of a socket that somebody listens on, which goes with him.

use super::SocketFile;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The file of a socket. Dropped, it goes, unless somebody else's has taken its place or it is [left](Self::leave).
pub struct OwnFile {
    path: PathBuf,
    /// Device and inode; `None`: it is not ours.
    identity: Option<(u64, u64)>,
}

impl OwnFile {
    /// The one that has just been bound at `path`.
    #[must_use]
    pub fn bound(path: &Path, file: &SocketFile) -> Self {
        Self { path: path.to_owned(), identity: file.identity().ok() }
    }

    /// The socket that lies at `path`, if one does: another process of ours has bound it.
    #[must_use]
    pub fn inherited(path: &Path) -> Self {
        let identity = SocketFile::just_bound(path).and_then(|file| file.identity()).ok();
        Self { path: path.to_owned(), identity }
    }

    /// Somebody else has bound it, and it stays.
    #[must_use]
    pub const fn somebody_elses(path: PathBuf) -> Self {
        Self { path, identity: None }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It stays, for who listens there next. False if it has been somebody else's.
    pub const fn leave(&mut self) -> bool {
        self.identity.take().is_some()
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        let (path, Some(ours)) = (&self.path, self.identity) else { return };
        let there = fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
        if there.is_ok_and(|there| there == ours)
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(event = "socket-not-removed", path = %path.display(), %error, "could not remove the socket; the next start will");
        }
    }
}
