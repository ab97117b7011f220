//! Each link in the documentation leads to an existing file, and to a heading in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// Returns the pages, by absolute path.
fn pages() -> BTreeMap<PathBuf, String> {
    let root = root();
    let folders = [root.clone(), root.join("docs"), root.join("docs/decisions")];
    let files = folders.iter().flat_map(|folder| folder.read_dir().expect("a folder")).map(|entry| {
        let path = entry.expect("an entry").path();
        path.canonicalize().unwrap_or(path)
    });
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.map(|path| (path.clone(), std::fs::read_to_string(&path).expect("text"))).collect()
}

/// Returns a heading's anchor: lower case, words joined by hyphens, nothing else.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Returns the targets of `[text](target)`.
fn targets(page: &str) -> impl Iterator<Item = &str> {
    page.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

#[test]
fn every_link_leads_somewhere() {
    let pages = pages();
    assert!(pages.len() > 10, "{:?}", pages.keys());
    let mut broken = Vec::new();
    let mut count = 0;
    for (path, page) in &pages {
        let links = targets(page).filter(|target| !target.contains("://"));
        for target in links {
            count += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => path.clone(),
                file => path.parent().expect("a folder").join(file),
            };
            let found = file.canonicalize().ok();
            let is_there = found.is_some_and(|file| {
                heading.is_empty() || pages.get(&file).is_none_or(|page| anchors(page).contains(heading))
            });
            if !is_there {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(count > 50, "links are found: {count}");
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}
