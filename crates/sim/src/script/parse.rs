//! Parses a script, line by line and in a fixed order. Each value is checked against its limits
//! before it is used.
//!
//! A step can be written in only one way: after it has been parsed, it is formatted again and the
//! result must equal the line. So the syntax of [`Step`] is defined in one place, its `Display`,
//! and a script cannot be ambiguous.

use super::limits::{
    BYTES_MAX, CUTS_MAX, DEPTH, PAUSE_MS_MAX, PAUSES_MS_MAX, REQUEST_SECTORS_MAX, SECTORS_MAX, STEPS_MAX,
};
use super::{Script, VERSION, start_word};
use crate::disk::{DiskFault, FaultRule, OpKind, WrittenPart};
use crate::failure::CrashPoint;
use crate::growth::{self, GrowthStage};
use crate::system::{Mode, PolicyOption};
use crate::workload::{Restart, Step, StepSource, Workload};
use std::fmt::Debug;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;

/// Number of characters of a damaged line that an error message shows.
const SHOWN: usize = 60;

/// What is wrong with a script, and in which line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}: {damage}")]
pub struct ScriptError {
    /// Line number, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub damage: ScriptErrorKind,
}

/// What can be wrong with a line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScriptErrorKind {
    /// The bytes are not UTF-8.
    #[error("this is not UTF-8 text")]
    NoText,
    /// The file is too long, or there are too many steps or crashes.
    #[error("a script has at most {0}")]
    TooMuch(String),
    /// The file does not begin with the script header.
    #[error("a script begins with \"sim script {VERSION}\", not with {0:?}")]
    NoScript(String),
    /// The script has another version of the format.
    #[error("the script is of version {0:?} and this simulator reads version {VERSION} only")]
    Version(String),
    /// Lines are missing.
    #[error("the script ends here, before its line \"end\": it is incomplete")]
    Ended,
    /// There is something after the end.
    #[error("nothing may follow \"end\", but here is {0:?}")]
    Behind(String),
    /// The head contains another line than expected.
    #[error("expected \"{wanted} ..\" here, found {found:?}")]
    Field {
        /// The key that the line must begin with.
        wanted: &'static str,
        /// The line found.
        found: String,
    },
    /// A value is impossible, or cannot be run.
    #[error("{key} must be {wanted}, not {found:?}")]
    Value {
        /// The key.
        key: &'static str,
        /// The permitted values.
        wanted: String,
        /// The value found.
        found: String,
    },
    /// The sizes are not those of the grown set that the script starts from.
    #[error("the sizes are not those of the grown set that the line \"start\" names")]
    NotGrown,
    /// The line is not a step.
    #[error("{0:?} is not a step")]
    Step(String),
    /// A device fails in a workload that is declared to be without failures.
    #[error("a device fails, although the script says \"troubled no\"")]
    Trouble,
    /// A volume or a device does not exist.
    #[error("there is no {what} {found}: there are {count}, counted from 0")]
    Absent {
        /// "volume" or "device".
        what: &'static str,
        /// The number given.
        found: u64,
        /// How many there are; numbers count from 0.
        count: u64,
    },
    /// A request is outside its volume, or not aligned to its blocks.
    #[error(
        "sectors {found:?} are not a valid request to a volume of {sectors} sectors in blocks of {block}: {why}"
    )]
    Request {
        /// The sectors of the request.
        found: Range<u64>,
        /// The size of the volume in sectors.
        sectors: u64,
        /// The block size of the volume in sectors.
        block: u64,
        /// The reason.
        why: &'static str,
    },
    /// A crash is malformed.
    #[error("{0}")]
    Cut(String),
}

/// Returns the text of a file, of which up to one byte more than the limit has been read.
pub(super) fn text_of(bytes: &[u8]) -> Result<&str, ScriptError> {
    if bytes.len() as u64 > BYTES_MAX {
        return Err(ScriptError { line: 1, damage: ScriptErrorKind::TooMuch(format!("{BYTES_MAX} bytes")) });
    }
    str::from_utf8(bytes).map_err(|error| {
        let good = &bytes[..error.valid_up_to()];
        let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
        ScriptError { line, damage: ScriptErrorKind::NoText }
    })
}

/// Parses a whole script.
pub(super) fn script(text: &str, file: &str) -> Result<Script, ScriptError> {
    let mut reader = ScriptReader { lines: text.lines(), line: 0, steps: 0, sectors: 0, pauses_ms: 0 };
    let read = reader.script(file);
    read.map_err(|damage| ScriptError { line: reader.line, damage })
}

pub(super) struct ScriptReader<'a> {
    lines: std::str::Lines<'a>,
    /// Number of lines read.
    line: usize,
    /// Number of steps read.
    steps: usize,
    /// Total sectors of all requests read.
    sectors: u64,
    /// Total milliseconds of all pauses read.
    pauses_ms: u64,
}

impl<'a> ScriptReader<'a> {
    /// Returns the next line that is neither empty nor a comment.
    fn next(&mut self) -> Result<&'a str, ScriptErrorKind> {
        loop {
            self.line += 1;
            let line = self.lines.next().ok_or(ScriptErrorKind::Ended)?;
            if !line.is_empty() && !line.starts_with('#') {
                return Ok(line);
            }
        }
    }

    fn script(&mut self, file: &str) -> Result<Script, ScriptErrorKind> {
        let first = self.next().map_err(|_| ScriptErrorKind::NoScript(String::new()))?;
        let version =
            first.strip_prefix("sim script ").ok_or_else(|| ScriptErrorKind::NoScript(shown(first)))?;
        if version != VERSION.to_string() {
            return Err(ScriptErrorKind::Version(shown(version)));
        }
        let mut workload = self.head(file)?;
        self.field_without_value("steps")?;
        let (steps, mut word) = self.steps(&workload)?;
        workload.steps = steps;
        if word == "after" {
            let (after, next) = self.steps(&workload)?;
            word = next;
            workload.origin = StepSource::Script { file: file.to_owned(), after };
        }
        let mut cuts = Vec::new();
        if word == "cuts" {
            cuts = self.cuts()?;
        } else if word != "end" {
            return Err(ScriptErrorKind::Step(shown(word)));
        }
        self.line += 1;
        match self.lines.find(|line| !line.is_empty()) {
            None => Ok(Script { workload, cuts }),
            Some(line) => Err(ScriptErrorKind::Behind(shown(line))),
        }
    }

    /// Parses everything before the steps.
    fn head(&mut self, file: &str) -> Result<Workload, ScriptErrorKind> {
        let name = self.field("workload")?;
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if name.len() > SHOWN || !name.bytes().all(is_word) {
            return Err(value("workload", "a word", name));
        }
        let seed = self.number("seed", 0..=u64::MAX)?;
        let depth = self.number("depth", DEPTH)?;
        let troubled = self.is("troubled")?;
        let grown = self.choice(
            "start",
            &[
                None,
                Some(GrowthStage::ThirdLevel),
                Some(GrowthStage::InteriorSplit),
                Some(GrowthStage::Copse),
            ],
        )?;
        let geometry = self.geometry()?;
        if grown.is_some_and(|growth| geometry != growth::geometry(growth, geometry.tuning)) {
            return Err(ScriptErrorKind::NotGrown);
        }
        let origin = StepSource::Script { file: file.to_owned(), after: Vec::new() };
        let (name, steps, kept) = (name.to_owned(), Vec::new(), None);
        Ok(Workload { name, seed, geometry, grown, depth, steps, troubled, origin, kept })
    }

    /// Returns the value of the next line, which must begin with `key`.
    pub(super) fn field(&mut self, key: &'static str) -> Result<&'a str, ScriptErrorKind> {
        let line = self.next()?;
        let rest = line.strip_prefix(key).and_then(|rest| rest.strip_prefix(' '));
        rest.ok_or_else(|| ScriptErrorKind::Field { wanted: key, found: shown(line) })
    }

    fn field_without_value(&mut self, key: &'static str) -> Result<(), ScriptErrorKind> {
        let line = self.next()?;
        if line == key { Ok(()) } else { Err(ScriptErrorKind::Field { wanted: key, found: shown(line) }) }
    }

    pub(super) fn number<T>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<T>,
    ) -> Result<T, ScriptErrorKind>
    where
        T: FromStr + PartialOrd + Debug,
    {
        number(key, self.field(key)?, range)
    }

    /// Does the same as [`Self::number`] for an optional line. Returns `without` if the line is
    /// absent.
    pub(super) fn number_or<T>(
        &mut self,
        key: &'static str,
        without: T,
        range: RangeInclusive<T>,
    ) -> Result<T, ScriptErrorKind>
    where
        T: FromStr + PartialOrd + Debug,
    {
        Ok(self.may_be(|reader| reader.number(key, range))?.unwrap_or(without))
    }

    /// Returns what `read` returns, or `None` if its line is absent.
    pub(super) fn may_be<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, ScriptErrorKind>,
    ) -> Result<Option<T>, ScriptErrorKind> {
        let (lines, line) = (self.lines.clone(), self.line);
        match read(self) {
            Err(ScriptErrorKind::Field { .. }) => {
                (self.lines, self.line) = (lines, line);
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    pub(super) fn one_of(&mut self, key: &'static str, choices: &[u32]) -> Result<u32, ScriptErrorKind> {
        let word = self.field(key)?;
        let found = number(key, word, 0..=u32::MAX)?;
        let is_one = choices.contains(&found);
        is_one.then_some(found).ok_or_else(|| value(key, &format!("one of {choices:?}"), word))
    }

    pub(super) fn is(&mut self, key: &'static str) -> Result<bool, ScriptErrorKind> {
        match self.field(key)? {
            "yes" => Ok(true),
            "no" => Ok(false),
            other => Err(value(key, "yes or no", other)),
        }
    }

    fn choice(
        &mut self,
        key: &'static str,
        all: &[Option<GrowthStage>],
    ) -> Result<Option<GrowthStage>, ScriptErrorKind> {
        let word = self.field(key)?;
        let found = all.iter().find(|grown| start_word(**grown) == word);
        let words: Vec<&str> = all.iter().map(|grown| start_word(*grown)).collect();
        found.copied().ok_or_else(|| value(key, &words.join(" or "), word))
    }

    /// Parses steps up to a word that ends them, and returns that word too.
    fn steps(&mut self, workload: &Workload) -> Result<(Vec<Step>, &'a str), ScriptErrorKind> {
        let mut steps = Vec::new();
        loop {
            let line = self.next()?;
            if matches!(line, "after" | "cuts" | "end") {
                return Ok((steps, line));
            }
            let step = step(line, workload)?;
            self.steps += 1;
            self.sectors += sectors_of(&step);
            if self.steps > STEPS_MAX {
                return Err(ScriptErrorKind::TooMuch(format!("{STEPS_MAX} steps")));
            }
            if let Step::Pause(milliseconds) = step {
                self.pauses_ms += milliseconds;
            }
            if self.pauses_ms > PAUSES_MS_MAX {
                return Err(ScriptErrorKind::TooMuch(format!("{PAUSES_MS_MAX} ms in all its pauses")));
            }
            if self.sectors > SECTORS_MAX {
                return Err(ScriptErrorKind::TooMuch(format!("{SECTORS_MAX} sectors in all its requests")));
            }
            steps.push(step);
        }
    }

    fn cuts(&mut self) -> Result<Vec<CrashPoint>, ScriptErrorKind> {
        let mut cuts: Vec<CrashPoint> = Vec::new();
        loop {
            let line = self.next()?;
            if line == "end" {
                return Ok(cuts);
            }
            let cut: CrashPoint = line.parse().map_err(ScriptErrorKind::Cut)?;
            if cuts.len() == CUTS_MAX {
                return Err(ScriptErrorKind::TooMuch(format!("{CUTS_MAX} crashes")));
            }
            if cut.to_string() != line {
                return Err(ScriptErrorKind::Cut(format!(
                    "a cut is POINT:CRASH:SUBSET, not {:?}",
                    shown(line)
                )));
            }
            cuts.push(cut);
        }
    }
}

/// Parses a step of `workload`, whose steps are not complete yet.
fn step(line: &str, workload: &Workload) -> Result<Step, ScriptErrorKind> {
    let wrong = || ScriptErrorKind::Step(shown(line));
    let words: Vec<&str> = line.split(' ').take(12).collect();
    let fua = words.last() == Some(&"fua");
    let (backed, lodger) =
        (|word| volume_with(word, workload, true), |word| volume_with(word, workload, false));
    let (volume_of, place_of) = (|word| volume(word, workload), |one, two| place(one, two, workload));
    let step = match &words[..words.len() - usize::from(fua)] {
        ["write", volume, sectors] => {
            let (volume, sectors) = place_of(volume, sectors)?;
            Step::Write { volume, sectors, fua }
        }
        [word @ ("zero" | "unmap"), volume, sectors] => {
            let (volume, sectors) = place_of(volume, sectors)?;
            Step::Zero { volume, sectors, fua, may_unmap: *word == "unmap" }
        }
        ["read", volume, sectors] => {
            let (volume, sectors) = place_of(volume, sectors)?;
            Step::Read { volume, sectors }
        }
        ["discard", volume, sectors] => {
            let (volume, sectors) = place_of(volume, sectors)?;
            Step::Discard { volume, sectors }
        }
        ["flush", volume] => Step::Flush { volume: volume_of(volume)? },
        ["mode", volume, mode] => {
            let modes = [Mode::Writethrough, Mode::Writeback, Mode::Writearound, Mode::None];
            Step::Mode { volume: backed(volume)?, mode: named(mode, &modes).ok_or_else(wrong)? }
        }
        ["turn", volume, option, value] => {
            let option = PolicyOption::named(option).ok_or_else(wrong)?;
            let value = number(option.word(), value, option.least()..=option.most())?;
            Step::Turn { volume: volume_of(volume)?, option, value }
        }
        ["detach", volume] => Step::Detach { volume: backed(volume)? },
        ["attach", volume] => Step::Attach { volume: backed(volume)? },
        ["cancel", volume] => Step::Cancel { volume: volume_of(volume)? },
        ["clean", volume] => Step::Clean { volume: backed(volume)? },
        ["readd", volume] => Step::Readd { volume: volume_of(volume)? },
        ["shrink", volume, sectors] => {
            let (volume, sectors) = size_of(volume, sectors, workload)?;
            Step::Shrink { volume, sectors }
        }
        ["grow", volume, sectors] => {
            let (volume, sectors) = size_of(volume, sectors, workload)?;
            Step::Grow { volume, sectors }
        }
        ["forget", volume] => Step::Forget { volume: backed(volume)? },
        ["pull", device, survivors] => pull(device, survivors, workload).ok_or_else(wrong)??,
        ["return", device] => Step::Return { device: backing(device, workload)? },
        ["create", volume] => Step::Create { volume: lodger(volume)? },
        ["delete", volume] => Step::Delete { volume: lodger(volume)? },
        ["pause", milliseconds, "ms"] => Step::Pause(number("pause", milliseconds, 0..=PAUSE_MS_MAX)?),
        ["settle"] => Step::Settle,
        ["older", seed] => Step::Older(seed.parse().map_err(|_| wrong())?),
        ["note", "gone"] => Step::Note { is_there: false },
        ["note", "there"] => Step::Note { is_there: true },
        ["table", seed] => Step::Table(seed.parse().map_err(|_| wrong())?),
        ["restart", restart] => Step::Restart(restart_of(restart).ok_or_else(wrong)?),
        ["trouble", rest @ ..] => trouble(rest, workload, wrong)?,
        _ => return Err(wrong()),
    };
    if step.to_string() == line { Ok(step) } else { Err(wrong()) }
}

fn device_of(word: &str, workload: &Workload) -> Result<usize, ScriptErrorKind> {
    let (found, count) = (number("device", word, 0..=u64::MAX)?, workload.geometry.volumes.len() as u64 + 1);
    let device = usize::try_from(found).ok().filter(|_| found < count);
    device.ok_or(ScriptErrorKind::Absent { what: "device", found, count })
}

/// Returns the number of a device that backs a volume.
fn backing(word: &str, workload: &Workload) -> Result<usize, ScriptErrorKind> {
    let device = device_of(word, workload)?;
    if device > 0 { Ok(device) } else { Err(value("device", "a backing device", word)) }
}

fn pull(device: &str, survivors: &str, workload: &Workload) -> Option<Result<Step, ScriptErrorKind>> {
    let survivors = survivors.parse().ok()?;
    let step = backing(device, workload).map(|device| Step::Pull { device, survivors });
    Some(if workload.troubled { step } else { Err(ScriptErrorKind::Trouble) })
}

fn trouble(
    words: &[&str],
    workload: &Workload,
    wrong: impl Fn() -> ScriptErrorKind,
) -> Result<Step, ScriptErrorKind> {
    let [device, on, sectors, "after", skip, count, "times:", fault] = words else { return Err(wrong()) };
    let device = device_of(device, workload)?;
    let on = [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard].iter().find(|kind| says(on, kind));
    let skip = number("after", skip.strip_suffix(',').ok_or_else(&wrong)?, 0..=u32::MAX)?;
    let rule = FaultRule {
        on: *on.ok_or_else(&wrong)?,
        sectors: range(sectors)?,
        skip,
        count: number("times", count, 0..=u32::MAX)?,
        fault: fault_of(fault).ok_or_else(&wrong)??,
    };
    // A late operation does not make a request fail.
    if !workload.troubled && !matches!(rule.fault, DiskFault::Late(_)) {
        return Err(ScriptErrorKind::Trouble);
    }
    Ok(Step::Trouble { device, rule })
}

fn fault_of(word: &str) -> Option<Result<DiskFault, ScriptErrorKind>> {
    if let Some(late) = word.strip_prefix("Late(").and_then(|rest| rest.strip_suffix(')')) {
        return Some(number("late nanoseconds", late, 0..=PAUSE_MS_MAX * 1_000_000).map(DiskFault::Late));
    }
    let fail = [WrittenPart::Nothing, WrittenPart::Part, WrittenPart::Everything].map(DiskFault::Fail);
    fail.into_iter()
        .chain([DiskFault::Never, DiskFault::Unreachable, DiskFault::Decayed])
        .find(|fault| says(word, fault))
        .map(Ok)
}

fn restart_of(word: &str) -> Option<Restart> {
    if word == "Stop" {
        return Some(Restart::Stop);
    }
    let (how, numbers) = word.strip_suffix(')')?.split_once('(')?;
    match how {
        "Death" => Some(Restart::Death(numbers.parse().ok()?)),
        "Power" => Some(Restart::Power(numbers.parse().ok()?)),
        "Twice" => {
            let (points, seed) = numbers.split_once(',')?;
            Some(Restart::Twice(points.parse().ok()?, seed.parse().ok()?))
        }
        _ => None,
    }
}

/// Returns whether `word` names `value` as a step does.
fn says(word: &str, value: &impl Debug) -> bool {
    format!("{value:?}") == word
}

fn named<T: Debug + Copy>(word: &str, all: &[T]) -> Option<T> {
    all.iter().find(|value| says(word, value)).copied()
}

fn volume(word: &str, workload: &Workload) -> Result<u32, ScriptErrorKind> {
    let (found, count) = (number("volume", word, 0..=u32::MAX)?, u64::from(workload.geometry.count()));
    if u64::from(found) < count {
        Ok(found)
    } else {
        Err(ScriptErrorKind::Absent { what: "volume", found: u64::from(found), count })
    }
}

/// Returns a volume that has a device of its own, or one that is flash-only.
fn volume_with(word: &str, workload: &Workload, device: bool) -> Result<u32, ScriptErrorKind> {
    let volume = volume(word, workload)?;
    let is_such = ((volume as usize) < workload.geometry.volumes.len()) == device;
    let wanted = if device { "a volume with a backing device" } else { "a flash-only volume" };
    is_such.then_some(volume).ok_or_else(|| value("volume", wanted, word))
}

/// Returns a volume and a new size for it, at most the size that it is created with.
fn size_of(volume_word: &str, sectors: &str, workload: &Workload) -> Result<(u32, u64), ScriptErrorKind> {
    let volume = volume(volume_word, workload)?;
    let block = u64::from(workload.geometry.block_sectors);
    let size = number("size", sectors, 1..=workload.geometry.sectors_of(volume))?;
    let is_whole = size.is_multiple_of(block);
    is_whole.then_some((volume, size)).ok_or_else(|| value("size", "whole blocks", sectors))
}

/// Returns a volume and the sectors of a request to it.
fn place(
    volume_word: &str,
    sectors: &str,
    workload: &Workload,
) -> Result<(u32, Range<u64>), ScriptErrorKind> {
    let (volume, found) = (volume(volume_word, workload)?, range(sectors)?);
    let (sectors, block) = (workload.geometry.sectors_of(volume), u64::from(workload.geometry.block_sectors));
    let off = !found.start.is_multiple_of(block) || !found.end.is_multiple_of(block);
    let why = match () {
        () if found.is_empty() => "the range is empty",
        () if found.end > sectors => "they extend beyond its end",
        () if off => "they are not whole blocks",
        () if found.end - found.start > REQUEST_SECTORS_MAX => "they are too many for one request",
        () => return Ok((volume, found)),
    };
    Err(ScriptErrorKind::Request { found, sectors, block, why })
}

fn range(word: &str) -> Result<Range<u64>, ScriptErrorKind> {
    let (start, end) = word.split_once("..").ok_or_else(|| value("a range", "FIRST..END", word))?;
    Ok(number("a first sector", start, 0..=u64::MAX)?..number("an end", end, 0..=u64::MAX)?)
}

/// Returns the number of sectors that a step may keep in memory.
fn sectors_of(step: &Step) -> u64 {
    match step {
        Step::Write { sectors, .. }
        | Step::Zero { sectors, .. }
        | Step::Read { sectors, .. }
        | Step::Discard { sectors, .. } => sectors.end - sectors.start,
        _ => 0,
    }
}

/// Parses a number in its canonical form: digits only, without leading zeroes.
pub(super) fn number<T>(key: &'static str, word: &str, range: RangeInclusive<T>) -> Result<T, ScriptErrorKind>
where
    T: FromStr + PartialOrd + Debug,
{
    let digits = word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    let found = digits.then(|| word.parse().ok()).flatten().filter(|number| range.contains(number));
    let (least, most) = range.into_inner();
    found.ok_or_else(|| value(key, &format!("a number from {least:?} to {most:?}"), word))
}

pub(super) fn value(key: &'static str, wanted: &str, found: impl ToString) -> ScriptErrorKind {
    ScriptErrorKind::Value { key, wanted: wanted.to_owned(), found: shown(&found.to_string()) }
}

/// Returns the part of a line that an error message shows.
fn shown(line: &str) -> String {
    line.chars().take(SHOWN).collect()
}
