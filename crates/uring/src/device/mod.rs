//! A block device or a regular file as the operating system has it: opened, measured and claimed.
//!
//! The claim (one owner: the kernel, one bcached, or one offline tool) lasts as long as the value:
//! - block devices are opened with `O_EXCL`, which the kernel refuses while they are mounted, swap,
//!   part of md, LVM or multipath, registered with its bcache, or claimed by another process. A
//!   claimed partition also blocks claims on its disk. No lasting `flock`: udev would miss events.
//! - files carry a lock of the open file description: exclusive for [`Access::Own`], else shared.
//!
//! Both are bound to the device, not to its name: the same device by two paths is refused, also
//! within one process. [`Access::Look`] claims nothing and ignores other claims.
//!
//! `O_DIRECT` is used where supported, else (tmpfs) the page cache; see [`Device::is_direct`].

mod abilities;
pub mod claim;
mod error;
mod holders;
mod limits;
mod offline;
mod presence;
mod shrink;

pub use error::{DeviceError, DeviceErrorKind};
pub use holders::Holder;
pub use presence::DevicePresence;

use crate::ioctl::{LockMode, LockRange};
use bcached_env::DiskInfo;
use claim::{DeviceClaim, WriteLock};
use limits::DeviceLimits;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use shrink::ShrinkLatch;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What the opener is going to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read only, claim nothing: `show` works on a device in use, which may change meanwhile.
    Look,
    /// Read only, and lock out writers: `check`, `dump`.
    Check,
    /// Read and write, exclusively.
    Own,
}

/// The two kinds of device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// A block device.
    Block,
    /// A regular file.
    File,
}

/// Which device it is, whatever path led there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DeviceIdentity {
    /// A block device: its number.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A file: its file system's number and its inode.
    File {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
}

impl DeviceIdentity {
    /// Returns the block device with a number as sysfs writes it: `8:1`.
    #[must_use]
    pub fn of_block(number: &str) -> Option<Self> {
        let (major, minor) = number.trim().split_once(':')?;
        Some(Self::Block { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    /// Returns the file under a loop device, if it is one and the file is visible from here.
    #[must_use]
    pub fn file_beneath(self) -> Option<PathBuf> {
        let Self::Block { major, minor } = self else { return None };
        let path = std::fs::read_to_string(limits::sysfs(major, minor).join("loop/backing_file")).ok()?;
        Some(PathBuf::from(path.trim_end_matches('\n')))
    }
}

/// An opened device and, unless it was opened to look, the claim on it.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    file: File,
    kind: DeviceKind,
    identity: DeviceIdentity,
    access: Access,
    sectors: AtomicU64,
    volatile_cache: bool,
    fua: bool,
    optimal_io_sectors: u64,
    partial_stripes_expensive: bool,
    direct: AtomicBool,
    logical_block_sectors: AtomicU32,
    /// Memory alignment that the device requires, in bytes; a power of two.
    memory_alignment: AtomicUsize,
    discard: AtomicBool,
    zero_range: AtomicBool,
    unmap: AtomicBool,
    dsync: AtomicBool,
    submits_slowly: bool,
    in_memory: bool,
    shrunk: ShrinkLatch,
    presence: DevicePresence,
    /// The right to write; declared before the claim, so that it is released first.
    #[allow(dead_code, reason = "held, not used")]
    writing: Option<WriteLock>,
    #[allow(dead_code, reason = "held, not used")]
    claim: Option<Arc<DeviceClaim>>,
}

impl DeviceIdentity {
    /// Returns the identity of the block device or file at `path`, if there is one.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        holders::identity_of(path)
    }

    /// Returns the users of the device, as far as visible: mounts, swap, devices stacked on it,
    /// else processes. The kernel's bcache is not counted as a user of its volumes.
    #[must_use]
    pub fn users(self) -> Vec<Holder> {
        holders::find_users(self)
    }
}

impl Device {
    /// Checks whether this process could open the device at `path` for writing, without opening it:
    /// closing a disk that was open for writing makes udev probe it, and other rules act on that.
    ///
    /// # Errors
    /// It is read-only, or this process may not write to it.
    pub fn may_own(path: impl AsRef<Path>) -> Result<(), DeviceError> {
        let path = path.as_ref();
        let failed = |kind| DeviceError { path: path.to_owned(), kind };
        let (_, identity) = identify(path).map_err(failed)?;
        if limits::is_read_only(identity) {
            return Err(failed(DeviceErrorKind::ReadOnly));
        }
        rustix::fs::access(path, rustix::fs::Access::WRITE_OK).map_err(|errno| {
            failed(match errno {
                Errno::ROFS => DeviceErrorKind::ReadOnly,
                errno => DeviceErrorKind::from_errno("write", errno),
            })
        })
    }

    /// Opens and claims the device; waits up to 5 s for a claim without a known live holder.
    ///
    /// # Errors
    /// Nothing is claimed then. If the device is in use, the error names its visible holders.
    pub fn open(path: impl AsRef<Path>, access: Access) -> Result<Self, DeviceError> {
        let path = path.as_ref();
        let failed = |kind| DeviceError { path: path.to_owned(), kind };
        let (kind, identity) = identify(path).map_err(failed)?;
        // Linux lets a read-only device be opened for writing and fails the writes.
        if access == Access::Own && limits::is_read_only(identity) {
            return Err(failed(DeviceErrorKind::ReadOnly));
        }
        let inherited = claim::inherited(identity, access).map_err(failed)?;
        let opened = match &inherited {
            Some(claim) => claim.open(),
            None => open_unless_dying(path, kind, access, identity),
        };
        let (file, direct) = opened.map_err(|errno| {
            failed(match errno {
                Errno::BUSY => busy(holders::find(identity)),
                Errno::ROFS => DeviceErrorKind::ReadOnly,
                errno => DeviceErrorKind::from_errno("open", errno),
            })
        })?;
        // The path may lead elsewhere since the first check; what was opened counts.
        let opened =
            rustix::fs::fstat(&file).map_err(|errno| failed(DeviceErrorKind::from_errno("stat", errno)))?;
        if classify(&opened).map_err(failed)? != (kind, identity) {
            return Err(failed(DeviceErrorKind::Changed));
        }
        let claim = match inherited {
            Some(claim) => Some(claim),
            None => claim_device(&file, (kind, identity), access).map_err(failed)?,
        };
        let writing = claim::may_write(&file, access).map_err(failed)?;
        let limits = DeviceLimits::of(&file, identity, direct).map_err(failed)?;
        Ok(Self { writing, claim, ..Self::new(path.to_owned(), file, (kind, identity), access, &limits) })
    }

    fn new(
        path: PathBuf,
        file: File,
        (kind, identity): (DeviceKind, DeviceIdentity),
        access: Access,
        limits: &DeviceLimits,
    ) -> Self {
        let file_system = if kind == DeviceKind::File { file_system(&file) } else { None };
        let submits_slowly =
            kind == DeviceKind::File && !file_system.is_some_and(|kind| NEVER_BLOCK.contains(&kind));
        Self {
            path,
            file,
            kind,
            identity,
            access,
            sectors: AtomicU64::new(limits.sectors),
            volatile_cache: limits.volatile_cache,
            fua: limits.fua,
            optimal_io_sectors: limits.optimal_io_sectors,
            partial_stripes_expensive: limits.partial_stripes_expensive,
            direct: AtomicBool::new(limits.direct),
            logical_block_sectors: AtomicU32::new(limits.logical_block_sectors),
            memory_alignment: AtomicUsize::new(limits.memory_alignment),
            discard: AtomicBool::new(limits.discard),
            zero_range: AtomicBool::new(limits.write_zeroes),
            unmap: AtomicBool::new(limits.unmap),
            dsync: AtomicBool::new(true),
            submits_slowly,
            in_memory: file_system == Some(TMPFS),
            shrunk: ShrinkLatch::default(),
            presence: DevicePresence::of(identity),
            writing: None,
            claim: None,
        }
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Block device or file.
    #[must_use]
    pub const fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Which device it is, by whatever path.
    #[must_use]
    pub const fn identity(&self) -> DeviceIdentity {
        self.identity
    }

    /// What it was opened for.
    #[must_use]
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Returns true if I/O bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Size and abilities. `discard`, `write_zeroes` and `unmap` turn false at the first refusal.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        DiskInfo {
            sectors: self.sectors.load(Ordering::Relaxed),
            logical_block_sectors: self.logical_block_sectors.load(Ordering::Relaxed),
            volatile_cache: self.volatile_cache,
            fua: self.fua && self.is_direct() && self.dsync(),
            discard: self.discard.load(Ordering::Relaxed),
            write_zeroes: self.zeroes(false),
            unmap: self.zeroes(true),
            optimal_io_sectors: self.optimal_io_sectors,
            partial_stripes_expensive: self.partial_stripes_expensive,
        }
    }

    /// Asks for the size again (a device can grow) and returns it, in sectors.
    ///
    /// # Errors
    /// If the device does not report it; the old size stays.
    pub fn refresh(&self) -> Result<u64, DeviceError> {
        let sectors = self.capacity()?;
        self.sectors.store(sectors, Ordering::Relaxed);
        Ok(sectors)
    }

    /// Returns the current size of the device in sectors, whatever size is configured. May block.
    ///
    /// # Errors
    /// If the device does not report it.
    pub fn capacity(&self) -> Result<u64, DeviceError> {
        let bytes = limits::size(&self.file, self.kind).map_err(|kind| self.error(kind))?;
        let block = u64::from(self.logical_block_sectors.load(Ordering::Relaxed));
        Ok(bytes / crate::prepared_op::SECTOR / block * block)
    }

    /// Sets the reported size: as measured, or as much as is needed (it may then shrink to that).
    pub fn count_on(&self, sectors: u64) {
        self.sectors.store(sectors, Ordering::Relaxed);
    }

    /// Ensures that blocks of `sectors` can be read and written individually. A file on a disk with
    /// larger blocks leaves `O_DIRECT` for that; a block device cannot.
    ///
    /// # Errors
    /// [`DeviceErrorKind::BlockTooLarge`] if the device's own blocks are larger.
    pub fn require_blocks(&self, sectors: u32) -> Result<(), DeviceError> {
        let found = self.logical_block_sectors.load(Ordering::Relaxed);
        if found <= sectors {
            return Ok(());
        }
        if self.kind == DeviceKind::Block {
            return Err(self.error(DeviceErrorKind::BlockTooLarge { found, wanted: sectors }));
        }
        let failed = |errno| self.error(DeviceErrorKind::from_errno("turn off O_DIRECT for", errno));
        let flags = rustix::fs::fcntl_getfl(&self.file).map_err(failed)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT).map_err(failed)?;
        self.direct.store(false, Ordering::Relaxed);
        self.memory_alignment.store(1, Ordering::Relaxed);
        self.logical_block_sectors.store(1, Ordering::Relaxed);
        self.refresh().map(drop)
    }

    /// Keeps udev from probing the block device until the guard is dropped: for `make`, `convert`
    /// and `repair` only, since a lasting one would make udev miss events. Does nothing on files.
    ///
    /// # Errors
    /// The lock is held: by udev itself (for moments) or another formatter.
    pub fn quiet_udev(&self) -> Result<UdevLock<'_>, DeviceError> {
        if self.kind == DeviceKind::Block {
            let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
            rustix::fs::flock(&self.file, operation).map_err(|errno| {
                self.error(match errno {
                    Errno::AGAIN => DeviceErrorKind::Busy(holders::find_lockers(self.identity)),
                    errno => DeviceErrorKind::from_errno("flock", errno),
                })
            })?;
        }
        Ok(UdevLock { device: self })
    }

    pub(crate) fn error(&self, kind: DeviceErrorKind) -> DeviceError {
        DeviceError { path: self.path.clone(), kind }
    }
}

/// While it lives, udev leaves the device alone.
#[derive(Debug)]
#[must_use = "dropping it lets udev in"]
pub struct UdevLock<'a> {
    device: &'a Device,
}

impl Drop for UdevLock<'_> {
    fn drop(&mut self) {
        if self.device.kind == DeviceKind::Block {
            // Closing the device would unlock it as well, so a failure is ignored.
            let _ = rustix::fs::flock(&self.device.file, rustix::fs::FlockOperation::Unlock);
        }
    }
}

/// What the drivers ask.
impl Device {
    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.access == Access::Own
    }

    /// Returns true if the device can transfer to or from this memory as it lies.
    pub(crate) fn takes(&self, memory: &[u8]) -> bool {
        memory.as_ptr().addr() & (self.memory_alignment.load(Ordering::Relaxed) - 1) == 0
    }

    /// Returns true if the device accepts request memory of our block devices: aligned to sectors.
    pub(crate) fn takes_lent(&self) -> bool {
        self.memory_alignment.load(Ordering::Relaxed) as u64 <= crate::prepared_op::SECTOR
    }

    /// Returns where to continue after `got` bytes were transferred at `done` towards `target`, if
    /// possible. Direct transfers continue at a block: a partly transferred one is repeated.
    pub(crate) fn advance(&self, done: usize, got: usize, target: usize) -> Option<usize> {
        let reached = done.checked_add(got).filter(|reached| *reached <= target)?;
        if reached == target {
            return Some(reached);
        }
        let block = self.logical_block_sectors.load(Ordering::Relaxed);
        let block = usize::try_from(u64::from(block) * crate::prepared_op::SECTOR).ok()?;
        let next = if self.is_direct() { reached / block * block } else { reached };
        (next > done).then_some(next)
    }

    /// Returns true if a ring must hand operations on this device to its workers at once: the file
    /// system blocks regardless (FUSE, network), and one that hangs would stop every other device.
    pub(crate) const fn submits_slowly(&self) -> bool {
        self.submits_slowly
    }

    /// Returns true if a transfer is a memory copy, faster than the hops to and from a worker.
    pub(crate) const fn in_memory(&self) -> bool {
        self.in_memory
    }
}

/// tmpfs, from `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;

/// File systems known to honour non-blocking submission: ext4, XFS, btrfs and tmpfs.
const NEVER_BLOCK: [u64; 4] = [0xEF53, 0x5846_5342, 0x9123_683E, TMPFS];

fn file_system(file: &File) -> Option<u64> {
    let found = rustix::fs::fstatfs(file).ok()?;
    u64::try_from(found.f_type).ok()
}

/// Returns what `path` leads to, before it is opened: opening a FIFO would block.
fn identify(path: &Path) -> Result<(DeviceKind, DeviceIdentity), DeviceErrorKind> {
    let stat = rustix::fs::stat(path).map_err(|errno| DeviceErrorKind::from_errno("find", errno))?;
    classify(&stat)
}

fn classify(stat: &rustix::fs::Stat) -> Result<(DeviceKind, DeviceIdentity), DeviceErrorKind> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => {
            let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            Ok((DeviceKind::Block, DeviceIdentity::Block { major, minor }))
        }
        FileType::RegularFile => {
            Ok((DeviceKind::File, DeviceIdentity::File { device: stat.st_dev, inode: stat.st_ino }))
        }
        FileType::Directory => Err(DeviceErrorKind::NotADevice("a directory")),
        FileType::CharacterDevice => Err(DeviceErrorKind::NotADevice("a character device")),
        FileType::Fifo => Err(DeviceErrorKind::NotADevice("a pipe")),
        FileType::Socket => Err(DeviceErrorKind::NotADevice("a socket")),
        _ => Err(DeviceErrorKind::NotADevice("of an unknown type")),
    }
}

/// Opens with `O_DIRECT` if possible, and returns whether it was.
fn open_file(path: &Path, kind: DeviceKind, access: Access) -> Result<(File, bool), Errno> {
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
    flags |= if access == Access::Own { OFlags::RDWR } else { OFlags::RDONLY };
    if kind == DeviceKind::Block && access != Access::Look {
        flags |= OFlags::EXCL;
    }
    open_direct(path, flags)
}

fn open_direct(path: &Path, flags: OFlags) -> Result<(File, bool), Errno> {
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Err(Errno::INVAL | Errno::OPNOTSUPP) => {
            rustix::fs::open(path, flags, Mode::empty()).map(|file| (file.into(), false))
        }
        other => other.map(|file| (file.into(), true)),
    }
}

/// Claims what was opened for as long as that is kept, unless it is opened to look.
fn claim_device(
    file: &File,
    (kind, identity): (DeviceKind, DeviceIdentity),
    access: Access,
) -> Result<Option<Arc<DeviceClaim>>, DeviceErrorKind> {
    claim_file(file, kind, identity, access)?;
    let beneath = claim_beneath(identity, access)?;
    if access == Access::Look {
        return Ok(None);
    }
    let same = file.try_clone().map_err(|error| {
        DeviceErrorKind::from_errno("keep open", Errno::from_io_error(&error).unwrap_or(Errno::MFILE))
    })?;
    Ok(Some(DeviceClaim::new(same, beneath)))
}

/// Locks a file against other owners, and refuses one that is under a loop device.
fn claim_file(
    file: &File,
    kind: DeviceKind,
    identity: DeviceIdentity,
    access: Access,
) -> Result<(), DeviceErrorKind> {
    let lock = match (kind, access) {
        (DeviceKind::Block, _) | (_, Access::Look) => return Ok(()),
        (DeviceKind::File, Access::Check) => LockMode::Shared,
        (DeviceKind::File, Access::Own) => LockMode::Exclusive,
    };
    match lock_unless_dying(file, lock, identity) {
        Ok(()) => {}
        Err(Errno::AGAIN | Errno::ACCESS) => return Err(busy(holders::find_lockers(identity))),
        Err(errno) => return Err(DeviceErrorKind::from_errno("lock", errno)),
    }
    let loops = holders::find_loops(identity);
    if loops.is_empty() { Ok(()) } else { Err(busy(loops)) }
}

/// Opens; waits for a block device if only an exiting process seems to have claimed it.
fn open_unless_dying(
    path: &Path,
    kind: DeviceKind,
    access: Access,
    identity: DeviceIdentity,
) -> Result<(File, bool), Errno> {
    let is_free_soon = |errno| errno == Errno::BUSY && holders::are_dying(&holders::find(identity));
    with_patience(|| open_file(path, kind, access), is_free_soon)
}

/// Locks a file; waits if only an exiting process seems to have locked it.
fn lock_unless_dying(file: &File, lock: LockMode, identity: DeviceIdentity) -> Result<(), Errno> {
    let is_free_soon = |errno| {
        matches!(errno, Errno::AGAIN | Errno::ACCESS) && holders::are_dying(&holders::find_lockers(identity))
    };
    with_patience(|| crate::ioctl::lock(file, lock, LockRange::All), is_free_soon)
}

/// Retries for a while if `is_free_soon` says so of the error. A killed process keeps its claims
/// and locks until its last operations have ended, some time after it is gone from every list.
fn with_patience<T>(
    attempt: impl Fn() -> Result<T, Errno>,
    is_free_soon: impl Fn(Errno) -> bool,
) -> Result<T, Errno> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(200);
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(errno) if Instant::now() < until && is_free_soon(errno) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
}

/// Devices beneath a device that are claimed with it: a hand-over message holds these and it.
const BENEATH_MAX: usize = 7;

/// Claims what is beneath a loop device, recursively, as if it were named: daemons on the loop
/// device and on its file share the data. What is unreachable here cannot conflict here.
fn claim_beneath(mut identity: DeviceIdentity, access: Access) -> Result<Vec<File>, DeviceErrorKind> {
    let mut claimed = Vec::new();
    if access == Access::Look {
        return Ok(claimed);
    }
    while let Some(path) = identity.file_beneath().filter(|_| claimed.len() < BENEATH_MAX) {
        let Ok((kind, beneath)) = identify(&path) else { break };
        let file = match kind {
            DeviceKind::Block => claim_block_beneath(&path, beneath, access)?,
            DeviceKind::File => lock_file_beneath(&path, access)?,
        };
        claimed.extend(file);
        identity = beneath;
    }
    Ok(claimed)
}

fn claim_block_beneath(
    path: &Path,
    beneath: DeviceIdentity,
    access: Access,
) -> Result<Option<File>, DeviceErrorKind> {
    match open_unless_dying(path, DeviceKind::Block, access, beneath) {
        Ok((file, _)) => Ok(Some(file)),
        Err(Errno::BUSY) => Err(busy(holders::find(beneath))),
        Err(_) => Ok(None),
    }
}

fn lock_file_beneath(path: &Path, access: Access) -> Result<Option<File>, DeviceErrorKind> {
    let lock = if access == Access::Own { LockMode::Exclusive } else { LockMode::Shared };
    let file = File::options().read(true).write(access == Access::Own).open(path).ok();
    let Some(file) = file else { return Ok(None) };
    let found = rustix::fs::fstat(&file).map_err(|errno| DeviceErrorKind::from_errno("stat", errno))?;
    let (_, beneath) = classify(&found)?;
    match lock_unless_dying(&file, lock, beneath) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::AGAIN | Errno::ACCESS) => Err(busy(holders::find_lockers(beneath))),
        // A file system without locks: no other process has one there either.
        Err(_) => Ok(None),
    }
}

/// In use, or given twice if the holder is this process.
fn busy(holders: Vec<Holder>) -> DeviceErrorKind {
    let own = std::process::id();
    if holders.iter().any(|holder| matches!(holder, Holder::Process { id, .. } if *id == own)) {
        return DeviceErrorKind::Twice;
    }
    DeviceErrorKind::Busy(holders)
}
