//! Turns the parser's errors into one sentence each.

use super::CommandLine;
use crate::failure::{Failure, Kind};
use crate::future_commands;
use clap::CommandFactory as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Returns the parser's error for `words` as a failure.
pub(super) fn wrong_use(error: &clap::Error, words: &[&OsString]) -> Failure {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        || error.kind() == ErrorKind::MissingSubcommand
    {
        return Failure::new(Kind::Usage, "no command given").next("`bcached --help` lists the commands");
    }
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) {
        return no_command(word, words);
    }
    let rendered = error.render().to_string();
    let mut lines = rendered.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let first = lines.next().unwrap_or_default();
    let what = first.strip_prefix("error: ").unwrap_or(first).trim_end_matches(':');
    // A list of missing arguments, or a tip: it is joined into one line; the help has the details.
    let why: Vec<_> = lines.filter(|line| !line.is_empty() && !line.starts_with("For more")).collect();
    let mut failure = Failure::new(Kind::Usage, what).next("`--help` after the command lists its options");
    if !why.is_empty() {
        failure = failure.why(why.join(" "));
    }
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) {
        failure = failure.option(option.split([' ', '=']).next().unwrap_or(option));
    }
    failure
}

/// Returns the refusal of `word`, which is no command at its place among `words`, with or without
/// `help` before it.
fn no_command(word: &str, words: &[&OsString]) -> Failure {
    let before = words.iter().skip(1).take_while(|typed| **typed != word);
    let of: Vec<_> = before
        .map(|typed| typed.to_string_lossy())
        .filter(|typed| typed != "help" && !typed.starts_with('-'))
        .collect();
    let Some(first) = of.first() else { return future_commands::refuse(word) };
    let of = of.join(" ");
    let has_some =
        CommandLine::command().find_subcommand(first.as_ref()).is_some_and(|of| of.has_subcommands());
    if has_some {
        Failure::new(Kind::Usage, format!("there is no command `{of} {word}`"))
            .next(format!("`bcached {of} --help` lists the commands"))
    } else {
        Failure::new(Kind::Usage, format!("`{of}` has no command `{word}`"))
            .next(format!("`bcached {of} --help` lists its options"))
    }
}
