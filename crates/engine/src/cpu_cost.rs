//! The cost of work in CPU time: rates, and the sum for a transition.
//!
//! No task may be kept waiting for longer than 200 µs. Measured time would differ from run to run,
//! so work is counted instead and charged at these rates. In simulation, virtual time advances by
//! them, and a longer piece of work is a fault. In production, they tell a task when to yield
//! ([`bcached_env::Env::breathe`]).
//!
//! Each rate names the row of `cargo bench -p bcached-node`, or of `what_buckets_cost` in
//! `cpu_cost/rates.rs`, from which it was derived, with the result on one core of a mostly idle
//! shared virtual machine. With neighbours that fill the processor's cache, results double. Rates
//! called an estimate were not measured.

/// One node on the way from the root to a leaf. *look up 4 KiB*: 60 to 90 ns. These nodes are few
/// and accessed all the time. In a node that is not in the processor's cache, a lookup takes 400 ns
/// and more (*20 nodes*).
const DESCENT_NS: u64 = 150;
/// A key examined in place: *pass a key*, 1 ns. Also its bucket: *look for the bucket of a key*, 57
/// ns, mostly an access to a table that does not fit into the processor's cache.
const VISIT_NS: u64 = 60;
/// A key counted to its bucket when a set is opened. *count a key to its bucket*: 60 ns.
pub const COUNT_NS: u64 = 80;
/// A key inserted into a leaf: *insert over an old key* and *into a gap, 20 nodes*, 1,300 to 2,400
/// ns, a quarter of that in the processor's cache. Its journal entry and its note are not included.
const INSERT_NS: u64 = 2_000;
/// A key, or part of one, replaced by another: like *count a key to its bucket*. (In the node,
/// *over an old key* costs no more than *into a gap*.)
const REMOVE_NS: u64 = 80;
/// A key checked, merged or sorted while a node is read; the whole read takes some seven such
/// steps. *a step of it*: 20 ns.
pub const READ_STEP_NS: u64 = 40;
/// A sector of sets or journal entries checksummed, or scanned for its keys; both are done to each
/// sector. *find the keys in a sector, with its sum*: 140 to 160 ns for the two.
const FIND_NS: u64 = 120;
/// A key sorted among many others. An estimate.
pub const SORT_NS: u64 = 300;
/// A journal key inserted among others, or removed from them. Measured with 260,000 keys: 1040 ns.
pub const MERGE_NS: u64 = 1000;
/// A key whose words are counted, in a sequential pass. *pass a key*: 1 ns.
const PASS_NS: u64 = 2;
/// A key copied into a new node, or into the bytes of a set. *one of them*, a live key of a node: 4
/// ns.
const COPY_NS: u64 = 12;
/// A bucket examined in a sequential pass. *look at a bucket in a row*: 1 ns.
pub const BUCKET_NS: u64 = 4;
/// A bucket whose generation and priority are put into a block, or read from one. *put a bucket
/// into a block of priorities*: 5 ns, including the checksum.
const PRIORITY_NS: u64 = 12;
/// Bytes checksummed or copied per nanosecond. *sum a KiB*: 18 ns in the processor's cache, 37 ns
/// beyond it, which is 28 bytes per nanosecond. That processor computes checksums with carry-less
/// multiplication; not all can.
const BYTES_A_NS: u64 = 8;

/// A parked piece removed from its table, and a range entered for it. An estimate: three changes of
/// small tables.
const PARKED_NS: u64 = 500;

/// Parked pieces handled per transition.
pub const PARKED_PIECE: usize = 64;
/// Maximum number of keys examined per transition; a leaf has more.
pub const VISIT_MAX: usize = 256;
/// Keys per piece of work that passes a whole node.
pub const PIECE_KEYS: usize = 64;
/// Maximum number of keys removed per transition.
pub const REMOVE_MAX: usize = 512;
/// Maximum number of journal keys that one key makes void per piece of work.
pub const MERGE_MAX: usize = 16;
/// Maximum number of keys sorted per piece of work.
pub const SORT_MAX: usize = 32;
/// Keys per step of reading a node.
pub const READ_STEP_KEYS: usize = 1024;
/// Maximum number of buckets examined per piece of work.
pub const BUCKETS_MAX: usize = 4096;

/// Bytes of a typical key in a set.
const KEY_BYTES: usize = 24;
/// Bytes of an extent in a summary.
const EXTENT_BYTES: usize = 16;

/// The cost of a transition so far.
#[derive(Default)]
pub struct CpuCost {
    nanoseconds: u64,
}

impl CpuCost {
    /// Returns the cost so far, in nanoseconds, and resets it.
    pub const fn take(&mut self) -> u64 {
        core::mem::replace(&mut self.nanoseconds, 0)
    }

    /// Charges a node passed on the way to a leaf.
    pub const fn descent(&mut self) {
        self.nanoseconds += DESCENT_NS;
    }

    /// Charges `keys` examined.
    pub const fn visit(&mut self, keys: usize) {
        self.nanoseconds += visit_ns(keys);
    }

    /// Charges a key inserted that replaced `removed` others.
    pub const fn insert(&mut self, removed: usize) {
        self.nanoseconds += INSERT_NS + REMOVE_NS * removed as u64;
    }

    /// Charges `keys` passed, with their words counted.
    pub const fn pass(&mut self, keys: usize) {
        self.nanoseconds += PASS_NS * keys as u64;
    }

    /// Charges `keys` copied.
    pub const fn copy(&mut self, keys: usize) {
        self.nanoseconds += COPY_NS * keys as u64;
    }

    /// Charges `keys` put into a new node and its first set, with the checksum.
    pub const fn make(&mut self, keys: usize) {
        self.copy(2 * keys);
        self.nanoseconds += sum_ns(KEY_BYTES * keys);
    }

    /// Charges sealing a set of `bytes`: copying its keys, and the checksum.
    pub const fn seal(&mut self, bytes: usize) {
        self.copy(bytes / KEY_BYTES);
        self.nanoseconds += sum_ns(bytes);
    }

    /// Charges the generations and priorities of `buckets` put into a block, with the checksum.
    pub const fn priorities(&mut self, buckets: u64) {
        self.nanoseconds += priorities_ns(buckets);
    }

    /// Charges `keys` sorted among others.
    pub const fn sort(&mut self, keys: usize) {
        self.nanoseconds += SORT_NS * keys as u64;
    }

    /// Charges the summary of a bucket with `extents` built or parsed, with the checksum.
    pub const fn summary(&mut self, extents: usize) {
        self.nanoseconds += summary_ns(extents);
    }

    /// Charges parked `pieces` taken.
    pub const fn parked(&mut self, pieces: usize) {
        self.nanoseconds += PARKED_NS * pieces as u64;
    }

    /// Charges `buckets` examined.
    pub const fn buckets(&mut self, buckets: usize) {
        self.nanoseconds += BUCKET_NS * buckets as u64;
    }
}

/// Cost of building or parsing a summary of `extents`, in nanoseconds.
pub const fn summary_ns(extents: usize) -> u64 {
    COPY_NS * extents as u64 + sum_ns(EXTENT_BYTES * extents)
}

/// Cost of examining `keys`, in nanoseconds.
pub const fn visit_ns(keys: usize) -> u64 {
    VISIT_NS * keys as u64
}

/// Cost of the generations and priorities of `buckets`, in nanoseconds.
pub const fn priorities_ns(buckets: u64) -> u64 {
    PRIORITY_NS * buckets
}

/// Cost of checksumming `bytes` of keys, or of scanning them, in nanoseconds.
pub const fn find_ns(bytes: usize) -> u64 {
    FIND_NS * bytes as u64 / 512
}

/// Cost of checking a journal entry of `bytes` and extracting its keys, in nanoseconds.
pub const fn entry_ns(bytes: usize) -> u64 {
    find_ns(2 * bytes)
}

/// Cost of checksumming `bytes`, in nanoseconds.
pub const fn sum_ns(bytes: usize) -> u64 {
    bytes as u64 / BYTES_A_NS
}

#[cfg(all(test, feature = "rates"))]
mod rates;
