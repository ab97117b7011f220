//! A scratch copy of the repository under `target/`, in which faults are planted.
//!
//! A file is written only if it differs, so that cargo rebuilds only what a fault affects.

use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Parts of the repository that are not copied: generated files, and those in which no fault is
/// planted.
const LEFT_OUT: [&str; 4] = ["target", ".git", "fuzz", "crates/sim/mutants"];

/// The scratch copy.
pub struct ScratchTree {
    origin: PathBuf,
    /// Its root folder.
    pub root: PathBuf,
}

impl ScratchTree {
    /// Creates the copy of `origin` in `root`, or brings an existing one up to date.
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
        copy(&self.origin, &self.root, Path::new(""))
    }

    /// Applies a patch; nothing is changed if that fails.
    ///
    /// # Errors
    /// The patch does not apply, in `git`'s words; or it would be applied twice.
    pub fn apply(&self, patch: &Path) -> Result<()> {
        let Some(complaint) = self.git_apply(&[], patch)? else { return Ok(()) };
        if self.git_apply(&["--check", "--reverse"], patch)?.is_none() {
            bail!(
                "the source already contains this fault: remove it there (`git checkout`); only the patch may \
                 contain it"
            );
        }
        bail!("{complaint}")
    }

    /// Runs `git apply`, and returns its complaint, if any.
    fn git_apply(&self, options: &[&str], patch: &Path) -> Result<Option<String>> {
        // Without the ceiling git would treat the copy as a folder of the surrounding repository,
        // and skip every file.
        let above = self.root.parent().context("the copy has no parent folder")?;
        let mut git = Command::new("git");
        // All of the context must match: a single line of it occurs in more than one place.
        git.current_dir(&self.root)
            .env("GIT_CEILING_DIRECTORIES", above)
            .arg("apply")
            .args(options)
            .arg(patch);
        let done = git.stdin(Stdio::null()).output().context("cannot start git, which applies patches")?;
        let complaint = || String::from_utf8_lossy(&done.stderr).trim().to_owned();
        Ok((!done.status.success()).then(complaint))
    }
}

/// Makes the folder `folder` in `root` equal to that in the repository `origin`.
fn copy(origin: &Path, root: &Path, folder: &Path) -> Result<()> {
    let (from, to) = (origin.join(folder), root.join(folder));
    fs::create_dir_all(&to).with_context(|| to.display().to_string())?;
    remove_others(&from, &to)?;
    for entry in fs::read_dir(&from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if LEFT_OUT.iter().any(|left_out| path == Path::new(left_out)) {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy(origin, root, &path)?;
        } else if kind.is_file() {
            let (from, to) = (entry.path(), root.join(&path));
            let bytes = fs::read(&from).with_context(|| from.display().to_string())?;
            if fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            fs::write(&to, bytes).with_context(|| to.display().to_string())?;
        }
    }
    Ok(())
}

/// Removes from `to` what is not in `from`, because it was renamed or removed there since.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an empty folder for this test alone.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("bcached-xtask-{}-{name}", std::process::id()));
        let _there_was_none = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn what_is_left_out_is_so_in_its_place_alone() {
        let work = folder("left-out");
        let (origin, root) = (work.join("origin"), work.join("copy"));
        let copied = ["crates/engine/src/target/mod.rs", "crates/sim/src/mutants/one.rs", "mutants"];
        let left_out = ["target/release/sim", "fuzz/run", "crates/sim/mutants/one.patch"];
        copied.iter().chain(&left_out).for_each(|path| put(&origin, path, "text"));
        ScratchTree::of(&origin, root.clone()).unwrap();
        let is_there = |path: &&str| root.join(path).exists();
        assert!(copied.iter().all(is_there));
        assert!(!left_out.iter().any(is_there));
        fs::remove_dir_all(work).unwrap();
    }

    #[test]
    fn a_patch_goes_where_all_of_its_context_stands() {
        let work = folder("patch");
        let (origin, patch) = (work.join("origin"), work.join("fault.patch"));
        put(
            &work,
            "fault.patch",
            "--- a/file\n+++ b/file\n@@ -1,5 +1,5 @@\n one\n {\n-    go();\n+    stop();\n }\n two\n",
        );
        put(&origin, "file", "one\n{\n    go();\n}\ntwo\n");
        let tree = ScratchTree::of(&origin, work.join("copy")).unwrap();
        tree.apply(&patch).unwrap();
        assert!(fs::read_to_string(tree.root.join("file")).unwrap().contains("stop()"));
        // The place that it was made for is gone, and the same line occurs in braces elsewhere.
        put(&origin, "file", "one\n{\n}\ntwo\nthree\n{\n    go();\n}\nfour\n");
        tree.restore().unwrap();
        let refused = tree.apply(&patch).expect_err("that is another place").to_string();
        assert!(refused.contains("patch does not apply"), "{refused}");
        // The fault was not removed from the source after the patch was made.
        put(&origin, "file", "one\n{\n    stop();\n}\ntwo\n");
        tree.restore().unwrap();
        let refused = tree.apply(&patch).expect_err("it is there already").to_string();
        let words = "the source already contains this fault: remove it there (`git checkout`); only the patch \
                     may contain it";
        assert_eq!(refused, words);
        fs::remove_dir_all(work).unwrap();
    }
}
