//! The body of the fuzz target `note`.
//!
//! The first byte selects how the rest is used:
//!
//! - Even: the rest is the file of a note, unchanged.
//! - Odd: the rest is the content of a note (capacity, counters, session, records of seven words).
//!   It is written to its places with correct checks, because a fuzzer does not guess them. Three
//!   other bits of the byte corrupt the last record, make the note one of another boot, and make it
//!   one of another set.
//!
//! The target asserts that any file opens. The note returns as many records as it reports, returns
//! them again when it is reopened, and accepts more.

use bcached_env::{Note as _, NoteRecord};
use bcached_uring::{MappedNote, NoteContents, NoteIdentity};
use std::path::Path;

const IDENTITY: NoteIdentity = NoteIdentity { boot: [1; 16], set: [2; 16] };
/// The version of the note's layout. This and the word indices below repeat what `bcached-uring`
/// defines.
const LAYOUT: u64 = 3;
const HEADER_WORDS: usize = 512;
const APPENDED: usize = 16;
const FORGOTTEN: usize = 24;
const SESSION: usize = 32;
/// The number of words of a record before its check.
const BODY_WORDS: usize = 7;
/// The number of records that a newly created note has room for.
const MADE_RECORDS: usize = 8;

const SPOILED: u8 = 2;
const OTHER_BOOT: u8 = 4;
const OTHER_SET: u8 = 8;

thread_local!(static FOLDER: tempfile::TempDir = folder());

/// Creates a temporary folder, in memory if possible: a disk would be the slowest part.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.expect("a folder")
}

/// The result of an input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    /// What the note reported when it was opened.
    pub found: NoteContents,
    /// The records that it returned for its own session.
    pub recovered: Vec<NoteRecord>,
}

/// Opens a note made from these bytes, uses it, and opens it again.
pub fn note(data: &[u8]) -> Opened {
    let file = match data.split_first() {
        Some((mode, rest)) if mode % 2 == 1 => sealed(*mode, rest),
        Some((_, rest)) => rest.to_vec(),
        None => Vec::new(),
    };
    let path = FOLDER.with(|folder| folder.path().join("note"));
    std::fs::write(&path, file).expect("written");
    let (mut note, first) = open(&path);
    assert!(first.recovered.len() <= capacity_of(&path), "no more than fits");
    assert!(
        first.recovered.iter().all(|record| (2..=4).contains(&record.count)),
        "keys of a possible length"
    );
    let usable = match first.found {
        NoteContents::Records(count) | NoteContents::Damaged { usable: count, .. } => count,
        NoteContents::Nothing | NoteContents::OtherBoot | NoteContents::OtherSet => 0,
    };
    assert_eq!(first.recovered.len(), usable, "{:?}", first.found);
    assert_eq!(note.room() + usable, capacity_of(&path));
    let added = NoteRecord { sequence: 9, words: [1, 2, 3, 4], count: 3 };
    let mut wanted = first.recovered.clone();
    if note.room() > 0 {
        note.append(added);
        wanted.push(added);
    }
    drop(note);

    let (mut note, second) = open(&path);
    assert_eq!(second.recovered, wanted, "what it gave back stays, and what was added");
    note.forget_through(u64::MAX);
    assert_eq!(note.room(), capacity_of(&path), "all is forgotten");
    note.append(added);
    assert_eq!(note.give_up(), [added]);
    drop(note);
    let (mut note, third) = open(&path);
    let nothing = Opened { found: NoteContents::Nothing, recovered: Vec::new() };
    assert_eq!((third, note.given_up().last()), (nothing.clone(), Some(&added)));
    note.append(added);
    note.begin(77);
    drop(note);
    let (note, fourth) = open(&path);
    assert_eq!((fourth, note.given_up()), (nothing, Vec::new()));
    first
}

fn open(path: &Path) -> (MappedNote, Opened) {
    let bytes = (HEADER_WORDS * 8 + MADE_RECORDS * 64) as u64;
    let mut note = MappedNote::open(path, &IDENTITY, bytes).expect("any file of a sensible size opens");
    let recovered = note.recovered(word_of(path, SESSION));
    let other = word_of(path, SESSION).wrapping_add(1);
    assert!(note.recovered(other).is_empty(), "nothing for another session");
    let found = note.found().clone();
    (note, Opened { found, recovered })
}

/// Returns a word of the file's current content.
fn word_of(path: &Path, index: usize) -> u64 {
    let bytes = std::fs::read(path).expect("read");
    u64::from_ne_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
}

fn capacity_of(path: &Path) -> usize {
    usize::try_from(word_of(path, 6)).expect("as many as fit the file")
}

/// Returns the bytes of a file with this content and correct checks.
fn sealed(mode: u8, rest: &[u8]) -> Vec<u8> {
    let mut words =
        rest.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("eight bytes")));
    let mut next = || words.next().unwrap_or(0);
    let (capacity, appended, forgotten, session) = (next(), next(), next(), next());
    let half = |byte: u8| u64::from_ne_bytes([byte; 8]);
    let identity = [half(1), half(1), half(2), half(2)];
    let boot = if mode & OTHER_BOOT == 0 { identity[0] } else { 0 };
    let set = if mode & OTHER_SET == 0 { identity[2] } else { 0 };
    let magic = u64::from_le_bytes(*b"bcchNOTE");
    let fixed = [magic, LAYOUT, boot, identity[1], set, identity[3], capacity];
    let mut file = vec![0; HEADER_WORDS];
    file[..fixed.len()].copy_from_slice(&fixed);
    file[fixed.len()] = mix(fixed);
    (file[APPENDED], file[FORGOTTEN], file[SESSION]) = (appended, forgotten, session);
    let salt = mix(identity);
    let bodies: Vec<u64> = words.collect();
    for body in bodies.chunks_exact(BODY_WORDS) {
        file.extend(body);
        file.push(mix([salt].into_iter().chain(body.iter().copied())));
    }
    if mode & SPOILED != 0 && file.len() > HEADER_WORDS {
        *file.last_mut().expect("not empty") ^= 1;
    }
    file.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Computes the check of a note. It repeats the code of `bcached-uring`, because the check is part
/// of the layout.
fn mix(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0x9E37_79B9_7F4A_7C15, |state: u64, word| {
        let mut mixed = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    })
}
