//! The memory of requests: pages of the process that submitted them. The kernel copies from and to
//! them when the character device is read and written. Newer kernels also register them with the
//! ring, so that devices access them directly.

use crate::abi::data_offset;
use bcached_port::{Buffer, BufferSlot, Lender, LentBuffer};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The memory of the requests of one tag, one after another.
#[derive(Debug)]
struct RequestPages {
    device: Arc<File>,
    /// Its offset in the character device.
    offset: u64,
    slot: BufferSlot,
    /// Whether an access to it has failed.
    has_failed: AtomicBool,
}

impl RequestPages {
    fn note(&self, result: &std::io::Result<()>) -> bool {
        if result.is_err() {
            self.has_failed.store(true, Ordering::Release);
        }
        result.is_ok()
    }
}

impl Lender for RequestPages {
    fn slot(&self) -> BufferSlot {
        self.slot
    }

    fn read(&self, start: usize, into: &mut [u8]) -> bool {
        self.note(&self.device.read_exact_at(into, self.offset + start as u64))
    }

    fn write(&self, start: usize, from: &[u8]) -> bool {
        self.note(&self.device.write_all_at(from, self.offset + start as u64))
    }
}

/// The memory of all tags of a queue that the kernel registers automatically.
#[derive(Default)]
pub(crate) struct QueuePages(Vec<Arc<RequestPages>>);

impl QueuePages {
    /// Makes the pages for `depth` tags, registered from slot `first` on.
    pub(crate) fn new(device: &Arc<File>, (queue, depth): (u16, u16), first: BufferSlot) -> Self {
        let pages = |tag| {
            let (device, offset) = (Arc::clone(device), data_offset(queue, tag));
            let slot = BufferSlot { number: first.number + tag, ..first };
            Arc::new(RequestPages { device, offset, slot, has_failed: AtomicBool::new(false) })
        };
        Self((0..depth).map(pages).collect())
    }

    /// The slot in which the kernel is to register the memory of the tag's next request, if any.
    pub(crate) fn slot(&self, tag: u16) -> Option<u16> {
        self.0.get(usize::from(tag)).map(|pages| pages.slot.number)
    }

    /// Returns the memory of the tag's request, `bytes` long, or `None` if it is not registered.
    pub(crate) fn lend(&self, tag: u16, bytes: usize) -> Option<Buffer> {
        let pages = Arc::clone(self.0.get(usize::from(tag))?);
        Some(LentBuffer::new(pages, bytes).into())
    }

    /// Whether all of the tag's memory has been returned. Until then its request is not answered,
    /// or accesses still in flight would go to the next request's memory.
    pub(crate) fn is_back(&self, tag: u16) -> bool {
        self.0.get(usize::from(tag)).is_none_or(|pages| Arc::strong_count(pages) == 1)
    }

    /// Whether an access to the tag's memory has failed. Checked once for each request, at its end.
    pub(crate) fn has_failed(&self, tag: u16) -> bool {
        self.0.get(usize::from(tag)).is_some_and(|pages| pages.has_failed.swap(false, Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_over_when_nobody_has_its_memory_and_fails_if_its_memory_did() {
        let device = Arc::new(tempfile::tempfile().unwrap());
        let queue_pages = QueuePages::new(&device, (0, 2), BufferSlot { ring: 7, number: 10 });
        assert_eq!(
            [queue_pages.slot(0), queue_pages.slot(1), queue_pages.slot(2)],
            [Some(10), Some(11), None]
        );
        let mut buffer = queue_pages.lend(1, 8192).expect("it is registered");
        let first = buffer.split_to(4096);
        assert_eq!(buffer.lent().expect("lent").place(), (BufferSlot { ring: 7, number: 11 }, 4096));
        drop(buffer);
        assert!(queue_pages.is_back(0) && !queue_pages.is_back(1));
        let payload = first.freeze();
        // The file is empty, so reading these bytes fails.
        assert!(payload.stable().is_err());
        drop(payload);
        assert!(
            queue_pages.is_back(1)
                && queue_pages.has_failed(1)
                && !queue_pages.has_failed(1)
                && !queue_pages.has_failed(0)
        );
    }
}
