//! Skips a test with a reason.
//!
//! Rust's test runner counts a test that returns early as passed. A test that cannot run here
//! therefore prints one line `skipped: REASON`, and `tests/summary.awk` counts it as skipped
//! instead of passed. In CI, no test may be skipped, so a missing tool is a failure there.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Directories searched besides `PATH`, because an ordinary user's `PATH` may lack the
/// administrator's tools.
const ADMIN_DIRECTORIES: [&str; 2] = ["/usr/sbin", "/sbin"];

/// Prints the line that makes the running test count as skipped. The test returns right after it.
pub fn skip(reason: &str) {
    println!("skipped: {}", reason.replace('\n', " "));
}

/// Returns the path of `program` if it is installed.
#[must_use]
pub fn program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(ADMIN_DIRECTORIES.iter().map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// Returns true if all of `programs` are installed. Otherwise, the test counts as skipped and
/// should return.
#[must_use = "a test whose programs are missing has to return"]
pub fn programs(programs: &[&str]) -> bool {
    let missing: Vec<&str> = programs.iter().copied().filter(|name| program(name).is_none()).collect();
    if missing.is_empty() {
        return true;
    }
    skip(&format!("not installed: {}", missing.join(", ")));
    false
}

/// Returns true if FUSE mounts are possible here. Otherwise, the test counts as skipped and should
/// return.
#[must_use = "a test that cannot mount has to return"]
pub fn fuse() -> bool {
    match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => rustix::process::geteuid().is_root() || programs(&["fusermount3"]),
        Err(error) => {
            skip(&format!("/dev/fuse cannot be opened: {error}"));
            false
        }
    }
}

/// Returns the directory of the 6.12 kernel that `tests/fetch-kernel` downloaded, or `None` without
/// one.
#[must_use]
pub fn kernel_6_12() -> Option<PathBuf> {
    kernel("BCACHED_KERNEL_DIR", "linux-6.12")
}

/// Returns the directory of the later kernel (6.16 or newer) that `tests/fetch-kernel new`
/// downloaded.
#[must_use]
pub fn kernel_new() -> Option<PathBuf> {
    kernel("BCACHED_NEW_KERNEL_DIR", "linux-new")
}

/// Returns the directory that `variable` names, or else the one called `name` where kernels are
/// kept.
fn kernel(variable: &str, name: &str) -> Option<PathBuf> {
    let directory = env::var_os(variable).map(PathBuf::from).or_else(|| {
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
        Some(cache.or_else(home)?.join("bcached").join(name))
    })?;
    directory.join("complete").is_file().then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_and_a_missing_one_is_not() {
        assert!(program("sh").is_some());
        assert_eq!(program("no-such-program-anywhere"), None);
    }
}
