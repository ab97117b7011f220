//! `bcached check`: every invariant of the format, read-only, on devices that nobody writes meanwhile.
//!
//! A device's role is what its superblock says. Damage is an answer (exit status 1), and so is a backing device that
//! belongs to none of the sets; a device that cannot be read, or is no cache, is a failure. What was not judged is said.

use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::image::Image;
use crate::output::{Report, Show};
use crate::sizes::human;
use crate::superblock::{self, Found};
use bcached_check::{
    Checked as Judged, Damage, DamageKind, Options, ReadAt, SetSummary, Severity, Source, TreeSummary,
    Volume, check,
};
use bcached_daemon::notes;
use bcached_format::units::bytes_of;
use bcached_format::{BackingState, Inode, Position, Superblock, Uuid};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// What was found on all devices.
#[derive(Serialize)]
struct Checked {
    sound: bool,
    sets: Vec<CheckedSet>,
    /// Backing devices whose superblocks are sound.
    backing_devices: Vec<String>,
    /// Those of them that belong to a set which is not among `sets`.
    foreign_backing_devices: Vec<Foreign>,
}

/// A backing device of a set that was not named.
#[derive(Serialize)]
struct Foreign {
    device: String,
    set_uuid: String,
}

#[derive(Serialize)]
struct CheckedSet {
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    set: Option<SetSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<TreeSummary>,
    volumes: Vec<Volume>,
    /// Data that is newer than its backing device; volumes without one have none. Absent if it cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    dirty_bytes: Option<u64>,
    /// Volumes that were not judged against their backing devices, because these were not named.
    volumes_without_backing: Vec<String>,
    /// Volumes with cached data behind the end of their backing devices.
    volumes_cut_short: Vec<String>,
    /// A note that a killed daemon left, which may hold acknowledged writes that are not on the devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<PathBuf>,
    findings: Vec<Damage>,
    findings_left_out: u64,
}

/// A device with what its superblock says it is.
struct Opened {
    name: String,
    device: Device,
    role: Role,
}

enum Role {
    /// A cache.
    Cache,
    /// Something with a damaged superblock: what it is called, or else a cache.
    Unfit,
    /// A backing device, and the set that it belongs to, if any.
    Backing(Option<Uuid>),
}

/// Checks the devices.
pub fn run(flags: &flags::Check) -> Result<Report, Failure> {
    let (mut caches, mut backings) = (Vec::new(), Vec::new());
    for path in &flags.devices {
        let opened = open(path)?;
        if matches!(opened.role, Role::Backing(_)) { backings.push(opened) } else { caches.push(opened) }
    }
    for path in &flags.backing {
        let opened = open(path)?;
        if matches!(opened.role, Role::Cache) {
            return Err(Failure::new(Kind::NotBcache, format!("{} is no backing device", path.display()))
                .option("--backing"));
        }
        // Only a set's check looks at backing devices.
        let is_judged = !caches.is_empty() || !matches!(opened.role, Role::Unfit);
        if is_judged { backings.push(opened) } else { caches.push(opened) }
    }
    let cache_images: Vec<_> = caches.iter().map(|opened| (opened, Image::of(&opened.device))).collect();
    let images: Vec<_> = backings.iter().map(|opened| Image::of(&opened.device)).collect();
    let references: Vec<&dyn ReadAt> = images.iter().map(|image| image as &dyn ReadAt).collect();
    let sets: Vec<_> =
        cache_images.iter().map(|(opened, image)| check_set(&opened.name, image, &references)).collect();
    let foreign_backing_devices = foreign(&sets, &backings);
    let sound = sets.iter().all(CheckedSet::is_sound) && foreign_backing_devices.is_empty();
    let fit = backings.iter().filter(|opened| matches!(opened.role, Role::Backing(_)));
    let backing_devices = fit.map(|opened| opened.name.clone()).collect();
    let report = Report::of(&Checked { sound, sets, backing_devices, foreign_backing_devices })?;
    let failure = cache_images.iter().map(|(_, image)| image).chain(&images).find_map(Image::failure);
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None if sound => report,
        None => report.answering_no(),
    })
}

/// The backing devices that belong to none of the sets: against these nothing was judged. Said only if all sets are
/// known, since one with a damaged superblock may be theirs.
fn foreign(sets: &[CheckedSet], backings: &[Opened]) -> Vec<Foreign> {
    let known: Option<Vec<Uuid>> = sets.iter().map(|set| Some(set.set.as_ref()?.set_uuid)).collect();
    let Some(known) = known.filter(|known| !known.is_empty()) else { return Vec::new() };
    let foreign = backings.iter().filter_map(|opened| match opened.role {
        Role::Backing(Some(set)) if !known.contains(&set) => {
            Some(Foreign { device: opened.name.clone(), set_uuid: set.to_string() })
        }
        _ => None,
    });
    foreign.collect()
}

/// Opens a device so that nobody writes it meanwhile. What is no bcache device at all is refused here; what is a
/// damaged one is for the check to say.
fn open(path: &Path) -> Result<Opened, Failure> {
    let device = device::open(path, Access::Check)?;
    let role = match superblock::read(&device)? {
        Found::Nothing => {
            return Err(Failure::new(Kind::NotBcache, format!("cannot check {}", path.display()))
                .why("it has no bcache superblock"));
        }
        Found::Sound(Superblock::Backing(backing)) => {
            Role::Backing((backing.state() != BackingState::None).then(|| backing.set_uuid()))
        }
        Found::Sound(Superblock::Cache(_)) => Role::Cache,
        Found::Unfit(_) => Role::Unfit,
    };
    Ok(Opened { name: path.display().to_string(), device, role })
}

fn check_set(device: &str, image: &Image<'_>, backings: &[&dyn ReadAt]) -> CheckedSet {
    let judged = check(image, backings, Options::default());
    let volumes_cut_short = cut_short(&judged);
    let report = judged.report;
    let with_backing = |volume: &&Volume| !volume.flash_only && !volume.invalidated;
    let unjudged = report.volumes.iter().filter(with_backing).filter(|volume| volume.state.is_none());
    let dirty = report.volumes.iter().filter(|volume| !volume.flash_only).map(|volume| volume.dirty_sectors);
    // That a backing device is of another set is said once, by those who know all the sets.
    let is_own = |damage: &Damage| !matches!(damage.kind, DamageKind::OtherSet { .. });
    CheckedSet {
        device: device.to_owned(),
        dirty_bytes: report.tree.is_some().then(|| bytes_of(dirty.sum())),
        volumes_without_backing: unjudged.map(name).collect(),
        volumes_cut_short,
        note: report.set.as_ref().and_then(|set| notes::left_behind(set.set_uuid)),
        set: report.set,
        tree: report.tree,
        findings: report.findings.into_iter().filter(is_own).collect(),
        findings_left_out: report.findings_left_out,
        volumes: report.volumes,
    }
}

/// The volumes with cached data behind the end of their backing devices, which were longer once. If that data is
/// dirty, the check has found an error as well.
fn cut_short(judged: &Judged<'_>) -> Vec<String> {
    let Some(view) = &judged.view else { return Vec::new() };
    let is_cut = |volume: &&Volume| {
        let Some(end) = volume.end.filter(|_| !volume.flash_only && !volume.invalidated) else {
            return false;
        };
        let beyond = Position::MAX.offset.saturating_sub(end);
        let pieces = view.content(Inode(volume.inode), end, beyond);
        pieces.iter().any(|piece| matches!(piece.source, Source::Cache { .. }))
    };
    view.volumes().iter().filter(is_cut).map(name).collect()
}

/// The label, or else the UUID.
fn name(volume: &Volume) -> String {
    let label = volume.label.to_string();
    if label.is_empty() { volume.uuid.to_string() } else { label }
}

impl CheckedSet {
    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    fn is_sound(&self) -> bool {
        self.count(Severity::Error) == 0 && self.findings_left_out == 0
    }

    /// Writing to a string cannot fail.
    fn write(&self, text: &mut String) -> std::fmt::Result {
        for finding in &self.findings {
            let word = match finding.severity {
                Severity::Warning => "warning",
                Severity::Error => "error",
            };
            writeln!(text, "{}: {word}: {finding}", self.device)?;
        }
        if self.findings_left_out > 0 {
            writeln!(text, "{}: {} more findings are not listed", self.device, self.findings_left_out)?;
        }
        for volume in &self.volumes_cut_short {
            writeln!(
                text,
                "{}: warning: data of {volume} is cached behind the end of its backing device: was that cut short?",
                self.device
            )?;
        }
        match self.count(Severity::Error) {
            0 if self.findings_left_out == 0 => write!(text, "{}: sound", self.device)?,
            errors => write!(text, "{}: {}", self.device, counted(errors as u64, "error"))?,
        }
        if let Some(tree) = &self.tree {
            let used = self.volumes.iter().filter(|volume| !volume.invalidated).count();
            let nodes = counted(tree.interior_nodes + tree.leaves, "node");
            write!(text, ", {nodes}, {}", counted(used as u64, "volume"))?;
        } else if self.set.as_ref().is_some_and(|set| !set.started) {
            write!(text, ", never started")?;
        }
        if let Some(dirty) = self.dirty_bytes {
            write!(text, ", {} dirty", human(dirty))?;
            let alone = self.volumes.iter().filter(|volume| volume.flash_only && !volume.invalidated);
            let alone: u64 = alone.map(|volume| bytes_of(volume.dirty_sectors)).sum();
            if alone > 0 {
                write!(text, ", {} of volumes that live here alone", human(alone))?;
            }
        }
        writeln!(text)?;
        self.write_unjudged(text)
    }

    /// What this check says nothing about.
    fn write_unjudged(&self, text: &mut String) -> std::fmt::Result {
        if !self.volumes_without_backing.is_empty() {
            let volumes = self.volumes_without_backing.join(", ");
            let what = "not judged against the backing devices, which are not named (--backing)";
            writeln!(text, "{}: {what}: {volumes}", self.device)?;
        }
        if let Some(note) = &self.note {
            let what = "a killed bcached left a note, which may hold acknowledged writes that are not on the devices";
            let next = "serve the set once before anything else runs it, and before a reboot";
            writeln!(text, "{}: {what}: {}; {next}", self.device, note.display())?;
        }
        Ok(())
    }
}

/// `1 node`, `2 nodes`.
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

impl Show for Checked {
    const SCHEMA: &'static str = "bcached.check";
    /// 2: kinds of findings in kebab-case.
    const SCHEMA_VERSION: u32 = 2;

    fn text(&self) -> String {
        let mut text = String::new();
        for set in &self.sets {
            let _ = set.write(&mut text);
        }
        for foreign in &self.foreign_backing_devices {
            let Foreign { device, set_uuid } = foreign;
            let _ = writeln!(text, "{device}: belongs to the cache set {set_uuid}, which is not named");
        }
        if self.sets.is_empty() {
            for device in &self.backing_devices {
                let _ = writeln!(text, "{device}: sound superblock of a backing device");
            }
        }
        text
    }
}
