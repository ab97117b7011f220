//! Widths of prose: comments and paragraphs are read side by side with code, so their lines are
//! short.

use super::TextFile;
use super::links::prose;

/// Maximum width of a line of prose, in characters, indentation included.
pub const COLUMNS: usize = 100;

/// Returns each line of prose that is too wide. Tables, code blocks and lines with a long address
/// are exempt.
pub fn check(files: &[TextFile]) -> Vec<String> {
    let mut wrong = Vec::new();
    for file in files {
        let lines: Vec<(usize, &str)> = if file.is("rs") {
            let numbered = file.text.lines().enumerate().map(|(at, line)| (at + 1, line));
            numbered.filter(|(_, line)| line.trim_start().starts_with("//")).collect()
        } else if file.is("md") {
            prose(&file.text).filter(|(_, line)| !line.trim_start().starts_with('|')).collect()
        } else {
            continue;
        };
        for (at, line) in lines {
            let columns = line.chars().count();
            if columns > COLUMNS && !has_long_word(line) {
                wrong.push(format!("{}:{at}: {columns} columns, more than {COLUMNS}", file.path.display()));
            }
        }
    }
    wrong
}

/// Whether a word or a piece of code makes the line long, such as an address or a command: it is
/// not wrapped.
fn has_long_word(line: &str) -> bool {
    let code = line.split('`').skip(1).step_by(2);
    line.split_whitespace().chain(code).any(|word| word.chars().count() > COLUMNS / 2)
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn wide_comments_and_paragraphs_are_reported() {
        let wide = "word ".repeat(21);
        let files = [
            file("a.rs", &format!("let x = \"{wide}\";\n    // {wide}\n// short\n")),
            file("a.md", &format!("{wide}\n| {wide} |\n```\n{wide}\n```\n{}\n`{wide}`.\n", "x".repeat(120))),
        ];
        assert_eq!(
            check(&files),
            ["a.rs:2: 112 columns, more than 100", "a.md:1: 105 columns, more than 100"]
        );
    }
}
