//! Measures the memory allocated in this process, to the byte. A life of the engine is charged with
//! what was allocated beyond the amount at its beginning, because the modelled devices already hold
//! their contents.

use cap::Cap;
use std::alloc::System;

#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

/// Peak of allocated memory since a given moment, in bytes.
#[derive(Clone, Copy, Default, Debug)]
pub struct HeapPeak {
    before: usize,
    most: usize,
}

impl HeapPeak {
    /// Starts measuring now.
    #[must_use]
    pub fn begin() -> Self {
        let before = HEAP.allocated();
        Self { before, most: before }
    }

    /// Takes a sample.
    pub fn look(&mut self) {
        self.most = self.most.max(HEAP.allocated());
    }

    /// Returns the largest sample above the starting amount, in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        self.most - self.before
    }
}
