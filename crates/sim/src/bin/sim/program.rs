//! The name by which this program was called. Commands that it prints begin with it, so that they
//! can be run unchanged in the user's current directory.

use bcached_sim::workload::shell_word;
use std::path::Path;

/// Returns the program as it was called, quoted for a shell.
pub fn name() -> String {
    std::env::args_os().next().map_or_else(|| "sim".to_owned(), |name| quoted(Path::new(&name)))
}

/// Returns a path quoted for a shell.
pub fn quoted(path: &Path) -> String {
    shell_word(&path.to_string_lossy())
}
