//! The thread of an open file: it carries out, one after another, the tasks that have to wait
//! or take several steps.
//!
//! **Partial sectors.** The port takes whole sectors only, but a program may write any bytes. Even
//! the requests of a program that uses whole sectors may arrive here cut within a sector: the
//! kernel splits a request after 256 pages of the program's memory, and that memory need not start
//! at a page boundary. So a read covers the sectors around the requested bytes. A change of partial
//! sectors is a read-modify-write: it reads the sectors at its ends, inserts its bytes and writes
//! the sectors back, with exclusive access meanwhile ([`crate::ranges`]). Refusing such requests
//! with EINVAL would break `dd bs=100`, tools like `truncate`, and large writes from ordinary
//! memory. After a crash such a write has happened or not sector by sector, like any other.
//!
//! **Memory.** A read for which no memory is available is carried out without a permit, but then
//! the thread waits for its completion: at most one such read per open file. It must not wait for
//! memory, because the memory may be held by the writes that are queued behind it.

use crate::answer::{ReplyTarget, errno};
use crate::volume_file::{VolumeFile, bytes_of};
use bcached_port::{Buffer, ErrorKind, Operation, Permit, Reply, SECTOR_BYTES, StatusExtent};
use fuser::Errno;
use std::ops::Range;
use std::sync::mpsc;

/// A task to carry out for a program.
pub(crate) enum FileTask {
    /// Read these sectors.
    Read { sectors: Range<u64>, answer: ReplyTarget },
    /// Change these sectors.
    Change { operation: Operation, sectors: Range<u64>, permit: Option<Permit>, answer: ReplyTarget },
    /// Make completed writes durable.
    Flush { answer: ReplyTarget },
    /// Write bytes that are not whole sectors.
    WriteBytes { offset: u64, bytes: Vec<u8>, fua: bool, permit: Permit, answer: ReplyTarget },
    /// Zero bytes that are not whole sectors.
    ZeroBytes { bytes: Range<u64>, fua: bool, may_discard: bool, answer: ReplyTarget },
    /// Search for data or for a hole, starting at an offset.
    Seek { offset: u64, data: bool, answer: ReplyTarget },
}

/// The maximum number of extents that a search requests at a time.
const EXTENTS_MAX: u32 = 256;
const SECTOR: usize = 512;
const _: () = assert!(SECTOR as u64 == SECTOR_BYTES, "one size of sector");

impl FileTask {
    /// Whether one request to the engine suffices.
    pub(crate) const fn is_plain(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Change { .. } | Self::Flush { .. })
    }

    /// Refuses the task with an error.
    pub(crate) fn refuse(self, error: Errno) {
        match self {
            Self::Read { answer, .. }
            | Self::Change { answer, .. }
            | Self::Flush { answer }
            | Self::WriteBytes { answer, .. }
            | Self::ZeroBytes { answer, .. }
            | Self::Seek { answer, .. } => answer.refuse(error),
        }
    }
}

/// The sectors that contain these bytes.
pub(crate) const fn sectors_around(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / SECTOR_BYTES..bytes.end.div_ceil(SECTOR_BYTES)
}

/// Whether the bytes are whole sectors.
pub(crate) const fn is_whole(bytes: &Range<u64>) -> bool {
    bytes.start.is_multiple_of(SECTOR_BYTES) && bytes.end.is_multiple_of(SECTOR_BYTES)
}

impl VolumeFile {
    /// Carries out tasks until the file is closed.
    pub(crate) fn run_thread(&self) {
        while let Some(task) = self.next_task() {
            self.carry_out(task);
        }
    }

    fn carry_out(&self, task: FileTask) {
        match task {
            FileTask::Read { sectors, answer } => self.read(sectors, answer),
            FileTask::Change { operation, sectors, permit, answer } => {
                let held = self.ranges.share(sectors);
                self.wait_for_room();
                self.submit(operation, answer, (permit, Some(held)));
            }
            FileTask::Flush { answer } => {
                self.wait_for_room();
                self.submit(Operation::Flush, answer, (None, None));
            }
            FileTask::WriteBytes { offset, bytes, fua, permit, answer } => {
                let result = self.write_bytes(offset, &bytes, fua);
                end(answer, result);
                drop(permit);
            }
            FileTask::ZeroBytes { bytes, fua, may_discard, answer } => {
                let result = self.zero_bytes(&bytes, fua, may_discard);
                end(answer, result);
            }
            FileTask::Seek { offset, data, answer } => match self.seek(offset, data) {
                Ok(found) => match answer {
                    ReplyTarget::Seek { reply, ticket } => {
                        reply.offset(found);
                        drop(ticket);
                    }
                    other => other.refuse(Errno::EIO),
                },
                Err(error) => answer.refuse(error),
            },
        }
    }

    fn read(&self, sectors: Range<u64>, answer: ReplyTarget) {
        let permit = self.try_memory_for(bytes_of(&sectors));
        if permit.is_none() {
            drop(answer.give(self.step(read_of(&sectors))));
            return;
        }
        self.wait_for_room();
        self.submit(read_of(&sectors), answer, (permit, None));
    }

    /// Carries out one request and waits for its completion.
    fn step(&self, operation: Operation) -> Reply {
        let (tell, told) = mpsc::channel();
        self.wait_for_room();
        self.submit(operation, ReplyTarget::Step(tell), (None, None));
        // The port answers every request. If the thread that receives the replies has died, the
        // outcome is unknown.
        told.recv().unwrap_or_else(|_| Reply::failed(ErrorKind::Io, None))
    }

    fn read_sectors(&self, sectors: &Range<u64>) -> Result<Buffer, ErrorKind> {
        let reply = self.step(read_of(sectors));
        reply.result?;
        reply.buffer.filter(|buffer| buffer.len() == bytes_of(sectors)).ok_or(ErrorKind::Io)
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), ErrorKind> {
        let range = offset..offset + bytes.len() as u64;
        let sectors = sectors_around(&range);
        let _held = self.ranges.have_alone(sectors.clone());
        let mut whole = Buffer::zeroed(bytes_of(&sectors));
        let last = sectors.end - 1;
        let starts_inside = !range.start.is_multiple_of(SECTOR_BYTES);
        let ends_inside = !range.end.is_multiple_of(SECTOR_BYTES);
        if starts_inside || (ends_inside && last == sectors.start) {
            let first = self.read_sectors(&(sectors.start..sectors.start + 1))?;
            whole.as_mut_slice()[..SECTOR].copy_from_slice(first.as_slice());
        }
        if ends_inside && last > sectors.start {
            let end = self.read_sectors(&(last..sectors.end))?;
            let at = whole.len() - SECTOR;
            whole.as_mut_slice()[at..].copy_from_slice(end.as_slice());
        }
        let skip = in_sector(offset);
        whole.as_mut_slice()[skip..skip + bytes.len()].copy_from_slice(bytes);
        self.step(Operation::Write { sector: sectors.start, payload: whole.freeze(), fua }).result
    }

    fn zero_bytes(&self, bytes: &Range<u64>, fua: bool, may_discard: bool) -> Result<(), ErrorKind> {
        let around = sectors_around(bytes);
        let _held = self.ranges.have_alone(around.clone());
        let inside = bytes.start.div_ceil(SECTOR_BYTES)..bytes.end / SECTOR_BYTES;
        if inside.start > inside.end {
            // Within one sector.
            return self.zero_part(around.start, in_sector(bytes.start)..in_sector(bytes.end), fua);
        }
        if around.start < inside.start {
            self.zero_part(around.start, in_sector(bytes.start)..SECTOR, fua)?;
        }
        if inside.end < around.end {
            self.zero_part(inside.end, 0..in_sector(bytes.end), fua)?;
        }
        if inside.is_empty() {
            return Ok(());
        }
        let (sector, sectors) = (inside.start, inside.end - inside.start);
        self.step(Operation::WriteZeroes { sector, sectors, fua, may_discard }).result
    }

    fn zero_part(&self, sector: u64, part: Range<usize>, fua: bool) -> Result<(), ErrorKind> {
        let mut buffer = self.read_sectors(&(sector..sector + 1))?;
        buffer.as_mut_slice()[part].fill(0);
        self.step(Operation::Write { sector, payload: buffer.freeze(), fua }).result
    }

    /// Finds data or a hole. A hole is any range that reads as zeroes, whether or not space is
    /// allocated for it: a program that copies the file skips it.
    fn seek(&self, offset: u64, data: bool) -> Result<i64, Errno> {
        let bytes = self.bytes();
        if offset >= bytes {
            return Err(Errno::ENXIO);
        }
        let mut at = offset / SECTOR_BYTES;
        while at * SECTOR_BYTES < bytes {
            let sectors = bytes / SECTOR_BYTES - at;
            let reply = self.step(Operation::BlockStatus { sector: at, sectors, extents_max: EXTENTS_MAX });
            reply.result.map_err(errno)?;
            if reply.extents.iter().map(|extent| extent.sectors).sum::<u64>() == 0 {
                return Err(Errno::EIO);
            }
            for StatusExtent { sectors, zero, .. } in reply.extents {
                if zero != data {
                    return i64::try_from(offset.max(at * SECTOR_BYTES)).map_err(|_| Errno::EOVERFLOW);
                }
                at += sectors;
            }
        }
        // Beyond the end there is a hole, and no data.
        if data { Err(Errno::ENXIO) } else { i64::try_from(bytes).map_err(|_| Errno::EOVERFLOW) }
    }
}

fn end(answer: ReplyTarget, result: Result<(), ErrorKind>) {
    match result {
        Ok(()) => drop(answer.give(Reply::done())),
        Err(kind) => answer.refuse(errno(kind)),
    }
}

fn read_of(sectors: &Range<u64>) -> Operation {
    Operation::Read { sector: sectors.start, buffer: Buffer::zeroed(bytes_of(sectors)) }
}

/// The offset of a byte within its sector.
const fn in_sector(offset: u64) -> usize {
    (offset % SECTOR_BYTES) as usize
}
