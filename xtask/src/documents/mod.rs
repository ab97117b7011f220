//! `cargo xtask documents`: checks what documents promise about the code, and how both are written.
//!
//! - Each invariant of `docs/invariants.md` is cited where it is kept and where it is proven
//!   (see `invariants`).
//! - Links between documents lead somewhere (see `links`).
//! - Lines of prose are at most [`widths::COLUMNS`] wide (see `widths`).

mod invariants;
mod links;
mod widths;

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file under version control.
pub struct File {
    /// Its path from the root of the repository.
    pub path: PathBuf,
    /// Its content.
    pub text: String,
}

impl File {
    /// Whether the file name ends with this extension.
    fn is(&self, extension: &str) -> bool {
        self.path.extension().is_some_and(|found| found == extension)
    }
}

/// Checks the repository at `root` and prints what is wrong. Returns false if anything is.
///
/// # Errors
/// A file that cannot be read, or git that cannot be run.
pub fn run(root: &Path) -> Result<bool> {
    let files = files(root)?;
    let mut wrong = invariants::check(&files);
    wrong.extend(links::check(root, &files));
    wrong.extend(widths::check(&files));
    for complaint in &wrong {
        println!("{complaint}");
    }
    Ok(wrong.is_empty())
}

/// Reads all text files that git knows, including new ones that are not ignored.
fn files(root: &Path) -> Result<Vec<File>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]).current_dir(root);
    let output = git.output().context("cannot run git")?;
    anyhow::ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let mut files = Vec::new();
    for path in output.stdout.split(|byte| *byte == 0).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(String::from_utf8_lossy(path).into_owned());
        let is_read = ["rs", "md", "patch"].iter().any(|kind| path.extension().is_some_and(|of| of == *kind));
        // A file that was removed and not committed yet is still listed.
        if is_read && root.join(&path).is_file() {
            let text = fs::read_to_string(root.join(&path)).with_context(|| format!("{}", path.display()))?;
            files.push(File { path, text });
        }
    }
    Ok(files)
}

#[cfg(test)]
pub fn file(path: &str, text: &str) -> File {
    File { path: path.into(), text: text.to_owned() }
}
