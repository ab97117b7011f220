//! Commands to the driver, each with a time limit.
#![allow(
    unsafe_code,
    reason = "a command's entry carries the address of the memory that the driver reads or writes"
)]

use crate::abi::Command;
use crate::error::ControlError;
use io_uring::IoUring;
use io_uring::cqueue;
use io_uring::opcode::UringCmd80;
use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

/// `/dev/ublk-control`.
///
/// All its commands use one ring. When a ring is closed, its former thread is interrupted a moment
/// later. If that thread is then in the middle of another command, Linux 6.18 sometimes never
/// starts the command (one of a dozen, seen in `bcached remove`).
pub(crate) struct ControlDevice {
    device: OwnedFd,
    /// The ring, or `None` if the last command did not end in time and still has it.
    ring: RefCell<Option<ControlRing>>,
}

/// The driver's control device.
pub(crate) const CONTROL: &str = "/dev/ublk-control";

type ControlRing = IoUring<Entry128, cqueue::Entry>;

/// A command's ring, and the memory that it refers to. The memory is not accessed before the
/// command has ended.
struct ControlCall {
    ring: ControlRing,
    memory: Box<[u8]>,
}

impl ControlDevice {
    pub(crate) fn open() -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open(CONTROL, flags, Mode::empty())?;
        Ok(Self { device, ring: RefCell::default() })
    }

    /// Runs `command` on a device, with a word of data. `memory` is passed to the driver and
    /// returned as the driver leaves it.
    ///
    /// # Errors
    /// The driver's error, or `TIMEDOUT` if it does not answer within `limit`: then it may still
    /// carry out the command.
    pub(crate) fn call(
        &self,
        command: Command,
        number: u32,
        (memory, data): (&[u8], u64),
        limit: Duration,
    ) -> Result<Box<[u8]>, ControlError> {
        let failed = |why| ControlError { command, number, why };
        let errno = |error: std::io::Error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let ring = self.ring.take().map_or_else(|| ControlRing::builder().build(2), Ok).map_err(errno)?;
        let mut call = ControlCall { ring, memory: memory.into() };
        let mut head = [0; 80];
        head[0..4].copy_from_slice(&number.to_ne_bytes());
        // For no particular queue.
        head[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        let length = u16::try_from(call.memory.len()).map_err(|_| failed(Errno::INVAL))?;
        head[6..8].copy_from_slice(&length.to_ne_bytes());
        let address = if length == 0 { 0 } else { call.memory.as_mut_ptr() as u64 };
        head[8..16].copy_from_slice(&address.to_ne_bytes());
        head[16..24].copy_from_slice(&data.to_ne_bytes());
        let entry = UringCmd80::new(Fd(self.device.as_raw_fd()), command.number()).cmd(head).build();
        // SAFETY: the entry refers to `call.memory`, which is on the heap and is freed only after
        // the command has ended. A call that does not end in time is leaked with its ring below.
        unsafe { call.ring.submission().push(&entry) }.map_err(|_| failed(Errno::AGAIN))?;
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            // An error is a wake-up: a timeout or a signal.
            let _woken = call.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
            let ended = call.ring.completion().next().map(|entry| entry.result());
            if let Some(result) = ended {
                self.ring.replace(Some(call.ring));
                if result < 0 {
                    return Err(failed(Errno::from_raw_os_error(result.saturating_neg())));
                }
                return Ok(call.memory);
            }
            if left.is_zero() {
                // The driver may still write into the memory.
                std::mem::forget(call);
                return Err(failed(Errno::TIMEDOUT));
            }
        }
    }
}
