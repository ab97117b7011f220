//! `cargo xtask`: chores that are programs.
//!
//! Exit status: 0 when all is well, 1 when not, 2 when the command line is wrong.

mod coverage;
mod mutants;
mod tree;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

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
    /// Print which share of the engine's lines a hunt of the simulator comes to.
    Coverage(coverage::Args),
}

fn main() -> ExitCode {
    let result: Result<bool> = match Cli::parse().command {
        Command::Mutants(args) => mutants::run(&args),
        Command::Coverage(args) => coverage::run(&args),
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

/// Where cargo builds what belongs to the repository at `origin`.
fn target(origin: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| origin.join("target"), PathBuf::from)
}

/// Builds the simulator of `tree`, as fast code, into `target`; to be started by the caller.
fn cargo_build_sim(tree: &Path, target: &Path) -> process::Command {
    let mut cargo = process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(tree).args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "bcached-sim",
        "--bin",
        "sim",
    ]);
    cargo.arg("--target-dir").arg(target).stdin(process::Stdio::null());
    cargo
}
