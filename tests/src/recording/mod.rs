//! Records how a guest uses its devices, and derives many power cuts from one recorded run.
//!
//! `uml/recorder.c` records every write and flush of all images, in the one order in which they
//! were done. A power cut may come after any of them. What the devices then hold is not decided by
//! the recorded run but by the fault model ([`cut`]): everything that a flush covered is there, and
//! any part of the rest. The clients' requests are in the same order, since they are written to an
//! image, too ([`witness`]). So at each cut, the simulator's oracle knows what every sector may be
//! read as ([`judge`]).
//!
//! Why not dm-log-writes: it keeps one log per device. Two logs have no common clock. One log under
//! both devices takes a flush of either for a flush of both, which hides the errors to be found.
//! Below the guest, there is one order, a flush concerns one image, and the kernel under test runs
//! on plain disks. Like every disk of User-Mode Linux, they have no FUA: the guest's kernel turns
//! it into a write and a flush.
//!
//! | module | duty |
//! |---|---|
//! | [`witness`] | the clients' requests, as sectors of an image |
//! | [`client`] | the program in the guest: random requests, several at once, all witnessed |
//! | [`cut`] | the devices' content after a power cut |
//! | [`judge`] | what may be read after it, and what is wrong with what was read |
//! | [`writer`] | a run to record: the kernel's bcache or our daemon in a guest |
//! | [`trial`] | a run, cuts of it, and the result of each |
//! | [`reader`] | opening the images of a cut with the kernel or our daemon |

pub mod client;
pub mod cut;
pub mod judge;
pub mod reader;
pub mod trial;
pub mod witness;
pub mod writer;

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use crate::guest::GuestError;

/// Size of the header in front of a write's data, in bytes (`struct record` of `recorder.c`).
const HEADER_BYTES: usize = 32;

/// An action on an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// A write.
    Write {
        /// Where, in bytes.
        offset: u64,
        /// The data, as a range of the recording.
        data: Range<usize>,
    },
    /// A flush.
    Flush {
        /// It covers the writes up to and including this batch: they had been acknowledged when it
        /// was submitted.
        covers: u64,
    },
}

/// An action on one image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Operation {
    /// The image, by its index among the job's images.
    pub image: usize,
    /// Operations with the same number were all submitted before any of them was acknowledged.
    pub batch: u64,
    /// What was done.
    pub action: Action,
}

/// All operations on a job's images, in order.
#[derive(Debug)]
pub struct Recording {
    bytes: Vec<u8>,
    /// The operations.
    pub operations: Vec<Operation>,
}

/// Why a recording is invalid.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file could not be read.
    #[error("read the recording")]
    Read(#[from] io::Error),
    /// It contains an operation that none of our programs submits.
    #[error("the recording has an operation of kind {kind} at byte {at}")]
    Kind {
        /// The kind as recorded; 3 is a discard.
        kind: u32,
        /// The position in the recording, in bytes.
        at: usize,
    },
    /// The guest failed, or a client in it.
    #[error("record a run: {0:?}")]
    Guest(#[from] GuestError),
    /// The clients' events have a gap or make no sense.
    #[error("the clients' story: {0}")]
    Story(String),
}

impl Recording {
    /// Reads a recording. An operation that was cut off at its end by the guest's death was not
    /// done.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn read(path: &Path) -> Result<Self, RecordingError> {
        Self::parse(fs::read(path)?)
    }

    fn parse(bytes: Vec<u8>) -> Result<Self, RecordingError> {
        let mut operations = Vec::new();
        let mut at = 0;
        while let Some(header) = bytes.get(at..at + HEADER_BYTES) {
            let half = |from: usize| u32::from_le_bytes(header[from..from + 4].try_into().expect("4 bytes"));
            let word = |from: usize| u64::from_le_bytes(header[from..from + 8].try_into().expect("8 bytes"));
            let (kind, image) = (half(0), half(4) as usize);
            let (offset, length, batch) = (word(8), word(16), word(24));
            let start = at + HEADER_BYTES;
            let action = match kind {
                1 => {
                    let end = usize::try_from(length).ok().and_then(|length| start.checked_add(length));
                    let Some(end) = end.filter(|end| *end <= bytes.len()) else { break };
                    at = end;
                    Action::Write { offset, data: start..end }
                }
                2 => {
                    at = start;
                    Action::Flush { covers: offset }
                }
                _ => return Err(RecordingError::Kind { kind, at }),
            };
            operations.push(Operation { image, batch, action });
        }
        Ok(Self { bytes, operations })
    }

    /// Returns the data of a write.
    #[must_use]
    pub fn data(&self, data: &Range<usize>) -> &[u8] {
        &self.bytes[data.clone()]
    }

    /// Returns the writes to one image: index, offset in bytes, and data of each.
    pub fn writes(&self, image: usize) -> impl Iterator<Item = (usize, u64, &[u8])> {
        self.operations.iter().enumerate().filter(move |(_, operation)| operation.image == image).filter_map(
            |(place, operation)| match &operation.action {
                Action::Write { offset, data } => Some((place, *offset, self.data(data))),
                Action::Flush { .. } => None,
            },
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a record as the recorder writes it.
    pub(crate) fn record(kind: u32, image: u32, batch: u64, offset: u64, data: &[u8]) -> Vec<u8> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(image.to_le_bytes());
        for word in [offset, data.len() as u64, batch] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(data);
        bytes
    }

    /// Returns a recording of these records.
    pub(crate) fn recording(records: &[Vec<u8>]) -> Recording {
        Recording::parse(records.concat()).expect("whole records")
    }

    #[test]
    fn a_recording_is_its_records_up_to_the_torn_one() {
        let mut records =
            vec![record(1, 0, 7, 512, b"abc"), record(2, 1, 7, 6, b""), record(1, 1, 8, 0, b"xyz")];
        let whole = recording(&records);
        assert_eq!(whole.operations.len(), 3);
        assert_eq!(
            whole.operations[1],
            Operation { image: 1, batch: 7, action: Action::Flush { covers: 6 } }
        );
        assert_eq!(whole.writes(0).collect::<Vec<_>>(), [(0, 512, &b"abc"[..])]);
        let last = records.last_mut().expect("three");
        last.pop();
        assert_eq!(recording(&records).operations.len(), 2);
    }

    #[test]
    fn a_discard_is_refused() {
        let error = Recording::parse(record(3, 0, 1, 0, b"")).expect_err("nobody discards");
        assert!(matches!(error, RecordingError::Kind { kind: 3, at: 0 }));
    }
}
