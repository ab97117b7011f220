//! Why the dirty data of a volume, or a part of it, cannot be written back: for those who look. It stands until
//! write-back has come past the place again without meeting it.

use crate::error::Error;
use crate::request::Target;
use crate::state::State;

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
}

impl Round {
    /// The batch has looked for dirty data in `[start, end)`.
    pub const fn passes(&mut self, start: u64, end: u64) {
        self.passed = [self.passed[1], (start, end)];
    }

    /// The batch has met trouble.
    pub const fn has_met(&self) -> bool {
        self.met.is_some()
    }

    /// The batch has met trouble in `[start, end)`.
    pub fn meets(&mut self, start: u64, end: u64, error: Error) {
        self.met.get_or_insert((start, end, error));
    }

    /// At the end of the batch: what the volume has to show from now on. Returns what was met.
    pub fn shows(self, s: &mut State, target: &Target) -> Option<Error> {
        let nothing_dirty = target.inode.is_none_or(|inode| s.dirty.of(inode) == 0);
        let volume = s.volumes.get_mut(target.id)?;
        if let Some((start, end, error)) = self.met {
            let sector = start.saturating_sub(target.data_offset);
            let shown = WritebackTrouble { sector, sectors: end - start, error: error.clone() };
            volume.writeback_trouble = Some(shown);
            return Some(error);
        }
        let past = volume.writeback_trouble.as_ref().is_some_and(|trouble| {
            let at = trouble.sector + target.data_offset;
            self.passed.iter().any(|(start, end)| (*start..*end).contains(&at))
        });
        if past || nothing_dirty {
            volume.writeback_trouble = None;
        }
        None
    }
}
