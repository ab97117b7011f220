//! What a set is in the middle of: the stretches of work whose steps a crash may separate. The engine only says where they
//! begin and end; who judges a crash learns from this what it came in the middle of, and whether it ever came there.

use alloc::sync::Arc;
use core::array;
use core::sync::atomic::{AtomicU64, Ordering};

/// A stretch of work of several steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A node is written anew without what is dead in it, and its parent is told.
    Rewrite,
    /// A leaf becomes two, and the parent is told.
    LeafSplit,
    /// A node above the leaves becomes two, and the parent is told.
    InteriorSplit,
    /// The root becomes two under a new one.
    RootSplit,
    /// Two sparse nodes become one, and the parent is told.
    Coalesce,
    /// Keys are appended to a leaf.
    LeafWrite,
    /// Any of the rewrites and splits while the journal is replayed.
    ReplaySplit,
    /// Keys of journal entries are put into the tree at a start.
    Replay,
    /// The tree is walked beside requests.
    Walk,
    /// Keys of journal entries are put into the tree beside requests.
    ReplayBeside,
    /// A journal entry is written to the first bucket again.
    JournalWrap,
    /// A journal entry is written that lets older ones go.
    JournalReclaim,
    /// Generations and priorities are written.
    PriorityChain,
    /// They are written, and the journal entry that names them is not durable.
    PriorityEntry,
    /// The table of volumes is written, and the entry that names it.
    UuidTable,
    /// Dirty data is copied to another bucket, and its key replaced.
    Move,
    /// Buckets are being taken from their data while a read of another that would have been next is in flight.
    EvictionBesideRead,
    /// A backing device is being told that it belongs to this set.
    BackingAttached,
    /// A backing device is being marked dirty.
    BackingDirty,
    /// A backing device is being marked clean.
    BackingClean,
    /// A backing device is being told that the cache's copies are not to be used any more.
    BackingStale,
    /// A backing device is being told that it has no cache any more.
    BackingDetached,
    /// The superblock of a backing device is written for another reason, such as a new mode.
    BackingRecord,
    /// The superblock of the cache is written at the first start of a set.
    CacheFirstStart,
    /// The superblock of the cache is written at a later start.
    CacheStart,
    /// The superblock of the cache is written because a setting that it keeps has changed.
    CacheRecord,
    /// A range of a backing device is made zero, and what the cache holds of it gives way.
    Zeroing,
    /// A range with dirty data is written to its backing device, and what the cache holds of it gives way.
    WriteOut,
}

impl Phase {
    /// All of them.
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

    /// Its bit in a set of phases.
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// In words, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rewrite => "node rewrite",
            Self::LeafSplit => "leaf split",
            Self::InteriorSplit => "interior split",
            Self::RootSplit => "root split",
            Self::Coalesce => "coalesce",
            Self::LeafWrite => "leaf write",
            Self::ReplaySplit => "split in a replay",
            Self::Replay => "replay",
            Self::Walk => "walk beside requests",
            Self::ReplayBeside => "replay beside requests",
            Self::JournalWrap => "journal wrap",
            Self::JournalReclaim => "journal reclaim",
            Self::PriorityChain => "priorities",
            Self::PriorityEntry => "priorities, before their entry",
            Self::UuidTable => "uuid table",
            Self::Move => "move",
            Self::EvictionBesideRead => "eviction beside a read",
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
            Self::WriteOut => "write past dirty data",
        }
    }
}

#[derive(Debug, Default)]
struct Count {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Counts of the phases of a set. Atomics that nobody waits on and that order nothing, as in [`crate::Opening`].
#[derive(Debug)]
pub struct Phases([Count; Phase::ALL.len()]);

impl Default for Phases {
    fn default() -> Self {
        Self(array::from_fn(|_| Count::default()))
    }
}

impl Phases {
    /// How often it began.
    #[must_use]
    pub fn begun(&self, phase: Phase) -> u64 {
        self.0[phase as usize].begun.load(Ordering::Relaxed)
    }

    /// Whether the set is in the middle of it.
    #[must_use]
    pub fn is_inside(&self, phase: Phase) -> bool {
        self.begun(phase) > self.0[phase as usize].ended.load(Ordering::Relaxed)
    }

    /// Those that the set is in the middle of, a [bit](Phase::bit) for each.
    #[must_use]
    pub fn inside(&self) -> u32 {
        Phase::ALL
            .into_iter()
            .filter(|phase| self.is_inside(*phase))
            .fold(0, |bits, phase| bits | phase.bit())
    }

    /// It begins; it ends with what is returned.
    pub(crate) fn begin(self: &Arc<Self>, phase: Phase) -> Inside {
        self.0[phase as usize].begun.fetch_add(1, Ordering::Relaxed);
        Inside { phases: Arc::clone(self), phase }
    }
}

/// A phase that goes on until this is dropped.
#[must_use]
pub(crate) struct Inside {
    phases: Arc<Phases>,
    phase: Phase,
}

impl Drop for Inside {
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
