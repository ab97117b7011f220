//! Replays the fuzzers' corpora: a target must survive every input it was ever given, good or bad.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]
#![allow(clippy::cast_possible_truncation, reason = "the targets run on 64 bits")]

use std::path::Path;

#[path = "../../../../fuzz/src/targets.rs"]
mod targets;

#[track_caller]
fn replay(name: &str, target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut inputs = 0;
    for entry in std::fs::read_dir(&corpus).unwrap_or_else(|error| panic!("{}: {error}", corpus.display())) {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        target(&std::fs::read(&path).unwrap());
        inputs += 1;
    }
    assert!(inputs > 0, "the corpus of {name} is empty");
}

#[test]
fn superblocks() {
    replay("superblock", targets::superblock);
}

#[test]
fn nodes() {
    replay("node", targets::node);
}

#[test]
fn journal_entries() {
    replay("jset", targets::jset);
}

#[test]
fn priority_sets() {
    replay("prio", targets::prio);
}

#[test]
fn uuid_tables() {
    replay("uuid", targets::uuid);
}

#[test]
fn whole_images() {
    replay("image", targets::image);
}
