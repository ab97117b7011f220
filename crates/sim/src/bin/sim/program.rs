//! How this program was called: commands that it prints begin so, and run as they are printed where the user stands.

use std::path::Path;

/// The program as it was called, as a shell takes it.
pub fn name() -> String {
    std::env::args_os().next().map_or_else(|| "sim".to_owned(), |name| quoted(Path::new(&name)))
}

/// A path as a shell takes it.
pub fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy();
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_./".contains(character);
    let plain = !path.is_empty() && path.chars().all(is_plain);
    if plain { path.into_owned() } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shell_would_read_otherwise_is_quoted() {
        let of = |path: &str| quoted(Path::new(path));
        assert_eq!(of("target/release/sim"), "target/release/sim");
        assert_eq!(of("what we've built; rm/sim"), r"'what we'\''ve built; rm/sim'");
        assert_eq!(of(""), "''");
    }
}
