//! Prints numbers and choices as the kernel does in its control files.

use bcached_control::statistics::OperationTiming;
use std::fmt::Write as _;

/// Formats bytes: in KiB or a larger unit, with less than a thousand before the point and one digit
/// after it, which is truncated, not rounded.
#[must_use]
pub fn size(bytes: u64) -> String {
    let (mut whole, mut rest, mut letters) = (bytes >> 10, bytes & 1023, "kMGTPE".chars());
    let mut letter = letters.next();
    while whole >= 1000 {
        (whole, rest, letter) = (whole >> 10, whole & 1023, letters.next());
    }
    format!("{whole}.{}{}", (rest * 10) >> 10, letter.unwrap_or('Z'))
}

/// The same for numbers that may be negative.
#[must_use]
pub fn signed_size(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// Formats all words, with the selected one in brackets.
#[must_use]
pub fn choice(words: &[&str], holds: &str) -> String {
    let shown =
        words.iter().map(|word| if *word == holds { format!("[{word}]") } else { (*word).to_owned() });
    shown.collect::<Vec<_>>().join(" ")
}

/// Formats lines of a label and its value, separated by this many tabs.
#[must_use]
pub fn lines(of: &[(&str, usize, String)]) -> String {
    of.iter().fold(String::new(), |mut text, (label, tabs, said)| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{label}:{}{said}", "\t".repeat(*tabs));
        text
    })
}

/// One number of the statistics of some recurring work.
#[derive(Clone, Copy)]
pub enum TimingField {
    /// How long it takes on average, in units of this many microseconds.
    Average(u64),
    /// How long it is from one to the next, likewise.
    Between(u64),
    /// How long ago the last one was, likewise; -1 if there was none.
    Last(u64),
    /// The longest, likewise.
    Longest(u64),
}

impl TimingField {
    /// Returns the number as text.
    #[must_use]
    pub fn of(self, times: &OperationTiming) -> String {
        match self {
            Self::Average(unit) => (times.average_us / unit).to_string(),
            Self::Between(unit) => (times.between_us / unit).to_string(),
            Self::Last(unit) => times.last_us.map_or_else(|| "-1".to_owned(), |us| (us / unit).to_string()),
            Self::Longest(unit) => (times.max_us / unit).to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_as_the_kernel_does() {
        for (bytes, text) in [
            (0, "0.0k"),
            (512, "0.5k"),
            (1023, "0.9k"),
            (4096, "4.0k"),
            (999 * 1024, "999.0k"),
            (1000 * 1024, "0.9M"),
            (512_000, "500.0k"),
            (107_374_080, "102.3M"),
            (2_147_483_647 * 512, "0.9T"),
            (1 << 40, "1.0T"),
            (u64::MAX, "15.9E"),
        ] {
            assert_eq!(size(bytes), text, "{bytes}");
        }
        assert_eq!(signed_size(-2_684_354), "-2.5M");
        assert_eq!(signed_size(i64::MIN), "-8.0E");
    }

    #[test]
    fn the_word_that_holds_is_in_brackets() {
        assert_eq!(choice(&["lru", "fifo", "random"], "fifo"), "lru [fifo] random");
    }

    #[test]
    fn work_that_was_never_done_is_minus_one_ago() {
        let never = OperationTiming::default();
        let parts = [
            TimingField::Average(1),
            TimingField::Between(1000),
            TimingField::Last(1000),
            TimingField::Longest(1),
        ];
        assert_eq!(parts.map(|part| part.of(&never)), ["0", "0", "-1", "0"]);
        let times = OperationTiming {
            count: 1,
            average_us: 2500,
            between_us: 0,
            max_us: 9999,
            last_us: Some(1_999_999),
        };
        let parts = [TimingField::Average(1000), TimingField::Last(1_000_000), TimingField::Longest(1000)];
        assert_eq!(parts.map(|part| part.of(&times)), ["2", "1", "9"]);
    }
}
