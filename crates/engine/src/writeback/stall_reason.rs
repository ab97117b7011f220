//! Records why the dirty data of a volume, or a part of it, cannot be written back, for status
//! output. Errors of specific extents are on the list of [`failed_extents`](super::failed_extents).
//! All others, a leaf that cannot be read or a flush that fails, are retried by each sweep. They
//! are shown here until write-back has passed the same location again without an error.

use crate::error::Error;
use crate::request::Target;
use crate::state::State;
use crate::volume::Volume;

/// The error that keeps dirty data from being written back.
#[derive(Clone, Debug, PartialEq)]
pub struct WritebackError {
    /// First sector of the volume where it occurred.
    pub sector: u64,
    /// Number of sectors affected, as far as known.
    pub sectors: u64,
    /// The error.
    pub error: Error,
}

/// The ranges that one batch has passed, and its first error. Sectors of the key space.
#[derive(Default)]
pub struct BatchProgress {
    passed: [(u64, u64); 2],
    met: Option<(u64, u64, Error)>,
    barred: Option<Error>,
}

impl BatchProgress {
    /// Records that the batch has looked for dirty data in `[start, end)`.
    pub const fn passes(&mut self, start: u64, end: u64) {
        self.passed = [self.passed[1], (start, end)];
    }

    /// Returns true if the batch has met an error that is not on the list of failed extents.
    pub const fn has_met(&self) -> bool {
        self.met.is_some()
    }

    /// Records that the batch has left out failed extents, or has added some to the list.
    pub fn leaves(&mut self, error: Error) {
        self.barred.get_or_insert(error);
    }

    /// Records that the batch has met an error in `[start, end)`.
    pub fn meets(&mut self, start: u64, end: u64, error: Error) {
        self.met.get_or_insert((start, end, error));
    }

    /// Ends the batch, which turned `sectors` sectors clean: updates what the volume shows from now
    /// on. Returns the error that was met.
    pub fn shows(self, s: &mut State, target: &Target, sectors: u64) -> Option<Error> {
        let dirty = target.inode.map_or(0, |inode| s.dirty.of(inode));
        let volume = s.volumes.get_mut(target.id)?;
        if dirty == 0 {
            volume.failed_extents.clear();
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
                Some(WritebackError { sector, sectors: end - start, error: error.clone() });
        }
        let met = self.met.map(|(_, _, error)| error).or(self.barred);
        volume.stands_still = met.is_some() && (sectors == 0 || dirty <= volume.failed_extents.sectors());
        met
    }
}

impl Volume {
    /// The error that keeps dirty data from being written back, if any: that of the first failed
    /// extent, unless there is a more severe one.
    #[must_use]
    pub fn shown_trouble(&self) -> Option<WritebackError> {
        let of_place = |(start, end, error): (u64, u64, &Error)| WritebackError {
            sector: start.saturating_sub(self.data_offset),
            sectors: end - start,
            error: error.clone(),
        };
        self.writeback_trouble.clone().or_else(|| self.failed_extents.first().map(of_place))
    }
}
