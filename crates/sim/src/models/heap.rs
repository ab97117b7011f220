//! What is allocated in this process, to the byte: what a life of the engine holds is what is more than when it began, because the
//! devices of a model have their contents already.

use cap::Cap;
use std::alloc::System;

#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

/// The most that has been allocated since a moment, in bytes.
#[derive(Clone, Copy, Default, Debug)]
pub struct Peak {
    before: usize,
    most: usize,
}

impl Peak {
    /// From now on.
    #[must_use]
    pub fn begin() -> Self {
        let before = HEAP.allocated();
        Self { before, most: before }
    }

    /// Looks again.
    pub fn look(&mut self) {
        self.most = self.most.max(HEAP.allocated());
    }

    /// So many bytes more than at the beginning, when it was looked.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.most - self.before
    }
}
