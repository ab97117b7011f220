//! How this program was called: commands that it prints begin so, and run as they are printed where the user stands.

use bcached_sim::workload::shell_word;
use std::path::Path;

/// The program as it was called, as a shell takes it.
pub fn name() -> String {
    std::env::args_os().next().map_or_else(|| "sim".to_owned(), |name| quoted(Path::new(&name)))
}

/// A path as a shell takes it.
pub fn quoted(path: &Path) -> String {
    shell_word(&path.to_string_lossy())
}
