//! Tracks which numbers of a report are known. A structure that cannot be read hides its content,
//! so a sum without it is a lower bound, or means nothing at all.

use crate::Report;
use crate::damage::{BucketUse, Damage, DamageKind, Location, Structure};
use crate::tree::TreeWalk;
use crate::volumes::Volume;
use bcached_format::{Inode, Position};
use serde::Serialize;
use std::collections::BTreeSet;

/// Largest number of damaged ranges of the key space that are kept; if there are more, the whole
/// key space counts as damaged.
const STRETCHES_MAX: usize = 4096;

/// How far a number is known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Certainty {
    /// The number is exact.
    Known,
    /// The number is a lower bound.
    AtLeast,
    /// The number is unknown.
    Unknown,
}

/// A range of a volume's key space whose index is damaged: the cache's content there is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct HiddenRange {
    /// Inode of the volume.
    pub inode: u32,
    /// First sector.
    pub start: u64,
    /// End of the range; `None` for the end of the volume.
    pub end: Option<u64>,
}

/// The dirty data of a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct DirtyCount {
    /// How far the numbers are known.
    pub state: Certainty,
    /// Sectors that are newer than on their backing devices.
    pub sectors: u64,
    /// Sectors of flash-only volumes.
    pub alone_sectors: u64,
    /// Sectors under inodes that belong to no volume in the uuid table.
    pub nobodys_sectors: u64,
}

impl DirtyCount {
    /// Dirty data of a set that could not be read at all.
    pub const UNKNOWN: Self =
        Self { state: Certainty::Unknown, sectors: 0, alone_sectors: 0, nobodys_sectors: 0 };

    /// Dirty data of a set that was never started.
    pub(crate) const NONE: Self = Self { state: Certainty::Known, ..Self::UNKNOWN };
}

/// What findings leave unknown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unknowns {
    /// The journal, the generations or the root are damaged, or the whole cache is an older copy:
    /// every number is in doubt.
    all: bool,
    /// The uuid table is damaged: keys are counted, but their owners are unknown.
    names: bool,
    /// Slots of the table that differ from what was written: the same doubt, for these inodes only.
    slots: BTreeSet<u32>,
    /// Volumes may be missing from the table. Data under their inodes is counted as owned by no
    /// volume.
    volumes: bool,
    /// Ranges of the key space: after the first position, up to and including the second.
    keys: Vec<(Position, Position)>,
}

/// What one finding leaves unknown.
enum HiddenPart {
    Nothing,
    All,
    Names,
    Slot(u32),
    Volumes,
    Keys,
}

impl DamageKind {
    fn hides(&self, structure: Structure) -> HiddenPart {
        match self {
            Self::Unreadable(_) | Self::StaleMetadata { .. } => match structure {
                Structure::Journal | Structure::Priorities => HiddenPart::All,
                Structure::UuidTable => HiddenPart::Names,
                Structure::Node => HiddenPart::Keys,
                Structure::Superblock | Structure::Content => HiddenPart::Nothing,
            },
            Self::NoJournalEntries
            | Self::JournalEntry(_)
            | Self::JournalHidden { .. }
            | Self::JournalMissing { .. }
            | Self::JournalDuplicate { .. }
            | Self::JournalLastSeqFalls { .. }
            | Self::JournalKey { .. }
            | Self::BadRoot { .. }
            | Self::RootPosition { .. }
            | Self::PrioSet(_)
            | Self::PrioBucket { .. }
            | Self::PrioSeq { .. }
            | Self::OlderCache { .. } => HiddenPart::All,
            Self::BadUuidKey { .. }
            | Self::UuidTableSize { .. }
            | Self::UuidTable(_)
            | Self::DuplicateUuid { .. } => HiddenPart::Names,
            // The seal of each slot tells whether that slot is what was written.
            Self::UuidTableSum { .. } => HiddenPart::Volumes,
            Self::DoubtedSlot { number, .. } => HiddenPart::Slot(*number),
            Self::Node(_)
            | Self::NodeSetLost { .. }
            | Self::NodeShorter { .. }
            | Self::KeyOrder { .. }
            | Self::Key { .. }
            | Self::KeyOutsideNode { .. }
            | Self::TwoChildren { .. }
            | Self::ChildrenEnd { .. }
            | Self::BucketTwice { second: BucketUse::Node, .. } => HiddenPart::Keys,
            // This includes an older copy of a backing device: what the cache holds for it is
            // counted all the same.
            _ => HiddenPart::Nothing,
        }
    }
}

impl Damage {
    /// Returns true if the uuid table is damaged in the slot of volume `inode`, so that the owner
    /// of that inode is unknown.
    #[must_use]
    pub fn hides_name_of(&self, inode: u32) -> bool {
        match self.kind.hides(self.place.structure) {
            HiddenPart::Names => true,
            HiddenPart::Slot(slot) => slot == inode,
            _ => false,
        }
    }

    /// Returns true if a node of the index is damaged, which hides the cache's content for a range
    /// of a volume: [`Report::hidden`].
    #[must_use]
    pub fn hides_keys(&self) -> bool {
        self.place.node.is_some() && matches!(self.kind.hides(self.place.structure), HiddenPart::Keys)
    }
}

impl Unknowns {
    pub fn add(&mut self, place: &Location, kind: &DamageKind) {
        match (kind.hides(place.structure), place.node) {
            (HiddenPart::Nothing, _) => {}
            (HiddenPart::All, _) | (HiddenPart::Keys, None) => self.all = true,
            (HiddenPart::Names, _) => self.names = true,
            (HiddenPart::Slot(slot), _) => _ = self.slots.insert(slot),
            (HiddenPart::Volumes, _) => self.volumes = true,
            (HiddenPart::Keys, Some(node)) => {
                // If only the last children of a node are missing, the others were walked.
                let low = match kind {
                    DamageKind::ChildrenEnd { found: Some(found) } if *found < node.high => *found,
                    _ => node.low,
                };
                self.add_stretch(low, node.high);
            }
        }
    }

    /// Returns true if the owner of the volume's inode is unknown.
    fn hide_name_of(&self, volume: &Volume) -> bool {
        self.names || self.slots.contains(&volume.inode)
    }

    fn add_stretch(&mut self, low: Position, high: Position) {
        if self.keys.last() == Some(&(low, high)) {
            return;
        }
        if self.keys.len() == STRETCHES_MAX {
            self.all = true;
        } else {
            self.keys.push((low, high));
        }
    }

    /// Returns the damaged ranges, including the nodes that the walk could not read, in order and
    /// merged.
    fn stretches(&self, tree: &TreeWalk) -> Vec<(Position, Position)> {
        let lost = tree.lost.iter().map(|node| (node.low, node.high));
        let mut all: Vec<_> = self.keys.iter().copied().chain(lost).collect();
        all.sort_unstable();
        let mut joined: Vec<(Position, Position)> = Vec::new();
        for (low, high) in all {
            match joined.last_mut() {
                Some((_, end)) if low <= *end => *end = (*end).max(high),
                _ => joined.push((low, high)),
            }
        }
        joined
    }
}

/// Returns the part of the volume that lies after `low` and up to `high`.
fn part_of(volume: &Volume, (low, high): (Position, Position)) -> Option<HiddenRange> {
    let inode = Inode(volume.inode);
    let start = if low.inode < inode { 0 } else { low.offset };
    let end = (high.inode == inode).then_some(high.offset);
    let is_before = |end: Option<u64>| end.is_none_or(|end| start < end);
    let is_there = low.inode <= inode && high.inode >= inode && is_before(end) && is_before(volume.end);
    is_there.then_some(HiddenRange { inode: inode.0, start, end })
}

impl HiddenRange {
    /// Returns true if the range is the whole volume, as far as its size is known.
    #[must_use]
    pub fn is_all_of(&self, volume: &Volume) -> bool {
        self.start <= volume.start && self.end.is_none_or(|end| volume.end.is_some_and(|all| end >= all))
    }
}

/// Determines how far the numbers of a report are known. `tree` is the tree as walked, if it was
/// walked.
pub(crate) fn judge(report: &mut Report, doubts: &Unknowns, tree: Option<(&TreeWalk, u64)>) {
    let stretches = tree.map(|(tree, _)| doubts.stretches(tree)).unwrap_or_default();
    let mut hidden = Vec::new();
    for volume in &mut report.volumes {
        let its: Vec<_> = stretches.iter().filter_map(|stretch| part_of(volume, *stretch)).collect();
        volume.dirty_state = match () {
            () if tree.is_none() || doubts.all || doubts.hide_name_of(volume) => Certainty::Unknown,
            () if its.is_empty() => Certainty::Known,
            () if volume.dirty_sectors == 0 || its.iter().any(|part| part.is_all_of(volume)) => {
                Certainty::Unknown
            }
            () => Certainty::AtLeast,
        };
        if !volume.invalidated {
            hidden.extend(its);
        }
    }
    report.hidden = hidden;
    let counted = || report.volumes.iter().filter(|volume| !volume.invalidated);
    let named = || counted().filter(|volume| !doubts.hide_name_of(volume));
    let sum = |alone| named().filter(|one| one.flash_only == alone).map(|one| one.dirty_sectors).sum();
    let (sectors, alone_sectors): (u64, u64) = (sum(false), sum(true));
    // The keys are there, but the table's owners of their inodes cannot be trusted.
    let unnamed = counted().filter(|volume| doubts.hide_name_of(volume)).map(|one| one.dirty_sectors);
    let nobodys_sectors = tree.map_or(0, |(_, nobodys)| nobodys) + unnamed.sum::<u64>();
    let worst = counted().map(|volume| volume.dirty_state).max().unwrap_or(Certainty::Known);
    // If the table has no volumes, only keys without an owner can be in the damaged part.
    let is_incomplete = doubts.volumes || counted().next().is_none();
    let is_doubted = doubts.names || !doubts.slots.is_empty();
    let may_hide = is_doubted || (!stretches.is_empty() && is_incomplete);
    let state = match () {
        () if tree.is_none() || doubts.all => Certainty::Unknown,
        () if worst == Certainty::Known && !may_hide && nobodys_sectors == 0 => Certainty::Known,
        () if sectors + alone_sectors == 0 => Certainty::Unknown,
        () => Certainty::AtLeast,
    };
    report.dirty = DirtyCount { state, sectors, alone_sectors, nobodys_sectors };
}
