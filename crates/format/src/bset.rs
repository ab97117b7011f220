//! One set of a B-tree node (bset): a header and keys, appended to the node's log and never changed
//! afterwards.
//!
//! The checksum of a set is seeded with the pointer to the *start of the node*, also for sets
//! further inside it. So a node that was copied to another bucket, or survives in a reused one,
//! fails its check. Several sets make a node; `node_log` reads them.

use crate::checksum::{CHECKSUM_BYTES, Checksum};
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
const VERSION: Field = Field::new(24, 4, "version", "1; 0 is accepted, its sum is not seeded");
const KEYS: Field = Field::new(28, 4, "keys", "words of keys");

/// Layout table of a set.
pub const STRUCTURE: Structure = Structure { name: "B-tree set", fields: &[CSUM, MAGIC, SEQ, VERSION, KEYS] };

/// Bytes of a set before its keys.
pub const BSET_HEADER_BYTES: usize = KEYS.end();

/// Returns the length in bytes of a set with `words` words of keys, without the padding of its last
/// block.
#[must_use]
pub const fn set_bytes(words: usize) -> usize {
    BSET_HEADER_BYTES + words * WORD_BYTES
}

const VERSION_SEEDED: u32 = 1;

/// The node to which a set must belong; checked when the set is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeIdentity {
    /// Magic of the cache set.
    pub magic: SetMagic,
    /// Pointer of the node's own key.
    pub node: Pointer,
}

/// A checked set; its keys borrow from the bytes it was parsed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bset<'a> {
    /// The node's random number.
    pub seq: u64,
    /// 1, or 0 for a set in the old format.
    pub version: u32,
    /// The keys. They are readable, but their meaning has not been checked yet (see `key_check`).
    pub keys: KeyList<'a>,
}

/// Returns the sequence number of a header at the start of `bytes`; `None` if no header fits.
/// Nothing is checked: this is how the end of a node's log is found.
#[must_use]
pub fn seq_at(bytes: &[u8]) -> Option<u64> {
    (bytes.len() >= BSET_HEADER_BYTES).then(|| SEQ.u64(bytes))
}

impl<'a> Bset<'a> {
    /// Parses the set at the start of `bytes`, which extend to the end of the node.
    ///
    /// # Errors
    /// The first check that fails: version, length, magic, checksum, keys. An empty set is not an
    /// error here.
    pub fn parse(bytes: &'a [u8], place: NodeIdentity) -> Result<Self, BsetError> {
        let mut reader = BsetReader::new(bytes, place)?;
        loop {
            if let Some(set) = reader.step(usize::MAX)? {
                return Ok(set);
            }
        }
    }

    /// Returns the length of the set in bytes, without the padding of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        BSET_HEADER_BYTES + self.keys.as_bytes().len()
    }
}

/// Checks a set in pieces, since one set may fill a node of 1 MiB.
#[derive(Clone, Debug)]
pub struct BsetReader<'a> {
    /// The bytes of the set, without what follows.
    bytes: &'a [u8],
    version: u32,
    /// End of the part that is summed.
    end: usize,
    sum: Checksum,
    /// The keys, checked once the sum is known to be right.
    keys: KeyListReader<'a>,
}

impl<'a> BsetReader<'a> {
    /// Starts with the set at the start of `bytes`, which extend to the end of the node, and checks
    /// its header.
    ///
    /// # Errors
    /// Version, length, magic.
    pub fn new(bytes: &'a [u8], place: NodeIdentity) -> Result<Self, BsetError> {
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

    /// Returns the length of the set in bytes, without the padding of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of bytes summed plus the number of bytes checked for keys.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.end + self.keys.found()
    }

    /// Sums up to `bytes` further bytes, or checks the keys in about as many. Returns the set once
    /// it is checked.
    ///
    /// # Errors
    /// Checksum, keys. After an error the reader must not be used any further.
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

/// Returns the start value of a set's sum.
fn start(version: u32, node: Pointer) -> Checksum {
    if version == VERSION_SEEDED { Checksum::seeded(node.word()) } else { Checksum::default() }
}

/// Builds a sealed set with `keys`. The caller pads it to whole blocks.
///
/// # Panics
/// If `seq` is zero (which marks a node without sets), or there are 2^32 words of keys.
#[must_use]
pub fn seal(place: NodeIdentity, seq: u64, keys: &[Key]) -> Vec<u8> {
    let words = keys.iter().map(Key::words).sum();
    let mut set = BsetWriter::new(alloc::vec![0; set_bytes(words)], place, seq, words);
    set.push(keys);
    set.seal()
}

/// Builds a set in pieces.
#[derive(Debug)]
pub struct BsetWriter<M> {
    memory: M,
    /// End of the keys added so far, all of them summed.
    end: usize,
    /// Where the keys will end.
    whole: usize,
    sum: Checksum,
}

impl<M: AsMut<[u8]>> BsetWriter<M> {
    /// Starts a set of `words` words of keys in `memory`. The memory is zeroed and may be longer
    /// than the set, so that it already contains the padding to whole blocks.
    ///
    /// # Panics
    /// As for [`seal`], and if the set does not fit.
    #[must_use]
    pub fn new(mut memory: M, place: NodeIdentity, seq: u64, words: usize) -> Self {
        let whole = set_bytes(words);
        let sum = begin(&mut memory.as_mut()[..whole], place, seq);
        Self { memory, end: BSET_HEADER_BYTES, whole, sum }
    }

    /// Appends the next keys.
    ///
    /// # Panics
    /// If they have more words than were announced.
    pub fn push(&mut self, keys: &[Key]) {
        let begin = self.end;
        let bytes = &mut self.memory.as_mut()[..self.whole];
        for key in keys {
            let words = write_key(&mut bytes[self.end..], key).expect("there is room for the key");
            self.end += words * WORD_BYTES;
        }
        self.sum.add(&bytes[begin..self.end]);
    }

    /// Seals and returns the set.
    ///
    /// # Panics
    /// If keys are missing.
    #[must_use]
    pub fn seal(mut self) -> M {
        assert_eq!(self.end, self.whole, "the set has exactly the keys that were announced");
        CSUM.set_u64(self.memory.as_mut(), self.sum.value());
        self.memory
    }
}

/// Seals the set that fills `bytes` exactly. The keys are already in place after the header, which
/// is filled in.
///
/// # Panics
/// If `bytes` are not a header and whole words, or `seq` is zero.
pub fn seal_in_place(bytes: &mut [u8], place: NodeIdentity, seq: u64) {
    let mut sum = begin(bytes, place, seq);
    sum.add(&bytes[BSET_HEADER_BYTES..]);
    CSUM.set_u64(bytes, sum.value());
}

/// Fills in the header of the set that takes all of `bytes`, except for the checksum. Returns the
/// running sum, which covers the header.
fn begin(bytes: &mut [u8], place: NodeIdentity, seq: u64) -> Checksum {
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
