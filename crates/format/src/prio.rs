//! The priority set: generations and priorities of a run of buckets. A chain of sets describes the
//! whole device.
//!
//! Generations are vital; priorities only steer replacement. A chain is written as a whole into
//! fresh buckets, last set first, and takes effect with the journal entry that names its first
//! bucket. A reader finds the end of the chain by counting buckets: the last set's `next` is junk,
//! and so are the entries after the last bucket. The checksum covers both.

use crate::checksum::{CHECKSUM_BYTES, Checksum, checksum};
use crate::error::PrioError;
use crate::identity::SetMagic;
use crate::layout::{Field, Structure};
use crate::units::Gen;

const CSUM: Field = Field::new(0, 8, "csum", "standard checksum of bytes 8 .. end of the meta area");
const MAGIC: Field = Field::new(8, 8, "magic", "0x6750E15F87337F91 xor set magic");
const SEQ: Field = Field::new(16, 8, "seq", "one more at each write; the same in all sets of a chain");
const VERSION: Field = Field::new(24, 4, "version", "0");
const PAD: Field = Field::new(28, 4, "pad", "0");
const NEXT: Field = Field::new(32, 8, "next_bucket", "bucket of the chain's next set; of the last set: junk");
const FIRST: Field = Field::new(40, 3, "data", "u16 prio, u8 gen of each bucket, as many as fit");

/// Layout table of a priority set.
pub const STRUCTURE: Structure =
    Structure { name: "Priority set", fields: &[CSUM, MAGIC, SEQ, VERSION, PAD, NEXT, FIRST] };

const HEADER_BYTES: usize = FIRST.offset;
const ENTRY_BYTES: usize = FIRST.size;

/// Priority of a bucket that was never used.
pub const PRIO_NEVER_USED: u16 = 0;
/// Priority that bcached gives to the buckets of its reserve, and to no others (see `stamp`). To a
/// kernel it looks like a bucket that has not been used for a long time.
pub const PRIO_RESERVE: u16 = 1;
/// Priority of a bucket that was just filled or hit.
pub const PRIO_FRESH: u16 = 32768;
/// Priority of a bucket that holds metadata, such as a B-tree node. A kernel stores it unchanged.
pub const PRIO_BTREE: u16 = 65535;
/// Largest number of node blocks that a priority can encode.
pub const NODE_BLOCKS_MAX: u16 = PRIO_BTREE - PRIO_FRESH - 1;

/// Returns the priority that bcached stores for the bucket of a node with `durable_blocks` durable
/// blocks.
///
/// It is that many below a kernel's priority for metadata, and above any priority of data. A reader
/// that finds fewer blocks knows that a write was lost. A kernel sets the priorities of nodes
/// itself when it starts, and so loses the number. It therefore means something only in a chain
/// that bcached wrote last (see `JsetHeader::marks_reserve`).
#[must_use]
pub const fn prio_of_node(durable_blocks: u16) -> u16 {
    if durable_blocks < NODE_BLOCKS_MAX { PRIO_BTREE - durable_blocks } else { PRIO_FRESH + 1 }
}

/// Returns the least number of durable blocks of the node in a bucket with priority `prio`; 0 if
/// the priority does not tell, or the bucket holds no node.
#[must_use]
pub const fn durable_blocks(prio: u16) -> u16 {
    if prio > PRIO_FRESH { PRIO_BTREE - prio } else { 0 }
}

/// Returns the number of buckets that a set in a meta area of `meta_bytes` bytes describes.
#[must_use]
pub const fn entries_in(meta_bytes: usize) -> usize {
    meta_bytes.saturating_sub(HEADER_BYTES) / ENTRY_BYTES
}

/// The stored state of one bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketPrio {
    /// How valuable the bucket's content is: replacement prefers low priorities.
    pub prio: u16,
    /// Generation of the bucket: pointers with other generations are void.
    pub generation: Gen,
}

/// A checked priority set; its entries borrow from the bytes it was parsed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrioSet<'a> {
    /// Number of the write; the same in all sets of a chain.
    pub seq: u64,
    /// Bucket of the next set. Junk if this is the last set by count.
    pub next_bucket: u64,
    entries: &'a [u8],
}

impl<'a> PrioSet<'a> {
    /// Parses the set in `bytes`, which are the whole meta area of its bucket.
    ///
    /// # Errors
    /// [`PrioError`]: checksum, then magic.
    pub fn parse(bytes: &'a [u8], magic: SetMagic) -> Result<Self, PrioError> {
        Self::parse_summed(bytes, magic, checksum(bytes.get(CHECKSUM_BYTES..).unwrap_or_default()))
    }

    /// Returns whether `bytes`, the first of a bucket, begin like a set; the rest is not checked.
    #[must_use]
    pub fn begins(bytes: &[u8], magic: SetMagic) -> bool {
        bytes.len() >= FIRST.end() && MAGIC.u64(bytes) == magic.prio()
    }

    /// Parses the set in `bytes`, whose checksum from the ninth byte on the caller has computed as
    /// `sum`.
    ///
    /// # Errors
    /// As for [`PrioSet::parse`].
    pub fn parse_summed(bytes: &'a [u8], magic: SetMagic, sum: u64) -> Result<Self, PrioError> {
        if bytes.len() < FIRST.end() {
            return Err(PrioError::Truncated { wanted: FIRST.end(), found: bytes.len() });
        }
        let (wanted, found) = (sum, CSUM.u64(bytes));
        if wanted != found {
            return Err(PrioError::BadChecksum { wanted, found });
        }
        let (wanted, found) = (magic.prio(), MAGIC.u64(bytes));
        if wanted != found {
            return Err(PrioError::BadMagic { wanted, found });
        }
        Ok(Self { seq: SEQ.u64(bytes), next_bucket: NEXT.u64(bytes), entries: &bytes[HEADER_BYTES..] })
    }

    /// Returns the entries in bucket order. The caller must stop at the last bucket; what follows
    /// is junk.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = BucketPrio> + 'a {
        self.entries.chunks_exact(ENTRY_BYTES).map(|entry| BucketPrio {
            prio: u16::from_le_bytes([entry[0], entry[1]]),
            generation: Gen(entry[2]),
        })
    }
}

/// Fills `bytes`, the whole meta area of a bucket, with a sealed set. The space after the entries
/// is zeroed.
///
/// # Panics
/// If there are more entries than fit.
pub fn seal(
    bytes: &mut [u8],
    magic: SetMagic,
    seq: u64,
    next_bucket: u64,
    entries: impl ExactSizeIterator<Item = BucketPrio>,
) {
    bytes.fill(0);
    let mut set = PrioWriter::new(bytes, magic, seq, next_bucket);
    set.push(entries);
    let _sealed = set.seal();
}

/// Builds a set in pieces. The set in a large bucket describes a hundred thousand buckets.
pub struct PrioWriter<M> {
    memory: M,
    /// End of the part that is filled and summed.
    end: usize,
    /// Whether the last entry has been added.
    is_over: bool,
    sum: Checksum,
}

impl<M: AsMut<[u8]>> PrioWriter<M> {
    /// Starts a set without entries in `memory`, which is zeroed and as long as the meta area of a
    /// bucket.
    #[must_use]
    pub fn new(mut memory: M, magic: SetMagic, seq: u64, next_bucket: u64) -> Self {
        let bytes = memory.as_mut();
        MAGIC.set_u64(bytes, magic.prio());
        SEQ.set_u64(bytes, seq);
        NEXT.set_u64(bytes, next_bucket);
        let mut sum = Checksum::default();
        sum.add(&bytes[CHECKSUM_BYTES..HEADER_BYTES]);
        Self { memory, end: HEADER_BYTES, is_over: false, sum }
    }

    /// Appends the entries of the next buckets.
    ///
    /// # Panics
    /// If they do not fit, or are added after [`PrioWriter::pass`].
    pub fn push(&mut self, entries: impl Iterator<Item = BucketPrio>) {
        assert!(!self.is_over, "entries are added only before the set is complete");
        let begin = self.end;
        let bytes = self.memory.as_mut();
        let (mut slots, _) = bytes[begin..].as_chunks_mut::<ENTRY_BYTES>();
        for entry in entries {
            let (slot, behind) = slots.split_first_mut().expect("the buckets' entries fit in the set");
            let [low, high] = entry.prio.to_le_bytes();
            *slot = [low, high, entry.generation.0];
            slots = behind;
            self.end += ENTRY_BYTES;
        }
        self.sum.add(&bytes[begin..self.end]);
    }

    /// Ends the entries, and sums at most `max` further bytes of the zeroed rest. Returns the
    /// number of bytes summed; 0 when all are.
    pub fn pass(&mut self, max: usize) -> usize {
        self.is_over = true;
        let rest = &self.memory.as_mut()[self.end..];
        let piece = &rest[..rest.len().min(max)];
        self.sum.add(piece);
        self.end += piece.len();
        piece.len()
    }

    /// Seals and returns the set. The space after the entries is zero.
    #[must_use]
    pub fn seal(mut self) -> M {
        self.pass(usize::MAX);
        CSUM.set_u64(self.memory.as_mut(), self.sum.value());
        self.memory
    }
}
