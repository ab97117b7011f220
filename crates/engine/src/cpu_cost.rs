//! What work costs, in CPU time: rates, and the sum of a transition.
//!
//! Nobody may be kept waiting for longer than 200 µs. Time that is measured would differ from run to run,
//! so work is counted instead and charged at these rates: in simulation virtual time passes by them and a longer piece
//! is a fault; in production they tell a task when to let others run ([`bcached_env::Env::breathe`]).
//!
//! Each rate names the row of `cargo bench -p bcached-node`, or of `what_buckets_cost` in `work/rates.rs`,
//! by which it was chosen, and what that tells on one core of a shared virtual machine with little else to do; with neighbours
//! who fill the processor's cache it tells twice as much. What is said to be an estimate was not measured.

/// One node on the way from the root to a leaf. *look up 4 KiB*: 60 to 90 ns. Nodes on the way are few and looked at all the
/// time; in one that is not in the processor's cache a lookup takes 400 ns and more (*20 nodes*).
const DESCENT_NS: u64 = 150;
/// A key that is looked at where it stands: *pass a key*, 1 ns; and its bucket: *look for the bucket of a key*, 57 ns, most of which
/// is a place in a table that the processor's cache cannot hold.
const VISIT_NS: u64 = 60;
/// A key that is counted to its bucket when a set is opened. *count a key to its bucket*: 60 ns.
pub const COUNT_NS: u64 = 80;
/// A key that is put into a leaf: *insert over an old key* and *into a gap, 20 nodes*, 1,300 to 2,400 ns, in the processor's
/// cache a quarter of it. Its journal entry and its note are not in that.
const INSERT_NS: u64 = 2_000;
/// A key, or part of one, that gives way to another: as *count a key to its bucket*. (In the node *over an old key* is no dearer
/// than *into a gap*.)
const REMOVE_NS: u64 = 80;
/// A key that is checked, merged or put in order while a node is read; the whole of it takes some seven such steps. *a step
/// of it*: 20 ns.
pub const READ_STEP_NS: u64 = 40;
/// A sector of sets or journal entries that is summed, or looked through for its keys: both are done to each. *find the keys in
/// a sector, with its sum*: 140 to 160 ns for the two.
const FIND_NS: u64 = 120;
/// A key that is put in order among many others. An estimate.
pub const SORT_NS: u64 = 300;
/// A key of the journal that is put among others, or taken from among them. Measured with 260,000 of them: 1040 ns.
pub const MERGE_NS: u64 = 1000;
/// A key whose words are counted, in a row with others. *pass a key*: 1 ns.
const PASS_NS: u64 = 2;
/// A key that is copied: into a fresh node, or into the bytes of a set. *one of them*, a living key of a node: 4 ns.
const COPY_NS: u64 = 12;
/// A bucket that is looked at in a row with others. *look at a bucket in a row*: 1 ns.
pub const BUCKET_NS: u64 = 4;
/// A bucket whose generation and priority are put into a block, or taken out of one. *put a bucket into a block of priorities*:
/// 5 ns, its sum included.
const PRIORITY_NS: u64 = 12;
/// Bytes summed or copied in a nanosecond. *sum a KiB*: 18 ns in the processor's cache, 37 ns beyond it, 28 bytes a nanosecond.
/// That is on a processor that sums by carry-less multiplication; not each has that.
const BYTES_A_NS: u64 = 8;

/// A parked piece that is taken out of its table, and a range that is entered for it. An estimate: three changes of small tables.
const PARKED_NS: u64 = 500;

/// Parked pieces that one transition takes.
pub const PARKED_PIECE: usize = 64;
/// Most keys that one transition looks at: a leaf has more.
pub const VISIT_MAX: usize = 256;
/// Keys in a piece of what goes through a whole node.
pub const PIECE_KEYS: usize = 64;
/// Most keys that one transition takes away.
pub const REMOVE_MAX: usize = 512;
/// Most keys of the journal that one makes void in one piece.
pub const MERGE_MAX: usize = 16;
/// Most keys that are put in order in one piece.
pub const SORT_MAX: usize = 32;
/// Keys in one step of reading a node.
pub const READ_STEP_KEYS: usize = 1024;
/// Most buckets that are looked at in one piece.
pub const BUCKETS_MAX: usize = 4096;

/// Bytes of a usual key in a set.
const KEY_BYTES: usize = 24;
/// Bytes of an extent in a summary.
const EXTENT_BYTES: usize = 16;

/// The cost of a transition so far.
#[derive(Default)]
pub struct Work {
    nanoseconds: u64,
}

impl Work {
    /// What was counted, in nanoseconds; counting begins anew.
    pub const fn take(&mut self) -> u64 {
        core::mem::replace(&mut self.nanoseconds, 0)
    }

    /// A node was passed on the way to a leaf.
    pub const fn descent(&mut self) {
        self.nanoseconds += DESCENT_NS;
    }

    /// So many keys were looked at.
    pub const fn visit(&mut self, keys: usize) {
        self.nanoseconds += visit_ns(keys);
    }

    /// A key was inserted and took the place of so many others.
    pub const fn insert(&mut self, removed: usize) {
        self.nanoseconds += INSERT_NS + REMOVE_NS * removed as u64;
    }

    /// So many keys were passed, and their words counted.
    pub const fn pass(&mut self, keys: usize) {
        self.nanoseconds += PASS_NS * keys as u64;
    }

    /// So many keys were copied.
    pub const fn copy(&mut self, keys: usize) {
        self.nanoseconds += COPY_NS * keys as u64;
    }

    /// So many keys were put into a fresh node and into its first set, and summed.
    pub const fn make(&mut self, keys: usize) {
        self.copy(2 * keys);
        self.nanoseconds += sum_ns(KEY_BYTES * keys);
    }

    /// A set of so many bytes was sealed: its keys copied, and summed.
    pub const fn seal(&mut self, bytes: usize) {
        self.copy(bytes / KEY_BYTES);
        self.nanoseconds += sum_ns(bytes);
    }

    /// The generations and priorities of so many buckets were put into a block, and summed.
    pub const fn priorities(&mut self, buckets: u64) {
        self.nanoseconds += priorities_ns(buckets);
    }

    /// So many keys were put in order among others.
    pub const fn sort(&mut self, keys: usize) {
        self.nanoseconds += SORT_NS * keys as u64;
    }

    /// The summary of a bucket with so many extents was made or taken apart, and summed.
    pub const fn summary(&mut self, extents: usize) {
        self.nanoseconds += summary_ns(extents);
    }

    /// So many parked pieces were taken.
    pub const fn parked(&mut self, pieces: usize) {
        self.nanoseconds += PARKED_NS * pieces as u64;
    }

    /// So many buckets were looked at.
    pub const fn buckets(&mut self, buckets: usize) {
        self.nanoseconds += BUCKET_NS * buckets as u64;
    }
}

/// What making or taking apart a summary of so many extents costs, in nanoseconds.
pub const fn summary_ns(extents: usize) -> u64 {
    COPY_NS * extents as u64 + sum_ns(EXTENT_BYTES * extents)
}

/// What looking at so many keys costs, in nanoseconds.
pub const fn visit_ns(keys: usize) -> u64 {
    VISIT_NS * keys as u64
}

/// What the generations and priorities of so many buckets cost, in nanoseconds.
pub const fn priorities_ns(buckets: u64) -> u64 {
    PRIORITY_NS * buckets
}

/// What it costs to sum so many bytes of keys, or to look through them, in nanoseconds.
pub const fn find_ns(bytes: usize) -> u64 {
    FIND_NS * bytes as u64 / 512
}

/// What it costs to check an entry of the journal, and to take its keys out of it, in nanoseconds.
pub const fn entry_ns(bytes: usize) -> u64 {
    find_ns(2 * bytes)
}

/// What summing so many bytes costs, in nanoseconds.
pub const fn sum_ns(bytes: usize) -> u64 {
    bytes as u64 / BYTES_A_NS
}

#[cfg(all(test, feature = "rates"))]
mod rates;
