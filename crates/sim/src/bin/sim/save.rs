//! A failing workload as a script, for `sim run --script`.

use crate::out::say;
use crate::program;
use anyhow::{Result, bail};
use bcached_sim::failure::Cut;
use bcached_sim::script::Script;
use bcached_sim::workload::Workload;
use std::path::Path;

/// Refuses a file that is there, before anything is run.
pub fn check_new(path: Option<&Path>) -> Result<()> {
    match path {
        Some(path) if path.exists() => {
            bail!("{} exists already: a script is saved to a new file", path.display())
        }
        _ => Ok(()),
    }
}

/// Writes `workload`, ended by `cuts`, to `path`, and says how to run it on `system`.
pub fn save(path: &Path, system: &str, workload: &Workload, cuts: &[Cut]) -> Result<()> {
    Script::of(workload, cuts).save(path)?;
    let (program, file) = (program::name(), program::quoted(path));
    say!("saved, to be run with: {program} run --system {system} --script {file}");
    Ok(())
}
