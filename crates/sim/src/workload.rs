//! Defines what the clients do: a list of steps, drawn from a seed beforehand, so that it can be
//! shown, shortened and replayed.
//!
//! The steps do not depend on answers. Their interleaving is not specified here either: up to
//! `depth` requests are in flight together, and the simulated world decides the order.

mod coincidence;
mod drawing;
mod generate;
mod shape;
mod trouble;

use crate::disk::{FaultRule, Survivors};
use crate::growth::GrowthStage;
use crate::system::{Geometry, Mode, PolicyOption};
use std::fmt;
use std::ops::Range;

pub use drawing::{DRAWING, DrawingMismatch, check_drawing};
pub use shape::Shape;

/// One step of the clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// From now on a device has a fault, until the rule is used up or the process ends.
    Trouble {
        /// The device: 0 for the cache, then the backing devices.
        device: usize,
        /// What fails, where, and how often.
        rule: FaultRule,
    },
    /// Submit a write of a fresh stamp.
    Write {
        /// Volume.
        volume: u32,
        /// Sectors of the volume.
        sectors: Range<u64>,
        /// Durable at its completion.
        fua: bool,
    },
    /// Submit a read and judge the answer.
    Read {
        /// Volume.
        volume: u32,
        /// Sectors of the volume.
        sectors: Range<u64>,
    },
    /// Submit a flush.
    Flush {
        /// Volume.
        volume: u32,
    },
    /// Submit a discard.
    Discard {
        /// Volume.
        volume: u32,
        /// Sectors of the volume.
        sectors: Range<u64>,
    },
    /// Submit a write of zeroes.
    Zero {
        /// Volume.
        volume: u32,
        /// Sectors of the volume.
        sectors: Range<u64>,
        /// Durable at its completion.
        fua: bool,
        /// The underlying space may be deallocated.
        may_unmap: bool,
    },
    /// Change a volume's cache mode, with requests in flight.
    Mode {
        /// Volume.
        volume: u32,
        /// New mode.
        mode: Mode,
    },
    /// Set an option of a volume, with requests in flight.
    Turn {
        /// Volume.
        volume: u32,
        /// The option.
        option: PolicyOption,
        /// The new value.
        value: u64,
    },
    /// Detach a volume from the cache, with requests in flight. If it is not attached, nothing is
    /// requested.
    Detach {
        /// Volume.
        volume: u32,
    },
    /// Attach a volume to the cache, with requests in flight; likewise.
    Attach {
        /// Volume.
        volume: u32,
    },
    /// Write back the current dirty data of a volume, with requests in flight.
    Clean {
        /// Volume.
        volume: u32,
    },
    /// Cancel, where possible, a detach, attach, write-back, shrink or grow of a volume that is in
    /// progress.
    Cancel {
        /// Volume.
        volume: u32,
    },
    /// Stop serving a volume, with requests in flight, and serve it again at once; requests that
    /// arrive in between wait.
    Readd {
        /// Volume.
        volume: u32,
    },
    /// Shrink a volume to this many sectors, with requests in flight; then truncate its device, if
    /// it has one. The data after the new end is lost.
    Shrink {
        /// Volume.
        volume: u32,
        /// Sectors that remain.
        sectors: u64,
    },
    /// Extend the device of a volume, if it has one, so that this many sectors can be served, and
    /// grow the volume to that size, with requests in flight. New sectors are zeroes.
    Grow {
        /// Volume.
        volume: u32,
        /// New size in sectors.
        sectors: u64,
    },
    /// The disk of a volume dies, and the cache forgets the volume. Then a new disk takes its
    /// place, with everything that the old one had, and zeroes where that was not the newest data.
    /// Requests that arrive in between wait.
    Forget {
        /// Volume.
        volume: u32,
    },
    /// Pull a backing device, with requests in flight. With its power it loses what it had not made
    /// durable, except for `survivors`. All requests to it fail until it is back. (The next process
    /// finds it.)
    Pull {
        /// The device; 1 is that of the first volume.
        device: usize,
        /// What is still there when it is back.
        survivors: Survivors,
    },
    /// A backing device that was pulled comes back as another device of the system, and its volume
    /// is served from that.
    Return {
        /// The device.
        device: usize,
    },
    /// Create a volume that lives in the cache alone, with requests in flight. Nothing happens if
    /// it exists or if there is no room for it.
    Create {
        /// Volume.
        volume: u32,
    },
    /// Delete a volume that lives in the cache alone, with all its data, likewise.
    Delete {
        /// Volume.
        volume: u32,
    },
    /// Let this many virtual milliseconds pass, for background work.
    Pause(u64),
    /// Wait for all answers.
    Settle,
    /// Remove the file of the note, or put another one in its place.
    Note {
        /// Whether the file is in its place.
        is_there: bool,
    },
    /// The next process finds a volume table that is not the one written; the seed determines the
    /// damage.
    Table(u64),
    /// Before the next process, another one finds an older copy of a device in its place, chosen by
    /// the seed, and must notice that.
    Older(u64),
    /// End this process, in one of the ways of [`Restart`], and start the next.
    Restart(Restart),
}

/// How one process, or two, end within a workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restart {
    /// All answers are awaited; then the process stops in order.
    Stop,
    /// The process dies with requests in flight; the seed determines which operations land.
    Death(u64),
    /// The power is cut with requests in flight; the seed determines what survives.
    Power(u64),
    /// The process dies with requests in flight, and the next one loses power after this many
    /// points of the world (see [`driver`](crate::driver)), most of which belong to its start. The
    /// seed comes last and determines what lands and what survives.
    Twice(u64, u64),
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stop => write!(f, "Stop"),
            Self::Death(seed) => write!(f, "Death({seed})"),
            Self::Power(seed) => write!(f, "Power({seed})"),
            Self::Twice(points, seed) => write!(f, "Twice({points},{seed})"),
        }
    }
}

/// Where a workload's steps come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepSource {
    /// Drawn from its shape and seed.
    Drawn {
        /// Number of steps drawn.
        steps: usize,
    },
    /// From a script.
    Script {
        /// Name of the file.
        file: String,
        /// The steps after each recovery from a crash or, without a crash, after the last step.
        after: Vec<Step>,
    },
}

/// The workload of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workload {
    /// Name of its shape.
    pub name: String,
    /// The seed it was drawn from; the world that it runs in also follows from this seed.
    pub seed: u64,
    /// The geometry that it runs on.
    pub geometry: Geometry,
    /// The set that is on the devices before the first step; `None` for a new set.
    pub grown: Option<GrowthStage>,
    /// Maximum number of requests in flight together.
    pub depth: usize,
    /// The steps, in order of submission.
    pub steps: Vec<Step>,
    /// Devices fail: requests may be refused, but promises hold all the same.
    pub troubled: bool,
    /// Where the steps come from.
    pub origin: StepSource,
    /// Which steps of their origin these are; `None` for all.
    pub kept: Option<Vec<usize>>,
}

impl Workload {
    /// Returns the arguments of `sim run` that reproduce this workload.
    #[must_use]
    pub fn arguments(&self) -> String {
        let mut arguments = match &self.origin {
            StepSource::Drawn { steps } => {
                let Self { name, seed, .. } = self;
                format!("--workload {name} --length {steps} --seed {seed} --drawing {DRAWING}")
            }
            StepSource::Script { file, .. } => format!("--script {}", shell_word(file)),
        };
        if let Some(kept) = &self.kept {
            arguments += &format!(" --steps {}", format_places(kept));
        }
        arguments
    }

    /// Returns the same workload with only the steps at these indices (of its current steps).
    #[must_use]
    pub fn keep(&self, places: &[usize]) -> Self {
        let original = |place: usize| self.kept.as_ref().map_or(place, |kept| kept[place]);
        Self {
            steps: places.iter().map(|place| self.steps[*place].clone()).collect(),
            kept: Some(places.iter().map(|place| original(*place)).collect()),
            ..self.clone()
        }
    }
}

/// Quotes a word for a shell, if necessary.
#[must_use]
pub fn shell_word(word: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_./".contains(character);
    let plain = !word.is_empty() && word.chars().all(is_plain);
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// Formats indices as ranges: `0-3,7`, or `none`.
#[must_use]
pub fn format_places(places: &[usize]) -> String {
    if places.is_empty() {
        return "none".to_owned();
    }
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for place in places {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *place => *last = *place,
            _ => ranges.push((*place, *place)),
        }
    }
    let text = |(first, last): &(usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Parses the format of [`format_places`].
///
/// # Errors
/// A sentence if the text has another format.
pub fn parse_places(text: &str) -> Result<Vec<usize>, String> {
    let mut places = Vec::new();
    if text == "none" {
        return Ok(places);
    }
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| *number < 1_000_000);
        match (number(first), number(last)) {
            (Some(first), Some(last))
                if first <= last && places.last().is_none_or(|before| *before < first) =>
            {
                places.extend(first..=last);
            }
            _ => return Err(format!("steps are given in their order, as 0-3,7, not {text:?}")),
        }
    }
    Ok(places)
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fua = |fua: &bool| if *fua { " fua" } else { "" };
        match self {
            Self::Trouble { device, rule } => {
                let FaultRule { on, sectors, skip, count, fault } = rule;
                write!(f, "trouble {device} {on:?} {sectors:?} after {skip}, {count} times: {fault:?}")
            }
            Self::Write { volume, sectors, fua: durable } => {
                write!(f, "write {volume} {sectors:?}{}", fua(durable))
            }
            Self::Read { volume, sectors } => write!(f, "read {volume} {sectors:?}"),
            Self::Flush { volume } => write!(f, "flush {volume}"),
            Self::Discard { volume, sectors } => write!(f, "discard {volume} {sectors:?}"),
            Self::Zero { volume, sectors, fua: durable, may_unmap } => {
                let word = if *may_unmap { "unmap" } else { "zero" };
                write!(f, "{word} {volume} {sectors:?}{}", fua(durable))
            }
            Self::Mode { volume, mode } => write!(f, "mode {volume} {mode:?}"),
            Self::Turn { volume, option, value } => write!(f, "turn {volume} {} {value}", option.word()),
            Self::Detach { volume } => write!(f, "detach {volume}"),
            Self::Attach { volume } => write!(f, "attach {volume}"),
            Self::Cancel { volume } => write!(f, "cancel {volume}"),
            Self::Clean { volume } => write!(f, "clean {volume}"),
            Self::Readd { volume } => write!(f, "readd {volume}"),
            Self::Shrink { volume, sectors } => write!(f, "shrink {volume} {sectors}"),
            Self::Grow { volume, sectors } => write!(f, "grow {volume} {sectors}"),
            Self::Forget { volume } => write!(f, "forget {volume}"),
            Self::Pull { device, survivors } => write!(f, "pull {device} {survivors}"),
            Self::Return { device } => write!(f, "return {device}"),
            Self::Create { volume } => write!(f, "create {volume}"),
            Self::Delete { volume } => write!(f, "delete {volume}"),
            Self::Pause(milliseconds) => write!(f, "pause {milliseconds} ms"),
            Self::Settle => write!(f, "settle"),
            Self::Note { is_there } => write!(f, "note {}", if *is_there { "there" } else { "gone" }),
            Self::Table(seed) => write!(f, "table {seed}"),
            Self::Older(seed) => write!(f, "older {seed}"),
            Self::Restart(restart) => write!(f, "restart {restart}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_read_back_as_written() {
        let places = [0, 1, 2, 3, 7, 9, 10];
        assert_eq!(format_places(&places), "0-3,7,9-10");
        assert_eq!(parse_places("0-3,7,9-10").unwrap(), places);
        assert_eq!(format_places(&[]), "none");
        assert_eq!(parse_places("none"), Ok(Vec::new()));
        assert!(parse_places("").is_err());
        assert!(parse_places("3-1").is_err());
        assert!(parse_places("x").is_err());
        assert!(parse_places("3,3").is_err());
        assert!(parse_places("7,1").is_err());
    }

    #[test]
    fn a_script_is_named_as_a_shell_takes_it() {
        assert_eq!(shell_word("scripts/trouble-15.sim"), "scripts/trouble-15.sim");
        assert_eq!(shell_word("what we've found; rm"), r"'what we'\''ve found; rm'");
        assert_eq!(shell_word(""), "''");
    }

    #[test]
    fn keeping_twice_still_names_the_first_places() {
        let workload = Shape::named("mixed").unwrap().draw(1);
        let once = workload.keep(&[2, 4, 6]);
        let twice = once.keep(&[0, 2]);
        assert_eq!(twice.kept.as_deref(), Some(&[2, 6][..]));
        assert_eq!(twice.steps, [workload.steps[2].clone(), workload.steps[6].clone()]);
    }

    #[test]
    fn every_seed_can_be_run() {
        for shape in Shape::all() {
            for seed in 0..2000 {
                let Geometry { buckets, bucket_sectors, block_sectors, .. } =
                    shape.clone().with_steps(0).draw(seed).geometry;
                assert!(buckets > 512 && bucket_sectors >= 2 * block_sectors, "{} {seed}", shape.name);
            }
        }
    }

    /// Each run of this shape fills the cache at least five times over.
    #[test]
    fn a_cache_is_turned_over() {
        let shape = Shape::named("turnover").unwrap();
        for seed in 0..100 {
            let workload = shape.draw(seed);
            let length = |step: &Step| match step {
                Step::Write { sectors, .. } => sectors.end - sectors.start,
                _ => 0,
            };
            let (written, cache) =
                (workload.steps.iter().map(length).sum::<u64>(), workload.geometry.cache_sectors());
            assert!(written >= 5 * cache, "seed {seed}: {written} sectors through a cache of {cache}");
        }
    }

    /// Every shape keeps half of what random workloads promise: enough writes, and enough of them
    /// over live data.
    #[test]
    fn every_shape_has_its_share_of_writes_and_overlaps() {
        for shape in Shape::all() {
            let (mut requests, mut writes, mut overlaps) = (0u32, 0u32, 0u32);
            for seed in 0..20 {
                let mut live: Vec<(u32, Range<u64>)> = Vec::new();
                for step in shape.draw(seed).steps {
                    match step {
                        Step::Write { volume, sectors, .. } | Step::Zero { volume, sectors, .. } => {
                            let overlapping = live.iter().any(|(other, range)| {
                                *other == volume && range.start < sectors.end && sectors.start < range.end
                            });
                            (requests, writes, overlaps) =
                                (requests + 1, writes + 1, overlaps + u32::from(overlapping));
                            live.push((volume, sectors));
                        }
                        Step::Read { .. } | Step::Discard { .. } | Step::Flush { .. } => requests += 1,
                        _ => {}
                    }
                }
            }
            let name = shape.name;
            assert!(writes * 100 >= requests * 40, "{name}: {writes} writes of {requests} requests");
            assert!(overlaps * 100 >= writes * 20, "{name}: {overlaps} overlaps of {writes} writes");
        }
    }
}
