//! The verbs: what was typed, done. Each gives a report or a failure; none prints.

pub mod make;
pub mod show;
mod version;

use crate::failure::Failure;
use crate::flags::Command;
use crate::later;
use crate::output::Report;

/// Does what was asked for.
///
/// # Errors
/// The command's.
pub fn run(command: Command) -> Result<Report, Failure> {
    match command {
        Command::Make(flags) => make::run(&flags),
        Command::Show(flags) => show::run(&flags),
        Command::Version => version::run(),
        Command::Print(text) => Ok(Report::text_only(text)),
        Command::Other(words) => {
            Err(later::refuse(&words.first().map(|word| word.to_string_lossy()).unwrap_or_default()))
        }
    }
}
