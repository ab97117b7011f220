//! The phases that a set is in: operations whose steps a crash may separate. The engine only
//! records where they begin and end. A crash test learns from this which phases a crash
//! interrupted, and whether it ever hit each of them.

use alloc::sync::Arc;
use core::array;
use core::sync::atomic::{AtomicU64, Ordering};

/// An operation of several steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A node is rewritten without its dead keys, and its parent is updated.
    Rewrite,
    /// A leaf is split in two, and the parent is updated.
    LeafSplit,
    /// An interior node is split in two, and the parent is updated.
    InteriorSplit,
    /// The root is split in two under a new root.
    RootSplit,
    /// Two sparse nodes are merged into one, and the parent is updated.
    Coalesce,
    /// Keys are appended to a leaf.
    LeafWrite,
    /// Any of the rewrites and splits during a replay of the journal.
    ReplaySplit,
    /// Keys of journal entries are put into the tree at a start.
    Replay,
    /// The tree is walked in the background, while requests are served.
    Walk,
    /// Keys of journal entries are put into the tree in the background, while requests are served.
    ReplayBeside,
    /// A journal entry is written to the first bucket again.
    JournalWrap,
    /// A journal entry is written that releases older ones.
    JournalReclaim,
    /// Generations and priorities are written.
    PriorityChain,
    /// They are written, but the journal entry that names them is not durable yet.
    PriorityEntry,
    /// The table of volumes is written, and the entry that names it.
    UuidTable,
    /// Dirty data is copied to another bucket, and its key replaced.
    Move,
    /// Buckets are invalidated while a bucket that would have been next is pinned by a read in
    /// flight.
    EvictionBesideRead,
    /// A backing device's superblock is written to attach it to this set.
    BackingAttached,
    /// A backing device is being marked dirty.
    BackingDirty,
    /// A backing device is being marked clean.
    BackingClean,
    /// A backing device's superblock is written to say that the cache's copies must not be used any
    /// more.
    BackingStale,
    /// A backing device's superblock is written to say that it has no cache any more.
    BackingDetached,
    /// The superblock of a backing device is written for another reason, such as a new mode.
    BackingRecord,
    /// The superblock of the cache is written at the first start of a set.
    CacheFirstStart,
    /// The superblock of the cache is written at a later start.
    CacheStart,
    /// The superblock of the cache is written because a setting stored in it has changed.
    CacheRecord,
    /// A range of a backing device is zeroed, and the cached data of that range is removed.
    Zeroing,
    /// A range with dirty data is written to its backing device, and the cached data of that range
    /// is removed.
    WriteOut,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 28] = [
        Self::Rewrite,
        Self::LeafSplit,
        Self::InteriorSplit,
        Self::RootSplit,
        Self::Coalesce,
        Self::LeafWrite,
        Self::ReplaySplit,
        Self::Replay,
        Self::Walk,
        Self::ReplayBeside,
        Self::JournalWrap,
        Self::JournalReclaim,
        Self::PriorityChain,
        Self::PriorityEntry,
        Self::UuidTable,
        Self::Move,
        Self::EvictionBesideRead,
        Self::BackingAttached,
        Self::BackingDirty,
        Self::BackingClean,
        Self::BackingStale,
        Self::BackingDetached,
        Self::BackingRecord,
        Self::CacheFirstStart,
        Self::CacheStart,
        Self::CacheRecord,
        Self::Zeroing,
        Self::WriteOut,
    ];

    /// The phase's bit in a bit set of phases.
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// The name of the phase, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rewrite => "node rewrite",
            Self::LeafSplit => "leaf split",
            Self::InteriorSplit => "interior split",
            Self::RootSplit => "root split",
            Self::Coalesce => "coalesce",
            Self::LeafWrite => "leaf write",
            Self::ReplaySplit => "split during replay",
            Self::Replay => "replay",
            Self::Walk => "background walk",
            Self::ReplayBeside => "background replay",
            Self::JournalWrap => "journal wrap",
            Self::JournalReclaim => "journal reclaim",
            Self::PriorityChain => "priorities",
            Self::PriorityEntry => "priorities, entry not durable",
            Self::UuidTable => "uuid table",
            Self::Move => "move",
            Self::EvictionBesideRead => "eviction past a pinned bucket",
            Self::BackingAttached => "backing superblock: attached",
            Self::BackingDirty => "backing superblock: dirty",
            Self::BackingClean => "backing superblock: clean",
            Self::BackingStale => "backing superblock: stale",
            Self::BackingDetached => "backing superblock: detached",
            Self::BackingRecord => "backing superblock: other",
            Self::CacheFirstStart => "cache superblock: first start",
            Self::CacheStart => "cache superblock: start",
            Self::CacheRecord => "cache superblock: other",
            Self::Zeroing => "zeroing",
            Self::WriteOut => "write-out of a dirty range",
        }
    }
}

#[derive(Debug, Default)]
struct PhaseCount {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Counts of the phases of a set. Atomics that nothing waits on and that impose no ordering, as in
/// [`crate::OpenProgress`].
#[derive(Debug)]
pub struct Phases([PhaseCount; Phase::ALL.len()]);

impl Default for Phases {
    fn default() -> Self {
        Self(array::from_fn(|_| PhaseCount::default()))
    }
}

impl Phases {
    /// Number of times that the phase began.
    #[must_use]
    pub fn begun(&self, phase: Phase) -> u64 {
        self.0[phase as usize].begun.load(Ordering::Relaxed)
    }

    /// Returns whether the set is in the phase.
    #[must_use]
    pub fn is_inside(&self, phase: Phase) -> bool {
        self.begun(phase) > self.0[phase as usize].ended.load(Ordering::Relaxed)
    }

    /// The phases that the set is in, as a set of [bits](Phase::bit).
    #[must_use]
    pub fn inside(&self) -> u32 {
        Phase::ALL
            .into_iter()
            .filter(|phase| self.is_inside(*phase))
            .fold(0, |bits, phase| bits | phase.bit())
    }

    /// Begins the phase; it ends when the returned guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>, phase: Phase) -> PhaseGuard {
        self.0[phase as usize].begun.fetch_add(1, Ordering::Relaxed);
        PhaseGuard { phases: Arc::clone(self), phase }
    }
}

/// Guard of a phase, which ends when this is dropped.
#[must_use]
pub(crate) struct PhaseGuard {
    phases: Arc<Phases>,
    phase: Phase,
}

impl Drop for PhaseGuard {
    fn drop(&mut self) {
        self.phases.0[self.phase as usize].ended.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_its_own_place() {
        let phases = Arc::new(Phases::default());
        for phase in Phase::ALL {
            assert!(!phases.is_inside(phase));
            let inside = phases.begin(phase);
            assert!(phases.is_inside(phase) && phases.begun(phase) == 1, "{phase:?}");
            assert_eq!(phases.inside(), phase.bit());
            drop(inside);
            assert!(!phases.is_inside(phase) && phases.begun(phase) == 1, "{phase:?}");
        }
    }
}
