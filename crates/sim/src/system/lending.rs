//! Requests whose memory is lent, like that of a ublk queue: every second one, chosen by its
//! position.
//!
//! The lender is as strict as the kernel: memory to be read into cannot be inspected, and memory to
//! be written from cannot be changed. It is not more lenient in any way: once its request has been
//! answered, its memory holds something else, like that of the next request.

use crate::digest::mix;
use bcached_env::{Buffer, BufferSlot, Lender, LentBuffer, Payload};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Content of memory whose request is over.
const OF_ANOTHER: u8 = 0xee;

/// The memory of one request.
#[derive(Debug)]
pub(super) struct LentMemory {
    bytes: Mutex<Vec<u8>>,
    /// The request is a write: its data can be read from here.
    is_written: bool,
    is_over: AtomicBool,
}

impl LentMemory {
    fn new(bytes: &[u8], is_written: bool) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(bytes.to_vec()), is_written, is_over: AtomicBool::new(false) })
    }

    /// Lends the memory for a read into `buffer`, with its arbitrary content; returns the loan and
    /// the buffer for the engine.
    pub(super) fn to_read(sector: u64, buffer: &Buffer) -> Option<(Arc<Self>, Buffer)> {
        is_lent(sector, buffer.len()).then(|| {
            let loan = Self::new(buffer.as_slice(), false);
            (Arc::clone(&loan), LentBuffer::new(loan, buffer.len()).into())
        })
    }

    /// Lends the memory of a write of `payload`; returns the loan and the payload for the engine.
    pub(super) fn to_write(sector: u64, payload: &Payload) -> Option<(Arc<Self>, Payload)> {
        is_lent(sector, payload.len()).then(|| {
            let loan = Self::new(payload.as_slice(), true);
            (Arc::clone(&loan), Buffer::from(LentBuffer::new(loan, payload.len())).freeze())
        })
    }

    /// Ends the loan when its request has been answered; returns what the memory held.
    pub(super) fn end(&self) -> Buffer {
        self.is_over.store(true, Ordering::Relaxed);
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let held = Buffer::copied_from(&bytes);
        bytes.fill(OF_ANOTHER);
        held
    }
}

impl Lender for LentMemory {
    fn slot(&self) -> BufferSlot {
        BufferSlot { ring: 0, number: 0 }
    }

    fn read(&self, start: usize, into: &mut [u8]) -> bool {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        into.copy_from_slice(&bytes[start..start + into.len()]);
        self.is_written
    }

    fn write(&self, start: usize, from: &[u8]) -> bool {
        if self.is_over.load(Ordering::Relaxed) || self.is_written {
            return false;
        }
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes[start..start + from.len()].copy_from_slice(from);
        true
    }
}

/// Decides whether to lend, without drawing, so that the rest of the draws stay the same.
fn is_lent(sector: u64, bytes: usize) -> bool {
    bytes > 0 && mix(&[sector, bytes as u64]).is_multiple_of(2)
}
