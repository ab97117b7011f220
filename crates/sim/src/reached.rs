//! Counts what clients have requested: each kind of request, with its flags and its alignment to
//! blocks, on each kind of volume in each mode, beside each kind of failing device. A case that was
//! never requested was never judged, so the counts show the gaps.

use crate::system::{DataLocation, Mode};
use crate::workload::Step;
use std::ops::Range;

/// A kind of request, with its flags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the protocols' own words")]
pub enum RequestKind {
    Read,
    Write,
    WriteFua,
    Flush,
    Discard,
    Zero,
    ZeroFua,
    Unmap,
    UnmapFua,
}

/// How a request is aligned to the blocks of the set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alignment {
    /// It covers whole blocks, or no sectors at all.
    Whole,
    /// It begins or ends within a block.
    Within,
    /// Part of it lies after the last whole block of the volume.
    Behind,
}

/// Which devices have failed since the process began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailedDevices {
    /// None.
    Nothing,
    /// The cache device.
    Cache,
    /// The backing device of the volume.
    Backing,
    /// Both.
    Both,
}

/// The circumstances of a request; its fields index the counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CoverageCase {
    /// The kind of request.
    pub asked: RequestKind,
    /// Its alignment.
    pub lies: Alignment,
    /// Where the volume has its data.
    pub standing: DataLocation,
    /// Which devices have failed.
    pub failed: FailedDevices,
}

const ASKED: [(RequestKind, &str); 9] = [
    (RequestKind::Read, "read"),
    (RequestKind::Write, "write"),
    (RequestKind::WriteFua, "write, FUA"),
    (RequestKind::Flush, "flush"),
    (RequestKind::Discard, "discard"),
    (RequestKind::Zero, "zero"),
    (RequestKind::ZeroFua, "zero, FUA"),
    (RequestKind::Unmap, "zero, unmap"),
    (RequestKind::UnmapFua, "zero, unmap, FUA"),
];
const LIES: [(Alignment, &str); 3] = [
    (Alignment::Whole, ""),
    (Alignment::Within, ", part of a block"),
    (Alignment::Behind, ", beyond the last block"),
];
const STANDINGS: [(DataLocation, &str); 6] = [
    (DataLocation::Detached, "no cache"),
    (DataLocation::Cached(Mode::Writethrough), "writethrough"),
    (DataLocation::Cached(Mode::Writeback), "writeback"),
    (DataLocation::Cached(Mode::Writearound), "writearound"),
    (DataLocation::Cached(Mode::None), "none"),
    (DataLocation::CacheAlone, "flash-only"),
];
const FAILED: [(FailedDevices, &str); 4] = [
    (FailedDevices::Nothing, ""),
    (FailedDevices::Cache, ", the cache has failed"),
    (FailedDevices::Backing, ", the backing device has failed"),
    (FailedDevices::Both, ", both devices have failed"),
];

/// Returns the index of `wanted` in a list of names.
fn place<T: PartialEq>(names: &[(T, &str)], wanted: &T) -> usize {
    names.iter().position(|(named, _)| named == wanted).expect("each has a name")
}

impl RequestKind {
    /// Returns the request kind of a step with its volume and sectors; `None` if the step is not a
    /// request.
    #[must_use]
    pub fn of(step: &Step) -> Option<(Self, u32, Range<u64>)> {
        Some(match step {
            Step::Read { volume, sectors } => (Self::Read, *volume, sectors.clone()),
            Step::Flush { volume } => (Self::Flush, *volume, 0..0),
            Step::Discard { volume, sectors } => (Self::Discard, *volume, sectors.clone()),
            Step::Write { volume, sectors, fua } => {
                (if *fua { Self::WriteFua } else { Self::Write }, *volume, sectors.clone())
            }
            Step::Zero { volume, sectors, fua, may_unmap } => {
                let asked = match (may_unmap, fua) {
                    (false, false) => Self::Zero,
                    (false, true) => Self::ZeroFua,
                    (true, false) => Self::Unmap,
                    (true, true) => Self::UnmapFua,
                };
                (asked, *volume, sectors.clone())
            }
            _ => return None,
        })
    }
}

impl Alignment {
    /// Classifies `sectors` of a volume of `size` sectors, in a set with blocks of `block` sectors.
    #[must_use]
    pub const fn of(sectors: &Range<u64>, size: u64, block: u64) -> Self {
        if sectors.end > size / block * block {
            Self::Behind
        } else if sectors.start.is_multiple_of(block) && sectors.end.is_multiple_of(block) {
            Self::Whole
        } else {
            Self::Within
        }
    }
}

impl CoverageCase {
    /// Returns whether such a request can exist.
    #[must_use]
    pub const fn is_possible(&self) -> bool {
        let has_place =
            !matches!((self.asked, self.lies), (RequestKind::Flush, Alignment::Within | Alignment::Behind));
        // A volume in the cache alone consists of whole blocks and has no other device.
        let is_alone = matches!(self.standing, DataLocation::CacheAlone);
        let takes_a_device = matches!(self.lies, Alignment::Behind)
            || matches!(self.failed, FailedDevices::Backing | FailedDevices::Both);
        has_place && !(is_alone && takes_a_device)
    }

    /// Returns all possible cases.
    pub fn all() -> impl Iterator<Item = Self> {
        let cases = ASKED.iter().flat_map(|(asked, _)| {
            LIES.iter().flat_map(move |(lies, _)| {
                STANDINGS.iter().flat_map(move |(standing, _)| {
                    FAILED.iter().map(move |(failed, _)| Self {
                        asked: *asked,
                        lies: *lies,
                        standing: *standing,
                        failed: *failed,
                    })
                })
            })
        });
        cases.filter(Self::is_possible)
    }
}

impl std::fmt::Display for CoverageCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [asked, lies, standing, failed] = [
            ASKED[place(&ASKED, &self.asked)].1,
            LIES[place(&LIES, &self.lies)].1,
            STANDINGS[place(&STANDINGS, &self.standing)].1,
            FAILED[place(&FAILED, &self.failed)].1,
        ];
        write!(f, "{asked}{lies}, {standing}{failed}")
    }
}

/// How often each case was requested.
#[derive(Clone, Copy, Debug)]
pub struct RequestCoverage([[[[u64; FAILED.len()]; STANDINGS.len()]; LIES.len()]; ASKED.len()]);

impl Default for RequestCoverage {
    fn default() -> Self {
        Self([[[[0; FAILED.len()]; STANDINGS.len()]; LIES.len()]; ASKED.len()])
    }
}

impl RequestCoverage {
    fn places(case: &CoverageCase) -> [usize; 4] {
        [
            place(&ASKED, &case.asked),
            place(&LIES, &case.lies),
            place(&STANDINGS, &case.standing),
            place(&FAILED, &case.failed),
        ]
    }

    /// Counts one more request.
    pub fn count(&mut self, case: &CoverageCase) {
        let [asked, lies, standing, failed] = Self::places(case);
        self.0[asked][lies][standing][failed] += 1;
    }

    /// Returns how often this case was requested.
    #[must_use]
    pub fn of(&self, case: &CoverageCase) -> u64 {
        let [asked, lies, standing, failed] = Self::places(case);
        self.0[asked][lies][standing][failed]
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        for case in CoverageCase::all() {
            let [asked, lies, standing, failed] = Self::places(&case);
            self.0[asked][lies][standing][failed] += other.of(&case);
        }
    }

    /// Returns the possible cases that were never requested.
    pub fn missing(&self) -> impl Iterator<Item = CoverageCase> + '_ {
        CoverageCase::all().filter(|case| self.of(case) == 0)
    }

    /// Formats a table with a row for each kind of request and alignment. Each kind of volume has
    /// two columns: requests while no device had failed, and requests beside failures.
    #[must_use]
    pub fn table(&self) -> Vec<String> {
        let head = STANDINGS.iter().map(|(_, name)| format!(" {name:>12} {:>7}", "failing"));
        let mut lines = vec![format!("{:<40}{}", "requests by mode", head.collect::<String>())];
        for (asked, lies) in ASKED.iter().flat_map(|asked| LIES.iter().map(move |lies| (asked, lies))) {
            let cell = |standing: &DataLocation, of: fn(FailedDevices) -> bool| -> Option<u64> {
                let case =
                    |failed| CoverageCase { asked: asked.0, lies: lies.0, standing: *standing, failed };
                let failed = FAILED.iter().map(|(failed, _)| *failed).filter(|failed| of(*failed));
                let cases = failed.map(case).filter(CoverageCase::is_possible);
                cases.map(|case| self.of(&case)).reduce(|sum, count| sum + count)
            };
            let text = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
            let cells = STANDINGS.iter().map(|(standing, _)| {
                let calm = cell(standing, |failed| failed == FailedDevices::Nothing);
                let failing = cell(standing, |failed| failed != FailedDevices::Nothing);
                format!(" {:>12} {:>7}", text(calm), text(failing))
            });
            let cells: String = cells.collect();
            if cells.contains(|character: char| character.is_ascii_digit()) {
                lines.push(format!("{:<40}{cells}", format!("{}{}", asked.1, lies.1)));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_behind_the_last_block_is_told_from_what_lies_within_one() {
        assert_eq!(Alignment::of(&(0..8), 19, 8), Alignment::Whole);
        assert_eq!(Alignment::of(&(4..8), 19, 8), Alignment::Within);
        assert_eq!(Alignment::of(&(8..17), 19, 8), Alignment::Behind);
        assert_eq!(Alignment::of(&(0..0), 19, 8), Alignment::Whole);
    }

    #[test]
    fn each_case_is_counted_once() {
        let mut reached = RequestCoverage::default();
        let all = CoverageCase::all().count();
        assert_eq!(reached.missing().count(), all);
        for case in CoverageCase::all() {
            reached.count(&case);
        }
        assert_eq!(reached.missing().count(), 0);
        let mut twice = reached;
        twice.add(&reached);
        assert!(CoverageCase::all().all(|case| twice.of(&case) == 2));
    }

    #[test]
    fn what_cannot_be_is_no_gap() {
        let case = |asked, lies, standing, failed| CoverageCase { asked, lies, standing, failed };
        let flush =
            case(RequestKind::Flush, Alignment::Behind, DataLocation::Detached, FailedDevices::Nothing);
        let alone =
            case(RequestKind::Read, Alignment::Whole, DataLocation::CacheAlone, FailedDevices::Backing);
        let kept = case(RequestKind::Read, Alignment::Within, DataLocation::CacheAlone, FailedDevices::Cache);
        assert!(!flush.is_possible() && !alone.is_possible() && kept.is_possible());
    }
}
