//! One device of the kernel, from its creation, or the take-over from a dead server, to its end.
//!
//! Every call here may wait for the kernel, and the kernel for I/O on the device, which the queue
//! serves on the engine's thread. So these functions run on a thread of the device's own, and never
//! on an engine's.

use crate::abi::{
    Command, DeviceInfo, DeviceParams, F_AUTO_BUF_REG, F_CMD_IOCTL_ENCODE, F_QUIESCE, F_UPDATE_SIZE,
    F_USER_COPY, F_USER_RECOVERY, F_USER_RECOVERY_REISSUE, INFO_BYTES, ServerState,
};
use crate::control::ControlDevice;
use crate::error::{ControlError, DeviceError, UblkUnavailable};
use crate::privilege::is_privileged;
use crate::queue::{DeviceShared, DropCallback, Queue, QueueParams};
use crate::table::DataTransfer;
use bcached_port::{Export, SECTOR_BYTES};
use bcached_uring::RingHandle;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Queue depth: requests in flight.
const DEPTH: u16 = 128;
/// Maximum number of queues of a device; there is one for each processor up to that. One thread
/// serves all of them, so more would only reduce the contention between processors that submit
/// requests.
const QUEUES_MAX: usize = 4;
/// Largest request in bytes: the block layer splits larger ones.
const IO_BYTES_MAX: u32 = 512 << 10;
/// Largest discard, in sectors: 1 GiB.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// Time limit of commands that need no I/O.
const QUICK: Duration = Duration::from_secs(5);
/// Time limit of commands that include I/O on the device: scanning for partitions, or waiting for
/// the last requests.
const WITH_IO: Duration = Duration::from_secs(60);
/// How long it may take the driver to notice the death of a server after the process has gone.
const QUIESCE_MAX: Duration = Duration::from_secs(10);
/// Polling interval.
const PAUSE: Duration = Duration::from_millis(20);
/// Where the driver lists its character devices.
const CLASS: &str = "/sys/class/ublk-char";

/// The features of this machine's driver, as reported by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriverFeatures(u64);

impl DriverFeatures {
    /// Queries the driver.
    ///
    /// # Errors
    /// Why ublk is not available here.
    pub fn probe() -> Result<Self, UblkUnavailable> {
        let control = ControlDevice::open().map_err(|errno| match errno {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => UblkUnavailable::NoDriver,
            Errno::PERM | Errno::ACCESS => UblkUnavailable::NotPermitted,
            other => UblkUnavailable::Other(std::io::Error::from(other).to_string()),
        })?;
        if !is_privileged() {
            return Err(UblkUnavailable::Unprivileged);
        }
        let features = Self::of(&control).map_err(|error| match error.why {
            // A driver that predates this command, or denies it to us.
            Errno::PERM | Errno::ACCESS => UblkUnavailable::NotPermitted,
            Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV => UblkUnavailable::TooOld("feature queries"),
            _ => UblkUnavailable::Other(error.to_string()),
        })?;
        match [(F_USER_COPY, "copying by the server"), (F_USER_RECOVERY_REISSUE, "recovery of requests")]
            .into_iter()
            .find(|(needed, _)| !features.has(*needed))
        {
            Some((_, lacks)) => Err(UblkUnavailable::TooOld(lacks)),
            None => Ok(features),
        }
    }

    fn of(control: &ControlDevice) -> Result<Self, ControlError> {
        let bytes = control.call(Command::GetFeatures, u32::MAX, (&[0; 8], 0), QUICK)?;
        Ok(Self(u64::from_ne_bytes((*bytes).try_into().unwrap_or_default())))
    }

    /// The features with which devices are created: all that are required, and of the optional ones
    /// those available.
    const fn for_devices(self) -> u64 {
        let needed = F_USER_COPY | F_USER_RECOVERY | F_USER_RECOVERY_REISSUE | F_CMD_IOCTL_ENCODE;
        needed | self.0 & (F_UPDATE_SIZE | F_AUTO_BUF_REG)
    }

    /// Whether the driver may complete a command twice if a server's ring ends while a request is
    /// in flight (CVE-2025-37906), which crashes the kernel. Linux 6.15 fixed that, but no feature
    /// indicates the fix. So a feature of 6.16 is checked, and 6.15 counts as affected.
    #[must_use]
    pub const fn may_complete_twice(self) -> bool {
        !self.has(F_QUIESCE)
    }

    /// Whether the driver can resize a device (Linux 6.16).
    #[must_use]
    pub const fn may_resize(self) -> bool {
        self.has(F_UPDATE_SIZE)
    }

    pub(crate) const fn has(self, feature: u64) -> bool {
        self.0 & feature != 0
    }
}

/// A device that is being served.
pub(crate) struct Device {
    control: ControlDevice,
    number: u32,
    features: u64,
    shared: Arc<DeviceShared>,
    /// The ring on which its queues live.
    ring_handle: RingHandle,
    /// It was another server's, and the kernel has not yet confirmed that it is ours.
    is_recovering: bool,
}

/// What the kernel already has of a volume.
enum ExistingDevice {
    Absent,
    /// A device whose server is gone.
    Orphan(DeviceInfo),
    /// A device that was never started, or has been stopped.
    Leftover(u32),
}

impl Device {
    /// Provides `export` with a device, whose requests reach the export's route through
    /// `ring_handle`. If there is a device of a dead server, it is taken over. A new device gets
    /// `number`, if given. The process `former`, if any, counts as dead. `on_end` is called when
    /// the ring has finished with the queues. The device can be used once it is
    /// [settled](Self::settle).
    pub(crate) fn bring(
        export: &Export,
        ring_handle: &RingHandle,
        (number, former): (Option<u32>, Option<u32>),
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let control = open_control()?;
        let identity = identity_of(export);
        match find(&control, identity, former)? {
            ExistingDevice::Orphan(info) => {
                return Self::take_over(control, info, export, ring_handle, on_end);
            }
            ExistingDevice::Leftover(left) => drop(control.call(Command::DelDev, left, (&[], 0), WITH_IO)?),
            ExistingDevice::Absent => {}
        }
        Self::make(control, (identity, number), export, ring_handle, on_end)
    }

    /// Removes the device of a volume that is no longer served. I/O that waits for it fails.
    pub(crate) fn remove_left(export: &Export) -> Result<(), DeviceError> {
        let control = open_control()?;
        let number = match find(&control, identity_of(export), None)? {
            ExistingDevice::Absent => return Ok(()),
            ExistingDevice::Orphan(info) => info.number,
            ExistingDevice::Leftover(number) => number,
        };
        take_away(&control, number)
    }

    /// Makes the value. `driver` are the driver's features; the device may have fewer.
    fn of(
        control: ControlDevice,
        driver: DriverFeatures,
        info: &DeviceInfo,
        ring_handle: &RingHandle,
    ) -> Self {
        let (number, features) = (info.number, info.features);
        let shared = Arc::new(DeviceShared::of(info.queues, driver.may_complete_twice()));
        Self { control, number, features, shared, ring_handle: ring_handle.clone(), is_recovering: false }
    }

    /// Gives all queues a turn, in which they check everything.
    fn ring(&self) {
        self.shared.ring();
        self.ring_handle.bell().ring();
    }

    /// Notes that the volume is now served by the engine of that ring.
    pub(crate) fn is_served_by(&self, ring_handle: &RingHandle) {
        self.shared.is_abroad.store(!self.ring_handle.is_same(ring_handle), Ordering::Release);
        // Tags that wait for memory lent to another ring check for it.
        self.ring();
    }

    fn make(
        control: ControlDevice,
        (identity, number): (u64, Option<u32>),
        export: &Export,
        ring_handle: &RingHandle,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let params = params_of(export)?;
        let driver = DriverFeatures::of(&control)?;
        let wanted = DeviceInfo {
            queues: queues(driver),
            depth: DEPTH,
            max_io_bytes: IO_BYTES_MAX,
            number: number.unwrap_or(u32::MAX),
            features: driver.for_devices(),
            identity,
            ..DeviceInfo::default()
        };
        let answer = control.call(Command::AddDev, wanted.number, (&wanted.to_bytes(), 0), QUICK)?;
        let info = DeviceInfo::from_bytes(&as_info(&answer));
        let device = Self::of(control, driver, &info, ring_handle);
        let started = device
            .command(Command::SetParams, (&params.to_bytes(), 0), QUICK)
            .and_then(|()| device.host(&info, export, on_end))
            .and_then(|()| device.command(Command::StartDev, (&[], own_process()), WITH_IO));
        match started {
            Ok(()) => Ok(device),
            Err(error) => {
                // Leave nothing of it behind.
                let _is_gone = device.remove();
                Err(error)
            }
        }
    }

    fn take_over(
        control: ControlDevice,
        info: DeviceInfo,
        export: &Export,
        ring_handle: &RingHandle,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let driver = DriverFeatures::of(&control)?;
        let mut device = Self::of(control, driver, &info, ring_handle);
        device.begin_recovery()?;
        device.host(&info, export, on_end)?;
        device.is_recovering = true;
        Ok(device)
    }

    /// Whether the device can be used.
    pub(crate) const fn is_settled(&self) -> bool {
        !self.is_recovering
    }

    /// Lets requests reach the queues of a device that was taken over; does nothing for other
    /// devices. Its queues are already on the ring. So after an error the caller keeps the device
    /// and calls again, rather than bringing it once more.
    pub(crate) fn settle(&mut self, export: &Export) -> Result<(), DeviceError> {
        if self.is_settled() {
            return Ok(());
        }
        // A command that timed out may have been carried out since.
        let info = info_of(&self.control, self.number)?;
        let is_ours =
            info.state() == ServerState::Live && u64::try_from(info.process).ok() == Some(own_process());
        if !is_ours {
            self.command(Command::EndUserRecovery, (&[], own_process()), WITH_IO)?;
        }
        self.is_recovering = false;
        // The volume may have grown in the meantime. If the kernel cannot resize the device, the
        // new size appears when the device is next created.
        if let Err(error) = self.resize(export.sectors) {
            tracing::warn!(event = "ublk-not-resized", "{}: {error}", self.path().display());
        }
        Ok(())
    }

    /// Starts recovery: from then on the driver waits for queues.
    fn begin_recovery(&self) -> Result<(), DeviceError> {
        let deadline = Instant::now() + QUIESCE_MAX;
        loop {
            let waits = matches!(
                info_of(&self.control, self.number)?.state(),
                ServerState::Quiesced | ServerState::FailIo
            );
            let Err(error) = self.command(Command::StartUserRecovery, (&[], 0), QUICK) else { return Ok(()) };
            match &error {
                // A recovery was started and its server ended, or could not complete it: the driver
                // does not start it twice.
                DeviceError::Control(ControlError { why: Errno::INVAL, .. }) if waits => return Ok(()),
                DeviceError::Control(ControlError { why: Errno::BUSY | Errno::INVAL, .. })
                    if Instant::now() < deadline => {}
                _ => return Err(error),
            }
            thread::sleep(PAUSE);
        }
    }

    /// Puts the queues on the ring, all or none. Their commands reach the kernel soon after.
    fn host(
        &self,
        info: &DeviceInfo,
        export: &Export,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<(), DeviceError> {
        let path = format!("/dev/ublkc{}", self.number);
        let unusable = |why: Errno| match why {
            Errno::ACCESS => DeviceError::NotGiven { path: path.clone(), patience: QUICK },
            why => DeviceError::Character { path: path.clone(), why: std::io::Error::from(why) },
        };
        let device = open_when_there(Path::new(&path)).map_err(unusable)?;
        let Some(route) = export.served.clone() else { return Err(unusable(Errno::NXIO)) };
        let (device, on_end) = (Arc::new(device), DropCallback::new(on_end));
        let queue = |number| {
            let place = QueueParams {
                device: Arc::clone(&device),
                number,
                depth: info.depth,
                registers: info.features & F_AUTO_BUF_REG != 0,
                read_only: export.read_only,
                route: route.clone(),
                turn: self.ring_handle.bell(),
                shared: Arc::clone(&self.shared),
            };
            Queue::new(place, Arc::clone(&on_end)).map_err(unusable)
        };
        let queues = (0..info.queues).map(queue).collect::<Result<Vec<_>, _>>()?;
        // A ring that accepts no more also drops those that it has accepted.
        queues.into_iter().try_for_each(|queue| self.ring_handle.host(Box::new(queue)))?;
        Ok(())
    }

    /// `/dev/ublkbN`.
    pub(crate) fn path(&self) -> PathBuf {
        block_device(self.number)
    }

    /// How its data is transferred. Valid once the device is started.
    pub(crate) fn transfer(&self) -> DataTransfer {
        if self.shared.lends.load(Ordering::Acquire) {
            DataTransfer::ZeroCopy
        } else {
            DataTransfer::UserCopy
        }
    }

    /// Resizes the device. Returns false if this kernel cannot do that.
    pub(crate) fn resize(&self, sectors: u64) -> Result<bool, DeviceError> {
        if self.features & F_UPDATE_SIZE == 0 {
            return Ok(false);
        }
        self.command(Command::UpdateSize, (&[], sectors), QUICK)?;
        Ok(true)
    }

    /// Removes the device from the kernel. Unanswered requests fail.
    pub(crate) fn remove(&self) -> Result<(), DeviceError> {
        self.shared.is_going.store(true, Ordering::Release);
        // Requests that the engine has given up are answered now, because the stop waits for them.
        self.ring();
        take_away(&self.control, self.number)
    }

    fn command(&self, command: Command, with: (&[u8], u64), limit: Duration) -> Result<(), DeviceError> {
        self.control.call(command, self.number, with, limit)?;
        Ok(())
    }
}

/// `/dev/ublkbN`.
pub(crate) fn block_device(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// Removes a device from the kernel. I/O that waits for it fails.
pub(crate) fn take_away(control: &ControlDevice, number: u32) -> Result<(), DeviceError> {
    for command in [Command::StopDev, Command::DelDev] {
        control.call(command, number, (&[], 0), WITH_IO)?;
    }
    Ok(())
}

pub(crate) fn open_control() -> Result<ControlDevice, DeviceError> {
    Ok(ControlDevice::open().map_err(|why| ControlError {
        command: Command::GetFeatures,
        number: u32::MAX,
        why,
    })?)
}

/// Eight bytes derived from the volume's UUID: the word that the driver keeps for a server. A
/// device without our mark belongs to another program.
fn identity_of(export: &Export) -> u64 {
    let (first, last) = export.uuid.0.split_at(8);
    let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap_or_default());
    (word(first) ^ word(last)) & !0xffff | MARK
}

/// The mark in the lowest 16 bits of the word that the driver keeps for us.
pub(crate) const MARK: u64 = 0xbcac;

fn own_process() -> u64 {
    u64::from(std::process::id())
}

/// The numbers of all ublk devices.
pub(crate) fn listed() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(CLASS) else { return Vec::new() };
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    entries.flatten().filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Looks for the device with that identity.
fn find(control: &ControlDevice, identity: u64, former: Option<u32>) -> Result<ExistingDevice, DeviceError> {
    for number in listed() {
        let info = match info_of(control, number) {
            Ok(info) => info,
            // It was removed in the meantime, or we may not see it.
            Err(ControlError { why: Errno::NODEV | Errno::INVAL | Errno::ACCESS | Errno::PERM, .. }) => {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if info.identity != identity {
            continue;
        }
        return match info.state() {
            ServerState::Dead => Ok(ExistingDevice::Leftover(number)),
            ServerState::Quiesced | ServerState::FailIo => Ok(ExistingDevice::Orphan(info)),
            ServerState::Live if is_alive(info.process) && u32::try_from(info.process).ok() != former => {
                Err(DeviceError::ServedByOther { number, process: info.process })
            }
            // The driver has not noticed the server's death yet.
            ServerState::Live => Ok(ExistingDevice::Orphan(info)),
        };
    }
    Ok(ExistingDevice::Absent)
}

/// Whether a process is alive. This process itself counts as dead: it no longer serves the device,
/// or it would not look for it.
pub(crate) fn is_alive(process: i32) -> bool {
    u32::try_from(process) != Ok(std::process::id()) && Path::new(&format!("/proc/{process}")).exists()
}

/// Number of queues of a new device. Only one on a driver with the double-completion fault, since
/// each further one would widen the window for it.
fn queues(driver: DriverFeatures) -> u16 {
    if driver.may_complete_twice() {
        return 1;
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(processors.min(QUEUES_MAX)).expect("few queues")
}

pub(crate) fn info_of(control: &ControlDevice, number: u32) -> Result<DeviceInfo, ControlError> {
    let answer = control.call(Command::GetDevInfo, number, (&[0; INFO_BYTES], 0), QUICK)?;
    Ok(DeviceInfo::from_bytes(&as_info(&answer)))
}

fn as_info(answer: &[u8]) -> [u8; INFO_BYTES] {
    answer.try_into().expect("an answer is as long as what was sent")
}

fn params_of(export: &Export) -> Result<DeviceParams, DeviceError> {
    let block = u64::from(export.block_sectors) * SECTOR_BYTES;
    let block_bytes = u32::try_from(block).ok().filter(|bytes| bytes.is_power_of_two() && *bytes <= 4096);
    let block_bytes = block_bytes.ok_or(DeviceError::Block(block))?;
    Ok(DeviceParams {
        read_only: export.read_only,
        block_bytes,
        optimal_io_bytes: block_bytes,
        max_sectors: IO_BYTES_MAX >> 9,
        sectors: export.sectors,
        max_discard_sectors: DISCARD_SECTORS_MAX,
    })
}

/// Opens a device file that udev or devtmpfs may be about to create, or to grant us access to.
fn open_when_there(path: &Path) -> Result<File, Errno> {
    let deadline = Instant::now() + QUICK;
    loop {
        match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT | Errno::BUSY | Errno::ACCESS) if Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            other => return other.map(File::from),
        }
    }
}
