//! What exists, as somebody calls it: by a name, or by a path from where he stands. The daemon may have another working directory.

use crate::failure::{Failure, Kind};
use std::path::Path;

/// What `ask` says of what is called `typed`. If nothing is called so, and it is a path from here that leads somewhere, that is meant:
/// names are stronger.
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
        // He is told of what he has typed.
        Err(failure) if failure.kind == Kind::UnknownName => Err(nobody),
        outcome => outcome,
    }
}

/// A device as every process understands it: its whole path, or `UUID=` as it is.
pub fn device(typed: &str) -> String {
    if typed.starts_with("UUID=") {
        return typed.to_owned();
    }
    let whole = std::path::absolute(typed).ok().and_then(|path| path.to_str().map(str::to_owned));
    whole.unwrap_or_else(|| typed.to_owned())
}
