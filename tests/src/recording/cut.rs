//! The content of devices after a power cut at some place of a recording.
//!
//! The fault model is the simulator's: each device has a volatile write cache. A write is durable
//! once a flush that was submitted after the write's acknowledgement has completed. Every other
//! write may have survived or not, whole or sector by sector. Writes of the batch in which the cut
//! falls were in flight: they may have landed, too.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::{Action, Recording};
use crate::workload::{Random, SECTOR_BYTES};

/// Index of the cache device's image: the images of a set come first among a job's images.
pub const CACHE: usize = 0;
/// Index of the backing device's image.
pub const BACKING: usize = 1;
/// Unit in which images are written. Units of zeroes stay holes.
const PIECE_BYTES: usize = 4096;

/// Which unflushed writes survive a cut.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Survivors {
    /// None.
    Nothing,
    /// All.
    Everything,
    /// All writes to the cache device.
    Cache,
    /// All writes to the backing device.
    Backing,
    /// Some writes, each whole, chosen by this seed.
    Some(u64),
    /// Some sectors of each write, chosen by this seed.
    Torn(u64),
}

impl Survivors {
    /// Returns one of each kind, with random seeds.
    #[must_use]
    pub fn all(random: &mut Random) -> [Self; 6] {
        let (some, torn) = (Self::Some(random.next()), Self::Torn(random.next()));
        [Self::Nothing, Self::Everything, Self::Cache, Self::Backing, some, torn]
    }

    /// Returns the name of the kind, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Everything => "everything",
            Self::Cache => "cache only",
            Self::Backing => "backing only",
            Self::Some(_) => "some writes",
            Self::Torn(_) => "some sectors",
        }
    }
}

/// Devices that follow a recording.
#[derive(Debug)]
pub struct Disks<'a> {
    recording: &'a Recording,
    /// All operations before this index have been done.
    position: usize,
    disks: Vec<Disk>,
    /// An operation that the devices acknowledge but never do.
    forgotten: Option<usize>,
}

#[derive(Debug)]
struct Disk {
    durable: Vec<u8>,
    /// Writes that no flush covers yet, by their index in the recording.
    volatile: Vec<usize>,
}

impl<'a> Disks<'a> {
    /// Creates devices that had these contents before the recording began. Images beyond these are
    /// not followed.
    #[must_use]
    pub fn new(recording: &'a Recording, contents: &[Vec<u8>]) -> Self {
        let disk = |content: &Vec<u8>| Disk { durable: content.clone(), volatile: Vec::new() };
        Self { recording, position: 0, disks: contents.iter().map(disk).collect(), forgotten: None }
    }

    /// Simulates a faulty device, which a judge must detect: the operation at index `place` is
    /// acknowledged but never done.
    #[must_use]
    pub fn forgetting(self, place: usize) -> Self {
        Self { forgotten: Some(place), ..self }
    }

    /// Does the operations up to `position`, exclusive.
    pub fn advance(&mut self, position: usize) {
        assert!(self.position <= position, "a recording is followed forwards");
        let operations = &self.recording.operations;
        for (place, operation) in operations.iter().enumerate().take(position).skip(self.position) {
            let Some(disk) = self.disks.get_mut(operation.image) else { continue };
            match operation.action {
                _ if self.forgotten == Some(place) => {}
                Action::Write { .. } => disk.volatile.push(place),
                Action::Flush { covers } => disk.flush(self.recording, covers),
            }
        }
        self.position = position;
    }

    /// Writes to `path` what one device holds if the power is cut now.
    ///
    /// # Errors
    /// The file could not be written.
    pub fn write_image(&self, image: usize, survivors: Survivors, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        let disk = &self.disks[image];
        file.set_len(disk.durable.len() as u64)?;
        for (index, piece) in disk.durable.chunks(PIECE_BYTES).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                file.write_all_at(piece, (index * PIECE_BYTES) as u64)?;
            }
        }
        let (seed, odds) = match survivors {
            Survivors::Some(seed) | Survivors::Torn(seed) => (seed, Random::new(seed).below(3)),
            _ => (0, 0),
        };
        // One, two or three of four writes or sectors survive, depending on the seed.
        let mut random = Random::new(seed.wrapping_add(image as u64 + 1));
        let mut survives = || random.below(4) <= odds;
        for place in disk.volatile.iter().copied().chain(self.under_way(image)) {
            let Action::Write { offset, data } = &self.recording.operations[place].action else { continue };
            let data = self.recording.data(data);
            let whole = match survivors {
                Survivors::Nothing => false,
                Survivors::Everything => true,
                Survivors::Cache => image == CACHE,
                Survivors::Backing => image == BACKING,
                Survivors::Some(_) => survives(),
                Survivors::Torn(_) => {
                    for (index, sector) in data.chunks(SECTOR_BYTES).enumerate().filter(|_| survives()) {
                        file.write_all_at(sector, offset + (index * SECTOR_BYTES) as u64)?;
                    }
                    false
                }
            };
            if whole {
                file.write_all_at(data, *offset)?;
            }
        }
        Ok(())
    }

    /// Returns the writes to a device that the cut interrupts: the rest of the batch in which it
    /// falls.
    fn under_way(&self, image: usize) -> impl Iterator<Item = usize> {
        let operations = &self.recording.operations;
        let batch = self.position.checked_sub(1).map(|last| operations[last].batch);
        let rest = operations.iter().enumerate().skip(self.position);
        rest.take_while(move |(_, operation)| Some(operation.batch) == batch)
            .filter(move |(_, operation)| operation.image == image)
            .map(|(place, _)| place)
    }
}

impl Disk {
    /// Makes the writes of the batches up to `covers` durable.
    fn flush(&mut self, recording: &Recording, covers: u64) {
        let covered = |place: &usize| recording.operations[*place].batch <= covers;
        for place in self.volatile.extract_if(.., |place| covered(place)) {
            if let Action::Write { offset, data } = &recording.operations[place].action {
                let data = recording.data(data);
                let start = usize::try_from(*offset).expect("images fit in memory");
                self.durable[start..start + data.len()].copy_from_slice(data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{record, recording};
    use super::*;

    /// Returns the first byte of each sector of image 0 after a cut at `position`.
    fn after(records: &[Vec<u8>], position: usize, survivors: Survivors) -> Vec<u8> {
        let recording = recording(records);
        let mut disks = Disks::new(&recording, &[vec![0; 4 * SECTOR_BYTES], vec![0; SECTOR_BYTES]]);
        disks.advance(position);
        firsts(&disks, survivors)
    }

    fn firsts(disks: &Disks<'_>, survivors: Survivors) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        disks.write_image(CACHE, survivors, file.path()).expect("an image");
        let bytes = std::fs::read(file.path()).expect("the image");
        bytes.chunks(SECTOR_BYTES).map(|sector| sector[0]).collect()
    }

    fn write(batch: u64, sector: u64, sectors: usize, byte: u8) -> Vec<u8> {
        record(1, 0, batch, sector * SECTOR_BYTES as u64, &vec![byte; sectors * SECTOR_BYTES])
    }

    /// A flush in batch `batch`, submitted after the batch before it was acknowledged.
    fn flush(image: u32, batch: u64) -> Vec<u8> {
        record(2, image, batch, batch - 1, b"")
    }

    #[test]
    fn a_flush_covers_its_device_s_writes_of_earlier_batches() {
        let records = [write(1, 0, 1, 1), flush(0, 2), write(3, 1, 1, 2), flush(1, 4)];
        assert_eq!(after(&records, 4, Survivors::Nothing), [1, 0, 0, 0]);
        assert_eq!(after(&records, 4, Survivors::Everything), [1, 2, 0, 0]);
        assert_eq!(after(&records, 4, Survivors::Backing), [1, 0, 0, 0]);
        assert_eq!(after(&records, 4, Survivors::Cache), [1, 2, 0, 0]);
        let same_batch = [write(1, 0, 1, 1), flush(0, 1)];
        assert_eq!(after(&same_batch, 2, Survivors::Nothing), [0; 4]);
    }

    #[test]
    fn the_rest_of_the_batch_may_have_landed() {
        let records = [write(1, 0, 1, 1), write(1, 1, 1, 2), write(2, 2, 1, 3)];
        assert_eq!(after(&records, 1, Survivors::Everything), [1, 2, 0, 0]);
        assert_eq!(after(&records, 0, Survivors::Everything), [0; 4]);
    }

    #[test]
    fn a_later_write_wins_whatever_was_flushed_between() {
        let records = [write(1, 0, 2, 1), flush(0, 2), write(3, 0, 1, 2), flush(0, 4)];
        assert_eq!(after(&records, 4, Survivors::Nothing), [2, 1, 0, 0]);
    }

    #[test]
    fn some_seeds_tear_a_write_and_some_drop_one_of_two() {
        let records = [write(1, 0, 2, 1), write(1, 2, 2, 1)];
        let mut random = Random::new(1);
        let mut seen = [[0; 2]; 2];
        for _ in 0..100 {
            let seed = random.next();
            let whole = after(&records, 2, Survivors::Some(seed));
            assert_eq!((whole[0], whole[2]), (whole[1], whole[3]));
            seen[0][usize::from(whole[0] != whole[2])] += 1;
            let torn = after(&records, 2, Survivors::Torn(seed));
            seen[1][usize::from(torn[0] != torn[1])] += 1;
        }
        assert!(seen.iter().flatten().all(|count| *count > 10), "{seen:?}");
    }

    #[test]
    fn a_forgotten_write_is_not_there() {
        let records = [write(1, 0, 1, 1), write(1, 1, 1, 2), flush(0, 2)];
        let recording = recording(&records);
        let mut disks = Disks::new(&recording, &[vec![0; 4 * SECTOR_BYTES]]).forgetting(0);
        disks.advance(3);
        assert_eq!(firsts(&disks, Survivors::Everything), [0, 2, 0, 0]);
    }
}
