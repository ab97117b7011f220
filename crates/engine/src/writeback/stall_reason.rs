//! Why the dirty data of a volume, or a part of it, cannot be written back: for those who look. What has to do with a place of the
//! data stands on the list of [`failed_extents`](super::places). The rest, a leaf that cannot be read or a flush that fails, is tried again by
//! each sweep, and stands here until write-back has come past it again without meeting it.

use crate::error::Error;
use crate::request::Target;
use crate::state::State;
use crate::volume::Volume;

/// What keeps dirty data from being written back.
#[derive(Clone, Debug, PartialEq)]
pub struct WritebackTrouble {
    /// First sector of the volume where it was met.
    pub sector: u64,
    /// Sectors that it concerns, as far as is known.
    pub sectors: u64,
    /// What was met there.
    pub error: Error,
}

/// What one batch has come past, and the first trouble that it met. Sectors of the key space.
#[derive(Default)]
pub struct Round {
    passed: [(u64, u64); 2],
    met: Option<(u64, u64, Error)>,
    barred: Option<Error>,
}

impl Round {
    /// The batch has looked for dirty data in `[start, end)`.
    pub const fn passes(&mut self, start: u64, end: u64) {
        self.passed = [self.passed[1], (start, end)];
    }

    /// The batch has met trouble that is on no list.
    pub const fn has_met(&self) -> bool {
        self.met.is_some()
    }

    /// The batch has left places out, or has put some on the list.
    pub fn leaves(&mut self, error: Error) {
        self.barred.get_or_insert(error);
    }

    /// The batch has met trouble in `[start, end)`.
    pub fn meets(&mut self, start: u64, end: u64, error: Error) {
        self.met.get_or_insert((start, end, error));
    }

    /// At the end of the batch, which has turned so many sectors clean: what the volume has to show from now on. Returns what was
    /// met.
    pub fn shows(self, s: &mut State, target: &Target, sectors: u64) -> Option<Error> {
        let dirty = target.inode.map_or(0, |inode| s.dirty.of(inode));
        let volume = s.volumes.get_mut(target.id)?;
        if dirty == 0 {
            volume.places.clear();
        }
        let past = volume.writeback_trouble.as_ref().is_some_and(|trouble| {
            let at = trouble.sector + target.data_offset;
            self.passed.iter().any(|(start, end)| (*start..*end).contains(&at))
        });
        if past || dirty == 0 {
            volume.writeback_trouble = None;
        }
        if let Some((start, end, error)) = &self.met {
            let sector = start.saturating_sub(target.data_offset);
            volume.writeback_trouble =
                Some(WritebackTrouble { sector, sectors: end - start, error: error.clone() });
        }
        let met = self.met.map(|(_, _, error)| error).or(self.barred);
        volume.stands_still = met.is_some() && (sectors == 0 || dirty <= volume.places.sectors());
        met
    }
}

impl Volume {
    /// What keeps dirty data from being written back, if something does: the first place of the list, unless there is worse.
    #[must_use]
    pub fn shown_trouble(&self) -> Option<WritebackTrouble> {
        let of_place = |(start, end, error): (u64, u64, &Error)| WritebackTrouble {
            sector: start.saturating_sub(self.data_offset),
            sectors: end - start,
            error: error.clone(),
        };
        self.writeback_trouble.clone().or_else(|| self.places.first().map(of_place))
    }
}
