//! The mount. It is made directly if we have the permission, otherwise by `fusermount3`. It is
//! unmounted only while the kernel reports that it is ours, so that another file system's mount is
//! never unmounted.

use crate::mountinfo::{self, MountEntry};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use thiserror::Error;

/// Why nothing was mounted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MountError {
    /// The directory does not exist.
    #[error("the directory {0} for the FUSE mount does not exist; create it first")]
    Missing(PathBuf),
    /// The path is not a directory.
    #[error("{0} is not a directory, so nothing can be mounted there")]
    NotDirectory(PathBuf),
    /// The mount would hide the directory's contents.
    #[error("the directory {0} for the FUSE mount is not empty; name an empty one")]
    NotEmpty(PathBuf),
    /// Another daemon, which is running, is mounted there.
    #[error("{0} is the FUSE mount of another running bcached; name another directory, or stop that bcached")]
    InUse(PathBuf),
    /// The kernel has no FUSE, or the container lacks its device.
    #[error(
        "/dev/fuse does not exist; load the kernel's module (modprobe fuse), or give the device to \
         the container"
    )]
    NoDevice,
    /// The device's mode denies access to this user.
    #[error(
        "/dev/fuse may not be opened by this user; run as root, or give it its usual mode (chmod \
         666 /dev/fuse)"
    )]
    DeviceNotPermitted,
    /// Neither this process nor the helper has the permission.
    #[error(
        "mounting at {0} is not permitted; run as root, or install fusermount3 (Debian package \
         fuse3), with which ordinary users can mount in their own directories"
    )]
    NotPermitted(PathBuf),
    /// The helper refused.
    #[error("could not mount at {directory}: {said}")]
    Helper {
        /// The directory to mount at.
        directory: PathBuf,
        /// The helper's message.
        said: String,
    },
    /// The system refused.
    #[error("could not mount at {directory}")]
    System {
        /// The directory to mount at.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A mount, which its maker has to unmount.
#[derive(Debug)]
pub(crate) struct Mount {
    directory: PathBuf,
    mounted: MountEntry,
    /// Tells whether the kernel still has the connection.
    device: OwnedFd,
}

/// The file system type of our mounts.
pub(crate) const KIND: &str = "fuse.bcached";
const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// A daemon whose mount does not answer within this time is considered alive, though it is slow or
/// stopped.
const LIVES_AFTER: Duration = Duration::from_secs(5);
/// The most stacked dead mounts that are removed; more than that indicates another fault.
const STALE_MAX: usize = 16;

impl Mount {
    /// Mounts. The returned descriptor delivers the kernel's requests.
    pub(crate) fn make(directory: &Path, allow_other: bool) -> Result<(Self, OwnedFd), MountError> {
        let system = |source: io::Error| MountError::System { directory: directory.to_owned(), source };
        let directory = &absolute(directory).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MountError::Missing(directory.to_owned()),
            io::ErrorKind::NotADirectory => MountError::NotDirectory(directory.to_owned()),
            _ => system(error),
        })?;
        clear_stale(directory)?;
        check(directory)?;
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open(DEVICE, flags, Mode::empty()).map_err(|error| match error {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => MountError::NoDevice,
            Errno::ACCESS | Errno::PERM => MountError::DeviceNotPermitted,
            error => system(error.into()),
        })?;
        let device = match mount_directly(directory, &device, allow_other) {
            Ok(()) => device,
            // Not root: the helper opens a descriptor of its own.
            Err(Errno::PERM) => mount_with_helper(directory, allow_other)?,
            Err(error) => return Err(system(error.into())),
        };
        let found = mountinfo::top(directory).and_then(|top| Ok((top, device.try_clone()?)));
        match found {
            Ok((Some(mounted), own)) if mounted.kind == KIND => {
                Ok((Self { directory: directory.clone(), mounted, device: own }, device))
            }
            // Without its mount id we would never unmount it, so it must not stay.
            found => {
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                let _: Result<(), Errno> = rustix::mount::unmount(directory, flags);
                let why =
                    found.err().unwrap_or_else(|| io::Error::other("the mount is missing after it was made"));
                Err(system(why))
            }
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Unmounts if the mount is not in use. Returns whether it is gone.
    pub(crate) fn unmount(&self) -> bool {
        if !self.is_there() {
            return true;
        }
        match rustix::mount::unmount(&self.directory, UnmountFlags::NOFOLLOW) {
            Ok(()) => true,
            Err(Errno::PERM) => ask_helper(&self.directory, &["-u", "-q"]).is_ok(),
            Err(_) => !self.is_there(),
        }
    }

    /// Disconnects the mount from its users, whose later requests fail. Returns false if that is
    /// not permitted: then the mount is at least detached, and ends once its users close it.
    pub(crate) fn cut(&self) -> bool {
        if !self.is_connected() {
            return true;
        }
        if !self.is_there() {
            // Detached by another program, and still in use.
            return self.abort();
        }
        // MNT_FORCE ends the connection, whether or not the mount is in use.
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        match rustix::mount::unmount(&self.directory, flags) {
            Ok(()) => true,
            Err(_) => {
                let aborted = self.abort();
                if let Err(said) = ask_helper(&self.directory, &["-u", "-z", "-q"]) {
                    let directory = self.directory.display();
                    tracing::warn!(event = "fuse-not-unmounted", %said, "cannot unmount {directory}");
                }
                aborted
            }
        }
    }

    /// Ends the connection through the kernel's control file, if that file system is mounted. The
    /// file belongs to the user that made the mount.
    fn abort(&self) -> bool {
        std::fs::write(format!("/sys/fs/fuse/connections/{}/abort", self.mounted.minor), "1").is_ok()
    }

    /// Whether the topmost mount at the directory is this one. False if that cannot be determined.
    /// The kernel reuses mount ids, but not that of a mount whose connection it still has.
    fn is_there(&self) -> bool {
        self.is_connected()
            && mountinfo::top(&self.directory).is_ok_and(|top| top.as_ref() == Some(&self.mounted))
    }

    fn is_connected(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.device.as_fd(), PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }
}

/// Resolves the links of a directory's path. For a dead mount only the path above it can be
/// resolved.
///
/// # Errors
/// The directory does not exist, or its path cannot be resolved.
pub fn absolute(directory: &Path) -> io::Result<PathBuf> {
    if let Ok(path) = directory.canonicalize() {
        return Ok(path);
    }
    let directory = std::path::absolute(directory)?;
    match (directory.parent(), directory.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Unmounts what dead daemons have left at `directory`, a path without links. Does nothing if there
/// is no such mount.
///
/// # Errors
/// Unmounting is not permitted, or the daemon of a mount is alive.
pub fn clear_stale(directory: &Path) -> Result<(), MountError> {
    let system = |source| MountError::System { directory: directory.to_owned(), source };
    for _ in 0..STALE_MAX {
        match mountinfo::top(directory).map_err(system)? {
            Some(top) if top.kind == KIND => {}
            _ => return Ok(()),
        }
        if !is_dead(directory) {
            return Err(MountError::InUse(directory.to_owned()));
        }
        let path = directory.display();
        tracing::warn!(event = "fuse-stale", "unmounting {path}, which a dead daemon left behind");
        match rustix::mount::unmount(directory, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::PERM) => ask_helper(directory, &["-u", "-z", "-q"])
                .map_err(|said| MountError::Helper { directory: directory.to_owned(), said })?,
            Err(error) => return Err(system(error.into())),
        }
    }
    Err(MountError::InUse(directory.to_owned()))
}

/// Whether the daemon of a mount is dead. A separate thread asks, because a stopped daemon would
/// keep it waiting.
fn is_dead(directory: &Path) -> bool {
    let (tell, told) = mpsc::channel();
    let directory = directory.to_owned();
    let ask = move || {
        let state = std::fs::metadata(directory).map(drop).map_err(|error| error.raw_os_error());
        // After the timeout the receiver is gone.
        let _: Result<(), _> = tell.send(state);
    };
    if std::thread::Builder::new().name("fuse-stale".to_owned()).spawn(ask).is_err() {
        return false;
    }
    let dead = [Errno::NOTCONN, Errno::CONNABORTED].map(|errno| Some(errno.raw_os_error()));
    matches!(told.recv_timeout(LIVES_AFTER), Ok(Err(errno)) if dead.contains(&errno))
}

fn check(directory: &Path) -> Result<(), MountError> {
    let system = |source: io::Error| MountError::System { directory: directory.to_owned(), source };
    let found = std::fs::metadata(directory).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MountError::Missing(directory.to_owned()),
        io::ErrorKind::NotADirectory => MountError::NotDirectory(directory.to_owned()),
        _ => system(error),
    })?;
    if !found.is_dir() {
        return Err(MountError::NotDirectory(directory.to_owned()));
    }
    if std::fs::read_dir(directory).map_err(system)?.next().is_some() {
        return Err(MountError::NotEmpty(directory.to_owned()));
    }
    Ok(())
}

fn mount_directly(directory: &Path, device: &OwnedFd, allow_other: bool) -> Result<(), Errno> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // The mode says only that it is a directory; the kernel checks permissions.
    let mut options = format!(
        "fd={},rootmode=40000,user_id={user},group_id={group},default_permissions",
        device.as_raw_fd()
    );
    if allow_other {
        options.push_str(",allow_other");
    }
    let options = CString::new(options).map_err(|_| Errno::INVAL)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    rustix::mount::mount("bcached", directory, KIND, flags, options.as_c_str())
}

/// The helper sends the descriptor over a socket, which it gets as its standard input. So no other
/// program that is started meanwhile inherits the socket.
fn mount_with_helper(directory: &Path, allow_other: bool) -> Result<OwnedFd, MountError> {
    let system = |source: io::Error| MountError::System { directory: directory.to_owned(), source };
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|error| system(error.into()))?;
    let mut options = "nosuid,nodev,noatime,default_permissions,fsname=bcached,subtype=bcached".to_owned();
    if allow_other {
        options.push_str(",allow_other");
    }
    let mut helper = Command::new(HELPER);
    helper.arg("-o").arg(options).arg("--").arg(directory);
    helper.env("_FUSE_COMMFD", "0").stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = helper.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MountError::NotPermitted(directory.to_owned()),
        _ => system(error),
    })?;
    // Close our copy of its end, so that the helper's death is noticed.
    drop(helper);
    let received = receive(&ours);
    let output = child.wait_with_output().map_err(system)?;
    match received {
        Ok(Some(device)) => Ok(device),
        Err(error) if output.status.success() => Err(system(error)),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(MountError::Helper { directory: directory.to_owned(), said })
        }
    }
}

fn receive(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut slices = [io::IoSliceMut::new(&mut byte)];
    recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let received = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(received)
}

/// Runs the helper. Returns its message if it fails.
fn ask_helper(directory: &Path, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(HELPER).args(arguments).arg("--").arg(directory).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("{HELPER}: {error}")),
    }
}
