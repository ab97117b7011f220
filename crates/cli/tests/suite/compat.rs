//! Everything that `docs/compat.md` cites exists. Whether its statements are true no program can
//! check.

use bcached_config::options::{OPTIONS, cache_options};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The verdicts in the table of comparisons with the kernel, and in that of incidents.
const VERDICTS: [&str; 7] = ["same", "different", "none", "covered", "in part", "cannot arise", "not yet"];

/// The last column of tables that cite tests.
const SHOWN_BY: &str = "shown by";

/// The content of that column where the code was read and no test shows it.
const NO_TEST: &str = "no test";

/// The number of classes of incidents.
const INCIDENTS: usize = 31;

fn repository() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the crates");
    crates.parent().expect("the repository").to_owned()
}

fn page() -> String {
    fs::read_to_string(repository().join("docs/compat.md")).expect("the page")
}

/// Returns all files below `folder` with this extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
    found
}

/// Returns the test functions of `source`, and the scenarios that it lists.
fn tests_in(source: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        let function = line.strip_prefix("async fn ").or_else(|| line.strip_prefix("fn "));
        if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = function.filter(|_| is_test) {
            names.extend(rest.split(['(', '<']).next().map(str::to_owned));
            is_test = false;
        }
    }
    // In `crates/sim/src/scenarios.rs`, a macro makes a test of each name in the list.
    for list in source.split("\nsuper::scenarios! {\n").skip(1) {
        let list = list.split("\n}").next().unwrap_or_default();
        names.extend(list.split(',').map(str::trim).filter(|word| is_name(word)).map(str::to_owned));
    }
    names
}

fn is_name(word: &str) -> bool {
    word.contains('_')
        && word.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter))
}

/// Returns everything that may be cited: tests, scenarios, and the names of planted faults.
fn known() -> BTreeSet<String> {
    let root = repository();
    let mut names = BTreeSet::new();
    for path in ["crates", "tests", "xtask"].into_iter().flat_map(|folder| files(&root.join(folder), "rs")) {
        names.extend(tests_in(&fs::read_to_string(path).expect("a source")));
    }
    // Faults that hunts find; the others lie in a subdirectory.
    let folder = root.join("crates/sim/mutants");
    let faults = files(&folder, "patch").into_iter().filter(|path| path.parent() == Some(&folder));
    names.extend(faults.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())));
    names
}

/// Returns the texts in backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the cells of a table's line.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// Returns the rows of the tables that cite tests: line number and cells.
fn rows(page: &str) -> Vec<(usize, Vec<&str>)> {
    let mut rows = Vec::new();
    let mut columns = None;
    for (line, number) in page.lines().zip(1..) {
        match (cells(line), columns) {
            (None, _) => columns = None,
            (Some(head), None) => columns = Some((head.len(), head.last() == Some(&SHOWN_BY))),
            (Some(row), Some((count, cites))) => {
                assert_eq!(
                    row.len(),
                    count,
                    "docs/compat.md:{number}: as many cells as its table has columns"
                );
                if cites && !row[0].starts_with("---") {
                    rows.push((number, row));
                }
            }
        }
    }
    rows
}

#[test]
fn what_the_comparison_cites_exists() {
    let (page, known) = (page(), known());
    let rows = rows(&page);
    assert!(rows.len() > 200 && known.len() > 700, "{} rows, {} names", rows.len(), known.len());
    let mut missing = Vec::new();
    for (number, row) in &rows {
        let (verdict, shown_by) = (row[row.len() - 2], row[row.len() - 1]);
        let has_verdict = VERDICTS.iter().any(|known| verdict.starts_with(known));
        assert!(has_verdict, "docs/compat.md:{number}: `{verdict}` begins with none of {VERDICTS:?}");
        let cited: Vec<&str> = quoted(shown_by).collect();
        missing.extend(
            cited
                .iter()
                .filter(|name| !known.contains(**name))
                .map(|name| format!("docs/compat.md:{number}: {name}")),
        );
        let must_show = verdict.starts_with("same") || verdict.starts_with("covered");
        assert!(
            !must_show || !cited.is_empty() || shown_by.starts_with(NO_TEST),
            "docs/compat.md:{number}: name what shows it, or say `{NO_TEST}`"
        );
    }
    assert!(missing.is_empty(), "no test, scenario or planted fault is called so:\n{}", missing.join("\n"));
}

#[test]
fn every_option_is_in_the_comparison() {
    let page = page();
    let words: BTreeSet<&str> = page.lines().flat_map(quoted).collect();
    let all = || OPTIONS.iter().chain(cache_options::OPTIONS);
    let left_out: Vec<&str> = all().map(|option| option.name).filter(|name| !words.contains(name)).collect();
    assert!(left_out.is_empty(), "options that docs/compat.md does not have: {left_out:?}");
    // In the page, `option` before a name says that it is the name of an option.
    for (line, number) in page.lines().zip(1..) {
        for rest in line.split("option `").skip(1) {
            let name = rest.split('`').next().unwrap_or_default();
            assert!(all().any(|option| option.name == name), "docs/compat.md:{number}: {name} is no option");
        }
    }
}

#[test]
fn every_class_of_incidents_has_its_row() {
    let page = page();
    let told: Vec<&str> = page.lines().filter_map(|line| Some(cells(line)?[0])).collect();
    for number in 1..=INCIDENTS {
        let class = format!("F{number}");
        assert_eq!(told.iter().filter(|told| **told == class).count(), 1, "{class}");
    }
}
