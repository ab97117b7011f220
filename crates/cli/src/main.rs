//! `bcached`: the one binary. What was typed becomes a command in `flags`, a command becomes a value or a failure,
//! and both are printed in one place, as text or as JSON.
//!
//! Nothing here prompts or reads standard input. Exit statuses are those of `failure::Kind`; a closed standard
//! output (`bcached show DEV | head -1`) ends the program quietly with 0, as its reader asked.

mod commands;
mod flags;
mod later;
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
