//! Listening unix sockets for front ends.
//!
//! They have mode 0660 from the first instant and, on request, a group. A socket file at the path
//! is replaced only if no server answers on it; anything else there is left alone. A lock on the
//! directory, which leaves nothing behind, serialises two servers that start at once. The file is
//! removed at the end if it is still ours.

mod file;
pub mod inherited;
mod own;
mod passed;

pub use file::SocketFile;
pub use own::{FileId, OwnedSocketFile, SocketOwner};
pub use passed::{ListenAddress, PassedSocket, PassedSocketError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why there is no socket at a path.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Another server listens there.
    #[error("{} is in use by another server", .0.display())]
    InUse(PathBuf),
    /// The path holds something that is not a socket.
    #[error("{} exists and is not a socket; move it away, or name another path", .0.display())]
    NotSocket(PathBuf),
    /// The path is too long for a socket.
    #[error(
        "{} is too long for a socket: the path has {} bytes, the limit is {PATH_MAX}",
        .0.display(), .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    /// The directory for the socket does not exist.
    #[error("the directory {} of the socket does not exist; create it first", .0.display())]
    NoDirectory(PathBuf),
    /// It may not have the requested group.
    #[error(
        "{} cannot be given its group: only root (CAP_CHOWN) and members of the group may do that",
        .0.display()
    )]
    Group(PathBuf),
    /// The system refused.
    #[error("cannot listen on {}: cannot {step}", .path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// Doing what.
        step: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// A listening socket; accepting from it does not block. Its file is removed when it is dropped.
pub struct SocketListener {
    fd: OwnedFd,
    file: OwnedSocketFile,
}

/// Bytes in a socket's path: `sun_path` without the terminating zero, see unix(7).
pub const PATH_MAX: usize = 107;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Mode of a socket file: user and group.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o660);
/// Others hold the directory's lock for an instant only.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

impl SocketListener {
    /// Listens at `path`, for this user and `group`. With `None`, the group is the process's own; a
    /// socket from the previous process keeps its group.
    ///
    /// # Errors
    /// [`SocketError`]; nothing is left behind then.
    pub fn on(path: &Path, group: Option<u32>) -> Result<Self, SocketError> {
        let refused = |step| move |source| SocketError::System { path: path.to_owned(), step, source };
        let failed = |step| move |error: Errno| refused(step)(error.into());
        if path.as_os_str().len() > PATH_MAX {
            return Err(SocketError::TooLong(path.to_owned()));
        }
        let address = SocketAddrUnix::new(path).map_err(failed("use the path"))?;
        if let Some((fd, identity)) = inherited::take_unix(path) {
            // If anything fails from here on, the previous process continues to listen there.
            let listening = Self { fd, file: OwnedSocketFile::inherited(path, identity) };
            match listening.file.file() {
                Some(file) => give(&file, group, path)?,
                // Clients that have already connected are served.
                None => {
                    tracing::warn!(
                        event = "socket-gone",
                        path = %path.display(),
                        "clients cannot reach the socket: its file was removed or replaced"
                    );
                }
            }
            return Ok(listening);
        }
        let _lock = lock_directory(path)?;
        remove_stale(path, &address)?;

        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(failed("create a socket"))?;
        // The file that bind creates takes its mode from the socket, less the umask, so it is never
        // more open than this.
        rustix::fs::fchmod(&fd, SOCKET_MODE).map_err(failed("set the socket's mode"))?;
        rustix::net::bind(&fd, &address).map_err(|error| match error {
            Errno::ADDRINUSE => SocketError::InUse(path.to_owned()),
            _ => failed("bind")(error),
        })?;
        let file = SocketFile::just_bound(path).map_err(refused("check its file"))?;
        let listening = Self { fd, file: OwnedSocketFile::bound(path, &file) };
        give(&file, group, path)?;
        // After the group, so that no other group has access for an instant; and to undo the umask.
        file.set_mode(SOCKET_MODE).map_err(refused("set the file's mode"))?;
        rustix::net::listen(&listening.fd, BACKLOG).map_err(failed("listen"))?;
        Ok(listening)
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the socket for another process, which listens there from now on, and how that
    /// process identifies its file. The file stays.
    #[must_use]
    pub fn leave(mut self) -> (OwnedFd, SocketOwner) {
        let whose = self.file.leave();
        (self.fd, whose)
    }
}

impl AsFd for SocketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns true if the peer of a connection sends nothing any more, or this side was shut down.
/// Does not block.
#[must_use]
pub fn has_hung_up(connection: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(connection, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Sets the group of the socket at `path`.
fn give(file: &SocketFile, group: Option<u32>, path: &Path) -> Result<(), SocketError> {
    let Some(group) = group else { return Ok(()) };
    file.set_group(group).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => SocketError::Group(path.to_owned()),
        _ => SocketError::System { path: path.to_owned(), step: "set the socket's group", source },
    })
}

/// Keeps other servers from checking and replacing sockets in the same directory meanwhile.
fn lock_directory(path: &Path) -> Result<OwnedFd, SocketError> {
    let failed = |error: Errno| SocketError::System {
        path: path.to_owned(),
        step: "lock its directory",
        source: error.into(),
    };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => SocketError::NoDirectory(directory.to_owned()),
        _ => failed(error),
    })?;
    let deadline = Instant::now() + LOCK_LIMIT;
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(fd),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(failed(error)),
        }
    }
}

/// Removes a socket file on which no server answers.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let system = |step, source| SocketError::System { path: path.to_owned(), step, source };
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Err(SocketError::NotSocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system("check the path", error)),
    }
    // Non-blocking: a server with a full backlog is a server, and must not delay us.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| system("create a socket", error.into()))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(|error| system("remove the stale socket", error))
        }
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN) => Err(SocketError::InUse(path.to_owned())),
        Err(error) => Err(system("check whether a server answers there", error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::CapabilitySet;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::net::{UnixListener, UnixStream};

    fn unix(path: &Path) -> Result<SocketListener, SocketError> {
        SocketListener::on(path, None)
    }

    #[test]
    fn a_unix_socket_is_for_user_and_group_and_goes_with_its_server() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let listening = unix(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o660);
        UnixStream::connect(&path).unwrap();
        drop(listening);
        assert!(!path.exists());
    }

    /// Returns the group of this process, and another one that it may assign; without root there is
    /// only its own.
    fn groups() -> (u32, u32) {
        let own = rustix::process::getegid().as_raw();
        (own, own + u32::from(rustix::process::geteuid().is_root()))
    }

    /// Keeps it as the previous process passes it on, which may need it back.
    fn pass_on(before: &SocketListener) {
        let identity = before.file.file().and_then(|file| file.identity().ok());
        inherited::keep_unix(
            PassedSocket::new(before.as_fd().try_clone_to_owned().unwrap()).unwrap(),
            identity,
        );
    }

    /// The same if the previous process does not continue.
    fn leave(before: SocketListener) {
        let (fd, SocketOwner::Ours(identity)) = before.leave() else { unreachable!("it was bound here") };
        inherited::keep_unix(PassedSocket::new(fd).unwrap(), identity);
    }

    /// Regression: another file was taken for the one that was passed on, and was deleted with it.
    #[test]
    fn what_lies_in_the_place_of_a_socket_that_is_passed_on_stays() {
        let _turn = inherited::turn();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        for takes in [true, false] {
            let before = unix(&path).unwrap();
            fs::rename(&path, directory.path().join("moved.sock")).unwrap();
            let other = UnixListener::bind(&path).unwrap();
            leave(before);
            let taken = takes.then(|| unix(&path).unwrap());
            inherited::settle();
            drop(taken);
            assert!(path.exists(), "somebody else's");
            drop(other);
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn a_socket_of_the_process_before_has_the_group_that_is_said_now() {
        let _turn = inherited::turn();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let (own, other) = groups();
        let mut listening = unix(&path).unwrap();
        // The last case requests no group: the existing one may have been set on purpose.
        for (said, wanted) in [(None, own), (Some(other), other), (None, other)] {
            inherited::settle();
            leave(listening);
            listening = SocketListener::on(&path, said).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().gid(), wanted, "{said:?}");
        }
    }

    /// Regression: a process that failed to take over removed the socket of the one that continues.
    #[test]
    fn who_may_not_give_the_group_leaves_the_file_to_the_process_before() {
        let _turn = inherited::turn();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let before = unix(&path).unwrap();
        pass_on(&before);
        // Root's capability is dropped in this thread only, which ends with the test.
        let mut own = rustix::thread::capabilities(None).unwrap();
        own.effective.remove(CapabilitySet::CHOWN);
        rustix::thread::set_capabilities(None, own).unwrap();
        let other = rustix::process::getegid().as_raw() + 77;
        assert!(matches!(SocketListener::on(&path, Some(other)), Err(SocketError::Group(_))));
        UnixStream::connect(&path).expect("the one before is there");
    }

    /// Regression: one of several sockets was unavailable, and the others were removed with it.
    #[test]
    fn who_cannot_go_on_leaves_the_files_as_they_were() {
        let _turn = inherited::turn();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let (own, other) = groups();
        let before = unix(&path).unwrap();
        let pass_on = || {
            pass_on(&before);
            SocketListener::on(&path, Some(other)).unwrap()
        };
        for ends in [drop as fn(SocketListener), |now| drop(now.leave())] {
            let now = pass_on();
            assert_eq!(fs::metadata(&path).unwrap().gid(), other);
            ends(now);
            UnixStream::connect(&path).expect("the one before is there");
            assert_eq!(fs::metadata(&path).unwrap().gid(), own, "and who could come to it can");
        }
        let now = pass_on();
        inherited::settle();
        drop(now);
        assert!(!path.exists(), "the one before does not go on");
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "closing leaves the file");
        let listening = unix(&path).expect("nobody answers");
        assert!(matches!(unix(&path), Err(SocketError::InUse(_))));
        UnixStream::connect(&path).expect("the first is unharmed");
        drop(listening);
    }

    #[test]
    fn what_is_not_a_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(unix(&path), Err(SocketError::NotSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_that_is_no_longer_ours_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        let listening = unix(&path).unwrap();
        fs::rename(&path, directory.path().join("moved.sock")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(listening);
        assert!(path.exists(), "somebody else's");
    }

    #[test]
    fn a_path_that_cannot_be_says_so() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        let told = unix(&long).map(drop).unwrap_err().to_string();
        assert!(
            told.ends_with("is too long for a socket: the path has 205 bytes, the limit is 107"),
            "{told}"
        );
        let directory = tempfile::tempdir().unwrap();
        let longest = "y".repeat(PATH_MAX - directory.path().as_os_str().len() - 1);
        unix(&directory.path().join(longest)).expect("the longest path of all");
        let missing = directory.path().join("no");
        let told = unix(&missing.join("such")).map(drop).unwrap_err().to_string();
        let wanted =
            format!("the directory {} of the socket does not exist; create it first", missing.display());
        assert_eq!(told, wanted);
    }
}
