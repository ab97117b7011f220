//! A device of the kernel's NBD client, whose server is in this process. The kernel gets one end of
//! a socket pair, the server has the other. A thread stays in the kernel (`NBD_DO_IT`) for as long
//! as the device is served. When the process dies, for whatever reason, the device ends with that
//! thread.

mod ioctl;

use crate::server::NbdConnection;
use bcached_port::{Export, SECTOR_BYTES};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for driver operations that need no I/O.
const QUICK: Duration = Duration::from_secs(10);
/// Polling interval.
const PAUSE: Duration = Duration::from_millis(5);
/// Where the kernel lists block devices.
const BLOCK: &str = "/sys/block";
/// Valid block sizes of a device, in bytes.
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 512..=4096;

/// A device that is being served.
pub(crate) struct NbdDevice {
    path: PathBuf,
    device: Arc<File>,
    block_sectors: u64,
    /// Disconnected once the serving thread has ended.
    ended: Receiver<()>,
}

/// The outcome of trying one device.
enum AttachOutcome {
    Attached(NbdDevice),
    /// The device is in use.
    InUse,
}

/// Checks whether this machine can provide a device of the NBD client.
pub(crate) fn probe() -> Result<(), String> {
    let all = numbers(Path::new(BLOCK));
    if all.is_empty() {
        return Err("/dev/nbd0 does not exist: load the module (modprobe nbd)".to_owned());
    }
    let may = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if !may {
        return Err("setting up a device needs CAP_SYS_ADMIN: root is needed".to_owned());
    }
    let first = free(Path::new(BLOCK)).into_iter().next().ok_or_else(|| none_free(all.len()))?;
    open(first).map(drop).map_err(|errno| unusable(first, errno))
}

fn none_free(count: usize) -> String {
    format!("all {count} devices are in use: load the module with more (modprobe nbd nbds_max=64)")
}

fn unusable(number: u32, errno: Errno) -> String {
    let path = path_of(number);
    let path = path.display();
    match errno {
        Errno::NOENT | Errno::NXIO => {
            format!(
                "{path} does not exist, though the kernel has the device: give the device to this \
                 container"
            )
        }
        Errno::ACCESS | Errno::PERM => format!("{path} may not be opened: root is needed"),
        other => format!("{path} cannot be opened: {}", io::Error::from(other)),
    }
}

/// The numbers of the existing NBD devices, ascending.
fn numbers(block: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(block).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("nbd")?.parse().ok();
    let mut all: Vec<u32> = entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    all.sort_unstable();
    all
}

/// The numbers of those that are not being served.
fn free(block: &Path) -> Vec<u32> {
    let is_free = |number: &u32| !block.join(format!("nbd{number}/pid")).exists();
    numbers(block).into_iter().filter(is_free).collect()
}

fn path_of(number: u32) -> PathBuf {
    format!("/dev/nbd{number}").into()
}

fn open(number: u32) -> Result<File, Errno> {
    rustix::fs::open(path_of(number), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

impl NbdDevice {
    /// Connects the first free device to the client's end of `connection`. `on_end` is called when
    /// the device is no longer served.
    pub(crate) fn bring(
        export: &Export,
        connection: &NbdConnection,
        on_end: &Arc<dyn Fn() + Send + Sync>,
    ) -> Result<Self, String> {
        let block_bytes = u64::from(export.block_sectors) * SECTOR_BYTES;
        if !block_bytes.is_power_of_two() || !BLOCK_BYTES.contains(&block_bytes) {
            return Err(format!("a block device cannot have blocks of {block_bytes} bytes"));
        }
        for number in free(Path::new(BLOCK)) {
            match Self::try_one(number, export, connection, Arc::clone(on_end))? {
                AttachOutcome::Attached(device) => return Ok(device),
                AttachOutcome::InUse => {}
            }
        }
        Err(none_free(numbers(Path::new(BLOCK)).len()))
    }

    fn try_one(
        number: u32,
        export: &Export,
        connection: &NbdConnection,
        on_end: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<AttachOutcome, String> {
        let device = Arc::new(open(number).map_err(|errno| unusable(number, errno))?);
        let block_sectors = u64::from(export.block_sectors);
        let facts = (block_sectors, export.sectors / block_sectors, connection.flags);
        let socket = connection.socket.try_clone().map_err(|error| error.to_string())?;
        let (tell, told) = channel();
        let (ending, ended) = channel::<()>();
        let served = Arc::clone(&device);
        let body = move || {
            serve(&served, socket, facts, &tell);
            drop(served);
            drop(ending);
            on_end();
        };
        let named = format!("nbd{number}");
        thread::Builder::new()
            .name(named)
            .spawn(body)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        match told.recv_timeout(QUICK) {
            Ok(Ok(())) => {}
            Ok(Err(Errno::BUSY)) => return Ok(AttachOutcome::InUse),
            Ok(Err(errno)) => {
                return Err(format!("the kernel's NBD client failed: {}", io::Error::from(errno)));
            }
            Err(_) => return Err("the kernel's NBD client does not answer".to_owned()),
        }
        let device = Self { path: path_of(number), device, block_sectors, ended };
        device.wait_until_there(number, facts.1 * block_sectors)?;
        Ok(AttachOutcome::Attached(device))
    }

    /// Waits until the device is served. The size is the last attribute that the kernel sets before
    /// requests arrive.
    fn wait_until_there(&self, number: u32, sectors: u64) -> Result<(), String> {
        let place = Path::new(BLOCK).join(format!("nbd{number}"));
        let deadline = Instant::now() + QUICK;
        let size = || std::fs::read_to_string(place.join("size")).ok()?.trim().parse::<u64>().ok();
        while !place.join("pid").exists() || size() != Some(sectors) {
            if self.has_ended() || Instant::now() > deadline {
                let _gone = self.remove();
                return Err(format!("{} is not served after it was set up", self.path.display()));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn has_ended(&self) -> bool {
        !matches!(self.ended.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout))
    }

    /// Sets the device's size to the volume's new size.
    pub(crate) fn resize(&self, sectors: u64) -> Result<(), String> {
        let blocks = usize::try_from(sectors / self.block_sectors).unwrap_or(usize::MAX);
        ioctl::set_blocks(&self.device, blocks).map_err(|errno| io::Error::from(errno).to_string())
    }

    /// Writes out the device's dirty pages in the kernel. As long as this process has the device
    /// open, no other program's close does that.
    pub(crate) fn write_out(&self) -> Result<(), String> {
        let path = self.path.display();
        self.device
            .sync_data()
            .map_err(|error| format!("the kernel's dirty pages of {path} cannot be written: {error}"))
    }

    /// Removes the device.
    pub(crate) fn remove(&self) -> Result<(), String> {
        if self.has_ended() {
            return Ok(());
        }
        for end in [ioctl::disconnect, ioctl::clear_socket] {
            // An error is harmless: the device may already be disconnected.
            let _has_ended = end(&self.device);
            if let Err(RecvTimeoutError::Disconnected) = self.ended.recv_timeout(QUICK) {
                return Ok(());
            }
        }
        Err(format!("the kernel has not released {}", self.path.display()))
    }
}

/// Sets up the device and serves it until the connection ends.
fn serve(
    device: &File,
    socket: std::os::fd::OwnedFd,
    (block_sectors, blocks, flags): (u64, u64, u16),
    tell: &Sender<Result<(), Errno>>,
) {
    ioctl::block_signals();
    let bytes = usize::try_from(block_sectors * SECTOR_BYTES).unwrap_or(usize::MAX);
    let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
    // The socket comes first: it claims the device for this thread.
    if let Err(errno) = ioctl::set_socket(device, &socket) {
        let _nobody = tell.send(Err(errno));
        return;
    }
    drop(socket);
    let set_up = ioctl::set_block_bytes(device, bytes)
        .and_then(|()| ioctl::set_blocks(device, blocks))
        .and_then(|()| ioctl::set_flags(device, flags))
        .and_then(|()| ioctl::set_no_timeout(device));
    let _nobody = tell.send(set_up);
    if set_up.is_ok()
        && let Err(errno) = ioctl::do_it(device)
    {
        tracing::debug!(event = "nbd-device-ended", %errno, "a device of the kernel's NBD client has ended");
    }
    let _gone_already = ioctl::clear_socket(device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_in_use_are_told_from_free_ones() {
        let block = tempfile::tempdir().expect("a folder");
        for name in ["nbd0", "nbd10", "nbd2", "nbd", "sda", "nbd2p1x"] {
            std::fs::create_dir(block.path().join(name)).expect("a folder");
        }
        std::fs::write(block.path().join("nbd0/pid"), "1\n").expect("a file");
        assert_eq!(numbers(block.path()), [0, 2, 10]);
        assert_eq!(free(block.path()), [2, 10]);
        assert!(numbers(&block.path().join("none")).is_empty());
    }
}
