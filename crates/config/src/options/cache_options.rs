//! The options of a cache: one table, like that of volumes. Names and units are the kernel's
//! (`/sys/fs/bcache/SET/`); differences are listed in `docs/compat.md`.

use super::value::{Kind, Value};
use super::{Definition, NUMBER_MAX, Place, Scope};
use bcached_engine::{Options, Settings};
use bcached_format::Replacement;
use std::time::Duration;

/// A field of a set's options, and the variant of [`Value`] that its kind uses.
macro_rules! set {
    ($variant:ident, $field:ident) => {
        Place::Set {
            read: |options| Value::$variant(options.$field),
            write: |options, value| {
                if let Value::$variant(new) = value {
                    options.$field = *new;
                }
            },
        }
    };
}

/// A field that is a time, as a number of whole units.
macro_rules! time {
    ($field:ident, $count:ident, $make:ident) => {
        Place::Set {
            read: |options| Value::Number(u64::try_from(options.$field.$count()).unwrap_or(u64::MAX)),
            write: |options, value| {
                if let Value::Number(new) = value {
                    options.$field = Duration::$make(*new);
                }
            },
        }
    };
}

/// All options, in the order in which `get` prints them.
pub static OPTIONS: &[Definition] = &[
    of_cache(
        "cache_replacement_policy",
        Kind::Choice(&["lru", "fifo", "random"]),
        Place::Kept {
            read: |kept| kept.replacement.map(|policy| Value::Word(policy.name())),
            write: |options, value| options.replacement = value.and_then(policy),
            keep: |kept, value| kept.replacement = policy(value),
        },
        "which clean data leaves the cache first: least recently used, first filled, any; kept in its superblock",
    ),
    of_cache(
        "discard",
        Kind::Flag,
        Place::Kept {
            read: |kept| kept.discard.map(Value::Flag),
            write: |options, value| options.discard = value.and_then(flag),
            keep: |kept, value| kept.discard = flag(value),
        },
        "buckets that hold nothing any more are discarded on the cache device; kept in its superblock",
    ),
    of_cache(
        "congested_read_threshold_us",
        Kind::Number(0, NUMBER_MAX),
        time!(congested_read_threshold, as_micros, from_micros),
        "reads of the cache device that take longer make large requests pass it by; 0: however long",
    )
    .counting("microseconds"),
    of_cache(
        "congested_write_threshold_us",
        Kind::Number(0, NUMBER_MAX),
        time!(congested_write_threshold, as_micros, from_micros),
        "the same of writes",
    )
    .counting("microseconds"),
    of_cache(
        "journal_delay_ms",
        Kind::Number(0, 65535),
        time!(journal_delay, as_millis, from_millis),
        "how long changes of the index wait for a journal entry that nobody asks for",
    )
    .counting("milliseconds"),
    of_cache(
        "io_error_limit",
        Kind::Number(0, NUMBER_MAX),
        set!(Number, io_error_limit),
        "when so many operations of the cache device have failed nothing is added to it, and dirty data leaves it",
    )
    .counting("errors"),
    of_cache(
        "io_error_halflife",
        Kind::Number(0, NUMBER_MAX),
        set!(Number, io_error_halflife),
        "operations in which half of the counted errors are forgotten; 0: none are",
    )
    .counting("operations"),
    of_cache(
        "cutoff_writeback",
        Kind::Number(1, 95),
        set!(Number, cutoff_writeback),
        "when so much of the cache waits to be written back, writes go to the backing device too",
    )
    .counting("%"),
    of_cache(
        "cutoff_writeback_sync",
        Kind::Number(1, 95),
        set!(Number, cutoff_writeback_sync),
        "the same of durable writes; below cutoff_writeback it means as much as that",
    )
    .counting("%"),
    of_cache(
        "idle_max_writeback_rate",
        Kind::Flag,
        set!(Flag, idle_max_writeback_rate),
        "dirty data leaves as fast as it goes when nobody has asked for anything for 30 s",
    ),
];

const fn of_cache(name: &'static str, kind: Kind, place: Place, help: &'static str) -> Definition {
    Definition { scope: Scope::Cache, ..Definition::of_kernel(name, kind, place, help) }
}

fn policy(value: &Value) -> Option<Replacement> {
    let Value::Word(word) = value else { return None };
    Replacement::ALL.into_iter().find(|policy| policy.name() == *word)
}

const fn flag(value: &Value) -> Option<bool> {
    if let Value::Flag(is) = value { Some(*is) } else { None }
}

/// Returns the settings for the superblock, from the options for which `said` returns a value; the
/// others stay as they are there.
pub fn settings<'a>(said: impl Fn(&str) -> Option<&'a Value>) -> Settings {
    let mut settings = Settings::default();
    for option in OPTIONS {
        if let (Place::Kept { keep, .. }, Some(value)) = (option.place, said(option.name)) {
            keep(&mut settings, value);
        }
    }
    settings
}

/// Sets each option of the table in `options` to the value that `said` returns, or to its default
/// if there is none.
pub fn apply<'a>(options: &mut Options, said: impl Fn(&str) -> Option<&'a Value>) {
    let fresh = Options::default();
    for option in OPTIONS {
        match (option.place, said(option.name)) {
            (Place::Set { write, .. }, Some(value)) => write(options, value),
            (Place::Set { read, write }, None) => write(options, &read(&fresh)),
            (Place::Kept { write, .. }, value) => write(options, value),
            _ => {}
        }
    }
}
