//! Cuts a run, has the results opened and judged, and counts the verdicts.

use std::collections::BTreeMap;
use std::fmt;

use bcached_sim::oracle::Oracle;

use super::cut::{BACKING, CACHE, Disks, Survivors};
use super::judge::{Promises, Verdict, judge};
use super::reader::{Reading, read};
use super::witness::{Event, Request};
use super::writer::{Run, Writer};
use crate::failure::Outcome;
use crate::set::CacheSet;
use crate::side::Ours;
use crate::uml::Uml;
use crate::workload::Random;

/// Number of operations after a flush within which an early cut falls.
const SOON: u64 = 16;

/// The programs that open the images of a cut.
#[derive(Clone, Copy, Debug)]
pub struct Readers<'a> {
    /// The kernel.
    pub uml: &'a Uml,
    /// Our daemon.
    pub ours: &'a Ours,
}

impl Readers<'_> {
    /// Returns what `reader` reads on these devices, for each way of surviving.
    ///
    /// # Errors
    /// A failure on the host, or a kernel that died.
    pub fn open(
        &self,
        reader: Writer,
        run: &Run,
        disks: &Disks<'_>,
        survivors: &[Survivors],
    ) -> Outcome<Vec<Reading>> {
        let make = |survivors: &Survivors| {
            CacheSet::from_images(run.geometry, |cache, backing| {
                disks.write_image(CACHE, *survivors, cache)?;
                disks.write_image(BACKING, *survivors, backing)
            })
        };
        let sets: Vec<CacheSet> = survivors.iter().map(make).collect::<Result<_, _>>()?;
        Ok(read(reader, self.uml, self.ours, &sets)?)
    }
}

/// The result of one cut.
#[derive(Clone, Debug)]
pub enum Trial {
    /// The volume was read.
    Judged(Verdict),
    /// The volume could not be read; with the reason.
    Refused(String),
}

impl Trial {
    /// Judges a reading.
    #[must_use]
    pub fn of(permitted: &Oracle, reading: Reading) -> Self {
        match reading {
            Reading::Volume { with_cache, alone } => Self::Judged(judge(permitted, &with_cache, &alone)),
            Reading::Refused(words) => Self::Refused(words),
        }
    }

    /// Returns true if the volume came up and nothing is wrong with it.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        matches!(self, Self::Judged(verdict) if verdict.is_clean())
    }
}

/// The results of the cuts with the same kind of survivors, counted.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    cuts: u64,
    refused: u64,
    /// Cuts with at least one sector lost, lost behind the cache, changed.
    wrong: [u64; 3],
}

/// The counted results of all cuts of a run that one reader opened.
#[derive(Debug)]
pub struct Tally {
    title: String,
    rows: BTreeMap<&'static str, Row>,
    /// The first failure of each kind, described.
    examples: BTreeMap<&'static str, String>,
}

impl Tally {
    /// Creates an empty tally.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), rows: BTreeMap::new(), examples: BTreeMap::new() }
    }

    fn count(&mut self, position: usize, survivors: Survivors, trial: &Trial) {
        let row = self.rows.entry(survivors.name()).or_default();
        row.cuts += 1;
        let mut example = |kind, words: &str| {
            let place = format!("cut before operation {position}, {survivors:?}: {words}");
            self.examples.entry(kind).or_insert(place);
        };
        match trial {
            Trial::Refused(words) => {
                row.refused += 1;
                example("refused", words);
            }
            Trial::Judged(Verdict { lost, lost_behind, changed }) => {
                let kinds = [("lost", lost), ("lost behind the cache", lost_behind), ("changed", changed)];
                for ((kind, violations), wrong) in kinds.into_iter().zip(&mut row.wrong) {
                    if let Some(first) = violations.first() {
                        *wrong += 1;
                        example(kind, &format!("{} sectors, the first: {first}", violations.len()));
                    }
                }
            }
        }
    }

    /// Returns true if every cut was opened and nothing was wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.examples.is_empty()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        writeln!(
            f,
            "| survived | cuts | refused | lost | lost behind the cache | changed |\n|---|---|---|---|---|---|"
        )?;
        for (survived, Row { cuts, refused, wrong: [lost, behind, changed] }) in &self.rows {
            writeln!(f, "| {survived} | {cuts} | {refused} | {lost} | {behind} | {changed} |")?;
        }
        for (kind, words) in &self.examples {
            writeln!(f, "{kind}: {words}")?;
        }
        Ok(())
    }
}

/// Cuts a run at these `positions`, which are in order, in each way of surviving, and has each of
/// `readers` open the result.
///
/// # Errors
/// A failure on the host, or an invalid sequence of events.
pub fn cut(
    run: &Run,
    who: Readers<'_>,
    readers: &[Writer],
    positions: &[usize],
    random: &mut Random,
    title: &str,
) -> Outcome<Vec<Tally>> {
    let (mut disks, mut promises) = (Disks::new(&run.recording, &run.before), Promises::new(&run.story));
    let name = |reader: &Writer| Tally::new(format!("{title}, opened by {}", reader.name()));
    let mut tallies: Vec<Tally> = readers.iter().map(name).collect();
    for position in positions.iter().copied() {
        disks.advance(position);
        promises.advance(position)?;
        let permitted = promises.after_power_cut();
        let ways = Survivors::all(random);
        for (reader, tally) in readers.iter().zip(&mut tallies) {
            let readings = who.open(*reader, run, &disks, &ways)?;
            for (survivors, reading) in ways.into_iter().zip(readings) {
                tally.count(position, survivors, &Trial::of(&permitted, reading));
            }
        }
    }
    Ok(tallies)
}

/// Chooses positions of cuts while clients are at work, in order. Every second one comes soon after
/// a flush was acknowledged, when the most has just been promised.
///
/// # Errors
/// None on a 64-bit machine.
pub fn positions(run: &Run, places: u64, random: &mut Random) -> Outcome<Vec<usize>> {
    let (first, end) = (run.story.first().map_or(0, |(place, _)| *place), run.recording.operations.len());
    let flushes = answered_flushes(run);
    let mut positions = Vec::new();
    for index in 0..places {
        let (from, span) = match u64::try_from(flushes.len())? {
            count @ 1.. if index % 2 == 0 => (flushes[usize::try_from(random.below(count))?], SOON),
            _ => (first, (end - first) as u64),
        };
        positions.push((from + 1 + usize::try_from(random.below(span))?).min(end));
    }
    positions.sort_unstable();
    Ok(positions)
}

/// Returns the positions at which clients were told that a flush had succeeded.
fn answered_flushes(run: &Run) -> Vec<usize> {
    let mut flushes = Vec::new();
    let mut answered = Vec::new();
    for (place, event) in &run.story {
        match *event {
            Event::Begin { number, request: Request::Flush } => flushes.push(number),
            Event::End { number, success: true } if flushes.contains(&number) => answered.push(*place),
            _ => {}
        }
    }
    answered
}
