//! Checks that the tests that a planted fault names exist. Where code moves to another crate, such
//! a name becomes stale, and planting the fault runs no test. Here that is noticed without a build.

use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::Path;

/// Checks the arguments for `cargo test` (`-p PACKAGE`, `--lib` or `--test PROGRAM`, a filter)
/// against the sources in `tree`.
///
/// # Errors
/// There is no such package, test program, module or test function.
pub fn check(tree: &Path, words: &[String]) -> Result<()> {
    let mut words = words.iter().map(String::as_str);
    let (mut folder, mut filter) = (None, None);
    while let Some(word) = words.next() {
        match word {
            "-p" => {
                let package = words.next().context("-p without a package")?;
                let found = tree.join("crates").join(package.strip_prefix("bcached-").unwrap_or(package));
                if !found.is_dir() {
                    bail!("there is no package {package}");
                }
                folder = Some(found);
            }
            "--lib" => {}
            "--test" => {
                let program = words.next().context("--test without a program")?;
                let tests = folder.as_deref().context("--test before -p")?.join("tests");
                if !tests.join(program).is_dir() && !tests.join(program).with_extension("rs").is_file() {
                    bail!("there is no test program {program}");
                }
            }
            word => filter = Some(word),
        }
    }
    let folder = folder.context("no package is named")?;
    for part in filter.into_iter().flat_map(|filter| filter.split("::")) {
        if !has(&folder, part)? {
            bail!("there is no test or module {part} in {}", folder.display());
        }
    }
    Ok(())
}

/// Returns whether the folder has a module or function with `part` in its name.
fn has(folder: &Path, part: &str) -> Result<bool> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let is_named = path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains(part));
        if is_named && (is_rust || path.is_dir()) || path.is_dir() && has(&path, part)? {
            return Ok(true);
        }
        if is_rust {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let mut functions = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn "));
            if functions.any(|rest| rest.split('(').next().is_some_and(|name| name.contains(part))) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_test_has_is_noticed() {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("crates/engine");
        fs::create_dir_all(folder.join("src/btree")).unwrap();
        fs::create_dir_all(folder.join("tests/engine")).unwrap();
        fs::write(folder.join("src/btree/walk.rs"), "    fn a_walk_ends() {\n").unwrap();
        fs::write(folder.join("tests/engine/flushes.rs"), "fn a_flush_is_told() {}\n").unwrap();
        let of =
            |line: &str| check(tree.path(), &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        for line in [
            "-p bcached-engine --lib walk",
            "-p bcached-engine --lib btree::walk",
            "-p bcached-engine --test engine a_flush_is",
            "-p bcached-engine --test engine",
        ] {
            assert!(of(line).is_ok(), "{line}");
        }
        for line in [
            "-p bcached-host --lib walk",
            "-p bcached-engine --test suite a_flush_is",
            "-p bcached-engine --lib whole_file",
            "-p bcached-engine --lib offline::walk",
            "--lib walk",
        ] {
            assert!(of(line).is_err(), "{line}");
        }
    }
}
