//! `counted-requests [--told FILE] CONFIG CONTROL PLACE COUNT`: counts memory allocations while
//! requests are served.
//!
//! Dirty pages of the kernel may wait for a request, and the kernel waits for them before it can
//! give memory. A request that allocates can therefore deadlock.
//!
//! The daemon runs in this process, with its threads, on the configuration CONFIG and with the
//! control socket CONTROL. A client in the same process sends one request at a time to the volume
//! at PLACE: the Unix socket of an NBD server that exports it as `tank`, a file or a block device.
//! A counting allocator records the allocations of every thread except the client's, with their
//! call stacks.
//!
//! With `--told`, nothing is judged and the calls are written to FILE. An emulated processor would
//! take a minute to read the program's debug information, and would need to have it.
//! `counted-requests --judge COUNT` reads such calls from its standard input and judges them. It
//! must be the same build.
//!
//! **Rules:**
//!
//! - A request allocates no memory, whatever front end it came through.
//! - A write may allocate if it has to wait for a leaf that is being rewritten ([`WAITS_MAX`]).
//! - The B-tree may allocate where a write makes it grow ([`GROWTH_MAX`]); that is in the budget
//!   for nodes.
//! - Background work (write-back, garbage collection, writing of leaves, the executor's own lists)
//!   has its own pace and allocates whenever it has something to do. It is reported, not judged.
//!
//! Requests here are 4 KiB long, so each lies in one bucket. A request across several buckets needs
//! a list entry for each part.

mod calls;
mod client;
mod memory;

use bcached_config::CommandLine;
use calls::{Calls, Found};
use client::{Ask, Client};
use memory::{counted, leave_out};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Allocations allowed to one kind of write, per hundred requests. Per 2000 requests, 0 to 30 were
/// seen, as leaves are rewritten at a pace of their own. One for each write would be far too many.
const WAITS_MAX: u64 = 10;
/// The same for growth of the B-tree. Per 2000 requests, 60 to 374 were seen.
const GROWTH_MAX: u64 = 50;
/// Blocks written before the counting starts, as a multiple of the number of requests of a kind.
const KNOWN: u64 = 4;
const LIMIT: Duration = Duration::from_secs(60);

/// Which blocks a kind of request addresses.
#[derive(Clone, Copy)]
enum Blocks {
    Known,
    New,
}

/// The kinds of request: name, requests, blocks, and the allocations allowed per hundred (by
/// requests, by the B-tree).
const KINDS: [(&str, &[Ask], Blocks, [u64; 2]); 5] = [
    ("read hits", &[Ask::Read], Blocks::Known, [0, 0]),
    ("flushes", &[Ask::Flush], Blocks::Known, [0, 0]),
    ("overwrites", &[Ask::Write], Blocks::Known, [WAITS_MAX, GROWTH_MAX]),
    ("new writes", &[Ask::Write], Blocks::New, [WAITS_MAX, GROWTH_MAX]),
    ("overwrites and flushes", &[Ask::Write, Ask::Flush], Blocks::Known, [WAITS_MAX, GROWTH_MAX]),
];

fn main() -> ExitCode {
    match work() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("counted-requests: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether the rules hold, as far as this run judges them.
fn work() -> Result<bool, Box<dyn Error>> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (mut told, arguments) = match &arguments[..] {
        [option, count] if option == "--judge" => {
            let (count, mut input) = (number(count)?, io::stdin().lock());
            return each_kind(
                |_asks, _blocks| Calls::read(&mut input),
                |kind, known, calls| Ok(judge(kind, count, known, calls)),
            );
        }
        [option, file, arguments @ ..] if option == "--told" => (Some(File::create(file)?), arguments),
        arguments => (None, arguments),
    };
    let [config, control, place, count] = arguments else {
        return Err(
            "usage: counted-requests [--told FILE] CONFIG CONTROL PLACE COUNT, or --judge COUNT".into()
        );
    };
    let count = number(count)?;
    let (config, control, place) = (Path::new(config), Path::new(control), Path::new(place));
    let line = CommandLine {
        config: Some(config.to_owned()),
        control: Some(control.to_owned()),
        ..CommandLine::default()
    };
    leave_out();
    let daemon = thread::spawn(move || bcached_daemon::serve(line).map_err(|error| error.to_string()));
    let started = Instant::now();
    let mut client = loop {
        match Client::open(place) {
            Ok(client) => break client,
            Err(_) if daemon.is_finished() => {
                ended(daemon)?;
                return Err("the daemon ended before it was asked".into());
            }
            Err(error) if started.elapsed() > LIMIT => {
                return Err(format!("it does not serve {}: {error}", place.display()).into());
            }
            Err(_not_yet) => thread::sleep(Duration::from_millis(20)),
        }
    };
    warm(&mut client, count)?;
    let is_kept = each_kind(
        |asks, blocks| {
            let first = match blocks {
                Blocks::Known => 0,
                Blocks::New => KNOWN * count,
            };
            let (result, calls) = counted(|| ask_all(&mut client, asks, first, count));
            result.map(|()| calls)
        },
        |kind, known, calls| match &mut told {
            Some(told) => calls.write(told).map(|()| true),
            None => Ok(judge(kind, count, known, calls)),
        },
    )?;
    drop(client);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)?;
    ended(daemon)?;
    Ok(is_kept)
}

fn ended(daemon: JoinHandle<Result<(), String>>) -> Result<(), Box<dyn Error>> {
    Ok(daemon.join().map_err(|_panic| "the daemon panicked")??)
}

fn number(word: &OsStr) -> Result<u64, Box<dyn Error>> {
    let number = word.to_str().and_then(|word| word.parse().ok());
    number.ok_or_else(|| format!("not a number: {}", word.display()).into())
}

/// Warms up, so that whatever grows only once has grown.
fn warm(client: &mut Client, count: u64) -> io::Result<()> {
    ask_all(client, &[Ask::Write], 0, KNOWN * count)?;
    for asks in [&[Ask::Read][..], &[Ask::Write], &[Ask::Write, Ask::Flush]] {
        ask_all(client, asks, 0, count)?;
    }
    Ok(())
}

/// Runs each kind of request in turn. `calls` supplies the calls of a kind, and `ends` judges them.
/// Returns whether `ends` accepted every kind.
fn each_kind(
    mut calls: impl FnMut(&[Ask], Blocks) -> io::Result<Calls>,
    mut ends: impl FnMut(&str, [u64; 2], &Calls) -> io::Result<bool>,
) -> Result<bool, Box<dyn Error>> {
    let mut is_well = true;
    for (name, asks, blocks, known) in KINDS {
        is_well &= ends(name, known, &calls(asks, blocks)?)?;
    }
    Ok(is_well)
}

/// Returns whether `count` requests of a kind keep the rules.
fn judge(name: &str, count: u64, known: [u64; 2], calls: &Calls) -> bool {
    let Found { of_requests, of_the_tree, beside, places } = calls.judged();
    println!(
        "{name}: {count} asked for memory {of_requests} times, the tree for them {of_the_tree}, others {beside}"
    );
    let [waits, growth] = known.map(|of_a_hundred| of_a_hundred * count / 100);
    let is_kept = of_requests <= waits && of_the_tree <= growth;
    if !is_kept {
        println!("{name}: {waits} times and {growth} for the tree are known of, not\n{places}");
    }
    is_kept
}

/// Sends every request in `asks` for each block, in a non-sequential order.
fn ask_all(client: &mut Client, asks: &[Ask], first: u64, count: u64) -> io::Result<()> {
    for n in 0..count {
        // A prime that divides no count used here.
        let block = first + n * 7919 % count;
        for ask in asks {
            client.ask(*ask, block)?;
        }
    }
    Ok(())
}
