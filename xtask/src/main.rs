//! `cargo xtask`: chores that are programs.
//!
//! Exit status: 0 when all is well, 1 when not, 2 when the command line is wrong.

mod mutants;
mod tree;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "xtask", about = "Chores of this repository")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Plant deliberate faults, one at a time, and let the simulator's random workloads look for them.
    Mutants(mutants::Args),
}

fn main() -> ExitCode {
    let result: Result<bool> = match Cli::parse().command {
        Command::Mutants(args) => mutants::run(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(1)
        }
    }
}
