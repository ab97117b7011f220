//! `counted-requests CONFIG CONTROL PLACE`: what memory is asked for while requests are served. Dirty pages of the kernel may wait for a request,
//! and the kernel for them to give memory.
//!
//! The daemon runs in this process, with its threads, on what CONFIG says; its control socket is CONTROL. A client in the same process asks one
//! thing after the other of the volume at PLACE: an NBD server's unix socket, where it is called `tank`, a file or a block device. An allocator
//! counts what any thread but the client's asks for meanwhile, and remembers from where.
//!
//! **Rules.** A request asks for no memory, by whatever way it came. A write does if it has to wait for a leaf that is just being rewritten
//! ([`WAITS_MAX`]), and the tree does where a write makes it grow ([`GROWTH_MAX`]), which is in the budget for nodes. What goes on beside requests
//! (write-back, collection, leaves that are written, the executor's own lists) has its own pace and asks as often as it has something to do:
//! told, and not judged. Requests here are of 4 KiB and lie in one bucket each: of several, each part has a place of its own in a list.

mod client;
mod memory;

use bcached_daemon::config::CommandLine;
use client::{Ask, Client};
use memory::{Found, counted, leave_out};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Requests of one kind.
const COUNT: u64 = 2000;
/// So often memory may be asked for by the writes of one kind: seen were 0 to 30 times, as leaves are rewritten at a pace of their own. Once for
/// each write would be too much by far.
const WAITS_MAX: u64 = COUNT / 10;
/// The same of the tree: seen were 60 to 374 times.
const GROWTH_MAX: u64 = COUNT / 2;
const LIMIT: Duration = Duration::from_secs(60);

/// Which blocks.
#[derive(Clone, Copy)]
enum Blocks {
    Known,
    New,
}

/// What is asked, and how often all requests of the kind may ask for memory, and the tree for them.
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

/// Whether the rules hold.
fn work() -> Result<bool, Box<dyn Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [config, control, place] = &arguments[..] else {
        return Err("usage: counted-requests CONFIG CONTROL PLACE".into());
    };
    let line = CommandLine {
        config: Some(config.clone()),
        control: Some(control.clone()),
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
    let is_kept = ask_all_kinds(&mut client)?;
    drop(client);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)?;
    ended(daemon)?;
    Ok(is_kept)
}

fn ended(daemon: JoinHandle<Result<(), String>>) -> Result<(), Box<dyn Error>> {
    Ok(daemon.join().map_err(|_panic| "the daemon panicked")??)
}

fn ask_all_kinds(client: &mut Client) -> std::io::Result<bool> {
    // Warm: what grows once has grown.
    ask_all(client, &[Ask::Write], 0, 4 * COUNT)?;
    for asks in [&[Ask::Read][..], &[Ask::Write], &[Ask::Write, Ask::Flush]] {
        ask_all(client, asks, 0, COUNT)?;
    }
    let mut is_kept = true;
    for (name, asks, blocks, known) in KINDS {
        let first = match blocks {
            Blocks::Known => 0,
            Blocks::New => 4 * COUNT,
        };
        let (result, found) = counted(|| ask_all(client, asks, first, COUNT));
        result?;
        let Found { of_requests, of_the_tree, beside, places } = found;
        println!(
            "{name}: {COUNT} asked for memory {of_requests} times, the tree for them {of_the_tree}, others {beside}"
        );
        let [waits, growth] = known;
        if of_requests > waits || of_the_tree > growth {
            println!("{name}: {waits} times and {growth} for the tree are known of, not\n{places}");
            is_kept = false;
        }
    }
    Ok(is_kept)
}

/// One of each for every block, in an order that is no stream.
fn ask_all(client: &mut Client, asks: &[Ask], first: u64, count: u64) -> std::io::Result<()> {
    for n in 0..count {
        // A prime that divides no count here.
        let block = first + n * 7919 % count;
        for ask in asks {
            client.ask(*ask, block)?;
        }
    }
    Ok(())
}
