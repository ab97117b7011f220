//! All that is wrong with a file, and not only the first of it: what a reader refuses is taken out, line by line, and the rest is read.

use bcached_control::failure::Failure;
use std::ops::Range;
use toml::Table;

/// The first thing that is wrong, if so many more are.
pub fn and_more(first: Failure, more: usize) -> Failure {
    let it = match more {
        0 => return first,
        1 => "one more thing".to_owned(),
        more => format!("{more} more things"),
    };
    let rest = format!("`bcached config check` tells of {it} that cannot be");
    let next = first.next.as_ref().map_or_else(|| rest.clone(), |next| format!("{next}; {rest}"));
    first.next(next)
}

/// `text` without what stands at `span`, with all else at the same place. `None` if nothing can be told of the rest.
pub fn without(text: &str, span: Range<usize>) -> Option<String> {
    // Where what is no TOML begins is known, and not where it ends.
    text.parse::<Table>().ok()?;
    let (start, end) = (line_start(text, span.start)?, line_end(text, span.end.max(span.start + 1)));
    // What stands in a section that nobody knows belongs to no other one.
    let end = if is_head(text.get(start..end)?) { section_end(text, end) } else { end };
    // What follows stays where it is: a place in the rest is one in the text.
    let blank = |letter: char| if letter == '\n' { "\n".to_owned() } else { " ".repeat(letter.len_utf8()) };
    let taken: String = text.get(start..end)?.chars().map(blank).collect();
    let rest = format!("{}{taken}{}", text.get(..start)?, text.get(end..)?);
    (rest.trim() != text.trim() && rest.parse::<Table>().is_ok()).then_some(rest)
}

fn line_start(text: &str, at: usize) -> Option<usize> {
    Some(text.get(..at)?.rfind('\n').map_or(0, |newline| newline + 1))
}

/// Where the line ends that holds the byte before `at`.
fn line_end(text: &str, at: usize) -> usize {
    let from = at.saturating_sub(1).min(text.len());
    text.get(from..).and_then(|rest| rest.find('\n')).map_or(text.len(), |newline| from + newline)
}

fn is_head(line: &str) -> bool {
    line.trim_start().starts_with('[')
}

/// Where the section ends whose head ends at `from`.
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
