//! `counted-requests [--told FILE] CONFIG CONTROL PLACE COUNT`: what memory is asked for while requests are served. Dirty pages of the kernel may wait for a request,
//! and the kernel for them to give memory.
//!
//! The daemon runs in this process, with its threads, on what CONFIG says; its control socket is CONTROL. A client in the same process asks one
//! thing after the other of the volume at PLACE: an NBD server's unix socket, where it is called `tank`, a file or a block device. An allocator
//! counts what any thread but the client's asks for meanwhile, and remembers from where. With `--told` nothing is judged, and the calls are written to a file:
//! an emulated processor would read the program's debug information for a minute, and have to have it. `counted-requests --judge` judges them, as
//! they come, of the same build.
//!
//! **Rules.** A request asks for no memory, by whatever way it came. A write does if it has to wait for a leaf that is just being rewritten
//! ([`WAITS_MAX`]), and the tree does where a write makes it grow ([`GROWTH_MAX`]), which is in the budget for nodes. What goes on beside requests
//! (write-back, collection, leaves that are written, the executor's own lists) has its own pace and asks as often as it has something to do:
//! told, and not judged. Requests here are of 4 KiB and lie in one bucket each: of several, each part has a place of its own in a list.

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

/// So often memory may be asked for by the writes of one kind, for a hundred of them: of 2000 seen were 0 to 30 times, as leaves are rewritten at a
/// pace of their own. Once for each write would be too much by far.
const WAITS_MAX: u64 = 10;
/// The same of the tree: of 2000 seen were 60 to 374 times.
const GROWTH_MAX: u64 = 50;
/// So many times as many blocks as there are requests of a kind are written before anything is counted.
const KNOWN: u64 = 4;
const LIMIT: Duration = Duration::from_secs(60);

/// Which blocks.
#[derive(Clone, Copy)]
enum Blocks {
    Known,
    New,
}

/// What is asked, and how often a hundred requests of the kind may ask for memory, and the tree for them.
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

/// Whether the rules hold, as far as that is judged.
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

/// What grows once has grown.
fn warm(client: &mut Client, count: u64) -> io::Result<()> {
    ask_all(client, &[Ask::Write], 0, KNOWN * count)?;
    for asks in [&[Ask::Read][..], &[Ask::Write], &[Ask::Write, Ask::Flush]] {
        ask_all(client, asks, 0, count)?;
    }
    Ok(())
}

/// Whether all is well with each kind, one after the other: the calls of one are those that `calls` has, and `ends` is told of them.
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

/// Whether `count` requests of a kind keep the rules.
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

/// One of each for every block, in an order that is no stream.
fn ask_all(client: &mut Client, asks: &[Ask], first: u64, count: u64) -> io::Result<()> {
    for n in 0..count {
        // A prime that divides no count here.
        let block = first + n * 7919 % count;
        for ask in asks {
            client.ask(*ask, block)?;
        }
    }
    Ok(())
}
