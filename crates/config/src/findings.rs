//! Finds all errors in a file, and not only the first: a line that the parser refuses is blanked
//! out, and the rest is parsed again.

use bcached_control::failure::Failure;
use std::ops::Range;
use toml::Table;

/// Adds to the first error that there are `more` others.
pub fn and_more(first: Failure, more: usize) -> Failure {
    let it = match more {
        0 => return first,
        1 => "one more error".to_owned(),
        more => format!("{more} more errors"),
    };
    let rest = format!("`bcached config check` shows {it}");
    let next = first.next.as_ref().map_or_else(|| rest.clone(), |next| format!("{next}; {rest}"));
    first.next(next)
}

/// Returns `text` with the lines at `span` blanked out and everything else at its offset. `None` if
/// the rest cannot be parsed.
pub fn without(text: &str, span: Range<usize>) -> Option<String> {
    // A syntax error has a known start but no known end.
    text.parse::<Table>().ok()?;
    let (start, end) = (line_start(text, span.start)?, line_end(text, span.end.max(span.start + 1)));
    // The keys of an unknown section belong to no other section, so they are removed with it.
    let end = if is_head(text.get(start..end)?) { section_end(text, end) } else { end };
    // Keep offsets: a position in the result is the same in the text.
    let blank = |letter: char| if letter == '\n' { "\n".to_owned() } else { " ".repeat(letter.len_utf8()) };
    let taken: String = text.get(start..end)?.chars().map(blank).collect();
    let rest = format!("{}{taken}{}", text.get(..start)?, text.get(end..)?);
    (rest.trim() != text.trim() && rest.parse::<Table>().is_ok()).then_some(rest)
}

fn line_start(text: &str, at: usize) -> Option<usize> {
    Some(text.get(..at)?.rfind('\n').map_or(0, |newline| newline + 1))
}

/// Returns the end of the line that contains the byte before `at`.
fn line_end(text: &str, at: usize) -> usize {
    let from = at.saturating_sub(1).min(text.len());
    text.get(from..).and_then(|rest| rest.find('\n')).map_or(text.len(), |newline| from + newline)
}

fn is_head(line: &str) -> bool {
    line.trim_start().starts_with('[')
}

/// Returns the end of the section whose head ends at `from`.
fn section_end(text: &str, from: usize) -> usize {
    let mut at = from;
    for line in text.get(from..).unwrap_or_default().split_inclusive('\n') {
        if at > from && is_head(line) {
            break;
        }
        at += line.len();
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_or_a_section_is_taken_out_and_the_others_keep_their_numbers() {
        let text = "version = 1\n[no]\na = [\n 1,\n 2 ]\nb = 1\n[cache.a]\ndevice = 5\n";
        let span = |part: &str| text.find(part).map(|at| at..at + part.len()).expect("it is there");
        let without = |part| without(text, span(part)).map(|rest| rest.replace(' ', ""));
        assert_eq!(
            without("no").as_deref(),
            Some("version=1\n\n\n\n\n\n[cache.a]\ndevice=5\n"),
            "the section"
        );
        assert_eq!(without("5").as_deref(), Some("version=1\n[no]\na=[\n1,\n2]\nb=1\n[cache.a]\n\n"));
        let array = "[\n 1,\n 2 ]";
        assert_eq!(without(array).as_deref(), Some("version=1\n[no]\n\n\n\nb=1\n[cache.a]\ndevice=5\n"));
        assert_eq!(without(" 2 "), None, "half of a value leaves no TOML");
        assert_eq!(super::without("[a\n", 0..1), None);
        assert_eq!(super::without("", 0..0), None);
    }
}
