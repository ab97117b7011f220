//! `sim`: runs seeds and scripts, and reproduces failures.
//!
//! Exit status: 0 if nothing was found, 1 if a fault was found, 2 if the command line or a script
//! is wrong, 141 if the reader of standard output has closed it.

mod bench_model;
mod figures;
mod hunt;
mod machines;
mod names;
mod out;
mod program;
mod run;
mod save;
mod scenario;
mod shorten;
mod sweep;
mod what;

use bcached_sim::system::system_names;
use bcached_sim::workload::{DRAWING, Shape};
use clap::error::ErrorKind::{self, DisplayHelpOnMissingArgumentOrSubcommand as MissingSubcommand};
use clap::{CommandFactory as _, Parser, Subcommand};
use out::say;
use std::error::Error as _;
use std::num::{IntErrorKind, ParseIntError};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "sim", about = "Runs a system in a simulated world, from a seed", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one workload or script, or reproduce a failure.
    Run(run::RunArgs),
    /// Run many seeds, each whole and then with a crash at every operation.
    Sweep(sweep::SweepArgs),
    /// Run fresh seeds of all workloads for some time, some of them with crashes at a few of their
    /// points.
    Hunt(hunt::HuntArgs),
    /// Play named failure scenarios, or list them with the beginnings of their stories.
    Scenario(scenario::ScenarioArgs),
    /// Measure the engine on models of real devices, in virtual time, and print the figures beside
    /// their bounds.
    BenchModel(bench_model::BenchModelArgs),
    /// Run ten virtual machines on one cache through kills, resets, power cuts and mirror failures,
    /// and report the dirty data and hits of each over time.
    Machines(machines::MachinesArgs),
    /// List the systems and workloads, and the drawing.
    List,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && error.kind() != MissingSubcommand => {
            eprintln!("sim: {}", sentence(&error));
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Sweep(args) => sweep::sweep_seeds(&args),
        Command::Hunt(args) => hunt::hunt(&args),
        Command::Scenario(args) => scenario::scenario(&args),
        Command::BenchModel(args) => bench_model::bench_model(&args),
        Command::Machines(args) => machines::machines(&args),
        Command::List => {
            say!("systems: {}", system_names().join(" "));
            say!("workloads: {}", Shape::all().iter().map(|shape| shape.name).collect::<Vec<_>>().join(" "));
            say!("drawing: {DRAWING}");
            Ok(true)
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Returns one sentence that says what is wrong. It leaves out clap's list of options; where it
/// helps it says what could be meant.
fn sentence(error: &clap::Error) -> String {
    let report = error.to_string();
    let first = report.split("\n\n").next().unwrap_or_default();
    let words = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = words.trim_start_matches("error: ");
    if let Some(no_number) = error.source().and_then(|source| source.downcast_ref::<ParseIntError>()) {
        let wanted = match no_number.kind() {
            IntErrorKind::PosOverflow => "the number is too large",
            _ => "it must be a whole number, such as 7",
        };
        return words.replace(&no_number.to_string(), wanted);
    }
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let cli = Cli::command();
            let commands: Vec<&str> = cli.get_subcommands().map(clap::Command::get_name).collect();
            format!("{words}: the commands are {}", commands.join(", "))
        }
        ErrorKind::UnknownArgument => {
            format!("{words}: `{} COMMAND --help` lists the options", program::name())
        }
        _ => words.to_owned(),
    }
}
