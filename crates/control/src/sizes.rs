//! Sizes as people type and read them.
//!
//! A suffix means bytes in powers of two, everywhere. A bare number has the unit that `make-bcache`
//! or the kernel gives the option. Decimal suffixes (`MB`) are refused rather than guessed: half of
//! their users mean powers of two.

use std::fmt;

/// The unit of a number without a suffix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DefaultUnit {
    /// Bytes.
    Bytes,
    /// Sectors of 512 bytes.
    Sectors,
}

/// The error for a text that is not a size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SizeError {
    typed: String,
    reason: Reason,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reason {
    NoNumber,
    Suffix,
    Decimal,
    Large,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.reason {
            Reason::NoNumber => "a size starts with a whole number",
            Reason::Suffix => "the suffixes are k, M, G, T and P, or KiB, MiB, GiB, TiB and PiB",
            Reason::Decimal => "write M or MiB for powers of two; decimal units are not used",
            Reason::Large => "the number is too large",
        };
        write!(f, "`{}` is not a size: {reason}", self.typed)
    }
}

impl std::error::Error for SizeError {}

/// Returns the number of bytes that `typed` means.
///
/// # Errors
/// Anything but a whole number with an optional binary suffix, and a result of 2^63 bytes or more.
pub fn parse(typed: &str, bare: DefaultUnit) -> Result<u64, SizeError> {
    let fail = |reason| SizeError { typed: typed.to_owned(), reason };
    let digits = typed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = typed.split_at(digits);
    if number.is_empty() {
        return Err(fail(Reason::NoNumber));
    }
    let number: u64 = number.parse().map_err(|_| fail(Reason::Large))?;
    // Accept what `human` prints, such as `10 GiB`.
    let suffix = suffix.strip_prefix(' ').filter(|suffix| binary_unit(suffix).is_some()).unwrap_or(suffix);
    let unit = match (suffix, bare) {
        ("", DefaultUnit::Bytes) => 1,
        ("", DefaultUnit::Sectors) => 512,
        (suffix, _) => binary_unit(suffix).ok_or_else(|| fail(refusal(suffix)))?,
    };
    match number.checked_mul(unit) {
        Some(bytes) if bytes < 1 << 63 => Ok(bytes),
        _ => Err(fail(Reason::Large)),
    }
}

/// Returns the bytes of a binary suffix. `k`, `K`, `Ki` and `KiB` are equivalent.
fn binary_unit(suffix: &str) -> Option<u64> {
    let mut letters = suffix.chars();
    let shift = match letters.next()?.to_ascii_lowercase() {
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        'p' => 50,
        _ => return None,
    };
    matches!(letters.as_str(), "" | "i" | "iB").then_some(1 << shift)
}

/// Returns why a suffix that is not binary is refused.
fn refusal(suffix: &str) -> Reason {
    let mut letters = suffix.chars();
    let scaled = letters.next().is_some_and(|letter| "kKmMgGtTpP".contains(letter));
    if scaled && matches!(letters.as_str(), "B" | "b") { Reason::Decimal } else { Reason::Suffix }
}

/// Formats `bytes` for people, rounded to the nearest: a binary unit and one digit after the point,
/// or plain bytes below 1 KiB. A number that would round to 1024 of a unit is given as 1 of the
/// next.
#[must_use]
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let tenths = |step: u32| {
        let unit = 1_u128 << (10 * step);
        (u128::from(bytes) * 10 + unit / 2) / unit
    };
    let step = ((63 - bytes.leading_zeros()) / 10).min(5);
    let step = if step < 5 && tenths(step) >= 10 * 1024 { step + 1 } else { step };
    let (tenths, name) = (tenths(step), UNITS[step as usize - 1]);
    if tenths.is_multiple_of(10) {
        format!("{} {name}", tenths / 10)
    } else {
        format!("{}.{} {name}", tenths / 10, tenths % 10)
    }
}

/// Formats like [`human`], and adds the number of bytes unless [`parse`] reads the text as exactly
/// `bytes`. For sizes that a user may want to type again.
#[must_use]
pub fn exact(bytes: u64) -> String {
    let text = human(bytes);
    match parse(&text, DefaultUnit::Bytes) {
        Ok(read) if read == bytes => text,
        _ if bytes < 1024 => text,
        _ => format!("{text} ({bytes} bytes)"),
    }
}

/// Formats the range from `start` to `end` (exclusive) for people: `711-761 MiB`. If both ends
/// would be printed the same, gives the length and the start instead.
#[must_use]
pub fn human_range(start: u64, end: u64) -> String {
    let (from, to) = (human(start), human(end));
    if from == to {
        return format!("{} at {from}", human(end.saturating_sub(start)));
    }
    match (from.split_once(' '), to.split_once(' ')) {
        (Some((number, unit)), Some((_, of_end))) if unit == of_end || start == 0 => {
            format!("{number}-{to}")
        }
        _ => format!("{from}-{to}"),
    }
}

/// Formats `bytes` in a form that can be typed and that [`parse`] reads back exactly.
#[must_use]
pub fn typed(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "k")];
    let unit = units.into_iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(shift, suffix)| format!("{}{suffix}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suffix_means_bytes_whatever_the_bare_unit() {
        for bare in [DefaultUnit::Bytes, DefaultUnit::Sectors] {
            assert_eq!(parse("4k", bare), Ok(4096));
            assert_eq!(parse("4K", bare), Ok(4096));
            assert_eq!(parse("4KiB", bare), Ok(4096));
            assert_eq!(parse("4 KiB", bare), Ok(4096), "as it is printed");
            assert_eq!(parse("1M", bare), Ok(1 << 20));
            assert_eq!(parse("3GiB", bare), Ok(3 << 30));
            assert_eq!(parse("2T", bare), Ok(2 << 40));
            assert_eq!(parse("1P", bare), Ok(1 << 50));
        }
    }

    #[test]
    fn a_bare_number_has_its_options_unit() {
        assert_eq!(parse("512", DefaultUnit::Bytes), Ok(512));
        assert_eq!(parse("16", DefaultUnit::Sectors), Ok(8192));
        assert_eq!(parse("0", DefaultUnit::Bytes), Ok(0));
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_reason() {
        let sentence = |typed| parse(typed, DefaultUnit::Bytes).map_err(|error| error.to_string());
        for decimal in ["1MB", "4kB", "1Gb"] {
            assert!(
                sentence(decimal).expect_err(decimal).contains("decimal units are not used"),
                "{decimal}"
            );
        }
        for typed in ["1X", "1  M", "1 X", "1 ", "1MiBs", "1Mi B", "1iB", "1.5G", "0x10"] {
            assert!(sentence(typed).expect_err(typed).contains("the suffixes are"), "{typed}");
        }
        for typed in ["", "M", "-1", "+1", " 1", "½"] {
            assert!(sentence(typed).expect_err(typed).contains("whole number"), "{typed}");
        }
        for typed in ["18446744073709551616", "8192P", "9223372036854775808", "99999999T"] {
            assert!(sentence(typed).expect_err(typed).contains("too large"), "{typed}");
        }
        assert_eq!(parse("9223372036854775807", DefaultUnit::Bytes), Ok((1 << 63) - 1));
        assert!(
            parse("18014398509481984", DefaultUnit::Sectors).is_err(),
            "sectors are counted before the limit"
        );
    }

    #[test]
    fn what_is_to_be_typed_means_the_same() {
        for (bytes, text) in [(0, "0"), (512, "512"), (1536, "1536"), (3 << 20, "3M"), (2 << 40, "2T")] {
            assert_eq!((typed(bytes), parse(text, DefaultUnit::Bytes)), (text.to_owned(), Ok(bytes)));
        }
    }

    #[test]
    fn people_read_binary_units() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(1024), "1 KiB");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human((12 << 30) + (410 << 20)), "12.4 GiB");
        assert_eq!(human(u64::MAX), "16384 PiB");
        assert_eq!(human((4 << 30) - (8 << 10)), "4 GiB");
        assert_eq!(human((1 << 30) - 1), "1 GiB");
        assert_eq!(human((20 << 20) - 8192), "20 MiB");
        assert_eq!(human((2 << 20) - (60 << 10)), "1.9 MiB");
    }

    /// The size in `status` and in the refusal of `shrink` is rounded in the same way, and can be
    /// typed. A volume of 10 GiB less 8 KiB was once 10 GiB in one and 9.9 GiB in the other.
    #[test]
    fn a_size_that_is_told_can_be_asked_for() {
        let volume = (10 << 30) - (8 << 10);
        assert_eq!(exact(volume), "10 GiB (10737410048 bytes)");
        for bytes in [0, 512, 1536, 4096, 10 << 30, volume, (1 << 40) + 512] {
            let text = exact(bytes);
            assert!(text.starts_with(&human(bytes)), "one rounding: {text}");
            let read = text.split_once('(').map_or(text.as_str(), |(_, exact)| exact);
            let read = read.trim_end_matches(" bytes)").trim_end_matches(" B");
            assert_eq!(parse(read, DefaultUnit::Bytes), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn people_read_ranges() {
        assert_eq!(human_range(711 << 20, 761 << 20), "711-761 MiB");
        assert_eq!(human_range(0, 761 << 20), "0-761 MiB");
        assert_eq!(human_range(711 << 20, 1 << 30), "711 MiB-1 GiB");
        assert_eq!(human_range(5 << 30, (5 << 30) + 4096), "4 KiB at 5 GiB");
    }
}
