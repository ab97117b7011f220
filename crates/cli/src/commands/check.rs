//! `bcached check`: checks every invariant of the format, read-only, on devices that no process
//! writes meanwhile.
//!
//! A device's role is what its superblock says. Damage is an answer (exit status 1), and so is a
//! backing device that belongs to none of the sets. A device that cannot be read, or is no cache,
//! is a failure. The report says what was not judged, and never prints a number that a damaged
//! structure hides.

use crate::device::{self, Access, Device};
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::image::Image;
use crate::output::{Printable, Report};
use crate::superblock::{self, SuperblockProbe};
use bcached_check::{
    BackingClaim, Certainty, CheckResult, Damage, DamageKind, DataSource, FindingCount, HiddenRange, Options,
    ReadAt, SetSummary, Severity, TreeSummary, Volume, check,
};
use bcached_format::units::bytes_of;
use bcached_format::{BackingState, Inode, Position, Superblock, Uuid};
use bcached_offline::notes;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use wording::{FindingGroup, name};

mod wording;

/// The result for all devices.
#[derive(Serialize)]
struct CheckReport {
    sound: bool,
    sets: Vec<CheckedSet>,
    /// Backing devices with a sound superblock.
    backing_devices: Vec<String>,
    /// Those of `backing_devices` that belong to a set which is not among `sets`.
    foreign_backing_devices: Vec<ForeignBacking>,
}

/// A backing device of a set that was not named.
#[derive(Serialize)]
struct ForeignBacking {
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
    /// The verdict in one line.
    verdict: String,
    /// The findings, grouped by kind.
    damage: Vec<FindingGroup>,
    /// How much is known about the amount of dirty data.
    dirty_state: Certainty,
    /// Dirty data that is newer than its backing device; volumes without a backing device have
    /// none. Absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    dirty_bytes: Option<u64>,
    /// The same if it is only a lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    dirty_bytes_at_least: Option<u64>,
    /// Dirty data of volumes that the UUID table does not name. Absent if none is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    dirty_bytes_of_nobody: Option<u64>,
    /// What the superblocks of the backing devices say about their state.
    backing_claims: Vec<BackingClaim>,
    /// Ranges whose index is damaged, in sectors of the volumes' key spaces.
    hidden: Vec<HiddenRange>,
    /// Volumes that were not judged against their backing devices, because these were not named.
    volumes_without_backing: Vec<String>,
    /// Volumes with cached data past the end of their backing devices.
    volumes_cut_short: Vec<String>,
    /// A note that a killed daemon left behind. It may hold acknowledged writes that are not on the
    /// devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<PathBuf>,
    findings: Vec<Damage>,
    findings_left_out: u64,
    /// The number of findings of each kind.
    counts: Vec<FindingCount>,
    /// If set, the text lists each finding.
    #[serde(skip)]
    verbose: bool,
}

/// An open device with its role according to its superblock.
struct OpenedDevice {
    name: String,
    device: Device,
    role: SuperblockKind,
}

enum SuperblockKind {
    /// A cache.
    Cache,
    /// A device with a damaged superblock. It is treated as what the command line calls it, by
    /// default a cache.
    Invalid,
    /// A backing device, and the set that it belongs to, if any.
    Backing(Option<Uuid>),
}

/// Checks the devices.
pub fn run(flags: &flags::CheckArgs) -> Result<Report, Failure> {
    let (mut caches, mut backings) = (Vec::new(), Vec::new());
    for path in &flags.devices {
        let opened = open(path)?;
        if matches!(opened.role, SuperblockKind::Backing(_)) {
            backings.push(opened);
        } else {
            caches.push(opened);
        }
    }
    for path in &flags.backing {
        let opened = open(path)?;
        if matches!(opened.role, SuperblockKind::Cache) {
            return Err(Failure::new(Kind::NotBcache, format!("{} is not a backing device", path.display()))
                .option("--backing"));
        }
        // Backing devices are looked at only by the check of a set.
        let is_judged = !caches.is_empty() || !matches!(opened.role, SuperblockKind::Invalid);
        if is_judged { backings.push(opened) } else { caches.push(opened) }
    }
    let cache_images: Vec<_> = caches.iter().map(|opened| (opened, Image::of(&opened.device))).collect();
    let images: Vec<_> = backings.iter().map(|opened| Image::of(&opened.device)).collect();
    let references: Vec<&dyn ReadAt> = images.iter().map(|image| image as &dyn ReadAt).collect();
    let sets: Vec<_> = cache_images
        .iter()
        .map(|(opened, image)| check_set(&opened.name, image, &references, flags.verbose))
        .collect();
    let foreign_backing_devices = foreign(&sets, &backings);
    let sound = sets.iter().all(CheckedSet::is_sound) && foreign_backing_devices.is_empty();
    let fit = backings.iter().filter(|opened| matches!(opened.role, SuperblockKind::Backing(_)));
    let backing_devices = fit.map(|opened| opened.name.clone()).collect();
    let report = Report::of(&CheckReport { sound, sets, backing_devices, foreign_backing_devices })?;
    let failure = cache_images.iter().map(|(_, image)| image).chain(&images).find_map(Image::failure);
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None if sound => report,
        None => report.answering_no(),
    })
}

/// Returns the backing devices that belong to none of the sets, so that nothing was judged against
/// them. Empty unless all sets are known: a set with a damaged superblock may be theirs.
fn foreign(sets: &[CheckedSet], backings: &[OpenedDevice]) -> Vec<ForeignBacking> {
    let known: Option<Vec<Uuid>> = sets.iter().map(|set| Some(set.set.as_ref()?.set_uuid)).collect();
    let Some(known) = known.filter(|known| !known.is_empty()) else { return Vec::new() };
    let foreign = backings.iter().filter_map(|opened| match opened.role {
        SuperblockKind::Backing(Some(set)) if !known.contains(&set) => {
            Some(ForeignBacking { device: opened.name.clone(), set_uuid: set.to_string() })
        }
        _ => None,
    });
    foreign.collect()
}

/// Opens a device so that no other process can write it meanwhile. Refuses a device without a
/// bcache superblock; a damaged superblock is left to the check to report.
fn open(path: &Path) -> Result<OpenedDevice, Failure> {
    let device = device::open(path, Access::Check)?;
    let role = match superblock::read(&device)? {
        SuperblockProbe::Absent => {
            return Err(Failure::new(Kind::NotBcache, format!("cannot check {}", path.display()))
                .why("it has no bcache superblock"));
        }
        SuperblockProbe::Valid(Superblock::Backing(backing)) => {
            SuperblockKind::Backing((backing.state() != BackingState::None).then(|| backing.set_uuid()))
        }
        SuperblockProbe::Valid(Superblock::Cache(_)) => SuperblockKind::Cache,
        SuperblockProbe::Invalid(_) => SuperblockKind::Invalid,
    };
    Ok(OpenedDevice { name: path.display().to_string(), device, role })
}

fn check_set(device: &str, image: &Image<'_>, backings: &[&dyn ReadAt], verbose: bool) -> CheckedSet {
    let judged = check(image, backings, Options::default());
    let volumes_cut_short = cut_short(&judged);
    let mut report = judged.report;
    // That a backing device belongs to another set is reported once, by the caller, which knows all
    // sets.
    report.findings.retain(|damage| !matches!(damage.kind, DamageKind::OtherSet { .. }));
    report.counts.retain(|count| count.kind != OTHER_SET);
    let note = report.set.as_ref().and_then(|set| notes::left_behind(set.set_uuid));
    if note.is_some() && report.dirty.state == Certainty::Known {
        // The dirty data in the note is not counted anywhere.
        let is_none = report.dirty.sectors + report.dirty.alone_sectors == 0;
        report.dirty.state = if is_none { Certainty::Unknown } else { Certainty::AtLeast };
    }
    let with_backing = |volume: &&Volume| !volume.flash_only && !volume.invalidated;
    let unjudged = report.volumes.iter().filter(with_backing).filter(|volume| volume.state.is_none());
    // Entries of a damaged UUID table are not volumes.
    let is_named =
        |volume: &&Volume| !report.findings.iter().any(|damage| damage.hides_name_of(volume.inode));
    let unjudged = unjudged.filter(is_named);
    let dirty = report.dirty;
    let in_state = |state| (dirty.state == state).then(|| bytes_of(dirty.sectors));
    CheckedSet {
        device: device.to_owned(),
        verdict: wording::verdict(&report),
        damage: wording::groups(&report),
        dirty_state: dirty.state,
        dirty_bytes: in_state(Certainty::Known),
        dirty_bytes_at_least: in_state(Certainty::AtLeast),
        dirty_bytes_of_nobody: Some(bytes_of(dirty.nobodys_sectors)).filter(|bytes| *bytes > 0),
        backing_claims: report.claims,
        hidden: report.hidden,
        volumes_without_backing: unjudged.map(name).collect(),
        volumes_cut_short,
        note,
        set: report.set,
        tree: report.tree,
        findings: report.findings,
        findings_left_out: report.findings_left_out,
        counts: report.counts,
        volumes: report.volumes,
        verbose,
    }
}

/// The name of [`DamageKind::OtherSet`].
const OTHER_SET: &str = "other-set";

/// Returns the volumes with cached data past the end of their backing devices, which were longer
/// once. If that data is dirty, the check has also found an error.
fn cut_short(judged: &CheckResult<'_>) -> Vec<String> {
    let Some(view) = &judged.view else { return Vec::new() };
    let is_cut = |volume: &&Volume| {
        let Some(end) = volume.end.filter(|_| !volume.flash_only && !volume.invalidated) else {
            return false;
        };
        let beyond = Position::MAX.offset.saturating_sub(end);
        let pieces = view.content(Inode(volume.inode), end, beyond);
        pieces.iter().any(|piece| matches!(piece.source, DataSource::Cache { .. }))
    };
    view.volumes().iter().filter(is_cut).map(name).collect()
}

impl CheckedSet {
    fn count(&self, severity: Severity) -> u64 {
        self.counts.iter().filter(|one| one.severity == severity).map(|one| one.count).sum()
    }

    fn is_sound(&self) -> bool {
        self.count(Severity::Error) == 0 && self.findings_left_out == 0
    }

    /// Writes the verdict first, then the findings, grouped by kind. Writing to a string cannot
    /// fail.
    fn write(&self, text: &mut String) -> std::fmt::Result {
        let device = &self.device;
        writeln!(text, "{device}: {}", self.verdict)?;
        for FindingGroup { severity, what, .. } in &self.damage {
            writeln!(text, "{device}: {}: {what}", word(*severity))?;
        }
        if self.verbose {
            for finding in &self.findings {
                writeln!(text, "{device}:   {}: {finding}", word(finding.severity))?;
            }
            if self.findings_left_out > 0 {
                writeln!(text, "{device}:   {} more findings are not listed", self.findings_left_out)?;
            }
        } else if !self.damage.is_empty() {
            writeln!(text, "{device}: -v lists each finding with its place")?;
        }
        for volume in &self.volumes_cut_short {
            writeln!(
                text,
                "{device}: warning: data of {volume} is cached behind the end of its backing device: was the device cut short?"
            )?;
        }
        self.write_unjudged(text)
    }

    /// Writes what this check has not judged.
    fn write_unjudged(&self, text: &mut String) -> std::fmt::Result {
        if !self.volumes_without_backing.is_empty() {
            let volumes = self.volumes_without_backing.join(", ");
            let what = "not compared with their backing devices, which are not named (--backing)";
            writeln!(text, "{}: {what}: {volumes}", self.device)?;
        }
        if let Some(note) = &self.note {
            let what = "a killed bcached left a note, which may hold acknowledged writes that are not on the devices";
            let next = "serve the set once before anything else uses it, and before a reboot";
            writeln!(text, "{}: {what}: {}; {next}", self.device, note.display())?;
        }
        Ok(())
    }
}

const fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

impl Printable for CheckReport {
    const SCHEMA: &'static str = "bcached.check";
    /// 2: kinds of findings are in kebab-case.
    const SCHEMA_VERSION: u32 = 2;

    fn text(&self) -> String {
        let mut text = String::new();
        for set in &self.sets {
            let _ = set.write(&mut text);
        }
        for foreign in &self.foreign_backing_devices {
            let ForeignBacking { device, set_uuid } = foreign;
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
