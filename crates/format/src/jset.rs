//! The journal entry (jset): keys that were inserted into leaves, and the locations of the tree,
//! the uuid table and the priorities.
//!
//! Entries start at block boundaries of the journal buckets, each directly after the one before. A
//! torn entry counts as absent: whatever follows it in its bucket belongs to an older lap. Each
//! entry names the *current* root, uuid table and priority chain; only those of the newest valid
//! entry count.

use crate::checksum::{CHECKSUM_BYTES, checksum};
use crate::error::{JsetError, KeyError, KeyListError};
use crate::identity::SetMagic;
use crate::key::Key;
use crate::key_list::{KeyList, parse_key, write_key};
use crate::layout::{Field, Structure};
use crate::units::WORD_BYTES;
use alloc::vec::Vec;

const CSUM: Field = Field::new(0, 8, "csum", "standard checksum of bytes 8 .. 240 + 8 keys");
const MAGIC: Field = Field::new(8, 8, "magic", "0x245235C1A3625032 xor set magic");
const SEQ: Field = Field::new(16, 8, "seq", "from 1, one more at each entry");
const VERSION: Field = Field::new(24, 4, "version", "1; 0: the uuid table has slots of 64 bytes");
const KEYS: Field = Field::new(28, 4, "keys", "words of keys");
const LAST_SEQ: Field = Field::new(32, 8, "last_seq", "oldest entry still needed");
const UUIDS: Field = Field::new(40, 64, "uuid_bucket", "key of the uuid table, rest junk");
const ROOT: Field = Field::new(104, 64, "btree_root", "key of the root node, rest junk");
const LEVEL: Field = Field::new(168, 2, "btree_level", "level of the root, 0: a leaf");
const JUNK: Field = Field::new(170, 6, "pad", "junk");
const PRIOS: Field =
    Field::new(176, 32, "prio_bucket", "u64 first priority bucket; a slot for each of 4 devices, one used");
const TABLE_MARK: Field = Field::new(
    208,
    8,
    "prio_bucket[4]",
    "junk; with bcached: 0x7364697575636362 xor seq: the next two words describe the uuid table",
);
const TABLE_SUM: Field =
    Field::new(216, 8, "prio_bucket[5]", "junk; with bcached: the checksum of the uuid table");
const TABLE_EDITION: Field =
    Field::new(224, 8, "prio_bucket[6]", "junk; with bcached: the edition of the uuid table");
const MARK: Field = Field::new(
    232,
    8,
    "prio_bucket[7]",
    "junk; with bcached: 0x2164656863616362 xor seq: bcached wrote the chain",
);

/// Layout table of a journal entry.
pub const STRUCTURE: Structure = Structure {
    name: "Journal entry",
    fields: &[
        CSUM,
        MAGIC,
        SEQ,
        VERSION,
        KEYS,
        LAST_SEQ,
        UUIDS,
        ROOT,
        LEVEL,
        JUNK,
        PRIOS,
        TABLE_MARK,
        TABLE_SUM,
        TABLE_EDITION,
        MARK,
    ],
};

/// Bytes of an entry before its keys.
pub const JSET_HEADER_BYTES: usize = MARK.end();

/// Largest entry in bytes, whatever the bucket size.
pub const JSET_BYTES_MAX: usize = 32 << 10;

const VERSION_CURRENT: u32 = 1;

/// Marks an entry written by bcached, in the slot of an eighth device, XORed with the entry's
/// sequence number. A kernel writes leftover memory into that slot. The leftover can be a mark that
/// the kernel read from an entry of ours, but it never carries the sequence number of an entry that
/// the kernel itself makes.
const RESERVE_MARK: u64 = u64::from_le_bytes(*b"bcached!");

/// The same kind of mark, for the slots of the fifth to seventh devices: bcached wrote the uuid
/// table that the entry names.
const TABLE_SEAL_MARK: u64 = u64::from_le_bytes(*b"bccuuids");

/// What an entry written by bcached records about the uuid table it names. The table itself has no
/// checksum and no sequence number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableSeal {
    /// Checksum of all bytes of the table.
    pub sum: u64,
    /// Number of the write that produced the table: its slots are stamped with the same number (see
    /// [`UuidSlot`](crate::uuid::UuidSlot)).
    pub edition: u64,
}

/// The fields of an entry apart from its keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JsetHeader {
    /// Sequence number of the entry, from 1.
    pub seq: u64,
    /// Oldest entry that holds a key which may not be in the tree yet; at most `seq`.
    pub last_seq: u64,
    /// Key of the uuid table.
    pub uuids: Key,
    /// Key of the root node.
    pub root: Key,
    /// Level of the root node; 0 is a leaf.
    pub root_level: u16,
    /// First bucket of the priority chain.
    pub prio_bucket: u64,
    /// Whether bcached stored the priority chain, and no kernel has written since. If so, buckets
    /// of priority [`PRIO_RESERVE`](crate::prio::PRIO_RESERVE) belong to the reserve (see `stamp`),
    /// and the priority of a node's bucket tells the node's length
    /// ([`durable_blocks`](crate::prio::durable_blocks)).
    pub marks_reserve: bool,
    /// Checksum and edition that the uuid table must have. `None`: a kernel, or an earlier version
    /// of bcached, wrote the entry, and a damaged table cannot be told from an intact one.
    pub table: Option<TableSeal>,
}

/// A checked entry; its keys borrow from the bytes it was parsed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Jset<'a> {
    /// The fields apart from the keys.
    pub header: JsetHeader,
    /// 1, or 0 for an entry in the old format.
    pub version: u32,
    /// The keys in the order in which they were inserted. None is empty or starts before zero.
    /// Their pointers have not been checked yet (see `key_check`).
    pub keys: KeyList<'a>,
}

impl<'a> Jset<'a> {
    /// Parses the entry at the start of `bytes`, which extend to the end of the bucket.
    ///
    /// # Errors
    /// [`JsetError`]; [`JsetError::is_end_of_log`] tells whether it merely marks the end of the
    /// log.
    pub fn parse(bytes: &'a [u8], magic: SetMagic) -> Result<Self, JsetError> {
        if bytes.len() < JSET_HEADER_BYTES {
            return Err(JsetError::Truncated { wanted: JSET_HEADER_BYTES, found: bytes.len() });
        }
        let (wanted, found) = (magic.jset(), MAGIC.u64(bytes));
        if wanted != found {
            return Err(JsetError::BadMagic { wanted, found });
        }
        let limit = bytes.len().min(JSET_BYTES_MAX);
        let wanted = JSET_HEADER_BYTES as u64 + u64::from(KEYS.u32(bytes)) * WORD_BYTES as u64;
        let fits = usize::try_from(wanted).ok().and_then(|length| bytes[..limit].get(..length));
        let bytes = fits.ok_or(JsetError::TooLarge { wanted, limit })?;
        let (wanted, found) = (checksum(&bytes[CHECKSUM_BYTES..]), CSUM.u64(bytes));
        if wanted != found {
            return Err(JsetError::BadChecksum { wanted, found });
        }
        let version = VERSION.u32(bytes);
        if version > VERSION_CURRENT {
            return Err(JsetError::UnsupportedVersion { found: version });
        }
        let header = parse_header(bytes)?;
        let keys = KeyList::parse(&bytes[JSET_HEADER_BYTES..])?;
        check_sizes(&keys)?;
        Ok(Self { header, version, keys })
    }

    /// Returns the length of the entry in bytes, without the padding of its last block.
    #[must_use]
    pub const fn byte_len(&self) -> usize {
        JSET_HEADER_BYTES + self.keys.as_bytes().len()
    }

    /// Returns true if the uuid table has the old slots of 64 bytes.
    #[must_use]
    pub const fn has_old_uuids(&self) -> bool {
        self.version == 0
    }
}

fn parse_header(bytes: &[u8]) -> Result<JsetHeader, JsetError> {
    let (seq, last_seq) = (SEQ.u64(bytes), LAST_SEQ.u64(bytes));
    if seq == 0 || last_seq == 0 || last_seq > seq {
        return Err(JsetError::BadSeq { seq, last_seq });
    }
    let (uuids, _) = parse_key(UUIDS.slice(bytes)).map_err(JsetError::Uuids)?;
    let (root, _) = parse_key(ROOT.slice(bytes)).map_err(JsetError::Root)?;
    let prio_bucket = u64::from_le_bytes(PRIOS.slice(bytes)[..8].try_into().expect("eight bytes"));
    let marks_reserve = MARK.u64(bytes) == RESERVE_MARK ^ seq;
    let table = (TABLE_MARK.u64(bytes) == TABLE_SEAL_MARK ^ seq)
        .then(|| TableSeal { sum: TABLE_SUM.u64(bytes), edition: TABLE_EDITION.u64(bytes) });
    let root_level = LEVEL.u16(bytes);
    Ok(JsetHeader { seq, last_seq, uuids, root, root_level, prio_bucket, marks_reserve, table })
}

/// Checks the sizes of the keys. A key of size zero means nothing in a journal, and makes a kernel
/// panic when it is replayed. A key that starts before zero is not an extent, and a journal holds
/// nothing but extents.
fn check_sizes(keys: &KeyList<'_>) -> Result<(), KeyListError> {
    let mut word = 0;
    for (index, key) in keys.iter().enumerate() {
        if key.size == 0 {
            return Err(KeyListError { index, word, error: KeyError::ZeroSize });
        }
        if u64::from(key.size) > key.end {
            let error = KeyError::SizeExceedsEnd { size: key.size, end: key.end };
            return Err(KeyListError { index, word, error });
        }
        word += key.words();
    }
    Ok(())
}

/// Returns the length in bytes of an entry with `words` words of keys.
#[must_use]
pub const fn byte_len_of(words: usize) -> usize {
    JSET_HEADER_BYTES + words * WORD_BYTES
}

/// Builds a sealed entry with `keys`. The caller pads it to whole blocks.
///
/// # Panics
/// If the entry would be larger than [`JSET_BYTES_MAX`], its sequence numbers contradict each
/// other, or a key has size zero: no reader would accept it.
#[must_use]
pub fn seal(magic: SetMagic, header: &JsetHeader, keys: &[Key]) -> Vec<u8> {
    let words: usize = keys.iter().map(Key::words).sum();
    let mut bytes = alloc::vec![0; byte_len_of(words)];
    seal_into(&mut bytes, magic, header, keys);
    bytes
}

/// Builds a sealed entry with `keys` at the start of `bytes`, whose previous content does not
/// matter. Returns the length of the entry in bytes.
///
/// # Panics
/// As for [`seal`], and if `bytes` are too short.
pub fn seal_into(bytes: &mut [u8], magic: SetMagic, header: &JsetHeader, keys: &[Key]) -> usize {
    let mut at = JSET_HEADER_BYTES;
    for key in keys {
        assert!(key.size > 0, "a journalled key covers something");
        at += write_key(&mut bytes[at..], key).expect("there is room for the key") * WORD_BYTES;
    }
    seal_in_place(&mut bytes[..at], magic, header);
    at
}

/// Seals the entry that fills `bytes` exactly. The keys are already in place after the header,
/// which is overwritten as a whole.
///
/// # Panics
/// As for [`seal`], but the keys are not checked.
pub fn seal_in_place(bytes: &mut [u8], magic: SetMagic, header: &JsetHeader) {
    assert!(bytes.len() <= JSET_BYTES_MAX, "an entry has at most 32 KiB");
    assert!(
        header.last_seq > 0 && header.last_seq <= header.seq,
        "an entry needs only itself and older ones"
    );
    let keys = bytes.len().checked_sub(JSET_HEADER_BYTES).expect("room for the header");
    assert!(keys.is_multiple_of(WORD_BYTES), "keys are whole words");
    bytes[..JSET_HEADER_BYTES].fill(0);
    MAGIC.set_u64(bytes, magic.jset());
    SEQ.set_u64(bytes, header.seq);
    VERSION.set_u32(bytes, VERSION_CURRENT);
    KEYS.set_u32(bytes, u32::try_from(keys / WORD_BYTES).expect("32 KiB at most"));
    LAST_SEQ.set_u64(bytes, header.last_seq);
    write_key(UUIDS.slice_mut(bytes), &header.uuids).expect("any key fits");
    write_key(ROOT.slice_mut(bytes), &header.root).expect("any key fits");
    LEVEL.set_u16(bytes, header.root_level);
    PRIOS.slice_mut(bytes)[..8].copy_from_slice(&header.prio_bucket.to_le_bytes());
    if let Some(table) = header.table {
        TABLE_MARK.set_u64(bytes, TABLE_SEAL_MARK ^ header.seq);
        TABLE_SUM.set_u64(bytes, table.sum);
        TABLE_EDITION.set_u64(bytes, table.edition);
    }
    MARK.set_u64(bytes, if header.marks_reserve { RESERVE_MARK ^ header.seq } else { 0 });
    let sum = checksum(&bytes[CHECKSUM_BYTES..]);
    CSUM.set_u64(bytes, sum);
}

const _: () =
    assert!(UUIDS.size >= (2 + crate::key::MAX_POINTERS) * WORD_BYTES, "any key fits in a header's key");
