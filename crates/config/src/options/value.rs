//! Values of options: how each kind is parsed from commands and files, and printed so that it can
//! be parsed again.
//!
//! The printed form is exact: `get` and `set` are inverses, and `99-set.toml` holds what `get`
//! prints. A size has the largest suffix that leaves a whole number; a bare number has the unit of
//! its option.

use super::quiet_hours::QuietHours;
use bcached_control::sizes::{self, DefaultUnit};
use std::fmt;
use std::time::Duration;

/// A value of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// No limit, no goal or no hours.
    None,
    /// True or false, printed as the kernel does: `1` or `0`.
    Flag(bool),
    /// A plain number; the option defines its unit.
    Number(u64),
    /// Bytes.
    Size(u64),
    /// Sectors of 512 bytes per second.
    Rate(u64),
    /// A time, in whole milliseconds.
    Time(Duration),
    /// One of the option's words.
    Word(&'static str),
    /// Hours of the day.
    Hours(QuietHours),
    /// Free text.
    Text(String),
}

/// The values that an option accepts. Ranges include both ends.
#[derive(Clone, Copy, Debug)]
pub enum ValueKind {
    /// [`Value::Flag`]. As in the kernel any number but 0 is true; `true` and `false` are accepted
    /// too.
    Flag,
    /// [`Value::Number`].
    Number(u64, u64),
    /// [`Value::Size`]; a bare number is bytes.
    Size,
    /// [`Value::Size`] of stripes, increased so far that few enough of them have to be counted; a
    /// bare number is bytes.
    Stripe,
    /// [`Value::Rate`]; a bare number is sectors per second.
    Rate(u64, u64),
    /// [`Value::Time`] in milliseconds; a bare number is seconds.
    Time(u64, u64),
    /// [`Value::Word`].
    Choice(&'static [&'static str]),
    /// [`Value::Hours`].
    Hours,
    /// [`Value::Text`].
    Text,
}

/// Why a text is not a value of an option, as a clause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ValueError {
    /// It has the wrong form.
    NotUnderstood(String),
    /// It is out of range; the nearest end of the range.
    OutOfRange(String, Value),
}

impl ValueKind {
    /// Parses `typed`.
    ///
    /// # Errors
    /// It is not a value, or is out of range.
    pub fn read(self, typed: &str) -> Result<Value, ValueError> {
        let not_understood = |why: String| ValueError::NotUnderstood(format!("`{typed}` {why}"));
        match self {
            Self::Flag => {
                flag(typed).map(Value::Flag).ok_or_else(|| not_understood("is neither 1 nor 0".into()))
            }
            Self::Number(min, max) => {
                let number = digits(typed).ok_or_else(|| not_understood("is not a whole number".into()))?;
                within(typed, number, (min, max), Value::Number)
            }
            Self::Size => size(typed, DefaultUnit::Bytes).map(Value::Size),
            Self::Stripe => {
                let bytes = size(typed, DefaultUnit::Bytes)?;
                let longer = bcached_engine::stripe_bytes(bytes);
                let is_none = bytes > 0 && longer == 0;
                let refusal = || not_understood("is not a stripe length: 512 bytes to 512 GiB, or 0".into());
                if is_none { Err(refusal()) } else { Ok(Value::Size(longer)) }
            }
            Self::Rate(min, max) => {
                let bytes = size(typed.strip_suffix("/s").unwrap_or(typed), DefaultUnit::Sectors)?;
                if bytes % 512 != 0 {
                    return Err(not_understood("is not a multiple of 512 bytes a second".into()));
                }
                within(typed, bytes / 512, (min, max), Value::Rate)
            }
            Self::Time(min, max) => {
                let milliseconds = milliseconds(typed)
                    .ok_or_else(|| not_understood("is not a time: write 500ms, 30s, 5m or 2h".into()))?;
                within(typed, milliseconds, (min, max), |time| Value::Time(Duration::from_millis(time)))
            }
            Self::Choice(words) => {
                let word = words.iter().find(|word| **word == typed);
                let refusal = || not_understood(format!("is not one of {}", words.join(", ")));
                word.map(|word| Value::Word(word)).ok_or_else(refusal)
            }
            Self::Hours => QuietHours::read(typed).map(Value::Hours).map_err(not_understood),
            Self::Text => Ok(Value::Text(typed.to_owned())),
        }
    }
}

fn flag(typed: &str) -> Option<bool> {
    match typed {
        "true" => Some(true),
        "false" => Some(false),
        _ => digits(typed).map(|number| number != 0),
    }
}

/// Parses a whole number. One that is too large becomes `u64::MAX`, which is out of every range.
fn digits(typed: &str) -> Option<u64> {
    let is_number = !typed.is_empty() && typed.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| typed.parse().unwrap_or(u64::MAX))
}

fn size(typed: &str, bare: DefaultUnit) -> Result<u64, ValueError> {
    sizes::parse(typed, bare).map_err(|error| ValueError::NotUnderstood(error.to_string()))
}

fn milliseconds(typed: &str) -> Option<u64> {
    let end = typed.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(typed.len());
    let (number, suffix) = typed.split_at(end);
    let unit = match suffix {
        "ms" => 1,
        "s" | "" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return None,
    };
    digits(number).map(|number| number.saturating_mul(unit))
}

fn within(
    typed: &str,
    number: u64,
    (min, max): (u64, u64),
    make: fn(u64) -> Value,
) -> Result<Value, ValueError> {
    let end = number.clamp(min, max);
    if number == end {
        return Ok(make(number));
    }
    let (side, which) = if number < min { ("below", "minimum") } else { ("above", "maximum") };
    let end = make(end);
    Err(ValueError::OutOfRange(format!("`{typed}` is {side} the {which}, {end}"), end))
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Flag(yes) => write!(f, "{}", u8::from(*yes)),
            Self::Number(number) => write!(f, "{number}"),
            Self::Size(bytes) => f.write_str(&with_suffix(*bytes).unwrap_or_else(|| bytes.to_string())),
            Self::Rate(sectors) => {
                f.write_str(&with_suffix(sectors * 512).unwrap_or_else(|| sectors.to_string()))
            }
            Self::Time(time) => f.write_str(&of_time(*time)),
            Self::Word(word) => f.write_str(word),
            Self::Hours(hours) => write!(f, "{hours}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// Formats `bytes` with the largest suffix that is exact; `None` if there is none.
fn with_suffix(bytes: u64) -> Option<String> {
    let step = (bytes.trailing_zeros() / 10).min(5);
    let suffix = ["", "k", "M", "G", "T", "P"][step as usize];
    (bytes > 0 && step > 0).then(|| format!("{}{suffix}", bytes >> (10 * step)))
}

fn of_time(time: Duration) -> String {
    let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s")];
    let exact = units.iter().find(|(unit, _)| milliseconds > 0 && milliseconds.is_multiple_of(*unit));
    match exact {
        Some((unit, suffix)) => format!("{}{suffix}", milliseconds / unit),
        None if milliseconds == 0 => "0s".to_owned(),
        None => format!("{milliseconds}ms"),
    }
}

impl Value {
    /// Returns the unit of the printed number, where neither its suffix nor its option shows it.
    #[must_use]
    pub fn unit(&self) -> Option<&'static str> {
        match self {
            Self::Size(_) => Some("bytes"),
            Self::Rate(sectors) if with_suffix(sectors * 512).is_some() => Some("bytes/s"),
            Self::Rate(_) => Some("sectors/s"),
            _ => None,
        }
    }

    /// Returns the value as it appears in a configuration file.
    #[must_use]
    pub fn to_toml(&self) -> toml::Value {
        match self {
            Self::Flag(yes) => toml::Value::Boolean(*yes),
            Self::Number(number) if i64::try_from(*number).is_ok() => {
                toml::Value::Integer(i64::try_from(*number).unwrap_or(i64::MAX))
            }
            _ => toml::Value::String(self.to_string()),
        }
    }
}
