//! The commands. Each returns a report or a failure; none prints, apart from those that write a
//! stream.

mod check;
mod config;
mod doctor;
mod dump;
mod events;
mod explain;
mod ignored;
mod import;
mod jobs;
mod list;
pub mod make;
mod metrics;
mod name_lookup;
mod options;
mod orphan;
mod release;
mod scan;
mod schema;
mod serve;
mod show;
mod status;
mod stop;
mod take_over;
mod top;
mod version;
mod wait;

use crate::failure::Failure;
use crate::flags::Command;
use crate::future_commands;
use crate::output::Report;

/// Runs a command.
///
/// # Errors
/// Those of the command.
pub fn run(command: Command, json: bool) -> Result<Report, Failure> {
    match command {
        Command::Make(flags) => Ok(make::run(&flags)?.warning(ignored::by_make(&flags))),
        Command::Serve(flags) => serve::run(flags),
        Command::Status(flags) => status::run(&flags),
        Command::Explain(flags) => explain::run(&flags),
        Command::Top(flags) => top::run(&flags, json),
        Command::Scan(flags) => scan::run(&flags),
        Command::Config(verb) => config::run(&verb),
        Command::Events(flags) => events::run(&flags, json),
        Command::Metrics(flags) => metrics::run(&flags, json),
        Command::Get(flags) => options::get(&flags),
        Command::Set(flags) => options::set(&flags),
        Command::Unset(flags) => options::unset(&flags),
        Command::Flush(flags) => jobs::flush(&flags),
        Command::Detach(flags) => jobs::detach(&flags),
        Command::Attach(flags) => jobs::attach(&flags),
        Command::Add(flags) => jobs::add(&flags),
        Command::Remove(flags) => jobs::remove(&flags),
        Command::Stop(flags) => stop::run(&flags),
        Command::TakeOver(flags) => take_over::run(&flags),
        Command::Forget(flags) => jobs::forget(&flags),
        Command::Grow(flags) => jobs::grow(&flags),
        Command::Shrink(flags) => jobs::shrink(&flags),
        Command::Replace(flags) => jobs::replace(&flags),
        Command::Release(flags) => release::run(&flags),
        Command::Import(flags) => import::run(&flags),
        Command::Cancel(flags) => jobs::cancel(&flags),
        Command::Wait(flags) => wait::run(&flags),
        Command::List(flags) => list::run(&flags),
        Command::Show(flags) => show::run(&flags),
        Command::Check(flags) => check::run(&flags),
        Command::Dump(flags) => dump::run(&flags, json),
        Command::Doctor(flags) => doctor::run(&flags),
        Command::Schema(flags) => schema::run(&flags),
        Command::Version => version::run(),
        Command::Print(text) => Ok(Report::text_only(text)),
        Command::Other(words) => Err(future_commands::refuse(
            &words.first().map(|word| word.to_string_lossy()).unwrap_or_default(),
        )),
    }
}
