//! Where the server listens.
//!
//! **Unix sockets** have mode 0660 from the first instant and, on request, a group. A socket file at the path is
//! replaced only if nobody answers on it, anything else there is left alone; two servers that start at once are kept
//! apart by a lock on the directory, which leaves nothing behind. The file is removed at the end if it is still ours.
//!
//! **TCP** has no encryption and no authentication here, so any address but a loopback one is refused unless that was
//! asked for in so many words.

use crate::socket_file::SocketFile;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// A place to listen on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// A unix socket.
    Unix {
        /// Where; its directory must exist.
        path: PathBuf,
        /// Group that may connect; the process' own if `None`.
        group: Option<u32>,
    },
    /// TCP without encryption.
    Tcp {
        /// Where; port 0 takes any free one.
        address: SocketAddr,
        /// Addresses other than loopback are allowed: anybody who reaches them can read and write the volumes.
        anywhere: bool,
    },
}

/// A place that is listened on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Bound {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address with its actual port.
    Tcp(SocketAddr),
}

/// Why a place cannot be listened on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// TCP beyond this machine was not allowed.
    #[error("{0} is not a loopback address, and NBD without TLS lets anybody who reaches it read and write")]
    NotLoopback(SocketAddr),
    /// Somebody listens there.
    #[error("{0} is in use by another server")]
    InUse(Bound),
    /// The path holds something that is not a socket.
    #[error("{} exists and is not a socket", .0.display())]
    NotSocket(PathBuf),
    /// No socket can have this path.
    #[error("{} is too long for a socket: {} bytes, of which a path may have {PATH_MAX}", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// Nothing is there to put the socket in.
    #[error("the directory {} of the socket does not exist; make it first", .0.display())]
    NoDirectory(PathBuf),
    /// The system refused.
    #[error("could not listen on {bound}: {step}")]
    System {
        /// Where.
        bound: Bound,
        /// Doing what.
        step: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// A listening socket. Dropped, it takes its file with it.
pub(crate) struct Listening {
    pub(crate) fd: OwnedFd,
    pub(crate) bound: Bound,
    /// Device and inode of the socket file.
    file: Option<(u64, u64)>,
}

/// Bytes of a socket's path: `sun_path` without the zero behind it, see unix(7).
const PATH_MAX: usize = 107;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Mode of a socket file: user and group.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o660);
/// Others hold the directory's lock for an instant only.
const LOCK_LIMIT: Duration = Duration::from_secs(5);

impl Endpoint {
    pub(crate) fn listen(&self) -> Result<Listening, ListenError> {
        match self {
            Self::Unix { path, group } => listen_unix(path, *group),
            Self::Tcp { address, anywhere } => listen_tcp(*address, *anywhere),
        }
    }
}

fn listen_tcp(address: SocketAddr, anywhere: bool) -> Result<Listening, ListenError> {
    if !anywhere && !address.ip().to_canonical().is_loopback() {
        return Err(ListenError::NotLoopback(address));
    }
    let failed = |step| move |source| ListenError::System { bound: Bound::Tcp(address), step, source };
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse(Bound::Tcp(address)),
        _ => failed("bind")(error),
    })?;
    // A connection may be gone again between the poll and the accept, which must then not block.
    listener.set_nonblocking(true).map_err(failed("make it non-blocking"))?;
    let bound = Bound::Tcp(listener.local_addr().map_err(failed("ask for its address"))?);
    Ok(Listening { fd: listener.into(), bound, file: None })
}

fn listen_unix(path: &Path, group: Option<u32>) -> Result<Listening, ListenError> {
    let bound = Bound::Unix(path.to_owned());
    let failed = |step| {
        let bound = bound.clone();
        move |error: Errno| ListenError::System { bound, step, source: error.into() }
    };
    if path.as_os_str().len() > PATH_MAX {
        return Err(ListenError::TooLong(path.to_owned()));
    }
    let address = SocketAddrUnix::new(path).map_err(failed("use the path"))?;
    let _lock = lock_directory(path, &bound)?;
    remove_stale(path, &address, &bound)?;

    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(failed("make a socket"))?;
    // The file that bind makes takes its mode from the socket, less the umask: it is never open to more than this.
    rustix::fs::fchmod(&fd, SOCKET_MODE).map_err(failed("set the socket's mode"))?;
    rustix::net::bind(&fd, &address).map_err(|error| match error {
        Errno::ADDRINUSE => ListenError::InUse(bound.clone()),
        _ => failed("bind")(error),
    })?;
    let refused = |step| {
        let bound = bound.clone();
        move |source| ListenError::System { bound, step, source }
    };
    let file = SocketFile::just_bound(path).map_err(refused("look at its file"))?;
    let listening = Listening { fd, bound: bound.clone(), file: file.identity().ok() };
    if let Some(group) = group {
        file.set_group(group).map_err(refused("give the socket its group"))?;
    }
    // After the group, so that no other group has it for an instant; and against the umask.
    file.set_mode(SOCKET_MODE).map_err(refused("set the file's mode"))?;
    rustix::net::listen(&listening.fd, BACKLOG).map_err(failed("listen"))?;
    Ok(listening)
}

/// Keeps other servers from looking and replacing in the same directory meanwhile.
fn lock_directory(path: &Path, bound: &Bound) -> Result<OwnedFd, ListenError> {
    let failed = |error: Errno| ListenError::System {
        bound: bound.clone(),
        step: "lock its directory",
        source: error.into(),
    };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => ListenError::NoDirectory(directory.to_owned()),
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

/// Removes a socket file on which nobody answers.
fn remove_stale(path: &Path, address: &SocketAddrUnix, bound: &Bound) -> Result<(), ListenError> {
    let system = |step, source| ListenError::System { bound: bound.clone(), step, source };
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Err(ListenError::NotSocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system("look at what is there", error)),
    }
    // Non-blocking: a server with a full backlog is a server, and must not hold us up.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| system("make a socket", error.into()))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(|error| system("remove the stale socket", error))
        }
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(bound.clone())),
        Err(error) => Err(system("ask whether somebody answers there", error.into())),
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let (Bound::Unix(path), Some(ours)) = (&self.bound, self.file) else { return };
        let there = fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
        if there.is_ok_and(|there| there == ours)
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(event = "socket-not-removed", path = %path.display(), %error, "could not remove the socket; the next start will");
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn unix(path: &Path) -> Result<Listening, ListenError> {
        Endpoint::Unix { path: path.to_owned(), group: None }.listen()
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

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "closing leaves the file");
        let listening = unix(&path).expect("nobody answers");
        assert!(matches!(unix(&path), Err(ListenError::InUse(_))));
        UnixStream::connect(&path).expect("the first is unharmed");
        drop(listening);
    }

    #[test]
    fn what_is_not_a_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nbd.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(unix(&path), Err(ListenError::NotSocket(_))));
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
            told.ends_with("is too long for a socket: 205 bytes, of which a path may have 107"),
            "{told}"
        );
        let directory = tempfile::tempdir().unwrap();
        let longest = "y".repeat(PATH_MAX - directory.path().as_os_str().len() - 1);
        unix(&directory.path().join(longest)).expect("the longest path of all");
        let missing = directory.path().join("no");
        let told = unix(&missing.join("such")).map(drop).unwrap_err().to_string();
        let wanted =
            format!("the directory {} of the socket does not exist; make it first", missing.display());
        assert_eq!(told, wanted);
    }

    #[test]
    fn tcp_is_for_this_machine_unless_said_otherwise() {
        for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
            let endpoint = Endpoint::Tcp { address: address.parse().unwrap(), anywhere: false };
            assert!(matches!(endpoint.listen(), Err(ListenError::NotLoopback(_))), "{address}");
        }
        let address = "127.0.0.1:0".parse().unwrap();
        let listening = Endpoint::Tcp { address, anywhere: false }.listen().unwrap();
        let Bound::Tcp(bound) = listening.bound else { panic!("TCP") };
        assert_ne!(bound.port(), 0);
        let again = Endpoint::Tcp { address: bound, anywhere: false };
        assert!(matches!(again.listen(), Err(ListenError::InUse(_))));
    }
}
