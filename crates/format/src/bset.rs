//! One set of a B-tree node: a header and keys, appended to the node's log and never changed afterwards.
//!
//! The sum of a set is seeded with the pointer to the *start of the node*, also for sets further inside it, so a node
//! cannot be copied to another bucket, or survive in a reused one, without failing its check. Several sets make a
//! node; `node_log` reads them.

use crate::checksum::{CHECKSUM_BYTES, checksum, checksum_seeded};
use crate::error::BsetError;
use crate::identity::SetMagic;
use crate::key::{Key, Pointer};
use crate::key_list::{KeyList, keys_to_bytes};
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
        let (wanted, found) = (sum(bytes, version, place.node), CSUM.u64(bytes));
        if wanted != found {
            return Err(BsetError::BadChecksum { wanted, found });
        }
        let keys = KeyList::parse(&bytes[BSET_HEADER_BYTES..])?;
        Ok(Self { seq: SEQ.u64(bytes), version, keys })
    }

    /// Bytes of the set, without the rest of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        BSET_HEADER_BYTES + self.keys.as_bytes().len()
    }
}

fn sum(bytes: &[u8], version: u32, node: Pointer) -> u64 {
    let summed = &bytes[CHECKSUM_BYTES..];
    if version == VERSION_SEEDED { checksum_seeded(node.word(), summed) } else { checksum(summed) }
}

/// A set with `keys`, sealed. The caller pads it to whole blocks.
///
/// # Panics
/// If `seq` is zero (a node without sets looks like that), or there are 2^32 words of keys.
#[must_use]
pub fn seal(place: BsetPlace, seq: u64, keys: &[Key]) -> Vec<u8> {
    let keys = keys_to_bytes(keys);
    let mut bytes = alloc::vec![0; BSET_HEADER_BYTES];
    bytes.extend_from_slice(&keys);
    seal_in_place(&mut bytes, place, seq);
    bytes
}

/// Seals the set that `bytes` hold exactly: the keys stand behind the room for the header, which is filled in.
///
/// # Panics
/// If `bytes` are not a header and whole words, or `seq` is zero.
pub fn seal_in_place(bytes: &mut [u8], place: BsetPlace, seq: u64) {
    assert!(seq != 0, "a node's sequence number is never zero");
    let keys = bytes.len().checked_sub(BSET_HEADER_BYTES).expect("room for the header");
    assert!(keys.is_multiple_of(WORD_BYTES), "keys are whole words");
    MAGIC.set_u64(bytes, place.magic.bset());
    SEQ.set_u64(bytes, seq);
    VERSION.set_u32(bytes, VERSION_SEEDED);
    KEYS.set_u32(bytes, u32::try_from(keys / WORD_BYTES).expect("a set is smaller than 32 GiB"));
    let sum = sum(bytes, VERSION_SEEDED, place.node);
    CSUM.set_u64(bytes, sum);
}
