//! The file of a socket that has just been bound, referred to by descriptor and not by name. In a
//! folder that others can write to, the name may refer to something else a moment later, such as a
//! link to a file of ours.

use super::FileId;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

/// A socket's file.
pub struct SocketFile(OwnedFd);

impl SocketFile {
    /// Opens the file at `path`, if it is a socket.
    ///
    /// # Errors
    /// It is not a socket, or the system refuses.
    pub fn just_bound(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = Self(rustix::fs::open(path, flags, Mode::empty())?);
        match FileType::from_raw_mode(file.stat()?.st_mode) {
            FileType::Socket => Ok(file),
            _ => Err(io::Error::other("another file is in its place")),
        }
    }

    fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.0)?)
    }

    /// Returns its device and inode.
    ///
    /// # Errors
    /// The system refuses.
    pub fn identity(&self) -> io::Result<FileId> {
        self.stat().map(|stat| (stat.st_dev, stat.st_ino))
    }

    /// Returns its group.
    ///
    /// # Errors
    /// The system refuses.
    pub fn group(&self) -> io::Result<u32> {
        self.stat().map(|stat| stat.st_gid)
    }

    /// Sets its group.
    ///
    /// # Errors
    /// The system refuses.
    pub fn set_group(&self, group: u32) -> io::Result<()> {
        let group = Some(Gid::from_raw(group));
        Ok(rustix::fs::chownat(&self.0, "", None, group, AtFlags::EMPTY_PATH)?)
    }

    /// Sets its mode, since the umask applies when a socket is bound.
    ///
    /// # Errors
    /// The system refuses, or has no `/proc`.
    pub fn set_mode(&self, mode: Mode) -> io::Result<()> {
        if Mode::from_raw_mode(self.stat()?.st_mode & 0o777) == mode {
            return Ok(());
        }
        // Before Linux 6.6 there is no fchmod for descriptors opened with O_PATH.
        Ok(rustix::fs::chmod(format!("/proc/self/fd/{}", self.0.as_raw_fd()), mode)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::os::unix::net::UnixListener;

    fn mode_of(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).expect("it is there").mode() & 0o777
    }

    /// Regression: a link put in place of the socket was followed, and others gained access to a
    /// file of ours.
    #[test]
    fn what_has_taken_the_place_of_a_socket_keeps_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, aside) = (folder.path().join("socket"), folder.path().join("aside"));
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "").expect("a file");
        rustix::fs::chmod(&secret, Mode::RUSR).expect("ours");
        let _listener = UnixListener::bind(&path).expect("a socket");
        let file = SocketFile::just_bound(&path).expect("it is one");
        std::fs::rename(&path, &aside).expect("ours");
        symlink(&secret, &path).expect("a link");
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP;
        file.set_mode(mode).expect("there is a /proc");
        let group_of = |path: &Path| std::fs::symlink_metadata(path).expect("it is there").gid();
        // Without root, the only group to give is its own.
        let (own, is_root) = (group_of(&secret), rustix::process::geteuid().is_root());
        let group = if is_root { own + 1 } else { own };
        file.set_group(group).expect("it may be");
        assert_eq!((group_of(&aside), group_of(&secret)), (group, own));
        assert_eq!((mode_of(&aside), mode_of(&secret)), (0o640, 0o400));
        assert!(SocketFile::just_bound(&path).is_err(), "a link is none");
        std::fs::remove_file(&path).expect("ours");
        symlink(&aside, &path).expect("a link");
        assert!(SocketFile::just_bound(&path).is_err(), "nor is a link to one");
    }
}
