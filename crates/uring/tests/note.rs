//! The note survives its process, and nothing else: not another boot, not another set, not damage.

use bcached_env::{Note as _, NoteRecord};
use bcached_uring::note::{NOTE_BYTES, NoteFileState, look_after_all, remove};
use bcached_uring::{MappedNote, NoteContents, NoteError, NoteIdentity};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The session of a new note.
const SESSION: u64 = 0;
const SET: [u8; 16] = *b"a set's uuid....";
/// A header page and room for 64 records.
const SMALL: u64 = 4096 + 64 * 64;

fn here() -> NoteIdentity {
    NoteIdentity::of_this_boot(SET).expect("Linux tells its boot id")
}

fn open(path: &Path) -> MappedNote {
    MappedNote::open(path, &here(), SMALL).expect("the temporary directory can hold a note")
}

/// The record that is appended as number `index`: sixteen of them per journal entry.
fn record(index: u64) -> NoteRecord {
    let count = u8::try_from(2 + index % 3).expect("2, 3 or 4");
    NoteRecord { sequence: index / 16, words: [index, !index, index * 3, index << 7], count }
}

#[test]
fn a_new_process_finds_what_the_former_one_left_until_it_is_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    assert_eq!(*note.found(), NoteContents::Nothing);
    assert_eq!(note.room(), 64);
    assert!(note.recovered(SESSION).is_empty());
    (0..40).for_each(|index| note.append(record(index)));
    note.forget_through(0);
    assert_eq!(note.room(), 64 - 24);
    assert!(note.recovered(SESSION).is_empty(), "these are this process's own");
    drop(note);

    let mut note = open(&path);
    assert_eq!(*note.found(), NoteContents::Records(24));
    let left: Vec<_> = (16..40).map(record).collect();
    assert_eq!(note.recovered(SESSION), left);
    // Recovering does not forget: after a kill during the replay, the records must be found again,
    // with those added behind them.
    note.append(record(40));
    assert_eq!(note.recovered(SESSION), left);
    drop(note);
    let mut note = open(&path);
    assert_eq!(note.recovered(SESSION), (16..41).map(record).collect::<Vec<_>>());
    note.forget_through(u64::MAX);
    assert!(note.recovered(SESSION).is_empty());
    assert_eq!(note.room(), 64);
}

/// Regression: records made void by a failed flush vanished without a report, and the next process
/// found an empty note.
#[test]
fn the_next_process_learns_what_was_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    (0..40).for_each(|index| note.append(record(index)));
    note.forget_through(0);
    let void: Vec<_> = (16..40).map(record).collect();
    assert_eq!((note.given_up(), note.give_up(), note.room()), (Vec::new(), void.clone(), 64));
    assert!(note.give_up().is_empty(), "there is nothing left");
    assert!(note.given_up().is_empty(), "it is the former one's that is told");
    drop(note);

    // Every process that opens the note is told, until one has taken over the set.
    drop(open(&path));
    let mut note = open(&path);
    assert_eq!((note.found().clone(), note.given_up()), (NoteContents::Nothing, void));
    assert!(note.recovered(SESSION).is_empty());
    // A process that has begun no session gives up more.
    note.append(record(40));
    assert_eq!(note.give_up(), [record(40)]);
    drop(note);
    let mut note = open(&path);
    assert_eq!(note.given_up(), (16..41).map(record).collect::<Vec<_>>());
    note.begin(7);
    assert!(note.given_up().is_empty());
    drop(note);
    assert!(open(&path).given_up().is_empty());
}

/// Records of a session that another process has ended were void before a flush failed.
#[test]
fn what_was_void_before_is_not_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    (0..3).for_each(|index| note.append(record(index)));
    drop(note);
    let mut note = open(&path);
    assert!(note.recovered(9).is_empty());
    assert_eq!((note.give_up(), note.room()), (Vec::new(), 64));
    drop(note);
    let mut note = open(&path);
    assert!(note.given_up().is_empty() && note.recovered(9).is_empty());
    note.begin(9);
    note.append(record(3));
    assert_eq!(note.give_up(), [record(3)], "this is of its own");
}

/// Records given up are not reported to another identity, nor if their counters were changed.
#[test]
fn what_was_given_up_is_void_like_records() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    (0..20).for_each(|index| note.append(record(index)));
    note.give_up();
    drop(note);
    let good = std::fs::read(&path).unwrap();
    let stranger = NoteIdentity { boot: [7; 16], set: SET };
    let other = MappedNote::open(&path, &stranger, SMALL).unwrap();
    assert!(other.given_up().is_empty());
    drop(other);
    assert!(open(&path).given_up().is_empty(), "it was wiped, not hidden");
    for offset in 40 * 8..43 * 8 {
        let mut bytes = good.clone();
        bytes[offset] ^= 0x41;
        std::fs::write(&path, &bytes).unwrap();
        assert!(open(&path).given_up().is_empty(), "byte {offset}");
    }
    std::fs::write(&path, &good).unwrap();
    assert_eq!(open(&path).given_up().len(), 20);
}

/// Proves invariant D7.
#[test]
fn a_note_of_another_session_is_void() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    note.append(record(0));
    note.begin(7);
    (1..4).for_each(|index| note.append(record(index)));
    drop(note);

    let mut note = open(&path);
    assert_eq!(note.recovered(7), (1..4).map(record).collect::<Vec<_>>());
    assert!(note.recovered(8).is_empty(), "somebody else has run the set");
    assert!(note.recovered(6).is_empty(), "an older superblock is another history");
    note.begin(8);
    drop(note);
    assert!(open(&path).recovered(8).is_empty());
}

#[test]
fn the_ring_goes_round_and_a_full_one_has_no_room() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    for index in 0..1000 {
        if note.room() == 0 {
            note.forget_through((index - 64) / 16);
        }
        note.append(record(index));
    }
    let full = open_full(note, &path);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| { full }.append(record(0)))).is_err());
}

/// Fills `note` and checks that all of it is found again.
fn open_full(mut note: MappedNote, path: &Path) -> MappedNote {
    let first = 1000 - (64 - note.room() as u64);
    (1000..1000 + note.room() as u64).for_each(|index| note.append(record(index)));
    assert_eq!(note.room(), 0);
    drop(note);
    let mut note = open(path);
    assert_eq!(note.room(), 0);
    assert_eq!(note.recovered(SESSION), (first..first + 64).map(record).collect::<Vec<_>>());
    note
}

#[test]
fn another_boot_or_another_set_finds_nothing_and_wipes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let strangers = [
        (NoteIdentity { boot: [7; 16], set: SET }, NoteContents::OtherBoot),
        (NoteIdentity { boot: here().boot, set: [7; 16] }, NoteContents::OtherSet),
    ];
    for (stranger, expected) in strangers {
        let mut note = open(&path);
        note.append(record(5));
        drop(note);
        let mut other = MappedNote::open(&path, &stranger, SMALL).unwrap();
        assert_eq!(*other.found(), expected);
        assert!(other.recovered(SESSION).is_empty());
        assert_eq!(other.room(), 64);
        drop(other);
        assert!(open(&path).recovered(SESSION).is_empty(), "it was wiped, not hidden");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn one_process_at_a_time_and_only_in_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let note = open(&path);
    assert!(matches!(MappedNote::open(&path, &here(), SMALL), Err(NoteError::InUse(_))));
    drop(note);
    drop(open(&path));
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    assert!(matches!(MappedNote::open(&pipe, &here(), SMALL), Err(NoteError::NotAFile(_))));
    for bytes in [0, 4096, u64::MAX] {
        assert!(matches!(MappedNote::open(&path, &here(), bytes), Err(NoteError::Size(_))));
    }
}

#[test]
fn a_note_of_another_size_keeps_its_records() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    note.append(record(1));
    drop(note);
    let mut note = MappedNote::open(&path, &here(), NOTE_BYTES).unwrap();
    assert_eq!(note.recovered(SESSION), [record(1)]);
    assert_eq!(note.room(), 63, "it has the size it was made with");
    drop(note);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(MappedNote::open(&path, &here(), NOTE_BYTES).unwrap().room(), 65_472);
}

/// Any single changed byte of a note in use is noticed, or does not matter: the recovered records
/// are a prefix of those appended, or (if a counter changed) a part of them, each intact.
#[test]
fn damage_is_noticed_and_never_a_panic() {
    // In memory if possible: this opens a note more than a thousand times.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    (0..20).for_each(|index| note.append(record(index)));
    drop(note);
    let good = std::fs::read(&path).unwrap();
    let records: Vec<_> = (0..20).map(record).collect();
    let mut noticed = 0;
    let interesting = (0..256).chain(4096..4096 + 22 * 64);
    for offset in interesting {
        let mut bytes = good.clone();
        bytes[offset] ^= 0x41;
        std::fs::write(&path, &bytes).unwrap();
        let mut note = open(&path);
        let found = note.recovered(SESSION);
        assert!(
            records.windows(found.len().max(1)).any(|part| part == found) || found.is_empty(),
            "{offset}"
        );
        noticed += usize::from(*note.found() != NoteContents::Records(20));
        drop(note);
    }
    // Everything but unused header bytes and unused slots.
    assert_eq!(noticed, 8 * 8 + 2 * 8 + 20 * 64);
    for length in [0, 1, 100, 4095, 4096, 4097, 5000, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        let mut note = open(&path);
        assert!(note.recovered(SESSION).is_empty(), "cut to {length} bytes");
        assert!(matches!(note.found(), NoteContents::Damaged { usable: 0, .. }), "cut to {length} bytes");
    }
    std::fs::write(&path, vec![0xFF; 20_000]).unwrap();
    assert!(matches!(open(&path).found(), NoteContents::Damaged { usable: 0, .. }));
}

/// Regression: counters too large to count on from. The note appeared empty and stored its first
/// record as number 2^64 - 1; then it had no room forever, or the process stopped.
#[test]
fn counters_that_cannot_be_counted_on_from_are_damage() {
    const COUNTERS: [u64; 2] = [16 * 8, 24 * 8];
    for count in [u64::MAX, u64::MAX - 1, u64::MAX / 2 + 1] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("note");
        drop(open(&path));
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for place in COUNTERS {
            file.write_all_at(&count.to_ne_bytes(), place).unwrap();
        }
        let mut note = open(&path);
        assert!(matches!(note.found(), NoteContents::Damaged { usable: 0, .. }), "{count}: {}", note.found());
        (0..64).for_each(|index| note.append(record(index)));
        note.forget_through(u64::MAX);
        assert_eq!(note.room(), 64);
    }
}

/// Each check covers all notes of this process and reports each change once, so these tests run one
/// at a time.
static LOOKING: Mutex<()> = Mutex::new(());

/// Returns the state of the file of the note at `path`, one of those that this process keeps.
fn look(path: &Path) -> Result<NoteFileState, NoteError> {
    look_after_all().into_iter().find(|(kept, _)| kept == path).expect("it is kept").1
}

/// Makes a note with records, in a folder of its own that may be removed.
fn noted() -> (tempfile::TempDir, std::path::PathBuf, MappedNote) {
    let directory = tempfile::tempdir().expect("a folder");
    let folder = directory.path().join("notes");
    std::fs::create_dir(&folder).expect("a folder in it");
    let mut note = open(&folder.join("note"));
    note.begin(7);
    (0..20).for_each(|index| note.append(record(index)));
    (directory, folder, note)
}

/// Regression: `/run/bcached` was cleaned, and the next process found none of the writes
/// acknowledged since.
#[test]
fn a_note_whose_file_was_removed_is_found_again() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (directory, folder, mut note) = noted();
    let path = folder.join("note");
    assert!(matches!(look(&path), Ok(NoteFileState::Present)));
    // A folder whose files are removed one by one may have been replaced by then.
    std::fs::rename(&folder, directory.path().join("away")).unwrap();
    assert!(look(&path).is_err(), "it has no folder");
    note.append(record(20));
    std::fs::create_dir(&folder).unwrap();
    for _ in 0..2 {
        assert!(matches!(look(&path), Ok(NoteFileState::Replaced)));
    }
    note.append(record(21));
    assert!(matches!(look(&path), Ok(NoteFileState::Present)));
    // Also when nothing is added, and only a journal entry is written.
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(look(&path), Ok(NoteFileState::Replaced)));
    note.forget_through(0);
    assert!(matches!(look(&path), Ok(NoteFileState::Present)));
    // The lock moves to the new file.
    assert!(matches!(MappedNote::open(&path, &here(), SMALL), Err(NoteError::InUse(_))));
    drop(note);
    let mut next = open(&path);
    assert_eq!(next.recovered(7), (16..22).map(record).collect::<Vec<_>>());
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(look(&path), Ok(NoteFileState::Replaced)));
    drop(next);
    // Nothing unfinished is left, once a concurrent check has released it.
    wait_until(|| std::fs::read_dir(&folder).unwrap().count() == 0);
}

/// Regression: until the daemon looked, up to a second later, writes were acknowledged in a file
/// that no process could find.
#[test]
fn a_note_that_goes_is_known_to_be_gone_without_anybody_looking() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (directory, folder, mut note) = noted();
    let path = folder.join("note");
    for moved in [false, true] {
        assert!(note.is_kept());
        if moved {
            std::fs::rename(&path, folder.join("elsewhere")).unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        wait_until(|| !note.is_kept());
        wait_until(|| folder.join("note.new").exists());
        // The first call after the replacement is complete puts it in place.
        wait_until(|| {
            note.forget_through(0);
            note.is_kept()
        });
        assert!(matches!(look(&path), Ok(NoteFileState::WasReplaced)), "it is told once");
        assert!(matches!(look(&path), Ok(NoteFileState::Present)));
    }
    // If its folder is removed, it stays gone until there is a folder again.
    std::fs::rename(&folder, directory.path().join("other")).unwrap();
    wait_until(|| !note.is_kept());
    note.append(record(20));
    assert!(!note.is_kept());
    std::fs::create_dir(&folder).unwrap();
    assert!(matches!(look(&path), Ok(NoteFileState::Replaced)));
    note.append(record(21));
    assert!(note.is_kept());
    // The new folder is watched as the first one was.
    std::fs::rename(&folder, directory.path().join("last")).unwrap();
    wait_until(|| !note.is_kept());
}

/// Proves invariant D51: the next set of this process finds what another process would have found,
/// although the note's file has been removed.
#[test]
fn the_next_set_of_the_process_finds_the_records_of_a_note_whose_file_was_removed() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (_directory, folder, mut note) = noted();
    let path = folder.join("note");
    assert!(note.recovered(7).is_empty(), "they are those of the first set");
    note.forget_through(0);
    std::fs::remove_file(&path).unwrap();
    wait_until(|| !note.is_kept());
    note.reopen();
    assert_eq!(note.fate().are_taken(), None);
    assert_eq!(note.recovered(7), (16..20).map(record).collect::<Vec<_>>());
    assert_eq!(note.fate().are_taken(), Some(true));
    // The second set adds a record and gives all of them up, as its device has lost their data.
    note.append(record(20));
    assert_eq!(note.give_up(), (16..21).map(record).collect::<Vec<_>>());
    assert!(note.given_up().is_empty(), "the second set knows that already");
    note.reopen();
    assert!(note.recovered(7).is_empty());
    assert_eq!(note.given_up(), (16..21).map(record).collect::<Vec<_>>());
    note.begin(8);
    note.reopen();
    assert!(note.given_up().is_empty() && note.recovered(7).is_empty() && note.recovered(8).is_empty());
}

/// The file may have been removed before the callback was set.
#[test]
fn who_asks_late_is_told_that_the_note_is_gone() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let note = open(&path);
    std::fs::remove_file(&path).unwrap();
    wait_until(|| !note.is_kept() && directory.path().join("note.new").exists());
    let (tell, told) = std::sync::mpsc::channel();
    note.tell_when_gone(move || tell.send(()).unwrap());
    told.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    drop(note);
    // A concurrent check may release it last.
    wait_until(|| std::fs::read_dir(directory.path()).unwrap().count() == 0);
}

/// If no replacement can be put in place, the reason is reported for as long as that lasts.
#[test]
fn what_cannot_be_replaced_is_told_of_until_it_is() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let mut note = open(&path);
    note.begin(7);
    note.append(record(0));
    let told = Arc::new(AtomicUsize::new(0));
    let tell = Arc::clone(&told);
    note.tell_when_gone(move || {
        tell.fetch_add(1, Ordering::AcqRel);
    });
    std::fs::rename(&path, directory.path().join("away")).unwrap();
    std::fs::create_dir_all(path.join("inside")).unwrap();
    // Called once because the note is gone, and once for the file that is to replace it.
    wait_until(|| told.load(Ordering::Acquire) >= 2);
    note.keep();
    assert!(!note.is_kept());
    for _ in 0..2 {
        let refused = look(&path).unwrap_err().to_string();
        assert!(refused.contains("cannot replace the note"), "{refused}");
        note.keep();
    }
    std::fs::remove_dir_all(&path).unwrap();
    wait_until(|| {
        let _made_by_whoever_looks_first = look(&path);
        note.keep();
        note.is_kept()
    });
    assert!(matches!(look(&path), Ok(NoteFileState::Present | NoteFileState::WasReplaced)));
    assert!(told.load(Ordering::Acquire) >= 3);
    drop(note);
    assert_eq!(open(&path).recovered(7), [record(0)]);
}

/// An orderly stop leaves no note: a note that we have removed ourselves is not replaced.
#[test]
fn a_note_that_is_removed_at_a_stop_is_not_missed() {
    let _alone = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("note");
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    let mut note = open(&path);
    note.begin(7);
    remove(&path);
    assert_eq!(files(), 0);
    // By the time the kernel reports another removal, its events about this one have arrived.
    let other = MappedNote::open(&directory.path().join("other"), &here(), SMALL).unwrap();
    std::fs::remove_file(directory.path().join("other")).unwrap();
    wait_until(|| !other.is_kept());
    assert!(
        note.is_kept() && look_after_all().iter().all(|(kept, _)| *kept != path),
        "nobody looks after it"
    );
    note.append(record(0));
    drop((note, other));
    // A concurrent check may release it last.
    wait_until(|| files() == 0);
    // A note with an offered replacement leaves that behind no more.
    let note = open(&path);
    std::fs::remove_file(&path).unwrap();
    wait_until(|| directory.path().join("note.new").exists());
    remove(&path);
    assert_eq!(files(), 0);
    drop(note);
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed().as_secs() < 60, "it never was");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
