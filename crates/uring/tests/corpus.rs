//! Replays the fuzzer's corpus of notes: each file holds what its name says, and none makes opening
//! it fail.

use bcached_uring::NoteFound;
use std::path::Path;

#[path = "../../../fuzz/src/note.rs"]
mod target;

fn opened(name: &str) -> target::Opened {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/note");
    target::note(&std::fs::read(corpus.join(name)).expect("the corpus is in the repository"))
}

#[test]
fn every_note_of_the_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/note");
    for entry in std::fs::read_dir(&corpus).expect("the corpus is in the repository") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display());
        target::note(&std::fs::read(&path).expect("a readable file"));
    }
}

/// The seeds pass the checks, so the fuzzer starts behind them.
#[test]
fn the_seeds_are_what_they_are_called() {
    for (name, found) in [
        ("empty", NoteFound::Damaged { what: "it was truncated to 0 bytes", usable: 0 }),
        ("no-note", NoteFound::Damaged { what: "it has no valid header", usable: 0 }),
        ("short", NoteFound::Damaged { what: "it is shorter than its header says", usable: 0 }),
        ("two", NoteFound::Records(2)),
        ("wrapped", NoteFound::Records(2)),
        ("spoiled", NoteFound::Damaged { what: "a record is invalid", usable: 1 }),
        ("impossible-counters", NoteFound::Damaged { what: "its counters are invalid", usable: 0 }),
        ("other-boot", NoteFound::OtherBoot),
        ("other-set", NoteFound::OtherSet),
    ] {
        assert_eq!(opened(name).found, found, "{name}");
    }
    let sequences = |name| opened(name).recovered.iter().map(|record| record.sequence).collect::<Vec<_>>();
    assert_eq!((sequences("two"), sequences("wrapped")), (vec![7, 8], vec![7, 8]));
}
