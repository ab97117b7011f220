//! Replays the fuzzer's corpus of notes: each file holds what its name says, and none makes opening
//! it fail.

use bcached_uring::NoteContents;
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
        ("empty", NoteContents::Damaged { what: "it was truncated to 0 bytes", usable: 0 }),
        ("no-note", NoteContents::Damaged { what: "it has no valid header", usable: 0 }),
        ("short", NoteContents::Damaged { what: "it is shorter than its header says", usable: 0 }),
        ("two", NoteContents::Records(2)),
        ("wrapped", NoteContents::Records(2)),
        ("spoiled", NoteContents::Damaged { what: "a record is invalid", usable: 1 }),
        ("impossible-counters", NoteContents::Damaged { what: "its counters are invalid", usable: 0 }),
        ("other-boot", NoteContents::OtherBoot),
        ("other-set", NoteContents::OtherSet),
    ] {
        assert_eq!(opened(name).found, found, "{name}");
    }
    let sequences = |name| opened(name).recovered.iter().map(|record| record.sequence).collect::<Vec<_>>();
    assert_eq!((sequences("two"), sequences("wrapped")), (vec![7, 8], vec![7, 8]));
}
