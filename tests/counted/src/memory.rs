//! An allocator that counts what is asked for, and from where.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The frames of a call, innermost first, and zeroes after them.
type Stack = [usize; FRAMES_MAX];
const FRAMES_MAX: usize = 64;

/// There is room for so many calls while requests of one kind are asked; more are remembered, too.
const STACKS_ROOM: usize = 20_000;

/// Files in which somebody works for a request: who carries it out, who brings it there, front ends, the driver.
const OF_REQUESTS: [&str; 4] = ["engine_thread/workers.rs", "crates/front-", "crates/port/", "crates/uring/"];
/// Who looks after devices works for no request, whatever it does it by.
const BESIDE: &str = "daemon/src/supervisor/";
/// Files that change the tree in memory, for whomever.
const OF_THE_TREE: [&str; 2] = ["crates/node/", "engine/src/btree/"];
/// Parts of the name of what a duty of a cache set's runs in, whatever it works for: a closure in `CacheSet::spawn`.
const DUTY: [&str; 3] = ["CacheSet", "::spawn::", "{closure"];

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

/// What was asked for.
#[derive(Default)]
pub struct Found {
    /// So often by requests and those who carry them.
    pub of_requests: u64,
    /// From where: a line each.
    pub places: String,
    /// So often because a request made the tree grow.
    pub of_the_tree: u64,
    /// So often by whatever goes on beside requests.
    pub beside: u64,
}

/// What was asked for while `work` ran.
pub fn counted<R>(work: impl FnOnce() -> R) -> (R, Found) {
    let mut stacks = Vec::with_capacity(STACKS_ROOM);
    std::mem::swap(&mut stacks, &mut *STACKS.lock().unwrap_or_else(PoisonError::into_inner));
    IS_COUNTING.store(true, Ordering::SeqCst);
    let result = work();
    IS_COUNTING.store(false, Ordering::SeqCst);
    let stacks = std::mem::take(&mut *STACKS.lock().unwrap_or_else(PoisonError::into_inner));
    (result, judged(&stacks))
}

fn judged(stacks: &[Stack]) -> Found {
    let mut found = Found::default();
    let mut frames = BTreeMap::new();
    let mut places = BTreeMap::<String, u32>::new();
    for stack in stacks {
        let addresses = stack.iter().copied().take_while(|address| *address != 0);
        let names: Vec<Frame> = addresses
            .map(|address| frames.entry(address).or_insert_with(|| Frame::at(address)).clone())
            .collect();
        let is_duty = names.iter().any(|frame| frame.is_duty);
        let ours: Vec<&str> =
            names.iter().map(|frame| frame.places.as_str()).filter(|places| !places.is_empty()).collect();
        let place = ours.join(" < ");
        let is_in = |files: &[&str]| files.iter().any(|file| place.contains(file));
        // Of what is cut off, and of what no line of ours is known, it may have been a request.
        let is_known = stack[FRAMES_MAX - 1] == 0 && !place.is_empty();
        if is_known && (is_duty || is_in(&[BESIDE]) || !is_in(&OF_REQUESTS)) {
            found.beside += 1;
            continue;
        }
        let count = if is_in(&OF_THE_TREE) { &mut found.of_the_tree } else { &mut found.of_requests };
        *count += 1;
        *places.entry(place).or_default() += 1;
    }
    for (place, times) in places {
        _ = writeln!(found.places, "  {times} times: {place}");
    }
    found
}

/// What lies at an address of code.
#[derive(Clone, Default)]
struct Frame {
    /// Files of ours and lines, the innermost of what is inlined first.
    places: String,
    is_duty: bool,
}

impl Frame {
    fn at(address: usize) -> Self {
        let mut frame = Self::default();
        backtrace::resolve(address as *mut _, |symbol| {
            let name = symbol.name().map(|name| name.to_string()).unwrap_or_default();
            frame.is_duty |= DUTY.iter().all(|part| name.contains(part));
            let file = symbol.filename().map(|file| file.display().to_string()).unwrap_or_default();
            if let Some(at) = file.find("crates/") {
                let separator = if frame.places.is_empty() { "" } else { " < " };
                _ = write!(frame.places, "{separator}{}:{}", &file[at..], symbol.lineno().unwrap_or(0));
            }
        });
        frame
    }
}
