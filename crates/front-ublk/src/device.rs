//! One device of the kernel's, from its making, or its taking over from a dead server, to its end.
//!
//! Every call here may wait for the kernel, and the kernel for I/O on the device, which the queue serves on the engine's thread: so these
//! are called on a thread of the device's own, and never on an engine's.

use crate::abi::{
    Command, DeviceInfo, F_AUTO_BUF_REG, F_CMD_IOCTL_ENCODE, F_QUIESCE, F_UPDATE_SIZE, F_USER_COPY,
    F_USER_RECOVERY, F_USER_RECOVERY_REISSUE, INFO_BYTES, Params, State,
};
use crate::control::Control;
use crate::error::{ControlError, DeviceError, Unavailable};
use crate::privilege::is_privileged;
use crate::queue::{OnEnd, Place, Queue, Shared};
use crate::table::Transfer;
use bcached_port::{Export, SECTOR_BYTES};
use bcached_uring::Guests;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Requests of a queue at once.
const DEPTH: u16 = 128;
/// Queues of a device at most: one for each processor up to that. All are served by one thread, so more would only spare the processors of
/// clients that they wait for each other.
const QUEUES_MAX: usize = 4;
/// Largest request: the block layer cuts what is larger.
const IO_BYTES_MAX: u32 = 512 << 10;
/// Largest discard, in sectors: 1 GiB.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// What the driver needs no I/O for.
const QUICK: Duration = Duration::from_secs(5);
/// What includes I/O on the device: looking for partitions, or waiting for the last requests.
const WITH_IO: Duration = Duration::from_secs(60);
/// A dead server's end is seen by the driver some moments after the process has gone.
const QUIESCE_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// Where the driver lists character devices.
const CLASS: &str = "/sys/class/ublk-char";

/// What this machine's driver can do for us, found by asking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features(u64);

impl Features {
    /// Asks the driver.
    ///
    /// # Errors
    /// Why there is no ublk for us here.
    pub fn probe() -> Result<Self, Unavailable> {
        let control = Control::open().map_err(|errno| match errno {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => Unavailable::NoDriver,
            Errno::PERM | Errno::ACCESS => Unavailable::NotPermitted,
            other => Unavailable::Other(std::io::Error::from(other).to_string()),
        })?;
        if !is_privileged() {
            return Err(Unavailable::Unprivileged);
        }
        let features = Self::of(&control).map_err(|error| match error.why {
            // A driver from before this command, or one that hides from us.
            Errno::PERM | Errno::ACCESS => Unavailable::NotPermitted,
            Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV => Unavailable::TooOld("tell its features"),
            _ => Unavailable::Other(error.to_string()),
        })?;
        match [(F_USER_COPY, "copying by the server"), (F_USER_RECOVERY_REISSUE, "recovery of requests")]
            .into_iter()
            .find(|(needed, _)| !features.has(*needed))
        {
            Some((_, lacks)) => Err(Unavailable::TooOld(lacks)),
            None => Ok(features),
        }
    }

    fn of(control: &Control) -> Result<Self, ControlError> {
        let bytes = control.call(Command::GetFeatures, u32::MAX, (&[0; 8], 0), QUICK)?;
        Ok(Self(u64::from_ne_bytes((*bytes).try_into().unwrap_or_default())))
    }

    /// Those that devices of ours are made with: what they cannot do without, and of the rest what there is.
    const fn for_devices(self) -> u64 {
        let needed = F_USER_COPY | F_USER_RECOVERY | F_USER_RECOVERY_REISSUE | F_CMD_IOCTL_ENCODE;
        needed | self.0 & (F_UPDATE_SIZE | F_AUTO_BUF_REG)
    }

    /// The driver may complete a command twice when a server's ring ends while a request is on its way (CVE-2025-37906), which brings the
    /// kernel down. No feature tells of the mending, in Linux 6.15: so one of 6.16 does, and 6.15 counts as one that may.
    #[must_use]
    pub const fn may_complete_twice(self) -> bool {
        !self.has(F_QUIESCE)
    }

    /// The driver can be told that a device has another size (Linux 6.16).
    #[must_use]
    pub const fn may_resize(self) -> bool {
        self.has(F_UPDATE_SIZE)
    }

    pub(crate) const fn has(self, feature: u64) -> bool {
        self.0 & feature != 0
    }
}

/// A device that is served.
pub(crate) struct Device {
    control: Control,
    number: u32,
    features: u64,
    shared: Arc<Shared>,
    /// Where its queues live.
    guests: Guests,
    /// It was another server's, and the kernel has not been heard to say that it is ours.
    is_recovering: bool,
}

/// What there is of a volume in the kernel already.
enum Found {
    Nothing,
    /// Its server is gone.
    Orphan(DeviceInfo),
    /// It was never started, or has been stopped.
    Remains(u32),
}

impl Device {
    /// Gives `export` a device of the kernel, that of its dead server if there is one, whose requests on `guests`' ring end up at the
    /// export's route. It has that `number` if one is said. The process `former`, if any, counts as dead. `on_end` is called when the ring is
    /// done with the queues. It can be used when it has been [settled](Self::settle).
    pub(crate) fn bring(
        export: &Export,
        guests: &Guests,
        (number, former): (Option<u32>, Option<u32>),
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let control = open_control()?;
        let identity = identity_of(export);
        match find(&control, identity, former)? {
            Found::Orphan(info) => return Self::take_over(control, info, export, guests, on_end),
            Found::Remains(left) => drop(control.call(Command::DelDev, left, (&[], 0), WITH_IO)?),
            Found::Nothing => {}
        }
        Self::make(control, (identity, number), export, guests, on_end)
    }

    /// Takes what there is of a volume that nobody serves from the kernel: what waits there fails.
    pub(crate) fn remove_left(export: &Export) -> Result<(), DeviceError> {
        let control = open_control()?;
        let number = match find(&control, identity_of(export), None)? {
            Found::Nothing => return Ok(()),
            Found::Orphan(info) => info.number,
            Found::Remains(number) => number,
        };
        take_away(&control, number)
    }

    /// The driver has these features, the device perhaps fewer.
    fn of(control: Control, driver: Features, info: &DeviceInfo, guests: &Guests) -> Self {
        let (number, features) = (info.number, info.features);
        let shared = Arc::new(Shared::of(info.queues, driver.may_complete_twice()));
        Self { control, number, features, shared, guests: guests.clone(), is_recovering: false }
    }

    /// All queues have a turn, and look at everything in it.
    fn ring(&self) {
        self.shared.ring();
        self.guests.bell().ring();
    }

    /// The volume is served by the engine of that ring now.
    pub(crate) fn is_served_by(&self, guests: &Guests) {
        self.shared.is_abroad.store(!self.guests.is_same(guests), Ordering::Release);
        // Who waits for memory that is abroad looks for it.
        self.ring();
    }

    fn make(
        control: Control,
        (identity, number): (u64, Option<u32>),
        export: &Export,
        guests: &Guests,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let params = params_of(export)?;
        let driver = Features::of(&control)?;
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
        let device = Self::of(control, driver, &info, guests);
        let started = device
            .command(Command::SetParams, (&params.to_bytes(), 0), QUICK)
            .and_then(|()| device.host(&info, export, on_end))
            .and_then(|()| device.command(Command::StartDev, (&[], own_process()), WITH_IO));
        match started {
            Ok(()) => Ok(device),
            Err(error) => {
                // Nothing of it stays behind.
                let _is_gone = device.remove();
                Err(error)
            }
        }
    }

    fn take_over(
        control: Control,
        info: DeviceInfo,
        export: &Export,
        guests: &Guests,
        on_end: impl FnOnce() + Send + Sync + 'static,
    ) -> Result<Self, DeviceError> {
        let driver = Features::of(&control)?;
        let mut device = Self::of(control, driver, &info, guests);
        device.begin_recovery()?;
        device.host(&info, export, on_end)?;
        device.is_recovering = true;
        Ok(device)
    }

    /// It can be used.
    pub(crate) const fn is_settled(&self) -> bool {
        !self.is_recovering
    }

    /// Has requests come to the queues, of a device that was another server's, and does nothing for others. Its queues are on the ring: whoever
    /// gets an error keeps the device and comes back, and does not bring it once more.
    pub(crate) fn settle(&mut self, export: &Export) -> Result<(), DeviceError> {
        if self.is_settled() {
            return Ok(());
        }
        // A command that was not heard of in time may have been carried out since.
        let info = info_of(&self.control, self.number)?;
        let is_ours = info.state() == State::Live && u64::try_from(info.process).ok() == Some(own_process());
        if !is_ours {
            self.command(Command::EndUserRecovery, (&[], own_process()), WITH_IO)?;
        }
        self.is_recovering = false;
        // It may have grown since. What the kernel cannot be told is seen when the device is made anew.
        if let Err(error) = self.resize(export.sectors) {
            tracing::warn!(event = "ublk-not-resized", "{}: {error}", self.path().display());
        }
        Ok(())
    }

    /// From now on a queue is waited for.
    fn begin_recovery(&self) -> Result<(), DeviceError> {
        let deadline = Instant::now() + QUIESCE_MAX;
        loop {
            let waits =
                matches!(info_of(&self.control, self.number)?.state(), State::Quiesced | State::FailIo);
            let Err(error) = self.command(Command::StartUserRecovery, (&[], 0), QUICK) else { return Ok(()) };
            match &error {
                // Somebody has begun that and then ended, or could not go on: the driver does not begin it twice.
                DeviceError::Control(ControlError { why: Errno::INVAL, .. }) if waits => return Ok(()),
                DeviceError::Control(ControlError { why: Errno::BUSY | Errno::INVAL, .. })
                    if Instant::now() < deadline => {}
                _ => return Err(error),
            }
            thread::sleep(PAUSE);
        }
    }

    /// Puts the queues on the ring, all or none; their commands are with the kernel soon after.
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
        let (device, on_end) = (Arc::new(device), OnEnd::new(on_end));
        let queue = |number| {
            let place = Place {
                device: Arc::clone(&device),
                number,
                depth: info.depth,
                registers: info.features & F_AUTO_BUF_REG != 0,
                read_only: export.read_only,
                route: route.clone(),
                turn: self.guests.bell(),
                shared: Arc::clone(&self.shared),
            };
            Queue::new(place, Arc::clone(&on_end)).map_err(unusable)
        };
        let queues = (0..info.queues).map(queue).collect::<Result<Vec<_>, _>>()?;
        // A ring that takes no more drops those that it has taken, too.
        queues.into_iter().try_for_each(|queue| self.guests.host(Box::new(queue)))?;
        Ok(())
    }

    /// `/dev/ublkbN`.
    pub(crate) fn path(&self) -> PathBuf {
        block_device(self.number)
    }

    /// How its data comes and goes, now that it has been started.
    pub(crate) fn transfer(&self) -> Transfer {
        if self.shared.lends.load(Ordering::Acquire) { Transfer::ZeroCopy } else { Transfer::UserCopy }
    }

    /// The volume has another size now. False: this kernel cannot be told.
    pub(crate) fn resize(&self, sectors: u64) -> Result<bool, DeviceError> {
        if self.features & F_UPDATE_SIZE == 0 {
            return Ok(false);
        }
        self.command(Command::UpdateSize, (&[], sectors), QUICK)?;
        Ok(true)
    }

    /// Takes the device from the kernel: what it has not answered fails.
    pub(crate) fn remove(&self) -> Result<(), DeviceError> {
        self.shared.is_going.store(true, Ordering::Release);
        // What its engine has given up is answered now: the stop waits for that.
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

/// Takes a device from the kernel: what waits there fails.
pub(crate) fn take_away(control: &Control, number: u32) -> Result<(), DeviceError> {
    for command in [Command::StopDev, Command::DelDev] {
        control.call(command, number, (&[], 0), WITH_IO)?;
    }
    Ok(())
}

pub(crate) fn open_control() -> Result<Control, DeviceError> {
    Ok(Control::open().map_err(|why| ControlError {
        command: Command::GetFeatures,
        number: u32::MAX,
        why,
    })?)
}

/// Eight bytes of the volume's UUID: the word that the driver keeps for a server. A device without our mark is somebody else's.
fn identity_of(export: &Export) -> u64 {
    let (first, last) = export.uuid.0.split_at(8);
    let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap_or_default());
    (word(first) ^ word(last)) & !0xffff | MARK
}

/// In the lowest 16 bits of the word that the driver keeps for us.
pub(crate) const MARK: u64 = 0xbcac;

fn own_process() -> u64 {
    u64::from(std::process::id())
}

/// The numbers of all devices.
pub(crate) fn listed() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(CLASS) else { return Vec::new() };
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    entries.flatten().filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Looks for a device of that identity.
fn find(control: &Control, identity: u64, former: Option<u32>) -> Result<Found, DeviceError> {
    for number in listed() {
        let info = match info_of(control, number) {
            Ok(info) => info,
            // It went in between, or is not for us to see.
            Err(ControlError { why: Errno::NODEV | Errno::INVAL | Errno::ACCESS | Errno::PERM, .. }) => {
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if info.identity != identity {
            continue;
        }
        return match info.state() {
            State::Dead => Ok(Found::Remains(number)),
            State::Quiesced | State::FailIo => Ok(Found::Orphan(info)),
            State::Live if is_alive(info.process) && u32::try_from(info.process).ok() != former => {
                Err(DeviceError::ServedByOther { number, process: info.process })
            }
            // The driver has not noticed yet.
            State::Live => Ok(Found::Orphan(info)),
        };
    }
    Ok(Found::Nothing)
}

/// Our own counts as dead: what of it was served by this process is not any more, or nobody would look for it.
pub(crate) fn is_alive(process: i32) -> bool {
    u32::try_from(process) != Ok(std::process::id()) && Path::new(&format!("/proc/{process}")).exists()
}

/// Queues of a new device: one where each further one would leave the driver more time for its fault.
fn queues(driver: Features) -> u16 {
    if driver.may_complete_twice() {
        return 1;
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(processors.min(QUEUES_MAX)).expect("a few")
}

pub(crate) fn info_of(control: &Control, number: u32) -> Result<DeviceInfo, ControlError> {
    let answer = control.call(Command::GetDevInfo, number, (&[0; INFO_BYTES], 0), QUICK)?;
    Ok(DeviceInfo::from_bytes(&as_info(&answer)))
}

fn as_info(answer: &[u8]) -> [u8; INFO_BYTES] {
    answer.try_into().expect("an answer is as long as what was sent")
}

fn params_of(export: &Export) -> Result<Params, DeviceError> {
    let block = u64::from(export.block_sectors) * SECTOR_BYTES;
    let block_bytes = u32::try_from(block).ok().filter(|bytes| bytes.is_power_of_two() && *bytes <= 4096);
    let block_bytes = block_bytes.ok_or(DeviceError::Block(block))?;
    Ok(Params {
        read_only: export.read_only,
        block_bytes,
        optimal_io_bytes: block_bytes,
        max_sectors: IO_BYTES_MAX >> 9,
        sectors: export.sectors,
        max_discard_sectors: DISCARD_SECTORS_MAX,
    })
}

/// Opens what udev, or the kernel's own file system of devices, may be about to make, or to give to us.
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
