//! An allocator that counts what is asked for, and from where.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

use crate::calls::{self, Calls, FRAMES_MAX};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The frames of a call, innermost first, and zeroes after them.
type Stack = [usize; FRAMES_MAX];

/// There is room for so many calls while requests of one kind are asked; more are remembered, too.
const STACKS_ROOM: usize = 20_000;

struct Counting;

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static STACKS: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

thread_local! {
    /// What this thread asks for is not counted: the client's, and whoever is remembering a place.
    static IS_LEFT_OUT: Cell<bool> = const { Cell::new(false) };
}

#[global_allocator]
static MEMORY: Counting = Counting;

/// What the calling thread asks for is never counted.
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

// SAFETY: everything is the system's allocator's, which is called with what came.
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

/// The calls that asked for memory while `work` ran.
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
