//! Keys that nobody knows: which one may be meant, and not all that there are.

use super::file::Origin;
use crate::options::nearest;
use bcached_control::failure::Failure;

/// So many keys are few enough to be named all.
const FEW: usize = 5;

/// The unknown key that a parser tells of, and those that it knows there.
pub fn unknown_key(message: &str) -> Option<(&str, Vec<&str>)> {
    let rest = message.strip_prefix("unknown field ")?;
    let mut quoted = rest.split('`').skip(1).step_by(2);
    Some((quoted.next()?, quoted.collect()))
}

/// The refusal of such a key.
pub fn refused(origin: &Origin, key: &str, known: &[&str]) -> Failure {
    let failure = origin.failure(&format!("unknown key `{key}`"));
    let near: Vec<_> = nearest(known.iter().copied(), key).into_iter().take(2).collect();
    match near.as_slice() {
        [] if known.len() <= FEW => failure.next(format!("write one of {}", known.join(", "))),
        [] => failure.next("see *Serve* in docs/guide.md, which shows every key"),
        near => failure.next(format!("perhaps {} is meant", near.join(" or "))),
    }
}
