//! `cargo xtask`: maintenance tasks of this repository.
//!
//! Exit status: 0 if all is well, 1 if not, 2 if the command line is wrong.

mod bench;
mod callgrind;
mod coverage;
mod documents;
mod instructions;
mod mutants;
mod named_tests;
mod testing;
mod tree;

use anyhow::{Context as _, Result, bail};
use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as MissingSubcommand;
use clap::{Parser, Subcommand};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

#[derive(Parser)]
#[command(name = "xtask", about = "Maintenance tasks of this repository")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every test program, several at a time.
    Test(testing::TestArgs),
    /// Record how cargo starts a test program, instead of running it.
    #[command(hide = true)]
    NoteTest(testing::RecordArgs),
    /// Plant deliberate faults, one at a time, and let the simulator's random workloads look for
    /// them.
    Mutants(mutants::MutantArgs),
    /// Compare this daemon with other servers, on the same bytes.
    Bench(bench::BenchArgs),
    /// Count the instructions of a request in the engine alone, and the memory of a cached block.
    Instructions(instructions::InstructionArgs),
    /// Check that invariants are cited, links lead somewhere, and lines of prose are short.
    Documents,
    /// Print the share of the engine's lines that a hunt of the simulator reaches.
    Coverage(coverage::CoverageArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && error.kind() != MissingSubcommand => {
            eprintln!("xtask: {}", sentence(&error.to_string()));
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let result: Result<bool> = match cli.command {
        Command::Test(args) => testing::run(&args),
        Command::NoteTest(args) => testing::note(&args),
        Command::Mutants(args) => mutants::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Instructions(args) => instructions::run(&args),
        Command::Documents => documents::run(origin()),
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

/// Returns the first paragraph of a clap report, which says what is wrong, with a pointer to the
/// help.
fn sentence(report: &str) -> String {
    let first = report.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    format!("{}; `cargo xtask --help` lists the tasks", words.join(" ").trim_start_matches("error: "))
}

/// Returns the directory in which cargo builds the repository at `origin`.
fn target(origin: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| origin.join("target"), PathBuf::from)
}

/// Returns the root of the repository.
fn origin() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository")
}

/// Returns the cargo that runs this program, without the variables it set for this package.
fn cargo() -> process::Command {
    let mut cargo = process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os().filter(|(name, _)| names_this_package(name)) {
        cargo.env_remove(name);
    }
    cargo
}

/// Returns whether cargo sets the variable for the package that it runs. A build script may depend
/// on it (that of `ring` does): cargo would then rebuild what it built without the variable.
fn names_this_package(variable: &OsStr) -> bool {
    let name = variable.as_encoded_bytes();
    name.starts_with(b"CARGO_PKG_") || name.starts_with(b"CARGO_MANIFEST_")
}

/// Builds a program of this repository in release mode, and returns its path.
fn build(package: &str, program: &str) -> Result<PathBuf> {
    let mut cargo = self::cargo();
    cargo.current_dir(origin()).args([
        "build",
        "--quiet",
        "--release",
        "--package",
        package,
        "--bin",
        program,
    ]);
    if !cargo.stdin(process::Stdio::null()).status().context("cannot start cargo")?.success() {
        bail!("cannot build {program}");
    }
    Ok(target(origin()).join("release").join(program))
}

/// Builds the simulator of `tree` in release mode, but without link-time optimisation, into
/// `target`, in an environment with `variables`. Returns its path.
fn build_sim(tree: &Path, target: &Path, variables: &[(&str, impl AsRef<OsStr>)]) -> Result<PathBuf> {
    let mut cargo = self::cargo();
    cargo.current_dir(tree).arg("build");
    cargo
        .args(["--quiet", "--release", "--package", "bcached-sim", "--bin", "sim", "--target-dir"])
        .arg(target);
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "false");
    cargo.envs(variables.iter().map(|(name, value)| (name, value))).stdin(process::Stdio::null());
    let status = cargo.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("cannot build the simulator");
    }
    Ok(target.join("release/sim"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_refused_in_one_sentence() {
        let refused = |words: &[&str]| {
            let error = Cli::try_parse_from([&["xtask"], words].concat()).err().expect("it is refused");
            sentence(&error.to_string())
        };
        let help = "; `cargo xtask --help` lists the tasks";
        let words = "a value is required for '--only <NAME>' but none was supplied";
        assert_eq!(refused(&["mutants", "--only"]), format!("{words}{help}"));
        assert_eq!(refused(&["mutant"]), format!("unrecognized subcommand 'mutant'{help}"));
    }
}
