//! One set of a B-tree node: a header and keys, appended to the node's log and never changed afterwards.
//!
//! The sum of a set is seeded with the pointer to the *start of the node*, also for sets further inside it, so a node
//! cannot be copied to another bucket, or survive in a reused one, without failing its check. Several sets make a
//! node; `node_log` reads them.

use crate::checksum::{CHECKSUM_BYTES, Sum};
use crate::error::BsetError;
use crate::identity::SetMagic;
use crate::key::{Key, Pointer};
use crate::key_list::{KeyList, KeyListReader, write_key};
use crate::layout::{Field, Structure};
use crate::units::WORD_BYTES;
use alloc::vec::Vec;

const CSUM: Field = Field::new(0, 8, "csum", "sum of bytes 8 .. 32 + 8 keys, seeded with the node's pointer");
const MAGIC: Field = Field::new(8, 8, "magic", "0x90135C78B99E07F5 xor set magic");
const SEQ: Field = Field::new(16, 8, "seq", "random, not zero; the same in all sets of a node");
const VERSION: Field = Field::new(24, 4, "version", "1; 0 is read, its sum is not seeded");
const KEYS: Field = Field::new(28, 4, "keys", "words of keys");

/// The table of a set.
pub const STRUCTURE: Structure = Structure { name: "B-tree set", fields: &[CSUM, MAGIC, SEQ, VERSION, KEYS] };

/// Bytes of a set before its keys.
pub const BSET_HEADER_BYTES: usize = KEYS.end();

/// Bytes of a set with so many words of keys, without the rest of its last block.
#[must_use]
pub const fn set_bytes(words: usize) -> usize {
    BSET_HEADER_BYTES + words * WORD_BYTES
}

const VERSION_SEEDED: u32 = 1;

/// What a set is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BsetPlace {
    /// Magic of the cache set.
    pub magic: SetMagic,
    /// Pointer of the node's own key.
    pub node: Pointer,
}

/// A checked set; its keys lie in the bytes it was parsed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bset<'a> {
    /// The node's random number.
    pub seq: u64,
    /// 1, or 0 for an old set.
    pub version: u32,
    /// The keys, readable but not yet judged (see `key_check`).
    pub keys: KeyList<'a>,
}

/// Sequence number that the header at the start of `bytes` would have; `None` if no header fits. Nothing is checked:
/// this is how the end of a node's log is found.
#[must_use]
pub fn seq_at(bytes: &[u8]) -> Option<u64> {
    (bytes.len() >= BSET_HEADER_BYTES).then(|| SEQ.u64(bytes))
}

impl<'a> Bset<'a> {
    /// The set at the start of `bytes`, which reach to the end of the node.
    ///
    /// # Errors
    /// The first check that fails: version, length, magic, checksum, keys. An empty set is not an error here.
    pub fn parse(bytes: &'a [u8], place: BsetPlace) -> Result<Self, BsetError> {
        let mut reader = BsetReader::new(bytes, place)?;
        loop {
            if let Some(set) = reader.step(usize::MAX)? {
                return Ok(set);
            }
        }
    }

    /// Bytes of the set, without the rest of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        BSET_HEADER_BYTES + self.keys.as_bytes().len()
    }
}

/// Checks a set in pieces: one may fill a node of a MiB.
#[derive(Clone, Debug)]
pub struct BsetReader<'a> {
    /// The set and no more.
    bytes: &'a [u8],
    version: u32,
    /// Up to here it is summed.
    end: usize,
    sum: Sum,
    /// What comes when the sum is right.
    keys: KeyListReader<'a>,
}

impl<'a> BsetReader<'a> {
    /// The set at the start of `bytes`, which reach to the end of the node; its header is checked.
    ///
    /// # Errors
    /// Version, length, magic.
    pub fn new(bytes: &'a [u8], place: BsetPlace) -> Result<Self, BsetError> {
        let header = BSET_HEADER_BYTES as u64;
        if (bytes.len() as u64) < header {
            return Err(BsetError::BeyondNode { wanted: header, found: bytes.len() });
        }
        let version = VERSION.u32(bytes);
        if version > VERSION_SEEDED {
            return Err(BsetError::UnsupportedVersion { found: version });
        }
        let wanted = header + u64::from(KEYS.u32(bytes)) * WORD_BYTES as u64;
        let fits = usize::try_from(wanted).ok().and_then(|length| bytes.get(..length));
        let bytes = fits.ok_or(BsetError::BeyondNode { wanted, found: bytes.len() })?;
        let (wanted, found) = (place.magic.bset(), MAGIC.u64(bytes));
        if wanted != found {
            return Err(BsetError::BadMagic { wanted, found });
        }
        let keys = KeyListReader::new(&bytes[BSET_HEADER_BYTES..]);
        Ok(Self { bytes, version, end: CHECKSUM_BYTES, sum: start(version, place.node), keys })
    }

    /// Bytes of the set, without the rest of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes that have been summed, and those that have been looked through for keys.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.end + self.keys.found()
    }

    /// Goes on by the sum of so many bytes, or by the keys in about so many; the set, when it is checked.
    ///
    /// # Errors
    /// Checksum, keys. There is nothing to go on with afterwards.
    pub fn step(&mut self, bytes: usize) -> Result<Option<Bset<'a>>, BsetError> {
        if self.end == self.bytes.len() {
            let (seq, version) = (SEQ.u64(self.bytes), self.version);
            return Ok(self.keys.step(bytes / KEY_BYTES)?.map(|keys| Bset { seq, version, keys }));
        }
        let begin = self.end;
        self.end = begin.saturating_add(bytes.max(1)).min(self.bytes.len());
        self.sum.add(&self.bytes[begin..self.end]);
        let (wanted, found) = (self.sum.value(), CSUM.u64(self.bytes));
        if self.end == self.bytes.len() && wanted != found {
            return Err(BsetError::BadChecksum { wanted, found });
        }
        Ok(None)
    }
}

/// Bytes of a usual key.
const KEY_BYTES: usize = 3 * WORD_BYTES;

/// What the sum of a set begins with.
fn start(version: u32, node: Pointer) -> Sum {
    if version == VERSION_SEEDED { Sum::seeded(node.word()) } else { Sum::default() }
}

/// A set with `keys`, sealed. The caller pads it to whole blocks.
///
/// # Panics
/// If `seq` is zero (a node without sets looks like that), or there are 2^32 words of keys.
#[must_use]
pub fn seal(place: BsetPlace, seq: u64, keys: &[Key]) -> Vec<u8> {
    let words = keys.iter().map(Key::words).sum();
    let mut set = BsetWriter::new(alloc::vec![0; set_bytes(words)], place, seq, words);
    set.push(keys);
    set.seal()
}

/// A set that is made in pieces.
#[derive(Debug)]
pub struct BsetWriter<M> {
    memory: M,
    /// Up to here there are keys, and all is summed.
    end: usize,
    /// Where the keys will end.
    whole: usize,
    sum: Sum,
}

impl<M: AsMut<[u8]>> BsetWriter<M> {
    /// A set that will hold `words` words of keys, in `memory`, which is zero and may be longer: what pads the set to whole blocks stands there
    /// already.
    ///
    /// # Panics
    /// As [`seal`], and if the set does not fit in there.
    #[must_use]
    pub fn new(mut memory: M, place: BsetPlace, seq: u64, words: usize) -> Self {
        let whole = set_bytes(words);
        let sum = begin(&mut memory.as_mut()[..whole], place, seq);
        Self { memory, end: BSET_HEADER_BYTES, whole, sum }
    }

    /// The keys that come next.
    ///
    /// # Panics
    /// If they have more words than were told.
    pub fn push(&mut self, keys: &[Key]) {
        let begin = self.end;
        let bytes = &mut self.memory.as_mut()[..self.whole];
        for key in keys {
            let words = write_key(&mut bytes[self.end..], key).expect("the room was counted");
            self.end += words * WORD_BYTES;
        }
        self.sum.add(&bytes[begin..self.end]);
    }

    /// The sealed set.
    ///
    /// # Panics
    /// If keys are missing.
    #[must_use]
    pub fn seal(mut self) -> M {
        assert_eq!(self.end, self.whole, "all keys that were counted are in the set");
        CSUM.set_u64(self.memory.as_mut(), self.sum.value());
        self.memory
    }
}

/// Seals the set that `bytes` hold exactly: the keys stand behind the room for the header, which is filled in.
///
/// # Panics
/// If `bytes` are not a header and whole words, or `seq` is zero.
pub fn seal_in_place(bytes: &mut [u8], place: BsetPlace, seq: u64) {
    let mut sum = begin(bytes, place, seq);
    sum.add(&bytes[BSET_HEADER_BYTES..]);
    CSUM.set_u64(bytes, sum.value());
}

/// Fills in the header of the set that takes all of `bytes`, but for the sum, which begins with it.
fn begin(bytes: &mut [u8], place: BsetPlace, seq: u64) -> Sum {
    assert!(seq != 0, "a node's sequence number is never zero");
    let keys = bytes.len().checked_sub(BSET_HEADER_BYTES).expect("room for the header");
    assert!(keys.is_multiple_of(WORD_BYTES), "keys are whole words");
    MAGIC.set_u64(bytes, place.magic.bset());
    SEQ.set_u64(bytes, seq);
    VERSION.set_u32(bytes, VERSION_SEEDED);
    KEYS.set_u32(bytes, u32::try_from(keys / WORD_BYTES).expect("a set is smaller than 32 GiB"));
    let mut sum = start(VERSION_SEEDED, place.node);
    sum.add(&bytes[CHECKSUM_BYTES..BSET_HEADER_BYTES]);
    sum
}
