//! A scratch copy of the repository under `target/`, to plant faults in.
//!
//! A file is written only if it differs, so that cargo builds anew just what a fault touches.

use anyhow::{Context as _, Result, bail};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is not copied: what tools make, and what no fault is planted in.
const LEFT_OUT: [&str; 4] = ["target", ".git", "fuzz", "mutants"];

/// The copy.
pub struct Tree {
    origin: PathBuf,
    /// Where it lies.
    pub root: PathBuf,
}

impl Tree {
    /// The copy of `origin` in `root`, as it is now or made now.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn of(origin: &Path, root: PathBuf) -> Result<Self> {
        let tree = Self { origin: origin.to_owned(), root };
        tree.restore()?;
        Ok(tree)
    }

    /// Makes the copy equal to its origin.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn restore(&self) -> Result<()> {
        copy(&self.origin, &self.root)
    }

    /// Applies a patch; nothing has changed if that fails.
    ///
    /// # Errors
    /// The patch does not apply, in `git`'s words.
    pub fn apply(&self, patch: &Path) -> Result<()> {
        // Without the ceiling git would take the copy for a folder of the repository around it, and skip every file.
        let above = self.root.parent().context("the copy lies in a folder")?;
        let mut git = Command::new("git");
        // A line of context suffices: what stands around a fault may change.
        git.current_dir(&self.root).env("GIT_CEILING_DIRECTORIES", above).args(["apply", "-C1"]).arg(patch);
        let done = git.stdin(Stdio::null()).output().context("git, which applies patches, does not start")?;
        if !done.status.success() {
            bail!("{}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    remove_others(from, to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name();
        if LEFT_OUT.iter().any(|left_out| name == OsStr::new(left_out)) {
            continue;
        }
        let (from, to) = (entry.path(), to.join(&name));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy(&from, &to)?;
        } else if kind.is_file() {
            let bytes = fs::read(&from).with_context(|| from.display().to_string())?;
            if fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            fs::write(&to, bytes).with_context(|| to.display().to_string())?;
        }
    }
    Ok(())
}

/// Removes from `to` what is not in `from`: it was renamed or removed there since.
fn remove_others(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(to).with_context(|| to.display().to_string())? {
        let entry = entry?;
        if from.join(entry.file_name()).symlink_metadata().is_ok() {
            continue;
        }
        let path = entry.path();
        let removed =
            if entry.file_type()?.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| path.display().to_string())?;
    }
    Ok(())
}
