//! `sim`: runs seeds and scripts, and shows a failing one again.
//!
//! Exit status: 0 when nothing was found, 1 when a fault was, 2 when the command line or a script is wrong, 141 when
//! nobody reads any more what is printed.

mod figures;
mod hunt;
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
use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as MissingSubcommand;
use clap::{Parser, Subcommand};
use out::say;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "sim", about = "Runs a system in a simulated world, from a seed", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one workload or script, or show a failure again.
    Run(run::Args),
    /// Run many seeds, each whole and then with a crash at every operation.
    Sweep(sweep::Args),
    /// Run fresh seeds of all workloads for some time, some of them with crashes at a few of their points.
    Hunt(hunt::Args),
    /// Play named disasters, or list them with the beginnings of their stories.
    Scenario(scenario::Args),
    /// Name the systems and workloads, and the drawing.
    List,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && error.kind() != MissingSubcommand => {
            eprintln!("sim: {}", sentence(&error.to_string()));
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Sweep(args) => sweep::sweep_seeds(&args),
        Command::Hunt(args) => hunt::hunt(&args),
        Command::Scenario(args) => scenario::scenario(&args),
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

/// What is wrong, of a report that goes on with what options there are.
fn sentence(report: &str) -> String {
    let first = report.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    words.join(" ").trim_start_matches("error: ").to_owned()
}
