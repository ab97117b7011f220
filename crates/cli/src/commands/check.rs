//! `bcached check`: every invariant of the format, read-only, on devices that nobody writes meanwhile.
//!
//! A device's role is what its superblock says. Damage is an answer (exit status 1); a device that cannot be read, or
//! is no cache, is a failure.

use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::image::Image;
use crate::output::{Report, Show};
use crate::superblock::{self, Found};
use bcached_check::{Damage, Options, ReadAt, SetSummary, Severity, TreeSummary, Volume, check};
use bcached_format::Superblock;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// What was found on all devices.
#[derive(Serialize)]
struct Checked {
    sound: bool,
    sets: Vec<CheckedSet>,
    /// Backing devices whose superblocks are sound.
    backing_devices: Vec<String>,
}

#[derive(Serialize)]
struct CheckedSet {
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<SetSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<TreeSummary>,
    volumes: Vec<Volume>,
    findings: Vec<Finding>,
    findings_left_out: u64,
}

#[derive(Serialize)]
struct Finding {
    message: String,
    #[serde(flatten)]
    damage: Damage,
}

/// Checks the devices.
pub fn run(flags: &flags::Check) -> Result<Report, Failure> {
    let mut caches = Vec::new();
    let mut backings = Vec::new();
    let mut backing_devices = Vec::new();
    for path in &flags.devices {
        let (device, is_backing) = open(path)?;
        if is_backing {
            backing_devices.push(path.display().to_string());
            backings.push(device);
        } else {
            caches.push((path, device));
        }
    }
    for path in &flags.backing {
        let (device, is_backing) = open(path)?;
        if !is_backing {
            return Err(Failure::new(Kind::NotBcache, format!("{} is no backing device", path.display()))
                .option("--backing"));
        }
        backing_devices.push(path.display().to_string());
        backings.push(device);
    }
    let caches: Vec<_> = caches.iter().map(|(path, device)| (path, Image::of(device))).collect();
    let backings: Vec<_> = backings.iter().map(Image::of).collect();
    let images: Vec<&dyn ReadAt> = backings.iter().map(|image| image as &dyn ReadAt).collect();
    let sets: Vec<_> = caches.iter().map(|(path, image)| check_set(path, image, &images)).collect();
    let sound = sets.iter().all(CheckedSet::is_sound);
    let report = Report::of(&Checked { sound, sets, backing_devices })?;
    let failure = caches.iter().map(|(_, image)| image).chain(&backings).find_map(Image::failure);
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None if sound => report,
        None => report.answering_no(),
    })
}

/// Opens a device so that nobody writes it meanwhile; true for a backing device. What is no bcache device at all is
/// refused here; what is a damaged one is for the check to say.
fn open(path: &Path) -> Result<(Device, bool), Failure> {
    let device = device::open(path, Access::Check)?;
    match superblock::read(&device)? {
        Found::Nothing => Err(Failure::new(Kind::NotBcache, format!("cannot check {}", path.display()))
            .why("it has no bcache superblock")),
        Found::Sound(Superblock::Backing(_)) => Ok((device, true)),
        Found::Sound(Superblock::Cache(_)) | Found::Unfit(_) => Ok((device, false)),
    }
}

fn check_set(path: &Path, image: &Image<'_>, backings: &[&dyn ReadAt]) -> CheckedSet {
    let report = check(image, backings, Options::default()).report;
    let findings = report.findings.into_iter();
    CheckedSet {
        device: path.display().to_string(),
        set: report.set,
        tree: report.tree,
        volumes: report.volumes,
        findings: findings.map(|damage| Finding { message: damage.to_string(), damage }).collect(),
        findings_left_out: report.findings_left_out,
    }
}

impl CheckedSet {
    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.damage.severity == severity).count()
    }

    fn is_sound(&self) -> bool {
        self.count(Severity::Error) == 0 && self.findings_left_out == 0
    }

    /// Writing to a string cannot fail.
    fn write(&self, text: &mut String) -> std::fmt::Result {
        for finding in &self.findings {
            let word = match finding.damage.severity {
                Severity::Warning => "warning",
                Severity::Error => "error",
            };
            writeln!(text, "{}: {word}: {}", self.device, finding.message)?;
        }
        if self.findings_left_out > 0 {
            writeln!(text, "{}: {} more findings are not listed", self.device, self.findings_left_out)?;
        }
        match self.count(Severity::Error) {
            0 if self.findings_left_out == 0 => write!(text, "{}: sound", self.device)?,
            errors => write!(text, "{}: {errors} errors", self.device)?,
        }
        if let Some(tree) = &self.tree {
            let nodes = tree.interior_nodes + tree.leaves;
            write!(text, ", {nodes} nodes, {} volumes", self.volumes.len())?;
        } else if self.set.as_ref().is_some_and(|set| !set.started) {
            write!(text, ", never started")?;
        }
        writeln!(text)
    }
}

impl Show for Checked {
    const SCHEMA: &'static str = "bcached.check";

    fn text(&self) -> String {
        let mut text = String::new();
        for set in &self.sets {
            let _ = set.write(&mut text);
        }
        if self.sets.is_empty() {
            for device in &self.backing_devices {
                let _ = writeln!(text, "{device}: sound superblock of a backing device");
            }
        }
        text
    }
}
