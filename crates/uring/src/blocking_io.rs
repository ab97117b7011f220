//! Does one operation with blocking calls, from start to end. The thread-pool driver does every
//! operation this way; the ring driver does those that the ring cannot do.
//!
//! - *Force unit access* is `RWF_DSYNC`. On a block device opened with `O_DIRECT`, the kernel turns
//!   it into `REQ_FUA` and a flush (only the flush if the device has no FUA). On a file, it syncs
//!   the written range and the metadata needed to find it. A file system that refuses the flag gets
//!   a write and an `fdatasync`, from then on without asking.
//! - *Flush* is `fdatasync`, which on both also flushes the device's volatile write cache.
//! - *Discard* on a file punches a hole. On a block device it is `BLKDISCARD`. The content
//!   afterwards is undefined: since Linux 4.12 no block device reports that discarded blocks read
//!   as zeroes.
//! - *Zero* that may unmap is `FALLOC_FL_PUNCH_HOLE`. On a block device, the kernel turns that into
//!   a write-zeroes request, lets the device unmap, and fails rather than write zeroes itself.
//! - *Zero* that keeps its space is `FALLOC_FL_ZERO_RANGE`. On a block device, the kernel turns
//!   that into a write-zeroes request without unmapping. It writes zeroes itself if the device has
//!   no such request, so such devices are not asked. A file system without it (tmpfs) refuses.
//!   (`BLKZEROOUT` is the same: it never unmaps, and falls back to writing.) If either is refused,
//!   the engine writes zeroes, in pieces between which other requests get their turn.

use crate::counters::{Counters, count};
use crate::device::{Device, DeviceKind};
use crate::errno::{is_transient, kind_of};
use crate::prepared_op::{Action, PreparedOp};
use bcached_env::{Buffer, Completion, LentBuffer};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};
use std::cell::RefCell;
use std::io::IoSlice;
use std::ops::Range;
use std::time::Duration;

/// Bytes of lent memory that are copied at once.
const WAY_BYTES: usize = 256 << 10;

/// A blocking call that returns `EAGAIN` this many times in a row has failed. With the pauses in
/// between, that takes 1 s.
const ATTEMPTS: u32 = 1000;

/// Does `work`; blocks.
pub(crate) fn perform(mut work: PreparedOp, counters: &Counters) -> Completion {
    let device = std::sync::Arc::clone(&work.device);
    let must_be_whole = device.must_be_whole(&work.action);
    let result = match &mut work.action {
        Action::Read { offset, buffer, bounce } => match buffer.lent() {
            Some(lent) => read_lent(&device, *offset, lent, counters),
            None => read(&device, *offset, bounce.as_mut().unwrap_or(buffer).as_mut_slice(), counters),
        },
        Action::Write { offset, payload, fua } => match payload.lent() {
            Some(lent) => write_lent(&device, *offset, lent, *fua, counters),
            None => write(&device, *offset, payload.as_slice(), *fua, counters),
        },
        Action::Flush => flush(&device),
        Action::Discard { offset, length } => discard(&device, *offset, *length),
        Action::Zero { offset, length, unmap } => zero(&device, *offset, *length, *unmap, counters),
    };
    // A shrunk device may have caused the error, and makes a success worthless.
    let whole = if must_be_whole || result.is_err() { device.look_whole() } else { Ok(()) };
    work.finish(whole.and(result.map_err(kind_of)))
}

/// Repeats `call` while it fails with a transient error.
fn patiently<T>(counters: &Counters, mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..ATTEMPTS {
        match call() {
            Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(errno) if is_transient(errno) => {}
            other => return other,
        }
        count(&counters.retried);
    }
    Err(Errno::IO)
}

/// Fills `memory`; blocks. It is an error if the file ends before the device does: the file was
/// truncated externally, as the check of its size after an error will show.
fn read(device: &Device, offset: u64, memory: &mut [u8], counters: &Counters) -> Result<(), Errno> {
    let mut done = 0;
    while done < memory.len() {
        let length = (memory.len() - done).min(TRANSFER_MAX);
        let part = &mut memory[done..done + length];
        let at = offset + done as u64;
        let got = patiently(counters, || rustix::io::pread(device.file(), &mut *part, at))?;
        done = device.advance(done, got, done + length).ok_or(Errno::IO)?;
        if got < length {
            count(&counters.continued);
        }
    }
    Ok(())
}

/// The longest single transfer; the kernel stops below 2 GiB anyway.
pub(crate) const TRANSFER_MAX: usize = 1 << 30;

fn write(device: &Device, offset: u64, memory: &[u8], fua: bool, counters: &Counters) -> Result<(), Errno> {
    let mut done = 0;
    while done < memory.len() {
        let length = (memory.len() - done).min(TRANSFER_MAX);
        let at = offset + done as u64;
        if device.reaches_end(at + length as u64) && device.look_whole().is_err() {
            return Err(Errno::IO);
        }
        let dsync = fua && device.dsync();
        let flags = if dsync { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let part = [IoSlice::new(&memory[done..done + length])];
        let put = match patiently(counters, || rustix::io::pwritev2(device.file(), &part, at, flags)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) if dsync => {
                device.refuse_dsync();
                continue;
            }
            other => other?,
        };
        done = device.advance(done, put, done + length).ok_or(Errno::IO)?;
        if put < length {
            count(&counters.continued);
        }
    }
    // Also covers a refusal in the middle of the loop.
    if fua && !device.dsync() { flush(device) } else { Ok(()) }
}

thread_local! {
    /// Intermediate buffer for lent memory.
    static WAY: RefCell<Buffer> = RefCell::new(Buffer::default());
}

/// Calls `with` for each piece of `length` bytes, with a buffer of that size and arbitrary content.
fn by_pieces(
    length: usize,
    mut with: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    WAY.with_borrow_mut(|way| {
        if way.is_empty() {
            *way = Buffer::zeroed(WAY_BYTES);
        }
        (0..length).step_by(WAY_BYTES).try_for_each(|at| {
            let bytes = WAY_BYTES.min(length - at);
            with(at..at + bytes, &mut way.as_mut_slice()[..bytes])
        })
    })
}

/// Reads into a buffer of this thread, and copies from there into the request's lent memory.
fn read_lent(device: &Device, offset: u64, lent: &LentBuffer, counters: &Counters) -> Result<(), Errno> {
    count(&counters.bounced);
    by_pieces(lent.len(), |piece, way| {
        read(device, offset + piece.start as u64, way, counters)?;
        lent.slice(piece).put(way);
        Ok(())
    })
}

/// Writes the request's lent memory by way of a buffer of this thread.
fn write_lent(
    device: &Device,
    offset: u64,
    lent: &LentBuffer,
    fua: bool,
    counters: &Counters,
) -> Result<(), Errno> {
    count(&counters.bounced);
    by_pieces(lent.len(), |piece, way| {
        let at = offset + piece.start as u64;
        lent.slice(piece).copy_to(way).map_err(|_| Errno::IO)?;
        write(device, at, way, fua, counters)
    })
}

fn flush(device: &Device) -> Result<(), Errno> {
    rustix::fs::fdatasync(device.file())
}

fn discard(device: &Device, offset: u64, length: u64) -> Result<(), Errno> {
    let result = match device.kind() {
        DeviceKind::Block => crate::ioctl::discard(device.file(), offset, length),
        DeviceKind::File => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(device.file(), mode, offset, length)
        }
    };
    if matches!(result, Err(Errno::OPNOTSUPP | Errno::NOTTY)) {
        device.refuse_discard();
    }
    result
}

fn zero(device: &Device, offset: u64, length: u64, unmap: bool, counters: &Counters) -> Result<(), Errno> {
    let way = if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
    let mode = way | FallocateFlags::KEEP_SIZE;
    let result = patiently(counters, || rustix::fs::fallocate(device.file(), mode, offset, length));
    if matches!(result, Err(Errno::OPNOTSUPP | Errno::NOSYS)) {
        device.refuse_zeroes(unmap);
    }
    result
}
