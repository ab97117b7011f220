//! The clients' requests and their completions, written to an image of their own.
//!
//! The image's device is served by the same thread as the others, so its writes are in the
//! recording where they happened. The beginning of a request comes before anything that the request
//! causes, its end after the reply. A cut between a reply and its record in the witness treats the
//! request as unacknowledged. That favours the system under test, by one request.
//!
//! An event is one sector of eight-byte little-endian words:
//!
//! | word | content |
//! |---|---|
//! | 0 | a magic number |
//! | 1 | the event's index in the sequence, from 0 |
//! | 2 | 1 write, 2 write with FUA, 3 read, 4 flush; 5 succeeded, 6 failed |
//! | 3 | the request's number, as the oracle counts |
//! | 4, 5 | first sector and number of sectors; zero for a flush and for an end |

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use bcached_sim::oracle::{OpId, Oracle};

use super::{Recording, RecordingError};
use crate::workload::SECTOR_BYTES;

const MAGIC: u64 = 0x7769_746e_6573_7321;
/// Number of sectors of the image, which are used in turn: only the recording is ever read.
const SECTORS: u64 = 1024;

/// Size of the witness image, in bytes.
pub const IMAGE_BYTES: u64 = SECTORS * SECTOR_BYTES as u64;

/// A client's request, in sectors of the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Writes the stamps of the request's number.
    Write {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
        /// The write is durable when acknowledged.
        fua: bool,
    },
    /// Reads.
    Read {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
    },
    /// Flushes.
    Flush,
}

impl Request {
    /// Tells the oracle that the request begins.
    pub fn begin(&self, oracle: &mut Oracle) -> OpId {
        match *self {
            Self::Write { sector, sectors, fua } => oracle.begin_write(0, sector..sector + sectors, fua),
            Self::Read { sector, sectors } => oracle.begin_read(0, sector..sector + sectors),
            Self::Flush => oracle.begin_flush(0),
        }
    }
}

/// A step of the sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request is about to be submitted.
    Begin {
        /// Its number.
        number: u64,
        /// The request.
        request: Request,
    },
    /// A request has been answered.
    End {
        /// Its number.
        number: u64,
        /// Whether it succeeded.
        success: bool,
    },
}

impl Event {
    fn sector(&self, place: u64) -> [u8; SECTOR_BYTES] {
        let (kind, number, sector, sectors) = match *self {
            Self::Begin { number, request: Request::Write { sector, sectors, fua } } => {
                (1 + u64::from(fua), number, sector, sectors)
            }
            Self::Begin { number, request: Request::Read { sector, sectors } } => {
                (3, number, sector, sectors)
            }
            Self::Begin { number, request: Request::Flush } => (4, number, 0, 0),
            Self::End { number, success } => (6 - u64::from(success), number, 0, 0),
        };
        let mut bytes = [0; SECTOR_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip([MAGIC, place, kind, number, sector, sectors]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a sector into an event and its index in the sequence.
    fn parse(bytes: &[u8]) -> Option<(u64, Self)> {
        let word = |index: usize| {
            let bytes = bytes.get(index * 8..index * 8 + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
        };
        let (place, number, sector, sectors) = (word(1)?, word(3)?, word(4)?, word(5)?);
        let request = match (word(0)?, word(2)?) {
            (MAGIC, kind @ (1 | 2)) => Request::Write { sector, sectors, fua: kind == 2 },
            (MAGIC, 3) => Request::Read { sector, sectors },
            (MAGIC, 4) => Request::Flush,
            (MAGIC, kind @ (5 | 6)) => return Some((place, Self::End { number, success: kind == 5 })),
            _ => return None,
        };
        Some((place, Self::Begin { number, request }))
    }
}

/// Records the events of the program in the guest.
#[derive(Debug)]
pub struct Witness {
    device: File,
    place: u64,
}

/// A sector, aligned for direct I/O.
#[repr(align(4096))]
struct Aligned([u8; SECTOR_BYTES]);

impl Witness {
    /// Begins a sequence of events on a device that was opened for direct I/O.
    #[must_use]
    pub const fn new(device: File) -> Self {
        Self { device, place: 0 }
    }

    /// Records an event. When this returns, the event is in the recording.
    ///
    /// # Errors
    /// The device's error.
    pub fn tell(&mut self, event: &Event) -> io::Result<()> {
        let sector = Aligned(event.sector(self.place));
        self.device.write_all_at(&sector.0, self.place % SECTORS * SECTOR_BYTES as u64)?;
        self.place += 1;
        Ok(())
    }
}

/// Returns the sequence of events in a recording: each event with the index of its write among the
/// operations.
///
/// # Errors
/// [`RecordingError::Story`] if the events do not form a sequence from its beginning without a gap.
pub fn story(recording: &Recording, image: usize) -> Result<Vec<(usize, Event)>, RecordingError> {
    let mut story = Vec::new();
    for (place, _, bytes) in recording.writes(image) {
        let event = Event::parse(bytes);
        match event {
            Some((number, event)) if number == story.len() as u64 => story.push((place, event)),
            other => {
                let wanted = story.len();
                return Err(RecordingError::Story(format!("{other:?} where event {wanted} was expected")));
            }
        }
    }
    Ok(story)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{record, recording};
    use super::*;

    const EVENTS: [Event; 6] = [
        Event::Begin { number: 1, request: Request::Write { sector: 8, sectors: 3, fua: false } },
        Event::Begin { number: 2, request: Request::Write { sector: 9, sectors: 1, fua: true } },
        Event::Begin { number: 3, request: Request::Read { sector: 0, sectors: 64 } },
        Event::Begin { number: 4, request: Request::Flush },
        Event::End { number: 2, success: true },
        Event::End { number: 1, success: false },
    ];

    fn records() -> Vec<Vec<u8>> {
        let writes = (0..).zip(EVENTS).map(|(place, event)| record(1, 2, 0, 0, &event.sector(place)));
        writes.flat_map(|event| [record(2, 0, 0, 0, b""), event]).collect()
    }

    #[test]
    fn a_story_comes_back_as_it_was_told() {
        let found = story(&recording(&records()), 2).expect("a whole story");
        let wanted: Vec<_> = EVENTS.iter().enumerate().map(|(n, event)| (2 * n + 1, *event)).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_gap_and_foreign_sectors_are_noticed() {
        let mut gap = records();
        gap.remove(3);
        assert!(story(&recording(&gap), 2).is_err());
        let mut foreign = records();
        foreign.push(record(1, 2, 0, 0, &[0; SECTOR_BYTES]));
        assert!(story(&recording(&foreign), 2).is_err());
    }
}
