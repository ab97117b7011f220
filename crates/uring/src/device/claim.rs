//! The claims of this process on devices, and their hand-over to another process.
//!
//! A claim is an open file description: `O_EXCL` of a block device, a lock of a file. It lives as
//! long as any descriptor of it, in any process. So a daemon that is being replaced passes its
//! descriptors on, and no other process can take the device in between.
//!
//! But then both processes hold the claim, and it does not say which of them may write. A second
//! lock says that: of one byte far behind the end, owned by the description that I/O is done
//! through. The process that takes over opens a description of its own. It does so through the
//! claim, so that it is the same device whatever its name refers to by now. It gets that lock only
//! when the former process has released it, or is dead **and its last operation has ended**. So of
//! two processes that both believe they own a device, one cannot open it.

use super::{Access, DeviceErrorKind, DeviceIdentity};
use crate::ioctl::{self, LockMode, LockRange};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The claim on a device. When the last copy in any process is dropped, others can claim the
/// device.
#[derive(Debug)]
pub struct DeviceClaim {
    file: File,
    /// The claims on what is beneath a loop device.
    beneath: Vec<File>,
}

#[derive(Default)]
struct ClaimTable {
    /// Claims on devices that are open, or were.
    live: Vec<Weak<DeviceClaim>>,
    /// Claims from the previous process, for the code that opens the devices here.
    inherited: Vec<InheritedClaim>,
    /// Claims still in use in this process when all others had been opened again. This process was
    /// to be replaced and continues, and its former work has not finished with them.
    kept: Vec<(DeviceIdentity, Weak<DeviceClaim>)>,
}

struct InheritedClaim {
    of: DeviceIdentity,
    claim: Arc<DeviceClaim>,
    /// It has been opened since it was inherited.
    is_opened: bool,
}

/// Process-wide, because the system sees claims per process; they are found by device identity.
static CLAIMS: Mutex<ClaimTable> =
    Mutex::new(ClaimTable { live: Vec::new(), inherited: Vec::new(), kept: Vec::new() });

impl DeviceClaim {
    pub(super) fn new(file: File, beneath: Vec<File>) -> Arc<Self> {
        let claim = Arc::new(Self { file, beneath });
        claims().remember(&claim);
        claim
    }

    /// Creates a claim from descriptors that another process has passed; that of the device comes
    /// first.
    ///
    /// # Errors
    /// They are not of a device.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> io::Result<Arc<Self>> {
        let mut descriptors = descriptors.into_iter();
        let file = descriptors.next().ok_or(io::ErrorKind::InvalidInput)?;
        let claim = Self { file: file.into(), beneath: descriptors.map(File::from).collect() };
        claim.identity().map(|_| Arc::new(claim))
    }

    /// Returns the descriptors that share the claim with another process; that of the device comes
    /// first.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(&self.file).chain(&self.beneath).map(File::as_fd).collect()
    }

    fn identity(&self) -> io::Result<DeviceIdentity> {
        let stat = rustix::fs::fstat(&self.file)?;
        super::classify(&stat).map(|(_, identity)| identity).map_err(|_| io::ErrorKind::InvalidInput.into())
    }

    /// Opens another description of the device for I/O, which claims nothing; returns it and
    /// whether it is `O_DIRECT`.
    pub(super) fn open(&self) -> Result<(File, bool), Errno> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        super::open_direct(Path::new(&path), OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::RDWR)
    }
}

/// The right to write through a description, for as long as the value lives.
#[derive(Debug)]
pub(super) struct WriteLock(File);

impl WriteLock {
    /// Takes the right for `file`'s description. Fails with `EAGAIN` if another one has it. On a
    /// file system without locks there is nothing to hand over either.
    fn of(file: &File) -> Result<Option<Self>, Errno> {
        match ioctl::lock(file, LockMode::Exclusive, LockRange::Writing) {
            Ok(()) => file.try_clone().map(|file| Some(Self(file))).map_err(|_| Errno::MFILE),
            Err(Errno::AGAIN | Errno::ACCESS) => Err(Errno::AGAIN),
            Err(_) => Ok(None),
        }
    }
}

impl Drop for WriteLock {
    /// Unlocks explicitly: the claim may live on with the same description.
    fn drop(&mut self) {
        let _it_goes_with_the_last_descriptor = ioctl::unlock(&self.0, LockRange::Writing);
    }
}

/// Takes the right to write. Waits for a former holder that passed the claim on and may be about to
/// end.
pub(super) fn may_write(file: &File, access: Access) -> Result<Option<WriteLock>, DeviceErrorKind> {
    if access != Access::Own {
        return Ok(None);
    }
    super::with_patience(|| WriteLock::of(file), |errno| errno == Errno::AGAIN).map_err(|errno| match errno {
        Errno::AGAIN => DeviceErrorKind::StillWritten,
        errno => DeviceErrorKind::from_errno("lock", errno),
    })
}

impl ClaimTable {
    fn remember(&mut self, claim: &Arc<DeviceClaim>) {
        let new = Arc::downgrade(claim);
        // A claim that went to another process and came back is known already.
        self.live.retain(|live| live.strong_count() > 0 && !live.ptr_eq(&new));
        self.live.push(new);
    }
}

fn claims() -> MutexGuard<'static, ClaimTable> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the claims of all devices that this process owns now, including those it has inherited
/// and not opened.
#[must_use]
pub fn live() -> Vec<Arc<DeviceClaim>> {
    let claims = claims();
    let mut live: Vec<_> = claims.live.iter().filter_map(Weak::upgrade).collect();
    let is_there = |claim: &Arc<DeviceClaim>| live.iter().any(|live| Arc::ptr_eq(live, claim));
    let unopened = claims.inherited.iter().map(|passed| &passed.claim).filter(|claim| !is_there(claim));
    let unopened: Vec<_> = unopened.cloned().collect();
    live.extend(unopened);
    live
}

/// Uses these claims for devices that are opened from now on, until [`settle`].
///
/// # Errors
/// One of them is no longer of a device.
pub fn inherit(passed: Vec<Arc<DeviceClaim>>) -> io::Result<()> {
    let passed =
        passed.into_iter().map(|claim| Ok(InheritedClaim { of: claim.identity()?, claim, is_opened: false }));
    let passed = passed.collect::<io::Result<Vec<_>>>()?;
    let mut claims = claims();
    // Claims in use are inherited again, and so are those left unsettled since the last time.
    claims.kept.clear();
    let is_passed = |of: DeviceIdentity| passed.iter().any(|passed| passed.of == of);
    let before: Vec<_> = claims.inherited.extract_if(.., |before| is_passed(before.of)).collect();
    claims.inherited.extend(passed);
    drop(claims);
    drop(before);
    Ok(())
}

/// Ends the inheritance: all devices that are needed have been opened. The other claims are
/// released, except those that this process itself still uses.
pub fn settle() {
    let mut claims = claims();
    let rest = std::mem::take(&mut claims.inherited);
    let in_use = rest.iter().filter(|passed| !passed.is_opened && Arc::strong_count(&passed.claim) > 1);
    let in_use: Vec<_> = in_use.map(|passed| (passed.of, Arc::downgrade(&passed.claim))).collect();
    claims.kept.extend(in_use);
    drop(claims);
    drop(rest);
}

/// Returns the inherited claim on a device that is to be opened, if there is one.
///
/// # Errors
/// This process has opened the device already, or had it before it was to be replaced and still
/// uses it.
pub(super) fn inherited(
    identity: DeviceIdentity,
    access: Access,
) -> Result<Option<Arc<DeviceClaim>>, DeviceErrorKind> {
    if access != Access::Own {
        return Ok(None);
    }
    let mut claims = claims();
    if claims.kept.iter().any(|(of, claim)| *of == identity && claim.strong_count() > 0) {
        return Err(DeviceErrorKind::StillWritten);
    }
    let Some(passed) = claims.inherited.iter_mut().find(|passed| passed.of == identity) else {
        return Ok(None);
    };
    if Arc::strong_count(&passed.claim) > 1 {
        return Err(if passed.is_opened { DeviceErrorKind::Twice } else { DeviceErrorKind::StillWritten });
    }
    passed.is_opened = true;
    let claim = Arc::clone(&passed.claim);
    claims.remember(&claim);
    Ok(Some(claim))
}
