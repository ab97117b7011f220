//! Errors for unknown keys: they suggest the key that may be meant, instead of listing all keys.

use super::parse::Origin;
use crate::options::nearest;
use bcached_control::failure::Failure;

/// If there are at most this many keys, all of them are listed.
const FEW: usize = 5;

/// Extracts the unknown key from the parser's message, and the keys that are valid there.
pub fn unknown_key(message: &str) -> Option<(&str, Vec<&str>)> {
    let rest = message.strip_prefix("unknown field ")?;
    let mut quoted = rest.split('`').skip(1).step_by(2);
    Some((quoted.next()?, quoted.collect()))
}

/// Creates the failure for an unknown key.
pub fn refused(origin: &Origin, key: &str, known: &[&str]) -> Failure {
    let failure = origin.failure(&format!("unknown key `{key}`"));
    let near: Vec<_> = nearest(known.iter().copied(), key).into_iter().take(2).collect();
    match near.as_slice() {
        [] if known.len() <= FEW => failure.next(format!("write one of {}", known.join(", "))),
        [] => failure.next("see *Serve* in docs/guide.md, which shows every key"),
        near => failure.next(format!("perhaps {} is meant", near.join(" or "))),
    }
}
