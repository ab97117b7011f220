//! The note and SIGKILL. In a binary of its own: a child between fork and exec shares the parent's
//! locks for a moment, which would disturb tests running in parallel.

use bcached_env::{Note as _, NoteRecord};
use bcached_uring::{MappedNote, NoteContents, NoteIdentity};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A header page and room for 64 records: the ring wraps often.
const SMALL: u64 = 4096 + 64 * 64;

fn open(path: &Path) -> MappedNote {
    let identity = NoteIdentity::of_this_boot([3; 16]).expect("Linux tells its boot id");
    MappedNote::open(path, &identity, SMALL).expect("the temporary directory can hold a note")
}

/// The record that is appended as number `index`: sixteen of them per journal entry.
fn record(index: u64) -> NoteRecord {
    let count = u8::try_from(2 + index % 3).expect("2, 3 or 4");
    NoteRecord { sequence: index / 16, words: [index, !index, index * 3, index << 7], count }
}

/// The child reports after this many records, so that the kill usually hits an append, not a
/// report.
const BURST: u64 = 16;

/// The path of the note, for the child of the next test.
const CHILD: &str = "BCACHED_TEST_NOTE_CHILD";

/// Kills a process at an arbitrary moment while it appends and forgets. Everything it had reported
/// as appended is there, in order and intact, and at most one burst that it had not reported yet.
/// Nothing is missing that it had not begun to forget. Proves invariant D6.
#[test]
fn sigkill_leaves_a_consistent_prefix() {
    if let Some(directory) = std::env::var_os(CHILD) {
        append_until_killed(Path::new(&directory));
    }
    let mut total = 0;
    for round in 0..40_u64 {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sigkill_leaves_a_consistent_prefix", "--nocapture"])
            .env(CHILD, directory.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let log = directory.path().join("log");
        let limit = Instant::now() + Duration::from_secs(120);
        while std::fs::metadata(&log).map_or(0, |found| found.len()) < 16 * (1 + round * 50) {
            assert!(Instant::now() < limit, "the child appends nothing");
            std::thread::sleep(Duration::from_micros(500 + round * 37));
        }
        child.kill().unwrap();
        child.wait().unwrap();

        let (appended, forgetting) = read_log(&log);
        let mut note = open(&directory.path().join("note"));
        assert!(!matches!(note.found(), NoteContents::Damaged { .. }), "{}", note.found());
        let recovered = note.recovered(0);
        let first = recovered.first().map_or(appended, |record| record.words[0]);
        let expected: Vec<_> = (first..first + recovered.len() as u64).map(record).collect();
        assert_eq!(recovered, expected, "in order, without a hole");
        let end = first + recovered.len() as u64;
        assert!((appended..=appended + BURST).contains(&end), "{appended} were announced, {end} are there");
        assert!(first <= forgetting * 16, "record {first} is the first, {forgetting} sequences may be gone");
        total += recovered.len();
    }
    assert!(total > 0, "some round found something");
}

/// Returns how many records the child reported as appended, and how many sequences it had begun to
/// forget.
fn read_log(path: &Path) -> (u64, u64) {
    let bytes = std::fs::read(path).expect("the child made it");
    let (mut appended, mut forgetting) = (0, 0);
    for entry in bytes.chunks_exact(16) {
        let value = u64::from_ne_bytes(entry[8..].try_into().expect("eight bytes"));
        if entry[0] == b'a' { appended = value } else { forgetting = value }
    }
    (appended, forgetting)
}

fn append_until_killed(directory: &Path) -> ! {
    let mut note = open(&directory.join("note"));
    let mut log = std::fs::File::create(directory.join("log")).expect("the directory is there");
    let mut tell = |kind: u8, value: u64| {
        let mut entry = [kind; 16];
        entry[8..].copy_from_slice(&value.to_ne_bytes());
        // One write: it is in the file as a whole, or not at all.
        assert_eq!(log.write(&entry).expect("a file takes 16 bytes"), entry.len());
    };
    for index in 0.. {
        if note.room() == 0 {
            let oldest = (index - 64) / 16;
            tell(b'f', oldest + 1);
            note.forget_through(oldest);
        }
        note.append(record(index));
        if index % BURST == BURST - 1 {
            tell(b'a', index + 1);
        }
    }
    unreachable!("killed before 2^64 records")
}
