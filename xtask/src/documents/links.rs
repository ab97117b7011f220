//! Links between Markdown documents: the file is there, and so is the heading.

use super::TextFile;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Returns each link that leads to no file or no heading of the repository at `root`.
pub fn check(root: &Path, files: &[TextFile]) -> Vec<String> {
    let documents: Vec<&TextFile> = files.iter().filter(|file| file.is("md")).collect();
    let mut wrong = Vec::new();
    for document in &documents {
        let folder = document.path.parent().unwrap_or(Path::new(""));
        for (line, target) in targets(&document.text) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let to = if path.is_empty() { document.path.clone() } else { normal(&folder.join(path)) };
            let at = || format!("{}:{line}", document.path.display());
            let found = documents.iter().find(|other| other.path == to);
            match found {
                Some(found) if !anchor.is_empty() && !anchors(&found.text).contains(anchor) => {
                    wrong.push(format!("{}: {} has no heading #{anchor}", at(), to.display()));
                }
                None if !root.join(&to).exists() => wrong.push(format!("{}: no file {}", at(), to.display())),
                _ => {}
            }
        }
    }
    wrong
}

/// The targets of inline links, with their lines, outside of code blocks.
fn targets(text: &str) -> Vec<(usize, &str)> {
    let mut targets = Vec::new();
    for (at, line) in prose(text) {
        for behind in line.split("](").skip(1) {
            if let Some((target, _)) = behind.split_once(')') {
                targets.push((at, target));
            }
        }
    }
    targets
}

/// Lines outside of fenced code blocks, with their numbers.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((at + 1, line))
    })
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// `path` without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn links_to_missing_files_and_headings_are_reported() {
        let files = [
            file("docs/a.md", "[b](b.md#the-two-words) [c](b.md#none) [d](gone.md)\n```\n[e](no.md)\n```\n"),
            file("docs/b.md", "# The two `words`\n[up](../docs/a.md) [web](https://example.org/x)\n"),
        ];
        let wrong = check(Path::new("/nonexistent"), &files);
        assert_eq!(
            wrong,
            ["docs/a.md:1: docs/b.md has no heading #none", "docs/a.md:1: no file docs/gone.md"]
        );
    }
}
