//! Citations of invariants.
//!
//! `docs/invariants.md` defines numbers such as `D7` in list items that begin with `- **D7.**`.
//! Code cites one with the words `invariant D7`. Outside of tests that is where it is kept; in
//! tests, in the simulator and in planted faults (`invariant: D7` in the head of a patch) it is
//! proven.

use super::TextFile;
use std::collections::BTreeMap;

/// Where the invariants are defined.
const DEFINITIONS: &str = "docs/invariants.md";

/// Where a number is cited.
#[derive(Default)]
struct Citations {
    kept: bool,
    proven: bool,
}

/// Returns what is wrong: numbers that are defined twice, not kept, not proven, or not defined.
pub fn check(files: &[TextFile]) -> Vec<String> {
    let Some(document) = files.iter().find(|file| file.path.as_os_str() == DEFINITIONS) else {
        return vec![format!("{DEFINITIONS} is missing")];
    };
    let mut wrong = Vec::new();
    let mut cited = BTreeMap::new();
    for number in document.text.lines().filter_map(defined) {
        if cited.insert(number.to_owned(), Citations::default()).is_some() {
            wrong.push(format!("{DEFINITIONS}: {number} is defined twice"));
        }
    }
    for file in files.iter().filter(|file| !file.is("md")) {
        let proves = proves(file);
        for (line, number, is_test) in citations(file) {
            match cited.get_mut(number) {
                Some(cited) if proves || is_test => cited.proven = true,
                Some(cited) => cited.kept = true,
                None => wrong.push(format!("{}:{line}: no invariant {number}", file.path.display())),
            }
        }
    }
    for (number, cited) in cited {
        if !cited.kept {
            wrong.push(format!("{DEFINITIONS}: {number} is cited by no line of code that keeps it"));
        }
        if !cited.proven {
            wrong.push(format!("{DEFINITIONS}: {number} is cited by no test, scenario or planted fault"));
        }
    }
    wrong
}

/// The number that a line of the document defines.
fn defined(line: &str) -> Option<&str> {
    line.strip_prefix("- **")?.split_once(".**").map(|(number, _)| number)
}

/// Whether citations of a file are proofs: tests, the simulator and planted faults.
fn proves(file: &TextFile) -> bool {
    let in_tests = file.path.iter().any(|part| part == "tests" || part == "tests.rs");
    in_tests || file.path.starts_with("crates/sim") || file.is("patch")
}

/// Each citation with its line, and whether it is behind `mod tests {`.
fn citations(file: &TextFile) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut is_test = false;
    file.text.lines().enumerate().flat_map(move |(at, line)| {
        is_test |= line.starts_with("mod tests {");
        let words = if file.is("patch") { "invariant: " } else { "invariant " };
        let in_comment = file.is("patch") || line.contains("//");
        let behind = line.split(words).skip(1).filter(move |_| in_comment);
        behind.filter_map(number).map(move |number| (at + 1, number, is_test)).collect::<Vec<_>>()
    })
}

/// The number at the beginning of `text`, if there is one: one of the letters D, L and N, and
/// digits.
fn number(text: &str) -> Option<&str> {
    let digits = text.strip_prefix(['D', 'L', 'N'])?.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then(|| &text[..=digits])
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    const TWO: &str = "# Invariants\n\n- **D1.** One.\n- **L2.** Two.\n";

    #[test]
    fn a_number_is_kept_in_code_and_proven_elsewhere() {
        let files = [
            file(DEFINITIONS, TWO),
            file("crates/engine/src/a.rs", "// The order is invariant D1.\nmod tests {\n// invariant L2\n"),
            file("crates/engine/tests/engine/b.rs", "/// Proves invariant D1.\n"),
            file("crates/host/src/c.rs", "x(); // (invariant L2)\n"),
        ];
        assert_eq!(check(&files), Vec::<String>::new());
    }

    #[test]
    fn what_is_not_cited_or_not_defined_is_reported() {
        let files = [
            file(DEFINITIONS, TWO),
            file(
                "crates/engine/src/a.rs",
                "// invariant D1, invariant D9; an invariant that has no number\n",
            ),
            file("crates/sim/mutants/b.patch", "invariant: L2\n\n--- a\n"),
        ];
        let wrong = check(&files);
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        assert!(wrong[0].contains("a.rs:1: no invariant D9"));
        assert!(wrong[1].contains("D1 is cited by no test"));
        assert!(wrong[2].contains("L2 is cited by no line of code"));
    }

    #[test]
    fn a_number_is_defined_once() {
        let files = [file(DEFINITIONS, "- **D1.** One.\n- **D1.** Again.\n"), file("crates/a/src/a.rs", "")];
        assert!(check(&files)[0].contains("D1 is defined twice"));
    }
}
