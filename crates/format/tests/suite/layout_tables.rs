//! Checks that `docs/format.md` shows the layout tables that the code uses: they are rendered here
//! and compared with the page.
//!
//! After a change of a table, `BLESS=1 cargo test -p bcached-format --test suite layout_tables::`
//! rewrites the tables of the page.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use bcached_format::layout::STRUCTURES;
use std::fmt::Write as _;
use std::path::Path;

const BEGIN: &str = "<!-- tables: rendered from crates/format, see its tests/suite/layout_tables.rs -->\n";
const END: &str = "<!-- end of tables -->\n";

fn tables() -> String {
    let mut page = String::new();
    for structure in STRUCTURES {
        write!(page, "\n### {}\n\n| offset | size | field | meaning |\n|---|---|---|---|\n", structure.name)
            .unwrap();
        for field in structure.fields {
            let meaning = if field.meaning.is_empty() { "–" } else { field.meaning };
            writeln!(page, "| {} | {} | {} | {meaning} |", field.offset, field.size, field.name).unwrap();
        }
    }
    page.push('\n');
    page
}

#[test]
fn the_page_shows_the_tables_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/format.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page marks where the tables begin");
    let (found, after) = rest.split_once(END).expect("the page marks where the tables end");
    let wanted = tables();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, [before, BEGIN, &wanted, END, after].concat()).unwrap();
    } else {
        for (found, wanted) in found.lines().zip(wanted.lines()) {
            assert_eq!(found, wanted, "the page (left) differs from the code (right)");
        }
        assert_eq!(found.lines().count(), wanted.lines().count(), "lines of the tables");
    }
}

#[test]
fn fields_follow_each_other_without_holes() {
    for structure in STRUCTURES {
        let mut end = 0;
        for field in structure.fields {
            assert_eq!(field.offset, end, "{} of {}", field.name, structure.name);
            end = field.end();
        }
    }
}
