//! `cargo xtask documents`: checks what documents promise about the code, and how both are written.
//!
//! - Each invariant of `docs/invariants.md` is cited where it is kept and where it is proven
//!   (see `invariants`).
//! - Links between documents lead somewhere (see `links`).
//! - Modules and source files that tables and documents name exist (see `files`).
//! - Lines of prose are at most [`widths::COLUMNS`] wide (see `widths`).

mod files;
mod invariants;
mod links;
mod widths;

use anyhow::{Context as _, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the repository.
pub struct TextFile {
    /// Its path from the root of the repository.
    pub path: PathBuf,
    /// Its content.
    pub text: String,
}

impl TextFile {
    /// Whether the file name ends with this extension.
    fn is(&self, extension: &str) -> bool {
        self.path.extension().is_some_and(|found| found == extension)
    }
}

/// Checks the repository at `root` and prints what is wrong. Returns false if anything is.
///
/// # Errors
/// A file that cannot be read.
pub fn run(root: &Path) -> Result<bool> {
    let files = read_all(root)?;
    let mut wrong = invariants::check(&files);
    wrong.extend(links::check(root, &files));
    wrong.extend(widths::check(&files));
    wrong.extend(files::check(&files));
    for complaint in &wrong {
        println!("{complaint}");
    }
    Ok(wrong.is_empty())
}

/// Reads all text files below `root` but for those that builds have made.
fn read_all(root: &Path) -> Result<Vec<TextFile>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        for entry in fs::read_dir(&path).with_context(|| format!("{}", path.display()))? {
            let entry = entry.with_context(|| format!("{}", path.display()))?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().with_context(|| format!("{}", path.display()))?;
            let extension = path.extension().unwrap_or_default();
            if kind.is_dir() && entry.file_name() != "target" && entry.file_name() != ".git" {
                folders.push(path);
            } else if kind.is_file() && ["rs", "md", "patch"].iter().any(|read| extension == *read) {
                let text = fs::read_to_string(root.join(&path));
                files.push(TextFile { text: text.with_context(|| format!("{}", path.display()))?, path });
            }
        }
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

#[cfg(test)]
pub fn file(path: &str, text: &str) -> TextFile {
    TextFile { path: path.into(), text: text.to_owned() }
}
