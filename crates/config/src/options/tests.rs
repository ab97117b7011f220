use super::layers::{OptionConflict, OptionLayers};
use super::quiet_hours::QuietHours;
use super::*;
use std::time::Duration;

fn read(name: &str, typed: &str) -> Result<Value, ValueError> {
    Scope::Volume.find(name).unwrap_or_else(|| panic!("{name} is an option")).read(typed)
}

/// Returns the printed form of `typed`.
fn printed(name: &str, typed: &str) -> String {
    read(name, typed).unwrap_or_else(|refused| panic!("{name}={typed}: {refused:?}")).to_string()
}

fn why(name: &str, typed: &str) -> String {
    match read(name, typed) {
        Ok(value) => panic!("{name}={typed} is {value}"),
        Err(ValueError::NotUnderstood(why) | ValueError::OutOfRange(why, _)) => why,
    }
}

/// `get` and `set` are inverses, for the default and for every value here.
#[test]
fn what_is_printed_is_understood_again() {
    for option in OPTIONS.iter().chain(cache_options::OPTIONS) {
        let Some(default) = option.default() else { continue };
        assert_eq!(option.read(&default.to_string()), Ok(default), "{}", option.name);
    }
    for (name, typed, expected) in [
        ("sequential_cutoff", "0", "0"),
        ("sequential_cutoff", "1000", "1000"),
        ("sequential_cutoff", "1024", "1k"),
        ("sequential_cutoff", "1536k", "1536k"),
        ("sequential_cutoff", "3GiB", "3G"),
        ("stripe_size", "192k", "4224k"),
        ("stripe_size", "0", "0"),
        ("partial_stripes_expensive", "none", "none"),
        ("writeback_rate_minimum", "8", "4k"),
        ("writeback_rate_minimum", "9", "9"),
        ("writeback_rate_minimum", "1M", "1M"),
        ("writeback_rate_maximum", "20M/s", "20M"),
        ("writeback_rate_maximum", "none", "none"),
        ("writeback_delay", "30", "30s"),
        ("writeback_delay", "0", "0s"),
        ("writeback_delay", "120", "2m"),
        ("writeback_delay", "1500ms", "1500ms"),
        ("max_dirty_age", "12h", "12h"),
        ("writeback_latency", "50ms", "50ms"),
        ("spindown_after", "600", "10m"),
        ("writeback_percent", "40", "40"),
        ("writeback_running", "7", "1"),
        ("writeback_running", "false", "0"),
        ("quiet_hours", "23:00-7:00", "23:00-07:00"),
        ("quiet_hours", "20:00-24:00", "20:00-24:00"),
        ("cache_mode", "writearound", "writearound"),
    ] {
        assert_eq!(printed(name, typed), expected, "{name}={typed}");
        assert_eq!(read(name, expected), read(name, typed), "{name}={expected}");
    }
}

#[test]
fn a_suffix_means_bytes_and_a_bare_number_what_the_kernel_means() {
    assert_eq!(read("sequential_cutoff", "4096"), Ok(Value::Size(4096)));
    assert_eq!(read("writeback_rate_minimum", "4096"), Ok(Value::Rate(4096)), "sectors");
    assert_eq!(read("writeback_rate_minimum", "4096k"), Ok(Value::Rate(8192)), "bytes");
    assert_eq!(read("writeback_rate_update_seconds", "7"), Ok(Value::Time(Duration::from_secs(7))));
    let unit = |name: &str, typed: &str| {
        Scope::Volume.find(name).and_then(|option| option.unit(&option.read(typed).expect("a value")))
    };
    assert_eq!(unit("sequential_cutoff", "5"), Some("bytes"));
    assert_eq!(unit("writeback_rate_minimum", "9"), Some("sectors/s"));
    assert_eq!(unit("writeback_rate_minimum", "10"), Some("bytes/s"), "it is printed as 5k");
    assert_eq!(unit("writeback_percent", "10"), Some("%"));
    assert_eq!((unit("writeback_delay", "5"), unit("quiet_hours", "none")), (None, None));
}

#[test]
fn what_is_not_understood_is_refused_with_its_reason() {
    for (name, typed, reason) in [
        ("sequential_cutoff", "1MB", "decimal units are not used"),
        ("sequential_cutoff", "", "whole number"),
        ("sequential_cutoff", "none", "whole number"),
        ("sequential_cutoff", "-1", "whole number"),
        ("writeback_rate_minimum", "1MB", "decimal units are not used"),
        ("writeback_percent", "ten", "`ten` is not a whole number"),
        ("writeback_percent", "-1", "`-1` is not a whole number"),
        ("writeback_percent", "10%", "is not a whole number"),
        ("writeback_percent", " 10", "is not a whole number"),
        ("writeback_running", "yes", "`yes` is neither 1 nor 0"),
        ("writeback_delay", "5 s", "write 500ms, 30s, 5m or 2h"),
        ("writeback_delay", "s", "is not a time"),
        ("writeback_delay", "", "is not a time"),
        ("writeback_delay", "1d", "is not a time"),
        ("cache_mode", "Writeback", "is not one of writethrough, writeback, writearound, none"),
        ("quiet_hours", "23-7", "as 23:00-07:00"),
        ("quiet_hours", "23:0-07:00", "as 23:00-07:00"),
        ("quiet_hours", "24:00-07:00", "as 23:00-07:00"),
        ("quiet_hours", "23:60-07:00", "as 23:00-07:00"),
        ("quiet_hours", "07:00-07:00", "begins where it ends"),
    ] {
        let found = why(name, typed);
        assert!(found.contains(reason), "{name}={typed}: {found}");
    }
}

/// The error names the limit, to which the kernel would adjust the value silently.
#[test]
fn a_number_out_of_its_range_names_the_end() {
    for (name, typed, end, sentence) in [
        ("writeback_percent", "100", Value::Number(40), "`100` is above the maximum, 40"),
        ("writeback_percent", "99999999999999999999", Value::Number(40), "above the maximum, 40"),
        ("writeback_rate_p_term_inverse", "0", Value::Number(1), "`0` is below the minimum, 1"),
        (
            "writeback_rate_update_seconds",
            "61",
            Value::Time(Duration::from_secs(60)),
            "above the maximum, 1m",
        ),
        ("writeback_rate_minimum", "0", Value::Rate(1), "`0` is below the minimum, 1"),
        ("max_dirty_age", "0", Value::Time(Duration::from_secs(1)), "`0` is below the minimum, 1s"),
        ("writeback_delay", "9999999h", Value::Time(Duration::from_secs(u64::from(u32::MAX))), "above"),
    ] {
        let Err(ValueError::OutOfRange(why, found)) = read(name, typed) else { panic!("{name}={typed}") };
        assert_eq!((found, why.contains(sentence)), (end, true), "{name}={typed}: {why}");
    }
}

#[test]
fn hours_go_over_midnight() {
    let hours = |typed: &str| QuietHours::read(typed).expect("hours");
    let (night, day) = (hours("23:00-07:00"), hours("09:30-17:00"));
    let quiet = |hours: QuietHours, hour: u16, minute: u16| hours.contains(hour * 60 + minute);
    assert!(quiet(night, 23, 0) && quiet(night, 0, 0) && quiet(night, 6, 59));
    assert!(!quiet(night, 7, 0) && !quiet(night, 22, 59));
    assert!(quiet(day, 9, 30) && quiet(day, 16, 59));
    assert!(!quiet(day, 9, 29) && !quiet(day, 17, 0) && !quiet(day, 0, 0));
    assert!(quiet(hours("20:00-24:00"), 23, 59) && !quiet(hours("20:00-24:00"), 0, 0));
}

/// Each option of the engine is written to and read from a field of its own.
#[test]
fn every_option_reaches_the_engine() {
    let typed = |option: &OptionDefinition| match option.kind {
        ValueKind::Flag => "0",
        ValueKind::Number(..) | ValueKind::Size => "17",
        ValueKind::Stripe => "5M",
        ValueKind::Rate(..) => "21",
        ValueKind::Time(..) => "11s",
        ValueKind::Choice(words) => words[1],
        ValueKind::Hours => "01:00-02:00",
        ValueKind::Text => "text",
    };
    let default = VolumeOptions::default();
    for option in OPTIONS {
        let value = option.read(typed(option)).expect("a value");
        let mut layers = OptionLayers::default();
        layers.runtime.insert(option.name, value.clone());
        let options = layers.volume_options(|| 90);
        assert_eq!(
            options == default,
            matches!(
                option.place,
                OptionStorage::CacheMode | OptionStorage::Label | OptionStorage::WritebackRate
            ),
            "{}",
            option.name
        );
        assert_eq!(options.writeback_quiet, option.name == "quiet_hours");
        for other in OPTIONS {
            let OptionStorage::Engine { read, .. } = other.place else { continue };
            let expected = if other.name == option.name { value.clone() } else { read(&default) };
            assert_eq!(read(&options), expected, "{} after {}", other.name, option.name);
        }
    }
}

/// Terms out of order are refused. The kernel silently moves the one that is written between its
/// neighbours.
#[test]
fn the_terms_are_in_order() {
    let check = |said: &[(&str, &str)]| {
        let mut layers = OptionLayers::default();
        for (name, typed) in said {
            let option = Scope::Volume.find(name).expect("an option");
            layers.runtime.insert(option.name, option.read(typed).expect("a value"));
        }
        layers.check().map_err(|OptionConflict { what, .. }| what)
    };
    assert_eq!(check(&[]), Ok(()));
    let refused = check(&[("writeback_rate_fp_term_low", "50")]).expect_err("the middle one is 10");
    let told =
        "writeback_rate_fp_term_low must be below writeback_rate_fp_term_mid, but they would be 50 and 10";
    assert_eq!(refused, told);
    assert_eq!(check(&[("writeback_rate_fp_term_low", "50"), ("writeback_rate_fp_term_mid", "51")]), Ok(()));
    assert!(check(&[("writeback_rate_fp_term_mid", "1000")]).is_err(), "as the upper one");
    assert!(check(&[("writeback_rate_fp_term_mid", "1")]).is_err(), "as the lower one");
    assert_eq!(check(&[("writeback_rate_maximum", "8")]), Ok(()));
    let refused = check(&[("writeback_rate_maximum", "7")]).expect_err("the least is 8");
    assert!(refused.contains("writeback_rate_minimum must not be above writeback_rate_maximum"), "{refused}");
}

#[test]
fn what_was_most_likely_meant_is_named() {
    let near_one = |typed| near(Scope::Volume, typed);
    assert_eq!(near_one("writeback_percnt").first(), Some(&"writeback_percent"));
    assert_eq!(near_one("sequential-cutoff").first(), Some(&"sequential_cutoff"));
    assert_eq!(near_one("quiet").first(), Some(&"quiet_hours"));
    assert_eq!(near_one("colour"), Vec::<&str>::new());
    assert_eq!(near(Scope::Cache, "io_eror_limit").first(), Some(&"io_error_limit"));
    let refused = |scope, name| unknown(scope, name).to_string();
    assert!(refused(Scope::Volume, "colour").contains("`bcached get VOLUME` lists the options"));
    assert!(refused(Scope::Cache, "colour").contains("`bcached get CACHE` lists the options"));
    let elsewhere = "`io_error_limit` is not an option of a volume: it is an option of a cache";
    assert!(refused(Scope::Volume, "io_error_limit").contains(elsewhere));
    assert!(
        refused(Scope::Cache, "cache_mode")
            .contains("is not an option of a cache: it is an option of a volume")
    );
}

/// Each option of a cache changes its own field and no other.
#[test]
fn an_option_of_a_cache_is_its_own() {
    let fresh = Options::default();
    for option in cache_options::OPTIONS {
        let typed = match option.kind {
            ValueKind::Flag => "0",
            ValueKind::Choice(words) => words[1],
            _ => "17",
        };
        let value = option.read(typed).expect("a value");
        let mut layers = OptionLayers::default();
        layers.runtime.insert(option.name, value.clone());
        let mut options = Options { io_error_limit: 99, node_budget_bytes: 7, ..Options::default() };
        layers.apply_to_cache(&mut options);
        assert_eq!(options.node_budget_bytes, 7, "no option");
        for other in cache_options::OPTIONS {
            let is_it = other.name == option.name;
            let (found, expected) = match other.place {
                OptionStorage::CacheEngine { read, .. } => {
                    (Some(read(&options)), if is_it { Some(value.clone()) } else { Some(read(&fresh)) })
                }
                OptionStorage::CacheSuperblock { read, .. } => {
                    let in_force = Settings { discard: options.discard, replacement: options.replacement };
                    (read(&in_force), is_it.then(|| value.clone()))
                }
                _ => panic!("{} is elsewhere", other.name),
            };
            assert_eq!(found, expected, "{} after {}", other.name, option.name);
        }
        let mut settings = Settings::default();
        if let OptionStorage::CacheSuperblock { read, keep, .. } = option.place {
            keep(&mut settings, &value);
            assert_eq!(read(&settings), Some(value));
        }
    }
}

/// The guide's tables have one line for each option, and no others.
#[test]
fn the_guide_has_the_tables() {
    table(OPTIONS, "| option | values | default | what it is |\n|---|---|---|---|\n");
    table(
        cache_options::OPTIONS,
        "| option of a cache | values | default | what it is |\n|---|---|---|---|\n",
    );
}

fn table(options: &[OptionDefinition], heading: &str) {
    const GUIDE: &str = include_str!("../../../../docs/guide.md");
    let (_, table) = GUIDE.split_once(heading).unwrap_or_else(|| panic!("the guide has no table {heading}"));
    let found: Vec<_> = table.lines().take_while(|line| line.starts_with('|')).collect();
    let line = |option: &OptionDefinition| {
        let default = option.default().map_or_else(String::new, |value| match option.unit(&value) {
            Some(unit @ ("%" | "sectors" | "microseconds" | "milliseconds")) => format!("{value} {unit}"),
            _ => value.to_string(),
        });
        let default = if default.is_empty() { default } else { format!(" {default}") };
        format!("| `{}` | {} |{default} | {} |", option.name, option.values(), option.help)
    };
    let wanted: Vec<_> = options.iter().map(line).collect();
    assert_eq!(found, wanted, "the table should be:\n{heading}{}\n", wanted.join("\n"));
}
