//! Commands to the driver, each with a limit of its own.
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
/// All its commands go by one ring. A ring that is closed interrupts the thread that had it a moment later, and when that is in the middle of
/// another command Linux 6.18 now and then starts nobody to carry the command out (one of a dozen, seen in `bcached remove`).
pub(crate) struct Control {
    device: OwnedFd,
    /// `None`: the last command did not end in time, and has its ring.
    ring: RefCell<Option<Ring>>,
}

/// Where the driver is spoken to.
pub(crate) const CONTROL: &str = "/dev/ublk-control";

type Ring = IoUring<Entry128, cqueue::Entry>;

/// A command's ring, and the memory that it refers to. Nobody looks at the memory before the command has ended.
struct Call {
    ring: Ring,
    memory: Box<[u8]>,
}

impl Control {
    pub(crate) fn open() -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open(CONTROL, flags, Mode::empty())?;
        Ok(Self { device, ring: RefCell::default() })
    }

    /// Has `command` done to a device, with a word of data. `memory` goes to the driver and comes back as it leaves it.
    ///
    /// # Errors
    /// What the driver says, or that it says nothing within `limit`: then it may still do it.
    pub(crate) fn call(
        &self,
        command: Command,
        number: u32,
        (memory, data): (&[u8], u64),
        limit: Duration,
    ) -> Result<Box<[u8]>, ControlError> {
        let failed = |why| ControlError { command, number, why };
        let errno = |error: std::io::Error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let ring = self.ring.take().map_or_else(|| Ring::builder().build(2), Ok).map_err(errno)?;
        let mut call = Call { ring, memory: memory.into() };
        let mut head = [0; 80];
        head[0..4].copy_from_slice(&number.to_ne_bytes());
        // Of no queue.
        head[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        let length = u16::try_from(call.memory.len()).map_err(|_| failed(Errno::INVAL))?;
        head[6..8].copy_from_slice(&length.to_ne_bytes());
        let address = if length == 0 { 0 } else { call.memory.as_mut_ptr() as u64 };
        head[8..16].copy_from_slice(&address.to_ne_bytes());
        head[16..24].copy_from_slice(&data.to_ne_bytes());
        let entry = UringCmd80::new(Fd(self.device.as_raw_fd()), command.number()).cmd(head).build();
        // SAFETY: the entry refers to `call.memory`, which is on the heap, and which is freed only after the command has ended: a call that
        // does not end in time is leaked with its ring below.
        unsafe { call.ring.submission().push(&entry) }.map_err(|_| failed(Errno::AGAIN))?;
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            // An error is a wake-up: time over, or a signal.
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
