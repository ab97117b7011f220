//! The set of ready tasks, and how tasks are woken.

use super::TASKS_MAX;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::task::Wake;
use core::sync::atomic::{AtomicU64, Ordering};

/// One bit per task, and one per word of those that has any bit set: usually few tasks are ready,
/// and the set is checked at each turn. Wakers must be `Send`, so the bits are atomics; in practice
/// one thread touches them.
pub(super) struct ReadySet {
    words: [AtomicU64; WORDS],
    /// A word's bit here is set after the word, and cleared before it.
    filled: [AtomicU64; WORDS / 64],
}

/// Number of words in a set of tasks.
const WORDS: usize = TASKS_MAX / 64;
const _: () = assert!(TASKS_MAX.is_multiple_of(64 * 64), "a bit for each word, in whole words");

impl ReadySet {
    pub(super) const fn new() -> Self {
        Self {
            words: [const { AtomicU64::new(0) }; WORDS],
            filled: [const { AtomicU64::new(0) }; WORDS / 64],
        }
    }

    pub(super) fn set(&self, task: usize) {
        let word = task / 64;
        self.words[word].fetch_or(1 << (task % 64), Ordering::Release);
        self.filled[word / 64].fetch_or(1 << (word % 64), Ordering::Release);
    }

    /// Moves all set bits into `ready`, in order.
    #[inline]
    pub(super) fn drain(&self, ready: &mut VecDeque<usize>) {
        for (index, filled) in self.filled.iter().enumerate() {
            if filled.load(Ordering::Relaxed) != 0 {
                self.drain_words(index, filled.swap(0, Ordering::Acquire), ready);
            }
        }
    }

    fn drain_words(&self, index: usize, mut filled: u64, ready: &mut VecDeque<usize>) {
        while filled != 0 {
            let word = index * 64 + filled.trailing_zeros() as usize;
            filled &= filled - 1;
            let mut bits = self.words[word].swap(0, Ordering::Acquire);
            while bits != 0 {
                ready.push_back(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

pub(super) struct TaskWaker {
    pub(super) task: usize,
    pub(super) ready: Arc<ReadySet>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.set(self.task);
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.set(self.task);
    }
}
