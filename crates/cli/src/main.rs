//! `bcached`: the one binary. `flags` turns the command line into a command, `commands` turns a
//! command into a value or a failure, and `output` prints both, as text or as JSON.
//!
//! Nothing here prompts or reads standard input. Exit statuses are those of `failure::Kind`. A
//! closed standard output (`bcached show DEV | head -1`) ends the program quietly with 0, as its
//! reader asked.

mod commands;
mod flags;
mod future_commands;
mod output;

use bcached_control::{failure, sizes};
use bcached_offline::{device, image, signatures, superblock};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    let json = flags::wants_json(&words);
    let result = flags::parse(&words).and_then(|command| commands::run(command, json));
    output::finish(result, json)
}
