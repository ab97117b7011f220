//! `cargo xtask`: chores that are programs.
//!
//! Exit status: 0 when all is well, 1 when not, 2 when the command line is wrong.

mod coverage;
mod mutants;
mod tree;

use anyhow::{Context as _, Result, bail};
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

/// The repository.
fn origin() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository")
}

/// Builds the simulator of `tree`, as fast code, into `target`, in an environment with `variables`; where it is.
fn build_sim(tree: &Path, target: &Path, variables: &[(&str, &str)]) -> Result<PathBuf> {
    let mut cargo = process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(tree).arg("build");
    cargo
        .args(["--quiet", "--release", "--package", "bcached-sim", "--bin", "sim", "--target-dir"])
        .arg(target);
    cargo.envs(variables.iter().copied()).stdin(process::Stdio::null());
    let status = cargo.status().context("cargo does not start")?;
    if !status.success() {
        bail!("the simulator does not build");
    }
    Ok(target.join("release/sim"))
}
