//! Selects crash points that are unlike those before, by what the set is in the middle of, and by
//! which operation has just been made on which device. Most points of a run are alike, with data in
//! flight. If every n-th point were taken, rare situations would rarely be crashed.

use crate::digest::mix;
use crate::disk::OpKind;
use crate::driver::OpView;
use std::collections::BTreeMap;

/// What similar points have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PointClass {
    /// Number of crashes before.
    level: usize,
    /// See [`bcached_engine::Phases::inside`].
    phases: u32,
    place: OpTarget,
    kind: OpKind,
    fua: bool,
    completed: bool,
}

/// The target of an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum OpTarget {
    Backing,
    /// The start of the cache device, with its superblock and its journal; also its flushes.
    CacheFront,
    Cache,
}

impl PointClass {
    /// Returns the situation of a point that `view` has made, after `level` crashes, in the middle
    /// of `phases`, with a cache of `cache_sectors` sectors.
    pub const fn of(view: &OpView, level: usize, phases: u32, cache_sectors: u64) -> Self {
        let &OpView { disk, kind, ref sectors, fua, completed, .. } = view;
        let place = match disk.0 {
            // The journal takes the first 128th or a little more of the device.
            0 if sectors.start < cache_sectors / 64 => OpTarget::CacheFront,
            0 => OpTarget::Cache,
            _ => OpTarget::Backing,
        };
        Self { level, phases, place, kind, fua, completed }
    }
}

/// Number of points judged in each situation.
#[derive(Default, Debug)]
pub struct PointClassCounts(BTreeMap<PointClass, u64>);

impl PointClassCounts {
    /// Returns whether a point, identified by `number`, is to be judged. If `few` is 0, none is.
    /// Otherwise all points of a situation are picked at first, half of them once `few` have been
    /// judged, and a third once twice as many have. So for ten thousand times as many points, a
    /// hundred times as many are picked.
    pub fn picks(&mut self, few: u64, number: u64, situation: PointClass) -> bool {
        if few == 0 {
            return false;
        }
        let judged = self.0.entry(situation).or_default();
        let picked = mix(&[number, 9]) % (few + *judged) < few;
        *judged += u64::from(picked);
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_env::DiskId;

    #[test]
    fn what_is_alike_is_judged_less_and_less() {
        let mut novelty = PointClassCounts::default();
        let view = |kind| OpView {
            disk: DiskId(1),
            kind,
            sectors: 0..8,
            fua: false,
            completed: true,
            failed: false,
        };
        let count = |novelty: &mut PointClassCounts, kind, few, points: std::ops::Range<u64>| {
            let situation = PointClass::of(&view(kind), 0, 0, 1000);
            points.filter(|point| novelty.picks(few, *point, situation)).count()
        };
        assert_eq!(count(&mut novelty, OpKind::Write, 0, 0..1000), 0, "none is asked for");
        let first = count(&mut novelty, OpKind::Write, 4, 0..1000);
        let later = count(&mut novelty, OpKind::Write, 4, 1000..2000);
        assert!((60..120).contains(&first) && later < first * 2 / 3, "{first}, then {later}");
        let other = count(&mut novelty, OpKind::Read, 4, 0..1000);
        assert!(other > later, "another kind has its own count: {other}");
    }
}
