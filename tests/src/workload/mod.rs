//! Seeded writes whose content can be verified later.
//!
//! A [`Workload`] is a list of steps that depends only on a few numbers. The guest program, the NBD
//! side and the model on the host all walk the same list. So nothing has to be saved from a machine
//! that crashes: to know what must be there, it is enough to know which flushes were acknowledged.
//! Each sector written contains its own number, its volume and its position in the order of all
//! writes (`pattern.rs`), so that a wrong sector shows what it is instead. The numbers are passed
//! as text (`key=value`, [`Workload`]'s `Display` and `FromStr`).

mod model;
mod pattern;
mod run;

use std::fmt;
use std::str::FromStr;

pub use model::{Fate, Mismatch, Model};
pub use pattern::{SECTOR_BYTES, Seen, Stamp, identify};
pub use run::{RunError, Target, run, run_on_device};

/// A list of verified writes, reads and flushes on one volume. Positions and lengths are in sectors
/// of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The seed that determines every step.
    pub seed: u64,
    /// Distinguishes the volumes of a set: data that appears on the wrong one is detected.
    pub volume: u64,
    /// The sequence number of the first write among all writes to the volume, at least 1; each
    /// write takes the next number.
    pub first_sequence: u64,
    /// Only `[first_sector, first_sector + sectors)` is accessed.
    pub first_sector: u64,
    /// Length of the accessed part.
    pub sectors: u64,
    /// Every position and length is a multiple of this.
    pub block_sectors: u64,
    /// The longest write.
    pub write_sectors_max: u64,
    /// Number of writes.
    pub writes: u64,
    /// A flush follows each group of this many writes, and the last write. Zero: only after the
    /// last.
    pub flush_every: u64,
    /// Maximum number of flushes: whether later writes survive stays open, however late a crash
    /// comes. Zero: no limit.
    pub flushes_max: u64,
    /// One read for each group of this many writes. Zero: none.
    pub read_every: u64,
    /// One of this many writes is a discard of its range instead. Zero: none.
    pub discard_every: u64,
}

/// A step of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Writes `sectors` sectors from `sector` on, each stamped with `sequence`.
    Write {
        /// The first sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
        /// The write's sequence number.
        sequence: u64,
    },
    /// Discards a range: once acknowledged, it reads as zeroes.
    Discard {
        /// The first sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
        /// The discard's sequence number.
        sequence: u64,
    },
    /// Reads and verifies.
    Read {
        /// The first sector.
        sector: u64,
        /// Number of sectors.
        sectors: u64,
    },
    /// Flushes.
    Flush {
        /// The number of the flush, counted from 1 within the workload.
        number: u64,
    },
}

impl Workload {
    /// Returns every step, in order.
    pub fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let workload = *self;
        let mut random = Random::new(workload.seed);
        let mut flushes = 0;
        (1..=workload.writes).flat_map(move |count| {
            let (sector, sectors) = workload.place(&mut random);
            let discards = workload.discard_every != 0 && count % workload.discard_every == 0;
            let sequence = workload.first_sequence + count - 1;
            let write = if discards {
                Step::Discard { sector, sectors, sequence }
            } else {
                Step::Write { sector, sectors, sequence }
            };
            let read = (workload.read_every != 0 && count % workload.read_every == 0).then(|| {
                let (sector, sectors) = workload.place(&mut random);
                Step::Read { sector, sectors }
            });
            let due = workload.flush_every != 0 && count % workload.flush_every == 0;
            let allowed = workload.flushes_max == 0 || flushes < workload.flushes_max;
            let flush = (allowed && (due || count == workload.writes)).then(|| {
                flushes += 1;
                Step::Flush { number: flushes }
            });
            [Some(write), read, flush].into_iter().flatten()
        })
    }

    /// Returns the first sequence number after this workload.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.first_sequence + self.writes
    }

    /// Returns a random aligned range inside the accessed part.
    fn place(&self, random: &mut Random) -> (u64, u64) {
        let blocks = self.sectors / self.block_sectors;
        let length = 1 + random.below((self.write_sectors_max / self.block_sectors).clamp(1, blocks));
        let start = random.below(blocks - length + 1);
        (self.first_sector + start * self.block_sectors, length * self.block_sectors)
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, volume, first_sequence, first_sector, sectors, block_sectors, .. } = self;
        let Self { write_sectors_max, writes, flush_every, flushes_max, read_every, discard_every, .. } =
            self;
        write!(
            f,
            "seed={seed} volume={volume} first_sequence={first_sequence} first_sector={first_sector} "
        )?;
        write!(f, "sectors={sectors} block_sectors={block_sectors} write_sectors_max={write_sectors_max} ")?;
        write!(
            f,
            "writes={writes} flush_every={flush_every} flushes_max={flushes_max} read_every={read_every} "
        )?;
        write!(f, "discard_every={discard_every}")
    }
}

/// Why a text is not a workload.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParseError {
    /// Not `key=number`, or an unknown key.
    #[error("`{0}` is not one of a workload's key=number pairs")]
    Pair(String),
    /// A number that makes no sense.
    #[error(
        "a workload needs first_sequence, sectors, block_sectors and writes above zero, and a block that fits"
    )]
    Empty,
}

impl FromStr for Workload {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut workload = Self {
            seed: 0,
            volume: 0,
            first_sequence: 0,
            first_sector: 0,
            sectors: 0,
            block_sectors: 0,
            write_sectors_max: 0,
            writes: 0,
            flush_every: 0,
            flushes_max: 0,
            read_every: 0,
            discard_every: 0,
        };
        for pair in text.split_whitespace() {
            let bad = || ParseError::Pair(pair.to_owned());
            let (key, number) = pair.split_once('=').ok_or_else(bad)?;
            let field = match key {
                "seed" => &mut workload.seed,
                "volume" => &mut workload.volume,
                "first_sequence" => &mut workload.first_sequence,
                "first_sector" => &mut workload.first_sector,
                "sectors" => &mut workload.sectors,
                "block_sectors" => &mut workload.block_sectors,
                "write_sectors_max" => &mut workload.write_sectors_max,
                "writes" => &mut workload.writes,
                "flush_every" => &mut workload.flush_every,
                "flushes_max" => &mut workload.flushes_max,
                "read_every" => &mut workload.read_every,
                "discard_every" => &mut workload.discard_every,
                _ => return Err(bad()),
            };
            *field = number.parse().map_err(|_| bad())?;
        }
        let whole = workload.first_sequence > 0 && workload.block_sectors > 0 && workload.writes > 0;
        if whole && workload.sectors >= workload.block_sectors {
            Ok(workload)
        } else {
            Err(ParseError::Empty)
        }
    }
}

/// A small random number generator (splitmix64). It permanently yields the same numbers on every
/// machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed; neighbouring seeds give unrelated numbers.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Returns a number below `limit`, which must not be zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Workload {
        Workload {
            seed: 7,
            volume: 3,
            first_sequence: 11,
            first_sector: 64,
            sectors: 256,
            block_sectors: 8,
            write_sectors_max: 32,
            writes: 100,
            flush_every: 30,
            flushes_max: 0,
            read_every: 4,
            discard_every: 0,
        }
    }

    #[test]
    fn the_text_form_carries_everything() {
        assert_eq!(small().to_string().parse(), Ok(small()));
        assert_eq!("seed=1 colour=2".parse::<Workload>(), Err(ParseError::Pair("colour=2".to_owned())));
        assert_eq!("seed=1".parse::<Workload>(), Err(ParseError::Empty));
    }

    #[test]
    fn steps_are_aligned_inside_and_numbered() {
        let mut sequence = 11;
        let mut flush = 0;
        for step in small().steps() {
            match step {
                Step::Write { sequence: found, .. } => {
                    assert_eq!(found, sequence);
                    sequence += 1;
                }
                Step::Flush { number } => {
                    flush += 1;
                    assert_eq!(number, flush);
                }
                Step::Read { .. } | Step::Discard { .. } => {}
            }
            if let Step::Write { sector, sectors, .. } | Step::Read { sector, sectors } = step {
                assert!(sector >= 64 && sector + sectors <= 64 + 256);
                assert!((8..=32).contains(&sectors));
                assert_eq!((sector % 8, sectors % 8), (0, 0));
            }
        }
        assert_eq!(sequence, small().next_sequence());
        // After 30, 60, 90 and the last write.
        assert_eq!(flush, 4);
        assert_eq!(small().steps().filter(|step| matches!(step, Step::Read { .. })).count(), 25);
    }

    #[test]
    fn after_the_last_flush_only_writes_and_reads_follow() {
        let steps: Vec<Step> = Workload { flushes_max: 2, ..small() }.steps().collect();
        let flushes = steps.iter().filter(|step| matches!(step, Step::Flush { .. }));
        assert_eq!(flushes.count(), 2);
        assert_ne!(steps.last(), Some(&Step::Flush { number: 2 }));
    }
}
