//! How the kernel prints numbers and choices in its control files.

use bcached_control::statistics::Times;
use std::fmt::Write as _;

/// A number of bytes: at least in KiB, with one digit behind the point that is cut and not rounded, less than a thousand before it.
#[must_use]
pub fn size(bytes: u64) -> String {
    let (mut whole, mut rest, mut letters) = (bytes >> 10, bytes & 1023, "kMGTPE".chars());
    let mut letter = letters.next();
    while whole >= 1000 {
        (whole, rest, letter) = (whole >> 10, whole & 1023, letters.next());
    }
    format!("{whole}.{}{}", (rest * 10) >> 10, letter.unwrap_or('Z'))
}

/// The same of what may be less than nothing.
#[must_use]
pub fn signed_size(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// All words, and in brackets the one that holds.
#[must_use]
pub fn choice(words: &[&str], holds: &str) -> String {
    let shown =
        words.iter().map(|word| if *word == holds { format!("[{word}]") } else { (*word).to_owned() });
    shown.collect::<Vec<_>>().join(" ")
}

/// Lines of a label and what it says, apart by so many tabs.
#[must_use]
pub fn lines(of: &[(&str, usize, String)]) -> String {
    of.iter().fold(String::new(), |mut text, (label, tabs, said)| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{label}:{}{said}", "\t".repeat(*tabs));
        text
    })
}

/// A part of what is known of some work that is done now and then.
#[derive(Clone, Copy)]
pub enum Part {
    /// How long it takes, in units of so many microseconds.
    Average(u64),
    /// How long it is from one to the next, likewise.
    Between(u64),
    /// How long ago the last was, likewise; -1: there was none.
    Last(u64),
    /// The longest, likewise.
    Longest(u64),
}

impl Part {
    /// The number.
    #[must_use]
    pub fn of(self, times: &Times) -> String {
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
        let never = Times::default();
        let parts = [Part::Average(1), Part::Between(1000), Part::Last(1000), Part::Longest(1)];
        assert_eq!(parts.map(|part| part.of(&never)), ["0", "0", "-1", "0"]);
        let times =
            Times { count: 1, average_us: 2500, between_us: 0, max_us: 9999, last_us: Some(1_999_999) };
        let parts = [Part::Average(1000), Part::Last(1_000_000), Part::Longest(1000)];
        assert_eq!(parts.map(|part| part.of(&times)), ["2", "1", "9"]);
    }
}
