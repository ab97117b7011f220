//! `bcached doctor`: reports what this machine offers, and whether devices are fit to serve. It
//! changes nothing; it claims a device for an instant, to find out which process holds it.
//!
//! | file | what |
//! |---|---|
//! | `frontends` | the ways to export a volume, and what the missing ones need |
//! | `machine` | what else serving needs from a machine |
//! | `udev` | udev's rules, and what they do with a device |
//! | `device` | a device: what is on it, and which process holds it |
//! | `hardware` | what the kernel reports about a device, and what of that is bad |
//! | `system` | where all that is read: below a root directory, which a test replaces |

mod device;
mod frontends;
mod hardware;
mod machine;
mod system;
mod udev;

use self::device::{DeviceReport, ExaminedDevice};
use self::system::SystemPaths;
use crate::failure::Failure;
use crate::flags;
use crate::output::{Printable, Report};
use bcached_offline::lost_sets::LostSets;
use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;

/// The column at which details begin, and the width at which lines wrap.
const COLUMN: usize = 32;
const WIDTH: usize = 100;

/// The result of an examination.
#[derive(Serialize)]
struct DoctorReport {
    machine: Vec<Facility>,
    devices: Vec<DeviceReport>,
}

/// A facility that a machine may offer.
#[derive(Serialize)]
struct Facility {
    name: &'static str,
    available: bool,
    detail: Cow<'static, str>,
    /// What makes it available, or what to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mends: Option<String>,
    #[serde(skip)]
    state: FacilityState,
}

/// How good the state of a facility is, in the text.
#[derive(Clone, Copy)]
enum FacilityState {
    /// Nothing needs attention.
    Ok,
    /// It is not available, or needs attention.
    Warn,
    /// Something that is in use does not work.
    Fail,
}

impl FacilityState {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

/// What the user should know about a device although it is fit.
#[derive(Clone, Serialize)]
struct Finding {
    kind: &'static str,
    text: String,
}

impl Facility {
    fn yes(name: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { name, available: true, detail: detail.into(), mends: None, state: FacilityState::Ok }
    }

    fn no(name: &'static str, detail: impl Into<Cow<'static, str>>, mends: Option<String>) -> Self {
        Self { name, available: false, detail: detail.into(), mends, state: FacilityState::Warn }
    }

    const fn in_state(mut self, state: FacilityState) -> Self {
        self.state = state;
        self
    }
}

impl Finding {
    const fn new(kind: &'static str, text: String) -> Self {
        Self { kind, text }
    }
}

/// Examines the machine and the devices.
pub fn run(flags: &flags::DoctorArgs) -> Result<Report, Failure> {
    let system = SystemPaths::here();
    let lost = match flags.devices.as_slice() {
        [] => LostSets::default(),
        devices => LostSets::look_with(devices, flags.configuration.config.as_deref())?,
    };
    let mut examined: Vec<_> =
        flags.devices.iter().map(|path| ExaminedDevice::at(path, &system, &lost)).collect();
    device::compare_roles(&mut examined);
    let unfit = examined.iter().find_map(|examined| examined.failure.clone());
    let devices = examined.into_iter().map(|examined| examined.report).collect();
    let report = Report::of(&DoctorReport { machine: machine::items(&system), devices })?;
    Ok(match unfit {
        // The line of its device already reports it.
        Some(failure) => report.failing(failure).telling_failures(),
        None => report,
    })
}

impl Printable for DoctorReport {
    const SCHEMA: &'static str = "bcached.doctor";

    fn text(&self) -> String {
        let mut text = String::new();
        for item in &self.machine {
            let head = format!("{:<26} {:<4}", item.name, item.state.word());
            let mends = item.mends.as_ref().map_or_else(String::new, |mends| format!(". Fix: {mends}"));
            wrapped(&mut text, &head, &format!("{}{mends}", item.detail));
        }
        for report in &self.devices {
            let word = if report.fit { "fit" } else { "not fit" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{}: {word}, {}{}", report.device, report.detail, report.measures());
            for finding in &report.findings {
                let _ = writeln!(text, "  {}: {}", finding.kind, finding.text);
            }
        }
        text
    }
}

/// Appends `head` and then `told`, wrapped to the width. A word longer than a line is not split.
fn wrapped(text: &mut String, head: &str, told: &str) {
    let mut line = format!("{head:<COLUMN$}");
    let mut is_empty = true;
    for word in told.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(line.trim_end());
            text.push('\n');
            (line, is_empty) = (" ".repeat(COLUMN), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_between_words_and_nothing_is_lost() {
        let told = "word ".repeat(60);
        let mut text = String::new();
        wrapped(&mut text, "a name                     OK  ", told.trim());
        let lines: Vec<_> = text.lines().collect();
        assert!(lines.len() > 3 && lines.iter().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(lines[1..].iter().all(|line| line.starts_with(&" ".repeat(COLUMN))), "{text}");
        assert_eq!(text.matches("word").count(), 60);
        let (mut text, long) = (String::new(), "x".repeat(200));
        wrapped(&mut text, "a name", &format!("{long}: next"));
        assert!(text.lines().next().is_some_and(|line| line.ends_with(&format!("{long}:"))), "{text}");
    }
}
