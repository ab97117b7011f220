//! Commands of the interface that this version lacks, each with a way to reach the same end by
//! hand. They are refused by name, so that they do not look like typing errors.

use crate::failure::{Failure, Kind};

/// A command of a later version, and what to do until then.
struct FutureCommand {
    verb: &'static str,
    by_hand: &'static str,
}

/// In the order of the interface's table.
const TABLE: &[FutureCommand] = &[
    FutureCommand {
        verb: "salvage",
        by_hand: "serve a copy of the devices with `bcached serve` and copy the volume",
    },
    FutureCommand {
        verb: "repair",
        by_hand: "`bcached check` reports what is damaged; keep images of both devices",
    },
    FutureCommand {
        verb: "writeback",
        by_hand: "serve the devices with `bcached serve` and wait until `bcached status` shows no dirty data",
    },
    FutureCommand {
        verb: "convert",
        by_hand: "make a new backing device with `bcached make --backing` and copy the data",
    },
    FutureCommand { verb: "unconvert", by_hand: "copy the volume's data to a plain device" },
];

/// Returns the refusal of a first word that is no command of this version.
#[must_use]
pub fn refuse(word: &str) -> Failure {
    match TABLE.iter().find(|later| later.verb == word) {
        Some(later) => {
            Failure::new(Kind::NotInThisVersion, format!("`bcached {word}` is not in this version"))
                .next(format!("until then: {}", later.by_hand))
        }
        None => Failure::new(Kind::Usage, format!("there is no command `{word}`"))
            .next("`bcached --help` lists the commands"),
    }
}

/// Returns the refusal of an option of a later version.
#[must_use]
pub fn refuse_option(option: &str, by_hand: &str) -> Failure {
    Failure::new(Kind::NotInThisVersion, format!("{option} is not in this version"))
        .next(format!("until then: {by_hand}"))
        .option(option.split([' ', '=']).next().unwrap_or(option))
}

/// Returns the last lines of `bcached --help`.
#[must_use]
pub fn help() -> String {
    let verbs: Vec<_> = TABLE.iter().map(|later| later.verb).collect();
    format!(
        "Not in this version (each says what to do by hand): {}.\n\
         Exit status: 0 done; 1 the answer is no; 2 wrong use or configuration; 3 refused for safety; \
         4 I/O or other failure; 5 no daemon reachable; 6 time limit reached.",
        verbs.join(", ")
    )
}
