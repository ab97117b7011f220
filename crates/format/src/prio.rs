//! A priority set: generation and priority of a run of buckets. A chain of them describes the whole device.
//!
//! Generations are vital, priorities only steer replacement. A chain is written whole into fresh buckets, last set
//! first, and takes effect with the journal entry that names its first bucket. The chain's end is known by count: the
//! last set's `next` is junk, and so are the entries behind the last bucket. Both are summed.

use crate::checksum::{CHECKSUM_BYTES, Sum, checksum};
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

/// The table of a priority set.
pub const STRUCTURE: Structure =
    Structure { name: "Priority set", fields: &[CSUM, MAGIC, SEQ, VERSION, PAD, NEXT, FIRST] };

const HEADER_BYTES: usize = FIRST.offset;
const ENTRY_BYTES: usize = FIRST.size;

/// Priority of a bucket that was never used.
pub const PRIO_NEVER_USED: u16 = 0;
/// Priority that bcached gives to the buckets of its reserve, and to no others (see `stamp`). To a kernel it is one that was not
/// used for long.
pub const PRIO_RESERVE: u16 = 1;
/// Priority of a bucket that was just filled or hit.
pub const PRIO_FRESH: u16 = 32768;
/// Priority of a bucket that holds metadata, a B-tree node above all. A kernel stores it as it is.
pub const PRIO_BTREE: u16 = 65535;
/// The most blocks of a node that a priority can tell.
pub const NODE_BLOCKS_MAX: u16 = PRIO_BTREE - PRIO_FRESH - 1;

/// The priority that bcached stores for the bucket of a node of which so many blocks are durable: below a kernel's by as many, and
/// above all that data can have. Who finds fewer blocks knows that a write was lost. A kernel, which sets the priorities of nodes itself
/// when it starts, loses it; so it means something only in a chain that bcached wrote last (see `JsetHeader::marks_reserve`).
#[must_use]
pub const fn prio_of_node(durable_blocks: u16) -> u16 {
    if durable_blocks < NODE_BLOCKS_MAX { PRIO_BTREE - durable_blocks } else { PRIO_FRESH + 1 }
}

/// How many blocks of the node in a bucket are durable at the least, by its priority; 0: nothing is said, or it is no node.
#[must_use]
pub const fn durable_blocks(prio: u16) -> u16 {
    if prio > PRIO_FRESH { PRIO_BTREE - prio } else { 0 }
}

/// Buckets that a set in a meta area of this many bytes describes.
#[must_use]
pub const fn entries_in(meta_bytes: usize) -> usize {
    meta_bytes.saturating_sub(HEADER_BYTES) / ENTRY_BYTES
}

/// What is stored about one bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketPrio {
    /// How much the bucket is worth keeping.
    pub prio: u16,
    /// Its generation: pointers of other generations are void.
    pub generation: Gen,
}

/// A checked priority set; its entries lie in the bytes it was parsed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrioSet<'a> {
    /// Number of the write; the same in all sets of a chain.
    pub seq: u64,
    /// Bucket of the next set, unless this is the last by count.
    pub next_bucket: u64,
    entries: &'a [u8],
}

impl<'a> PrioSet<'a> {
    /// The set in `bytes`, which are the whole meta area of its bucket.
    ///
    /// # Errors
    /// [`PrioError`]: checksum, then magic.
    pub fn parse(bytes: &'a [u8], magic: SetMagic) -> Result<Self, PrioError> {
        Self::parse_summed(bytes, magic, checksum(bytes.get(CHECKSUM_BYTES..).unwrap_or_default()))
    }

    /// Whether `bytes`, the first of a bucket, begin like a set; the rest may make no sense.
    #[must_use]
    pub fn begins(bytes: &[u8], magic: SetMagic) -> bool {
        bytes.len() >= FIRST.end() && MAGIC.u64(bytes) == magic.prio()
    }

    /// The same, if the checksum of `bytes` from the ninth on is `sum`.
    ///
    /// # Errors
    /// As [`PrioSet::parse`].
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

    /// The buckets' entries in order; the caller stops at the last bucket, what follows is junk.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = BucketPrio> + 'a {
        self.entries.chunks_exact(ENTRY_BYTES).map(|entry| BucketPrio {
            prio: u16::from_le_bytes([entry[0], entry[1]]),
            generation: Gen(entry[2]),
        })
    }
}

/// Fills `bytes`, the whole meta area of a bucket, with a sealed set. What the entries do not fill is zero.
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

/// A set that is made in pieces: that of a large bucket says something of a hundred thousand others.
pub struct PrioWriter<M> {
    memory: M,
    /// Up to here it is filled and summed.
    end: usize,
    /// No entries come any more.
    is_over: bool,
    sum: Sum,
}

impl<M: AsMut<[u8]>> PrioWriter<M> {
    /// A set without entries in `memory`, which is as long as the meta area of a bucket, and zero.
    #[must_use]
    pub fn new(mut memory: M, magic: SetMagic, seq: u64, next_bucket: u64) -> Self {
        let bytes = memory.as_mut();
        MAGIC.set_u64(bytes, magic.prio());
        SEQ.set_u64(bytes, seq);
        NEXT.set_u64(bytes, next_bucket);
        let mut sum = Sum::default();
        sum.add(&bytes[CHECKSUM_BYTES..HEADER_BYTES]);
        Self { memory, end: HEADER_BYTES, is_over: false, sum }
    }

    /// The entries of the buckets that come next.
    ///
    /// # Panics
    /// If they do not fit, or come after [`PrioWriter::pass`].
    pub fn push(&mut self, entries: impl Iterator<Item = BucketPrio>) {
        assert!(!self.is_over, "what is behind the entries has been summed");
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

    /// No entries come any more: sums so many bytes at most of the rest, which is zero, and says how many; 0 when all is summed.
    pub fn pass(&mut self, max: usize) -> usize {
        self.is_over = true;
        let rest = &self.memory.as_mut()[self.end..];
        let piece = &rest[..rest.len().min(max)];
        self.sum.add(piece);
        self.end += piece.len();
        piece.len()
    }

    /// The sealed set. What the entries do not fill is zero.
    #[must_use]
    pub fn seal(mut self) -> M {
        self.pass(usize::MAX);
        CSUM.set_u64(self.memory.as_mut(), self.sum.value());
        self.memory
    }
}
