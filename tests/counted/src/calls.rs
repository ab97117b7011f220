//! Records the call stacks of memory allocations, and classifies what each allocation served.
//!
//! The address at which the program is loaded differs from process to process. Addresses are
//! therefore stored and written as their distance from a fixed function of the program, so that
//! another process of the same build can judge them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, Write};

/// Maximum number of frames recorded for a call.
pub const FRAMES_MAX: usize = 64;

/// Files whose code serves requests: the workers that carry them out, the port that transports
/// them, the front ends, the I/O driver.
const OF_REQUESTS: [&str; 4] =
    ["crates/host/src/workers.rs", "crates/front-", "crates/port/", "crates/uring/"];
/// The supervisor of devices serves no request, whatever code it calls.
const BESIDE: &str = "daemon/src/supervisor/";
/// Files that modify the B-tree in memory, on behalf of any caller.
const OF_THE_TREE: [&str; 2] = ["crates/node/", "engine/src/btree/"];
/// Parts of the symbol name in which a background duty of a cache set runs: a closure in
/// `CacheSet::spawn`.
const DUTY: [&str; 3] = ["CacheSet", "::spawn::", "{closure"];

/// How often each call was made, keyed by its frames, innermost first: [`place`]s.
#[derive(Default)]
pub struct Calls(BTreeMap<Vec<usize>, u64>);

/// Returns the position of an address relative to the program, independent of where the program is
/// loaded.
pub fn place(address: usize) -> usize {
    address.wrapping_sub(anchor())
}

fn anchor() -> usize {
    place as fn(usize) -> usize as usize
}

impl Calls {
    pub fn add(&mut self, times: u64, frames: Vec<usize>) {
        *self.0.entry(frames).or_default() += times;
    }

    /// Writes one line for each call, in the form that [`Calls::read`] reads.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        for (frames, times) in &self.0 {
            let frames: Vec<_> = frames.iter().map(|frame| format!("{frame:x}")).collect();
            writeln!(to, "{times} {}", frames.join(" "))?;
        }
        writeln!(to)
    }

    /// Reads what [`Calls::write`] wrote. Truncated input is an error.
    pub fn read(from: &mut impl BufRead) -> io::Result<Self> {
        let mut calls = Self::default();
        let mut line = String::new();
        loop {
            line.clear();
            if from.read_line(&mut line)? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "calls, cut off"));
            }
            let wrong = || io::Error::new(io::ErrorKind::InvalidData, format!("not a call: {line}"));
            let mut words = line.split_whitespace();
            let Some(times) = words.next() else { return Ok(calls) };
            let times = times.parse().map_err(|_no_number| wrong())?;
            let frames = words.map(|word| usize::from_str_radix(word, 16).map_err(|_no_number| wrong()));
            calls.add(times, frames.collect::<io::Result<_>>()?);
        }
    }

    /// Classifies the calls by what they served.
    pub fn judged(&self) -> Found {
        let mut found = Found::default();
        let mut known = BTreeMap::new();
        let mut places = BTreeMap::<String, u64>::new();
        for (frames, times) in &self.0 {
            let names: Vec<Frame> = frames
                .iter()
                .map(|place| known.entry(*place).or_insert_with(|| Frame::at(*place)).clone())
                .collect();
            let is_duty = names.iter().any(|frame| frame.is_duty);
            let ours: Vec<&str> =
                names.iter().map(|frame| frame.places.as_str()).filter(|places| !places.is_empty()).collect();
            let place = ours.join(" < ");
            let is_in = |files: &[&str]| files.iter().any(|file| place.contains(file));
            // A truncated stack, or one without a known line of ours, may belong to a request.
            let is_known = frames.len() < FRAMES_MAX && !place.is_empty();
            if is_known && (is_duty || is_in(&[BESIDE]) || !is_in(&OF_REQUESTS)) {
                found.beside += times;
                continue;
            }
            let count = if is_in(&OF_THE_TREE) { &mut found.of_the_tree } else { &mut found.of_requests };
            *count += times;
            *places.entry(place).or_default() += times;
        }
        for (place, times) in places {
            _ = writeln!(found.places, "  {times} times: {place}");
        }
        found
    }
}

/// The allocations found, by what they served.
#[derive(Default)]
pub struct Found {
    /// Number of allocations by requests and the code that carries them.
    pub of_requests: u64,
    /// The call sites of the counted allocations, one a line.
    pub places: String,
    /// Number of allocations made because a request made the B-tree grow.
    pub of_the_tree: u64,
    /// Number of allocations by background work.
    pub beside: u64,
}

/// The source location of a place in the program.
#[derive(Clone, Default)]
struct Frame {
    /// Source files and lines of ours, innermost inlined function first.
    places: String,
    is_duty: bool,
}

impl Frame {
    fn at(place: usize) -> Self {
        let mut frame = Self::default();
        backtrace::resolve(place.wrapping_add(anchor()) as *mut _, |symbol| {
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
