//! Resolves what the user typed, a name or a path relative to the working directory. The daemon's
//! working directory may be another one.

use crate::failure::{Failure, Kind};
use std::path::Path;

/// Returns what `ask` answers for `typed`. If nothing has that name, and `typed` is a relative path
/// that exists, asks again with the absolute path: names take precedence over paths.
///
/// # Errors
/// Those of `ask`.
pub fn called<T>(typed: &str, ask: impl Fn(&str) -> Result<T, Failure>) -> Result<T, Failure> {
    let nobody = match ask(typed) {
        Err(failure) if failure.kind == Kind::UnknownName => failure,
        outcome => return outcome,
    };
    if typed.starts_with('/') || Path::new(typed).symlink_metadata().is_err() {
        return Err(nobody);
    }
    match ask(&device(typed)) {
        // The error names what the user typed, not the absolute path.
        Err(failure) if failure.kind == Kind::UnknownName => Err(nobody),
        outcome => outcome,
    }
}

/// Returns a device in a form that means the same in every process: an absolute path, or `UUID=`
/// unchanged.
pub fn device(typed: &str) -> String {
    if typed.starts_with("UUID=") {
        return typed.to_owned();
    }
    let whole = std::path::absolute(typed).ok().and_then(|path| path.to_str().map(str::to_owned));
    whole.unwrap_or_else(|| typed.to_owned())
}
