//! An operation as both drivers see it: checked, in bytes, with memory that the device accepts.
//!
//! Operations refused here never reach the kernel, so both drivers and every kind of device refuse
//! the same things: ranges not wholly inside the device, and ranges that are not whole logical
//! blocks. An empty range completes at once.

use crate::counters::{Counters, count};
use crate::device::Device;
use bcached_env::{Buffer, Completion, IoErrorKind, LentBuffer, Op, Payload, Token};
use std::sync::Arc;

/// Bytes in a sector.
pub(crate) const SECTOR: u64 = 512;

/// An operation in flight. Owns its memory and keeps the device open.
pub(crate) struct PreparedOp {
    pub(crate) token: Token,
    pub(crate) device: Arc<Device>,
    pub(crate) action: Action,
}

/// What is to be done. Offsets and lengths are in bytes, inside the device and on its block grid.
pub(crate) enum Action {
    Read {
        offset: u64,
        buffer: Buffer,
        /// The buffer that the device reads into, if it does not accept the caller's memory; same
        /// length.
        bounce: Option<Buffer>,
    },
    Write {
        offset: u64,
        payload: Payload,
        fua: bool,
    },
    Flush,
    Discard {
        offset: u64,
        length: u64,
    },
    Zero {
        offset: u64,
        length: u64,
        unmap: bool,
    },
}

impl Action {
    /// Returns the lent memory that is read into or written from, if any.
    pub(crate) const fn lent(&self) -> Option<&LentBuffer> {
        match self {
            Self::Read { buffer, .. } => buffer.lent(),
            Self::Write { payload, .. } => payload.lent(),
            Self::Flush | Self::Discard { .. } | Self::Zero { .. } => None,
        }
    }
}

impl PreparedOp {
    /// Checks `op` and prepares it. Fails with the completion if it is refused or there is nothing
    /// to do.
    pub(crate) fn new(
        device: Option<&Arc<Device>>,
        token: Token,
        op: Op,
        counters: &Counters,
    ) -> Result<Self, Completion> {
        let Some(device) = device else {
            return Err(finished(token, Err(IoErrorKind::Unreachable), op));
        };
        match check(device, &op) {
            Ok(Some(offset)) => {
                let action = prepare(device, offset, op, counters);
                Ok(Self { token, device: Arc::clone(device), action })
            }
            Ok(None) => Err(finished(token, Ok(()), op)),
            Err(kind) => Err(finished(token, Err(kind), op)),
        }
    }

    /// Ends the operation; copies a bounced read into the caller's memory.
    pub(crate) fn finish(self, result: Result<(), IoErrorKind>) -> Completion {
        let result = result.map_err(|kind| self.device.reason(kind));
        let buffer = match self.action {
            Action::Read { mut buffer, bounce, .. } => {
                if let (Ok(()), Some(bounce)) = (result, bounce) {
                    buffer.put(bounce.as_slice());
                }
                Some(buffer)
            }
            _ => None,
        };
        Completion { token: self.token, result, buffer }
    }
}

/// The completion of an operation that never started.
fn finished(token: Token, result: Result<(), IoErrorKind>, op: Op) -> Completion {
    let buffer = if let Op::Read { buffer, .. } = op { Some(buffer) } else { None };
    Completion { token, result, buffer }
}

/// Returns the first byte of `op` if it can be tried on `device`; `None` if it is empty.
fn check(device: &Device, op: &Op) -> Result<Option<u64>, IoErrorKind> {
    device.check_whole()?;
    let bytes = |length: usize| u64::try_from(length).map_err(|_| IoErrorKind::Invalid);
    let (sector, length) = match op {
        Op::Flush => return Ok(Some(0)),
        Op::Read { sector, buffer } => (*sector, bytes(buffer.len())?),
        Op::Write { sector, payload, .. } => (*sector, bytes(payload.len())?),
        Op::Discard { sector, sectors } | Op::Zero { sector, sectors, .. } => {
            (*sector, sectors.checked_mul(SECTOR).ok_or(IoErrorKind::Invalid)?)
        }
    };
    let info = device.info();
    let block = u64::from(info.logical_block_sectors) * SECTOR;
    let offset = sector.checked_mul(SECTOR).ok_or(IoErrorKind::Invalid)?;
    let end = offset.checked_add(length).ok_or(IoErrorKind::Invalid)?;
    if end > info.sectors * SECTOR || offset % block != 0 || length % block != 0 {
        return Err(IoErrorKind::Invalid);
    }
    let is_known = match op {
        Op::Discard { .. } => info.discard,
        Op::Zero { unmap, .. } => device.zeroes(*unmap),
        Op::Read { .. } | Op::Write { .. } | Op::Flush => true,
    };
    if !is_known {
        return Err(IoErrorKind::Unsupported);
    }
    if !matches!(op, Op::Read { .. }) && !device.is_writable() {
        return Err(IoErrorKind::Unsupported);
    }
    Ok(if length == 0 { None } else { Some(offset) })
}

fn prepare(device: &Device, offset: u64, op: Op, counters: &Counters) -> Action {
    let length_of = |sectors: u64| sectors * SECTOR;
    match op {
        Op::Read { buffer, .. } => {
            let bounce = if buffer.lent().is_some() || device.takes(buffer.as_slice()) {
                None
            } else {
                count(&counters.bounced);
                Some(Buffer::zeroed(buffer.len()))
            };
            Action::Read { offset, buffer, bounce }
        }
        Op::Write { payload, fua, .. } => {
            if payload.lent().is_some() || device.takes(payload.as_slice()) {
                return Action::Write { offset, payload, fua };
            }
            count(&counters.bounced);
            Action::Write { offset, payload: Buffer::copied_from(payload.as_slice()).freeze(), fua }
        }
        Op::Flush => Action::Flush,
        Op::Discard { sectors, .. } => Action::Discard { offset, length: length_of(sectors) },
        Op::Zero { sectors, unmap, .. } => Action::Zero { offset, length: length_of(sectors), unmap },
    }
}
