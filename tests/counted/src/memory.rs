//! An allocator that counts allocations and records their call stacks.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

use crate::calls::{self, Calls, FRAMES_MAX};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The frames of a call, innermost first, padded with zeroes.
type Stack = [usize; FRAMES_MAX];

/// Number of calls for which space is reserved while one kind of request runs. Further calls are
/// recorded, too.
const STACKS_ROOM: usize = 20_000;

struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static STACKS: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

thread_local! {
    /// Set while this thread's allocations are not counted: in the client's thread, and in a thread
    /// that is recording a call.
    static IS_LEFT_OUT: Cell<bool> = const { Cell::new(false) };
}

#[global_allocator]
static MEMORY: Counting = Counting;

/// Excludes all allocations of the calling thread from the count.
pub fn leave_out() {
    IS_LEFT_OUT.set(true);
}

fn count() {
    if !IS_COUNTING.load(Ordering::Relaxed) || IS_LEFT_OUT.replace(true) {
        return;
    }
    let mut stack = [0; FRAMES_MAX];
    let mut places = stack.iter_mut();
    backtrace::trace(|frame| places.next().map(|place| *place = frame.ip() as usize).is_some());
    let mut stacks = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
    stacks.push(stack);
    drop(stacks);
    IS_LEFT_OUT.set(false);
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the trait's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Runs `work` and returns its result with the calls that allocated memory meanwhile.
pub fn counted<R>(work: impl FnOnce() -> R) -> (R, Calls) {
    let mut stacks = Vec::with_capacity(STACKS_ROOM);
    std::mem::swap(&mut stacks, &mut *STACKS.lock().unwrap_or_else(PoisonError::into_inner));
    IS_COUNTING.store(true, Ordering::SeqCst);
    let result = work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    let stacks = std::mem::take(&mut *STACKS.lock().unwrap_or_else(PoisonError::into_inner));
    let mut calls = Calls::default();
    for stack in stacks {
        let frames = stack.into_iter().take_while(|address| *address != 0);
        calls.add(1, frames.map(calls::place).collect());
    }
    (result, calls)
}
