//! Parses what is written to control files as the kernel does: a line, with or without its end, and
//! nothing around it.

/// Returns the line without its end; `None` if it is not text.
#[must_use]
pub fn line(text: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(text).ok()?;
    Some(text.strip_suffix('\n').unwrap_or(text))
}

/// Parses a whole number of decimal digits and nothing else. A number too large for 64 bits becomes
/// the largest: all ranges end below that.
#[must_use]
pub fn number(line: &str) -> Option<u64> {
    let is_number = !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| line.parse().unwrap_or(u64::MAX))
}

/// Parses a flag: any number but 0 is true.
#[must_use]
pub fn flag(line: &str) -> Option<bool> {
    number(line).map(|number| number != 0)
}

/// Parses bytes: a whole number, optionally with one letter for a power of 1024. `None` if it does
/// not fit into 64 bits.
#[must_use]
pub fn size(line: &str) -> Option<u64> {
    const LETTERS: &str = "kmgtpezy";
    let (digits, power) = match line.char_indices().last()? {
        (_, last) if last.is_ascii_digit() => (line, 0),
        (at, last) => {
            let power = LETTERS.find(last.to_ascii_lowercase())?;
            (&line[..at], u32::try_from(power).ok()? + 1)
        }
    };
    number(digits)?;
    digits.parse::<u64>().ok()?.checked_mul(1024_u64.checked_pow(power)?)
}

/// Returns the leading hexadecimal digits of a UUID. `-` and `:` between them and anything after
/// them are ignored. `None` if there is less than half a UUID.
#[must_use]
pub fn uuid_digits(line: &str) -> Option<String> {
    const LEAST: usize = 16;
    let digits: String = line
        .chars()
        .filter(|letter| !matches!(letter, '-' | ':'))
        .take_while(char::is_ascii_hexdigit)
        .map(|digit| digit.to_ascii_lowercase())
        .collect();
    (digits.len() >= LEAST).then_some(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_may_have_one_end() {
        assert_eq!(line(b"1\n"), Some("1"));
        assert_eq!(line(b"1"), Some("1"));
        assert_eq!(line(b"1\n\n"), Some("1\n"));
        assert_eq!(line(b"\xff"), None);
    }

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!([number("0"), number("4194304"), number("0010")], [Some(0), Some(4_194_304), Some(10)]);
        assert_eq!(number("99999999999999999999999"), Some(u64::MAX));
        for wrong in ["", " 1", "1 ", "-1", "+1", "1.5", "0x10", "1k", "one", "1\n"] {
            assert_eq!(number(wrong), None, "{wrong:?}");
        }
        assert_eq!(
            [flag("0"), flag("1"), flag("7"), flag("yes")],
            [Some(false), Some(true), Some(true), None]
        );
    }

    #[test]
    fn sizes_have_one_letter_at_most() {
        assert_eq!(
            [size("512"), size("1k"), size("4M"), size("2g")],
            [512, 1 << 10, 4 << 20, 2 << 30].map(Some)
        );
        assert_eq!(size("15E"), Some(15 << 60));
        for wrong in ["", "k", "1kk", "1.5G", "-1", "1 k", "16E", "1Z", "99999999999999999999", "1ü"] {
            assert_eq!(size(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn half_a_uuid_is_enough_to_be_one() {
        let uuid = "1F5A0000-0000-4000-8000-0000000000ff";
        assert_eq!(uuid_digits(uuid).as_deref(), Some("1f5a00000000400080000000000000ff"));
        assert_eq!(uuid_digits("1f5a:0000:0000:4000 and more").as_deref(), Some("1f5a000000004000"));
        assert_eq!([uuid_digits("1f5a-0000-0000-400"), uuid_digits("nvme")], [None, None]);
    }
}
