//! Saves a workload as a script, for `sim run --script`.

use crate::out::say;
use crate::program;
use anyhow::{Context as _, Result, bail};
use bcached_sim::failure::CrashPoint;
use bcached_sim::script::Script;
use bcached_sim::workload::Workload;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

/// Refuses a file that exists or cannot be created, before anything is run.
pub fn check_new(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let cannot = || format!("cannot write {}", path.display());
    match File::create_new(path) {
        // This was only a test: there may be nothing to save.
        Ok(_) => fs::remove_file(path).with_context(cannot),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("{} already exists: a script is saved only to a new file", path.display())
        }
        Err(error) => Err(error).with_context(cannot),
    }
}

/// Writes `workload`, ended by `cuts`, to `path`, and prints the command that runs it on `system`.
pub fn save(path: &Path, system: &str, workload: &Workload, cuts: &[CrashPoint]) -> Result<()> {
    Script::of(workload, cuts).save(path).context("the script was not saved")?;
    let (program, file) = (program::name(), program::quoted(path));
    say!("saved; run it with: {program} run --system {system} --script {file}");
    Ok(())
}

/// Saves a failing workload. The fault counts as found even if that fails, so an error is only
/// printed.
pub fn save_found(path: &Path, system: &str, workload: &Workload, cuts: &[CrashPoint]) {
    if let Err(error) = save(path, system, workload, cuts) {
        eprintln!("sim: {error:#}");
    }
}
