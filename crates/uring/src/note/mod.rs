//! The note used in production: a small file, mapped shared, that outlives the process.
//!
//! It belongs on an in-memory file system (`/run`). A power cut wipes it, which is right: only
//! flushed writes are promised then. And storing to it never waits for a disk. The boot id voids it
//! after a reboot wherever it lies, the set's UUID ties it to its set, and a lock keeps a second
//! daemon out.
//!
//! ```text
//! page 0    magic, layout, boot id, set UUID, capacity, check | appended | forgotten | session
//!           | given up from, to, check
//! page 1..  ring of records, 8 words each: number + 1, sequence, 4 key words, count, check
//! ```
//!
//! Records are numbered from 0; number N lies in slot N modulo capacity. `forgotten..appended` are
//! live. Records that were given up count as forgotten, too, but stay in their slots until the next
//! session begins: nothing is added to the note of a failed set.
//!
//! **A kill at any instruction leaves a consistent prefix**: a record is stored whole before
//! `appended` counts it (release), and `forgotten` has passed a slot before it is reused (fence).
//! What a killed process has stored is in the page cache, in program order, so the ordering only
//! has to bind the compiler and readers on other processors. Each record also carries its number
//! and a check over all of it: damage is noticed, and the records before it are used.

mod look;
mod mapping;
mod missing;

use crate::ioctl::{LockMode, LockRange};
use bcached_env::{Note, NoteRecord};
pub use look::{may_hold_anything, may_hold_records};
use mapping::Mapping;
pub use missing::{NoteFileState, look_after_all, remove};
use missing::{Replacement, WatchedNote};
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use thiserror::Error;

/// "bcchNOTE", read as a little-endian word.
const MAGIC: u64 = u64::from_le_bytes(*b"bcchNOTE");
/// Incremented when the layout changes; a note of another layout is void.
const LAYOUT: u64 = 3;

/// Words before the first record: one page, so records never share a page with the counters.
const HEADER_WORDS: usize = 512;
const RECORD_WORDS: usize = 8;
/// Fixed words of the header, which its check covers.
const FIXED_WORDS: usize = 7;
/// The counters have their own cache lines.
const APPENDED: usize = 16;
const FORGOTTEN: usize = 24;
/// The session of these records: if damaged, it matches no superblock, and the note is void.
const SESSION: usize = 32;
const _: () = assert!(FIXED_WORDS < APPENDED && APPENDED < FORGOTTEN);
/// Numbers of the first and past the last record given up, and a check over both. All zeroes fail
/// the check and mean that there are none.
const GIVEN_UP: usize = 40;
const _: () = assert!(FORGOTTEN < SESSION && SESSION < GIVEN_UP && GIVEN_UP + 2 < HEADER_WORDS);

const WORD: u64 = 8;
const HEADER_BYTES: u64 = HEADER_WORDS as u64 * WORD;
const RECORD_BYTES: u64 = RECORD_WORDS as u64 * WORD;

/// The usual size of a note in bytes: 65,472 records, some journal entries' worth of the smallest
/// keys.
pub const NOTE_BYTES: u64 = 4 << 20;
/// More records than any note has seen. The counter has no check; from a larger one, counting on
/// would soon overflow.
const APPENDED_MAX: u64 = u64::MAX / 2;
/// The largest note that is created or opened: all of it is mapped and held in memory.
pub const NOTE_BYTES_MAX: u64 = 1 << 30;
/// Where the kernel reports the id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What a note is for; it is void for anything else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoteIdentity {
    /// The boot that the machine is in: [`NoteIdentity::of_this_boot`].
    pub boot: [u8; 16],
    /// The cache set's UUID.
    pub set: [u8; 16],
}

/// What was found when a note was opened. `Display` is a line for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoteContents {
    /// No note, or an empty one.
    Nothing,
    /// Records of a former process in this boot, to be replayed.
    Records(usize),
    /// A note from before the last boot: void.
    OtherBoot,
    /// A note of another set: void.
    OtherSet,
    /// The note is damaged.
    Damaged {
        /// What is wrong with it.
        what: &'static str,
        /// Records before the damage, which are used.
        usable: usize,
    },
}

impl fmt::Display for NoteContents {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => formatter.write_str("the note is empty"),
            Self::Records(count) => {
                let keys = if *count == 1 { "key" } else { "keys" };
                write!(formatter, "the note holds {count} {keys} left by an earlier process")
            }
            Self::OtherBoot => formatter.write_str("the note is void: it is from before the last boot"),
            Self::OtherSet => formatter.write_str("the note is void: it belongs to another cache set"),
            Self::Damaged { what, usable } => {
                let keys = if *usable == 1 { "key is" } else { "keys are" };
                write!(
                    formatter,
                    "the note is damaged ({what}): {usable} {keys} usable; writes acknowledged after them \
                     may be lost"
                )
            }
        }
    }
}

/// The fate of the records that a former process left, for a caller that has given the note away.
#[derive(Clone, Default, Debug)]
pub struct NoteReplay(Arc<OnceLock<bool>>);

impl NoteReplay {
    /// Returns true if the records were taken for the set's current session, false if they belong
    /// to another session and are void. `None`: they have not been requested yet.
    #[must_use]
    pub fn are_taken(&self) -> Option<bool> {
        self.0.get().copied()
    }
}

/// Why a note could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NoteError {
    /// Another process, or this one, has it open.
    #[error("the note {} is in use: another daemon serves this cache set", .0.display())]
    InUse(PathBuf),
    /// Not a regular file.
    #[error("the note {} is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// A size that holds no record, or exceeds [`NOTE_BYTES_MAX`].
    #[error(
        "a note cannot have {0} bytes: it can have {least} bytes to 1 GiB",
        least = HEADER_BYTES + RECORD_BYTES
    )]
    Size(u64),
    /// The kernel does not report the boot id.
    #[error("cannot read the boot id, which every note needs, from {BOOT_ID}: {0}")]
    BootId(#[source] std::io::Error),
    /// The system refused.
    #[error("cannot {doing} the note {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// How it failed.
        source: std::io::Error,
    },
}

impl NoteIdentity {
    /// Returns the identity of `set`'s note in this boot.
    ///
    /// # Errors
    /// If the kernel does not report the boot id.
    pub fn of_this_boot(set: [u8; 16]) -> Result<Self, NoteError> {
        let text = std::fs::read_to_string(BOOT_ID).map_err(NoteError::BootId)?;
        let unclear = || NoteError::BootId(std::io::ErrorKind::InvalidData.into());
        let boot = parse_uuid(&text).ok_or_else(unclear)?;
        Ok(Self { boot, set })
    }
}

/// The error for an operation that the system refused on the note at `path`.
fn io_error(path: &Path, doing: &'static str) -> impl Fn(Errno) -> NoteError {
    move |errno| NoteError::Io { path: path.to_owned(), doing, source: errno.into() }
}

/// Parses 32 hexadecimal digits; dashes between them are ignored.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

/// A note in a mapped file; see the module documentation.
#[derive(Debug)]
pub struct MappedNote {
    mapping: Mapping,
    /// Holds the lock.
    _file: File,
    /// Its file, as the code that looks after notes sees it.
    watched: Arc<WatchedNote>,
    /// Records the file has room for.
    capacity: u64,
    /// Enters the records' checks, so that another note's records are never taken for ours.
    salt: u64,
    appended: u64,
    forgotten: u64,
    /// Records with lower numbers were left by a former process.
    left_until: u64,
    /// Numbers of the records that a former process has given up.
    left_given_up: Range<u64>,
    found: NoteContents,
    fate: NoteReplay,
}

impl MappedNote {
    /// Opens the note at `path` for `identity`, or creates one of `bytes` ([`NOTE_BYTES`]). Records
    /// that a former process left in this boot stay until they are forgotten; anything else is
    /// wiped. All space is reserved here, so that no later store can fail.
    ///
    /// # Errors
    /// See [`NoteError`]. A damaged note is not an error: see [`MappedNote::found`].
    pub fn open(path: &Path, identity: &NoteIdentity, bytes: u64) -> Result<Self, NoteError> {
        if !(HEADER_BYTES + RECORD_BYTES..=NOTE_BYTES_MAX).contains(&bytes) {
            return Err(NoteError::Size(bytes));
        }
        let io = |doing| io_error(path, doing);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let open = |flags| rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR);
        let (opened, is_new) = match open(flags | OFlags::EXCL) {
            Err(Errno::EXIST) => (open(flags), false),
            made => (made, true),
        };
        let file: File = opened.map_err(io("open"))?.into();
        let stat = rustix::fs::fstat(&file).map_err(io("stat"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(NoteError::NotAFile(path.to_owned()));
        }
        crate::ioctl::lock(&file, LockMode::Exclusive, LockRange::All).map_err(|errno| match errno {
            Errno::AGAIN | Errno::ACCESS => NoteError::InUse(path.to_owned()),
            errno => io("lock")(errno),
        })?;
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        let header = look::header(&file).map_err(io("read"))?;
        let usual = (bytes - HEADER_BYTES) / RECORD_BYTES;
        let (capacity, found) = match inspect(&header, length, identity) {
            Ok(capacity) => (capacity, NoteContents::Nothing),
            // A note that was created has a length.
            Err(_) if length == 0 && !is_new => {
                (usual, NoteContents::Damaged { what: "it was truncated to 0 bytes", usable: 0 })
            }
            Err(found) => (usual, found),
        };
        let whole = HEADER_BYTES + capacity * RECORD_BYTES;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, whole).map_err(|errno| {
            if is_new {
                // A process that opens it now cannot lock it.
                let _left_empty = rustix::fs::unlink(path);
            }
            io("reserve space for")(errno)
        })?;
        let words = usize::try_from(whole / WORD).expect("a note is at most 1 GiB");
        let mapping = Mapping::new(&file, words).map_err(|source| NoteError::Io {
            path: path.to_owned(),
            doing: "map",
            source,
        })?;
        let watched = WatchedNote::of(path, &file, whole);
        Ok(Self::new(mapping, (file, watched), capacity, identity, found))
    }

    fn new(
        mapping: Mapping,
        (file, watched): (File, Arc<WatchedNote>),
        capacity: u64,
        identity: &NoteIdentity,
        found: NoteContents,
    ) -> Self {
        let salt = mix(words_of(identity).iter().copied());
        let mut note = Self {
            mapping,
            _file: file,
            watched,
            capacity,
            salt,
            appended: 0,
            forgotten: 0,
            left_until: 0,
            left_given_up: 0..0,
            found,
            fate: NoteReplay::default(),
        };
        if note.mapping.words()[0].load(Ordering::Relaxed) == MAGIC && note.found == NoteContents::Nothing {
            note.take_over();
        } else {
            note.wipe(identity);
        }
        note
    }

    /// Returns what was found when the note was opened.
    #[must_use]
    pub const fn found(&self) -> &NoteContents {
        &self.found
    }

    /// Sets `tell`, which is called when the file was removed, and again when another file has been
    /// made: [`Note::keep`] puts that in place. Any thread may call it; it must not block.
    pub fn tell_when_gone(&self, tell: impl Fn() + Send + Sync + 'static) {
        self.watched.tells(tell);
    }

    /// Returns a handle to the fate of the records left by a former process.
    #[must_use]
    pub fn fate(&self) -> NoteReplay {
        self.fate.clone()
    }

    /// Takes over the records that a former process left, as far as they are intact.
    fn take_over(&mut self) {
        let words = self.mapping.words();
        let appended = words[APPENDED].load(Ordering::Acquire);
        let forgotten = words[FORGOTTEN].load(Ordering::Relaxed);
        let is_possible = appended.checked_sub(forgotten).is_some_and(|alive| alive <= self.capacity);
        if !is_possible || appended > APPENDED_MAX {
            self.found = NoteContents::Damaged { what: "its counters are invalid", usable: 0 };
            self.publish(0, 0);
            return;
        }
        let whole = (forgotten..appended).take_while(|number| self.record(*number).is_some()).count();
        let end = forgotten + whole as u64;
        self.found = if end < appended {
            NoteContents::Damaged { what: "a record is invalid", usable: whole }
        } else if whole == 0 {
            NoteContents::Nothing
        } else {
            NoteContents::Records(whole)
        };
        self.left_until = end;
        self.publish(end, forgotten);
        self.left_given_up = self.stored_given_up();
    }

    /// Returns the numbers of the records given up, as far as they are plausible. After a kill
    /// before a record was forgotten, it is live and was not given up.
    fn stored_given_up(&self) -> Range<u64> {
        let [from, to, check] =
            [0, 1, 2].map(|index| self.mapping.words()[GIVEN_UP + index].load(Ordering::Relaxed));
        let is_whole = check == mix([self.salt, from, to]);
        let to = to.min(self.forgotten);
        if is_whole && from <= to && to - from <= self.capacity { from..to } else { 0..0 }
    }

    fn store_given_up(&self, [from, to, check]: [u64; 3]) {
        let words = &self.mapping.words()[GIVEN_UP..];
        words[0].store(from, Ordering::Relaxed);
        words[1].store(to, Ordering::Relaxed);
        words[2].store(check, Ordering::Relaxed);
        // Before the records are forgotten.
        fence(Ordering::SeqCst);
    }

    /// Makes it an empty note of this identity. A kill on the way leaves no magic, so the next open
    /// wipes it again.
    fn wipe(&mut self, identity: &NoteIdentity) {
        // The counters come first: without the magic they would mean that something was
        // overwritten.
        self.publish(0, 0);
        self.store_given_up([0; 3]);
        let words = self.mapping.words();
        words[SESSION].store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        words[0].store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let fixed = fixed_words(identity, self.capacity);
        for (word, value) in words.iter().zip(fixed).skip(1) {
            word.store(value, Ordering::Relaxed);
        }
        words[FIXED_WORDS].store(mix(fixed), Ordering::Relaxed);
        words[0].store(MAGIC, Ordering::Release);
    }

    /// If the file is gone and a replacement exists, copies everything there and continues in it.
    fn stay_findable(&mut self) {
        let from = self.mapping.words();
        let moved = self.watched.replacement(|to| {
            let to = to.words();
            for (to, from) in to.iter().zip(from).skip(1) {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            to[0].store(from[0].load(Ordering::Relaxed), Ordering::Release);
        });
        if let Some(Replacement { mapping, file }) = moved {
            (self.mapping, self._file) = (mapping, file);
        }
    }

    /// Stores both counters.
    fn publish(&mut self, appended: u64, forgotten: u64) {
        (self.appended, self.forgotten) = (appended, forgotten);
        let words = self.mapping.words();
        words[FORGOTTEN].store(forgotten, Ordering::Relaxed);
        words[APPENDED].store(appended, Ordering::Release);
        // A slot behind `forgotten` may be reused only after its being behind is visible to all.
        fence(Ordering::SeqCst);
    }

    /// The words in the slot of record `number`.
    fn place(&self, number: u64) -> &[AtomicU64] {
        let index = usize::try_from(number % self.capacity).expect("an index below the capacity");
        let start = HEADER_WORDS + index * RECORD_WORDS;
        &self.mapping.words()[start..start + RECORD_WORDS]
    }

    /// Returns those of these records that are intact.
    fn records(&self, numbers: Range<u64>) -> impl Iterator<Item = NoteRecord> + '_ {
        numbers.filter_map(|number| self.record(number))
    }

    /// Returns record `number` if it is intact.
    fn record(&self, number: u64) -> Option<NoteRecord> {
        let mut stored = [0; RECORD_WORDS];
        for (value, word) in stored.iter_mut().zip(self.place(number)) {
            *value = word.load(Ordering::Relaxed);
        }
        let [tag, sequence, first, second, third, fourth, count, check] = stored;
        let expected = mix([self.salt].into_iter().chain(stored[..RECORD_WORDS - 1].iter().copied()));
        let count = u8::try_from(count).ok().filter(|count| (2..=4).contains(count))?;
        let is_whole = check == expected && tag == number.wrapping_add(1);
        is_whole.then_some(NoteRecord { sequence, words: [first, second, third, fourth], count })
    }
}

impl Drop for MappedNote {
    /// A check of all notes that is in progress makes no replacement for a note that is no longer
    /// stored to.
    fn drop(&mut self) {
        self.watched.ends();
    }
}

impl Note for MappedNote {
    fn room(&self) -> usize {
        usize::try_from(self.capacity - (self.appended - self.forgotten)).expect("at most 2^24 records")
    }

    fn is_kept(&self) -> bool {
        self.watched.is_there()
    }

    fn keep(&mut self) {
        self.stay_findable();
    }

    fn append(&mut self, record: NoteRecord) {
        assert!(self.room() > 0, "the caller has checked `room`");
        assert!((2..=4).contains(&record.count), "a key has two to four words");
        self.stay_findable();
        let [first, second, third, fourth] = record.words;
        let number = self.appended;
        let body =
            [number.wrapping_add(1), record.sequence, first, second, third, fourth, u64::from(record.count)];
        let check = mix([self.salt].into_iter().chain(body));
        for (word, value) in self.place(number).iter().zip(body.into_iter().chain([check])) {
            word.store(value, Ordering::Relaxed);
        }
        self.appended = number + 1;
        self.mapping.words()[APPENDED].store(self.appended, Ordering::Release);
    }

    fn forget_through(&mut self, sequence: u64) {
        self.stay_findable();
        let is_void = |number: &u64| self.place(*number)[1].load(Ordering::Relaxed) <= sequence;
        let count = (self.forgotten..self.appended).take_while(is_void).count() as u64;
        if count > 0 {
            self.publish(self.appended, self.forgotten + count);
        }
    }

    fn give_up(&mut self) -> Vec<NoteRecord> {
        // Those of another session were void before.
        let are_void = self.fate.are_taken() == Some(false);
        let (from, to) = (self.forgotten.max(if are_void { self.left_until } else { 0 }), self.appended);
        let records: Vec<_> = self.records(from..to).collect();
        if from < to {
            // Records that were given up earlier without being reported stay given up.
            let before = self.stored_given_up();
            let from = if before.end == from { before.start } else { from };
            self.store_given_up([from, to, mix([self.salt, from, to])]);
        }
        self.publish(to, to);
        records
    }

    fn given_up(&self) -> Vec<NoteRecord> {
        self.records(self.left_given_up.clone()).collect()
    }

    fn recovered(&mut self, session: u64) -> Vec<NoteRecord> {
        let is_its = self.mapping.words()[SESSION].load(Ordering::Acquire) == session;
        let _the_first_answer_holds = self.fate.0.set(is_its);
        // The records of any other session are void: invariant D7.
        if !is_its {
            return Vec::new();
        }
        self.records(self.forgotten..self.left_until).collect()
    }

    /// A kill between the stores leaves an empty note of the former session.
    fn begin(&mut self, session: u64) {
        self.publish(self.appended, self.appended);
        self.store_given_up([0; 3]);
        self.left_given_up = 0..0;
        self.mapping.words()[SESSION].store(session, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn reopen(&mut self) {
        // As in another process, damage ends what is used.
        let whole = (self.forgotten..self.appended).take_while(|number| self.record(*number).is_some());
        self.left_until = self.forgotten + whole.count() as u64;
        self.left_given_up = self.stored_given_up();
        self.fate = NoteReplay::default();
    }
}

/// Reads `N` words of the file from word `first` on; zeroes where it is shorter.
fn read_words<const N: usize>(file: &File, first: usize) -> Result<[u64; N], Errno> {
    let mut bytes = vec![0; N * size_of::<u64>()];
    let at = first as u64 * WORD;
    // No process truncates a note in use. A short read leaves zeroes, which are not a header.
    let _ = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut bytes[..], at))?;
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(chunk.try_into().expect("a chunk has eight bytes"));
    }
    Ok(words)
}

/// Returns the capacity of a note that is ours to take over, or what it is instead.
fn inspect(header: &[u64; HEADER_WORDS], length: u64, identity: &NoteIdentity) -> Result<u64, NoteContents> {
    let damaged = |what| NoteContents::Damaged { what, usable: 0 };
    if header[0] == 0 && header[APPENDED..].iter().all(|word| *word == 0) {
        // Fresh, or killed while it was created: nothing has been counted in it.
        return Err(NoteContents::Nothing);
    }
    if header[0] != MAGIC || header[FIXED_WORDS] != mix(header[..FIXED_WORDS].iter().copied()) {
        return Err(damaged("it has no valid header"));
    }
    if header[1] != LAYOUT {
        return Err(damaged("its layout has another version"));
    }
    let [boot, boot_rest, set, set_rest] = words_of(identity);
    if [header[2], header[3]] != [boot, boot_rest] {
        return Err(NoteContents::OtherBoot);
    }
    if [header[4], header[5]] != [set, set_rest] {
        return Err(NoteContents::OtherSet);
    }
    let capacity = header[6];
    let needed = capacity.checked_mul(RECORD_BYTES).and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    match needed {
        Some(needed) if capacity > 0 && needed <= length.min(NOTE_BYTES_MAX) => Ok(capacity),
        _ => Err(damaged("it is shorter than its header says")),
    }
}

fn fixed_words(identity: &NoteIdentity, capacity: u64) -> [u64; FIXED_WORDS] {
    let [boot, boot_rest, set, set_rest] = words_of(identity);
    [MAGIC, LAYOUT, boot, boot_rest, set, set_rest, capacity]
}

fn words_of(identity: &NoteIdentity) -> [u64; 4] {
    let halves = |id: [u8; 16]| {
        let whole = u128::from_le_bytes(id);
        [whole, whole >> 64].map(|half| u64::try_from(half & u128::from(u64::MAX)).expect("masked"))
    };
    let ([boot, boot_rest], [set, set_rest]) = (halves(identity.boot), halves(identity.set));
    [boot, boot_rest, set, set_rest]
}

/// A checksum over words: detects damage, not malice. Each word goes through a bijection of 64 bits
/// (the finaliser of `SplitMix64`), so changing any single word changes the result.
fn mix(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0x9E37_79B9_7F4A_7C15, |state: u64, word| {
        let mut mixed = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    })
}
