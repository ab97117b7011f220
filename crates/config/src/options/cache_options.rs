//! The options of a cache: one table, like that of volumes. Names and units are the kernel's
//! (`/sys/fs/bcache/SET/`); differences are listed in `docs/compat.md`.

use super::value::{Value, ValueKind};
use super::{NUMBER_MAX, OptionDefinition, OptionStorage, Scope};
use bcached_engine::{Options, Settings};
use bcached_format::ReplacementPolicy;
use std::time::Duration;

/// A field of a set's options, and the variant of [`Value`] that its kind uses.
macro_rules! set {
    ($variant:ident, $field:ident) => {
        OptionStorage::CacheEngine {
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
        OptionStorage::CacheEngine {
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
pub static OPTIONS: &[OptionDefinition] = &[
    of_cache(
        "cache_replacement_policy",
        ValueKind::Choice(&["lru", "fifo", "random"]),
        OptionStorage::CacheSuperblock {
            read: |settings| settings.replacement.map(|policy| Value::Word(policy.name())),
            write: |options, value| options.replacement = value.and_then(policy),
            keep: |settings, value| settings.replacement = policy(value),
        },
        "which clean data is evicted first: least recently used, first filled, random; stored in the superblock",
    ),
    of_cache(
        "discard",
        ValueKind::Flag,
        OptionStorage::CacheSuperblock {
            read: |settings| settings.discard.map(Value::Flag),
            write: |options, value| options.discard = value.and_then(flag),
            keep: |settings, value| settings.discard = flag(value),
        },
        "buckets that become empty are discarded on the cache device; stored in the superblock",
    ),
    of_cache(
        "congested_read_threshold_us",
        ValueKind::Number(0, NUMBER_MAX),
        time!(congested_read_threshold, as_micros, from_micros),
        "while reads of the cache device take longer than this, large requests bypass it; 0: they never do",
    )
    .counting("microseconds"),
    of_cache(
        "congested_write_threshold_us",
        ValueKind::Number(0, NUMBER_MAX),
        time!(congested_write_threshold, as_micros, from_micros),
        "the same for writes",
    )
    .counting("microseconds"),
    of_cache(
        "journal_delay_ms",
        ValueKind::Number(0, 65535),
        time!(journal_delay, as_millis, from_millis),
        "how long changes of the index wait in the open journal entry if no client flushes",
    )
    .counting("milliseconds"),
    of_cache(
        "io_error_limit",
        ValueKind::Number(0, NUMBER_MAX),
        set!(Number, io_error_limit),
        "after this many failed operations of the cache device, nothing is added to it and dirty data is written back",
    )
    .counting("errors"),
    of_cache(
        "io_error_halflife",
        ValueKind::Number(0, NUMBER_MAX),
        set!(Number, io_error_halflife),
        "number of operations after which half of the counted errors are forgotten; 0: none are",
    )
    .counting("operations"),
    of_cache(
        "cutoff_writeback",
        ValueKind::Number(1, 95),
        set!(Number, cutoff_writeback),
        "when this much of the cache can be freed only by write-back, writes go to the backing device, too",
    )
    .counting("%"),
    of_cache(
        "cutoff_writeback_sync",
        ValueKind::Number(1, 95),
        set!(Number, cutoff_writeback_sync),
        "the same for durable writes; if this is less than cutoff_writeback, cutoff_writeback applies",
    )
    .counting("%"),
    of_cache(
        "idle_max_writeback_rate",
        ValueKind::Flag,
        set!(Flag, idle_max_writeback_rate),
        "after 30 s without a request, dirty data is written back as fast as the devices allow",
    ),
];

const fn of_cache(
    name: &'static str,
    kind: ValueKind,
    place: OptionStorage,
    help: &'static str,
) -> OptionDefinition {
    OptionDefinition { scope: Scope::Cache, ..OptionDefinition::of_kernel(name, kind, place, help) }
}

fn policy(value: &Value) -> Option<ReplacementPolicy> {
    let Value::Word(word) = value else { return None };
    ReplacementPolicy::ALL.into_iter().find(|policy| policy.name() == *word)
}

const fn flag(value: &Value) -> Option<bool> {
    if let Value::Flag(is) = value { Some(*is) } else { None }
}

/// Returns the settings for the superblock, from the options for which `said` returns a value; the
/// others stay as they are there.
pub fn settings<'a>(said: impl Fn(&str) -> Option<&'a Value>) -> Settings {
    let mut settings = Settings::default();
    for option in OPTIONS {
        if let (OptionStorage::CacheSuperblock { keep, .. }, Some(value)) = (option.place, said(option.name))
        {
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
            (OptionStorage::CacheEngine { write, .. }, Some(value)) => write(options, value),
            (OptionStorage::CacheEngine { read, write }, None) => write(options, &read(&fresh)),
            (OptionStorage::CacheSuperblock { write, .. }, value) => write(options, value),
            _ => {}
        }
    }
}
