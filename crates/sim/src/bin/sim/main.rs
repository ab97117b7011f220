//! `sim`: runs seeds and scripts, and shows a failing one again.
//!
//! Exit status: 0 when nothing was found, 1 when a fault was, 2 when the command line or a script is wrong.

mod figures;
mod hunt;
mod names;
mod run;
mod scenario;
mod shorten;
mod sweep;
mod what;

use bcached_sim::system::system_names;
use bcached_sim::workload::{DRAWING, Shape};
use clap::{Parser, Subcommand};
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
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Sweep(args) => sweep::sweep_seeds(&args),
        Command::Hunt(args) => hunt::hunt(&args),
        Command::Scenario(args) => scenario::scenario(&args),
        Command::List => {
            println!("systems: {}", system_names().join(" "));
            println!(
                "workloads: {}",
                Shape::all().iter().map(|shape| shape.name).collect::<Vec<_>>().join(" ")
            );
            println!("drawing: {DRAWING}");
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
