//! The scope of a test as the environment requests it beyond the default: `docs/testing.md` names
//! the variables. A mistyped value is an error: a test that then ran its default scope, or nothing,
//! would pass as if it had done what was requested.

use crate::failure::{Failure, Outcome};
use std::env;

/// Returns the number in `variable`, if it is set.
///
/// # Errors
/// It holds something else.
pub fn number_from(variable: &str) -> Outcome<Option<u64>> {
    value_of(variable).map(|value| number(variable, &value)).transpose()
}

/// Returns the count in `variable`, at least one, if it is set.
///
/// # Errors
/// It holds something else.
pub fn count_from(variable: &str) -> Outcome<Option<u64>> {
    value_of(variable).map(|value| count(variable, &value)).transpose()
}

/// Returns the one of `all` that `variable` names, if it is set.
///
/// # Errors
/// It holds something else.
pub fn choice_from<'a>(variable: &str, all: &[&'a str]) -> Outcome<Option<&'a str>> {
    value_of(variable).map(|value| choice(variable, &value, all)).transpose()
}

fn value_of(variable: &str) -> Option<String> {
    Some(env::var_os(variable)?.to_string_lossy().into_owned())
}

fn number(variable: &str, value: &str) -> Outcome<u64> {
    value.parse().map_err(|_| wrong(variable, value, "a number"))
}

fn count(variable: &str, value: &str) -> Outcome<u64> {
    let number = value.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| wrong(variable, value, "a number from 1 on"))
}

fn choice<'a>(variable: &str, value: &str, all: &[&'a str]) -> Outcome<&'a str> {
    let found = all.iter().find(|name| **name == value);
    found.copied().ok_or_else(|| wrong(variable, value, &all.join(" or ")))
}

fn wrong(variable: &str, value: &str, wanted: &str) -> Failure {
    Failure::new(format!("{variable} must be {wanted}, not {value:?}: nothing was run"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    fn refusal(outcome: Outcome<impl Debug>) -> String {
        format!("{:?}", outcome.expect_err("refused"))
    }

    #[test]
    fn what_is_mistyped_is_refused_in_one_sentence() {
        assert_eq!(number("N", "0").expect("a number"), 0);
        assert_eq!(refusal(number("N", "1o")), "N must be a number, not \"1o\": nothing was run");
        assert_eq!(refusal(number("N", "")), "N must be a number, not \"\": nothing was run");
        assert_eq!(count("N", "1").expect("a count"), 1);
        for value in ["0", "-1", "ten"] {
            let words = format!("N must be a number from 1 on, not {value:?}: nothing was run");
            assert_eq!(refusal(count("N", value)), words);
        }
        let all = ["kernel", "bcached"];
        assert_eq!(choice("WHO", "kernel", &all).expect("one of them"), "kernel");
        let words = "WHO must be kernel or bcached, not \"kernal\": nothing was run";
        assert_eq!(refusal(choice("WHO", "kernal", &all)), words);
    }
}
