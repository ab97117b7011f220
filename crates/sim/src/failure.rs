//! Faults, and the one command that reproduces a failure.

use crate::disk::Survivors;
use crate::driver::{Crash, HaltReason};
use crate::oracle::Violation;
use crate::stamp::{SectorValue, StampError};
use crate::system::Refusal;
use crate::workload::Workload;
use std::fmt;
use std::str::FromStr;

/// What a system did that a correct one would not do.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FailureKind {
    /// A read returned what it may not.
    #[error("{0}")]
    Read(#[from] Violation),
    /// A request failed although every device works.
    #[error("{request} was refused: {refusal}")]
    Refused {
        /// The request as text.
        request: String,
        /// The system's message.
        refusal: Refusal,
    },
    /// The system did not open.
    #[error("the system did not open: {0}")]
    Open(Refusal),
    /// The system opened but lacks volumes.
    #[error("the system opened with {found} volumes instead of {wanted}")]
    Volumes {
        /// Number of volumes served.
        found: usize,
        /// Number of volumes made.
        wanted: usize,
    },
    /// A flash-only volume is not what it must be at a start: it is gone, has another size, or is
    /// back.
    #[error("flash-only volume {volume} {}", match .found {
        None => "is missing".to_owned(),
        Some(sectors) => format!("exists with {sectors} sectors"),
    })]
    Lodger {
        /// The number of the volume.
        volume: u32,
        /// Its size in sectors; `None` if it is gone.
        found: Option<u64>,
    },
    /// The system did not stop.
    #[error("the system did not stop: {0}")]
    Stop(Refusal),
    /// A request or a task waits forever.
    #[error("{}; waiting: {}", match .halt {
        HaltReason::Stuck => "nothing is in flight",
        HaltReason::Late => "no answer arrived within the time allowed",
        HaltReason::Spinning => "tasks wake each other forever without progress",
        HaltReason::Requested(_) => "the simulated world ended unexpectedly",
    }, .waiting.join(", "))]
    Waiting {
        /// How the world has halted.
        halt: HaltReason,
        /// Some of the unanswered requests.
        waiting: Vec<String>,
    },
    /// A request was answered, but far too late.
    #[error("{request} took {milliseconds} ms")]
    Slow {
        /// The request as text.
        request: String,
        /// How long it took, without the delays that faults had caused.
        milliseconds: u64,
    },
    /// Dirty data stays dirty although there are no writes and every device works.
    #[error("write-back does not finish: {0} sectors are dirty")]
    NotWrittenBack(u64),
    /// Data that is read again and again never comes from the cache.
    #[error("volume {0} is not cached: repeated reads come from its backing device")]
    Bypassed(u32),
    /// The system panicked.
    #[error("the system panicked: {0}")]
    Panic(String),
    /// The system sent a request that a device refuses as malformed.
    #[error("malformed request: {0}")]
    Form(String),
    /// One piece of CPU work was too long.
    #[error("one piece of CPU work took {0} ns")]
    Long(u64),
    /// The system's count of bytes written to its cache device differs from what the device
    /// received.
    #[error("the system counted {counted} bytes written to the cache device, which received {given} bytes")]
    Miscounted {
        /// Counted by the system, in bytes.
        counted: u64,
        /// Counted by the world, in bytes.
        given: u64,
    },
    /// A device is an older copy of itself, and it was served, or the set that it belongs to was
    /// written to.
    #[error("device {device} is an older copy of itself, but {what}")]
    Older {
        /// The device.
        device: usize,
        /// What was done all the same.
        what: &'static str,
    },
    /// The structure on the devices is not sound.
    #[error("the structure on the devices is damaged: {}", .0.join("; "))]
    Structure(Vec<String>),
    /// A scenario did not go as its story says.
    #[error("the scenario did not go as its story says: {0}")]
    Story(String),
}

impl FailureKind {
    /// Returns whether `other` is probably the same fault found elsewhere: both are of the same
    /// kind, and so are their findings. Places and numbers may differ.
    #[must_use]
    pub fn resembles(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Read(here), Self::Read(there)) => WrongContent::of(here) == WrongContent::of(there),
            (Self::Structure(here), Self::Structure(there)) => {
                here.iter().any(|here| there.iter().any(|there| same_words(here, there)))
            }
            (Self::Panic(here), Self::Panic(there)) => here == there,
            (Self::Waiting { halt: here, .. }, Self::Waiting { halt: there, .. }) => here == there,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// The kinds of wrong content that a read can find.
#[derive(PartialEq, Eq, Debug)]
enum WrongContent {
    /// A sector that is torn inside.
    Torn,
    /// Data of another place.
    Misplaced,
    /// Zeroes: the content of a place that was never written, or that was zeroed.
    Zeroes,
    /// Content older than anything allowed: a value was lost.
    Lost,
    /// Neither allowed content nor older content: a third value.
    Third,
}

impl WrongContent {
    fn of(violation: &Violation) -> Self {
        match violation.found {
            Err(StampError::Torn) => Self::Torn,
            Err(StampError::Misplaced { .. }) => Self::Misplaced,
            Ok(SectorValue::Zero) => Self::Zeroes,
            Ok(SectorValue::Written(found)) => {
                let oldest = violation.allowed.iter().filter_map(|text| number_of(text)).min();
                if oldest.is_none_or(|oldest| found < oldest) { Self::Lost } else { Self::Third }
            }
        }
    }
}

/// Returns the number of the write that an allowed value names, if it has one.
fn number_of(allowed: &str) -> Option<u64> {
    if allowed == SectorValue::Written(0).to_string() {
        return Some(0);
    }
    allowed.strip_prefix("write ")?.parse().ok()
}

/// Returns whether two findings of the checker are equal apart from numbers.
fn same_words(here: &str, there: &str) -> bool {
    let is_word = |word: &&str| !word.contains(|letter: char| letter.is_ascii_digit());
    here.split_whitespace().filter(is_word).eq(there.split_whitespace().filter(is_word))
}

/// A crash: at which point, how, and what survives, as `point:crash:survivors`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashPoint {
    /// The point.
    pub point: u64,
    /// The kind of crash.
    pub crash: Crash,
    /// What survives.
    pub survivors: Survivors,
}

impl fmt::Display for CrashPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.point, self.crash, self.survivors)
    }
}

impl FromStr for CrashPoint {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, ':');
        let mut part = || parts.next().ok_or_else(|| format!("a cut is POINT:CRASH:SUBSET, not {text:?}"));
        let point = part()?;
        let point = point.parse().map_err(|_| format!("a point is a number, not {point:?}"))?;
        Ok(Self { point, crash: part()?.parse()?, survivors: part()?.parse()? })
    }
}

/// The name of the simulator's program, for failures that are printed outside of it.
const PROGRAM: &str = "sim";

/// A fault and how to reproduce it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What went wrong.
    pub fault: FailureKind,
    /// The system under test.
    pub system: String,
    /// The arguments that reproduce the workload.
    pub workload: String,
    /// The crashes: none, one in the workload, one in the recovery from it, and so on.
    pub cuts: Vec<CrashPoint>,
}

impl Failure {
    /// Creates the failure of a fault of `system` in `workload`.
    #[must_use]
    pub fn new(fault: FailureKind, system: &str, workload: &Workload, cuts: &[CrashPoint]) -> Self {
        Self { fault, system: system.to_owned(), workload: workload.arguments(), cuts: cuts.to_vec() }
    }

    /// Returns the command that reproduces the failure; `program` is how a shell calls the
    /// simulator.
    #[must_use]
    pub fn command(&self, program: &str) -> String {
        let mut command = format!("{program} run --system {} {}", self.system, self.workload);
        let options = std::iter::once("--cut").chain(std::iter::repeat("--then"));
        for (cut, option) in self.cuts.iter().zip(options) {
            command += &format!(" {option} {cut}");
        }
        command
    }

    /// Returns the fault and that command.
    #[must_use]
    pub fn told(&self, program: &str) -> String {
        format!("{}\n  again: {}", self.fault, self.command(program))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(PROGRAM))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Shape;

    #[test]
    fn what_was_found_makes_two_faults_alike() {
        let read = |found, allowed: &[&str]| {
            let allowed = allowed.iter().map(ToString::to_string).collect();
            FailureKind::Read(Violation { volume: 0, sector: 7, found, allowed })
        };
        let misplaced = |sector| StampError::Misplaced { volume: 1, sector, number: 3 };
        let kinds = [
            // An older value, whichever one, where a newer one must be.
            vec![
                read(Ok(SectorValue::Written(4)), &["write 9", "write 12"]),
                read(Ok(SectorValue::Written(0)), &["write 9"]),
                read(Ok(SectorValue::Written(4)), &["zeroes"]),
            ],
            vec![
                read(Ok(SectorValue::Zero), &["write 9"]),
                read(Ok(SectorValue::Zero), &["its first content"]),
            ],
            // A value that was replaced and has come back, or was never written.
            vec![
                read(Ok(SectorValue::Written(10)), &["write 9", "write 12"]),
                read(Ok(SectorValue::Written(10)), &["its first content"]),
            ],
            vec![read(Err(StampError::Torn), &["write 9"]), read(Err(StampError::Torn), &["zeroes"])],
            vec![read(Err(misplaced(1)), &["write 9"]), read(Err(misplaced(2)), &["write 9"])],
            vec![
                FailureKind::Structure(vec!["node 1024, level 0: bset at block 3: checksum".to_owned()]),
                FailureKind::Structure(vec!["node 64, level 1: bset at block 1: checksum".to_owned()]),
            ],
            vec![FailureKind::Structure(vec!["node 1024, level 0: two live children at 0:8".to_owned()])],
        ];
        for (index, kind) in kinds.iter().enumerate() {
            for (other, others) in kinds.iter().enumerate() {
                for (here, there) in
                    kind.iter().flat_map(|here| others.iter().map(move |there| (here, there)))
                {
                    assert_eq!(here.resembles(there), index == other, "{here} / {there}");
                }
            }
        }
    }

    #[test]
    fn a_command_names_every_crash_in_its_order() {
        let cut = |point| CrashPoint { point, crash: Crash::PowerCut, survivors: Survivors::Seeded(point) };
        let workload = Shape::named("hot").unwrap().draw(9);
        let failure = Failure::new(FailureKind::Long(1), "engine", &workload, &[cut(7), cut(3), cut(5)]);
        let command = failure.command("./sim");
        assert!(command.starts_with("./sim run --system engine --workload hot "), "{command}");
        assert!(command.ends_with(" --cut 7:power:7 --then 3:power:3 --then 5:power:5"), "{command}");
    }

    #[test]
    fn cuts_read_back_as_written() {
        for text in ["17:power:nothing", "3:death:everything", "9:power:12345"] {
            assert_eq!(text.parse::<CrashPoint>().unwrap().to_string(), text);
        }
        for text in ["", "1", "1:power", "x:power:nothing", "1:sleep:nothing", "1:power:some"] {
            assert!(text.parse::<CrashPoint>().is_err(), "{text}");
        }
    }
}
