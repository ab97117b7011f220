//! What work costs, in CPU time: rates, and the sum of a transition.
//!
//! Nobody may be kept waiting for longer than 200 µs. Time that is measured would differ from run to run,
//! so work is counted instead and charged at these rates: in simulation virtual time passes by them and a longer piece
//! is a fault; in production they tell a task when to let others run ([`bcached_env::Env::breathe`]).
//!
//! Each rate names the row of `cargo bench -p bcached-node` that it was chosen by, and what that tells on one core of a shared
//! virtual machine with little else to do; with neighbours who fill the processor's cache it tells twice as much. The
//! tables of buckets are the engine's own, and no bench comes to them: what is said to be an estimate was not measured.

/// One node on the way from the root to a leaf. *look up 4 KiB*: 60 to 90 ns. Nodes on the way are few and looked at all the
/// time; in one that is not in the processor's cache a lookup takes 400 ns and more (*20 nodes*).
const DESCENT_NS: u64 = 150;
/// A key that is looked at where it stands: *pass a key*, 1 ns. The rest, for its buckets, is an estimate.
const VISIT_NS: u64 = 15;
/// A key that is counted to its buckets when a set is opened. An estimate: twice a key that is looked at.
pub const COUNT_NS: u64 = 30;
/// A key that is put into a leaf: *insert over an old key* and *into a gap, 20 nodes*, 1,300 to 2,400 ns, in the processor's
/// cache a quarter of it. Its journal entry and its note are not in that.
const INSERT_NS: u64 = 2_000;
/// A key, or part of one, that gives way to another. An estimate: *over an old key* is no dearer than *into a gap*.
const REMOVE_NS: u64 = 50;
/// A key that is checked, merged or put in order while a node is read; the whole of it takes some seven such steps. *a step
/// of it*: 20 ns.
pub const READ_STEP_NS: u64 = 40;
/// What finding the keys in a sector of a set costs, beside its sum. *find the keys in a sector*: 140 to 160 ns, sum included.
pub const PARSE_NS_A_SECTOR: u64 = 170;
/// A key that is copied: into a fresh node, or into the bytes of a set. *one of them*, a living key of a node: 4 ns.
const COPY_NS: u64 = 12;
/// A bucket that is looked at in a row with others. An estimate.
const BUCKET_NS: u64 = 4;
/// Bytes summed or copied in a nanosecond. *sum a KiB*: 18 ns in the processor's cache, 37 ns beyond it, 28 bytes a nanosecond.
/// That is on a processor that sums by carry-less multiplication; not each has that.
const BYTES_A_NS: u64 = 8;

/// Most keys that one transition looks at: a leaf has more.
pub const VISIT_MAX: usize = 2048;
/// Most keys that one transition takes away.
pub const REMOVE_MAX: usize = 512;
/// Keys in one step of reading a node.
pub const READ_STEP_KEYS: usize = 1024;
/// Most buckets that are looked at in one piece.
pub const BUCKETS_MAX: usize = 16_384;

/// Bytes of a usual key in a set.
const KEY_BYTES: usize = 24;

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
        self.nanoseconds += VISIT_NS * keys as u64;
    }

    /// A key was inserted and took the place of so many others.
    pub const fn insert(&mut self, removed: usize) {
        self.nanoseconds += INSERT_NS + REMOVE_NS * removed as u64;
    }

    /// So many keys were copied.
    pub const fn copy(&mut self, keys: usize) {
        self.nanoseconds += COPY_NS * keys as u64;
    }

    /// A set of so many bytes was sealed: its keys copied twice, and summed.
    pub const fn seal(&mut self, bytes: usize) {
        self.copy(2 * bytes / KEY_BYTES);
        self.nanoseconds += sum_ns(bytes);
    }

    /// So many buckets were looked at.
    pub const fn buckets(&mut self, buckets: usize) {
        self.nanoseconds += BUCKET_NS * buckets as u64;
    }
}

/// What summing so many bytes costs, in nanoseconds.
pub const fn sum_ns(bytes: usize) -> u64 {
    bytes as u64 / BYTES_A_NS
}
