//! Names of source files, in the tables of modules and in documents: files move, and a name that
//! leads nowhere is worse than none.

use super::TextFile;
use super::links::prose;
use std::path::{Path, PathBuf};

/// Returns each name of a module or source file that does not exist.
pub fn check(files: &[TextFile]) -> Vec<String> {
    let exists = |path: &Path| files.iter().any(|file| file.path == path);
    let mut wrong = Vec::new();
    for file in files {
        if file.is("rs") {
            for (at, name) in in_tables(&file.text) {
                let folder = folder_of_modules(&file.path);
                let module = folder.join(name.trim_end_matches('/'));
                if !exists(&module.with_extension("rs")) && !exists(&module.join("mod.rs")) {
                    wrong.push(format!("{}:{at}: there is no module {name}", file.path.display()));
                }
            }
        } else if file.is("md") && file.path != Path::new("CHANGELOG.md") {
            for (at, line) in prose(&file.text) {
                for name in spans(line).filter(|span| is_source_file(span)) {
                    if !files.iter().any(|file| is_named(&file.path, name)) {
                        wrong.push(format!("{}:{at}: there is no file {name}", file.path.display()));
                    }
                }
            }
        }
    }
    wrong
}

/// The modules that the table in the head of a source file lists, with their lines: the code spans
/// in the first column of a table with the heading `file` or `module`.
fn in_tables(text: &str) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    let mut is_inside = false;
    for (index, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("//! |") else {
            is_inside = false;
            continue;
        };
        let first = row.split('|').next().unwrap_or_default().trim();
        if ["file", "module"].contains(&first) {
            is_inside = true;
        } else if is_inside {
            names.extend(spans(first).map(|name| (index + 1, name)));
        }
    }
    names
}

/// The folder of the modules that are declared in the file at `path`.
fn folder_of_modules(path: &Path) -> PathBuf {
    let is_root = path.file_name().is_some_and(|name| name == "mod.rs" || name == "lib.rs");
    if is_root { path.parent().unwrap_or(path).to_owned() } else { path.with_extension("") }
}

/// Whether `name` is the end of this path, with or without the folder `src`.
fn is_named(path: &Path, name: &str) -> bool {
    let without: PathBuf = path.iter().filter(|part| *part != "src").collect();
    path.ends_with(name) || without.ends_with(name)
}

/// The code spans of a line.
fn spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Whether a code span is the path of a source file, and not a pattern or a command.
fn is_source_file(span: &str) -> bool {
    span.strip_suffix(".rs").is_some_and(|stem| {
        !stem.is_empty()
            && stem.chars().all(|letter| letter.is_ascii_alphanumeric() || "_/-".contains(letter))
    })
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn a_name_that_leads_nowhere_is_noticed() {
        let table = "//! Head.\n//!\n//! | module | duty |\n//! |---|---|\n//! | `gc/`, `set` | it |\n\
            //! | [`walk`] | other |\n//!\n//! | key | `none` |\n//! | `nobody` | x |\n";
        let sources = [
            file("crates/engine/src/lib.rs", table),
            file("crates/engine/src/gc/mod.rs", ""),
            file("crates/engine/src/set.rs", "//! | file | duty |\n//! |---|---|\n//! | `part` | it |\n"),
            file("docs/a.md", "See `engine/src/set.rs`, `engine/set.rs`, `src/nowhere.rs` and `*.rs`.\n"),
        ];
        let wrong = check(&sources);
        assert_eq!(
            wrong,
            [
                "crates/engine/src/lib.rs:6: there is no module walk",
                "crates/engine/src/set.rs:3: there is no module part",
                "docs/a.md:1: there is no file src/nowhere.rs",
            ]
        );
    }
}
