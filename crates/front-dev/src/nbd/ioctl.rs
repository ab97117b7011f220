//! The ioctls of the kernel's NBD client.
#![allow(unsafe_code, reason = "no crate wraps the calls of linux/nbd.h, or a thread's signal mask")]

use rustix::fd::{AsFd, AsRawFd as _};
use rustix::io::Errno;
use rustix::ioctl::{IntegerSetter, Opcode, opcode};
use std::fs::File;

const fn number(of: u8) -> Opcode {
    opcode::none(0xab, of)
}

/// Requests of `linux/nbd.h`. Each takes a number or nothing, and returns nothing.
const SET_SOCK: Opcode = number(0);
const SET_BLKSIZE: Opcode = number(1);
const DO_IT: Opcode = number(3);
const CLEAR_SOCK: Opcode = number(4);
const SET_SIZE_BLOCKS: Opcode = number(7);
const DISCONNECT: Opcode = number(8);
const SET_TIMEOUT: Opcode = number(9);
const SET_FLAGS: Opcode = number(10);

fn call<const OPCODE: Opcode>(device: &File, value: usize) -> Result<(), Errno> {
    // SAFETY: these calls take a number by value, and neither read nor write memory of this
    // process. If the descriptor is not a device of the driver, the kernel refuses the request
    // number.
    unsafe { rustix::ioctl::ioctl(device, IntegerSetter::<OPCODE>::new_usize(value)) }
}

/// Claims the device for this thread to set up, with `socket` as its connection, which the kernel
/// keeps. Fails with `EBUSY` if the device is in use.
pub(super) fn set_socket(device: &File, socket: impl AsFd) -> Result<(), Errno> {
    let number = usize::try_from(socket.as_fd().as_raw_fd()).map_err(|_| Errno::BADF)?;
    call::<SET_SOCK>(device, number)
}

/// Sets its block size, a power of two from 512 bytes to a page.
pub(super) fn set_block_bytes(device: &File, bytes: usize) -> Result<(), Errno> {
    call::<SET_BLKSIZE>(device, bytes)
}

/// Sets its size in blocks. Also works while the device is served.
pub(super) fn set_blocks(device: &File, blocks: usize) -> Result<(), Errno> {
    call::<SET_SIZE_BLOCKS>(device, blocks)
}

/// Sets the server's features: the transmission flags of the NBD protocol.
pub(super) fn set_flags(device: &File, flags: u16) -> Result<(), Errno> {
    call::<SET_FLAGS>(device, flags.into())
}

/// Sets no timeout: requests wait for the server as long as it takes.
pub(super) fn set_no_timeout(device: &File) -> Result<(), Errno> {
    call::<SET_TIMEOUT>(device, 0)
}

/// Serves the device until the connection ends.
pub(super) fn do_it(device: &File) -> Result<(), Errno> {
    call::<DO_IT>(device, 0)
}

/// Ends the connection. Requests that the server already has are waited for.
pub(super) fn disconnect(device: &File) -> Result<(), Errno> {
    call::<DISCONNECT>(device, 0)
}

/// Ends the connection whatever is pending, and releases the socket.
pub(super) fn clear_socket(device: &File) -> Result<(), Errno> {
    call::<CLEAR_SOCK>(device, 0)
}

/// Blocks all signals on this thread, except SIGKILL: a signal would end [`do_it`].
pub(super) fn block_signals() {
    // SAFETY: `sigset_t` is a plain C value, and all zeroes is a valid one. `sigfillset` and
    // `pthread_sigmask` read and write only the set, which lives on this stack frame; the old mask
    // is not asked for.
    unsafe {
        let mut all: libc::sigset_t = core::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, core::ptr::null_mut());
    }
}
