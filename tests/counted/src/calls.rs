//! Calls that asked for memory, and for what they did. Where the program lies in memory differs from process to process, so they are kept, and
//! written down, by their distance from a place of its own: another process of the same program may judge them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, Write};

/// Frames that are kept of a call.
pub const FRAMES_MAX: usize = 64;

/// Files in which somebody works for a request: who carries it out, who brings it there, front ends, the driver.
const OF_REQUESTS: [&str; 4] =
    ["crates/host/src/workers.rs", "crates/front-", "crates/port/", "crates/uring/"];
/// Who looks after devices works for no request, whatever it does it by.
const BESIDE: &str = "daemon/src/supervisor/";
/// Files that change the tree in memory, for whomever.
const OF_THE_TREE: [&str; 2] = ["crates/node/", "engine/src/btree/"];
/// Parts of the name of what a duty of a cache set's runs in, whatever it works for: a closure in `CacheSet::spawn`.
const DUTY: [&str; 3] = ["CacheSet", "::spawn::", "{closure"];

/// How often each call was made, by its frames, innermost first: [`place`]s.
#[derive(Default)]
pub struct Calls(BTreeMap<Vec<usize>, u64>);

/// Where the code at an address lies in the program.
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

    /// A line for each, to be read by [`Calls::read`].
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        for (frames, times) in &self.0 {
            let frames: Vec<_> = frames.iter().map(|frame| format!("{frame:x}")).collect();
            writeln!(to, "{times} {}", frames.join(" "))?;
        }
        writeln!(to)
    }

    /// What [`Calls::write`] wrote. An error if it is cut off.
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

    /// What they did.
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
            // Of what is cut off, and of what no line of ours is known, it may have been a request.
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

/// What lies at a place of the program.
#[derive(Clone, Default)]
struct Frame {
    /// Files of ours and lines, the innermost of what is inlined first.
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
