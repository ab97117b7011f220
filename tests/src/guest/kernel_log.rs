//! Checks the kernel's log against the list of lines it may contain (`tests/kernel-log.allow`).
//!
//! A kernel that finds a damaged image often continues and only logs it. A log line that is not in
//! the list therefore fails the test. A line of the list is a pattern for a whole log line, in
//! which `*` matches any text; lines starting with `#` are comments.

/// What a kernel logged, line by line, without levels and time stamps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelLog(pub Vec<String>);

/// The patterns, in a file of their own so that they are easy to look up.
const ALLOWED: &str = include_str!("../../kernel-log.allow");

impl KernelLog {
    /// Parses lines as `/proc/kmsg` prints them: `<6>[    1.250000] text`, with or without the
    /// time.
    pub(super) fn from_lines<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let text = |line: &'a str| {
            let line =
                line.strip_prefix('<').and_then(|rest| rest.split_once('>')).map_or(line, |(_, rest)| rest);
            let time = |rest: &'a str| rest.split_once("] ").map(|(_, text)| text);
            line.strip_prefix('[').and_then(time).unwrap_or(line).to_owned()
        };
        Self(lines.map(text).collect())
    }

    /// Returns the lines that match no pattern of the file or of `also`.
    #[must_use]
    pub fn unexpected(&self, also: &[&str]) -> Vec<&str> {
        self.unexpected_by(ALLOWED, also)
    }

    /// Returns true if some line contains `text`.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        self.0.iter().any(|line| line.contains(text))
    }

    fn unexpected_by(&self, allowed: &str, also: &[&str]) -> Vec<&str> {
        let patterns: Vec<&str> = allowed
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .chain(also.iter().copied())
            .collect();
        let lines = self.0.iter().map(String::as_str);
        lines.filter(|line| !patterns.iter().any(|pattern| matches(pattern, line))).collect()
    }
}

/// Returns true if `line` matches `pattern`, in which `*` matches any text.
fn matches(pattern: &str, line: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == line };
    let Some(tail) = line.strip_prefix(head) else { return false };
    (0..=tail.len()).filter(|at| tail.is_char_boundary(*at)).any(|at| matches(rest, &tail[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_a_whole_line_with_gaps() {
        assert!(matches("bcache: * done, * keys", "bcache: replay done, 12 keys"));
        assert!(!matches("bcache: * done, * keys", "bcache: replay done, 12 keys lost"));
        assert!(!matches("bcache: done", "x bcache: done"));
        assert!(matches("*", ""));
    }

    #[test]
    fn level_and_time_are_left_out() {
        let log = KernelLog::from_lines(["<6>[    1.250000] a: [b] c", "<5>a", "[x", "plain"].into_iter());
        assert_eq!(log.0, ["a: [b] c", "a", "[x", "plain"]);
    }

    #[test]
    fn what_no_line_of_the_list_allows_is_named() {
        let log = KernelLog(vec!["registered ubda".to_owned(), "corrupt btree".to_owned()]);
        assert_eq!(log.unexpected_by("# devices\nregistered *\n", &[]), ["corrupt btree"]);
        assert_eq!(log.unexpected_by("", &["corrupt *"]), ["registered ubda"]);
        assert_eq!(log.unexpected_by("", &[]).len(), 2);
    }
}
